"""When a checkpoint counts: the order of writing, renaming and removing that a crash cannot break.

    .step=000000123.part    being written; never read
    step=000000123          complete as soon as DONE is in it, which is put there last and taken away first
    .step=000000123.old     what stood there before, while it is replaced; it counts until the new one is complete

One process writes into a folder; any number may read.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torchrex.checkpoint.contents import DONE, Contents, DamagedError, read
from torchrex.distributed import ALONE, ProcessGroup
from torchrex.durable import remove_folder, sync_folder, write_synced
from torchrex.errors import CheckpointError, InvalidArgumentError

log = logging.getLogger("torchrex")


class Checkpoint(NamedTuple):
    """A state that passed every check."""

    step: int
    state: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    A state is a tree of dicts with str keys and lists; its leaves are dense tensors and plain int,
    float, bool, str or None. All come back with the same values and types, except that tensors are
    on the CPU and tuples are lists.
    """

    folder: Path
    keep: int = 2  # so many of the newest stay

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if self.keep < 1:
            raise InvalidArgumentError(
                f"keep must be at least 1, but got {self.keep}; the newest checkpoint is always kept"
            )

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        setting: Mapping[str, Any] | None = None,
        process_group: ProcessGroup = ALONE,
    ) -> Path:
        """Save a state; when this returns it is on the disk for good, and if this raises the folder
        is as it was.

        Of this and the earlier steps the newest `keep` stay. Those of later steps, which a run that
        was set back has still ahead of it, are left alone until the run comes to them. All
        processes of a `process_group` must call this, each with its own replicas in the state: they write
        them at the same time, and it is saved for all of them or for none.
        """
        step = operator.index(step)
        if step < 0:
            raise InvalidArgumentError(
                f"step must be 0 or more, but got {step}; count the steps taken so far"
            )
        name = f"step={step:09d}"
        complete, part = self.folder / name, self.folder / f".{name}.part"
        moved = False
        try:
            with (
                process_group.all_or_none("saving of a checkpoint", CheckpointError),
                self._in_words(complete),
            ):
                contents = Contents(step, state, setting or {})
                if process_group.is_main:
                    self._make_folder()
                    self._tidy()
                    part.mkdir()
            written = {}
            with (
                process_group.all_or_none("saving of a checkpoint", CheckpointError),
                self._in_words(complete),
            ):
                if not part.is_dir():
                    raise CheckpointError(
                        f"{self.folder} is not the same folder for all processes; use one on a shared file system"
                    )
                written = contents.write_replicas(part)
            replicas = {
                k: each
                for of_rank in process_group.gather(written, "saving of a checkpoint")
                for k, each in of_rank.items()
            }
            with (
                process_group.all_or_none("saving of a checkpoint", CheckpointError),
                self._in_words(complete),
            ):
                if process_group.is_main:
                    seal = contents.write_rest(part, replicas)
                    if complete.is_dir():
                        os.rename(complete, self.folder / f".{name}.old")
                    os.rename(part, complete)
                    moved = True
                    self._finish(complete, seal)
        except BaseException:
            if process_group.is_main:
                with contextlib.suppress(OSError):
                    if moved:
                        _remove(complete)
                    self._tidy()
            raise
        if process_group.is_main:
            self._remove_surplus(step)
        return complete

    def _finish(self, complete: Path, seal: bytes) -> None:
        """From here on it counts."""
        sync_folder(self.folder)
        write_synced(complete / f".{DONE}.part", seal)
        os.replace(complete / f".{DONE}.part", complete / DONE)
        sync_folder(complete)

    @contextlib.contextmanager
    def _in_words(self, complete: Path) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except OSError as failure:
            raise CheckpointError(
                f"cannot save {complete} ({failure.strerror or failure}); earlier checkpoints are as they were. "
                f"Make room or permit writing there, or choose another folder"
            ) from None

    def load_newest(
        self,
        *,
        setting: Mapping[str, Any] | None = None,
        among: Collection[int] | None = None,
        process_group: ProcessGroup = ALONE,
        replicas: Collection[int] | None = None,
    ) -> Checkpoint | None:
        """The newest checkpoint that passes every check, or None where none was ever completed; if
        asked for `among` some steps.

        Damaged ones are skipped with a warning, but one of another `setting` or schema version is
        an error: older ones would be so as well. Nothing that is read is executed. Each process of
        a `process_group` reads the `replicas` it is to hold, and all of them go back to the same step.
        """
        wrong: list[str] = []
        for step in reversed(process_group.from_main(self.steps())):
            if among is not None and step not in among:
                continue
            path, damage, state = self.path_of(step), None, {}
            with process_group.all_or_none("reading of a checkpoint", CheckpointError):
                try:
                    state = read(path, step, setting, replicas)
                except DamagedError as found:
                    damage = " ".join(f"{path.name} {found}".split())
            damaged = [
                each
                for each in process_group.gather(damage, "reading of a checkpoint")
                if each is not None
            ]
            if damaged:
                wrong.append(damaged[0])
                continue
            if wrong and process_group.is_main:
                log.warning(
                    "damaged checkpoint skipped in %s: %s; using %s instead",
                    self.folder,
                    "; ".join(wrong),
                    path.name,
                )
            return Checkpoint(step, state, path)
        if wrong:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(wrong)}. "
                f"Restore one from a copy, or remove them to begin again"
            )
        return None

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, oldest first."""
        return list(self._complete())

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of that step lies."""
        return self._complete().get(step, self.folder / f"step={step:09d}")

    def _complete(self) -> dict[int, Path]:
        found: dict[int, Path] = {}
        for paths in (self._found(".", ".old"), self._found()):
            found |= {step: path for step, path in paths.items() if _is_complete(path)}
        return dict(sorted(found.items()))

    def _found(self, prefix: str = "", suffix: str = "") -> dict[int, Path]:
        """Folders named for a step, whatever is in them. A link is none of ours: what it points to
        is not read or removed.
        """
        pattern = re.compile(
            re.escape(prefix) + "step=([0-9]{9}|[1-9][0-9]{9,})" + re.escape(suffix)
        )
        try:
            paths = [
                path for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()
            ]
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise _cannot_look_into(self.folder, error) from None
        return {int(match[1]): path for path in paths if (match := pattern.fullmatch(path.name))}

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync_folder(self.folder.parent)

    def _tidy(self) -> None:
        """Clear away what a crash left behind, and put back what was about to be replaced."""
        for path in self._found(".", ".part").values():
            _remove(path)
        for path in self._found().values():
            if not _is_complete(path):
                _remove(path)
        for step, path in self._found(".", ".old").items():
            complete = self.folder / f"step={step:09d}"
            if _is_complete(complete) or not _is_complete(path):
                _remove(path)
            else:
                os.rename(path, complete)

    def _remove_surplus(self, newest: int) -> None:
        """Remove what the checkpoint just saved makes superfluous. A failure here stops no run: it
        has its checkpoint.
        """
        try:
            steps = [step for step in self.steps() if step <= newest]
            for path in self._found(".", ".old").values():
                _remove(path)
            for step in steps[: -self.keep]:
                _remove(self.folder / f"step={step:09d}")
        except OSError as failure:
            log.warning(
                "cannot remove old checkpoints in %s (%s); remove them by hand",
                self.folder,
                failure.strerror or failure,
            )


def _is_complete(path: Path) -> bool:
    try:
        return (path / DONE).exists()
    except OSError as error:
        raise _cannot_look_into(path, error) from None


def _cannot_look_into(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot look into {path} ({error.strerror}); permit reading there, or give another folder"
    )


def _remove(path: Path) -> None:
    remove_folder(path, first=DONE)
