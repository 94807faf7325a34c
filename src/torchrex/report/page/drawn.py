"""Which figures a family has, and those on which families lie over each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.report import figures
from torchrex.report.figures import Look
from torchrex.report.page.ladder import Pooled
from torchrex.report.page.rows import Family
from torchrex.report.plots import least_of_averages
from torchrex.report.reader import LoadedRun

CURVES = {
    "probabilities_accuracy": "average of probabilities",
    "logits_accuracy": "average of logits",
    "pooled_probabilities_accuracy": "average, all rungs",
    "last_accuracy": "last draw alone",
}


class Drawn(NamedTuple):
    """One figure of the page."""

    kind: str
    figure: Any


def of_ladder(ladder: Pooled, look: Look) -> list[Drawn]:
    """How the ladder worked: first what it did, then why."""
    history, first = ladder.history, next(iter(ladder.runs.items()))
    over: dict[str, Any] = {"unit": ladder.unit, "scale": ladder.scale}
    one = {"chain": first[1]}
    made = []
    if ladder.pairs:
        made.append(("acceptance", partial(figures.acceptance, ladder.pairs, look=look)))
    if ladder.travel is not None:
        made.append(("flow", partial(figures.flow, history, of=first[0], **one)))
    made.append(("energy", partial(figures.energies, history, chains=ladder.runs, **over)))
    if ladder.pairs:
        if not ladder.averaged:
            by_time = partial(figures.acceptance_by_time, history, first=ladder.first_test)
            made.append(("rates", partial(by_time, **over)))
        made.append(("noise", partial(figures.noise, history, **over)))
        if history.correction is not None:
            made.append(("correction", partial(figures.corrections, history, **one, **over)))
    return [Drawn(kind, draw()) for kind, draw in made]


def of_answers(families: Sequence[Family], looks: Mapping[str, Look]) -> list[Drawn]:
    """What the runs of these families found: averages, calibration, densities and distances.

    Only what has the same data or the same truth lies over each other.
    """
    found: list[Drawn] = []
    alone = len(families) == 1
    for _, some in _grouped(families, _accuracy_key):
        if alone:
            found += _all_averages(some[0])
            continue
        curves = {family.label: _mean(family, _headline(family)) for family in some}
        known = {name: y for name, y in curves.items() if y}
        lows = [low for family in some if (low := least_of_averages(_curves(family))) is not None]
        low = min(lows, default=None)
        found.append(Drawn("averages", figures.averages(known, looks, low=low)))
    for _, some in _grouped(families, _labels_key):
        labels = _labels(some[0].drawn)
        assert labels is not None
        predictions = {family.label: _predictions(family.drawn, len(labels)) for family in some}
        known_p = {name: each for name, each in predictions.items() if each}
        if known_p:
            found.append(Drawn("reliability", figures.reliability(known_p, labels, looks)))
    for _, some in _grouped(families, _truth_key):
        settings = some[0].settings
        exact = None if settings is None else settings.exact_density()
        drawn = {
            family.label: x for family in some if (x := _traced(family.drawn, "edges", "density"))
        }
        if drawn and exact is not None:
            edges = next(iter(drawn.values()))[0]
            same = {n: y for n, (x, y) in drawn.items() if torch.equal(x, edges)}
            found.append(Drawn("density", figures.density(edges, same, looks, exact)))
        curves_w2 = {
            family.label: x for family in some if (x := _traced(family.drawn, "curve_steps", "w2"))
        }
        if curves_w2:
            found.append(Drawn("distance", figures.distance(curves_w2, looks)))
    return found


def _grouped(
    families: Sequence[Family], key: Callable[[Family], str | None]
) -> Iterable[tuple[str, list[Family]]]:
    found: dict[str, list[Family]] = {}
    for family in families:
        if (name := key(family)) is not None:
            found.setdefault(name, []).append(family)
    return [each for each in found.items() if len(families) == 1 or len(each[1]) > 1]


def _accuracy_key(family: Family) -> str | None:
    same = ("data", "net", "epochs", "n_labelled", "steps")
    there = any(family.drawn[0].curves.get(name) for name in CURVES) if family.drawn else False
    return " ".join(str(family.config.get(name)) for name in same) if there else None


def _labels_key(family: Family) -> str | None:
    there = _labels(family.drawn) is not None and any(
        "probabilities" in x.trace for x in family.drawn
    )
    return family.recipe.split("/")[0] if there else None


def _truth_key(family: Family) -> str | None:
    if family.settings is None or family.settings.exact_density() is None:
        return None
    return " ".join(str(family.config.get(name)) for name in ("weights", "means", "stds"))


def _curves(family: Family) -> dict[str, list[Any]]:
    return next((run.curves for run in family.drawn if run.curves), {})


def _headline(family: Family) -> str:
    return "logits_accuracy" if "logits_accuracy" in _curves(family) else "probabilities_accuracy"


def _mean(family: Family, name: str) -> list[float]:
    """The mean over the seeds that have the whole curve."""
    every = [run.curves.get(name) for run in family.drawn]
    known = [y for y in every if isinstance(y, list) and y and None not in y]
    longest = max(map(len, known), default=0)
    full = [y for y in known if len(y) == longest]
    return [sum(values) / len(full) for values in zip(*full, strict=True)]


def _all_averages(family: Family) -> list[Drawn]:
    curves = {words: y for name, words in CURVES.items() if (y := _mean(family, name))}
    if not curves:
        return []
    looks = {words: Look(figures.METHODS[k], figures.DASHES[k]) for k, words in enumerate(curves)}
    low = least_of_averages(_curves(family))
    return [Drawn("averages", figures.averages(curves, looks, low=low))]


def _labels(runs: Sequence[LoadedRun]) -> Tensor | None:
    settings = next((run.settings for run in runs if run.settings is not None), None)
    return None if settings is None else settings.test_labels()


def _predictions(runs: Sequence[LoadedRun], n: int) -> list[Tensor]:
    every = [run.trace.get("probabilities") for run in runs]
    return [x for x in every if x is not None and x.ndim == 2 and len(x) == n]


def _traced(runs: Sequence[LoadedRun], one: str, two: str) -> tuple[Tensor, Tensor] | None:
    """Two tensors of the traces; the second has the chains of all runs with the same first."""
    fits = [run.trace for run in runs if _fits(run.trace, one, two)]
    if not fits:
        return None
    x = fits[0][one]
    same = [trace[two].double() for trace in fits if torch.equal(trace[one], x)]
    return x, torch.cat(same, dim=0 if one == "edges" else 1)


def _fits(trace: Mapping[str, Tensor], one: str, two: str) -> bool:
    known = one in trace and two in trace
    if not known or trace[one].ndim != 1 or trace[two].ndim != 2 or not len(trace[two]):
        return False
    if one == "edges":
        return trace[two].shape[1] == len(trace[one]) - 1
    return len(trace[one]) == len(trace[two])
