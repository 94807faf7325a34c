"""Checks of the ladder: are there swaps, at what price, and do replicas travel?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrex.diagnostics import (
    History,
    Swaps,
    acceptance_from_energies,
    allowed_acceptance,
    correction_against_spread,
    effective_noise,
    factor_for_acceptance,
    noise_level,
    observed_acceptance,
    round_trips,
    rungs_for_noise,
)
from torchrex.diagnostics.history import temperatures_at
from torchrex.experiments.image_recipes import PAIRED
from torchrex.experiments.images import ImageConfig
from torchrex.report.findings import Check, Finding, Severity
from torchrex.report.runs import LoadedRun

HARDLY_ANY = 1e-3  # accepted of the proposed
NEARLY_ALL = 0.9
FEW_TRIPS = 10  # round trips of a chain
FAR_OUTSIDE = 3.0  # correction in spreads of the energy difference
WANTED = (0.02, 0.10)  # acceptance that the advice about F aims at
BEYOND_UNBIASED = 2.0  # times the swaps of F = 1
UNSETTLED = 0.2  # relative change of sigma2 between the third and the last quarter
MOST_RUNGS = 100  # a longer ladder is no advice


@dataclass(frozen=True)
class Evidence:
    """What is known of the swaps of a run."""

    history: History
    energies: History  # as `history`, with energies as noisy as the swap tests saw them
    late: History  # the last quarter of `energies`
    factor: float  # F at the start
    annealed: bool
    image: bool  # F grows with the gap there

    @property
    def scaled(self) -> History:
        """`energies` with sigma2 such that a constant F here is the F at the start there."""
        if not self.image:
            return self.energies
        gap = self.energies.inverse_gap
        return replace(self.energies, noise_variance=self.energies.noise_variance * (gap[0] / gap)[:, :, None])


def gather(run: LoadedRun) -> Evidence | None:
    """None where nothing is exchanged, or nothing is known of it."""
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


def check_swaps(run: LoadedRun) -> Iterable[Finding]:
    """No swaps, too many of them, or swaps bought with bias: all three are about the noise and F."""
    evidence = gather(run)
    if evidence is None:
        yield from _why_no_evidence(run)
        return
    history, late, factor = evidence.history, evidence.late, evidence.factor
    observed = observed_acceptance(history).value.nan_to_num(nan=0.0)  # a pair that was never tested has made no swap
    rate, pair = float(observed.min()), int(observed.argmin())
    unbiased = acceptance_from_energies(evidence.energies, correction_factor=1.0).value
    gap, variance = late.inverse_gap.mean(0), noise_level(late).value
    noise = effective_noise(gap, variance)
    s, at_one = float(noise[pair]), float(unbiased[pair])
    accepted, proposed = int(history.accepted[pair].sum()), int(history.proposed[pair].sum())
    numbers: dict[str, Any] = {
        "pair": [pair, pair + 1],
        "accepted": accepted,
        "proposed": proposed,
        "acceptance_rate": rate,
        "acceptance_at_F_1": at_one,
        "noise_variance": float(variance[pair]),
        "noise_s": s,
        "allowed_acceptance": float(allowed_acceptance(noise[pair])),
        "correction_factor": factor,
    }
    which = f"Rungs {pair} and {pair + 1}" if history.n_pairs > 1 else "The rungs"
    made = f"{which} swapped {accepted:,} times in {proposed:,} tests ({_percent(rate)})"
    at = f"at temperatures {late.temperature[-1, pair]:.3g} and {late.temperature[-1, pair + 1]:.3g}"
    if rate < HARDLY_ANY:
        trips = round_trips(history)
        each = float(trips.round_trips.sum(0).double().mean())
        advice, more = _how_to_swap(evidence, pair)
        words = (
            f"{made}. The noise of the test is s = {s:.3g} {at} and leaves {_percent(numbers['allowed_acceptance'])} of swaps "
            f"between equal energies at F = 1; this run has {_factor_in_words(run, evidence)}. {advice}"
        )
        severity: Severity = "problem" if each < 1 else "warning" if each < FEW_TRIPS else "note"
        yield Finding(severity, "no swaps" if accepted == 0 else "hardly any swaps", words, {**numbers, **more})
    elif float(observed.max()) > NEARLY_ALL:
        most = int(observed.argmax())
        why = "F is too large" if factor > 1 else "they are close together"
        words = (
            f"Rungs {most} and {most + 1} swap at {_percent(float(observed[most]))} of the tests: {why}. A hotter top rung would "
            f"explore more at the same cost."
        )
        severity = "warning" if factor > 1 else "note"
        yield Finding(severity, "swaps at nearly every step", words, {**numbers, "largest_rate": float(observed[most])})
    price = list(_price_of_factor(evidence, made, rate, at_one, numbers))
    if HARDLY_ANY <= rate <= float(observed.max()) <= NEARLY_ALL and not price:
        expected = float(acceptance_from_energies(evidence.energies).value[pair]) if not evidence.image else math.nan
        told = f", {_percent(expected)} expected from its energies" if math.isfinite(expected) else ""
        words = f"{made}{told}; noise s = {s:.3g} {at}, sigma2 = {numbers['noise_variance']:.4g}, F = {factor:g}."
        yield Finding("fine", "swaps", words, {**numbers, "acceptance_expected": expected})
    yield from price


def _price_of_factor(evidence: Evidence, made: str, rate: float, at_one: float, numbers: dict[str, Any]) -> Iterable[Finding]:
    """F above 1 buys swaps with bias; how many would there be without?"""
    factor = evidence.factor
    against = f"{made}; with F = 1 it would be {_percent(at_one)}"
    if math.isinf(factor):
        words = (
            f"F is infinite, the naive test, which takes the noise of the energies for real differences: bias is expected. "
            f"{against}. Set a finite correction_factor; 1 is unbiased."
        )
        yield Finding("problem", "naive swaps: biased", words, numbers)
    elif factor > 1 and rate > BEYOND_UNBIASED * at_one:
        against = against if at_one > 0 else f"{made}; with F = 1 there would be none"
        words = (
            f"F = {factor:g}{' and grows with the inverse gap' if evidence.image else ''}, so swaps are bought with bias: "
            f"{against}. Look whether rung 0 is at its temperature, where that can be told; a smaller F, or more rungs at F = 1, "
            f"cost swaps or time instead."
        )
        yield Finding("warning", "F above 1: bias expected", words, numbers)


def _factor_in_words(run: LoadedRun, evidence: Evidence) -> str:
    """F, with what lowering it at every swap has left of it where a recipe does that."""
    left = float(getattr(run.settings, "factor_per_swap", 1.0)) ** int(evidence.history.accepted.sum())
    lowered = f", of which its swaps left {left * evidence.factor:.2g}" if left < 1 else ""
    return f"F = {evidence.factor:g}{' at the start' if evidence.image else ''}{lowered}"


def _how_to_swap(evidence: Evidence, pair: int) -> tuple[str, dict[str, Any]]:
    """What F, or how many rungs, would give swaps."""
    low, high = (float(factor_for_acceptance(evidence.scaled, wanted)[pair]) for wanted in WANTED)
    late = evidence.late
    cold, hot = (float(late.temperature[-1, rung]) for rung in (0, late.n_rungs - 1))
    variance = float(noise_level(late).value.max())
    rungs = rungs_for_noise(cold, hot, variance) if math.isfinite(variance) else None
    if not math.isfinite(low):
        first = f"No F gives {_percent(WANTED[0])}: the energies of the rungs lie too far apart; put rungs between them."
    elif low == 1:
        first = "The recorded energies would allow swaps at F = 1: is the run too short, or are swaps tested too rarely?"
    else:
        upto = f" to {high:.2g} ({_percent(WANTED[1])})" if math.isfinite(high) else ""
        first = f"An F of about {low:.2g} ({_percent(WANTED[0])} accepted){upto} is needed, which is no longer unbiased"
        first += " (at the start; it grows with the gap, and the estimate is a rough one)" if evidence.image else ""
    if rungs is None:
        second = ""
    elif rungs > MOST_RUNGS:
        second = f"; at F = 1 a ladder would need {rungs:.2g} rungs, so larger batches or a smaller gap come first."
    else:
        second = f", or a ladder of about {rungs} rungs from {cold:.3g} to {hot:.3g} at F = 1."
    return first.rstrip(".") + second, {"factor_for_2_percent": low, "factor_for_10_percent": high, "rungs_for_F_1": rungs}


def check_correction(run: LoadedRun) -> Iterable[Finding]:
    """Does the correction, or an estimate of sigma2 that still moves, decide about the swaps?"""
    evidence = gather(run)
    if evidence is None:
        return
    size = correction_against_spread(evidence.late)
    worst = int(size.ratio.nan_to_num(0.0).argmax())
    ratio = float(size.ratio[worst])
    numbers = {"correction": float(size.correction[worst]), "spread": float(size.spread[worst]), "ratio": ratio}
    if ratio > FAR_OUTSIDE:
        words = (
            f"The correction is {numbers['correction']:.3g}, and the energy difference fluctuates by {numbers['spread']:.3g}: "
            f"only a fluctuation of {ratio:.2g} standard deviations swaps. A larger F, less noise or a smaller gap helps."
        )
        yield Finding("warning", "the correction is far outside the energies", words, numbers)
    history = evidence.energies
    if evidence.annealed or len(history.steps) < 16:
        return  # under annealing it is meant to change
    first, last = int(history.steps[0]), int(history.steps[-1])
    middle = history.after(first + (last - first) // 2)
    before = _rows_before(middle, evidence.late)
    if before is None:
        return
    was, now = noise_level(before), noise_level(evidence.late)
    change = (now.value - was.value) / now.value
    error = (was.error.square() + now.error.square()).sqrt() / now.value
    moved = (change.abs() > UNSETTLED) & (change.abs() > 3.0 * error)
    pair = int(change.abs().argmax())
    if bool(moved.any()):
        numbers = {"third_quarter": float(was.value[pair]), "last_quarter": float(now.value[pair]), "change": float(change[pair])}
        words = (
            f"sigma2 was {was.value[pair]:.4g} in the third quarter of the run and {now.value[pair]:.4g} in the last: it has not "
            f"settled, and swaps before were tested with another correction. Run longer, or leave the beginning out."
        )
        yield Finding("warning", "sigma2 has not settled", words, numbers)


def _rows_before(history: History, without: History) -> History | None:
    """The rows of `history` before those of `without`."""
    kept = history.steps < without.steps[0]
    if int(kept.sum()) < 4:
        return None
    rows = {name: getattr(history, name)[kept] for name in ("steps", "energy", "replica_at", "noise_variance", "temperature")}
    return replace(history, correction=None, **rows)


def check_travel(run: LoadedRun) -> Iterable[Finding]:
    """Do replicas travel from the hottest rung to the coldest and back?"""
    evidence = gather(run)
    if evidence is None:
        return
    travel = round_trips(evidence.history)
    trips, restarts = (float(count.sum(0).double().mean()) for count in (travel.round_trips, travel.restarts))
    numbers = {"round_trips_per_chain": trips, "restarts_per_chain": restarts, "exact": travel.exact}
    least = "" if travel.exact else "at least "
    if trips < FEW_TRIPS:
        severity: Severity = "problem" if trips < 1 and travel.exact else "warning"
        words = (
            f"A chain made {least}{trips:.3g} round trips between the coldest and the hottest rung, and something new came to "
            f"rung 0 {least}{restarts:.3g} times: so often it could see another mode. Run longer, or make swaps likelier."
        )
        yield Finding(severity, "too few round trips", words, numbers)
    else:
        yield Finding("fine", "round trips", f"A chain made {least}{trips:,.0f} round trips over the ladder.", numbers)


def _why_no_evidence(run: LoadedRun) -> Iterable[Finding]:
    if run.ladder is None or len(run.ladder.temperatures) < 2:
        return
    if run.correction_factor is None:
        yield Finding("note", "no swaps by design", "The replicas of this run are independent: nothing is exchanged.", {})
    else:
        yield Finding(
            "note", "not told", "Nothing recorded tells of the swaps: no draws, no trace, no curves in result.json.", {}
        )


def _percent(rate: float) -> str:
    return f"{100 * rate:.2g} %" if rate < 0.1 else f"{100 * rate:.3g} %"


SWAP_CHECKS: tuple[Check, ...] = (check_swaps, check_correction, check_travel)
