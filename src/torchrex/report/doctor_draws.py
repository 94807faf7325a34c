"""Checks of the draws of a density: are they right where the truth is known, have its chains
converged, is rung 0 at its temperature, is the noise Gaussian?

Convergence and temperature are read from some of the draws, evenly spaced: enough of them, and no
check takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from scipy import stats
from torch import Tensor

from torchrex.diagnostics import (
    AT_ONE_POINT,
    FEWEST_DRAWS,
    convergence,
    equipartition_temperature,
    hill,
)
from torchrex.errors import MissingDependencyError
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.experiments.tall import LogisticConfig
from torchrex.posterior import Draws
from torchrex.report.doctor_advice import WANTED
from torchrex.report.doctor_swaps import FEWEST_TESTS
from torchrex.report.doctor_words import measured, number, percent
from torchrex.report.findings import Check, Finding, Severity
from torchrex.report.runs import LoadedRun
from torchrex.targets import Noisy

BURN_IN = 0.1  # of the steps of a density is left out
RHAT, BAD_RHAT = 1.01, 1.1
FEW_DRAWS = 400  # effective ones, of all chains together (Vehtari et al. 2021)
TOLERATED, MUCH = (
    0.10,
    0.5,
)  # off the nominal temperature; a sound learning rate reads a few per cent high
SIGMAS = 3.0
APART = 0.5  # share of the variance that lies between chains, or between replicas
REPEATED = 10_000  # energies drawn for the tail
SWITCHES = 20  # of the replica on rung 0 of a chain, before replicas are told apart
ENOUGH, ENOUGH_FOR_GRADIENTS = 20_000, 200_000  # draws, of all chains together
LEAST = 200  # of each chain
WORK = 4e7  # examples looked at for exact gradients of tall data
CHANCE = 0.0027  # two-sided: three standard errors of many runs, more of few


def check_truth(run: LoadedRun) -> Iterable[Finding]:
    """Metrics of which the truth is known (`name`, `name_se`, `name_true`): off by more than is
    tolerated, and than by chance?
    """
    metrics = run.metrics
    for name in [each.removesuffix("_true") for each in metrics if each.endswith("_true")]:
        if not all(isinstance(metrics.get(each), int | float) for each in (name, f"{name}_true")):
            continue
        value, truth, error = metrics[name], metrics[f"{name}_true"], metrics.get(f"{name}_se")
        n = int(metrics.get("n_runs") or 1)
        error = float(error) if n > 1 and isinstance(error, int | float) else math.nan
        known = math.isfinite(error)
        chance = float(stats.t.isf(CHANCE / 2, n - 1)) * error if known else math.nan
        off, tolerated = abs(value - truth), TOLERATED * abs(truth)
        numbers = {
            "metric": name,
            "value": value,
            "truth": truth,
            "standard_error": error,
            "tolerated": tolerated,
        }
        factor = run.correction_factor or 1.0
        cure = f"F = {number(factor)} biases the swaps: lower F." if factor > 1 else _to_cross(run)
        ours = measured(value, error) if known and error else number(value)
        words = f"Its {name.replace('_', ' ')} is {ours}, and the truth is {number(truth)}"
        if off <= tolerated:
            yield Finding(
                "fine", "truth", f"{words}: within the {100 * TOLERATED:g} % tolerated.", numbers
            )
        elif off <= chance:
            words += f": off by more than the {100 * TOLERATED:g} % tolerated, which may be chance. Run longer, or more runs."
            yield Finding("warning", "far from the truth", words, numbers)
        else:
            unknown = "" if known else " One run does not tell how much of that is chance."
            words += f": its answer is wrong.{unknown} {cure}"
            yield Finding("problem", "the answer is wrong", words, numbers)


def check_convergence(run: LoadedRun) -> Iterable[Finding]:
    """R-hat and effective number of draws, for densities."""
    draws = _settled(run)
    if run.draws is None or run.draws.n_draws == 0:
        return
    if draws is None or draws.n_draws < FEWEST_DRAWS:
        left = "No draw is" if draws is None else f"{draws.n_draws} draws are"
        yield Finding(
            "warning", "too few draws", f"{left} left after the burn-in. Run longer, or thin less."
        )
        return
    some = thinned(draws.values, ENOUGH)
    found = convergence(some)
    rhat, ess, n = found.worst_rhat, found.least_ess, draws.n_chains * draws.n_draws
    looked_at = some.shape[0] * some.shape[1]
    # Draws between those looked at can only add to it.
    numbers = {
        "rhat": rhat,
        "ess_at_least": ess,
        "ess_from_draws": looked_at,
        "n_draws": n,
        "n_chains": draws.n_chains,
    }
    told = (
        f"R-hat {rhat:.3f}"
        if math.isfinite(rhat)
        else "no R-hat, for there is one chain (n_runs=4 would tell)"
    )
    words = f"{told}; {n:,} draws are worth {ess:,.0f} independent ones"
    if looked_at < n:
        words = f"{told}; {n:,} draws are worth at least {ess:,.0f} independent ones (from {looked_at:,} of them, thinned)"
    at_one_point = draws.settings.get("started_at_one_point") is True
    numbers |= {"started_at_one_point": at_one_point}
    start = f" {AT_ONE_POINT}" if at_one_point else ""
    if rhat > RHAT or not ess >= FEW_DRAWS:
        severity: Severity = "problem" if rhat > BAD_RHAT else "warning"
        why = f"R-hat should be below {RHAT}" if rhat > RHAT else f"{FEW_DRAWS} should be there"
        yield Finding(
            severity,
            "chains have not converged",
            f"{words}; {why}. Run longer (n_steps), or mix better.",
            numbers,
        )
    else:
        yield Finding("fine", "convergence", f"{words}.{start}", numbers)
    yield from _modes(run, draws)


def _modes(run: LoadedRun, draws: Draws) -> Iterable[Finding]:
    """Where chains, or the replicas of a chain, each keep to a place of their own."""
    x = draws.values.double()
    if draws.n_chains > 1:
        share, k = _largest(x.mean(1).var(0) / x.flatten(0, 1).var(0))
        if share > APART:
            words = (
                f"{percent(share)} of the variance of coordinate {k} lies between chains: each stays in a mode of its own, or "
                f"is too slow to leave where it began, and the draws say where that was. {_to_cross(run)}"
            )
            yield Finding(
                "problem",
                "chains stay apart",
                words,
                {"share_between_chains": share, "coordinate": k},
            )
            return
    if run.history is None or run.history.n_rungs < 2:
        return
    at_cold = draws.replica_at[:, 0].T  # (chains, draws)
    if float((at_cold[:, 1:] != at_cold[:, :-1]).sum(1).double().mean()) < SWITCHES:
        return
    every = _every(x, ENOUGH)
    x, at_cold = x[:, ::every], at_cold[:, ::every]
    here = (
        at_cold[None] == torch.arange(run.history.n_rungs)[:, None, None]
    ).double()  # (replicas, chains, draws)
    n = here.sum(2)
    if float(n.min()) < 20:
        return
    means = torch.einsum("rcd,cdk->rck", here, x) / n[:, :, None]
    weight = (n / n.sum(0)).unsqueeze(2)
    between = (weight * (means - x.mean(1)).square()).sum(0).mean(0)
    share, k = _largest(between / x.var(1, correction=0).mean(0))
    if share > APART:
        words = (
            f"{percent(share)} of the variance of coordinate {k} on rung 0 lies between the replicas that stood there: each "
            f"keeps to a mode of its own, hot or cold, so swaps choose among {run.history.n_rungs} modes. Heat the top rung."
        )
        yield Finding(
            "warning",
            "replicas in different modes",
            words,
            {"share_between_replicas": share, "coordinate": k},
        )


def _to_cross(run: LoadedRun) -> str:
    """What lets chains leave their modes."""
    temperatures = () if run.ladder is None else run.ladder.temperatures
    if len(temperatures) == 1:
        cold = temperatures[0]
        return f"Run longer, or add a hotter rung (temperatures={cold:g},{10 * cold:g}), from which it can cross."
    if run.history is not None and run.history.n_pairs and run.correction_factor is not None:
        tests = run.history.proposed.sum(1)
        rates = run.history.accepted.sum(1) / tests
        if int(tests.min()) >= FEWEST_TESTS and float(rates.min()) >= WANTED[0]:
            return "It swaps often enough: run longer, or heat the top rung."
    return "Run longer; more swaps or a hotter top rung let chains cross."


def check_temperature(run: LoadedRun) -> Iterable[Finding]:
    """Is rung 0 at its temperature?"""
    if run.ladder is None or run.ladder.temperatures[0] == 0:
        return
    if run.ladder.noise is not None:
        n_steps = int(getattr(run.settings, "n_steps", 1))
        excess = float(run.ladder.noise(n_steps - 1))
        if excess > 1 + TOLERATED:
            words = (
                f"The noise of the moves keeps the initial learning rate while that falls (noise_follows_lr = false), "
                f"so at the end every rung moves at {number(excess)} times its temperature, and no swap test knows of it."
            )
            yield Finding(
                "warning",
                "rung 0 is hotter than nominal",
                words,
                {"times_nominal_at_the_end": excess},
            )
        return
    draws = _settled(run)
    if draws is None or draws.n_draws < FEWEST_DRAWS:
        if run.result is not None and isinstance(
            run.settings, MixtureConfig | LogisticConfig
        ):  # of networks it cannot be told
            yield Finding(
                "note",
                "temperature not told",
                "Whether rung 0 is at its temperature needs draws; none are left.",
            )
        return
    found = gradients(run, draws)
    if found is None:
        yield Finding(
            "note",
            "temperature not told",
            "The density of this run is not known here, so its gradients are not.",
        )
        return
    nominal = run.ladder.temperatures[0]
    estimate = equipartition_temperature(*found)
    tau, error = float(estimate.value), float(estimate.error)
    numbers = {
        "temperature": tau,
        "standard_error": error,
        "nominal": nominal,
        "ratio": tau / nominal,
        "tolerated": TOLERATED,
    }
    off = tau / nominal - 1
    side = "above" if off > 0 else "below"
    read = f"Equipartition reads {measured(tau, error)} on rung 0, {percent(abs(off))} {side} its temperature {number(nominal)}"
    rhat = _worst_rhat(draws)
    if rhat > BAD_RHAT:
        words = f"{read}, but the chains have not converged (R-hat {rhat:.3f}), so that means little: ask again when they have."
        yield Finding("note", "temperature not told", words, {**numbers, "rhat": rhat})
        return
    if abs(off) <= TOLERATED or abs(off) * nominal < SIGMAS * error:
        verdict = (
            f"within the {100 * TOLERATED:g} % tolerated"
            if abs(off) <= TOLERATED
            else f"within {SIGMAS:g} standard errors"
        )
        yield Finding("fine", "temperature", f"{read}: {verdict}.", numbers)
        return
    factor = run.correction_factor or 1.0
    if off < 0:
        why = "the chains have not spread over the density yet: run longer"
    elif factor > 1:
        why = f"with F = {number(factor)} swaps bring it states of the hot rung that the unbiased test would refuse: lower F"
    else:
        why = "the learning rate is too large: lower it (half of it halves the excess)"
    severity: Severity = "problem" if abs(off) > MUCH else "warning"
    title = f"rung 0 is {'hotter' if off > 0 else 'colder'} than nominal"
    yield Finding(severity, title, f"{read} ({100 * TOLERATED:g} % is tolerated); {why}.", numbers)


def _worst_rhat(draws: Draws) -> float:
    """NaN where it is not defined, or cannot be computed here: `check_convergence` says so."""
    try:
        return convergence(thinned(draws.values, ENOUGH)).worst_rhat
    except MissingDependencyError:
        return math.nan


def gradients(run: LoadedRun, draws: Draws) -> tuple[Tensor, Tensor] | None:
    """Positions and exact gradients of the energy there, (chains, draws, dim), where the density is
    known.
    """
    if isinstance(run.settings, MixtureConfig):
        x = thinned(draws.values, ENOUGH_FOR_GRADIENTS).double()
        return x, run.settings.mixture().energy_and_gradient(x, {})[1]
    if isinstance(run.settings, LogisticConfig):
        target = run.settings.target().to("cpu", torch.float64)
        n = max(4, min(draws.n_draws, int(WORK / (target.n_data or 1) / draws.n_chains)))
        x = draws.values.double()[
            :, torch.linspace(0, draws.n_draws - 1, min(n, draws.n_draws)).long()
        ]
        rows = [
            torch.func.grad(lambda at: target.full_energy(at).sum())(x[chain, [row]])
            for chain in range(len(x))
            for row in range(x.shape[1])
        ]
        return x, torch.stack(rows).reshape(x.shape)
    return None


def check_tail(run: LoadedRun) -> Iterable[Finding]:
    """Is the noise of the energies Gaussian, as the correction takes it to be? Only where it can be
    drawn again.
    """
    if not isinstance(run.settings, MixtureConfig) or run.correction_factor is None:
        return
    target = Noisy(run.settings.mixture(), run.settings.noise.model())
    generator = torch.Generator().manual_seed(0)
    tail = hill(target.draw_noise(generator, REPEATED, (1, 1), torch.float64)["energy"])
    numbers = {
        "tail_index": tail.index,
        "gaussian_index": tail.gaussian_index,
        "sigmas": tail.sigmas,
    }
    if tail.too_heavy:
        words = (
            f"Of {REPEATED:,} energies drawn again at one place, the tail has index {tail.index:.2g} where a Gaussian shows "
            f"{tail.gaussian_index:.2g} ({tail.sigmas:.0f} standard deviations off). The correction takes noise to be Gaussian, "
            f"so swaps are biased at any F; a smaller gap between temperatures makes it matter less."
        )
        yield Finding("warning", "the energy noise has heavy tails", words, numbers)
    else:
        yield Finding(
            "fine",
            "noise",
            f"The energy noise looks Gaussian (tail index {tail.index:.2g}).",
            numbers,
        )


def _settled(run: LoadedRun) -> Draws | None:
    """The draws of a density without the burn-in; None where there are none."""
    if run.draws is None or run.draws.n_draws == 0:
        return None
    burn_in = int(BURN_IN * run.draws.n_steps)
    return run.draws.after(burn_in) if int(run.draws.steps[-1]) > burn_in else None


def thinned(values: Tensor, enough: int) -> Tensor:
    """Every n-th draw of (chains, draws, dim), so that about `enough` are left, and LEAST of each
    chain.
    """
    return values[:, :: _every(values, enough)]


def _every(values: Tensor, enough: int) -> int:
    n_chains, n_draws = values.shape[:2]
    return max(1, min(n_chains * n_draws // enough, n_draws // LEAST))


def _largest(shares: Tensor) -> tuple[float, int]:
    known = shares.nan_to_num(nan=0.0)
    return float(known.max()), int(known.argmax())


def _is_tall(run: LoadedRun) -> bool:
    return isinstance(run.settings, LogisticConfig) and run.draws is not None


SLOW_CHECKS: dict[Check, Callable[[LoadedRun], bool]] = {
    check_temperature: _is_tall
}  # may take seconds, and on which runs
