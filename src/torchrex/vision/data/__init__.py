"""Image sets: CIFAR-10, CIFAR-100 and SVHN from a checked cache, and how to divide them."""

from torchrex.vision.data.cache import (
    ImageSet,
    cache_path,
    data_folder,
    label_subset,
    load_images,
    read_about,
    save_images,
    stratified_split,
    stratified_subset,
)
from torchrex.vision.data.importing import fetch_images, import_images

__all__ = [
    "ImageSet",
    "cache_path",
    "data_folder",
    "fetch_images",
    "import_images",
    "label_subset",
    "load_images",
    "read_about",
    "save_images",
    "stratified_split",
    "stratified_subset",
]
