"""Mutated files for everything that torchrex reads: what is done to them, what they are, and what
may come of it.

One trial is a fresh copy of a specimen, one mutation, one look, and one of these outcomes:
equal (it loaded as the original), told (it loaded in part, and the damage was reported), other (it
loaded as something else that is sound, which only files without a checksum or with a forged one may
do), shown (doctor, page and comparison were made of it), refused (an error of ours in one line).
Anything else is a Finding: another exception, a time-out, memory, a file that appeared or changed.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import os
import pickle
import resource
import shutil
import signal
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from torchrex.checkpoint import Checkpoints
from torchrex.errors import TorchrexError
from torchrex.experiments import get_recipe, run_recipe
from torchrex.posterior import Draws, DrawStore
from torchrex.recording import read_log
from torchrex.report.compare import compare_folders, lines
from torchrex.report.doctor import as_text, diagnose
from torchrex.report.page.build import page_of
from torchrex.report.reader import load_run
from torchrex.runs.folder import RunFolder
from torchrex.vision.data import ImageSet, load_images, save_images
from torchrex.vision.data.sources import SOURCES, Source

SPECIAL = (
    *("pickle", "zipped pickle", "folder", "pipe", "device", "link to a file", "link to itself"),
    *("empty", "gone"),
)
# In place of a value, as they are written in the file.
VALUES = [
    *b"null true false 0 -1 1 2 3.5 -0.0 1e-320 1e308 1e999 -1e999 NaN Infinity -Infinity".split(),
    *b"9007199254740993 9223372036854775807 9223372036854775808 -9223372036854775809".split(),
    *b"1152921504606846976 [] {} [[]] tru 'single'".split(),
    *(b"9" * 30, b"-" + b"9" * 400, b"9" * 5000, b'[{"a": 1}]', b"[" + b"0," * 5000 + b"0]"),
    *(b"[" * n + b"]" * n for n in (40, 700, 100_000)),
    *(b'{"a":' * 700 + b"1" + b"}" * 700, b'{"dict":' * 300 + b"{}" + b"}" * 300),
    *b'"" "a" "inf" "nan" "0x10" "finished" "a\\nb\\r\\nc" ".." "../../x" "/etc/passwd"'.split(),
    *b'"a/../../b" "\\u0000" "x\\u0000y" "NUL.txt" "C:\\\\x" "file:///etc/passwd" "~/x"'.split(),
    *b'"%2e%2e%2f" "\\u001b[2J\\u001b]0;owned\\u0007" "\\u009b31m" "\\u202egnp.exe"'.split(),
    *b'"\\ud800" "\\udcff\\ud83d" "<script>alert(1)</script>"'.split(),
    *(b'"\xff\xfe"', b'"\xc0\x80"', b'"\\"><img src=x onerror=alert(1)>"'),
    *(b'"' + b"x" * 300_000 + b'"', b'"' + b"y/" * 3000 + b'"'),
    b'{"tensor": {"dtype": "float32", "shape": [1152921504606846976]}}',
    *(b'{"int": "0x' + b"f" * 9000 + b'"}', b'{"float": "nan"}'),
]
NAMES = [value for value in VALUES if value.startswith(b'"')]
HOLE = "@hole@"


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Flips, cuts, insertions and repetitions, wherever they fall."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(found) + 1)
        length = random.choice((1, 2, 8, 64, 1000))
        what = random.randrange(7)
        if what <= 1 and found:
            found[at % len(found)] ^= 1 << random.randrange(8)
        elif what == 2:
            del found[at:]
        elif what == 3:
            found[at:at] = random.randbytes(length)
        elif what == 4:
            del found[at : at + length]
        elif what == 5:
            found[at:at] = found[at : at + length]
        else:
            found[at : at + length] = random.choice((b"\0", b"\xff", b"9", b'"', b"{")) * length
    return bytes(found)


def mutate_json(data: bytes, random: Random) -> bytes:
    """One value, name or member of a JSON text becomes something else; the rest stays as it is."""
    tree = json.loads(data)
    holder, key = random.choice(list(_places(tree)))
    what = random.randrange(6) if isinstance(holder, dict) else random.choice((0, 0, 1, 5))
    fragment = random.choice(VALUES)
    if holder is None:
        return fragment
    value = holder[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if what == 1:
        del holder[key]
    elif what == 2:
        holder[HOLE], fragment = holder.pop(key), random.choice(NAMES)
    elif what == 4:
        holder[HOLE], fragment = 1, random.choice(NAMES)
    else:
        holder[key] = HOLE
        if what == 3:  # the same name twice
            fragment = b"%s, %s: %s" % (
                *(json.dumps(each).encode() for each in (value, key)),
                fragment,
            )
        elif what == 5 and is_number:
            near = (value + 1, -value, value * 2, value * 10**6, value + 0.5, str(value), [value])
            fragment = json.dumps(random.choice(near)).encode()
    return json.dumps(tree).encode().replace(f'"{HOLE}"'.encode(), fragment)


def _places(tree, holder=None, key=None):
    yield holder, key
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree if isinstance(tree, list) else ())
    )
    for name, child in inner:
        yield from _places(child, tree, name)


def mutate_tensors(data: bytes, random: Random) -> bytes:
    """The table of contents of a safetensors file, its length, or the bytes it speaks of."""
    length = int.from_bytes(data[:8], "little")
    head, body = data[8 : 8 + length], data[8 + length :]
    what = random.randrange(8)
    if what == 0:
        wrong = random.choice(
            (0, 1, length - 1, length + 1, length + len(body) + 1, 2**40, 2**60, 2**63, 2**64 - 1)
        )
        return wrong.to_bytes(8, "little") + head + body
    if what == 1:
        return data[: 8 + length] + mutate_bytes(body, random)
    head = mutate_json(head, random) if what <= 3 else _mutate_entry(json.loads(head), random)
    return len(head).to_bytes(8, "little") + head + body


def _mutate_entry(table, random: Random) -> bytes:
    names = [name for name in table if name != "__metadata__"]
    name, what = random.choice(names), random.randrange(5)
    entry = table[name]
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if what == 0:
        entry["dtype"] = random.choice(
            ["F64", "I64", "BOOL", "U8", "BF16", "F8_E4M3", "C64", "I128", "PICKLE", "f32"]
        )
    elif what == 1:
        odd = ([], [0], [-1], [2**60], [2**32, 2**32], [2**63], [0, 2**62], [1] * 70)
        entry["shape"] = random.choice((*odd, shape[::-1], [*shape, 1], [n + 1 for n in shape]))
    elif what == 2:
        wrong = ([begin, end + 8], [begin + 4, end + 4], [end, begin], [-8, 8], [begin, 2**60], [0])
        entry["data_offsets"] = random.choice(wrong)
    elif what == 3:
        entry["dtype"], entry["shape"], entry["data_offsets"] = "F32", [2**60], [0, 2**62]
    else:
        table[name] = dict(table[random.choice(names)])
    return json.dumps(table).encode()


def put_special(path: Path, kind: str, root: Path) -> None:
    """Something that is no file, or another's file, at the name of one. `root` is the place of the
    whole trial.
    """
    if path.is_dir() and not path.is_symlink():
        path.rename(root / "moved away")
    else:
        path.unlink(missing_ok=True)
    bomb = Bomb(root / "exploded")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    elif kind == "zipped pickle":  # as torch.save writes it
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(bomb, protocol=2))
            file.writestr("archive/version", "3\n")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to a file":
        path.symlink_to(root / "secret")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.touch()


# The real files, how each kind is read, how its checksums are made right after a mutation


SETTING = {"seed": 3, "lr": 0.1, "rungs": [0.0, math.inf]}


@dataclass(frozen=True)
class Kind:
    """One kind of file: a folder of specimens, which of them are mutated, and how they are read."""

    name: str
    folder: Path
    files: tuple[str, ...]
    look: Callable[[Path], Any]
    seal: Callable[[Path, str], None] | None = None  # makes its checksums right after a mutation
    may_differ: bool = False  # no checksum covers it: it may load as something else that is sound
    optional: bool = False  # a run without these files is one as well
    weight: int = 1


# Checkpoints


def checkpoint_state() -> dict[str, Any]:
    torch.manual_seed(0)
    rng = torch.arange(64, dtype=torch.uint8)
    models = [{"w": torch.randn(4, 3), "n": torch.tensor(k)} for k in range(2)]
    rest = {"rung_of": torch.tensor([1, 0]), "F": 2.5, "big": 2**70, "bad": math.nan}
    rest |= {"words": ["a", None, True, -3], "deep": {"x": {}}}
    replicas = [{"model": model, "rng": rng} for model in models]
    return {"replicas": replicas, "run": rest, "averages": [], "seconds": 1.5}


def look_at_checkpoint(folder: Path) -> Any:
    found = Checkpoints(folder).load_newest(setting=SETTING)
    assert found is None or found.step == 30
    return None if found is None else plain(found.state)


def seal_checkpoint(folder: Path, name: str) -> None:
    manifest = folder / "step=000000030" / "manifest.json"
    if not name.endswith("manifest.json"):
        about = json.loads(manifest.read_bytes())
        data = (folder / name).read_bytes()
        about["files"][Path(name).name] = {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        manifest.write_text(json.dumps(about))
    (manifest.parent / "DONE").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest() + "\n")


# Run folders


def look_at_run(folder: Path) -> Any:
    """Everything that reads a run folder: the reports, and the runner before it resumes."""
    run = load_run(folder)
    for problem in run.problems:
        assert problem.isprintable(), problem
    RunFolder(folder).result, RunFolder(folder).config, RunFolder(folder).finished
    names = ("config", "result", "problems", "name", "status", "trace")
    seen = {name: getattr(run, name) for name in names}
    return plain({**seen, "draws": None if run.draws is None else vars(run.draws)})


def look_at_views(folder: Path) -> Any:
    """What a person sees of a run: doctor, the page, and the comparison with itself."""
    run = load_run(folder)
    said = [words for pair in as_text(diagnose(run, quick=True)) for words in pair]
    page = page_of([run], folder / "page.html", title="fuzz", doctor_seconds=0.0)
    page.encode()
    assert page.count("<script>") == 1, "a script that is not the page's own"
    assert "<img" not in page
    if run.status == "finished":
        for comparison in compare_folders([folder, folder]):
            said += lines(comparison, 100)
    for words in said:
        assert words.isprintable(), repr(words)
    return [words.replace(str(folder), "FOLDER") for words in said]


# Stores of draws


def look_at_store(folder: Path) -> Any:
    store = DrawStore.load(folder)
    return plain([store.capacity, store.n_seen, store.draws, list(store)])


def seal_store(folder: Path, name: str) -> None:
    if name == "index.json":
        return
    index = json.loads((folder / "index.json").read_bytes())
    data = (folder / name).read_bytes()
    for draw in index["draws"]:
        if draw["file"] == name:
            draw.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (folder / "index.json").write_text(json.dumps(index))


# Image sets


TINY = Source("cifar10", {"train": (2, 1), "test": (1, 1)}, SOURCES["cifar10"].archives)


def look_at_cache(folder: Path) -> Any:
    return plain(vars(load_images("cifar10", folder)))


def seal_cache(folder: Path, name: str) -> None:
    """A byte of a picture changes, and its checksum with it."""
    path = folder / name
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    body = bytearray(data[8 + length :])
    about = json.loads(table["__metadata__"]["torchrex"])
    for each in about["sha256"]:
        begin, end = table[each]["data_offsets"]
        about["sha256"][each] = hashlib.sha256(body[begin:end]).hexdigest()
    table["__metadata__"]["torchrex"] = json.dumps(about)
    head = json.dumps(table).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(body))


def plain(value: Any) -> Any:
    """Something that compares bit by bit; whatever is not a plain value of ours is a finding."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    assert value is None or type(value) in (bool, int, float, str), type(value)
    return repr(value) if isinstance(value, float) else value


def make_kinds(root: Path, stack: ExitStack) -> list[Kind]:
    """All kinds, with real files below `root`. What the small image set needs is patched until
    `stack` is closed.
    """
    saved = Checkpoints(root / "checkpoint")
    saved.save(30, checkpoint_state(), setting=SETTING)
    inner = "step=000000030"
    tensors = tuple(f"{inner}/{name}.safetensors" for name in ("replica=0", "replica=1", "shared"))
    config = replace(get_recipe("figure1/case1-naive"), n_steps=60, n_runs=3, thin=2)
    density = run_recipe(config, 3, root / "density").path
    network = _network(root)
    store = DrawStore(root / "store", capacity=3)
    for step in range(5):
        torch.manual_seed(step)
        store.add(nn.Linear(3, 2), step=step)
    names = tuple(draw.name for draw in sorted((root / "store").glob("draw-*")))
    stack.enter_context(mock.patch.dict(SOURCES, {"cifar10": TINY}))
    cache = _image_set(root)
    (root / "log").mkdir()
    rows = [{"kind": "start", "step": 0, "name": "x", "temperatures": [1.0, 2.0]}]
    rows += [
        {"kind": "steps", "first": k, "step": k + 9, "energy": [1.5, None], "accepted": [1]}
        for k in range(1, 50, 10)
    ]
    (root / "log" / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = ("config.json", "result.json")
    views = (*runs, "trace.safetensors")
    stored, cached, tables = root / "store", ("cifar10.safetensors",), ("draws.safetensors",)
    manifest, saved_in, trace = f"{inner}/manifest.json", root / "checkpoint", views[-1:]
    forged = (look_at_checkpoint, seal_checkpoint, True)
    whole = (manifest, f"{inner}/DONE", *tensors)
    return [
        Kind("checkpoint", saved_in, whole, look_at_checkpoint, weight=3),
        Kind("sealed checkpoint", saved_in, (manifest,) * 3 + tensors, *forged, weight=4),
        Kind("run of a density", density, runs, look_at_run, may_differ=True, weight=2),
        Kind("run of a network", network, runs, look_at_run, may_differ=True, weight=2),
        Kind("draws and trace of a run", density, tables + trace, look_at_run, optional=True),
        Kind("trace of a network", network, trace, look_at_run, optional=True),
        Kind("views of a density", density, (*views, *tables), look_at_views, may_differ=True),
        Kind("views of a network", network, views, look_at_views, may_differ=True),
        Kind("draws", density, tables, lambda f: plain(vars(Draws.load(f / tables[0])))),
        Kind("trace", network, trace, lambda f: plain(RunFolder(f).trace())),
        Kind(
            "store", stored, ("index.json",) * 2 + names, look_at_store, may_differ=True, weight=2
        ),
        Kind("sealed store", stored, names, look_at_store, seal_store, True),
        Kind("cache", cache, cached, look_at_cache),
        Kind("sealed cache", cache, cached, look_at_cache, seal_cache, True),
        Kind("log", root / "log", ("log.jsonl",), lambda f: read_log(f / "log.jsonl"), None, True),
    ]


def _network(root: Path) -> Path:
    recipe = get_recipe("digits/resghmc")
    config = replace(recipe, epochs=2, burn_in_epochs=1, hidden=4, checkpoint_every=20)
    return run_recipe(config, 1, root / "network").path


def _image_set(root: Path) -> Path:
    """A cache of five random images."""
    random = np.random.default_rng(0)
    arrays = {"train_labels": np.array([0, 1, 0]), "test_labels": np.array([1, 0])}
    for part, n in (("train", 3), ("test", 2)):
        arrays[f"{part}_images"] = random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save_images(ImageSet("cifar10", 2, **tensors, provenance="made for tests"), root / "cache")
    return root / "cache"


# One trial

SECONDS = 10.0  # of one look, on a busy machine
MOST_MEMORY = 512 * 1024  # KiB more than before
LONGEST = 4000  # characters of a message, paths included


class Finding(AssertionError):  # noqa: N818 - what a fuzzer is for
    """Something that must not happen."""


class Trial(NamedTuple):
    kind: str
    file: str
    mutation: str
    outcome: str


class TookTooLong(BaseException):
    """Not an Exception, so that nothing on the way takes it for damage."""


def try_one(
    kind: Kind, original: Any, place: Path, random: Random, mutation: str | None = None
) -> Trial:
    """Mutate, look, compare. `place` is an empty folder, and is empty again afterwards."""
    folder = place / "inside" / kind.folder.name  # a run folder tells its seed by its name
    shutil.copytree(kind.folder, folder)
    (place / "secret").write_text("not for reading")
    file = random.choice(kind.files)
    mutation = mutation or _choose(kind, file, random)
    apply(mutation, folder, file, place, random)
    if kind.seal is not None and mutation not in SPECIAL:
        # Where nothing is left that could be sealed, as well.
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            kind.seal(folder, file)
    before = standing(place)
    try:
        outcome = _outcome(kind, folder, original, gone=mutation == "gone")
    except Finding as finding:
        raise Finding(f"{kind.name}: {mutation} of {file}: {finding}") from finding.__cause__
    if (after := standing(place)) != before:
        changed = sorted(set(after.items()) ^ set(before.items()))[:4]
        raise Finding(f"{kind.name}: {mutation} of {file}: files changed: {changed}")
    shutil.rmtree(place / "inside")
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return Trial(kind.name, file, mutation, outcome)


def _choose(kind: Kind, file: str, random: Random) -> str:
    by_form = {".json": ["json"] * 4, ".safetensors": ["tensors"] * 4, ".jsonl": ["line"] * 4}
    usual = ["bytes", "bytes", *by_form.get(Path(file).suffix, [])]
    return random.choice(SPECIAL if random.random() < 0.15 else usual)


def apply(mutation: str, folder: Path, file: str, place: Path, random: Random) -> None:
    path = folder / file
    if mutation in SPECIAL:
        return put_special(path, mutation, place)
    data = path.read_bytes()
    if mutation == "line":
        rows = data.splitlines(keepends=True)
        k = random.randrange(len(rows))
        rows[k] = mutate_json(rows[k], random) + b"\n"
        path.write_bytes(b"".join(rows))
    else:
        path.write_bytes(
            {"bytes": mutate_bytes, "json": mutate_json, "tensors": mutate_tensors}[mutation](
                data, random
            )
        )


def _outcome(kind: Kind, folder: Path, original: Any, *, gone: bool) -> str:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with limited(SECONDS), little_memory(), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = kind.look(folder)
    except TorchrexError as error:
        words = str(error)
        if not words.isprintable() or len(words) > LONGEST:
            raise Finding(f"its message is not one clear line: {words[:200]!r}") from error
        outcome = "refused"
    except TookTooLong:
        raise Finding(f"no answer in {SECONDS:g} s") from None
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {str(error)[:300]}") from error
    else:
        outcome = _compare(kind, found, original, gone=gone)
    if (more := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) > MOST_MEMORY:
        raise Finding(f"it took {more / 1024:,.0f} MiB")
    return outcome


def _compare(kind: Kind, found: Any, original: Any, *, gone: bool) -> str:
    if found == original:
        return "equal"
    if isinstance(found, dict) and found.get("problems"):
        return "told"
    if found is None:  # no checkpoint at all, as where DONE is gone
        return "told"
    if kind.name.startswith("views"):
        return "shown"
    if kind.may_differ or (gone and kind.optional):
        return "other"
    raise Finding("it loaded as something else without a word")


def standing(place: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of everything there; links are not followed."""
    found = {}
    for path in place.rglob("*"):
        about = path.lstat()
        found[str(path.relative_to(place))] = (about.st_size, about.st_mtime_ns)
    return found


@contextmanager
def little_memory() -> Iterator[None]:
    """A reader that asks for absurd memory gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * MOST_MEMORY * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # Code that is not Python's may wait for a pipe and not hear the alarm: then the whole process
    # ends, and says where it was.
    faulthandler.dump_traceback_later(seconds + 20, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
