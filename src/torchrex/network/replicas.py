"""The replicas of this process: their modules, and the rows of numbers that all their parameters
are views of.

A row can be moved, copied, saved and sent whole, whatever the module looks like.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from torchrex.distributed import ReplicaMesh
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.network.flat import FlatLayout
from torchrex.network.rows import Rows
from torchrex.rng import Streams, derive_seed
from torchrex.samplers import Sampler, State

Model = nn.Module | Callable[[], nn.Module]
Tensors = dict[str, dict[str, Tensor]]  # by part of a replica, then by name


def copied(module: nn.Module) -> nn.Module:
    """A copy that shares no memory with the module. What it keeps of its last pass
    (`self.activations = ...`) is copied too.
    """
    kept = [
        t
        for part in module.modules()
        for t in vars(part).values()
        if isinstance(t, Tensor) and not t.is_leaf
    ]
    return copy.deepcopy(
        module, {id(tensor): tensor.detach().clone() for tensor in kept}
    )  # deepcopy refuses such tensors


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
    _device: torch.device | None
    _channels_last: bool
    _parameters: list[
        list[nn.Parameter]
    ]  # of each replica, in the order of its row and then of the common one
    _parts: list[dict[str, nn.Module]]  # of each replica, by name
    _at_work = False  # is what happens to the modules now the run's own doing?
    _writes: list[list[tuple[int, int]]] | None = (
        None  # of their buffers, until the run's own last work; None before the first
    )

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
    def sampler_state(self) -> State:
        return self.rows.state

    def hold(self, streams: Streams, sampler: Sampler) -> list[nn.Module]:
        """Build the replicas of this process, and rows for them."""
        modules = self._build(streams)
        if not any(True for _ in modules[0].parameters()):
            raise TargetError(
                f"{type(modules[0]).__name__} has no parameters, so there is nothing to sample"
            )
        if self._device is not None:
            modules = [module.to(self._device) for module in modules]
        if self._channels_last:
            modules = [module.to(memory_format=torch.channels_last) for module in modules]  # type: ignore[call-overload]
        self.device, n = next(modules[0].parameters()).device, len(modules)
        if self.shared:
            self._require_some_shared(modules[0])
        own = FlatLayout.of(
            modules[0],
            channels_last=self._channels_last,
            only=lambda name: not self.is_shared(name),
        )
        self.rows = Rows.of(own, n, self.device, gradients=n, sampler=sampler)
        self.common = None
        if self.shared:
            common = FlatLayout.of(
                modules[0], channels_last=self._channels_last, only=self.is_shared
            )
            self.common = Rows.of(common, 1, self.device, gradients=n, sampler=sampler)
        self._parameters = [self._adopt(replica, module) for replica, module in enumerate(modules)]
        for module in (
            modules[1:] if self.shared else []
        ):  # statistics and frozen weights too: they are in no row
            first = {**dict(modules[0].named_parameters()), **dict(modules[0].named_buffers())}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if self.is_shared(name):
                    tensor.data.copy_(first[name].data)
        self._parts = [dict(module.named_modules()) for module in modules]
        self._remember_modes()
        return modules

    def _build(self, streams: Streams) -> list[nn.Module]:
        mine = self.mesh.mine
        if isinstance(self._model, nn.Module):
            return [copy.deepcopy(self._model) for _ in mine]
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(streams.seed, "initial"))
            # Those of other processes are made too, for the random numbers that they take, but not
            # kept.
            n_made = mine.stop if self.initial == "independent" else 1
            made = [
                module
                for replica, module in enumerate(self._model() for _ in range(n_made))
                if replica in mine or n_made == 1
            ]
        if not all(isinstance(module, nn.Module) for module in made):
            raise InvalidArgumentError(
                f"model must make an nn.Module, but made {type(made[0]).__name__}"
            )
        return (
            made if len(made) == len(mine) else [*made, *(copy.deepcopy(made[0]) for _ in mine[1:])]
        )

    # What somebody else did to the replicas

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """Around all that the run itself does to its modules, so that what others do to them in
        between is noticed.

        Replicas in different modes are an error, because modes can be put back. Changed buffers are
        a warning, as is another mode of all replicas here, which may be on purpose. Torch counts
        what is written, on every device, whether steps are captured or not. It does not count what
        goes through `.data`; BatchNorm in training mode counts in `num_batches_tracked` alone.
        """
        if self._at_work:
            yield
            return
        self._require_modes()
        self._warn_of_buffers()
        self._at_work = True
        try:
            yield
        finally:  # also after a step that failed half-way: what it did is the run's own work
            self._at_work = False
            self._remember_modes()
            self._remember_buffers()

    def _remember_modes(self) -> None:
        self._modes = self._modes_now()

    def _modes_now(self) -> list[list[bool]]:
        return [[part.training for part in parts.values()] for parts in self._parts]

    def _remember_buffers(self) -> None:
        self._buffers = [
            buffer for parts in self._parts for buffer in _buffers_of(parts)
        ]  # so that no other gets their ids
        self._writes = self.buffer_writes()

    def buffer_writes(self) -> list[list[tuple[int, int]]]:
        """Of each replica: which tensors its buffers are, and how often each was written."""
        return [
            [
                (id(b), -1 if b is None or b.is_inference() else b._version)
                for b in _buffers_of(parts)
            ]
            for parts in self._parts
        ]

    def _require_modes(self) -> None:
        now = self._modes_now()
        if now == self._modes:
            return
        words = {True: "training", False: "evaluation"}
        k = next(k for k, modes in enumerate(now) if modes != self._modes[k])
        (name, part), was = next(
            (named, was)
            for named, was in zip(self._parts[k].items(), self._modes[k], strict=True)
            if named[1].training is not was
        )
        which = f"{name} ({type(part).__name__})" if name else type(part).__name__
        changed = f"is in {words[part.training]} mode, but the run left it in {words[was]} mode"
        if all(modes == now[0] for modes in now):  # somebody may want that, for all replicas
            warnings.warn(
                f"{which} of every replica {changed}; if you only want to look, use run.module_at(rung)",
                stacklevel=2,
            )
            return
        raise InvalidArgumentError(
            f"{which} of replica {self.mesh.mine[k]} {changed}; put it back with .{'train' if was else 'eval'}(), and look at a "
            f"copy: run.module_at(rung)"
        )

    def _warn_of_buffers(self) -> None:
        now = self.buffer_writes()
        for replica, before, after in zip(self.mesh.mine, self._writes or now, now, strict=True):
            if before != after:
                warnings.warn(
                    f"a buffer of replica {replica} was changed between two steps and not by the run, as a forward pass in "
                    f"training mode does; this run is not what it would have been. Look at a copy: run.module_at(rung)",
                    stacklevel=2,
                )

    def is_shared(self, name: str) -> bool:
        """Is that the name of a parameter or a buffer that all replicas have in common?"""
        return any(part in name for part in self.shared)

    def _require_some_shared(self, module: nn.Module) -> None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        n_shared = sum(map(self.is_shared, names))
        if 0 < n_shared < len(names):
            return
        some = ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
        how_many = (
            "all parameters, so that nothing is left to sample" if n_shared else "no parameter"
        )
        raise InvalidArgumentError(
            f"shared={self.shared} names {how_many}; those of the model are {some}"
        )

    def _adopt(self, replica: int, module: nn.Module) -> list[nn.Parameter]:
        """Move a module's parameters into its row, of which they are views from now on; the common
        row begins as the first's.
        """
        named = dict(module.named_parameters())
        views = self.layout.views(self.position[replica])
        common = {} if self.common is None else self.common.layout.views(self.common.position[0])
        if {name for name, p in named.items() if p.requires_grad} != {*views, *common}:
            raise TargetError(
                "the model function makes modules with different parameters; all replicas must be alike"
            )
        for name, view in {**views, **common}.items():
            if named[name].shape != view.shape:
                raise TargetError(
                    f"the model function makes modules of different sizes, in {name}; all replicas must be alike"
                )
            if name in views or replica == 0:
                view.copy_(named[name].detach())
            named[name].data = view
        return [named[name] for name in (*views, *common)]

    def tensors_of(self, k: int) -> Tensors:
        """Weights, all buffers, frozen weights and momentum, not copied, of the k-th replica of
        this process.

        What all replicas have in common is among those of the first.
        """
        parts = self.rows.parts_of(k)
        common = self.common.parts_of(0) if self.common is not None and k == 0 else {}
        return {
            **{part: {**tensors, **common.get(part, {})} for part, tensors in parts.items()},
            "buffers": dict(self.modules[k].named_buffers()),
            "frozen": {
                name: p.data
                for name, p in self.modules[k].named_parameters()
                if not p.requires_grad
            },
        }

    def load_tensors(self, states: list[Tensors]) -> None:
        """Overwrite the replicas of this process with tensors of that form, after all of them were
        found to fit.
        """
        for k, state in enumerate(states):
            for part, tensors in self.tensors_of(k).items():
                given = state.get(part, {})
                wrong = [
                    name for name in {*given, *tensors} if name not in given or name not in tensors
                ]
                wrong += [
                    name
                    for name in tensors
                    if not wrong and given[name].shape != tensors[name].shape
                ]
                if wrong:
                    raise InvalidArgumentError(
                        f"the state is that of another model: its {part} differ, for example {wrong[0]!r}"
                    )
        for k, state in enumerate(states):
            for part, tensors in self.tensors_of(k).items():
                for name, tensor in tensors.items():
                    tensor.copy_(state[part][name])
        self._remember_buffers()

    def copy_replica(self, source: int, to: int) -> None:
        """Make one replica a copy of another, wherever they are."""
        other = self.tensors_from(source)
        if to in self.mesh.mine:
            for part, tensors in self.tensors_of(self.mesh.mine.index(to)).items():
                for name, tensor in tensors.items():
                    tensor.copy_(other[part][name])
            self._remember_buffers()

    def tensors_from(self, replica: int) -> Tensors:
        """The tensors of any replica. Every process must ask: they are sent by the one that has
        them.
        """
        here = replica in self.mesh.mine
        tensors = self.tensors_of(self.mesh.mine.index(replica) if here else 0)
        if not self.mesh.is_spread:
            return tensors
        owner = self.mesh.owner_of(replica)
        return {
            part: {
                name: self.mesh.process_group.broadcast(
                    t.detach().clone(), owner, "copy of a replica"
                )
                for name, t in named.items()
            }
            for part, named in tensors.items()
        }

    def what_broke(self, replica: int) -> str | None:
        """What a replica's module says of itself, if it has a method of that name: the part that
        was not finite first.
        """
        if replica not in self.mesh.mine:
            return None
        asked = getattr(self.modules[self.mesh.mine.index(replica)], "nonfinite_part", None)
        return asked() if callable(asked) else None

    def finite(self) -> list[bool]:
        """Of each replica: are all its weights finite? Every process must ask."""
        mine = self.position.isfinite().all(1)
        if self.common is not None:
            mine &= self.common.position.isfinite().all()
        gathered = self.mesh.process_group.gather(mine.tolist(), "look at the weights")
        return [
            fine
            for row in range(self.mesh.n_replica_ranks)
            for fine in gathered[row * self.mesh.n_data_ranks]
        ]


def _buffers_of(parts: dict[str, nn.Module]) -> Iterator[Tensor | None]:
    return (buffer for part in parts.values() for buffer in part._buffers.values())
