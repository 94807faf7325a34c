"""Residual networks for 32 x 32 images (He et al. 2016), in the form the paper's authors used.

Widths 16-32-64; where a block changes the shape its shortcut is a 1x1 convolution with BatchNorm;
He fan-out initialisation. With 10 classes:

    resnet20, resnet32    3 and 5 basic blocks per stage         272,474 and 466,906 parameters
    resnet56              9 bottleneck blocks per stage          869,530
    resnet56_basic        9 basic blocks per stage               855,770 (853,018 if the shortcuts had no parameters)

The authors' "ResNet-56" is the third: they counted blocks as if they were basic ones, (56 - 2) / 6
= 9, so that it is 83 layers deep. With (56 - 2) / 9 = 6 blocks it would have 591,322 parameters.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.vision.narrow_conv import NarrowConv2d


def shortcut(width_in: int, width_out: int, stride: int) -> nn.Module:
    """The identity where it fits, else a projection."""
    if stride == 1 and width_in == width_out:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1  # channels out per channel of its width

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = NarrowConv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = NarrowConv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 1x1 convolution to `width` channels, a 3x3 one, which has the stride, a 1x1 one to four
    times as many, and a shortcut.
    """

    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        width_out = self.expansion * width
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = NarrowConv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width_out)
        self.shortcut = shortcut(width_in, width_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of `n_blocks` blocks: depth 6 n + 2 with basic ones, 9 n + 2 with bottlenecks."""

    def __init__(
        self,
        n_blocks: int,
        n_classes: int = 10,
        *,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
    ) -> None:
        super().__init__()
        self.conv1 = NarrowConv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        width_in = 16
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for k in range(n_blocks):
                blocks.append(block(width_in, width, stride if k == 0 else 1))
                width_in = block.expansion * width
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(width_in, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        features: Tensor = self.blocks(x)
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


def resnet8(n_classes: int = 10) -> ResNet:
    """For tests and trials on a CPU."""
    return ResNet(1, n_classes)


def resnet20(n_classes: int = 10) -> ResNet:
    return ResNet(3, n_classes)


def resnet32(n_classes: int = 10) -> ResNet:
    return ResNet(5, n_classes)


def resnet56(n_classes: int = 10) -> ResNet:
    """What the authors call ResNet-56: 83 layers, with bottlenecks."""
    return ResNet(9, n_classes, block=Bottleneck)


def resnet56_basic(n_classes: int = 10) -> ResNet:
    """What everyone else calls ResNet-56, but for the projections."""
    return ResNet(9, n_classes)
