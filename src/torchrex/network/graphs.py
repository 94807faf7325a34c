"""Which step is captured, when, and what is done if it cannot be: compiled, else as it is, else
eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchrex.network.capture import Captured, CapturedEnergies, CapturedStep, Workings
from torchrex.network.compiling import many_forms
from torchrex.network.cuda_modes import convolutions, release
from torchrex.network.ensemble import ModuleEnsemble
from torchrex.network.forward_rng import ForwardRandomness
from torchrex.targets import Batch, DeviceLoader

logger = logging.getLogger("torchrex")

MOST_GRAPHS = 4  # shapes of batches, each captured by itself; data of more shapes run eagerly


class Graphs:
    """What some runs that go on together have captured, for each form of batch, made when the form
    is first seen.
    """

    def __init__(
        self, workings: Sequence[Workings], forward: ForwardRandomness, *, deterministic: bool
    ) -> None:
        self._workings, self._forward, self._deterministic = list(workings), forward, deterministic
        self._graphs: dict[Any, tuple[Captured, Batch]] = {}
        self.failed = False  # once something could not be captured, the runs go on without

    def for_batch(self, batch: Batch) -> Captured | None:
        """The graph for batches of this form, with this batch in its inputs; None if the step has
        to be done eagerly.
        """
        leaves, form = pytree.tree_flatten(batch)
        strange = next(
            (
                leaf
                for leaf in leaves
                if not isinstance(leaf, Tensor | bool | int | float | str | None)
            ),
            None,
        )
        if strange is not None and not self.failed:
            self._fail(f"a batch holds a {type(strange).__name__} beside its tensors")
        if strange is not None:
            return None
        key = (
            str(form),
            *(
                (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ),
        )
        if key not in self._graphs and not self.failed:
            inputs = pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch
            )
            self._make(key, inputs, CapturedStep, self._workings, lambda: inputs, [], [])
        if key not in self._graphs:
            return None
        graph, inputs = self._graphs[key]
        for mine, given in zip(pytree.tree_leaves(inputs), leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given, non_blocking=True)
        return graph

    def for_loader(self, loader: DeviceLoader, size: int, *, twice: bool) -> Captured | None:
        """The graph that takes batches of that size from the loader by itself."""
        return self._from_loader("step", CapturedStep, self._workings, loader, size, twice)

    def energies(
        self, loader: DeviceLoader, size: int, ensembles: Sequence[ModuleEnsemble]
    ) -> CapturedEnergies | None:
        """The graph that measures energies of these ensembles on the loader's next batch."""
        measured = [
            workings
            for workings in self._workings
            if any(workings.ensemble is each for each in ensembles)
        ]
        graph = self._from_loader(
            ("energies", *map(id, ensembles)), CapturedEnergies, measured, loader, size, False
        )
        assert graph is None or isinstance(graph, CapturedEnergies)
        return graph

    def _from_loader(
        self,
        what: Any,
        kind: type[Captured],
        workings: Sequence[Workings],
        loader: DeviceLoader,
        size: int,
        twice: bool,
    ) -> Captured | None:
        key = (what, id(loader), size, twice)
        if key not in self._graphs:
            generators = (
                [loader.generator, loader.repeat_generator] if twice else [loader.generator]
            )
            self._make(
                key,
                loader,
                kind,
                workings,
                lambda: loader.select(size, twice=twice),
                generators,
                [loader.cursor],
            )
        return self._graphs[key][0] if key in self._graphs else None

    def _make(
        self,
        key: Any,
        inputs: Batch,
        kind: type[Captured],
        workings: Sequence[Workings],
        select: Callable[[], Batch],
        generators: Sequence[torch.Generator],
        moving: Sequence[Tensor],
    ) -> None:
        """Capture with compiled parts, else without, else not at all, with one reason in the log."""
        if self.failed:
            return
        if len(self._graphs) >= MOST_GRAPHS:
            self._fail(
                f"batches came in more than {MOST_GRAPHS} shapes or from more loaders, and each is a graph of its own"
            )
            return
        device = self._workings[0].ensemble.device
        default = torch.cuda.default_generators[device.index]
        states = [generator.get_state() for generator in (default, *generators)]
        reason = ""
        for compiled in (True, False):
            forward = self._forward.state_dict()
            try:
                with (
                    torch.cuda.device(device),
                    convolutions(deterministic=self._deterministic),
                    self._forward,
                    many_forms(),
                ):
                    graph = kind(
                        workings, select, generators=generators, moving=moving, compiled=compiled
                    )
                self._graphs[key] = (graph, inputs)
                return
            except Exception as error:
                torch.cuda.synchronize(device)
                self._graphs.clear()  # they hold on to the states that the generators are released from
                for generator, state in zip((default, *generators), states, strict=True):
                    release(generator, state)
                if isinstance(
                    error, torch.OutOfMemoryError
                ):  # without a graph it would take no less
                    raise
                cause = error.__context__ or error  # a capture that breaks off hides what broke it
                reason = " ".join(str(cause).split())[:300] or type(cause).__name__
                if compiled:
                    logger.info("capturing the step without compiling it, because: %s", reason)
            finally:
                self._forward.load_state_dict(forward)
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.failed = True
        if len(self._workings) > 1:
            logger.warning(
                "running one after another, because the runs' steps cannot be captured together: %s",
                reason,
            )
            return
        logger.warning(
            "running eagerly, with the same numbers but slower, because the step cannot be captured: %s",
            reason,
        )
