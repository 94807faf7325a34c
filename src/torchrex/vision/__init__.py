"""Image models of the paper, their data and their augmentation."""

from torchrex.vision.augment import Augment, Erasing, Normalise, evaluation_batches
from torchrex.vision.data import ImageSet, fetch_images, import_images, load_images
from torchrex.vision.nets import (
    NETS,
    ResNet,
    WideResNet,
    build_net,
    resnet20,
    resnet32,
    resnet56,
    wrn_16_8,
    wrn_28_10,
)

__all__ = [
    "NETS",
    "Augment",
    "Erasing",
    "ImageSet",
    "Normalise",
    "ResNet",
    "WideResNet",
    "build_net",
    "evaluation_batches",
    "fetch_images",
    "import_images",
    "load_images",
    "resnet20",
    "resnet32",
    "resnet56",
    "wrn_16_8",
    "wrn_28_10",
]
