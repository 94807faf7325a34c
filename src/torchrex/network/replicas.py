"""The replicas of a user's module: what they are made from, and their weights, buffers and momenta.

A replica keeps its weights, buffers and momentum; a swap changes only its rung. All parameters of
all replicas are rows of one tensor (see `rows.py`), and the modules see views of them. Everything
else about a module stays as its author wrote it: it is called, not rewritten.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchrex.distributed import ReplicaMesh
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.exchange import resolve_device
from torchrex.network.rows import FlatLayout, Rows
from torchrex.rng import default_seed, derive_seed
from torchrex.samplers import SGLD, Sampler, State
from torchrex.settings import settings_of
from torchrex.targets import GaussianPrior, PosteriorEnergy
from torchrex.targets.posterior import require_group_values, require_groups_fit, value_in_groups

Model = nn.Module | Callable[[], nn.Module]
Tensors = dict[str, dict[str, Tensor]]  # by part of a replica, then by name


@dataclass(frozen=True, repr=False, eq=False)
class ModuleEnsemble:
    """What replicas of a module are made from; `ModuleExchange` makes one for each rung.

    `model` is a function that builds a module, or a module to copy. All replicas begin with the
    same weights, as in the paper, or with `initial="independent"` each with its own from the
    function. With `shared_batches=False` every replica gets a minibatch of its own, and a step
    takes a list of them. Minibatches are those of an epoch, each example once; say
    `replacement=True` if yours are drawn with replacement, for then their sums vary more. Losses
    that are random by themselves, by dropout, augmentation or latents, vary even where all examples
    are used: say `random_losses=True` if your data set augments. With None what can be seen is
    found out: whether the model draws random numbers, and whether a DeviceLoader augments. Weights
    stay in float32 or float64; `autocast=torch.bfloat16` is for speed on a GPU, as is
    `channels_last=True` for convolutions. A module stays in the mode (training or evaluation) it is
    given in. With `mesh=replica_mesh(n)` under torchrun every process holds some of the replicas,
    or a part of every minibatch. `shared` names (parts of) parameters that are the same in all
    replicas: they follow the mean of the replicas' gradients at the coldest rung's learning rate
    and temperature, so that the rungs of the replicas do not matter to them. `lr_factors` maps a
    part of a parameter's name to a factor of lr there, in drift and noise alike: a preconditioner,
    which keeps the law. The first that fits counts.
    """

    model: Model
    energy: PosteriorEnergy
    sampler: Sampler | None = None  # None is SGLD()
    _kw: KW_ONLY
    initial: Literal["identical", "independent"] = "identical"
    shared_batches: bool = True
    shared: Sequence[str] = ()
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    replacement: bool = False
    random_losses: bool | None = None
    device: torch.device | str | None = None
    autocast: torch.dtype | None = None
    channels_last: bool = False
    mesh: ReplicaMesh | None = None

    has_noise = True
    batch_size = None  # the data decide

    def __post_init__(self) -> None:
        if self.sampler is None:
            object.__setattr__(self, "sampler", SGLD())
        names = [] if isinstance(self.shared, str) else self.shared
        named = not isinstance(self.shared, str) and all(isinstance(n, str) and n for n in names)
        mesh = self.mesh is None or isinstance(self.mesh, ReplicaMesh)
        energy, half = isinstance(self.energy, PosteriorEnergy), (None, torch.bfloat16)
        for name, right, expected in (
            ("mesh", mesh, "replica_mesh(n)"),
            ("model", callable(self.model), "an nn.Module or a function that makes one"),
            ("energy", energy, "PosteriorEnergy(loss, n_data=...)"),
            ("sampler", isinstance(self.sampler, Sampler), "a sampler such as SGLD(), SGHMC(0.1)"),
            ("initial", self.initial in ("identical", "independent"), "identical or independent"),
            ("shared", named, "a sequence of (parts of) parameter names"),
            ("autocast", self.autocast in half, "torch.bfloat16 or None (float16 overflows)"),
        ):
            if not right:
                given = getattr(self, name)
                raise InvalidArgumentError(f"{name} must be {expected}, got {given!r}")
        require_group_values(self.lr_factors, "a factor of the lr")
        if self.initial == "independent" and isinstance(self.model, nn.Module):
            raise InvalidArgumentError(
                "independent initial weights need a function that makes the model, got a module"
            )
        if self.shared and (
            not self.shared_batches or (self.mesh is not None and self.mesh.is_spread)
        ):
            raise InvalidArgumentError(
                f"shared={tuple(self.shared)} needs all replicas in one process and on the same "
                "minibatches; leave mesh and shared_batches=False out, or leave shared out"
            )
        if self.device is not None:
            object.__setattr__(self, "device", resolve_device(self.device))

    @property
    def source_of_noise(self) -> ModuleEnsemble:
        """What decides which noise estimators fit."""
        return self

    @property
    def prior_variance(self) -> float | None:
        """The smallest of a parameter under a Gaussian prior; None without one."""
        precisions = self._prior_precisions
        return None if not precisions else 1.0 / max(precisions) if max(precisions) else math.inf

    @property
    def has_proper_prior(self) -> bool:
        """Has every parameter a Gaussian prior?"""
        return bool(self._prior_precisions) and min(self._prior_precisions) > 0

    @property
    def _prior_precisions(self) -> list[float]:
        prior = self.energy.prior
        if not isinstance(prior, GaussianPrior):
            return []
        return [prior.precision, *(precision for _, precision in prior.groups)]

    @property
    def n_data(self) -> int:
        return self.energy.n_data

    @property
    def shares_minibatch(self) -> bool:
        return self.shared_batches

    def __repr__(self) -> str:
        return f"ModuleEnsemble({self.energy!r}, {self.sampler!r})"


class Replicas:
    """The replicas of this process: modules, and the rows that their parameters are views of."""

    def __init__(self, source: ModuleEnsemble, n_replicas: int, seed: int) -> None:
        """Initial weights come from the seed, whatever else the process draws."""
        assert source.sampler is not None
        self.source, self.energy, self.sampler = source, source.energy, source.sampler
        self.shared = tuple(source.shared)
        self.mesh = ReplicaMesh(n_replicas) if source.mesh is None else source.mesh
        if self.mesh.n_replicas != n_replicas:
            raise InvalidArgumentError(
                f"the mesh is one of {self.mesh.n_replicas} replicas, the ladder has {n_replicas} "
                "rungs; make it for as many"
            )
        self.modules = _build(source, self.mesh.mine, seed)
        first, n = self.modules[0], len(self.modules)
        if not any(True for _ in first.parameters()):
            raise TargetError(
                f"{type(first).__name__} has no parameters, so there is nothing to sample"
            )
        self.device = next(first.parameters()).device
        prior = self.energy.prior
        precision_of = prior.precision_of if isinstance(prior, GaussianPrior) else None
        names = [name for name, _ in first.named_parameters()]  # frozen ones too
        if isinstance(prior, GaussianPrior):
            require_groups_fit(dict(prior.groups), names, repr(prior))
        require_groups_fit(source.lr_factors, names, "lr_factors")
        padding = _padding_rows(first)
        if self.shared:
            self._require_some_shared()

        def rows(streams: Sequence[str], wanted: Callable[[str], bool]) -> Rows:
            return Rows.of(
                FlatLayout.of(first, channels_last=source.channels_last, only=wanted),
                self.sampler,
                device=self.device,
                gradients=n,
                precision_of=precision_of,
                lr_factor_of=lambda name: value_in_groups(source.lr_factors, name, 1.0),
                padding=padding,
                streams=streams,
                seed=seed,
            )

        own = [f"move.{replica}" for replica in self.mesh.mine]
        self.rows = rows(own, lambda name: not self.is_shared(name))
        # One row for what is the same in all replicas, with a gradient from each.
        self.common = rows(["shared.move"], self.is_shared) if self.shared else None
        # Of each replica, in the order of its row and then of the common one.
        self.parameters = [self._adopt(k, module) for k, module in enumerate(self.modules)]
        # Statistics and frozen weights that are shared are in no row.
        for module in self.modules[1:] if self.shared else []:
            one = {**dict(first.named_parameters()), **dict(first.named_buffers())}
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if self.is_shared(name):
                    tensor.data.copy_(one[name].data)
        # The number of the step, where a captured graph can read it.
        self.clock = torch.zeros((), dtype=torch.int64, device=self.device)
        self._parts = [dict(module.named_modules()) for module in self.modules]
        self._at_work = False  # does the run itself change the modules now?
        self._modes = self._modes_now()
        self._buffers: list[Tensor | None] = []
        self._writes: list[list[tuple[int, int]]] | None = None  # None before the run's first work

    @property
    def n_data(self) -> int:
        return self.energy.n_data

    @property
    def layout(self) -> FlatLayout:
        return self.rows.layout

    @property
    def position(self) -> Tensor:
        return self.rows.position

    @property
    def sampler_state(self) -> State:
        return self.rows.state

    @property
    def all_rows(self) -> list[Rows]:
        return [self.rows] if self.common is None else [self.rows, self.common]

    def is_shared(self, name: str) -> bool:
        """Is that the name of a parameter or a buffer that all replicas have in common?"""
        return any(part in name for part in self.shared)

    def _require_some_shared(self) -> None:
        names = [name for name, p in self.modules[0].named_parameters() if p.requires_grad]
        n_shared = sum(map(self.is_shared, names))
        if not 0 < n_shared < len(names):
            some = ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
            which = (
                "all parameters, so that nothing is left to sample" if n_shared else "no parameter"
            )
            raise InvalidArgumentError(
                f"shared={self.shared} names {which}; those of the model are {some}"
            )

    def _adopt(self, k: int, module: nn.Module) -> list[nn.Parameter]:
        """Move a module's parameters into its row; the common row begins as the first module's."""
        named = dict(module.named_parameters())
        views = self.layout.views(self.position[k])
        common = {} if self.common is None else self.common.layout.views(self.common.position[0])
        if {name for name, p in named.items() if p.requires_grad} != {*views, *common}:
            raise TargetError("the model function makes modules with different parameters")
        for name, view in {**views, **common}.items():
            if named[name].shape != view.shape:
                raise TargetError(f"the model function makes modules of different sizes, in {name}")
            if name in views or k == 0:
                view.copy_(named[name].detach())
            named[name].data = view
        return [named[name] for name in (*views, *common)]

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast, if it was asked for."""
        if self.source.autocast is None:
            yield
            return
        with torch.autocast(self.device.type, dtype=self.source.autocast):
            yield

    # What others did to the modules

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """Around all that the run does to its modules, so that what others do to them is noticed.

        Replicas in different modes are an error, because modes can be put back. Changed buffers are
        a warning, as is another mode of all replicas, which may be on purpose. Torch counts what is
        written, on every device, whether steps are captured or not. It does not count what goes
        through `.data`; BatchNorm in training mode counts in `num_batches_tracked` alone.
        """
        if self._at_work:
            yield
            return
        self._require_modes()
        now = self.buffer_writes()
        for replica, before, after in zip(self.mesh.mine, self._writes or now, now, strict=True):
            if before != after:
                warnings.warn(
                    f"a buffer of replica {replica} was changed between two steps and not by the "
                    "run, as a forward pass in training mode does; look at a copy: run.module_at()",
                    stacklevel=2,
                )
        self._at_work = True
        try:
            yield
        finally:  # also after a step that failed half-way: what it did is the run's own work
            self._at_work = False
            self._modes = self._modes_now()
            self._remember_buffers()

    def _modes_now(self) -> list[list[bool]]:
        return [[part.training for part in parts.values()] for parts in self._parts]

    def _remember_buffers(self) -> None:
        # The buffers themselves are kept, so that no other tensor gets their ids.
        self._buffers = [buffer for parts in self._parts for buffer in _buffers_of(parts)]
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
                f"{which} of every replica {changed}; to look at a copy, use run.module_at(rung)",
                stacklevel=2,
            )
            return
        raise InvalidArgumentError(
            f"{which} of replica {self.mesh.mine[k]} {changed}; put it back with "
            f".{'train' if was else 'eval'}(), and look at a copy: run.module_at(rung)"
        )

    # Tensors

    def tensors_of(self, k: int) -> Tensors:
        """Weights, all buffers, frozen weights and sampler state, not copied, of the k-th replica
        of this process. What all replicas have in common is among those of the first.
        """
        parts = self.rows.parts_of(k)
        common = self.common.parts_of(0) if self.common is not None and k == 0 else {}
        frozen = {n: p.data for n, p in self.modules[k].named_parameters() if not p.requires_grad}
        return {
            **{part: {**tensors, **common.get(part, {})} for part, tensors in parts.items()},
            "buffers": dict(self.modules[k].named_buffers()),
            "frozen": frozen,
        }

    def load_tensors(self, states: list[Tensors]) -> None:
        """Overwrite the replicas of this process, after all tensors were found to fit."""
        for k, state in enumerate(states):
            for part, tensors in self.tensors_of(k).items():
                given = state.get(part, {})
                wrong = sorted(given.keys() ^ tensors.keys()) or [
                    name for name in tensors if given[name].shape != tensors[name].shape
                ]
                if wrong:
                    raise InvalidArgumentError(
                        f"the state is that of another model: its {part} differ, as {wrong[0]!r}"
                    )
        for k, state in enumerate(states):
            self._overwrite(k, state)

    def _overwrite(self, k: int, state: Tensors) -> None:
        for part, tensors in self.tensors_of(k).items():
            for name, tensor in tensors.items():
                tensor.copy_(state[part][name])
        self._remember_buffers()

    def copy_replica(self, source: int, to: int) -> None:
        """Make one replica a copy of another, wherever they are."""
        other = self.tensors_from(source)
        if to in self.mesh.mine:
            self._overwrite(self.mesh.mine.index(to), other)

    def tensors_from(self, replica: int) -> Tensors:
        """The tensors of any replica. Every process must ask: the one that has them sends them."""
        here = replica in self.mesh.mine
        tensors = self.tensors_of(self.mesh.mine.index(replica) if here else 0)
        if not self.mesh.is_spread:
            return tensors
        owner, group = self.mesh.owner_of(replica), self.mesh.process_group
        return {
            part: {
                name: group.broadcast(t.detach().clone(), owner, "copy of a replica")
                for name, t in named.items()
            }
            for part, named in tensors.items()
        }

    def nonfinite_part(self, replica: int) -> str | None:
        """What a replica's module reports by a method of that name."""
        if replica not in self.mesh.mine:
            return None
        ask = getattr(self.modules[self.mesh.mine.index(replica)], "nonfinite_part", None)
        return ask() if callable(ask) else None

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

    def setting(self) -> dict[str, Any]:
        """What must agree between a state and the replicas that load it."""
        source = self.source
        size = sum(rows.layout.size for rows in self.all_rows)
        return {
            "model": f"{type(self.modules[0]).__name__} with {size:,} parameters",
            "dtype": str(self.layout.dtype).removeprefix("torch."),
            "energy": settings_of(self.energy),
            "sampler": settings_of(self.sampler),
            **({"shared": ", ".join(self.shared)} if self.shared else {}),
            **({"lr_factors": dict(source.lr_factors)} if source.lr_factors else {}),
            "minibatches": "shared" if source.shared_batches else "independent",
            "replacement": str(source.replacement),
            "random_losses": str(source.random_losses),
            "device": self.device.type,
            "autocast": str(source.autocast),
        }

    def __repr__(self) -> str:
        setting = self.setting()
        shared = f", {setting['shared']} shared" if self.shared else ""
        return (
            f"Replicas({self.mesh.n_replicas} x {setting['model']} of {setting['dtype']}{shared}, "
            f"{self.energy!r}, {self.sampler!r}, {setting['minibatches']} minibatches)"
        )


def _build(source: ModuleEnsemble, mine: range, seed: int) -> list[nn.Module]:
    """Modules for the replicas `mine`, on their device."""
    if isinstance(source.model, nn.Module):
        modules = [_with_hooks(source.model) for _ in mine]
    else:
        with default_seed(derive_seed(seed, "initial")):
            # Those of other processes are made too, for the random numbers that they take.
            n_made = mine.stop if source.initial == "independent" else 1
            modules = [
                module
                for replica, module in enumerate(source.model() for _ in range(n_made))
                if replica in mine or n_made == 1
            ]
        if not all(isinstance(module, nn.Module) for module in modules):
            raise InvalidArgumentError(
                f"model must make an nn.Module, but made {type(modules[0]).__name__}"
            )
        modules += [_with_hooks(modules[0]) for _ in range(len(mine) - len(modules))]
    first = source.model if isinstance(source.model, nn.Module) else modules[0]
    for name, parameter in first.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InvalidArgumentError(
                f"{name} has a hook of register_post_accumulate_grad_hook, but a step accumulates "
                "no .grad, so it would never act; use register_hook"
            )
    if source.device is not None:
        modules = [module.to(source.device) for module in modules]
    if source.channels_last:
        modules = [module.to(memory_format=torch.channels_last) for module in modules]  # type: ignore[call-overload]
    return modules


def _with_hooks(module: nn.Module) -> nn.Module:
    """A copy with the hooks of its parameters, which deepcopy leaves out."""
    made = copy.deepcopy(module)
    for mine, given in zip(made.parameters(), module.parameters(), strict=True):
        for hook in (given._backward_hooks or {}).values() if given.requires_grad else ():
            mine.register_hook(hook)  # type: ignore[no-untyped-call]
    return made


def _padding_rows(module: nn.Module) -> dict[str, int]:
    """Of embedding weights: the row of `padding_idx`, which has no gradient and must not move.

    A weight that another layer uses too has a gradient there, and moves.
    """
    used: dict[int, set[int | None]] = {}
    for part in module.modules():
        row = part.padding_idx if isinstance(part, nn.Embedding | nn.EmbeddingBag) else None
        for parameter in part.parameters(recurse=False):
            used.setdefault(id(parameter), set()).add(row)
    rows = {name: used[id(parameter)] for name, parameter in module.named_parameters()}
    return {n: row for n, (row, *more) in rows.items() if row is not None and not more}


def copied(module: nn.Module) -> nn.Module:
    """A copy that shares no memory, with what it keeps of its last pass (`self.x = ...`)."""
    kept = [
        t
        for part in module.modules()
        for t in vars(part).values()
        if isinstance(t, Tensor) and not t.is_leaf
    ]
    # deepcopy refuses such tensors
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in kept})


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every part goes back to the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


@contextlib.contextmanager
def untouched_buffers(module: nn.Module) -> Iterator[None]:
    """Put the buffers (BatchNorm statistics) back to what they were."""
    kept = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for part, name, buffer, before in kept:
            buffer.copy_(before)
            part._buffers[name] = buffer  # a module may have put another tensor in its place


def _buffers_of(parts: dict[str, nn.Module]) -> Iterator[Tensor | None]:
    return (buffer for part in parts.values() for buffer in part._buffers.values())
