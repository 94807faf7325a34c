"""One input: a fresh copy of a specimen, one mutation, one look, and everything that must hold
afterwards.

equal     it loaded as the original does told      it loaded in part, and what is damaged was said
other     it loaded as something else that is sound, which only kinds without a checksum, or with a
forged one, may do shown     doctor, page and comparison were made of it, without control characters
and scripts refused   an error of ours, in one line Anything else is a Finding: another exception, a
time-out, memory, a file that appeared, changed or went.
"""

from __future__ import annotations

import faulthandler
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fuzz.mutations import SPECIAL, mutate_bytes, mutate_json, mutate_tensors, put_special
from fuzz.specimens import Kind
from torchrex.errors import TorchrexError

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
        raise Finding(
            f"{kind.name}: {mutation} of {file}: files changed: {sorted(set(after.items()) ^ set(before.items()))[:4]}"
        )
    shutil.rmtree(place / "inside")
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return Trial(kind.name, file, mutation, outcome)


def _choose(kind: Kind, file: str, random: Random) -> str:
    by_form = {".json": ["json"] * 4, ".safetensors": ["tensors"] * 4, ".jsonl": ["line"] * 4}
    usual = ["bytes", "bytes", *by_form.get(Path(file).suffix, [])]
    return (
        random.choice(SPECIAL) if kind.specials and random.random() < 0.15 else random.choice(usual)
    )


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
    """So that what asks for absurd memory gets a MemoryError, and takes nothing from the machine."""
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
