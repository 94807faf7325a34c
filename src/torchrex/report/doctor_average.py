"""Has the average of a network's predictions settled, and is it better than its newest network
alone?

What is kept of a run are counts over the same test images and not who erred on which, so the error
of a difference is the binomial one of two separate sets. Both mostly err on the same images: the
true error is smaller, and a warning is safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torchrex.experiments.digits import N_TEST, DigitsConfig
from torchrex.experiments.gan import GanConfig
from torchrex.experiments.images import ImageConfig
from torchrex.report.doctor_words import several
from torchrex.report.findings import Finding
from torchrex.report.runs import LoadedRun

STILL_RISING = 0.002  # accuracy gained over the last third of the draws
RULE = f"more than {100 * STILL_RISING:.2f} points over the last third of the draws, and some of it in the last tenth"
SIGMAS = 2.0
IMAGES_IN_A_TEST = 10_000  # of CIFAR
OTHER_TESTS = {"digits": N_TEST, "svhn": 26_032}


def check_average(run: LoadedRun) -> Iterable[Finding]:
    """For networks; densities have no average of predictions."""
    metrics, curves = run.metrics, (run.result or {}).get("curves") or {}
    names = ("accuracy", "nll", "single_accuracy", "single_nll", "n_draws")
    numbers: dict[str, Any] = {
        name: metrics[name] for name in names if isinstance(metrics.get(name), int | float)
    }
    if "accuracy" not in numbers:
        return
    curve = curves.get("probabilities_accuracy") or []
    changed = ""
    if len(curve) >= 3:
        before = curve[2 * len(curve) // 3]
        gained = curve[-1] - before
        numbers |= {"accuracy_at_two_thirds": before, "gained": gained}
        lately = curve[-1] - curve[9 * len(curve) // 10 - 1]
        numbers["gained_in_the_last_tenth"] = lately
        if gained > STILL_RISING and lately > 0:
            words = (
                f"The accuracy of the average rose from {_points(before)} % to {_points(curve[-1])} % over the last third of its "
                f"{several(len(curve), 'draw')} and was still rising ({RULE}): extend the run, or {_later(run)}, for the "
                f"early draws weigh it down."
            )
            yield Finding("warning", "the average has not converged", words, numbers)
            return
        changed = f" Over the last third of the draws it changed by {100 * gained:+.2f} points; still rising would be {RULE}."
        if gained > STILL_RISING:
            changed = (
                f" Over the last third of the draws it rose by {100 * gained:.2f} points, but not in their last tenth "
                f"({100 * lately:+.2f} points): it has stopped rising."
            )
    yield _against_one(run, numbers, changed)


def _against_one(run: LoadedRun, numbers: dict[str, Any], changed: str) -> Finding:
    accuracy, single, n = numbers["accuracy"], numbers.get("single_accuracy"), n_tested(run)
    draws = several(numbers["n_draws"], "draw") if "n_draws" in numbers else "draws"
    told = f"The average of {draws} has accuracy {_points(accuracy)} %"
    if single is None or n is None:
        return Finding("fine", "average", f"{told}.{changed}", numbers)
    difference, error = (
        accuracy - single,
        math.sqrt((accuracy * (1 - accuracy) + single * (1 - single)) / n),
    )
    numbers = {**numbers, "difference": difference, "standard_error": error, "n_test": n}
    told += (
        f", its newest network alone {_points(single)} %: {100 * difference:+.2f} +- {100 * error:.2f} points "
        f"(binomial, {n:,} test images)"
    )
    if difference < 0 and -difference > SIGMAS * error:
        words = f"{told}. Early draws weigh it down: {_later(run)}."
        return Finding("warning", "the average is worse than one network", words, numbers)
    if abs(difference) <= SIGMAS * error:
        told += ", within noise"
    if numbers.get("single_nll", math.inf) < numbers.get("nll", -math.inf):
        told += f". Its NLL is the larger one, {numbers['nll']:.4f} against {numbers['single_nll']:.4f}, of unknown error"
        return Finding("note", "average", f"{told}.{changed}", numbers)
    return Finding("fine", "average", f"{told}.{changed}", numbers)


def n_tested(run: LoadedRun) -> int | None:
    """How many images the accuracies were counted on; None where neither the trace nor the settings
    tell.
    """
    kept, settings = run.trace.get("probabilities"), run.settings
    if kept is not None and kept.ndim == 2:
        return len(kept)
    if isinstance(settings, DigitsConfig):
        return N_TEST
    if isinstance(settings, ImageConfig | GanConfig):
        there = settings.validation or OTHER_TESTS.get(settings.data, IMAGES_IN_A_TEST)
        return min(there, settings.test_subset or there)
    return None


def _later(run: LoadedRun) -> str:
    """The average of a GAN begins where its warm start ends."""
    return (
        "make the warm start longer"
        if isinstance(run.settings, GanConfig)
        else "begin the average later"
    )


def _points(accuracy: float) -> str:
    return f"{100 * accuracy:.2f}"
