"""What is run: the base class of all configs, the options of a command, and `a.b=c` overrides.

A config is a frozen dataclass of plain values; it is saved as JSON next to the result.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchrex.errors import ConfigError
from torchrex.exchange import Ladder, resolve_device
from torchrex.names import require_free, require_setting
from torchrex.recording import Callback, Observer
from torchrex.settings import shown

if TYPE_CHECKING:
    from torchrex.runs.folder import Run, RunResult

C = TypeVar("C")
Precision = Literal["auto", "float32", "bfloat16"]  # of the forward pass; auto is bfloat16 on a GPU


class Outcome(NamedTuple):
    """How a call of `train` ended. Totals include what was done before a resume."""

    status: str  # "finished"; "paused", its budget used up; or "interrupted" by a signal
    signal: int | None = None
    seconds: float = 0.0  # of this call
    steps: int = 0  # of this call
    total_seconds: float = 0.0
    total_steps: int = 0


class Column(NamedTuple):
    """How a metric is shown. `percent`: tables show 100 times the value of `result.json`."""

    metric: str
    title: str
    percent: bool = False
    decimals: int = 2


COLUMNS = {
    column.metric: column
    for column in (
        Column("accuracy", "accuracy", percent=True),
        Column("best_accuracy", "accuracy, best draw", percent=True),
        Column("logits_accuracy", "accuracy of logits", percent=True),
        Column("logits_best_accuracy", "accuracy of logits, best epoch", percent=True),
        Column("single_accuracy", "accuracy of one network", percent=True),
        Column("paper_accuracy", "accuracy as the authors count", percent=True),
        Column("training_mode_accuracy", "accuracy, BatchNorm in training mode", percent=True),
        Column("called_fake", "called generated", percent=True),
        Column("variety", "variety of a generator (real images: 1)"),
        Column("pooled_accuracy", "accuracy, all rungs", percent=True),
        Column("nll", "NLL", decimals=4),
        Column("pooled_nll", "NLL, all rungs", decimals=4),
        Column("single_nll", "NLL of one network", decimals=4),
        Column("ece", "ECE", percent=True),
        Column("brier", "Brier score", decimals=4),
        Column("mutual_information", "mutual information", decimals=4),
        Column("left_weight", "left weight", decimals=4),
        Column("left_weight_true", "left weight, exact", decimals=4),
        Column("w1", "W1 to the exact law", decimals=3),
        Column("w2", "W2 to the exact law", decimals=3),
        Column("largest_mean_error_in_sd", "largest error of a mean (sd)", decimals=3),
        Column("smallest_sd_ratio", "smallest ratio of sds", decimals=3),
        Column("largest_sd_ratio", "largest ratio of sds", decimals=3),
        Column("rmse", "RMSE", decimals=4),
        Column("coverage_90", "coverage of 90 % intervals", percent=True),
        Column("crps", "CRPS", decimals=4),
        Column("acceptance_rate", "acceptance rate", percent=True),
        Column("noise_variance", "noise variance"),
        Column("ess", "effective draws", decimals=0),
        Column("log_evidence", "log evidence", decimals=2),
    )
}

# What the settings of a network must be.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "at least 1": (
        lambda x: x >= 1,
        "epochs steps checkpoint_every n_generators width hidden average_every",
    ),
    "positive": (
        lambda x: x > 0,
        "lr_of_mean hot_lr lr_time sampling_lr temperature correction_factor",
    ),
    "in (0, 1]": (lambda x: 0 < x <= 1, "factor_per_swap smoothing lr_floor"),
    "at least 0": (lambda x: x >= 0, "weight_decay prior_precision"),
    "at least 0 and finite": (
        lambda x: 0 <= x < math.inf,
        "swaps_after rest_after_swap consistency judging",
    ),
    "above 1": (lambda x: x > 1, "hot_temperature"),
    "at least 0 and less than 1": (lambda x: 0 <= x < 1, "momentum certain"),
}


@dataclass(frozen=True)
class ExperimentConfig:
    """What every config has: runners and reports use only this, never a single experiment.

    Subclasses are frozen dataclasses. A field with a default may replace a property of this class.
    """

    recipe: str = field(metadata={"settable": False})

    def check(self) -> None:
        """Raise ConfigError if settings do not go together."""

    def require(self, name: str, fine: bool, wanted: str) -> None:
        if not fine:
            raise ConfigError(f"setting {name!r} must be {wanted}, got {getattr(self, name)}")

    def require_ranges(self) -> None:
        """Check every setting that has a range of its own, whatever the others are."""
        for wanted, (is_fine, names) in RANGES.items():
            for name in filter(partial(hasattr, self), names.split()):
                self.require(name, is_fine(getattr(self, name)), wanted)

    # What a run needs

    @property
    def n_steps(self) -> int:
        raise NotImplementedError

    @property
    def temperatures(self) -> tuple[float, ...]:
        """One for each rung; empty for plain descent."""
        raise NotImplementedError

    @property
    def n_rungs(self) -> int:
        return max(1, len(self.temperatures))

    @property
    def swaps(self) -> bool:
        """False: the rungs are independent and their predictions are pooled."""
        return True

    @property
    def swap_start(self) -> int:
        """The first step with a swap test."""
        return 0

    @property
    def warm_start(self) -> int:
        """Steps of plain descent at the beginning, without noise and swaps."""
        return 0

    @property
    def correction_factor(self) -> float:
        """F at the start of the run."""
        return 1.0

    @property
    def factor_per_swap(self) -> float:
        """F is multiplied by it at every swap."""
        return 1.0

    @property
    def factor_follows_gap(self) -> bool:
        """F grows in proportion to the inverse gap while the ladder cools."""
        return False

    @property
    def swap_noise(self) -> float:
        """The noise variance of the energies in a swap test, as a part of sigma2."""
        return 1.0

    @property
    def steps_per_epoch(self) -> int:
        return 1

    @property
    def n_runs(self) -> int:
        """Independent chains in one run."""
        return 1

    @property
    def n_data(self) -> int | None:
        """The examples that an energy stands for; None without data."""
        return None

    @property
    def batch_size(self) -> int | None:
        """The examples of a step, where they are known."""
        return None

    @property
    def has_sgld(self) -> bool:
        """Is its sampler SGLD on minibatches?"""
        return False

    @property
    def swap_batch(self) -> int | None:
        """The examples on which swaps are tested; None: those of the step."""
        return None

    @property
    def swap_interval(self) -> int:
        """Swaps are tested at every such step."""
        return 1

    @property
    def precision(self) -> Precision:
        return "float32"

    def ladder(self) -> Ladder:
        raise NotImplementedError

    def device(self, name: str) -> torch.device:
        """The device of `--device`; auto is the CPU unless a config is made for a GPU."""
        return resolve_device(self.auto_device if name == "auto" else name)

    @property
    def auto_device(self) -> str:
        return "cpu"

    def autocast(self, device: torch.device) -> torch.dtype | None:
        """The type of the forward pass, None for float32."""
        low = self.precision == "bfloat16" or (self.precision == "auto" and device.type == "cuda")
        return torch.bfloat16 if low else None

    def batch_key(self, seed: int) -> str | None:
        """Runs with equal keys see the same batches and may train together; None: each alone."""
        return None

    @property
    def most_replicas(self) -> int:
        """Of all runs that train together."""
        return self.n_rungs

    keeps_checkpoints: ClassVar[bool] = True  # of a finished run

    def execute(
        self, runs: Sequence[Run], options: RunOptions
    ) -> tuple[Outcome, Sequence[RunResult]]:
        """Carry out runs of one batch key together; what came of each, in the same order."""
        raise NotImplementedError

    # What reports ask

    @property
    def group(self) -> str:
        """What it is shown with."""
        return self.recipe.split("/", 1)[0]

    @property
    def method_name(self) -> str:
        """How it samples, whatever the problem: one colour in reports."""
        return str(getattr(self, "method", self.recipe.split("/", 1)[-1]))

    @property
    def headline(self) -> str:
        """The metric that is shown first."""
        return self.columns[0].metric

    @property
    def columns(self) -> tuple[Column, ...]:
        """The metrics that are worth a column; a run may lack some of them."""
        return columns("accuracy", "single_accuracy", "pooled_accuracy", "nll", "ece")

    @property
    def paper_numbers(self) -> Mapping[str, tuple[float, float | None]]:
        """Metric -> the paper's value, as in `result.json`, and its sd over seeds."""
        return {}

    @property
    def paper_note(self) -> str:
        """What the paper's numbers are of."""
        return ""

    @property
    def test_size(self) -> int | None:
        """How many held-out examples the metrics are measured on, where that is known."""
        return None

    @property
    def is_density(self) -> bool:
        """Does it sample a density, of which the draws are kept? Else a network."""
        return self.test_size is None

    def advice(self, result: Mapping[str, Any]) -> list[str]:
        """Warnings about a result that only this experiment can give."""
        return []

    def exact_density(self) -> Callable[[Tensor], Tensor] | None:
        """The density of rung 0 at points x (n,), where it is known."""
        return None

    def energy_gradient(self) -> Callable[[Tensor], Tensor] | None:
        """The exact gradient of the energy at positions (n, dim), where it is known."""
        return None

    @property
    def gradient_cost(self) -> int:
        """Data examples that one exact gradient reads."""
        return 1

    def energy_noise(self) -> Callable[[int], Tensor] | None:
        """So many independent errors of an energy estimate, where they can be drawn again."""
        return None

    @property
    def picture_note(self) -> str:
        """What `samples.png` shows."""
        return ""

    def test_labels(self) -> Tensor | None:
        """The labels of the held-out examples, where they are quick to get."""
        return None


def columns(*metrics: str) -> tuple[Column, ...]:
    return tuple(COLUMNS[metric] for metric in metrics)


@dataclass(frozen=True)
class RunOptions:
    """How runs are carried out; no number of a result depends on it."""

    device: str = "auto"
    resume: bool = False  # continue unfinished runs, leave finished ones as they are
    overwrite: bool = False  # replace what is there
    budget: float | None = None  # seconds until the runs stop with a checkpoint
    processes: int = 1  # for the methods of a problem of the gallery
    progress: Callback | None = None
    observers: tuple[Observer, ...] = ()  # of networks
    log: tuple[str, ...] = ()  # of networks: as in `recording.scalars.LOGS`


def override(config: C, assignments: typing.Sequence[str]) -> C:
    """`config` with `key=value` assignments applied; keys of nested configs are joined by dots."""
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f"an override has the form key=value, got {assignment!r}")
        config = _assign(config, key.strip().split("."), text.strip(), key.strip())
    if isinstance(config, ExperimentConfig):
        config.check()  # when all are applied, whatever their order
    return config


def _assign(config: C, path: list[str], text: str, key: str) -> C:
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    names = [name for name, f in fields.items() if f.metadata.get("settable", True)]
    name, *rest = path
    require_free(name, fields.keys() - names, key)
    require_setting(name, names, key)
    value = getattr(config, name)
    nested = dataclasses.is_dataclass(value)
    if rest and not nested:
        raise ConfigError(f"setting {name!r} has no parts, so {key!r} cannot be set")
    if nested and not rest:
        parts = ", ".join(f"{name}.{f.name}" for f in dataclasses.fields(value))
        raise ConfigError(f"setting {key!r} has parts; set one of {parts}")
    kind = typing.get_type_hints(type(config))[name]
    new = _assign(value, rest, text, key) if rest else parse(text, kind, key)
    return dataclasses.replace(config, **{name: new})  # type: ignore[type-var]


def parse(text: str, kind: Any, key: str) -> Any:
    """Read `text` as a value of the annotated type, or say what was expected."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)

    def expected(what: str) -> ConfigError:
        return ConfigError(f"setting {key!r} must be {what}, got {shown(text)}")

    if origin is types.UnionType:
        if text.lower() in ("none", "null") and type(None) in args:
            return None
        return parse(text, next(arg for arg in args if arg is not type(None)), key)
    if origin is typing.Literal:
        if text not in args:
            raise expected(f"one of {', '.join(map(str, args))}")
        return text
    if origin is tuple:
        parts = (part.strip() for part in text.strip("()[] ").split(","))
        return tuple(parse(part, args[0], key) for part in parts if part)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise expected("true or false")
        return text.lower() == "true"
    if kind not in (int, float):
        return kind(text)
    try:
        whole = kind is int and re.fullmatch(r"[+-]?[\d_]+", text)
        value = (int if whole else float)(text.replace("_", ""))  # 1e5 is an integer too
        if math.isnan(value) or (kind is int and not abs(int(value)) == abs(value) < 2**63):
            raise ValueError
        return kind(value)
    except (ValueError, OverflowError):
        raise expected("a whole number < 2^63" if kind is int else "a number") from None


def descriptions(config: Any) -> dict[str, str]:
    """The comments at the fields of a config; `fixed` for those that --set cannot change."""
    said = {}
    for chunk in re.split(r"^    (?=\w+: )", inspect.getsource(type(config)), flags=re.MULTILINE)[
        1:
    ]:
        comments = re.findall(r"# (.+)$", chunk.split("\n\n")[0], re.MULTILINE)
        if comments:
            said[chunk.partition(":")[0]] = " ".join(comments)
    fixed = [f.name for f in dataclasses.fields(config) if not f.metadata.get("settable", True)]
    return said | dict.fromkeys(fixed, "fixed")


def to_json(value: Any) -> Any:
    """Plain JSON: tuples become lists, infinities "inf" and "-inf", NaN becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def dumps(value: Any) -> str:
    """JSON for people: indented, but a list of numbers on one line."""
    text = json.dumps(to_json(value), indent=2, allow_nan=False) + "\n"
    return re.sub(
        r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text
    )
