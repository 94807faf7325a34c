"""Residual networks for 32 x 32 images (He et al. 2016), in the form the paper's authors used.

Widths 16-32-64; where a block changes the shape its shortcut is a 1x1 convolution with BatchNorm; He fan-out initialisation. With
10 classes ResNet-20 has 272,474 parameters and ResNet-32 466,906.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.vision.narrow_conv import NarrowConv2d


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = NarrowConv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = NarrowConv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of `n_blocks` basic blocks: depth 6 n + 2."""

    def __init__(self, n_blocks: int, n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = NarrowConv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks: list[nn.Module] = []
        width_in = 16
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for k in range(n_blocks):
                blocks.append(BasicBlock(width_in, width, stride if k == 0 else 1))
                width_in = width
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


def resnet20(n_classes: int = 10) -> ResNet:
    return ResNet(3, n_classes)


def resnet32(n_classes: int = 10) -> ResNet:
    return ResNet(5, n_classes)
