"""What is known of the swaps of a run: the course of the ladder where it was recorded, or only how many swaps were counted.

Draws and traces tell everything, the curves of an image run nearly so. An unfinished or damaged run may have no more than the
counts in result.json, of a damaged result.json those before the damage.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchrex.diagnostics import History, Swaps, Travel, round_trips
from torchrex.diagnostics.history import temperatures_at
from torchrex.experiments.image_recipes import PAIRED
from torchrex.experiments.images import ImageConfig
from torchrex.report.runs import LoadedRun

FEW_TRIPS = 10  # round trips of a chain
ENOUGH_ROWS = 40_000  # recorded energies, of all chains together, for rates of a per cent and more
ENOUGH_CHAINS, MANY_SWAPS = 16, 100  # so many chains tell of the trips of all, where each makes so many swaps


@dataclass(frozen=True)
class Evidence:
    """The course of the ladder."""

    history: History
    energies: History  # as `history`, with energies as noisy as the swap tests saw them
    late: History  # the last quarter of `energies`
    factor: float  # F at the start
    annealed: bool
    image: bool  # F grows with the gap there

    @property
    def scaled(self) -> History:
        """`energies`, thinned, with sigma2 such that a constant F here is the F at the start there."""
        energies = thinned(self.energies)
        if not self.image:
            return energies
        gap = energies.inverse_gap
        return replace(energies, noise_variance=energies.noise_variance * (gap[0] / gap)[:, :, None])

    @cached_property
    def travel(self) -> Travel:
        """Of some chains where they are many and swap often; rows between which nobody moves are left out, which is exact."""
        history = self.history
        if history.swaps is not None:
            return round_trips(history)
        often = int(history.accepted.sum()) > MANY_SWAPS * history.n_chains
        chains = slice(ENOUGH_CHAINS if often else None)
        at = history.replica_at[..., chains]
        moved = torch.cat([torch.ones(1, dtype=torch.bool), (at[1:] != at[:-1]).flatten(1).any(1)])
        by_chain = {name: getattr(history, name)[..., chains] for name in ("energy", "replica_at", "noise_variance")}
        rows = {name: each[moved] for name, each in by_chain.items()}
        counts = {name: getattr(history, name)[:, chains] for name in ("accepted", "proposed")}
        when = {name: getattr(history, name)[moved] for name in ("steps", "temperature")}
        return round_trips(replace(history, correction=None, **rows, **counts, **when))._replace(exact=history.has_every_step)

    @property
    def trips(self) -> tuple[float, float]:
        """Round trips and restarts of a chain, all its replicas together."""
        trips, restarts = (float(n.sum(0).double().mean()) for n in (self.travel.round_trips, self.travel.restarts))
        return trips, restarts


def gather(run: LoadedRun) -> Evidence | None:
    """None where nothing is exchanged, or no more is known of it than `count` tells."""
    factor, averaged = run.correction_factor, False
    if factor is None:
        return None
    history = run.history
    if history is None:
        history, averaged = history_from_curves(run), True
    if history is None or history.n_pairs == 0 or int(history.proposed.sum()) == 0:
        return None
    start = int(getattr(run.settings, "swap_start", 0))
    energies = history.after(start)
    energies = energies if len(energies.steps) else history
    if averaged:
        # Energies drawn apart for each replica vary more than those of the swap tests, which share a minibatch.
        shared = getattr(run.settings, "variance", "paired") == "repeated"
        energies = _with_noise(energies, PAIRED if shared else 1.0)
    late = energies.after(int(energies.steps[0]) + 3 * (int(energies.steps[-1]) - int(energies.steps[0])) // 4)
    annealed = run.ladder is not None and run.ladder.anneal is not None
    return Evidence(history, energies, late, factor, annealed, isinstance(run.settings, ImageConfig))


def thinned(history: History) -> History:
    """Every n-th row, so that ENOUGH_ROWS are left: means over rows are right with any thinning."""
    every = -(-len(history.steps) * history.n_chains // ENOUGH_ROWS)
    if every <= 1:
        return history
    names = ("steps", "energy", "replica_at", "noise_variance", "temperature", "correction")
    return replace(history, **{name: getattr(history, name)[::every] for name in names if getattr(history, name) is not None})


def history_from_curves(run: LoadedRun) -> History | None:
    """A history of epochs from the curves in result.json, where the trace is not there. Energies are means over an epoch."""
    result, settings = run.result or {}, run.settings
    curves, pairs = result.get("curves") or {}, result.get("swaps") or []
    if run.ladder is None or not isinstance(settings, ImageConfig) or not pairs or not curves.get("noise_variance"):
        return None
    steps = torch.tensor(curves["epoch"]) * settings.steps_per_epoch
    swapped = torch.tensor([round(epoch * settings.steps_per_epoch) for epoch in curves["swap_epochs"]], dtype=torch.long)
    turns = (swapped[None, :] <= steps[:, None]).sum(1) % 2  # images have two rungs
    replica_at = torch.stack([turns, 1 - turns], dim=1)[:, :, None]
    replica_at[0] = torch.tensor([[0], [1]])  # swaps are counted from here

    def column(name: str) -> torch.Tensor:
        return torch.tensor(curves[name], dtype=torch.float64).T[:, :, None]

    return History(
        steps=steps,
        energy=column("energy"),
        replica_at=replica_at,
        noise_variance=column("noise_variance"),
        temperature=temperatures_at(run.ladder, steps),
        accepted=torch.tensor([[pair["accepted"]] for pair in pairs]),
        proposed=torch.tensor([[pair["proposed"]] for pair in pairs]),
        n_steps=int(result.get("steps_done") or int(steps[-1]) + 1),
        correction=column("correction"),
        swaps=Swaps(swapped, torch.zeros_like(swapped), torch.zeros_like(swapped)),
    )


def _with_noise(history: History, part: float, n: int = 64) -> History:
    """Means over an epoch lack the noise of single steps: it is drawn `n` times an epoch, Gaussian of `part` of sigma2."""
    generator = torch.Generator().manual_seed(0)
    wide = {
        name: getattr(history, name).expand(-1, -1, n)
        for name in ("energy", "replica_at", "noise_variance", "correction")
        if getattr(history, name) is not None
    }
    z = torch.randn(*wide["energy"].shape, generator=generator, dtype=torch.float64)
    variance = torch.cat([wide["noise_variance"], wide["noise_variance"][:, -1:]], dim=1)  # of the pair a rung belongs to
    counts = {name: getattr(history, name).expand(-1, n) for name in ("accepted", "proposed")}
    return replace(history, swaps=None, **{**wide, **counts, "energy": wide["energy"] + z * (part * variance).sqrt()})


class Counted(NamedTuple):
    """How often one pair was tested and swapped, all chains together, and where that is written."""

    pair: int
    accepted: int
    proposed: int
    source: str


def count(run: LoadedRun) -> list[Counted]:
    """The counts of every pair; none where they are written nowhere."""
    result, trace = run.result, run.trace
    pairs, source = (result or {}).get("swaps"), "result.json"
    if result is None:
        pairs, source = _before_the_damage(run), "result.json before its damage"
    if not pairs and {"accepted", "proposed"} <= set(trace):
        rows = zip(trace["accepted"].tolist(), trace["proposed"].tolist(), strict=False)
        pairs, source = [{"accepted": accepted, "proposed": proposed} for accepted, proposed in rows], "the trace"
    try:
        return [Counted(k, int(each["accepted"]), int(each["proposed"]), source) for k, each in enumerate(pairs or [])]
    except (KeyError, TypeError, ValueError):  # written by something else
        return []


def _before_the_damage(run: LoadedRun) -> Any:
    try:
        text = (run.path / "result.json").read_text(errors="replace")
        after = text[text.index('"swaps":') + len('"swaps":') :]
        return json.JSONDecoder().raw_decode(after.lstrip())[0]
    except (OSError, ValueError):
        return None
