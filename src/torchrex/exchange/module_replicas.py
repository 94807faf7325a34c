"""The replicas of this process: their modules, and the rows of numbers that all their parameters are views of.

A row can be moved, copied, saved and sent whole, whatever the module looks like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from torchrex.distributed import ReplicaMesh
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.exchange.flat import FlatLayout
from torchrex.exchange.rows import Rows
from torchrex.rng import Streams, derive_seed

Model = nn.Module | Callable[[], nn.Module]
Tensors = dict[str, dict[str, Tensor]]  # by part of a replica, then by name


class ModuleReplicas:
    """Modules and rows, built from a seed; `ModuleEnsemble` says what is done with them."""

    mesh: ReplicaMesh
    rows: Rows  # a row for each replica of this process
    common: Rows | None  # one row for what is the same in all of them, with a gradient from each
    modules: list[nn.Module]
    device: torch.device
    shared: tuple[str, ...]  # parts of names
    _model: Model
    initial: Literal["identical", "independent"]
    _device: torch.device | str | None
    _channels_last: bool
    _parameters: list[list[nn.Parameter]]  # of each replica, in the order of its row and then of the common one

    @property
    def layout(self) -> FlatLayout:
        return self.rows.layout

    @property
    def position(self) -> Tensor:
        return self.rows.position

    @property
    def gradient(self) -> Tensor:
        return self.rows.gradient

    @property
    def velocity(self) -> Tensor | None:
        return self.rows.velocity

    @property
    def squares(self) -> Tensor | None:
        return self.rows.squares

    def hold(self, streams: Streams, *, momenta: bool, squares: bool) -> list[nn.Module]:
        """Build the replicas of this process, and rows for them."""
        modules = self._build(streams)
        if not any(True for _ in modules[0].parameters()):
            raise TargetError(f"{type(modules[0]).__name__} has no parameters, so there is nothing to sample")
        if self._device is not None:
            modules = [module.to(self._device) for module in modules]
        if self._channels_last:
            modules = [module.to(memory_format=torch.channels_last) for module in modules]  # type: ignore[call-overload]
        self.device, n = next(modules[0].parameters()).device, len(modules)
        if self.shared:
            self._require_some_shared(modules[0])
        own = FlatLayout.of(modules[0], channels_last=self._channels_last, only=lambda name: not self.is_shared(name))
        self.rows = Rows.of(own, n, self.device, gradients=n, momenta=momenta, squares=squares)
        self.common = None
        if self.shared:
            common = FlatLayout.of(modules[0], channels_last=self._channels_last, only=self.is_shared)
            self.common = Rows.of(common, 1, self.device, gradients=n, momenta=momenta, squares=squares)
        self._parameters = [self._adopt(replica, module) for replica, module in enumerate(modules)]
        for module in modules[1:] if self.shared else []:  # statistics and frozen weights too: they are in no row
            first = {**dict(modules[0].named_parameters()), **dict(modules[0].named_buffers())}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if self.is_shared(name):
                    tensor.data.copy_(first[name].data)
        return modules

    def _build(self, streams: Streams) -> list[nn.Module]:
        mine = self.mesh.mine
        if isinstance(self._model, nn.Module):
            return [copy.deepcopy(self._model) for _ in mine]
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(streams.seed, "initial"))
            # Those of other processes are made too, for the random numbers that they take, but not kept.
            n_made = mine.stop if self.initial == "independent" else 1
            made = [
                module for replica, module in enumerate(self._model() for _ in range(n_made)) if replica in mine or n_made == 1
            ]
        if not all(isinstance(module, nn.Module) for module in made):
            raise InvalidArgumentError(f"model must make an nn.Module, but made {type(made[0]).__name__}")
        return made if len(made) == len(mine) else [*made, *(copy.deepcopy(made[0]) for _ in mine[1:])]

    def is_shared(self, name: str) -> bool:
        """Is that the name of a parameter or a buffer that all replicas have in common?"""
        return any(part in name for part in self.shared)

    def _require_some_shared(self, module: nn.Module) -> None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        n_shared = sum(map(self.is_shared, names))
        if 0 < n_shared < len(names):
            return
        some = ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
        how_many = "all parameters, so that nothing is left to sample" if n_shared else "no parameter"
        raise InvalidArgumentError(f"shared={self.shared} names {how_many}; those of the model are {some}")

    def _adopt(self, replica: int, module: nn.Module) -> list[nn.Parameter]:
        """Move a module's parameters into its row, of which they are views from now on; the common row begins as the first's."""
        named = dict(module.named_parameters())
        views = self.layout.views(self.position[replica])
        common = {} if self.common is None else self.common.layout.views(self.common.position[0])
        if {name for name, p in named.items() if p.requires_grad} != {*views, *common}:
            raise TargetError("the model function makes modules with different parameters; all replicas must be alike")
        for name, view in {**views, **common}.items():
            if named[name].shape != view.shape:
                raise TargetError(f"the model function makes modules of different sizes, in {name}; all replicas must be alike")
            if name in views or replica == 0:
                view.copy_(named[name].detach())
            named[name].data = view
        return [named[name] for name in (*views, *common)]

    def tensors_of(self, k: int) -> Tensors:
        """Weights, all buffers, frozen weights and momentum, not copied, of the k-th replica of this process.

        What all replicas have in common is among those of the first.
        """
        parts = self.rows.parts_of(k)
        common = self.common.parts_of(0) if self.common is not None and k == 0 else {}
        return {
            **{part: {**tensors, **common.get(part, {})} for part, tensors in parts.items()},
            "buffers": dict(self.modules[k].named_buffers()),
            "frozen": {name: p.data for name, p in self.modules[k].named_parameters() if not p.requires_grad},
        }

    def load_tensors(self, states: list[Tensors]) -> None:
        """Overwrite the replicas of this process with tensors of that form, after all of them were found to fit."""
        for k, state in enumerate(states):
            for part, tensors in self.tensors_of(k).items():
                given = state.get(part, {})
                wrong = [name for name in {*given, *tensors} if name not in given or name not in tensors]
                wrong += [name for name in tensors if not wrong and given[name].shape != tensors[name].shape]
                if wrong:
                    raise InvalidArgumentError(f"the state is that of another model: its {part} differ, for example {wrong[0]!r}")
        for k, state in enumerate(states):
            for part, tensors in self.tensors_of(k).items():
                for name, tensor in tensors.items():
                    tensor.copy_(state[part][name])

    def copy_replica(self, source: int, to: int) -> None:
        """Make one replica a copy of another, wherever they are."""
        other = self.tensors_from(source)
        if to in self.mesh.mine:
            for part, tensors in self.tensors_of(self.mesh.mine.index(to)).items():
                for name, tensor in tensors.items():
                    tensor.copy_(other[part][name])

    def tensors_from(self, replica: int) -> Tensors:
        """The tensors of any replica. Every process must ask: they are sent by the one that has them."""
        here = replica in self.mesh.mine
        tensors = self.tensors_of(self.mesh.mine.index(replica) if here else 0)
        if not self.mesh.is_spread:
            return tensors
        owner = self.mesh.owner_of(replica)
        return {
            part: {name: self.mesh.crew.broadcast(t.detach().clone(), owner, "copy of a replica") for name, t in named.items()}
            for part, named in tensors.items()
        }

    def what_broke(self, replica: int) -> str | None:
        """What a replica's module says of itself, if it has a method of that name: the part that was not finite first."""
        if replica not in self.mesh.mine:
            return None
        asked = getattr(self.modules[self.mesh.mine.index(replica)], "what_broke", None)
        return asked() if callable(asked) else None

    def finite(self) -> list[bool]:
        """Of each replica: are all its weights finite? Every process must ask."""
        mine = self.position.isfinite().all(1)
        if self.common is not None:
            mine &= self.common.position.isfinite().all()
        gathered = self.mesh.crew.gather(mine.tolist(), "look at the weights")
        return [fine for row in range(self.mesh.n_replica_ranks) for fine in gathered[row * self.mesh.n_data_ranks]]
