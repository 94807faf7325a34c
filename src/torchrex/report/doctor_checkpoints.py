"""Are the checkpoints of a run whole? All of them are read and checked as a resume would, and
damage is told with what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchrex.checkpoint import Checkpoints, DamagedError, one_line, read
from torchrex.density import shard_folders
from torchrex.errors import CheckpointError
from torchrex.report.doctor_words import several
from torchrex.report.findings import Finding, Severity
from torchrex.report.runs import LoadedRun

LARGE = 2**26  # bytes of all checkpoints together that take about a second to read and check
MOST_NAMED = 3


@dataclass
class Saved:
    """The checkpoints in one folder: those of a run, or those of one of its shards, which go on
    each by itself.
    """

    shard: str = ""
    whole: list[int] = field(default_factory=list)  # steps
    damaged: dict[int, str] = field(default_factory=dict)  # by step, what is wrong
    refused: str = ""  # why none of them can be used whatever is in it: they are another version's, or cannot be looked at

    @property
    def hopeless(self) -> bool:
        """Whether a resume stops here."""
        return bool(self.refused) or (bool(self.damaged) and not self.whole)

    def name(self, step: int) -> str:
        return f"{self.shard}/step={step:09d}".lstrip("/")


def look_at_checkpoints(run: LoadedRun) -> list[Saved]:
    """Read every complete checkpoint of a run; folders without any are left out. Nothing that is
    read is executed.
    """
    found = []
    for checkpoints in _folders(run):
        saved = Saved(checkpoints.folder.name if checkpoints.folder.parent != run.path else "")
        try:
            for step in checkpoints.steps():
                try:
                    read(checkpoints.path_of(step), step, None)
                    saved.whole.append(step)
                except DamagedError as damage:
                    saved.damaged[step] = one_line(damage)
        except CheckpointError as error:
            saved.refused = one_line(error)
        if saved.whole or saved.damaged or saved.refused:
            found.append(saved)
    return found


def are_large(run: LoadedRun) -> bool:
    """Whether to look at them may take a second or more."""
    try:
        return (
            sum(
                file.stat().st_size
                for file in (run.path / "checkpoints").rglob("*")
                if file.is_file()
            )
            > LARGE
        )
    except OSError:  # looking at them tells why
        return False


def checkpoint_findings(run: LoadedRun, found: Sequence[Saved]) -> Iterable[Finding]:
    """Damage of a finished run costs nothing that was computed from it; that of an unfinished one
    costs steps, or all of them.
    """
    for saved in found:
        if saved.refused:
            yield Finding(
                "warning",
                "checkpoints that cannot be used",
                _sentence(saved.refused),
                {"shard": saved.shard},
            )
    damaged = [saved for saved in found if saved.damaged]
    numbers = {
        "whole": [saved.name(step) for saved in found for step in saved.whole],
        "damaged": [saved.name(step) for saved in found for step in saved.damaged],
    }
    n_whole, n_damaged = len(numbers["whole"]), len(numbers["damaged"])
    if damaged:
        finished = run.status == "finished"
        severity: Severity = "note" if finished else "warning"
        words = f"{_named(damaged)}. {_of_finished() if finished else _of_unfinished(damaged)}"
        yield Finding(
            severity, "damaged checkpoint" + ("s" if n_damaged > 1 else ""), words, numbers
        )
    elif n_whole and not any(saved.refused for saved in found):
        newest = min(max(saved.whole) for saved in found)
        of = f" of {len(found)} shards" if len(found) > 1 else ""
        come = "all shards have come to" if len(found) > 1 else "the newest is that of"
        are = "is whole" if n_whole == 1 else "are whole"
        yield Finding(
            "fine",
            "checkpoints",
            f"{several(n_whole, 'checkpoint')}{of} {are}; {come} step {newest:,}.",
            numbers,
        )


def _folders(run: LoadedRun) -> list[Checkpoints]:
    saved = run.path / "checkpoints"
    return [Checkpoints(each) for each in (saved, *shard_folders(saved))] if saved.is_dir() else []


def _named(damaged: Sequence[Saved]) -> str:
    """`checkpoints/step=000000300 has a damaged shared.safetensors, ...; and 4 more`."""
    each = [
        f"checkpoints/{saved.name(step)} {why}"
        for saved in damaged
        for step, why in saved.damaged.items()
    ]
    more = [f"and {len(each) - MOST_NAMED} more"] if len(each) > MOST_NAMED else []
    return "; ".join([*each[:MOST_NAMED], *more])


def _of_finished() -> str:
    return "The run is finished and its results do not need them: remove what is damaged, and look after the disk."


def _of_unfinished(damaged: Sequence[Saved]) -> str:
    hopeless = [saved for saved in damaged if saved.hopeless]
    if hopeless:
        which = f" of {', '.join(saved.shard for saved in hopeless)}" if hopeless[0].shard else ""
        return (
            f"No checkpoint{which} can be used, and a resume refuses to go on: restore one from a copy if there is one, or begin "
            f"anew with --overwrite."
        )
    back = [saved for saved in damaged if max(saved.damaged) > max(saved.whole)]
    if not back:
        return "The newest is whole, and --resume goes on from there: nothing is lost, but look after the disk."
    lost = max(max(saved.damaged) - max(saved.whole) for saved in back)
    where = f" in {', '.join(saved.shard for saved in back)}" if back[0].shard else ""
    return (
        f"--resume skips what is damaged and goes on from step {min(max(saved.whole) for saved in back):,}{where}, so that "
        f"{several(lost, 'step')} {'is' if lost == 1 else 'are'} made again; restore it from a copy if there is one, and look "
        f"after the disk."
    )


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:].rstrip('.')}."
