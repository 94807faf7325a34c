"""What is known of the swaps of a run: the course of the ladder where it was recorded, or only how
many swaps were counted.

Draws and traces tell everything, the curves of networks for images nearly so. A draws.safetensors
that was cut short may still have its energies. An unfinished or damaged run may have no more than
the counts in result.json, of a damaged result.json those before the damage.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchrex.diagnostics import (
    Estimate,
    History,
    Swaps,
    Travel,
    effective_noise,
    noise_level,
    round_trips,
    temperatures_at,
)
from torchrex.errors import TorchrexError
from torchrex.experiments.gan import GanConfig
from torchrex.experiments.images import PAIRED, ImageConfig
from torchrex.posterior import Draws
from torchrex.report.runs import LoadedRun, salvage

FEW_TRIPS = 10  # round trips of a chain
ENOUGH_ROWS = 40_000  # recorded energies, of all chains together, for rates of a per cent and more
OF_CURVES = ("energy", "noise_variance", "correction")  # of result.json, by rung or pair
ENOUGH_CHAINS, MANY_SWAPS = (
    16,
    100,
)  # so many chains tell of the trips of all, where each makes so many swaps


@dataclass(frozen=True)
class Evidence:
    """The course of the ladder."""

    history: History
    energies: History  # as `history`, with energies as noisy as the swap tests saw them
    late: History  # the last quarter of `energies`
    factor: float  # F at the start
    annealed: bool
    image: bool  # F grows with the gap there
    has_paths: bool = True  # who stood where is known, not only the energies

    @property
    def scaled(self) -> History:
        """What the advice about F rests on, thinned.

        Where F grows with the gap it is the last quarter, with sigma2 such that a constant F here
        is one that is counted as at the start: swaps may take something of F, so only the F of one
        part of the run can be compared with another.
        """
        if not self.image:
            return thinned(self.energies)
        late = thinned(self.late)
        return replace(late, noise_variance=late.noise_variance * self._since_the_start(late))

    @property
    def factor_now(self) -> float:
        """F in the middle of the last quarter (the median), counted as at the start: without what
        it grew by the gap.
        """
        factors = self.late.correction_factor
        if not self.image or factors is None:
            return self.factor
        return float((factors * self._since_the_start(self.late)).nanmedian())

    @property
    def swapped_late(self) -> tuple[int, int] | None:
        """Swaps and tests of the last quarter, of all pairs; tests are taken to be spread evenly
        over the steps.

        None where not all swaps are listed.
        """
        first, start = int(self.late.steps[0]), int(self.energies.steps[0])
        if self.history.swaps is None:
            return None
        made = int((self.history.swaps.step >= first).sum())
        n = self.history.n_steps
        return made, round(int(self.history.proposed.sum()) * (n - first) / max(1, n - start))

    def _since_the_start(self, part: History) -> torch.Tensor:
        return (self.history.inverse_gap[0] / part.inverse_gap)[:, :, None]

    @cached_property
    def travel(self) -> Travel:
        """Of some chains where they are many and swap often; rows between which nobody moves are
        left out, which is exact.
        """
        history = self.history
        if history.swaps is not None:
            return round_trips(history)
        often = int(history.accepted.sum()) > MANY_SWAPS * history.n_chains
        chains = slice(ENOUGH_CHAINS if often else None)
        at = history.replica_at[..., chains]
        moved = torch.cat([torch.ones(1, dtype=torch.bool), (at[1:] != at[:-1]).flatten(1).any(1)])
        by_chain = {
            name: getattr(history, name)[..., chains]
            for name in ("energy", "replica_at", "noise_variance")
        }
        rows = {name: each[moved] for name, each in by_chain.items()}
        counts = {name: getattr(history, name)[:, chains] for name in ("accepted", "proposed")}
        when = {name: getattr(history, name)[moved] for name in ("steps", "temperature")}
        return round_trips(replace(history, correction=None, **rows, **counts, **when))._replace(
            exact=history.has_every_step
        )

    @property
    def trips(self) -> tuple[float, float]:
        """Round trips and restarts of a chain, all its replicas together; NaN where that is not
        known.
        """
        if not self.has_paths:
            none = int(self.history.accepted.sum()) == 0
            return (0.0, 0.0) if none else (math.nan, math.nan)
        trips, restarts = (
            float(n.sum(0).double().mean()) for n in (self.travel.round_trips, self.travel.restarts)
        )
        return trips, restarts


def gather(run: LoadedRun) -> Evidence | None:
    """None where nothing is exchanged, or no more is known of it than `count` tells."""
    factor, averaged, has_paths = run.correction_factor, False, True
    if factor is None:
        return None
    history = run.history
    if history is None:
        history, averaged = history_from_curves(run), True
        has_paths = history is not None and history.swaps is not None
    if history is None:
        history, averaged, has_paths = history_from_remains(run), False, False
    if history is None or history.n_pairs == 0 or int(history.proposed.sum()) == 0:
        return None
    energies = while_swapping(run, history)
    if averaged:
        # Energies drawn apart for each replica vary more than those of the swap tests, which share
        # a minibatch.
        shared = getattr(run.settings, "variance", "paired") == "repeated"
        energies = _with_noise(energies, PAIRED if shared else 1.0)
    annealed = run.ladder is not None and run.ladder.anneal is not None
    late = last_quarter(energies)
    return Evidence(
        history, energies, late, factor, annealed, isinstance(run.settings, ImageConfig), has_paths
    )


def while_swapping(run: LoadedRun, history: History) -> History:
    """Its rows from the first swap test on."""
    rows = history.after(first_test(run))
    return rows if len(rows.steps) else history


def first_test(run: LoadedRun) -> int:
    """The first step at which a swap is tested. GANs descend by Adam before, where no temperature
    holds and none is.
    """
    if isinstance(run.settings, GanConfig):
        return max(1, run.settings.warm_start)
    return int(getattr(run.settings, "swap_start", 0))


def last_quarter(history: History) -> History:
    """Its rows from three quarters of the recorded steps on."""
    first, last = int(history.steps[0]), int(history.steps[-1])
    return history.after(first + 3 * (last - first) // 4)


class Noise(NamedTuple):
    """How noisy the energies are once sigma2 has settled, of every pair."""

    variance: Estimate  # sigma2 of one energy
    s: torch.Tensor  # standard deviation of the noise in log S


def settled_noise(late: History) -> Noise:
    """sigma2 and s of a last quarter, the burn-in left out: what doctor and the page both call the
    noise of a run.
    """
    variance = noise_level(late)
    return Noise(variance, effective_noise(late.inverse_gap.mean(0), variance.value))


def thinned(history: History) -> History:
    """Every n-th row, so that ENOUGH_ROWS are left: means over rows are right with any thinning."""
    every = -(-len(history.steps) * history.n_chains // ENOUGH_ROWS)
    if every <= 1:
        return history
    names = ("steps", "energy", "replica_at", "noise_variance", "temperature", "correction")
    return replace(
        history,
        **{
            name: getattr(history, name)[::every]
            for name in names
            if getattr(history, name) is not None
        },
    )


def history_from_curves(run: LoadedRun) -> History | None:
    """A history from the curves in result.json, where the trace is not there. Energies are means
    over an epoch, or over the steps between two points of a GAN's. The first swaps are listed:
    where there were more, who stood where is not known.
    """
    result, settings = run.result or {}, run.settings
    curves, pairs = result.get("curves") or {}, result.get("swaps") or []
    if run.ladder is None or not pairs or not curves.get("noise_variance"):
        return None
    if not isinstance(settings, ImageConfig | GanConfig):
        return None
    unit, per_unit = (
        ("epoch", settings.steps_per_epoch) if isinstance(settings, ImageConfig) else ("step", 1)
    )
    try:
        when, turned, *columns = (
            torch.tensor(curves[name], dtype=torch.float64)
            for name in (unit, f"swap_{unit}s", *OF_CURVES)
        )
        of_rows = {
            name: column.T[:, :, None] for name, column in zip(OF_CURVES, columns, strict=True)
        }
    except (KeyError, TypeError, ValueError, IndexError):  # damaged: then nothing is known
        return None
    if any(len(rows) != len(when) for rows in of_rows.values()):
        return None
    steps, swapped = ((each * per_unit).round().long() for each in (when, turned))
    listed = len(swapped) == sum(int(pair["accepted"]) for pair in pairs)
    turns = (swapped[None, :] <= steps[:, None]).sum(1) % 2  # both kinds have two rungs
    replica_at = torch.stack([turns, 1 - turns], dim=1)[:, :, None]
    replica_at[0] = torch.tensor([[0], [1]])  # swaps are counted from here
    return History(
        steps=steps,
        replica_at=replica_at,
        temperature=temperatures_at(run.ladder, steps),
        accepted=torch.tensor([[pair["accepted"]] for pair in pairs]),
        proposed=torch.tensor([[pair["proposed"]] for pair in pairs]),
        n_steps=int(result.get("steps_done") or int(steps[-1]) + 1),
        swaps=Swaps(swapped, torch.zeros_like(swapped), torch.zeros_like(swapped))
        if listed
        else None,
        **of_rows,
    )


def history_from_remains(run: LoadedRun) -> History | None:
    """What a draws.safetensors that was cut short still tells of the energies, without who stood
    where: that comes last in it.
    """
    if run.ladder is None or run.draws is not None or "draws.safetensors" not in run.damaged:
        return None
    tensors, meta = salvage(run.path / "draws.safetensors", [])
    names = ("steps", "energy", "noise_variance", "accepted", "proposed")
    if not all(name in tensors for name in names):
        return None
    rows = min(len(tensors[name]) for name in names[:3])
    if rows < 4 or tensors["energy"].ndim != 3:
        return None
    kept: dict[str, Any] = {
        name: tensors[name][:rows] if name in names[:3] else tensors[name] for name in names
    }
    n_rungs, n_chains = kept["energy"].shape[1:]
    standing = torch.arange(n_rungs)[None, :, None].expand(rows, n_rungs, n_chains)
    try:
        n_steps = int(json.loads(meta.get("torchrex", "{}")).get("n_steps", int(kept["steps"][-1])))
        draws = Draws(torch.zeros(n_chains, rows, 1), replica_at=standing, n_steps=n_steps, **kept)
        return History.from_draws(draws, run.ladder, correction_factor=run.correction_factor or 1.0)
    except (
        TorchrexError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
    ):  # it was not only cut
        return None


def _with_noise(history: History, part: float, n: int = 64) -> History:
    """Means over an epoch lack the noise of single steps: it is drawn `n` times an epoch, Gaussian
    of `part` of sigma2.
    """
    generator = torch.Generator().manual_seed(0)
    wide = {
        name: getattr(history, name).expand(-1, -1, n)
        for name in ("energy", "replica_at", "noise_variance", "correction")
        if getattr(history, name) is not None
    }
    z = torch.randn(*wide["energy"].shape, generator=generator, dtype=torch.float64)
    variance = torch.cat(
        [wide["noise_variance"], wide["noise_variance"][:, -1:]], dim=1
    )  # of the pair a rung belongs to
    counts = {name: getattr(history, name).expand(-1, n) for name in ("accepted", "proposed")}
    return replace(
        history,
        swaps=None,
        **{**wide, **counts, "energy": wide["energy"] + z * (part * variance).sqrt()},
    )


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
        pairs, source = (
            [{"accepted": accepted, "proposed": proposed} for accepted, proposed in rows],
            "the trace",
        )
    try:
        return [
            Counted(k, int(each["accepted"]), int(each["proposed"]), source)
            for k, each in enumerate(pairs or [])
        ]
    except (KeyError, TypeError, ValueError):  # written by something else
        return []


def _before_the_damage(run: LoadedRun) -> Any:
    try:
        text = (run.path / "result.json").read_text(errors="replace")
        after = text[text.index('"swaps":') + len('"swaps":') :]
        return json.JSONDecoder().raw_decode(after.lstrip())[0]
    except (OSError, ValueError):
        return None
