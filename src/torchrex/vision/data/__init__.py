"""Image sets: CIFAR-10, CIFAR-100 and SVHN from a checked cache, how they get there, and how to
divide them.
"""

from torchrex.vision.data.cache import ImageSet, data_folder, load_images, save_images
from torchrex.vision.data.download import fetch_images
from torchrex.vision.data.importing import import_images
from torchrex.vision.data.splits import label_subset, stratified_split, stratified_subset

__all__ = [
    "ImageSet",
    "data_folder",
    "fetch_images",
    "import_images",
    "label_subset",
    "load_images",
    "save_images",
    "stratified_split",
    "stratified_subset",
]
