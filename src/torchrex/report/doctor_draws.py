"""Checks of what a run gave: have its chains converged, is rung 0 at its temperature, has the average settled?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchrex.diagnostics import convergence, equipartition_temperature, hill, round_trips
from torchrex.diagnostics.convergence import FEWEST_DRAWS
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.experiments.tall import LogisticConfig
from torchrex.posterior import Draws
from torchrex.report.findings import Check, Finding, Severity
from torchrex.report.runs import LoadedRun
from torchrex.targets import Noisy

BURN_IN = 0.1  # of the steps of a density is left out
RHAT, BAD_RHAT = 1.01, 1.1
FEW_DRAWS = 400  # effective ones, of all chains together (Vehtari et al. 2021)
HOTTER, MUCH_HOTTER = 1.15, 1.5  # than nominal; a sound learning rate reads a few per cent high
SIGMAS = 3.0
APART = 0.5  # share of the variance that lies between chains, or between replicas
REPEATED = 10_000  # energies drawn for the tail
STILL_RISING = 0.002  # accuracy gained over the last third of the draws
WORK = 4e7  # examples looked at for exact gradients of tall data


def check_convergence(run: LoadedRun) -> Iterable[Finding]:
    """R-hat and effective number of draws, for densities."""
    draws = _settled(run)
    if draws is None:
        return
    if draws.n_draws < FEWEST_DRAWS:
        yield Finding("warning", "too few draws", f"{draws.n_draws} draws are left after the burn-in. Run longer, or thin less.")
        return
    found = convergence(draws)
    rhat, ess, n = found.worst_rhat, found.least_ess, draws.n_chains * draws.n_draws
    numbers = {"rhat": rhat, "least_ess": ess, "n_draws": n, "n_chains": draws.n_chains}
    told = f"R-hat {rhat:.3f}" if math.isfinite(rhat) else "no R-hat, for there is one chain (n_runs=4 would tell)"
    words = f"{told}; {n:,} draws are worth {ess:,.0f} independent ones"
    if rhat > RHAT or not ess >= FEW_DRAWS:
        severity: Severity = "problem" if rhat > BAD_RHAT else "warning"
        why = f"R-hat should be below {RHAT}" if rhat > RHAT else f"{FEW_DRAWS} should be there"
        yield Finding(severity, "chains have not converged", f"{words}; {why}. Run longer (n_steps), or mix better.", numbers)
    else:
        yield Finding("fine", "convergence", f"{words}.", numbers)
    yield from _modes(run, draws)


def _modes(run: LoadedRun, draws: Draws) -> Iterable[Finding]:
    """Where chains, or the replicas of a chain, each keep to a place of their own."""
    x = draws.values.double()
    if draws.n_chains > 1:
        share, k = _largest(x.mean(1).var(0) / x.flatten(0, 1).var(0))
        if share > APART:
            words = (
                f"{_percent(share)} of the variance of coordinate {k} lies between chains: each stays in a mode of its own, or "
                f"is too slow to leave where it began, and the draws say where that was. Run longer; more swaps or a hotter top "
                f"rung let chains cross."
            )
            yield Finding("problem", "chains stay apart", words, {"share_between_chains": share, "coordinate": k})
            return
    if run.history is None or run.history.n_rungs < 2 or float(round_trips(run.history).round_trips.sum(0).double().mean()) < 10:
        return
    at_cold = draws.replica_at[:, 0].T.long()  # (chains, draws)
    here = (at_cold[None] == torch.arange(run.history.n_rungs)[:, None, None]).double()  # (replicas, chains, draws)
    n = here.sum(2)
    if float(n.min()) < 20:
        return
    means = torch.einsum("rcd,cdk->rck", here, x) / n[:, :, None]
    weight = (n / n.sum(0)).unsqueeze(2)
    between = (weight * (means - x.mean(1)).square()).sum(0).mean(0)
    share, k = _largest(between / x.var(1, correction=0).mean(0))
    if share > APART:
        words = (
            f"{_percent(share)} of the variance of coordinate {k} on rung 0 lies between the replicas that stood there: each "
            f"keeps to a mode of its own, hot or cold, so swaps choose among {run.history.n_rungs} modes. Heat the top rung."
        )
        yield Finding("warning", "replicas in different modes", words, {"share_between_replicas": share, "coordinate": k})


def check_temperature(run: LoadedRun) -> Iterable[Finding]:
    """Is rung 0 at its temperature?"""
    if run.ladder is None or run.ladder.temperatures[0] == 0:
        return
    if run.ladder.noise is not None:
        n_steps = int(getattr(run.settings, "n_steps", 1))
        excess = float(run.ladder.noise(n_steps - 1))
        if excess > HOTTER:
            words = (
                f"The noise of the moves keeps the initial learning rate while that falls (noise_follows_lr = false), "
                f"so at the end every rung moves at {excess:.3g} times its temperature, and no swap test knows of it."
            )
            yield Finding("warning", "rung 0 is hotter than nominal", words, {"times_nominal_at_the_end": excess})
        return
    draws = _settled(run)
    if draws is None or draws.n_draws < FEWEST_DRAWS:
        if run.result is not None:
            yield Finding("note", "temperature not told", "Whether rung 0 is at its temperature needs gradients; none were kept.")
        return
    found = gradients(run, draws)
    if found is None:
        yield Finding("note", "temperature not told", "The density of this run is not known here, so its gradients are not.")
        return
    nominal = run.ladder.temperatures[0]
    estimate = equipartition_temperature(*found)
    tau, error = float(estimate.value), float(estimate.error)
    numbers = {"temperature": tau, "standard_error": error, "nominal": nominal, "ratio": tau / nominal}
    read = f"Equipartition reads {tau:.3g} +- {error:.2g} on rung 0, whose temperature is {nominal:g}"
    if tau > HOTTER * nominal and not tau - nominal < SIGMAS * error:
        factor = run.correction_factor or 1.0
        why = (
            f"with F = {factor:g} swaps bring it states of the hot rung that the unbiased test would refuse: lower F"
            if factor > 1
            else "the learning rate is too large: lower it (half of it halves the excess)"
        )
        severity: Severity = "problem" if tau > MUCH_HOTTER * nominal else "warning"
        yield Finding(severity, "rung 0 is hotter than nominal", f"{read}; {why}.", numbers)
    else:
        yield Finding("fine", "temperature", f"{read}.", numbers)


def gradients(run: LoadedRun, draws: Draws) -> tuple[Tensor, Tensor] | None:
    """Positions and exact gradients of the energy there, (chains, draws, dim), where the density is known."""
    x = draws.values.double()
    if isinstance(run.settings, MixtureConfig):
        return x, run.settings.mixture().energy_and_gradient(x, {})[1]
    if isinstance(run.settings, LogisticConfig):
        target = run.settings.target().to("cpu", torch.float64)
        n = max(4, min(draws.n_draws, int(WORK / (target.n_data or 1) / draws.n_chains)))
        x = x[:, torch.linspace(0, draws.n_draws - 1, min(n, draws.n_draws)).long()]
        rows = [
            torch.func.grad(lambda at: target.full_energy(at).sum())(x[chain, [row]])
            for chain in range(len(x))
            for row in range(x.shape[1])
        ]
        return x, torch.stack(rows).reshape(x.shape)
    return None


def check_tail(run: LoadedRun) -> Iterable[Finding]:
    """Is the noise of the energies Gaussian, as the correction takes it to be? Only where it can be drawn again."""
    if not isinstance(run.settings, MixtureConfig) or run.correction_factor is None:
        return
    target = Noisy(run.settings.mixture(), run.settings.noise.model())
    generator = torch.Generator().manual_seed(0)
    tail = hill(target.draw_noise(generator, REPEATED, (1, 1), torch.float64)["energy"])
    numbers = {"tail_index": tail.index, "gaussian_index": tail.gaussian_index, "sigmas": tail.sigmas}
    if tail.too_heavy:
        words = (
            f"Of {REPEATED:,} energies drawn again at one place, the tail has index {tail.index:.2g} where a Gaussian shows "
            f"{tail.gaussian_index:.2g} ({tail.sigmas:.0f} standard deviations off). The correction takes noise to be Gaussian, "
            f"so swaps are biased at any F; a smaller gap between temperatures makes it matter less."
        )
        yield Finding("warning", "the energy noise has heavy tails", words, numbers)
    else:
        yield Finding("fine", "noise", f"The energy noise looks Gaussian (tail index {tail.index:.2g}).", numbers)


def check_average(run: LoadedRun) -> Iterable[Finding]:
    """Has the average of predictions settled, for networks?"""
    metrics, curves = run.metrics, (run.result or {}).get("curves") or {}
    if "accuracy" not in metrics:
        return
    names = ("accuracy", "nll", "single_accuracy", "single_nll", "n_draws")
    numbers: dict[str, Any] = {name: metrics[name] for name in names if name in metrics}
    accuracy = curves.get("probabilities_accuracy") or []
    if len(accuracy) >= 3:
        before = accuracy[2 * len(accuracy) // 3]
        gained = accuracy[-1] - before
        numbers |= {"accuracy_at_two_thirds": before, "gained": gained}
        if gained > STILL_RISING and accuracy[-1] > accuracy[9 * len(accuracy) // 10 - 1]:
            words = (
                f"The accuracy of the average rose from {100 * before:.2f} % to {100 * accuracy[-1]:.2f} % over the last third "
                f"of its {len(accuracy)} draws and was still rising: extend the run, or begin the average later, for the early "
                f"draws weigh it down."
            )
            yield Finding("warning", "the average has not converged", words, numbers)
            return
    if metrics.get("single_nll", math.inf) < metrics.get("nll", math.inf):
        words = (
            f"The average of {metrics.get('n_draws', '?')} draws has NLL {metrics['nll']:.4f}, its newest network alone "
            f"{metrics['single_nll']:.4f}: early draws weigh it down. Begin the average later."
        )
        yield Finding("warning", "the average is worse than one network", words, numbers)
    elif len(accuracy) >= 3:
        words = (
            f"The accuracy of the average, {100 * accuracy[-1]:.2f} %, changed by {100 * gained:+.2f} points over its last third."
        )
        yield Finding("fine", "average", words, numbers)
    else:
        words = "Whether the average still changes is not told: this recipe keeps no curve of its accuracy."
        yield Finding("note", "average not told", words, numbers)


def _settled(run: LoadedRun) -> Draws | None:
    """The draws of a density without the burn-in."""
    if run.draws is None or run.draws.n_draws == 0:
        return None
    return run.draws.after(int(BURN_IN * run.draws.n_steps))


def _largest(shares: Tensor) -> tuple[float, int]:
    known = shares.nan_to_num(nan=0.0)
    return float(known.max()), int(known.argmax())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


DRAW_CHECKS: tuple[Check, ...] = (check_convergence, check_temperature, check_tail, check_average)
