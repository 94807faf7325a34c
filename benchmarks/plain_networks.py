"""Two networks that are not ours, for images of 32 x 32 pixels: a ResNet-18 and a small vision
transformer, in plain layers of torch.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """Widths of 64 to 512, and a 3x3 convolution as the first layer: 11,173,962 parameters."""

    def __init__(self, width: int = 64, n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for k, (width_in, width_out) in enumerate(itertools.pairwise(widths)):
            blocks += [
                Block(width_in, width_out, 1 if k == 0 else 2),
                Block(width_out, width_out, 1),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(widths[-1], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.linear(features.mean((2, 3)))
        return logits


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        split = self.qkv(x).view(images, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(images, tokens, width))
        return attended


class Layer(nn.Module):
    """Attention and two linear layers, each with LayerNorm before it and a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        updated: Tensor = x + self.mlp(self.norm2(x))
        return updated


class VisionTransformer(nn.Module):
    """Patches of 4 x 4 pixels, so 64 tokens; their mean is classified: 2,693,194 parameters."""

    def __init__(
        self, width: int = 192, depth: int = 6, heads: int = 3, n_classes: int = 10
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.linear(self.norm(self.layers(tokens)).mean(1))
        return logits
