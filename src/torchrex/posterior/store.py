"""Draws of weights and buffers on disk: the store survives a crash and follows a resumed run.

On disk: one `draw-000000000.safetensors` per draw, and `index.json`, which alone says what counts.
A draw is written under a temporary name, synced and renamed; then the index is replaced; then
replaced draws are removed. Files that the index does not name are ignored, and removed by the next
`add`. One process writes into a folder; any number may read.

Resume: `state_dict()` marks the present moment in the index. A draw that is replaced later stays on
disk as long as it was there at a marked moment. So going back to a mark restores exactly what was
there, and the same draws added again meet the same decisions. `commit()` forgets old marks and
removes the files that only they needed. Without marks there are never more than `capacity` files.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrex.distributed import is_main_process
from torchrex.durable import PART, replace_file, writing
from torchrex.errors import CheckpointError, InvalidArgumentError, require_whole
from torchrex.posterior.average import OutputFunction, PosteriorAverage
from torchrex.posterior.prediction import Prediction, split_batch
from torchrex.posterior.predictive import Predictive
from torchrex.posterior.store_format import (
    INDEX,
    Index,
    Keep,
    Moment,
    StoredDraw,
    check_settings,
    check_size,
    draw_as_bytes,
    file_of,
    load_into,
    read_draw,
    read_index,
)

Model = nn.Module | Callable[[], nn.Module]

# Files that may be removed if the index does not name them.
DRAW = r"draw-\d{9,}\.safetensors"
OURS = re.compile(rf"{DRAW}|({DRAW}|index\.json)({PART}|\.part)")  # .part: of older versions


class StoredWeights:
    """Predictions of weights on disk, one draw after the other in ONE module.

    `model` is a function that makes the module, or a module, which is copied; it is in eval mode. A
    batch `(x, ..., y)` calls `module(x, ...)`, a dict `module(**rest)`, a tensor `module(x)`; for
    anything else give a function of the module and the batch. Hotter rungs do not sample the
    posterior, so only draws of `rung` 0 count; None pools all.
    """

    def states(self, rung: int | None) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """The weights of each draw of that rung, with a name for messages."""
        raise NotImplementedError

    def predict(
        self,
        model: Model,
        data: Iterable[Any],
        *,
        rung: int | None = 0,
        target_key: str = "target",
        forward: OutputFunction | None = None,
    ) -> Prediction:
        """Of a classifier: the mean over stored draws of softmax(logits), of `forward(module,
        batch)` if it is given.
        """
        average = self._average(model, data, rung, forward, target_key=target_key)
        labels = average.labels if average.is_labelled else None
        entropy, information = average.predictive_entropy(), average.mutual_information()
        return Prediction(average.probabilities(), labels, entropy, information, average.n_draws)

    def predictive(
        self,
        model: Model,
        data: Iterable[Any],
        *,
        rung: int | None = 0,
        output: Literal["values"] | OutputFunction = "values",
        of: str | None = None,
        **options: Any,
    ) -> Predictive:
        """Of any other output, as `PosteriorAverage(...).predictive(of=of)`, whose options are
        `likelihood`, `keep` and `target_key`.
        """
        function = output if callable(output) else None
        average = self._average(model, data, rung, function, **{"output": output, **options})
        return average.predictive(of=of)

    @torch.no_grad()
    def _average(
        self,
        model: Model,
        data: Iterable[Any],
        rung: int | None,
        function: OutputFunction | None,
        **options: Any,
    ) -> PosteriorAverage:
        average, module = PosteriorAverage(data, **options), made(model).eval()
        call = function or (lambda module, batch: _call(module, batch, average.target_key))
        for name, state in self.states(rung):
            load_into(module, state, name)
            average.add(lambda batch: call(module, _on_device_of(module, batch)), name)
        return average


class DrawStore(StoredWeights):
    """At most `capacity` draws of weights and buffers in a folder; an existing store is continued.

    Draws of several rungs share the capacity. One draw at a time is in memory, whatever the
    capacity. Of several processes the first writes.
    """

    def __init__(
        self, folder: str | Path, *, capacity: int, keep: Keep = "newest", seed: int = 0
    ) -> None:
        self.folder = Path(folder)
        new = Index(keep, capacity, seed)
        check_settings(new)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot make the folder {self.folder} ({error.strerror}); choose another one"
            ) from None
        self._index = new
        if (self.folder / INDEX).exists():
            self._index = read_index(self.folder)
            if self._index.settings() != new.settings():
                raise CheckpointError(
                    f"{self.folder} holds draws kept with {self._index.settings()}, asked for were "
                    f"{new.settings()}; use the same settings or another folder"
                )
        elif is_main_process():
            self._write_index(new)

    @classmethod
    def load(cls, folder: str | Path) -> DrawStore:
        """Open an existing store, with the settings it was made with. Nothing in it is executed."""
        return cls(folder, **read_index(Path(folder)).settings())

    @property
    def capacity(self) -> int:
        return self._index.capacity

    @property
    def n_seen(self) -> int:
        """Draws that arrived so far, kept or not."""
        return self._index.now.seen

    @property
    def draws(self) -> list[tuple[int, int]]:
        """(step, rung) of every draw in the store, in order of arrival."""
        return [(draw.step, draw.rung) for draw in self._index.there()]

    def __len__(self) -> int:
        return len(self._index.there())

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """(step, rung, state dict) of each draw in order of arrival, on the CPU."""
        for draw in self._index.there():
            yield draw.step, draw.rung, read_draw(self.folder, draw)

    def add(self, module: nn.Module, *, step: int, rung: int = 0) -> bool:
        """Offer the weights and buffers of a module; returns whether they are in the store now.

        Steps never go back: after a resume from an earlier step use `load_state_dict` first. The
        same step and rung again, as after a failure between two rungs, is not counted again.
        """
        require_whole("step", step)
        require_whole("rung", rung)
        index, now = self._index, self._index.now
        if step < now.step:
            raise InvalidArgumentError(
                f"a draw of step {step} was offered, but {self.folder} has seen step {now.step}; "
                f"call load_state_dict or rewind({max(step - 1, 0)}), or use a new folder"
            )
        if step == now.step and rung in now.rungs:
            return (step, rung) in self.draws
        slot, draws = index.slot(now.seen), index.draws
        if slot is not None:
            data, file = draw_as_bytes(module, step=step, rung=rung), file_of(now.seen)
            self._replace_file(file, data)
            sha256 = hashlib.sha256(data).hexdigest()
            leaves = [d.left is None and index.slot(d.number) == slot for d in draws]
            kept = (
                replace(d, left=now.seen) if out else d
                for d, out in zip(draws, leaves, strict=True)
            )
            draws = (*kept, StoredDraw(now.seen, step, rung, file, sha256, len(data)))
        rungs = (*now.rungs, rung) if step == now.step else (rung,)
        marks = tuple(
            replace(mark, next_step=step) if mark.seen == now.seen else mark for mark in index.marks
        )
        arrived = Moment(now.seen + 1, step, rungs)
        self._write_index(replace(index, now=arrived, marks=marks, draws=draws).needed())
        self._remove_unnamed()
        return slot is not None

    def state_dict(self) -> dict[str, Any]:
        """Mark the present moment and describe it; its files stay until `commit`."""
        index = self._index
        marks = (*(mark for mark in index.marks if mark.seen != index.now.seen), index.now)
        if marks != index.marks:
            self._write_index(replace(index, marks=marks))
        draws = {
            draw.file: {"step": draw.step, "rung": draw.rung, "sha256": draw.sha256}
            for draw in index.there()
        }
        return {**index.settings(), "seen": index.now.seen, "step": index.now.step, "draws": draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back exactly to a `state_dict`; that of another run, or without files, is refused."""
        index = self._index
        try:
            given = {name: state[name] for name in index.settings()}
            seen, step = state["seen"], state["step"]
            expected = {
                file: (draw["step"], draw["rung"], draw["sha256"])
                for file, draw in state["draws"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"not the state of a DrawStore ({error!r}); give what state_dict returned"
            ) from None
        if given != index.settings():
            raise CheckpointError(f"the state is of {given}, {self.folder} of {index.settings()}")
        moments = [m for m in (*index.marks, index.now) if (m.seen, m.step) == (seen, step)]
        found = {d.file: (d.step, d.rung, d.sha256) for d in index.draws if d.was_there(seen)}
        if not moments or found != expected:
            raise CheckpointError(
                f"{self.folder} cannot go back to step {step} with {seen} draws seen: it holds "
                "another run, or commit() removed draws; use a newer checkpoint or another folder"
            )
        self._go_back(moments[0])

    def rewind(self, step: int) -> None:
        """Forget every draw after `step` and restore those they replaced, which needs a mark there.

        `rewind(0)` empties the store.
        """
        if self._index.now.step <= step:
            return
        for mark in self._index.marks:
            if mark.step <= step and mark.next_step is not None and step < mark.next_step:
                return self._go_back(mark)
        able = ", ".join(
            f"{max(mark.step, 0)} to {mark.next_step - 1}"
            for mark in self._index.marks
            if mark.next_step
        )
        raise CheckpointError(
            f"{self.folder} cannot go back to step {step}, because draws of that time may be gone; "
            f"it can go back to steps {able}. Call state_dict() at every checkpoint"
        )

    def commit(self, oldest: int | None = None) -> None:
        """Remove files that only states before step `oldest` need; None: all but the newest state.

        Call it when a checkpoint is safe on disk, with the step of the oldest checkpoint that is
        kept.
        """
        empty, *marks = self._index.marks
        if oldest is None:
            marks = marks[-1:]
        else:
            marks = [m for m in marks if m.next_step is None or m.next_step > oldest]
        self._write_index(replace(self._index, marks=(empty, *marks)).needed())
        self._remove_unnamed()

    def states(self, rung: int | None) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        chosen = [draw for draw in self._index.there() if rung is None or draw.rung == rung]
        if not chosen:
            rungs = sorted({draw.rung for draw in self._index.there()})
            raise InvalidArgumentError(f"no draw of rung {rung} in {self.folder}, only of {rungs}")
        for draw in chosen:
            name = f"the draw of rung {draw.rung} at step {draw.step}"
            yield name, read_draw(self.folder, draw)

    def _go_back(self, moment: Moment) -> None:
        now = replace(moment, next_step=None)
        past = [mark for mark in self._index.marks if mark.seen <= now.seen]
        index = replace(
            self._index,
            now=now,
            marks=tuple(now if mark.seen == now.seen else mark for mark in past),
            draws=tuple(
                replace(draw, left=None) if draw.was_there(now.seen) else draw
                for draw in self._index.draws
                if draw.number < now.seen
            ),
        )
        try:
            index.checked()
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder} cannot go back to step {moment.step} ({error}); restore {INDEX}"
            ) from None
        for draw in index.there():
            check_size(self.folder, draw)
        self._write_index(index)
        self._remove_unnamed()

    def _write_index(self, index: Index) -> None:
        """Replace the index; the store takes the new state only when that is done."""
        self._replace_file(INDEX, index.to_json().encode())
        self._index = index

    def _replace_file(self, name: str, data: bytes) -> None:
        safe = "draws before it are safe"
        with writing(self.folder / name, CheckpointError, safe, room=f"resume; {safe}"):
            replace_file(self.folder / name, data)

    def _remove_unnamed(self) -> None:
        """Remove what the index does not name: replaced draws, and leftovers of a crash."""
        named = {draw.file for draw in self._index.draws}
        for name in os.listdir(self.folder):
            if OURS.fullmatch(name) and name not in named:
                with contextlib.suppress(OSError):  # the next add tries again
                    os.unlink(self.folder / name)

    def __repr__(self) -> str:
        kept = f"{len(self)} of {self.n_seen} draws, keep={self._index.keep!r}"
        return f"DrawStore({str(self.folder)!r}, {kept}, capacity={self.capacity})"


def made(model: Model) -> nn.Module:
    """A module of one's own, from a module or from a function."""
    if not callable(model):
        raise InvalidArgumentError(f"model must be an nn.Module or make one, got {model!r}")
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model()


def _call(module: nn.Module, batch: Any, target_key: str) -> Any:
    inputs, _ = split_batch(batch, target_key)
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def _on_device_of(module: nn.Module, batch: Any) -> Any:
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
