"""What is wrong with a run and what to change: all checks, and the findings as text or JSON.

Convergence and temperature are read from some of the draws, evenly spaced: no check takes a second,
but for the temperature of tall data and for large checkpoints, which a quick look leaves out.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scipy import special
from torch import Tensor

from torchrex.checkpoint import DamagedError, one_line, read
from torchrex.density import few_threads
from torchrex.diagnostics import (
    AT_ONE_POINT,
    FEWEST_DRAWS,
    convergence,
    equipartition_temperature,
    hill,
)
from torchrex.errors import MissingDependencyError, RunFolderError, TorchrexError
from torchrex.posterior import Draws
from torchrex.report.findings import (
    QUICK,
    SEVERITIES,
    Diagnosis,
    Finding,
    Severity,
    measured,
    number,
    percent,
    several,
    tally,
)
from torchrex.report.reader import LoadedRun, NotRead, checkpoints_of, command_to_repeat, read_tree
from torchrex.report.swap_checks import FEWEST_TESTS, WANTED, check_ladder
from torchrex.runs.config import to_json

BURN_IN = 0.1  # of the steps of a density is left out
RHAT, BAD_RHAT = 1.01, 1.1
FEW_DRAWS = 400  # effective ones, of all chains together (Vehtari et al. 2021)
TOLERATED, MUCH = 0.10, 0.5  # off the nominal temperature; a sound lr reads a few per cent high
SIGMAS = 3.0
APART = 0.5  # share of the variance that lies between chains, or between replicas
REPEATED = 10_000  # energies drawn for the tail
SWITCHES = 20  # of the replica on rung 0 of a chain, before replicas are distinguished
ENOUGH, ENOUGH_FOR_GRADIENTS = 20_000, 200_000  # draws, of all chains together
LEAST = 200  # of each chain
WORK = 4e7  # examples read for exact gradients of tall data
CHANCE = 0.0027  # two-sided: three standard errors of many runs, more of few
STILL_RISING = 0.002  # accuracy gained over the last third of the draws
MOST_DIMENSIONS = 200  # whose covariance is looked at
AVERAGE_SIGMAS = 2.0
TOLERATED_COVERAGE = 0.02  # off the nominal 0.9
MOST_CLIPPED = 0.01  # of the steps on rung 0
LARGE = 2**26  # bytes of all checkpoints together that take about a second to read and check
MOST_NAMED = 3


# Checks of the answer


def check_truth(run: LoadedRun) -> Iterable[Finding]:
    """Metrics with a known truth (`name`, `name_se`, `name_true`): off by more than chance?"""
    metrics, n = run.numbers, int(run.numbers.get("n_runs", 1))
    limit, factor = f"the {100 * TOLERATED:g} % tolerated", run.correction_factor or 1.0
    for name in (each.removesuffix("_true") for each in metrics if each.endswith("_true")):
        if name not in metrics:
            continue
        value, truth = metrics[name], metrics[f"{name}_true"]
        error = metrics.get(f"{name}_se", math.nan) if n > 1 else math.nan
        chance = -float(special.stdtrit(n - 1, CHANCE / 2)) * error
        off, tolerated = abs(value - truth), TOLERATED * abs(truth)
        numbers = {"metric": name, "value": value, "truth": truth, "standard_error": error}
        numbers["tolerated"] = tolerated
        ours = measured(value, error) if error > 0 else number(value)
        words = f"Its {name.replace('_', ' ')} is {ours}, and the truth is {number(truth)}"
        if off <= tolerated:
            yield Finding("fine", "truth", f"{words}: within {limit}.", numbers)
        elif off <= chance:
            words += f": off by more than {limit}, perhaps by chance. Run longer, or more runs."
            yield Finding("warning", "far from the truth", words, numbers)
        else:
            unknown = " One run does not show how much of that is chance."
            words += f": its answer is wrong.{unknown if math.isnan(error) else ''} "
            words += (
                f"F = {number(factor)} biases the swaps: lower F." if factor > 1 else _to_cross(run)
            )
            yield Finding("problem", "the answer is wrong", words, numbers)


def check_convergence(run: LoadedRun) -> Iterable[Finding]:
    """R-hat and effective number of draws, for densities."""
    draws = _settled(run)
    if draws is None or draws.n_draws < FEWEST_DRAWS:
        if run.draws is not None and run.draws.n_draws:
            n = 0 if draws is None else draws.n_draws
            words = f"Draws left after the burn-in: {n}. Run longer, or thin less."
            yield Finding("warning", "too few draws", words)
        return
    some = downsampled(draws.values, ENOUGH)
    found = convergence(some)
    rhat, ess, n = found.worst_rhat, found.least_ess, draws.n_chains * draws.n_draws
    looked_at = some.shape[0] * some.shape[1]
    at_one_point = draws.settings.get("started_at_one_point") is True
    numbers = {
        "rhat": rhat,
        "ess_at_least": ess,  # draws between those looked at can only add to it
        "ess_from_draws": looked_at,
        "n_draws": n,
        "n_chains": draws.n_chains,
        "started_at_one_point": at_one_point,
    }
    one_chain = "no R-hat: there is one chain (set n_runs=4)"
    words = f"R-hat {rhat:.3f}" if math.isfinite(rhat) else one_chain
    worth = f"{ess:,.0f} independent ones"
    if looked_at < n:
        worth = f"at least {worth} (from {looked_at:,} of them, downsampled)"
    words += f"; {n:,} draws are worth {worth}"
    if rhat > RHAT or not ess >= FEW_DRAWS:
        why = f"R-hat should be below {RHAT}" if rhat > RHAT else f"{FEW_DRAWS} are needed"
        words += f"; {why}. Run longer (n_steps), or mix better."
        severity: Severity = "problem" if rhat > BAD_RHAT else "warning"
        yield Finding(severity, "chains have not converged", words, numbers)
    else:
        start = f" {AT_ONE_POINT}" if at_one_point else ""
        yield Finding("fine", "convergence", f"{words}.{start}", numbers)
    yield from _modes(run, draws)


def _modes(run: LoadedRun, draws: Draws) -> Iterable[Finding]:
    """Where chains, or the replicas of a chain, each keep to a mode of their own."""
    x = draws.values.double()
    if draws.n_chains > 1:
        share, k = _largest(x.mean(1).var(0, correction=0) / x.flatten(0, 1).var(0, correction=0))
        if share > APART:
            words = (
                f"{percent(share)} of the variance of coordinate {k} lies between chains: each"
                f" stays in a mode of its own, or leaves its start too slowly. {_to_cross(run)}"
            )
            numbers = {"share_between_chains": share, "coordinate": k}
            yield Finding("problem", "chains stay apart", words, numbers)
            return
    if run.history is None or run.history.n_rungs < 2:
        return
    at_cold = draws.replica_at[:, 0].T  # (chains, draws)
    if float((at_cold[:, 1:] != at_cold[:, :-1]).sum(1).double().mean()) < SWITCHES:
        return
    x, at_cold = downsampled(x, ENOUGH), downsampled(at_cold, ENOUGH)
    replicas = torch.arange(run.history.n_rungs)[:, None, None]
    here = (at_cold[None] == replicas).double()  # (replicas, chains, draws)
    n = here.sum(2)
    if float(n.min()) < 20:
        return
    means = torch.einsum("rcd,cdk->rck", here, x) / n[:, :, None]
    weight = (n / n.sum(0)).unsqueeze(2)
    between = (weight * (means - x.mean(1)).square()).sum(0).mean(0)
    share, k = _largest(between / x.var(1, correction=0).mean(0))
    if share > APART:
        words = (
            f"{percent(share)} of the variance of coordinate {k} on rung 0 lies between replicas:"
            f" each keeps to a mode of its own, so swaps choose among {len(n)} modes."
            f" Heat the top rung."
        )
        numbers = {"share_between_replicas": share, "coordinate": k}
        yield Finding("warning", "replicas in different modes", words, numbers)


def _to_cross(run: LoadedRun) -> str:
    """What lets chains leave their modes."""
    temperatures = () if run.ladder is None else run.ladder.temperatures
    if len(temperatures) == 1:
        cold = temperatures[0]
        if "made_by" in run.config:
            return "Run longer, or add hotter rungs: torchrex.tune chooses them."
        return f"Run longer, or add a hotter rung (temperatures={cold:g},{10 * cold:g})."
    if run.history is not None and run.history.n_pairs and run.correction_factor is not None:
        tests = run.history.proposed.sum(1)
        rates = run.history.accepted.sum(1) / tests
        if int(tests.min()) >= FEWEST_TESTS and float(rates.min()) >= WANTED[0]:
            return "It swaps often enough: run longer, or heat the top rung."
    return "Run longer; more swaps or a hotter top rung let chains cross."


def check_temperature(run: LoadedRun) -> Iterable[Finding]:
    """Is rung 0 at its temperature?"""
    settings = run.settings
    if run.ladder is None or settings is None or run.ladder.temperatures[0] == 0:
        return
    hotter = "rung 0 is hotter than nominal"
    if run.ladder.noise is not None:
        excess = float(run.ladder.noise(settings.n_steps - 1))
        if excess > 1 + TOLERATED:
            words = (
                f"The noise keeps the initial learning rate while that falls (noise_follows_lr ="
                f" false): at the end every rung moves at {number(excess)} times its temperature."
            )
            yield Finding("warning", hotter, words, {"times_nominal_at_the_end": excess})
        return
    gradient, draws = settings.energy_gradient(), _settled(run)
    reading: Sequence[Any] = (
        () if draws is None else _stored_reading(draws.settings.get("equipartition"))
    )
    unknown = gradient is None and not reading
    if unknown or draws is None or draws.n_draws < FEWEST_DRAWS:
        if run.result is not None and settings.is_density:  # of networks it is never known
            words = "Whether rung 0 is at its temperature needs draws and exact gradients."
            yield Finding("note", "temperature not known", words)
        return
    nominal = run.ladder.temperatures[0]
    if gradient is not None:
        x = downsampled(draws.values.double(), ENOUGH_FOR_GRADIENTS)
        if settings.gradient_cost > 1:  # tall data
            n = max(4, int(WORK / settings.gradient_cost / draws.n_chains))
            rows = torch.linspace(0, draws.n_draws - 1, min(draws.n_draws, n)).long()
            x = draws.values.double()[:, rows]
        reading = equipartition_temperature(x, gradient(x.flatten(0, 1)).reshape(x.shape))
    tau, error = map(float, reading)
    off = tau / nominal - 1
    numbers = {"temperature": tau, "standard_error": error, "nominal": nominal}
    numbers |= {"ratio": tau / nominal, "tolerated": TOLERATED}
    words = f"Equipartition reads {measured(tau, error)} on rung 0, {percent(abs(off))}"
    words += f" {'above' if off > 0 else 'below'} its temperature {number(nominal)}"
    tolerated = f"{100 * TOLERATED:g} %"
    try:
        rhat = convergence(downsampled(draws.values, ENOUGH)).worst_rhat
    except MissingDependencyError:  # `check_convergence` says so
        rhat = math.nan
    if rhat > BAD_RHAT:
        words += f", but the chains have not converged (R-hat {rhat:.3f}), so that means little."
        yield Finding("note", "temperature not known", words, {**numbers, "rhat": rhat})
    elif SIGMAS * error < off * nominal and (shift := _shift(run, draws, off)) > TOLERATED:
        words += (
            f". Modes of unequal width can then have odds that are off by a factor of about"
            f" {number(math.exp(shift))}: half of the {draws.values.shape[-1]} dimensions times"
            f" this excess times the log of the ladder's range. Lower the learning rate (half of"
            f" it halves the excess)."
        )
        yield Finding(
            "warning", "the learning rate shifts modes", words, {**numbers, "shift": shift}
        )
    elif abs(off) <= TOLERATED or abs(off) * nominal < SIGMAS * error:
        sigmas = f"{SIGMAS:g} standard errors"
        within = f"the {tolerated} tolerated" if abs(off) <= TOLERATED else sigmas
        yield Finding("fine", "temperature", f"{words}: within {within}.", numbers)
    else:
        factor = run.correction_factor or 1.0
        if off < 0:
            why = "the chains have not spread over the density yet: run longer"
        elif factor > 1:
            why = f"F = {number(factor)} accepts states that the unbiased test refuses: lower F"
        else:
            why = "the learning rate is too large: lower it (half of it halves the excess)"
        severity: Severity = "problem" if abs(off) > MUCH else "warning"
        title = hotter if off > 0 else "rung 0 is colder than nominal"
        yield Finding(severity, title, f"{words} ({tolerated} is tolerated); {why}.", numbers)


def _shift(run: LoadedRun, draws: Draws, excess: float) -> float:
    """Of the log of a mode's weight, if its width has this excess at every temperature T:

    d log Z / d (1/T) = -mean energy = -(d / 2) T (1 + excess)
    """
    assert run.ladder is not None
    cold, hot = run.ladder.temperatures[0], run.ladder.temperatures[-1]
    if not hot > cold or math.isinf(hot) or excess > TOLERATED:
        return 0.0  # a larger excess is reported by itself
    return 0.5 * draws.values.shape[-1] * excess * math.log(hot / cold)


def _stored_reading(found: Any) -> tuple[float, ...]:
    """What `sample` read, which may come from a file; empty if it is anything but two numbers."""
    fine = isinstance(found, list) and len(found) == 2
    fine = fine and all(isinstance(each, float) and math.isfinite(each) for each in found)
    return tuple(found) if fine else ()


def check_gradient_noise(run: LoadedRun) -> Iterable[Finding]:
    """How much wider do minibatches make rung 0?

        variance = T / h + lr N / (2 n)

    along a direction of curvature h, of SGLD on a model that fits its data. The least variance of
    any direction shows it best; where modes lie apart in that direction it is more.
    """
    settings, draws = run.settings, _settled(run)
    if settings is None or draws is None or run.ladder is None or draws.n_draws < FEWEST_DRAWS:
        return
    n_data, batch, dim = settings.n_data, settings.batch_size, draws.values.shape[-1]
    if not (n_data and batch and settings.has_sgld) or batch >= n_data or dim > MOST_DIMENSIONS:
        return
    x = downsampled(draws.values.double(), ENOUGH)
    inside = (x - x.mean(1, keepdim=True)).flatten(0, 1)
    least = float(torch.linalg.eigvalsh(inside.T @ inside / len(inside))[0])
    lr = run.ladder.lrs[0]
    added = lr * n_data / (2 * batch)
    if not least > 0:
        return
    share = min(1.0, added / least)
    numbers = {"added_variance": added, "least_variance": least, "share": share, "lr": lr}
    if share > TOLERATED:
        words = (
            f"Minibatches of {batch:,} of {n_data:,} add about lr N / (2 n) = {number(added)} to"
            f" the variance of every direction: {percent(share)} of the least one here,"
            f" {number(least)}. Lower lr (half of it halves this), or take larger minibatches."
        )
        severity: Severity = "problem" if share > MUCH else "warning"
        yield Finding(severity, "gradient noise widens rung 0", words, numbers)


def check_tail(run: LoadedRun) -> Iterable[Finding]:
    """Is the noise of the energies Gaussian, as the correction assumes?"""
    noise = None if run.settings is None else run.settings.energy_noise()
    if noise is None or run.correction_factor is None:
        return
    tail = hill(noise(REPEATED))
    index, gaussian, sigmas = tail.index, tail.gaussian_index, tail.sigmas
    numbers = {"tail_index": index, "gaussian_index": gaussian, "sigmas": sigmas}
    if tail.too_heavy:
        words = (
            f"{REPEATED:,} energies drawn again at one place have the tail index {index:.2g};"
            f" a Gaussian has {gaussian:.2g} ({sigmas:.0f} sd off)."
            f" So swaps are biased at any F; a smaller gap between temperatures reduces it."
        )
        yield Finding("warning", "the energy noise has heavy tails", words, numbers)
    else:
        words = f"The energy noise looks Gaussian (tail index {index:.2g})."
        yield Finding("fine", "noise", words, numbers)


def _settled(run: LoadedRun) -> Draws | None:
    """The draws of a density without the burn-in; None where there are none."""
    if run.draws is None or run.draws.n_draws == 0:
        return None
    burn_in = int(BURN_IN * run.draws.n_steps)
    return run.draws.after(burn_in) if int(run.draws.steps[-1]) > burn_in else None


def downsampled(values: Tensor, enough: int) -> Tensor:
    """Every n-th draw of (chains, draws, ...): about `enough`, and LEAST of each chain."""
    n_chains, n_draws = values.shape[:2]
    return values[:, :: max(1, min(n_chains * n_draws // enough, n_draws // LEAST))]


def _largest(shares: Tensor) -> tuple[float, int]:
    known = shares.nan_to_num(nan=0.0)
    return float(known.max()), int(known.argmax())


def check_average(run: LoadedRun) -> Iterable[Finding]:
    """Has the average of a network's predictions settled, and is it better than one network?

    Which image each predicts wrongly is not kept, so the error of a difference is the binomial one
    of two separate sets. Both mostly err on the same images: the true error is smaller.
    """
    names = ("accuracy", "nll", "single_accuracy", "single_nll", "n_draws")
    numbers = {name: run.numbers[name] for name in names if name in run.numbers}
    if "accuracy" not in numbers or run.settings is None:
        return
    later = "make the warm start longer" if run.settings.warm_start else "begin the average later"
    curve, changed = run.curves.get("probabilities_accuracy") or [], ""
    if len(curve) >= 3:
        before, last = curve[2 * len(curve) // 3], curve[-1]
        gained, lately = last - before, last - curve[9 * len(curve) // 10 - 1]
        numbers |= {"accuracy_at_two_thirds": before, "gained": gained}
        numbers["gained_in_the_last_tenth"] = lately
        if gained > STILL_RISING and lately > 0:
            words = (
                f"The accuracy of the average rose from {100 * before:.2f} % to {100 * last:.2f} %"
                f" over the last third of its {several(len(curve), 'draw')} and still rises:"
                f" extend the run, or {later}."
            )
            yield Finding("warning", "the average has not converged", words, numbers)
            return
        tenth = f", over the last tenth by {100 * lately:+.2f}" if gained > STILL_RISING else ""
        changed = (
            f" Over the last third of the draws it changed by {100 * gained:+.2f} points{tenth}"
            f" (more than {100 * STILL_RISING:.2f} is still rising)."
        )
    accuracy, single = numbers["accuracy"], numbers.get("single_accuracy")
    kept = run.trace.get("probabilities")
    n = run.settings.test_size if kept is None or kept.ndim != 2 else len(kept)
    draws = several(numbers["n_draws"], "draw") if "n_draws" in numbers else "draws"
    words = f"The average of {draws} has accuracy {100 * accuracy:.2f} %"
    severity: Severity = "fine"
    if single is not None and n is not None:
        difference = accuracy - single
        error = math.sqrt((accuracy * (1 - accuracy) + single * (1 - single)) / n)
        numbers |= {"difference": difference, "standard_error": error, "n_test": n}
        words += (
            f", its newest network alone {100 * single:.2f} %: a difference of"
            f" {measured(100 * difference, 100 * error)} points (binomial, {n:,} test images)"
        )
        if -difference > AVERAGE_SIGMAS * error:
            words += f". Early draws lower it: {later}."
            yield Finding("warning", "the average is worse than one network", words, numbers)
            return
        words += ", within noise" if difference <= AVERAGE_SIGMAS * error else ""
        nll, single_nll = numbers.get("nll", -math.inf), numbers.get("single_nll", math.inf)
        if single_nll < nll:
            severity = "note"
            words += f". Its NLL is larger, {nll:.4f} against {single_nll:.4f}"
    yield Finding(severity, "average", f"{words}.{changed}", numbers)


def check_clipping(run: LoadedRun) -> Iterable[Finding]:
    """Clipped gradients are those of another law."""
    share = run.numbers.get("clipped_share", 0.0)
    samples = run.ladder is not None and run.ladder.anneal is None and run.ladder.temperatures[0]
    if samples and share > MOST_CLIPPED:
        words = (
            f"{percent(share)} of the later steps on rung 0 were clipped: it samples another law."
            f" Raise clip, or lower the learning rates."
        )
        yield Finding("warning", "clipped gradients", words, {"clipped_share": share})


def check_intervals(run: LoadedRun) -> Iterable[Finding]:
    """Do 90 % intervals hold 90 % of the held-out values?"""
    held, n = run.numbers.get("coverage_90"), run.numbers.get("n_test")
    if held is None or not n:
        return
    error = math.sqrt(0.9 * 0.1 / n)
    numbers = {"coverage_90": held, "n_test": n, "standard_error": error}
    words = f"90 % intervals hold {percent(held)} of the targets of {n:,.0f} held-out examples"
    if abs(held - 0.9) <= max(SIGMAS * error, TOLERATED_COVERAGE):
        yield Finding("fine", "intervals", f"{words}.", numbers)
    else:
        what = "wide" if held > 0.9 else "narrow"
        words += f": they are too {what}. Look at the noise of the likelihood and at the lr."
        yield Finding("warning", f"intervals are too {what}", words, numbers)


def check_experiment(run: LoadedRun) -> Iterable[Finding]:
    """What only this experiment can say: `title: words`."""
    if run.settings is None or run.result is None:
        return
    for advice in run.settings.advice(run.result):
        title, _, words = advice.partition(": ")
        title, words = title[:1].lower() + title[1:], words[:1].upper() + words[1:]
        yield Finding("warning", title, words)


def check_warm_start(run: LoadedRun) -> Iterable[Finding]:
    """A note and no fault: descent knows no temperature and tests no swap."""
    settings, ladder = run.settings, run.ladder
    if settings is None or ladder is None or settings.warm_start < 1:
        return
    first, decay = ladder.lrs[0], ladder.decay
    begins = first if decay is None else first * float(decay(settings.warm_start))
    steps = {"warm_start": settings.warm_start, "n_steps": settings.n_steps}
    numbers = {**steps, "lr_of_descent": first, "lr_of_sampler": begins}
    words = (
        f"The first {settings.warm_start:,} of {settings.n_steps:,} steps descend without noise and"
        f" swaps: temperatures hold after them. On rung 0 the descent begins at learning rate"
        f" {number(first)} (of the summed energy), the sampler at {number(begins)}."
    )
    yield Finding("note", "warm start", words, numbers)


# Checkpoints


@dataclass
class Saved:
    """The checkpoints in one folder: of a run, or of one of its shards, which resume one by one."""

    shard: str = ""
    sound: list[int] = field(default_factory=list)  # steps
    damaged: dict[int, str] = field(default_factory=dict)  # by step, what is wrong
    refused: str = ""  # why none can be used, whatever it holds: it is of another version

    @property
    def unusable(self) -> bool:
        """A resume stops here."""
        return bool(self.refused) or (bool(self.damaged) and not self.sound)

    def name(self, step: int) -> str:
        return f"{self.shard}/step={step:09d}".lstrip("/")


def look_at_checkpoints(run: LoadedRun) -> list[Saved]:
    """Read every complete checkpoint of a run as a resume would."""
    found = []
    for checkpoints in checkpoints_of(run.path):
        saved = Saved(checkpoints.folder.name if checkpoints.folder.parent != run.path else "")
        try:
            for step in checkpoints.steps():
                try:
                    read(checkpoints.path_of(step), step, None)
                    saved.sound.append(step)
                except DamagedError as damage:
                    saved.damaged[step] = one_line(damage)
        except OSError as error:
            saved.refused = one_line(error)
        found.append(saved)
    return [saved for saved in found if saved.sound or saved.damaged or saved.refused]


def are_large(run: LoadedRun) -> bool:
    """Reading its checkpoints may take a second or more."""
    with suppress(OSError):  # reading them says why
        folders = (each.path_of(step) for each in checkpoints_of(run.path) for step in each.steps())
        return sum(file.lstat().st_size for path in folders for file in path.iterdir()) > LARGE
    return False


def checkpoint_findings(run: LoadedRun, found: Sequence[Saved]) -> Iterable[Finding]:
    """Damage costs a finished run nothing, and an unfinished one steps, or all of them."""
    refused = [saved for saved in found if saved.refused]
    for saved in refused:
        words = f"{saved.refused[0].upper()}{saved.refused[1:].rstrip('.')}."
        yield Finding("warning", "checkpoints that cannot be used", words, {"shard": saved.shard})
    sound = [saved.name(step) for saved in found for step in saved.sound]
    why = {s.name(step): words for s in found for step, words in s.damaged.items()}
    numbers = {"whole": sound, "damaged": list(why)}
    if why:
        each = [f"checkpoints/{name} {words}" for name, words in why.items()]
        more = [f"and {len(each) - MOST_NAMED} more"] if len(each) > MOST_NAMED else []
        after = "The run is finished and does not need them: remove what is damaged."
        finished = run.status == "finished"
        words = "; ".join([*each[:MOST_NAMED], *more])
        words += f". {after if finished else _what_a_resume_does(found)} Check the disk."
        title = "damaged checkpoint" + ("s" if len(why) > 1 else "")
        yield Finding("note" if finished else "warning", title, words, numbers)
    elif sound and not refused:
        n, step = several(len(sound), "checkpoint"), min(max(saved.sound) for saved in found)
        words = f"{n} {'is' if len(sound) == 1 else 'are'} sound; the newest has step {step:,}."
        if len(found) > 1:
            words = f"{n} of {len(found)} shards are sound; all shards have reached step {step:,}."
        yield Finding("fine", "checkpoints", words, numbers)


def _what_a_resume_does(found: Sequence[Saved]) -> str:
    def named(word: str, some: Sequence[Saved]) -> str:
        return f" {word} {', '.join(saved.shard for saved in some)}" if some[0].shard else ""

    damaged = [saved for saved in found if saved.damaged]
    if unusable := [saved for saved in damaged if saved.unusable]:
        of = named("of", unusable)
        return f"No checkpoint{of} can be used: restore one from a copy, or use --overwrite."
    behind = [saved for saved in damaged if max(saved.damaged) > max(saved.sound)]
    if not behind:
        return "The newest is sound, and --resume continues from it."
    lost = max(max(saved.damaged) - max(saved.sound) for saved in behind)
    step = f"step {min(max(saved.sound) for saved in behind):,}{named('in', behind)}"
    return f"--resume continues from {step} and repeats {several(lost, 'step')}."


# All of it


Check = Callable[[LoadedRun], Iterable[Finding]]
CHECKS: dict[Check, str] = {
    check_truth: "whether its answer is right",
    check_ladder: "how it swaps",
    check_convergence: "whether it has converged",
    check_temperature: "whether rung 0 is at its temperature",
    check_tail: "whether its noise is Gaussian",
    check_average: "how its average does",
    check_gradient_noise: "how much minibatches widen rung 0",
    check_intervals: "whether its intervals are right",
    check_clipping: "whether its gradients are clipped",
    check_warm_start: "when its temperatures begin to hold",
    check_experiment: "what is special to its experiment",
}


def findings_of(run: LoadedRun, *, quick: bool = False) -> list[Finding]:
    """Everything there is to say about a run, the gravest first and what is fine last.

    A check that needs what is not installed, or fails on a damaged run, becomes a note. `quick`
    leaves out what may take seconds, and a note with the title QUICK says so.
    """
    findings: list[Finding] = []

    def leave_out(what: str) -> None:
        words = f"To know {what} takes seconds here; `torchrex doctor` with its folder does it."
        findings.append(Finding("note", QUICK, words))

    with few_threads(0):
        skip = quick and are_large(run)
        saved = [] if skip else look_at_checkpoints(run)
        findings += check_state(run, unusable=any(each.unusable for each in saved))
        findings += checkpoint_findings(run, saved)
        if skip:
            leave_out("whether its checkpoints are sound")
        for check, what in CHECKS.items():
            tall = run.settings is not None and run.settings.gradient_cost > 1
            if quick and check is check_temperature and tall and run.draws is not None:
                leave_out(what)
                continue
            try:
                findings += check(run)
            except MissingDependencyError as error:
                findings.append(Finding("note", "not known", str(error)))
            except (TorchrexError, RuntimeError, ValueError, LookupError, TypeError) as error:
                if not run.problems:  # do not hide our own mistakes
                    raise
                why = f" ({error})" if isinstance(error, TorchrexError) else ""
                words = f"What is left of this run does not show {what}{why}."
                findings.append(Finding("note", "not known", words))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def check_state(run: LoadedRun, *, unusable: bool = False) -> Iterable[Finding]:
    """Is the run finished, and are all its files there? `unusable`: no checkpoint can be used."""
    result = run.result or {}
    total = None if run.settings is None else run.settings.n_steps
    done = result.get("steps_done") or (run.draws.n_steps if run.draws is not None else None)
    numbers = {"status": run.status, "steps_done": done, "n_steps": total}
    after = f" after {done:,} of {total:,} steps" if isinstance(done, int) and total else ""
    problems = list(run.problems)
    if run.status == "failed":
        error = str(result.get("error", "it does not say why")).rstrip(".")
        words = f"It failed{after}: {error}."
        yield Finding("problem", "the run failed", words, {**numbers, "error": error})
    elif run.status in ("interrupted", "paused", "unfinished"):
        what = f"It was {run.status}{after}"
        for missing in (
            each for each in run.problems if each.startswith("there is no result.json")
        ):
            what = f"T{missing[1:]}"
            problems.remove(missing)
        words = f"{what}. {_go_on(run, unusable)}"
        yield Finding("warning", "the run is not finished", words, numbers)
    for problem in problems:
        newer = problem.startswith(("config.json is not", "config.json has", "config.json lacks"))
        name = None if newer else next((name for name in run.damaged if name in problem), None)
        other = "of another version" if newer else "missing"
        words = problem if "." in problem.split()[0] else f"{problem[0].upper()}{problem[1:]}"
        about = {"file": name} if name else {}
        title = "unreadable" if "cannot be read" in problem else "damaged"
        yield Finding("warning", title if name else other, f"{words}.", about)
    if run.status == "finished" and run.settings is not None and run.result is not None:
        density = run.settings.is_density
        name = "draws.safetensors" if density else "trace.safetensors"
        # Committed results of networks have curves in result.json in place of a trace.
        if not os.path.lexists(run.path / name) and (density or not run.curves):
            words = f"There is no {name}: what it would show is left out."
            yield Finding("note", "missing", words, {"file": name})


def _go_on(run: LoadedRun, unusable: bool) -> str:
    """What to type to finish it."""
    if "made_by" in run.config:
        return "The same call in its script continues it."
    depth, above = len(run.recipe.split("/")), run.path.parents
    again = command_to_repeat(run, str(above[depth]) if len(above) > depth else "runs").line
    option, does = "--resume", "continues it"
    if unusable or (run.draws is not None and not (run.path / "checkpoints").is_dir()):
        option, does = "--overwrite", "begins anew"
    return f"`{again} {option}` {does}." if again else f"Its own command with {option} {does}."


def diagnose(run: LoadedRun, *, quick: bool = False) -> Diagnosis:
    status = f"{run.status}, damaged" if run.damaged and run.status != "damaged" else run.status
    return Diagnosis(run.path, run.name, status, tuple(findings_of(run, quick=quick)))


def diagnose_folder(root: Path) -> list[Diagnosis]:
    """Every run at or below `root`, then the folders that are empty or cannot be read."""
    found, others = list[Diagnosis](), list[NotRead]()
    for each in read_tree(root):
        if isinstance(each, LoadedRun):
            found.append(diagnose(each))
        else:
            others.append(each)
    if not found and all(each.status == "unreadable" for each in others):
        reason = f" ({one_line(others[0].path)}: {others[0].words})" if others else ""
        advice = "give OUT/RECIPE/seed=S, or a folder above some"
        raise RunFolderError(f"{one_line(root)} holds no run{reason}; {advice}")
    return found + [_not_read(each) for each in others]


def _not_read(folder: NotRead) -> Diagnosis:
    words = "The folder holds nothing of a run. Run it again, or remove the folder."
    if folder.status != "empty":
        words = f"Nothing of it is shown: {folder.words}."
    name = one_line(f"{folder.path.parent.name}/{folder.path.name}")
    return Diagnosis(folder.path, name, folder.status, (Finding("problem", folder.status, words),))


def as_json(diagnoses: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    return [
        {
            "path": str(each.path),
            "run": each.name,
            "status": each.status,
            "verdict": each.verdict,
            "findings": [to_json(finding) for finding in each.findings],
        }
        for each in diagnoses
    ]


def as_text(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Lines for people, as (severity, words); the first is the head, without a severity."""
    head = f"{diagnosis.name} ({diagnosis.status}): {diagnosis.verdict}"
    return [("", head), *((f.severity, f"{f.title}. {f.words}") for f in diagnosis.findings)]


def roll_up(diagnoses: Sequence[Diagnosis]) -> list[tuple[str, str]]:
    """How many runs have each finding but fine ones, as lines like those of `as_text`: the gravest
    first, then the most common.
    """
    n, healthy = len(diagnoses), all(each.healthy for each in diagnoses)
    words = tally((len(each.of("problem")), len(each.of("warning"))) for each in diagnoses)
    found = Counter[tuple[Severity, str]]()
    for each in diagnoses:
        found.update(dict.fromkeys(((of.severity, of.title) for of in each.findings), 1))
    ranked = sorted(found.items(), key=lambda each: (SEVERITIES.index(each[0][0]), -each[1]))
    return [
        ("", f"{n:,} runs: {'nothing wrong was found' if healthy else words}"),
        *((s, f"{k:,} of {n:,} runs: {title}") for (s, title), k in ranked if s != "fine"),
    ]
