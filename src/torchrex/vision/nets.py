"""Residual networks for 32 x 32 images, in the form of the paper's authors, and their names.

Residual networks (He et al. 2016) have widths 16-32-64. Where a block changes the shape, its
shortcut is a 1x1 convolution with BatchNorm. With 10 classes:

    resnet20, resnet32    3 and 5 basic blocks per stage         272,474 and 466,906 parameters
    resnet56              9 bottleneck blocks per stage          869,530
    resnet56_basic        9 basic blocks per stage               855,770

The authors' "ResNet-56" is the third: they counted blocks as if they were basic ones, (56 - 2) / 6
= 9, so that it is 83 layers deep. With (56 - 2) / 9 = 6 blocks it would have 591,322 parameters.

Wide residual networks WRN-d-k (Zagoruyko & Komodakis 2016) are k times as wide, without dropout.
BatchNorm and ReLU come before each convolution and before the classifier; the shortcut is a 1x1
convolution of the activated input. WRN-16-8 has 10,961,370 parameters, WRN-28-10 36,479,194.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError, require_whole
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
    """Convolutions 1x1 to `width` channels, 3x3 with the stride, 1x1 to 4 `width`; a shortcut."""

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
    """Three stages of `n_blocks` blocks: depth 6 n + 2, or 9 n + 2 with bottlenecks."""

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
        initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        features: Tensor = self.blocks(x)
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


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
            raise InvalidArgumentError(f"depth must be 6 n + 4, like 10, 16 or 28, got {depth!r}")
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
        initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.bn(self.blocks(self.conv1(x))))
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


def initialise_convolutions(network: nn.Module) -> None:
    """He fan-out initialisation."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


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
    """What everyone else calls ResNet-56, except for the projections."""
    return ResNet(9, n_classes)


def wrn_16_8(n_classes: int = 10) -> WideResNet:
    return WideResNet(16, 8, n_classes)


def wrn_28_10(n_classes: int = 10) -> WideResNet:
    return WideResNet(28, 10, n_classes)


NETS: dict[str, Callable[[int], nn.Module]] = {  # each takes the number of classes
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet56": resnet56,  # the authors', with bottlenecks
    "resnet56-basic": resnet56_basic,
    "wrn-16-8": wrn_16_8,
    "wrn-28-10": wrn_28_10,
}


def build_net(name: str, n_classes: int) -> nn.Module:
    """A new network with random weights from torch's own generator."""
    if name not in NETS:
        near = difflib.get_close_matches(str(name).lower(), NETS, n=1, cutoff=0.3)
        advice = f"did you mean {near[0]!r}? There" if near else "there"
        raise InvalidArgumentError(f"no network is called {name!r}; {advice} are {', '.join(NETS)}")
    require_whole("n_classes", n_classes, 1)
    return NETS[name](n_classes)
