"""Image models of the paper."""

from torchrex.vision.resnet import ResNet, resnet20, resnet32

__all__ = ["ResNet", "resnet20", "resnet32"]
