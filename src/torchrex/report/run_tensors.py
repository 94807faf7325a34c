"""The draws and the trace of a run, up to whatever damage the files have, and the course of the run
that they tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrex.checkpoint import one_line
from torchrex.diagnostics import History
from torchrex.errors import RunFolderError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments import ExperimentConfig as Config
from torchrex.experiments.folder import UNREADABLE, read_tensors
from torchrex.posterior import Draws, check_draws
from torchrex.report.salvage import salvage

ROWS_OF_DRAWS = ("steps", "noise_variance", "replica_at", "energy")  # their first axis is the draws
ROWS_OF_TRACE = ("steps", "energy", "noise_variance", "correction", "replica_at")


def read_draws(path: Path, problems: list[str]) -> Draws | None:
    if not path.exists() and not path.is_symlink():  # a link that leads nowhere is damage
        return None
    try:
        return Draws.load(path)
    except RunFolderError as error:
        tensors, meta = salvage(path, problems, why=one_line(error))
    rows = min(
        (
            len(tensors[name]) if name in tensors and tensors[name].ndim else 0
            for name in ROWS_OF_DRAWS
        ),
        default=0,
    )
    whole = (
        all(name in tensors for name in ("values", "accepted", "proposed"))
        and tensors["values"].ndim == 3
    )
    if not whole or rows == 0:
        problems.append("too little of draws.safetensors is left to be used")
        return None
    chains = tensors["energy"].shape[-1]
    if len(tensors["values"]) < chains:
        problems.append(
            f"draws.safetensors has the values of {len(tensors['values'])} of {chains} chains; they are not used"
        )
        return None
    try:
        kept = {name: tensors[name][:rows] for name in ROWS_OF_DRAWS}
        kept |= {
            "values": tensors["values"][:, :rows],
            "accepted": tensors["accepted"],
            "proposed": tensors["proposed"],
        }
        about = json.loads(meta.get("torchrex", "{}"))
        n_steps = int(about.get("n_steps", int(kept["steps"][-1])))
        words: dict[str, Any] = {
            "n_steps": n_steps,
            "status": str(about.get("status", "damaged")),
            "settings": dict(about.get("settings", {})),
        }
        check_draws(path, kept, words)
        return Draws(**{**kept, **words})
    except (
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        RecursionError,
        RunFolderError,
    ) as error:
        problems.append(
            f"what is left of draws.safetensors does not fit together ({one_line(error)})"
        )
        return None


def read_trace(path: Path, problems: list[str]) -> dict[str, Tensor]:
    if not path.exists() and not path.is_symlink():  # a link that leads nowhere is damage
        return {}
    try:
        return _possible(read_tensors(path), problems)
    except UNREADABLE as error:
        tensors = _possible(salvage(path, problems, why=one_line(error))[0], problems)
    if "swap_steps" in tensors and "swap_pairs" in tensors:
        n = min(len(tensors["swap_steps"]), len(tensors["swap_pairs"]))
        tensors |= {name: tensors[name][:n] for name in ("swap_steps", "swap_pairs")}
    rows = min((len(tensors[name]) for name in ROWS_OF_TRACE if name in tensors), default=0)
    return tensors | {name: tensors[name][:rows] for name in ROWS_OF_TRACE if name in tensors}


# What a run can have recorded: axes, whole numbers or not, and bounds.
FORMS: dict[str, tuple[int, bool, Callable[[Tensor], bool]]] = {
    **dict.fromkeys(
        ("steps", "swap_steps"),
        (1, True, lambda x: bool((x >= 0).all()) and bool((x[1:] >= x[:-1]).all())),
    ),
    **dict.fromkeys(
        ("swap_pairs", "accepted", "proposed"), (1, True, lambda x: bool((x >= 0).all()))
    ),
    **dict.fromkeys(("energy", "noise_variance", "correction"), (2, False, lambda x: True)),
    "replica_at": (2, True, lambda x: bool(((x >= 0) & (x < max(1, x.shape[1]))).all())),
}


def _possible(tensors: dict[str, Tensor], problems: list[str]) -> dict[str, Tensor]:
    """The tensors of a trace without those that no run can have recorded, which are named."""
    wrong = []
    for name, (axes, whole, within) in FORMS.items():
        tensor = tensors.get(name)
        if tensor is not None and (
            tensor.ndim != axes
            or tensor.is_complex()
            or tensor.is_floating_point() == whole
            or not within(tensor)
        ):
            wrong.append(name)
    if wrong:
        problems.append(
            f"trace.safetensors is damaged: no run can have recorded its {', '.join(wrong)}; not used"
        )
    return {name: tensor for name, tensor in tensors.items() if name not in wrong}


def history_of(
    settings: Config | None,
    ladder: Ladder | None,
    draws: Draws | None,
    trace: dict[str, Tensor],
    result: dict[str, Any] | None,
    problems: list[str],
) -> History | None:
    if ladder is None:
        return None
    try:
        if draws is not None and draws.n_draws:
            factor = float(getattr(settings, "correction_factor", 1.0))
            return History.from_draws(draws, ladder, correction_factor=factor)
        if all(
            name in trace
            for name in (*ROWS_OF_TRACE, "swap_steps", "swap_pairs", "accepted", "proposed")
        ):
            if len(trace["steps"]) == 0 or len(trace["swap_steps"]) < int(
                trace["accepted"].sum()
            ):  # round trips need all swaps
                return None
            return History.from_traces([trace], ladder, n_steps=(result or {}).get("steps_done"))
    except (
        TorchrexError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
    ) as error:
        problems.append(f"the course of the run cannot be told ({one_line(error)})")
    return None
