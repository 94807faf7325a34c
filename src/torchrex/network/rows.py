"""All trainable parameters of a module in one row of numbers, so that a move is one pass over one
tensor.

The module's parameters become views into the row. Tied weights are one parameter and are there
once; frozen ones stay out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrex.errors import TargetError
from torchrex.network.randomness import keys_of
from torchrex.rng import derive_seed
from torchrex.samplers import Sampler, State, named_tensors

# Numbers: parameters of such sizes come first, so that nearly all begin where vector loads can.
ALIGNED = 16


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter lies in the row."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    channels_last: tuple[bool, ...]
    dtype: torch.dtype

    @staticmethod
    def of(
        module: nn.Module, *, channels_last: bool, only: Callable[[str], bool] = lambda name: True
    ) -> FlatLayout:
        """Of the trainable parameters with names that are wanted."""
        named = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and only(name)
        }
        if not named:
            raise TargetError(
                f"{type(module).__name__} has no parameter that requires a gradient, "
                "so there is nothing to sample"
            )
        for name, parameter in named.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise TargetError(
                    f"parameter {name} has no shape yet: run one batch through the model first"
                )
        dtypes = {parameter.dtype: name for name, parameter in named.items()}
        advice = "convert the model (model.float()) and use autocast=torch.bfloat16 for speed"
        if len(dtypes) > 1:
            listed = ", ".join(
                f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items()
            )
            raise TargetError(
                f"all trainable parameters must have one dtype, but {listed}; {advice}"
            )
        (dtype,) = dtypes
        if dtype not in (torch.float32, torch.float64):
            raise TargetError(
                f"parameters must be float32 or float64, got {dtype}: a sampler's small steps "
                f"vanish in fewer digits; {advice}"
            )
        # A stable sort: otherwise the order is the module's.
        ordered = sorted(named.items(), key=lambda item: item[1].numel() % ALIGNED != 0)
        return FlatLayout(
            tuple(name for name, _ in ordered),
            tuple(tuple(parameter.shape) for _, parameter in ordered),
            tuple(channels_last and parameter.ndim == 4 for _, parameter in ordered),
            dtype,
        )

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))

    def empty_rows(self, n: int, device: torch.device) -> Tensor:
        """(n, size) of zeros, each row beginning at an aligned address."""
        stride = -(-self.size // 64) * 64
        return torch.zeros(n, stride, dtype=self.dtype, device=device)[:, : self.size]

    def filled(self, value_of: Callable[[str], float], device: torch.device) -> Tensor:
        """A row with the value of its parameter at every place."""
        row = self.empty_rows(1, device)[0]
        for name, view in self.views(row).items():
            view.fill_(value_of(name))
        return row

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """The row's parameters by name, in their shapes and without copying."""
        views, begin = {}, 0
        for name, shape, last in zip(self.names, self.shapes, self.channels_last, strict=True):
            part = row[begin : begin + math.prod(shape)]
            if last:
                out, into, height, width = shape
                views[name] = part.view(out, height, width, into).permute(0, 3, 1, 2)
            else:
                views[name] = part.view(shape)
            begin += math.prod(shape)
        return views

    def gather(self, tensors: Sequence[Tensor | None], row: Tensor) -> None:
        """Write gradients, None meaning 0, into the row, in few kernels."""
        parts = []
        for tensor, shape, last in zip(tensors, self.shapes, self.channels_last, strict=True):
            given = row.new_zeros(shape) if tensor is None else tensor
            parts.append((given.permute(0, 2, 3, 1) if last else given).reshape(-1))
        if row.is_cuda:  # where one tensor is far larger than the others a kernel of cat is slow
            places = torch.split(row, [len(part) for part in parts])
            torch._foreach_copy_(list(places), parts)
        else:
            torch.cat(parts, out=row)


@dataclass(frozen=True)
class Rows:
    """Positions, gradients and the sampler's state of some rows; every tensor is (rows, size)."""

    layout: FlatLayout
    position: Tensor
    gradient: Tensor  # one row for each replica that has a gradient of the row
    state: State
    precision: Tensor | float | None  # of a Gaussian prior: for all numbers, or for each of a row
    lr_factor: Tensor | None  # of each number of a row; 0 where nothing may move
    streams: tuple[str, ...]  # of the rows' noise, by name
    keys: Tensor  # (rows, 2): of the counted noise

    @staticmethod
    def of(
        layout: FlatLayout,
        sampler: Sampler,
        *,
        device: torch.device,
        gradients: int,
        precision_of: Callable[[str], float] | None,
        lr_factor_of: Callable[[str], float],
        padding: Mapping[str, int],
        streams: Sequence[str],
        seed: int,
    ) -> Rows:
        """Rows of zeros, one for each stream of noise."""
        n = len(streams)
        position = layout.empty_rows(n, device)
        at_rest = sampler.first_state(position)
        state = type(at_rest)(*(layout.empty_rows(n, device).copy_(each) for each in at_rest))
        precision: Tensor | float | None = None
        if precision_of is not None:
            values = set(map(precision_of, layout.names))
            more = len(values) > 1
            precision = layout.filled(precision_of, device) if more else values.pop() or None
        factors = layout.filled(lr_factor_of, device)
        for name, view in layout.views(factors).items():
            if name in padding:
                view[padding[name]] = 0.0
        lr_factor = None if bool(factors.eq(1.0).all()) else factors
        gradient = layout.empty_rows(gradients, device)
        keys = torch.zeros(n, 2, dtype=torch.int64, device=device)
        own = (layout, position, gradient, state, precision, lr_factor)
        rows = Rows(*own, tuple(streams), keys)
        rows.take_seed(seed)
        return rows

    def take_seed(self, seed: int) -> None:
        """The counted noise of that seed, in place, because a captured step may read the keys."""
        seeds = [derive_seed(seed, name) for name in self.streams]
        self.keys.copy_(keys_of(seeds, self.keys.device))

    def parts_of(self, k: int) -> dict[str, dict[str, Tensor]]:
        """A row's numbers by name, not copied: `parameters`, and the sampler's own names."""
        parts = {"parameters": self.position, **named_tensors(self.state)}
        return {part: self.layout.views(rows[k]) for part, rows in parts.items()}
