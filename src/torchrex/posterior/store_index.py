"""The index of a store of draws: which draws stay, and which moments it can go back to. Nothing
here touches a file.

Draw number k (from 0, in order of arrival) takes a slot, or none, and whoever sat there leaves; the
rule knows (seed, k) alone:

    newest      slot = k mod capacity
    reservoir   slot = k while k < capacity, then uniform on 0..k, where only slots < capacity count (algorithm R, Vitter 1985):
                every draw seen so far is in the store with probability capacity / seen
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from torchrex.errors import InvalidArgumentError
from torchrex.rng import derive_seed

SCHEMA, VERSION = "torchrex.draws", 1
INDEX = "index.json"

Keep = Literal["newest", "reservoir"]


def slot_of(number: int, *, keep: str, capacity: int, seed: int) -> int | None:
    """The slot that draw `number` takes, or None if it is not kept; a pure function, so no random
    state has to be saved.
    """
    if keep == "newest":
        return number % capacity
    slot = number if number < capacity else derive_seed(seed, f"reservoir:{number}") % (number + 1)
    return slot if slot < capacity else None


def file_of(number: int) -> str:
    """A draw's file. A name in an index must be exactly this one, so no index can point outside its
    folder.
    """
    return f"draw-{number:09d}.safetensors"


@dataclass(frozen=True)
class StoredDraw:
    """One line of the index."""

    number: int  # order of arrival, from 0
    step: int
    rung: int
    file: str
    sha256: str
    size: int
    left: int | None = None  # number of the draw that took its slot; its file is kept for a mark

    def was_there(self, seen: int) -> bool:
        """Was it in the store when `seen` draws had arrived?"""
        return self.number < seen and (self.left is None or seen <= self.left)


@dataclass(frozen=True)
class Moment:
    """How far the store had come."""

    seen: int = 0  # draws that arrived, kept or not
    step: int = -1  # of the newest of them
    rungs: tuple[int, ...] = ()  # that arrived at that step
    next_step: int | None = None  # of the first draw after this moment, if it is past


@dataclass(frozen=True)
class Index:
    """The whole content of index.json."""

    keep: str
    capacity: int
    seed: int
    now: Moment = Moment()
    marks: tuple[Moment, ...] = (Moment(),)  # oldest first; the empty store can always be restored
    draws: tuple[
        StoredDraw, ...
    ] = ()  # by number; those that left and are kept for a mark included

    def settings(self) -> dict[str, Any]:
        return {"keep": self.keep, "capacity": self.capacity, "seed": self.seed}

    def slot(self, number: int) -> int | None:
        return slot_of(number, keep=self.keep, capacity=self.capacity, seed=self.seed)

    def there(self) -> list[StoredDraw]:
        return [draw for draw in self.draws if draw.left is None]

    def needed(self) -> Index:
        """Without the draws that have left and that no mark needs."""
        needed = (
            d
            for d in self.draws
            if d.left is None or any(d.was_there(mark.seen) for mark in self.marks)
        )
        return replace(self, draws=tuple(needed))

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: bytes) -> Index:
        """Parse and check everything; KeyError, TypeError and ValueError say what is wrong."""
        raw = json.loads(text, object_pairs_hook=_each_once)
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        if (found := (raw.pop("schema", None), raw.pop("version", None))) != (SCHEMA, VERSION):
            raise ValueError(
                f"schema {found[0]!r} version {found[1]!r} instead of {SCHEMA!r} version {VERSION}"
            )
        if stray := sorted(set(raw) - {field.name for field in fields(Index)}):
            raise ValueError(f"it has {stray[0]!r}, which is not known here")
        index = Index(
            keep=raw["keep"],
            capacity=raw["capacity"],
            seed=raw["seed"],
            now=_moment(raw["now"]),
            marks=tuple(_moment(mark) for mark in raw["marks"]),
            draws=tuple(StoredDraw(**draw) for draw in raw["draws"]),
        )
        return index.checked()

    def checked(self) -> Index:
        """Itself, if it is one that a store can have written; ValueError otherwise."""
        check_settings(self)
        for draw in self.draws:
            _whole(
                draw.step,
                draw.rung,
                draw.size,
                draw.number,
                *([] if draw.left is None else [draw.left]),
            )
            if draw.file != file_of(draw.number):
                raise ValueError(f"draw {draw.number} has the file name {draw.file!r}")
            if not re.fullmatch(r"[0-9a-f]{64}", draw.sha256):
                raise ValueError(f"{draw.file} has no sha256")
        slots = [self.slot(draw.number) for draw in self.there()]
        if len(slots) != min(self.now.seen, self.capacity) or set(slots) != set(range(len(slots))):
            raise ValueError(
                f"{len(slots)} draws do not fill the slots of a store that has seen {self.now.seen}"
            )
        numbers = [draw.number for draw in self.draws]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= self.now.seen):
            raise ValueError(
                f"draws do not stand in order of arrival, or not before the {self.now.seen} that were seen"
            )
        if any(
            draw.left is not None and not draw.number < draw.left < self.now.seen
            for draw in self.draws
        ):
            raise ValueError("a draw left before it arrived, or for one that has not arrived")
        seen = [mark.seen for mark in self.marks]
        if seen != sorted(set(seen)) or seen[:1] != [0] or seen[-1] > self.now.seen:
            raise ValueError(
                f"marks at {seen} are not those of a store that has seen {self.now.seen}"
            )
        return self


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's reader takes the last of two values for one name without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is twice in one object")
    return found


def _whole(*values: Any) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{value!r} is not a whole number >= 0")


def _moment(raw: Mapping[str, Any]) -> Moment:
    moment = Moment(**{**raw, "rungs": tuple(raw["rungs"])})
    _whole(
        moment.seen,
        moment.step + 1,
        *moment.rungs,
        *([] if moment.next_step is None else [moment.next_step]),
    )
    return moment


def check_settings(index: Index) -> None:
    if index.keep not in ("newest", "reservoir"):
        raise InvalidArgumentError(f"keep must be 'newest' or 'reservoir', got {index.keep!r}")
    if (
        isinstance(index.capacity, bool)
        or not isinstance(index.capacity, int)
        or index.capacity < 1
    ):
        raise InvalidArgumentError(f"capacity must be a whole number >= 1, got {index.capacity!r}")
    if isinstance(index.seed, bool) or not isinstance(index.seed, int) or index.seed < 0:
        raise InvalidArgumentError(f"seed must be a whole number >= 0, got {index.seed!r}")
