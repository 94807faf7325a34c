"""Wide residual networks WRN-d-k (Zagoruyko & Komodakis 2016): pre-activation blocks, k times as
wide, no dropout.

BatchNorm and ReLU come before each convolution, and before the classifier. Where a block changes
the shape its shortcut is a 1x1 convolution of the activated input, without BatchNorm. He fan-out
initialisation. With 10 classes WRN-16-8 has 10,961,370 parameters and WRN-28-10 36,479,194.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError


class WideBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, activated before and not after."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.projection: nn.Conv2d | None = None
        if stride != 1 or width_in != width:
            self.projection = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        y: Tensor = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return y + (x if self.projection is None else self.projection(activated))


class WideResNet(nn.Module):
    """Three stages of (depth - 4) / 6 blocks, of 16, 32 and 64 times `widening` channels."""

    def __init__(self, depth: int, widening: int, n_classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise InvalidArgumentError(
                f"depth must be 6 n + 4, like 10, 16, 22 or 28, got {depth!r}"
            )
        if widening < 1:
            raise InvalidArgumentError(f"widening must be at least 1, got {widening!r}")
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        width_in = 16
        for width, stride in ((16 * widening, 1), (32 * widening, 2), (64 * widening, 2)):
            for k in range((depth - 4) // 6):
                blocks.append(WideBlock(width_in, width, stride if k == 0 else 1))
                width_in = width
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(width_in)
        self.linear = nn.Linear(width_in, n_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.bn(self.blocks(self.conv1(x))))
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


def wrn_16_8(n_classes: int = 10) -> WideResNet:
    return WideResNet(16, 8, n_classes)


def wrn_28_10(n_classes: int = 10) -> WideResNet:
    return WideResNet(28, 10, n_classes)
