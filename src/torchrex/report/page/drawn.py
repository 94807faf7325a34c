"""Which figures a family has, and those on which families lie over each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from torchrex.report import figures
from torchrex.report.page.ladder import Pooled
from torchrex.report.page.rows import Family
from torchrex.report.plots import COLOURS
from torchrex.report.reader import LoadedRun

CURVES = {
    "probabilities_accuracy": "average of probabilities",
    "logits_accuracy": "average of logits",
    "pooled_probabilities_accuracy": "average, all rungs",
    "last_accuracy": "last draw alone",
}

Drawn = tuple[str, Any]  # what kind of figure, and the figure
Families = Sequence[Family]


def of_ladder(ladder: Pooled, colour: str) -> list[Drawn]:
    """How the ladder worked: first what it did, then why."""
    history, (first, chain) = ladder.history, next(iter(ladder.runs.items()))
    made: list[Drawn] = []
    if ladder.pairs:
        made.append(("acceptance", figures.acceptance(ladder.pairs, colour=colour)))
    if ladder.travel is not None and history.accepted.any():
        made.append(("flow", figures.flow(history, chain=chain, of=first)))
    made.append(("energy", figures.energies(history, ladder.runs)))
    if history.noise_variance.any():
        made.append(("noise", figures.noise(history)))
    return made


def of_answers(families: Families) -> list[Drawn]:
    """What runs found: averages, calibration, densities and distances, of one family or of several
    that have the same data or the same truth.
    """
    colours = {family.label: family.colour for family in families}
    found: list[Drawn] = []
    for some in _alike(families, _of_averages):
        if len(families) == 1:
            made = _all_averages(some[0])
        else:
            curves = {each.label: _mean(each, _headline(each)) for each in some}
            made = figures.averages({name: y for name, y in curves.items() if y}, colours)
        found.append(("averages", _named(made, some)))
    for some in _alike(families, _of_labels):
        labels = _labels(some[0])
        assert labels is not None
        predictions = {each.label: _predictions(each) for each in some}
        found.append(("reliability", figures.reliability(predictions, labels, colours)))
    for some in _alike(families, _of_truth):
        exact = some[0].settings and some[0].settings.exact_density()
        drawn = {e.label: x for e in some if (x := _traced(e.drawn, "edges", "density"))}
        if drawn and exact:
            edges = next(iter(drawn.values()))[0]
            same = {name: y for name, (x, y) in drawn.items() if torch.equal(x, edges)}
            made = figures.density(edges, same, colours, exact)
            found.append(("density", _named(made, some)))
        w2 = {e.label: x for e in some if (x := _traced(e.drawn, "curve_steps", "w2"))}
        if w2:
            found.append(("distance", _named(figures.distance(w2, colours), some)))
    return found


def _alike(families: Families, key: Callable[[Family], str]) -> list[Families]:
    """Families with the same key; "" takes no part, nor does one alone next to others."""
    found: dict[str, list[Family]] = {}
    for family in families:
        found.setdefault(key(family) if family.drawn else "", []).append(family)
    found.pop("", None)
    return [some for some in found.values() if len(families) == 1 or len(some) > 1]


def _named(figure: Any, some: Families) -> Any:
    """What the names of several families have in common comes before the title."""
    ends = zip(min(e.label for e in some), max(e.label for e in some), strict=False)
    common = "".join(a for a, _ in takewhile(lambda ab: ab[0] == ab[1], ends)).rstrip("-_ (")
    if len(some) > 1 and common:
        figure.update_layout(title_text=f"{figures.plain(common)}: {figure.layout.title.text}")
    return figure


def _of_averages(family: Family) -> str:
    same = ("data", "net", "epochs", "n_labelled", "steps")
    there = any(_curves(family).get(name) for name in CURVES)
    return " ".join(str(family.config.get(name)) for name in same) if there else ""


def _of_labels(family: Family) -> str:
    if family.settings is None or not _predictions(family):
        return ""
    return family.settings.group


def _of_truth(family: Family) -> str:
    if family.settings is None or family.settings.exact_density() is None:
        return ""
    return " ".join(str(family.config.get(name)) for name in ("weights", "means", "stds"))


def _curves(family: Family) -> dict[str, list[Any]]:
    return next((run.curves for run in family.drawn if run.curves), {})


def _headline(family: Family) -> str:
    return "logits_accuracy" if "logits_accuracy" in _curves(family) else "probabilities_accuracy"


def _mean(family: Family, name: str) -> list[float]:
    """The mean over the seeds that have the complete curve."""
    every = [run.curves.get(name) for run in family.drawn]
    known = [y for y in every if isinstance(y, list) and y and None not in y]
    longest = max(map(len, known), default=0)
    return [statistics.fmean(y) for y in zip(*(y for y in known if len(y) == longest), strict=True)]


def _all_averages(family: Family) -> Any:
    curves = {words: y for name, words in CURVES.items() if (y := _mean(family, name))}
    colours = dict(zip(curves, COLOURS, strict=False))
    return figures.averages(curves, colours, single=CURVES["last_accuracy"])


def _labels(family: Family) -> Tensor | None:
    """Those of the first run; of the others only runs with as many predictions are drawn."""
    return next((labels for run in family.drawn if (labels := run.labels) is not None), None)


def _predictions(family: Family) -> list[Tensor]:
    labels = _labels(family)
    every = [run.trace.get("probabilities") for run in family.drawn]
    known = [x for x in every if x is not None and x.ndim == 2]
    return [x for x in known if labels is not None and len(x) == len(labels)]


def _traced(runs: Sequence[LoadedRun], one: str, two: str) -> tuple[Tensor, Tensor] | None:
    """Two tensors of the traces; the second has the chains of all runs with the same first."""
    fits = [run.trace for run in runs if _fits(run.trace, one, two)]
    same = [trace[two].double() for trace in fits if torch.equal(trace[one], fits[0][one])]
    return (fits[0][one], torch.cat(same, 0 if one == "edges" else 1)) if fits else None


def _fits(trace: Mapping[str, Tensor], one: str, two: str) -> bool:
    known = one in trace and two in trace and trace[one].ndim == 1 and trace[two].ndim == 2
    if not known or not len(trace[two]):
        return False
    wanted = trace[two].shape[1] + 1 if one == "edges" else len(trace[two])
    return len(trace[one]) == wanted
