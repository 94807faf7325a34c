"""What a store of draws has on disk: `index.json`, and one safetensors file for each draw.

Draw number k (from 0, in order of arrival) takes a slot, or none, and replaces the draw in that
slot. The rule is a function of (seed, k) alone:

    newest      slot = k mod capacity
    reservoir   slot = k while k < capacity, then uniform on 0..k, and only slots < capacity count
                (algorithm R, Vitter 1985): every draw seen so far is in the store with probability
                capacity / seen
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from torchrex.checkpoint import one_line, parse_json, read_file, require_file
from torchrex.durable import open_file
from torchrex.errors import CheckpointError, InvalidArgumentError, require_whole
from torchrex.rng import derive_seed

SCHEMA, VERSION = "torchrex.draws", 1
INDEX = "index.json"

Keep = Literal["newest", "reservoir"]


def slot_of(number: int, *, keep: str, capacity: int, seed: int) -> int | None:
    """The slot that draw `number` takes, or None; a pure function, so no random state is saved."""
    if keep == "newest":
        return number % capacity
    slot = number if number < capacity else derive_seed(seed, f"reservoir:{number}") % (number + 1)
    return slot if slot < capacity else None


def file_of(number: int) -> str:
    """The file of a draw. An index may name no other, so it cannot point outside its folder."""
    return f"draw-{number:09d}.safetensors"


@dataclass(frozen=True)
class StoredDraw:
    """One draw in the index."""

    number: int  # order of arrival, from 0
    step: int
    rung: int
    file: str
    sha256: str
    size: int
    left: int | None = None  # number of the draw that replaced it; a mark may still need its file

    def was_there(self, seen: int) -> bool:
        """Was it in the store when `seen` draws had arrived?"""
        return self.number < seen and (self.left is None or seen <= self.left)


@dataclass(frozen=True)
class Moment:
    """How far the store had come."""

    seen: int = 0  # draws that arrived, kept or not
    step: int = -1  # of the newest of them
    rungs: tuple[int, ...] = ()  # that arrived at that step
    next_step: int | None = None  # of the first draw after this moment, if there is one


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    keep: str
    capacity: int
    seed: int
    now: Moment = Moment()
    marks: tuple[Moment, ...] = (Moment(),)  # oldest first; the empty store can always be restored
    draws: tuple[StoredDraw, ...] = ()  # by number, with replaced draws that a mark needs

    def settings(self) -> dict[str, Any]:
        return {"keep": self.keep, "capacity": self.capacity, "seed": self.seed}

    def slot(self, number: int) -> int | None:
        return slot_of(number, **self.settings())

    def there(self) -> list[StoredDraw]:
        return [draw for draw in self.draws if draw.left is None]

    def needed(self) -> Index:
        """Without the replaced draws that no mark needs."""

        def is_needed(draw: StoredDraw) -> bool:
            return draw.left is None or any(draw.was_there(mark.seen) for mark in self.marks)

        return replace(self, draws=tuple(filter(is_needed, self.draws)))

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: bytes) -> Index:
        """Parse and check everything; KeyError, TypeError and ValueError say what is wrong."""
        raw = parse_json(text)
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
        if (found := (raw.pop("schema", None), raw.pop("version", None))) != (SCHEMA, VERSION):
            raise ValueError(f"schema and version are {found} instead of {(SCHEMA, VERSION)}")
        if unknown := sorted(set(raw) - {field.name for field in fields(Index)}):
            raise ValueError(f"it has {unknown[0]!r}, which is not known here")
        now, *marks = (
            Moment(**{**moment, "rungs": tuple(moment["rungs"])})
            for moment in (raw.pop("now"), *raw.pop("marks"))
        )
        draws = tuple(StoredDraw(**draw) for draw in raw.pop("draws"))
        return Index(**raw, now=now, marks=tuple(marks), draws=draws).checked()

    def checked(self) -> Index:
        """Itself, if a store can have written it; ValueError otherwise."""
        check_settings(self)
        for moment in (self.now, *self.marks):
            for value in (moment.seen, moment.step + 1, *moment.rungs, moment.next_step or 0):
                require_whole("a number of a moment", value)
        for draw in self.draws:
            for value in (draw.number, draw.step, draw.rung, draw.size, draw.left or 0):
                require_whole("a number of a draw", value)
            if draw.file != file_of(draw.number):
                raise ValueError(f"draw {draw.number} has the file name {draw.file!r}")
            if not re.fullmatch(r"[0-9a-f]{64}", draw.sha256):
                raise ValueError(f"{draw.file} has no sha256")
            if draw.left is not None and not draw.number < draw.left < self.now.seen:
                raise ValueError(f"draw {draw.number} left before it arrived, or for no draw")
        slots = [self.slot(draw.number) for draw in self.there()]
        seen = self.now.seen
        if len(slots) != min(seen, self.capacity) or set(slots) != set(range(len(slots))):
            raise ValueError(f"{len(slots)} draws do not fill the slots after {seen} draws seen")
        numbers = [draw.number for draw in self.draws]
        if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= seen):
            raise ValueError(f"draws are not in order of arrival, or not among the {seen} seen")
        marked = [mark.seen for mark in self.marks]
        if marked != sorted(set(marked)) or marked[:1] != [0] or marked[-1] > seen:
            raise ValueError(f"marks at {marked} do not belong to a store that has seen {seen}")
        return self


def check_settings(index: Index) -> None:
    if index.keep not in ("newest", "reservoir"):
        raise InvalidArgumentError(f"keep must be 'newest' or 'reservoir', got {index.keep!r}")
    require_whole("capacity", index.capacity, 1)
    require_whole("seed", index.seed)


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        index = Index.from_json(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"no store of draws in {folder}: it has no {INDEX}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not an index of draws ({one_line(error)}); restore it or use another folder"
        ) from None
    for draw in index.there():
        check_size(folder, draw)
    return index


def check_size(folder: Path, draw: StoredDraw) -> None:
    path = folder / draw.file
    try:
        size = require_file(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}), which {INDEX} names; restore the file"
        ) from None
    if size != draw.size:
        raise CheckpointError(f"{path} is damaged: {size} bytes instead of {draw.size}")


def read_draw(folder: Path, draw: StoredDraw) -> dict[str, Tensor]:
    """The tensors of a draw, after its checksum; safetensors holds nothing that can be executed."""
    path = folder / draw.file
    check_size(folder, draw)
    try:
        with open_file(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror})") from None
    if sha256 != draw.sha256:
        raise CheckpointError(f"{path} has another sha256 than in {INDEX}; it is damaged")
    try:
        with safe_open(str(path), framework="pt") as opened:
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            about = json.loads((opened.metadata() or {})["torchrex"])
        found = tuple(about[name] for name in ("schema", "step", "rung"))
        if found != (SCHEMA, draw.step, draw.rung):
            raise ValueError(f"its schema, step and rung are {found}")
        return {name: state[stored] for name, stored in about["names"].items()}
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not in safetensors format ({one_line(error)})") from None


def draw_as_bytes(module: nn.Module, *, step: int, rung: int) -> bytes:
    """Weights and buffers of a module as the content of a draw's file, tied tensors once."""
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}  # name in the module -> name in the file
    first: dict[Any, str] = {}  # place in memory -> name in the file
    for full_name, value in module.state_dict().items():
        name = plain_name(full_name)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise InvalidArgumentError(
                f"only dense tensors can be stored, but {name} of the module's state dict is "
                f"{type(value).__name__}"
            )
        memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        names[name] = first.setdefault(memory if value.numel() else name, name)
        if names[name] == name:
            value = value.detach()
            tensors[name] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    about = {"schema": SCHEMA, "step": step, "rung": rung, "names": names}
    # Not save_file: a killed process would leave its temporary file behind.
    return save(tensors, {"torchrex": json.dumps(about)})


def load_into(module: nn.Module, state: Mapping[str, Tensor], file: str) -> None:
    """Put a draw into a module of the same form; `file` is for the message if it does not fit."""
    names = {plain_name(name): name for name in module.state_dict()}
    require_same_shapes(module.state_dict(), state, file)
    module.load_state_dict({names[name]: value for name, value in state.items()})


def require_same_shapes(mine: Mapping[str, Any], stored: Mapping[str, Tensor], file: str) -> None:
    """Refuse the tensors of another architecture, naming the first that differs."""
    shapes = [
        {plain_name(name): list(getattr(value, "shape", ())) for name, value in named.items()}
        for named in (mine, stored)
    ]
    for name in (*shapes[0], *shapes[1]):
        here, there = (str(shape[name]) if name in shape else "absent" for shape in shapes)
        if here != there:
            raise InvalidArgumentError(
                f"{file} is of another model: {one_line(name)} is {there} there and {here} in this "
                "model; give the model of the run"
            )


def plain_name(name: str) -> str:
    """A name as the module had it before torch.compile wrapped it."""
    return name.replace("_orig_mod.", "")
