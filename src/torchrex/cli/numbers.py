"""Which numbers of a run are printed when it is done: the handful that matter, and their mean over
seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from torchrex.cli.consoles import stdout
from torchrex.experiments.drawing import is_begun
from torchrex.experiments.recipes import Config
from torchrex.experiments.run_folder import RunFolder, is_finished
from torchrex.report.series import error_of_mean

# In this order, those that a run has. The others are in result.json.
WORDS = {
    "accuracy": "accuracy of the average",
    "logits_best_accuracy": "best epoch, sum of logits",  # what icml2020 reports, as its authors did
    "single_accuracy": "accuracy of the last network",
    "paper_accuracy": "the same, of images not called fake",  # by which a GAN's authors score it
    "called_fake": "share called fake",
    "variety": "variety of a generator (real images: 1)",
    "pooled_accuracy": "accuracy, all rungs pooled",
    "nll": "NLL of the average",
    "ece": "ECE of the average",
    "left_weight": "left weight",
    "left_weight_true": "left weight, exact",
    "w2": "W2 to the exact law",
    "largest_mean_error_in_sd": "largest error of a mean (sd)",
    "smallest_sd_ratio": "smallest ratio of sds",
    "largest_sd_ratio": "largest ratio of sds",
    "acceptance_rate": "acceptance rate",
}
EXACT = ("left_weight_true",)  # no estimates: all shown to four decimals
ONLY_OF = {"logits_best_accuracy": "icml2020/"}
BEGUN, FINISHED = "begun", "finished"


class Number(NamedTuple):
    """A number that is shown."""

    value: float
    error: float | None = None  # its standard error, where it is known
    of: int | None = None  # out of so many
    exact: bool = False

    def __str__(self) -> str:
        """To the digits that its error leaves it, such as 0.4012 ± 0.0031; swaps as 12 of 400."""
        if self.of is not None:
            return f"{self.value:,} of {self.of:,}" if self.of else "none tested"
        if self.exact:
            return f"{self.value:.4f}"
        if not self.error or not math.isfinite(self.value):
            return f"{self.value:.4g}"
        digits = max(0, 1 - math.floor(math.log10(self.error)))
        return f"{self.value:.{digits}f} ± {self.error:.{digits}f}"


def numbers_of(result: Mapping[str, Any]) -> dict[str, Number]:
    """What is shown of a result, by its words."""
    metrics = result.get("metrics") or {}
    shown: dict[str, Number] = {}
    for name, words in WORDS.items():
        value, error = metrics.get(name), metrics.get(f"{name}_se")
        if isinstance(value, int | float) and str(result.get("recipe", "")).startswith(
            ONLY_OF.get(name, "")
        ):
            shown[words] = Number(
                value, error if isinstance(error, int | float) else None, exact=name in EXACT
            )
    for pair in (
        result.get("swaps") or () if metrics and "steps_done" in result else ()
    ):  # of networks, where they are few
        shown[f"swaps of rungs {pair['pair'][0]} and {pair['pair'][1]}"] = Number(
            pair["accepted"], of=pair["proposed"]
        )
    return shown


def there_before(folders: Iterable[RunFolder]) -> dict[Path, str]:
    """Which runs that are about to be resumed were begun, whose seconds are those of all sittings,
    and which finished.
    """
    states = {folder.path: FINISHED if is_finished(folder) else BEGUN for folder in folders}
    return {
        path: state
        for path, state in states.items()
        if state == FINISHED or is_begun(path / "checkpoints")
    }


def show(folders: Sequence[RunFolder], config: Config, before: Mapping[Path, str]) -> None:
    """The numbers of finished runs, and how far the others came. `before` says what was there
    before: see `there_before`.
    """
    for folder in folders:
        result = folder.result or {}
        status, seconds = result.get("status", "unfinished"), result.get("wall_seconds", 0.0)
        steps = result.get("steps_done")
        where = (
            f" at step {steps:,} of {config.n_steps:,}"
            if status in ("paused", "interrupted") and steps is not None
            else ""
        )
        others = result.get("replicas_side_by_side", 1) - getattr(config, "n_rungs", 1)
        beside = f" beside {others} other replicas" if others > 0 else ""
        took = f"in {seconds:.1f} s{' in all' if before.get(folder.path) == BEGUN else ''}{beside}"
        told = (
            f"finished already ({took})"
            if before.get(folder.path) == FINISHED
            else f"{status}{where} {took}"
        )
        _print(f"{config.recipe}, seed {result.get('seed')}: {told}")
        numbers = numbers_of(result)
        if numbers:
            table = Table(box=None, show_header=False)
            for words, number in numbers.items():
                table.add_row(words, str(number))
            stdout.print(table)
        if "error" in result:
            _print(result["error"])
        pictures = (
            sorted(path.name for path in folder.path.glob("*.png")) if folder.finished else []
        )
        _print(
            f"run folder: {folder.path}" + (f" (look at {', '.join(pictures)})" if pictures else "")
        )


def show_mean(folders: Sequence[RunFolder], config: Config) -> None:
    """Mean and standard error over the seeds that are finished, if there are several."""
    results = [folder.result or {} for folder in folders if folder.finished]
    if results:
        _print("all numbers: result.json in the run folder" + ("s" if len(results) > 1 else ""))
    if len(results) < 2:
        return
    each = [numbers_of(result) for result in results]
    table = Table(box=None, show_header=False)
    from_chains = False
    for words in each[0]:
        there = [numbers[words] for numbers in each if words in numbers]
        values, errors = [number.value for number in there], [number.error for number in there]
        from_chains |= all(error is not None for error in errors)
        tested = None if any(number.of != 0 for number in there) else 0
        mean = Number(
            statistics.fmean(values), error_of_mean(values, errors), of=tested, exact=there[0].exact
        )
        table.add_row(words, str(mean))
    how = ", from the chains of each run" if from_chains else ""
    _print(f"{config.recipe}: mean ± standard error over {len(results)} seeds{how}")
    stdout.print(table)


def _print(words: str) -> None:
    stdout.print(words, highlight=False, markup=False, soft_wrap=True)
