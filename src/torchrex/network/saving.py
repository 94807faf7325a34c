"""Checkpoints of members that train together: all an exact continuation needs, and the newest step
that all of them have.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchrex.checkpoint import Checkpoint
from torchrex.errors import CheckpointError, InvalidArgumentError, TorchrexError
from torchrex.exchange.noise import RepeatedDraws
from torchrex.network.members import TrainingRun, setting_of

logger = logging.getLogger("torchrex")


def newest_of(member: TrainingRun) -> Path | None:
    """Where its newest checkpoint lies."""
    steps = [] if member.checkpoints is None else member.checkpoints.steps()
    return (
        member.checkpoints.path_of(steps[-1]) if member.checkpoints is not None and steps else None
    )


def has_checkpoints(members: Sequence[TrainingRun]) -> bool:
    found = any(member.checkpoints is not None and member.checkpoints.steps() for member in members)
    return members[0].run.mesh.process_group.from_main(
        found
    )  # before another rank writes, and not what a slow file system shows here


def require_nothing_later(members: Sequence[TrainingRun]) -> None:
    """A run that begins anew must not leave its checkpoints before those of another, which would be
    taken for the newest.
    """
    for member in members:
        assert member.checkpoints is not None
        later = [step for step in member.checkpoints.steps() if step > member.run.n_steps]
        if later:
            raise CheckpointError(
                f"{member.checkpoints.folder} holds checkpoints up to step {later[-1]}; resume from them, or give another folder"
            )


def save(
    member: TrainingRun, data: Any, extra: Any, seconds: float, *, about_to: Callable[[], None]
) -> None:
    """Save one member, if it has a folder, after calling `about_to`. Weights that are not finite
    are worth no checkpoint, unless the run will heal them.
    """
    if member.checkpoints is None:
        return
    run = member.run
    if not run.can_respawn and not all(run.ensemble.finite()):
        logger.warning("no checkpoint at step %d, because weights are not finite", run.n_steps)
        return
    about_to()
    state = run.state_dict()
    replicas = state.pop("replicas")
    state = {
        "replicas": [None] * len(replicas)
        if run.mesh.data_rank
        else replicas,  # one of those that share a replica writes it
        "run": state,
        "averages": [average.state_dict() for average in member.averages],
        "trace": None if member.trace is None else member.trace.state_dict(),
        "data": _position_of(data),
        "extra": _position_of(extra),
        "seconds": seconds,
    }
    member.checkpoints.save(
        run.n_steps, state, setting=setting_of(member), process_group=run.mesh.process_group
    )
    for average in member.averages:
        if average.store is not None and run.mesh.process_group.is_main:
            average.store.commit(oldest=member.checkpoints.steps()[0])


def resume(members: Sequence[TrainingRun], data: Any, extra: Any) -> float | None:
    """Go back to the newest step of which every member has a whole checkpoint; the seconds spent
    until then, None without one.
    """
    found = _newest_common(members)
    if found is None:
        for member in members:
            for average in member.averages:
                if average.store is not None and average.store.n_seen:
                    assert member.checkpoints is not None
                    raise CheckpointError(
                        f"{average.store.folder} holds draws of another run, for there is no checkpoint in "
                        f"{member.checkpoints.folder}; give another folder for the draws, or the folder of their checkpoints"
                    )
        return None
    try:
        return _take_up(members, found, data, extra)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, TorchrexError):
            raise
        raise CheckpointError(
            f"{found[0].path} holds a state of another form ({type(error).__name__}: {error}); remove it, or give another folder"
        ) from None


def _take_up(
    members: Sequence[TrainingRun], found: Sequence[Checkpoint], data: Any, extra: Any
) -> float:
    """Load the states of the members' checkpoints; the seconds spent until then."""
    for member, checkpoint in zip(members, found, strict=True):
        state = checkpoint.state
        there = _in_words(len(state["averages"]), traced=state["trace"] is not None)
        here = _in_words(len(member.averages), traced=member.trace is not None)
        if there != here:
            raise CheckpointError(
                f"{checkpoint.path} was written with {there}, but this call has {here}; give the same, or another folder"
            )
        member.run.load_state_dict({**state["run"], "replicas": state["replicas"]})
        for average, saved in zip(member.averages, state["averages"], strict=True):
            with _naming(checkpoint.path):
                average.load_state_dict(saved)
        if member.trace is not None:
            member.trace.load_state_dict(state["trace"])
    state = found[0].state  # the position in the data is the same for all
    # That in the extra batches is known to members that take some; one that trained apart from them
    # has not moved there.
    measuring = [
        checkpoint.state
        for member, checkpoint in zip(members, found, strict=True)
        if isinstance(member.run.rules.noise.feed, RepeatedDraws)
    ]
    for source, saved in ((data, state["data"]), (extra, (measuring or [state])[0].get("extra"))):
        if saved is not None and hasattr(source, "load_state_dict"):
            with _naming(found[0].path):
                source.load_state_dict(saved)
        elif source is not None:
            logger.warning(
                "the data cannot restore their position, so the run goes on with a new epoch; use DeviceLoader for more"
            )
    return float(state["seconds"])


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What does not fit a part of a checkpoint is told with the folder, and what to do."""
    try:
        yield
    except (CheckpointError, InvalidArgumentError) as error:
        cure = (
            ""
            if "another folder" in str(error)
            else "; go on with the settings it was saved with, or give another folder"
        )
        raise CheckpointError(f"{path}: {error}{cure}") from None


def _in_words(n_averages: int, *, traced: bool) -> str:
    return f"{n_averages or 'no'} average{'s' if n_averages > 1 else ''} and {'a' if traced else 'no'} trace"


def _newest_common(members: Sequence[TrainingRun]) -> list[Checkpoint] | None:
    folders = [member.checkpoints for member in members if member.checkpoints is not None]
    process_group = members[0].run.mesh.process_group
    common = set(
        process_group.from_main(
            sorted(set.intersection(*(set(folder.steps()) for folder in folders)))
        )
    )
    if not common and len(folders) > 1 and has_checkpoints(members):
        raise CheckpointError(
            f"the runs have no checkpoint of the same step: {', '.join(str(folder.steps()[-1:]) for folder in folders)}; "
            f"go on with each by itself"
        )
    among = (
        None if len(folders) == 1 else common
    )  # one alone may fall back to a checkpoint that was about to be replaced
    while True:
        found = [
            folder.load_newest(
                setting=setting_of(member),
                among=among,
                process_group=member.run.mesh.process_group,
                replicas=member.run.mesh.mine,
            )
            for folder, member in zip(folders, members, strict=True)
        ]
        whole = [checkpoint for checkpoint in found if checkpoint is not None]
        if len(whole) < len(found):
            return None
        oldest = min(checkpoint.step for checkpoint in whole)
        if all(checkpoint.step == oldest for checkpoint in whole):
            return whole
        among = {
            step for step in common if step <= oldest
        }  # one was damaged: all go back to where it is whole


def _position_of(data: Any) -> Any:
    return data.state_dict() if hasattr(data, "state_dict") else None
