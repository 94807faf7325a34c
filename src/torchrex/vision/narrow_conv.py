"""Kernels for 3x3 convolutions of few channels on an H200; cuDNN's are slow for 16 channels.

Two neighbouring pixels of a row are computed together, from the four pixels around them. Such a
window is contiguous in a channels-last tensor, and makes matrices wide enough for the tensor cores,
although a quarter of the products are with zeros.

    pair (2 out)              = sum over 3 rows of   window (4 in) @ taps (4 in, 2 out)
    products (4 in, 2 out)    = sum over pairs of    window^T @ gradient of the pair

The weight gradient is a sum of these products. The input gradient is the forward with turned
weights. Sums are made in float32 in an order that depends on the shapes alone, so that results
repeat bit for bit. Microseconds in bfloat16 at batch
256, cuDNN (with the cast of weights that it needs) -> here, on an H200 with torch 2.11, in a
captured graph, tensors larger than the cache; 1 to 3 less on both sides if in the cache:

    channels, image        forward     input gradient    weight gradient
    3 to 16, 32 x 32       43 -> 9     (cuDNN)           65 -> 13
    16 to 16, 32 x 32      37 -> 11    44 -> 12          55 -> 12
    32 to 32, 16 x 16      13 -> 10    15 -> 10          29 -> 13

Reading and writing each tensor once would take 4. The rest is latency, not bytes: kernels that go
down the rows of an image with their sums in registers read half as much and are no faster.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError:
    triton = None


class Launch(NamedTuple):
    """Measured and then fixed: a choice at run time would give processes different sums."""

    block: int  # pairs of pixels at a time
    programs: int  # at most so many, which share the blocks
    warps: int
    stages: int


PLANS = {  # channels in and out: forward and input gradient, weight gradient
    (3, 16): (Launch(64, 1056, 4, 1), Launch(128, 256, 4, 1)),
    (16, 16): (Launch(64, 264, 4, 3), Launch(64, 256, 4, 3)),
    (32, 32): (Launch(128, 132, 8, 1), Launch(64, 128, 8, 3)),
}


class Shape(NamedTuple):
    """What the kernels are compiled for."""

    H: int
    HALF: int  # pairs in a row
    CI: int
    CO: int
    SPAN: int  # numbers in a row of a window, with padding
    COLUMNS: int  # numbers in a tile of windows: one row of a window, or all of it for 3 channels
    TILES: int

    @staticmethod
    def of(x: Tensor, channels_out: int) -> Shape:
        _, channels, height, width = x.shape
        span, columns, tiles = (16, 64, 1) if channels == 3 else (4 * channels, 4 * channels, 3)
        return Shape(height, width // 2, channels, channels_out, span, columns, tiles)


if triton is not None:

    @triton.jit
    def windows(x, pair, down, n_pairs, S: tl.constexpr):
        """(pairs, COLUMNS): the four pixels around each pair, from `down` rows below it on."""
        column = tl.arange(0, S.COLUMNS)
        row, place = down + column // S.SPAN, column % S.SPAN
        at, pixel = (pair // S.HALF % S.H)[:, None] + row[None, :], (place // S.CI)[None, :]
        left, right = (pair % S.HALF == 0)[:, None], (pair % S.HALF == S.HALF - 1)[:, None]
        inside = (
            (at >= 0)
            & (at < S.H)
            & (pair < n_pairs)[:, None]
            & ~(left & (pixel == 0))
            & ~(right & (pixel == 3))
        )
        if S.TILES == 1:
            inside = inside & (place < 4 * S.CI)[None, :] & (row < 2)[None, :]
        where = pair[:, None] * (2 * S.CI) + (row * (2 * S.HALF * S.CI) + place - S.CI)[None, :]
        return tl.load(x + where, mask=inside, other=0.0)

    @triton.jit
    def pairs(dy, pair, down, n_pairs, S: tl.constexpr):
        """(pairs, 2 CO): the pairs `down` rows below."""
        row = pair // S.HALF % S.H + down
        where = (
            pair[:, None] * (2 * S.CO)
            + (down * (2 * S.HALF * S.CO) + tl.arange(0, 2 * S.CO))[None, :]
        )
        return tl.load(
            dy + where, mask=((row >= 0) & (row < S.H) & (pair < n_pairs))[:, None], other=0.0
        )

    @triton.jit
    def taps(w, tile, S: tl.constexpr, STRIDES: tl.constexpr):
        """(COLUMNS, 2 CO): the weights from each number of a window to each number of its pair."""
        column, out = tl.arange(0, S.COLUMNS)[:, None], tl.arange(0, 2 * S.CO)[None, :]
        row, place = tile + column // S.SPAN, column % S.SPAN
        tap = place // S.CI - out // S.CO
        where = (
            out % S.CO * STRIDES[0]
            + place % S.CI * STRIDES[1]
            + row * STRIDES[2]
            + tap * STRIDES[3]
        )
        return tl.load(w + where, mask=(tap >= 0) & (tap < 3) & (row < 3), other=0.0).to(
            tl.bfloat16
        )

    @triton.jit
    def forward_kernel(
        x,
        w,
        y,
        n_pairs,
        n_programs,
        S: tl.constexpr,
        STRIDES: tl.constexpr,
        START: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        w0 = taps(w + START, 0, S, STRIDES)
        if S.TILES == 3:
            w1, w2 = taps(w + START, 1, S, STRIDES), taps(w + START, 2, S, STRIDES)
        for block in range(tl.program_id(0), tl.cdiv(n_pairs, BLOCK), n_programs):
            pair = block * BLOCK + tl.arange(0, BLOCK)
            above = windows(x, pair, -1, n_pairs, S)
            if S.TILES == 3:
                level, below = windows(x, pair, 0, n_pairs, S), windows(x, pair, 1, n_pairs, S)
                total = tl.dot(below, w2, tl.dot(level, w1, tl.dot(above, w0)))
            else:
                total = tl.dot(above, w0)
            where = pair[:, None] * (2 * S.CO) + tl.arange(0, 2 * S.CO)[None, :]
            tl.store(y + where, total.to(tl.bfloat16), mask=(pair < n_pairs)[:, None])

    @triton.jit
    def products_kernel(x, dy, products, n_pairs, n_programs, S: tl.constexpr, BLOCK: tl.constexpr):
        """products (programs, TILES, COLUMNS, 2 CO): windows times pairs, summed by program."""
        COLUMNS: tl.constexpr = S.COLUMNS
        WIDTH: tl.constexpr = 2 * S.CO
        total0 = tl.zeros((COLUMNS, WIDTH), tl.float32)
        total1, total2 = total0, total0
        for block in range(tl.program_id(0), tl.cdiv(n_pairs, BLOCK), n_programs):
            pair = block * BLOCK + tl.arange(0, BLOCK)
            if S.TILES == 1:  # the tile holds the windows of all rows
                window = tl.trans(windows(x, pair, -1, n_pairs, S))
                total0 = tl.dot(window, pairs(dy, pair, 0, n_pairs, S), total0)
            else:  # the pairs that look at this row are one row below, level and above
                window = tl.trans(windows(x, pair, 0, n_pairs, S))
                total0 = tl.dot(window, pairs(dy, pair, 1, n_pairs, S), total0)
                total1 = tl.dot(window, pairs(dy, pair, 0, n_pairs, S), total1)
                total2 = tl.dot(window, pairs(dy, pair, -1, n_pairs, S), total2)
        first = tl.program_id(0) * (S.TILES * COLUMNS * WIDTH)
        where = first + tl.arange(0, COLUMNS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(products + where, total0)
        if S.TILES == 3:
            tl.store(products + where + COLUMNS * WIDTH, total1)
            tl.store(products + where + 2 * COLUMNS * WIDTH, total2)

    @triton.jit
    def sum_kernel(
        products,
        dw,
        n_programs,
        S: tl.constexpr,
        STRIDES: tl.constexpr,
        TOGETHER: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """dw[co, ci, r, s]: pixel s by the first of a pair and s + 1 by the second, summed."""
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        co, ci = number % S.CO, number // S.CO % S.CI
        tap, row = number // (S.CO * S.CI) % 3, number // (3 * S.CO * S.CI)
        where = (row * S.SPAN + tap * S.CI + ci) * (2 * S.CO) + co
        total = tl.zeros((TOGETHER, BLOCK), tl.float32)
        for first in range(0, n_programs, TOGETHER):
            program = first + tl.arange(0, TOGETHER)[:, None]
            here = products + program * (S.TILES * S.COLUMNS * 2 * S.CO) + where[None, :]
            known = (program < n_programs) & (row < 3)[None, :]
            total += tl.load(here, mask=known, other=0.0) + tl.load(
                here + (2 * S.CI + 1) * S.CO, mask=known, other=0.0
            )
        to = co * STRIDES[0] + ci * STRIDES[1] + row * STRIDES[2] + tap * STRIDES[3]
        tl.store(dw + to, tl.sum(total, 0), mask=row < 3)


def images_like(x: Tensor, channels: int) -> Tensor:
    shape = (x.shape[0], channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def convolve(x: Tensor, weight: Tensor, plan: Launch, *, turned: bool = False) -> Tensor:
    """The forward, or with `turned` weights, in and out exchanged, the input gradient."""
    out, into, row, column = weight.stride()
    strides, start, channels = (out, into, row, column), 0, weight.shape[0]
    if turned:
        strides, start, channels = (into, out, -row, -column), 2 * (row + column), weight.shape[1]
    x = x.contiguous(memory_format=torch.channels_last)
    y = images_like(x, channels)
    n_pairs = y.numel() // channels // 2
    programs = min(plan.programs, -(-n_pairs // plan.block))
    shape, options = Shape.of(x, channels), {"num_warps": plan.warps, "num_stages": plan.stages}
    with torch.cuda.device(x.device):
        forward_kernel[(programs,)](
            x, weight, y, n_pairs, programs, shape, strides, start, plan.block, **options
        )
    return y


def correlate(x: Tensor, dy: Tensor, weight: Tensor, plan: Launch) -> Tensor:
    """The weight gradient, in the dtype and memory order of the weight."""
    x = x.contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous(memory_format=torch.channels_last)
    shape = Shape.of(x, len(weight))
    n_pairs = dy.numel() // len(weight) // 2
    programs = min(plan.programs, -(-n_pairs // plan.block))
    products = torch.empty(
        (programs, shape.TILES, shape.COLUMNS, 2 * shape.CO), dtype=torch.float32, device=x.device
    )
    dw = torch.empty_like(weight)
    with torch.cuda.device(x.device):
        options = {"num_warps": plan.warps, "num_stages": plan.stages}
        products_kernel[(programs,)](
            x, dy, products, n_pairs, programs, shape, plan.block, **options
        )
        sum_kernel[(-(-dw.numel() // 16),)](
            products, dw, programs, shape, dw.stride(), 128, 16, num_warps=4
        )
    return dw


@torch.library.custom_op(
    "torchrex::narrow_conv",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor weight) -> Tensor",
)
def narrow_conv(x: Tensor, weight: Tensor) -> Tensor:
    """A 3x3 convolution of bfloat16 x, padded by one, with `weight` rounded to bfloat16.

    Its gradient has no gradient.
    """
    return convolve(x, weight, PLANS[weight.shape[1], weight.shape[0]][0])


@torch.library.custom_op(
    "torchrex::narrow_conv_input",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor dy, Tensor w) -> Tensor",
)
def narrow_conv_input(dy: Tensor, w: Tensor) -> Tensor:
    return convolve(dy, w, PLANS[w.shape[1], w.shape[0]][0], turned=True)


@torch.library.custom_op(
    "torchrex::narrow_conv_weight",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor dy, Tensor weight) -> Tensor",
)
def narrow_conv_weight(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    return correlate(x, dy, weight, PLANS[weight.shape[1], weight.shape[0]][1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0] and weight.shape[1] == weight.shape[0]:
        dx = narrow_conv_input(dy, weight)
    elif ctx.needs_input_grad[0]:
        options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        dx = torch.ops.aten.convolution_backward(dy, x, weight.to(x.dtype), *options)[0]
    if ctx.needs_input_grad[1]:
        dw = narrow_conv_weight(x, dy, weight)
    return dx, dw


narrow_conv.register_fake(lambda x, weight: images_like(x, weight.shape[0]))
narrow_conv_input.register_fake(lambda dy, w: images_like(dy, w.shape[1]))
narrow_conv_weight.register_fake(lambda x, dy, weight: torch.empty_like(weight))
narrow_conv.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class NarrowConv2d(nn.Conv2d):
    """nn.Conv2d that uses the kernels of this file where they fit, and torch's own elsewhere.

    They fit 3x3 kernels without bias, stride 1 and padding 1, 3 to 16, 16 to 16 or 32 to
    32 channels, on channels-last images of even width in bfloat16 or under autocast to it, on a
    Hopper GPU with Triton. Parameters and state dict are the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self._fits(x):
            convolved: Tensor = narrow_conv(x.to(torch.bfloat16), self.weight)
            return convolved
        return super().forward(x)

    def _fits(self, x: Tensor) -> bool:
        """Whether the kernels of this file are made for this layer, this input and this device."""
        if triton is None or not (x.is_cuda and self.weight.is_cuda):
            return False
        if x.ndim != 4 or not x.numel() or not x.is_contiguous(memory_format=torch.channels_last):
            return False
        if torch.cuda.get_device_properties(x.device).major != 9:
            return False
        window = (self.kernel_size, self.stride, self.padding, self.dilation)
        layer = (*window, self.groups, self.padding_mode, self.bias is None)
        if layer != ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros", True):
            return False
        n_out = x.numel() // x.shape[1] * self.out_channels
        if x.shape[1] != self.in_channels or x.shape[3] % 2 or n_out >= 2**31:
            return False
        if (self.in_channels, self.out_channels) not in PLANS:
            return False
        if not torch.is_autocast_enabled("cuda"):
            return x.dtype == self.weight.dtype == torch.bfloat16
        known = (torch.bfloat16, torch.float32)
        autocasts = torch.get_autocast_dtype("cuda") == torch.bfloat16
        return autocasts and x.dtype in known and self.weight.dtype in known
