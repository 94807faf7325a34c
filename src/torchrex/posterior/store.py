"""Draws of weights and buffers on disk: how the store survives a crash and follows a resumed run.

On disk: one `draw-000000000.safetensors` per draw, and `index.json`, which alone says what counts.
A draw is written under a temporary name, synced and renamed, then the index is replaced, then what
left is removed; files that the index does not name are ignored, and removed by the next `add`. One
process writes into a folder; any number may read.

Resume: `state_dict()` marks the present moment in the index. A draw that leaves later stays on disk
as long as it was there at a marked moment, so going back to one restores exactly what was there,
and the same draws added again meet the same decisions. `commit()` lets go of old marks and of the
files that only they needed. Without marks there are never more than `capacity` files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchrex.checkpoint import one_line, require_file
from torchrex.distributed import is_main_process
from torchrex.durable import replace_file
from torchrex.errors import CheckpointError, InvalidArgumentError
from torchrex.posterior.metrics import Prediction
from torchrex.posterior.store_files import check_size, draw_as_bytes, read_draw
from torchrex.posterior.store_index import (
    INDEX,
    Index,
    Keep,
    Moment,
    StoredDraw,
    check_settings,
    file_of,
)
from torchrex.posterior.store_predict import predict_with

OURS = re.compile(
    r"draw-\d{9,}\.safetensors(\.part)?|index\.json\.part"
)  # what may be removed if the index does not name it


class DrawStore:
    """At most `capacity` draws of weights and buffers in a folder; an existing store there is
    continued.

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
        if (self.folder / INDEX).exists():
            self._index = _read_index(self.folder)
            if self._index.settings() != new.settings():
                raise CheckpointError(
                    f"{self.folder} holds draws kept with {self._index.settings()}, asked for were {new.settings()}; "
                    "use the same settings or another folder"
                )
        elif is_main_process():
            self._write_index(new)
        else:
            self._index = new

    @classmethod
    def load(cls, folder: str | Path) -> DrawStore:
        """Open an existing store, with the settings it was made with. Nothing in it is executed."""
        settings = _read_index(Path(folder)).settings()
        return cls(folder, **settings)

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

    def add(self, module: nn.Module, *, step: int, rung: int = 0) -> bool:
        """Offer the weights and buffers of a module; True if they are in the store now, False if
        the rule left them out.

        Steps never go back: after a resume from an earlier step use `load_state_dict` first. The
        same step and rung once more, as after a failure between two rungs, is not counted again.
        """
        _whole_argument("step", step)
        _whole_argument("rung", rung)
        index, now = self._index, self._index.now
        if step < now.step:
            raise InvalidArgumentError(
                f"a draw of step {step} was offered, but {self.folder} has seen step {now.step}; after a resume call "
                f"load_state_dict with the state of its checkpoint or rewind({max(step - 1, 0)}), for a new run use a new folder"
            )
        if step == now.step and rung in now.rungs:
            return (step, rung) in self.draws
        slot = index.slot(now.seen)
        draws = index.draws
        if slot is not None:
            draws = tuple(
                replace(d, left=now.seen) if d.left is None and index.slot(d.number) == slot else d
                for d in draws
            )
            file = file_of(now.seen)
            sha256, size = self._write_draw(file, module, step=step, rung=rung)
            draws = (*draws, StoredDraw(now.seen, step, rung, file, sha256, size))
        self._write_index(
            replace(
                index,
                now=Moment(now.seen + 1, step, (*now.rungs, rung) if step == now.step else (rung,)),
                marks=tuple(
                    replace(mark, next_step=step) if mark.seen == now.seen else mark
                    for mark in index.marks
                ),
                draws=draws,
            ).needed()
        )
        self._remove_unnamed()
        return slot is not None

    def state_dict(self) -> dict[str, Any]:
        """Mark the present moment and describe it, in plain values. Files that it names stay until
        `commit` lets them go.
        """
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
        """Go back exactly to the moment of a `state_dict`; refused if the folder is that of another
        run, or if files are gone.
        """
        try:
            given = {name: state[name] for name in self._index.settings()}
            seen, step = state["seen"], state["step"]
            expected = {
                file: (draw["step"], draw["rung"], draw["sha256"])
                for file, draw in state["draws"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"not the state of a DrawStore ({error!r}); give what state_dict returned"
            ) from None
        if given != self._index.settings():
            raise CheckpointError(
                f"the state is that of a store with {given}, but {self.folder} has {self._index.settings()}"
            )
        moments = [
            mark
            for mark in (*self._index.marks, self._index.now)
            if (mark.seen, mark.step) == (seen, step)
        ]
        found = {
            draw.file: (draw.step, draw.rung, draw.sha256)
            for draw in self._index.draws
            if draw.was_there(seen)
        }
        if not moments or found != expected:
            raise CheckpointError(
                f"{self.folder} cannot go back to step {step} with {seen} draws seen: it holds another run, or commit() let "
                "those draws go; resume from a newer checkpoint or use another folder"
            )
        self._go_back(moments[0])

    def rewind(self, step: int) -> None:
        """Forget every draw after `step` and bring back those they replaced, which needs a mark
        there; 0 empties the store.
        """
        if self._index.now.step <= step:
            return
        for mark in self._index.marks:
            if mark.step <= step and mark.next_step is not None and step < mark.next_step:
                return self._go_back(mark)
        able = ", ".join(
            f"{max(mark.step, 0)} to {(mark.next_step or 0) - 1}"
            for mark in self._index.marks
            if mark.next_step
        )
        raise CheckpointError(
            f"{self.folder} cannot forget what came after step {step}, because draws that were there may be gone; it can go "
            f"back to steps {able}. Call state_dict() at every checkpoint and load_state_dict to resume from it"
        )

    def commit(self, oldest: int | None = None) -> None:
        """Remove files that only states of runs before step `oldest` need; with None, all that the
        newest state does not need.

        Call it when a checkpoint is safe on disk, with the step of the oldest checkpoint that is
        kept.
        """
        empty, *marks = self._index.marks
        kept = (
            marks[-1:]
            if oldest is None
            else [m for m in marks if m.next_step is None or m.next_step > oldest]
        )
        self._write_index(replace(self._index, marks=(empty, *kept)).needed())
        self._remove_unnamed()

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """(step, rung, state dict) of one draw after the other, in order of arrival, on the CPU;
        tied names share one tensor.
        """
        for draw in self._index.there():
            yield draw.step, draw.rung, read_draw(self.folder, draw)

    def predict(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Iterable[Any],
        *,
        rung: int | None = 0,
        target_key: str = "target",
        forward: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> Prediction:
        """The mean over stored draws of softmax(logits), one draw after the other in ONE module in
        eval mode.

        `model` is a function that makes the module, or a module, which is copied and stays as it
        is. A batch `(x, ..., y)` calls `module(x, ...)`, a dict `module(**rest)`, a tensor
        `module(x)`; for anything else give `forward(module, batch)`. Hotter rungs do not sample the
        posterior, so only draws of `rung` 0 count; None pools all.
        """
        chosen = [draw for draw in self._index.there() if rung is None or draw.rung == rung]
        if not chosen:
            rungs = sorted({draw.rung for draw in self._index.there()})
            raise InvalidArgumentError(
                f"{self.folder} holds no draw of rung {rung} (it has rungs {rungs}); add draws or choose another"
            )
        return predict_with(
            model, data, self.folder, chosen, target_key=target_key, forward=forward
        )

    def _go_back(self, moment: Moment) -> None:
        old = [draw for draw in self._index.draws if draw.number < moment.seen]
        draws = [replace(draw, left=None) if draw.was_there(moment.seen) else draw for draw in old]
        now = replace(moment, next_step=None)
        marks = tuple(
            now if mark.seen == now.seen else mark
            for mark in self._index.marks
            if mark.seen <= now.seen
        )
        index = replace(self._index, now=now, marks=marks, draws=tuple(draws))
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

    def _write_draw(self, file: str, module: nn.Module, *, step: int, rung: int) -> tuple[str, int]:
        """Put a draw in its place, synced; returns sha256 and size."""
        data = draw_as_bytes(module, step=step, rung=rung)
        self._replace_file(file, data)
        return hashlib.sha256(data).hexdigest(), len(data)

    def _write_index(self, index: Index) -> None:
        """Replace the index; only when that is done does the store take the new state."""
        self._replace_file(INDEX, index.to_json().encode())
        self._index = index

    def _replace_file(self, name: str, data: bytes) -> None:
        part = self.folder / f"{name}.part"
        try:
            if (
                part.is_symlink()
            ):  # not written here; writing would go through it to wherever it points
                part.unlink()
            replace_file(self.folder / name, data)
        except OSError as error:
            words = f"cannot write {self.folder / name} ({error.strerror}); the draws before it are safe. Is the disk full?"
            raise CheckpointError(words) from None

    def _remove_unnamed(self) -> None:
        """Remove what the index does not name: draws that left, and what a crash left behind."""
        named = {draw.file for draw in self._index.draws}
        for name in os.listdir(self.folder):
            if OURS.fullmatch(name) and name not in named:
                with contextlib.suppress(
                    OSError
                ):  # not worth losing a run for; the next add tries again
                    os.unlink(self.folder / name)

    def __repr__(self) -> str:
        index = self._index
        return f"DrawStore({str(self.folder)!r}, {len(self)} of {self.n_seen} draws, keep={index.keep!r}, capacity={self.capacity})"


def _whole_argument(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgumentError(f"{name} must be a whole number >= 0, got {value!r}")


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        require_file(path)
        index = Index.from_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no store of draws in {folder}: it has no {INDEX}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror})") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of draws ({one_line(error)}); restore the file or use another folder"
        ) from None
    for draw in index.there():
        check_size(folder, draw)
    return index
