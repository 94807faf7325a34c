"""The draws and the trace of a run, up to whatever damage the files have, and the course of the run that they tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file
from torch import Tensor

from torchrex.diagnostics import History
from torchrex.errors import RunFolderError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments.recipes import Config
from torchrex.posterior import Draws
from torchrex.report.salvage import salvage

ROWS_OF_DRAWS = ("steps", "noise_variance", "replica_at", "energy")  # their first axis is the draws
ROWS_OF_TRACE = ("steps", "energy", "noise_variance", "correction", "replica_at")


def read_draws(path: Path, problems: list[str]) -> Draws | None:
    if not path.exists():
        return None
    try:
        return Draws.load(path)
    except RunFolderError:
        tensors, meta = salvage(path, problems)
    rows = min((len(tensors[name]) if name in tensors else 0 for name in ROWS_OF_DRAWS), default=0)
    whole = all(name in tensors for name in ("values", "accepted", "proposed")) and tensors["values"].ndim == 3
    if not whole or rows == 0:
        problems.append("too little of draws.safetensors is left to be used")
        return None
    chains = tensors["energy"].shape[-1]
    if len(tensors["values"]) < chains:
        problems.append(f"draws.safetensors has the values of {len(tensors['values'])} of {chains} chains; they are not used")
        return None
    try:
        kept = {name: tensors[name][:rows] for name in ROWS_OF_DRAWS}
        about = json.loads(meta.get("torchrex", "{}"))
        n_steps = int(about.get("n_steps", int(kept["steps"][-1])))
        return Draws(
            values=tensors["values"][:, :rows],
            accepted=tensors["accepted"],
            proposed=tensors["proposed"],
            n_steps=n_steps,
            status=str(about.get("status", "damaged")),
            settings=dict(about.get("settings", {})),
            **kept,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        problems.append(f"what is left of draws.safetensors does not fit together ({error})")
        return None


def read_trace(path: Path, problems: list[str]) -> dict[str, Tensor]:
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except (OSError, safetensors.SafetensorError):
        tensors, _ = salvage(path, problems)
    if "swap_steps" in tensors and "swap_pairs" in tensors:
        n = min(len(tensors["swap_steps"]), len(tensors["swap_pairs"]))
        tensors |= {name: tensors[name][:n] for name in ("swap_steps", "swap_pairs")}
    rows = min((len(tensors[name]) for name in ROWS_OF_TRACE if name in tensors), default=0)
    return tensors | {name: tensors[name][:rows] for name in ROWS_OF_TRACE if name in tensors}


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
        if all(name in trace for name in (*ROWS_OF_TRACE, "swap_steps", "swap_pairs", "accepted", "proposed")):
            if len(trace["steps"]) == 0 or len(trace["swap_steps"]) < int(trace["accepted"].sum()):  # round trips need all swaps
                return None
            return History.from_traces([trace], ladder, n_steps=(result or {}).get("steps_done"))
    except (TorchrexError, RuntimeError, IndexError) as error:
        problems.append(f"the course of the run cannot be told ({error})")
    return None
