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
from torchrex.rng import Streams, derive_seed

Model = nn.Module | Callable[[], nn.Module]
Tensors = dict[str, dict[str, Tensor]]  # by part of a replica, then by name


class ModuleReplicas:
    """Modules and rows, built from a seed; `ModuleEnsemble` says what is done with them."""

    mesh: ReplicaMesh
    layout: FlatLayout
    modules: list[nn.Module]
    device: torch.device
    position: Tensor  # (replicas of this process, parameters)
    gradient: Tensor
    velocity: Tensor | None
    _model: Model
    initial: Literal["identical", "independent"]
    _device: torch.device | str | None
    _channels_last: bool
    _parameters: list[list[nn.Parameter]]

    def hold(self, streams: Streams, *, momenta: bool) -> list[nn.Module]:
        """Build the replicas of this process, and rows for them."""
        modules = self._build(streams)
        if not any(True for _ in modules[0].parameters()):
            raise TargetError(f"{type(modules[0]).__name__} has no parameters, so there is nothing to sample")
        if self._device is not None:
            modules = [module.to(self._device) for module in modules]
        if self._channels_last:
            modules = [module.to(memory_format=torch.channels_last) for module in modules]  # type: ignore[call-overload]
        self.layout = FlatLayout.of(modules[0], channels_last=self._channels_last)
        self.device = next(modules[0].parameters()).device
        self.position = self.layout.empty_rows(len(modules), self.device)
        self.gradient = self.layout.empty_rows(len(modules), self.device)
        self.velocity = self.layout.empty_rows(len(modules), self.device) if momenta else None
        self._parameters = [self._adopt(replica, module) for replica, module in enumerate(modules)]
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

    def _adopt(self, replica: int, module: nn.Module) -> list[nn.Parameter]:
        """Move a module's parameters into its row; from now on they are views of it."""
        named = dict(module.named_parameters())
        if {name for name, p in named.items() if p.requires_grad} != set(self.layout.names):
            raise TargetError("the model function makes modules with different parameters; all replicas must be alike")
        for name, view in self.layout.views(self.position[replica]).items():
            if named[name].shape != view.shape:
                raise TargetError(f"the model function makes modules of different sizes, in {name}; all replicas must be alike")
            view.copy_(named[name].detach())
            named[name].data = view
        return [named[name] for name in self.layout.names]

    def tensors_of(self, k: int) -> Tensors:
        """Weights, all buffers, frozen weights and momentum, not copied, of the k-th replica of this process."""
        tensors = {
            "parameters": self.layout.views(self.position[k]),
            "buffers": dict(self.modules[k].named_buffers()),
            "frozen": {name: p.data for name, p in self.modules[k].named_parameters() if not p.requires_grad},
        }
        if self.velocity is not None:
            tensors["velocity"] = self.layout.views(self.velocity[k])
        return tensors

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

    def finite(self) -> list[bool]:
        """Of each replica: are all its weights finite? Every process must ask."""
        mine = self.position.isfinite().all(1).tolist()
        gathered = self.mesh.crew.gather(mine, "look at the weights")
        return [fine for row in range(self.mesh.n_replica_ranks) for fine in gathered[row * self.mesh.n_data_ranks]]
