"""Figure 2 of the paper from run folders, ResNet-20: noise variance, correction and energies over
epochs, accuracy against F0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from torchrex.errors import RunFolderError
from torchrex.experiments.image_recipes import AUTHORS_F0, DATA, PAIRED, cell, figure2_recipes
from torchrex.experiments.images import ImageConfig
from torchrex.report.image_numbers import Settings, finished_runs, summary
from torchrex.report.image_tables import epochs_words
from torchrex.report.image_words import markdown_lines, plus_minus
from torchrex.report.images import FAMILIES, HEADLINE, INDEPENDENT, SGHMC, ImageRun, Line, family_of

NET = "resnet20"
COURSE = ("noise_variance", "correction", "energy", "swap_epochs")
METRIC = HEADLINE["icml2020"]

VARIANCES = {
    "icml2020": "unpaired, 10 energies an epoch (icml2020)",
    "clean": "paired, every step (clean)",
}


def figure_recipes() -> dict[str, ImageConfig]:
    """What is run for the figure: every F0, and reSGHMC of the clean family beside them for (a, b)."""
    clean = (cell("clean", data, NET, "resghmc") for data in DATA)
    return {**figure2_recipes(), **{config.recipe: config for config in clean}}


def numbers(out: Path, chosen: Mapping[str, ImageConfig]) -> dict[str, Any]:
    """`rows`, one for every length of runs on a data set: accuracy against F0, without swaps,
    curves of the lowest seed.
    """
    levels = {
        line: {data: cell("icml2020", data, NET, line.method) for data in DATA}  # type: ignore[arg-type]
        for line in (SGHMC, INDEPENDENT)
    }
    beside = {config.recipe: config for each in levels.values() for config in each.values()}
    runs, unfinished = finished_runs(out, {**chosen, **beside})
    rows = []
    for data in DATA:
        own = [run for run in runs if run.recipe.data == data]
        kinds = {run.settings for run in own if run.recipe.recipe in chosen}
        rows += [
            _row(data, kind, [run for run in own if run.settings == kind], chosen)
            for kind in sorted(kinds, key=_longest_first)
        ]
    for k, row in enumerate(row for row in rows if row["settings"]):
        row["mark"] = "§" * (k + 1)
    return {"rows": rows, "unfinished": [one for one in unfinished if one.split()[0] in chosen]}


def _longest_first(settings: Settings) -> tuple[int, str]:
    return -settings.length, str(settings)


def _row(
    data: str, settings: Settings, runs: Sequence[ImageRun], chosen: Mapping[str, ImageConfig]
) -> dict[str, Any]:
    exchanging = [run for run in runs if run.recipe.recipe in chosen]
    factors = sorted({f0_of(run) for run in exchanging if family_of(run) == "icml2020"})
    alone = {
        line: _level(line, [run for run in runs if family_of(run) == "icml2020"])
        for line in (SGHMC, INDEPENDENT)
    }
    course = {
        family: _course([run for run in exchanging if family_of(run) == family])
        for family in FAMILIES
    }
    return {
        "data": data,
        "epochs": settings.length,
        "settings": dict(settings.others),
        "mark": "",
        "factors": [_factor(f0, [run for run in exchanging if f0_of(run) == f0]) for f0 in factors],
        "levels": {line.title: level for line, level in alone.items() if level},
        "course": {family: curves for family, curves in course.items() if curves},
    }


def title(row: Mapping[str, Any]) -> str:
    return f"{row['data']}{row['mark']}, {row['epochs']} epoch{'' if row['epochs'] == 1 else 's'}"


def f0_of(run: ImageRun) -> float:
    """F0 as the authors count it: their threshold has the sum of two variances, and not the paired
    one.
    """
    return (
        2
        * float(run.config.get("correction_factor", run.recipe.correction_factor))
        / (PAIRED if family_of(run) == "clean" else 1.0)
    )


def _factor(f0: float, runs: Sequence[ImageRun]) -> dict[str, Any]:
    runs = [run for run in runs if family_of(run) == "icml2020"]
    return {
        "f0": f0,
        "recipe": runs[0].recipe.recipe,
        "n": len(runs),
        "accuracy": summary({run.seed: run.number(METRIC) for run in runs}),
        "both_rungs": summary({run.seed: run.number(f"pooled_{METRIC}") for run in runs}),
        "swaps": [run.swaps for run in runs],
        "devices": sorted({run.result["device"] for run in runs}),
    }


def _level(line: Line, runs: Sequence[ImageRun]) -> dict[str, Any] | None:
    """Accuracy without swaps; SGHMC is rung 0 of the pair without swaps where it was not run by
    itself.
    """
    by_seed = {run.seed: run for run in runs if run.recipe.method == "independent"}
    by_seed |= {run.seed: run for run in runs if run.recipe.method == line.method}
    return (
        summary({seed: run.number(line.prefix + METRIC) for seed, run in by_seed.items()})
        if by_seed
        else None
    )


def _course(runs: Sequence[ImageRun]) -> dict[str, Any] | None:
    """The curves of the lowest seed at the authors' F0."""
    runs = sorted(
        (run for run in runs if math.isclose(f0_of(run), AUTHORS_F0)), key=lambda run: run.seed
    )
    if not runs:
        return None
    curves = runs[0].result["curves"]
    for name in ("epoch", *COURSE):
        if not isinstance(curves.get(name), list) or (name != "swap_epochs" and not curves[name]):
            raise RunFolderError(
                f"{runs[0].path / 'result.json'} has no curve {name!r}; run it again with --overwrite"
            )
    course = {name: curves[name] for name in ("epoch", *COURSE)}
    return {
        "recipe": runs[0].recipe.recipe,
        "seed": runs[0].seed,
        "n_swaps": runs[0].swaps,
        **course,
        "median_noise_variance": statistics.median(
            _positive(curves["noise_variance"][0]) or [math.nan]
        ),
    }


def _positive(values: Sequence[float | None]) -> list[float]:
    """Before the first estimate the variance is 0."""
    return [value for value in values if value]


# Words


def _rows(figure: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for of in figure["rows"]:
        data = of["data"] + of["mark"]
        for one in of["factors"]:
            swaps = ", ".join(map(str, one["swaps"]))
            accuracies = [plus_minus(one["accuracy"]), plus_minus(one["both_rungs"])]
            rows.append(
                [
                    data,
                    f"{one['f0']:.0e}".replace("e+0", "e"),
                    *accuracies,
                    str(one["n"]),
                    swaps,
                    epochs_words(of),
                ]
            )
        for name, level in of["levels"].items():
            shown = (
                ["", plus_minus(level)] if name == INDEPENDENT.title else [plus_minus(level), ""]
            )
            rows.append(
                [
                    data,
                    name.partition(",")[0],
                    *shown,
                    str(len(level["values"])),
                    "-",
                    epochs_words(of),
                ]
            )
    return rows


HEADS = ("data", "F0", "rung 0 %", "both rungs %", "n", "swaps", "epochs")


def as_table(figure: Mapping[str, Any]) -> Table:
    table = Table(*HEADS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in _rows(figure):
        table.add_row(*row)
    return table


def notes(figure: Mapping[str, Any]) -> list[str]:
    said = [
        "ResNet-20; rules of icml2020: sum of logits, best epoch on the test images; ± 2 standard deviations over n seeds."
    ]
    for of in figure["rows"]:
        medians = {
            family: course["median_noise_variance"] for family, course in of["course"].items()
        }
        shown = ", ".join(
            f"{VARIANCES[family].partition(',')[0].split()[0]} {value:.3g}"
            for family, value in medians.items()
        )
        ratio = (
            f": {medians['icml2020'] / medians['clean']:.1f} times smaller"
            if len(medians) == 2 and medians["clean"]
            else ""
        )
        said += (
            [f"{title(of)}: median noise variance over epochs {shown}{ratio}"] if medians else []
        )
    said += other_settings(figure)
    said += [f"not finished: {', '.join(figure['unfinished'])}"] if figure["unfinished"] else []
    missing = not_run(figure)
    return said + ([f"not run: {', '.join(missing)}"] if missing else [])


def other_settings(figure: Mapping[str, Any]) -> list[str]:
    told = (
        (of, ", ".join(f"{name}={value}" for name, value in of["settings"].items()))
        for of in figure["rows"]
    )
    return [f"{title(of)}: not the recipes' settings ({others})" for of, others in told if others]


def not_run(figure: Mapping[str, Any]) -> list[str]:
    return [data for data in DATA if data not in {row["data"] for row in figure["rows"]}]


def as_markdown(figure: Mapping[str, Any]) -> str:
    lines = [
        "# Figure 2",
        "",
        *markdown_lines(HEADS, _rows(figure)),
        "",
        *(f"- {note}" for note in notes(figure)),
    ]
    return "\n".join(lines) + "\n"
