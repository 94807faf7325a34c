"""Adaptive replica exchange stochastic gradient MCMC for PyTorch.

`sample` for a log density, `ModuleExchange` with a `ModuleEnsemble` for a network; the algorithm
itself is in `torchrex.exchange.algorithm`.

Names are loaded when they are first used (PEP 562): torch takes seconds to load, and `torchrex
--help` has no use for it.
"""

from __future__ import annotations

import importlib
import os

TYPE_CHECKING = False  # as type checkers know it; loading `typing` takes time
if TYPE_CHECKING:  # for editors and type checkers; a test holds it to `_HOMES` and `__all__`
    from typing import Any

    from torchrex import schedules
    from torchrex.checkpoint import Checkpoints
    from torchrex.density import DensityExchange, TensorEnsemble
    from torchrex.distributed import ReplicaMesh, replica_mesh
    from torchrex.errors import TorchrexError
    from torchrex.exchange import (
        AllInTurn,
        BatchVariance,
        ConstantFactor,
        EvenOdd,
        ExchangeReport,
        KnownVariance,
        Ladder,
        NoSwaps,
        PairedVariance,
        PerExample,
        ProportionalToGap,
        RandomPair,
        RepeatedDraws,
        ReplicaExchange,
        RunningMean,
        Smoothing,
        SwapBatchVariance,
        TargetAcceptance,
        expected_acceptance,
        log_swap_ratio,
    )
    from torchrex.network import (
        MethodResult,
        ModuleEnsemble,
        ModuleExchange,
        Outcome,
        SideBySide,
        TrainingRun,
        deep_ensemble,
        swag,
        train,
        train_together,
    )
    from torchrex.posterior import (
        Draws,
        DrawStore,
        PosteriorAverage,
        Predictive,
        classification_metrics,
        load,
    )
    from torchrex.recording import (
        JsonLines,
        LiveDisplay,
        MLflow,
        Observer,
        TensorBoard,
        Trace,
        WandB,
    )
    from torchrex.report.methods import MethodTable, compare
    from torchrex.samplers import SGHMC, SGLD, AdamStart
    from torchrex.sampling import collect, sample
    from torchrex.targets import (
        DeviceLoader,
        Gaussian,
        GaussianMixture,
        GaussianPrior,
        LogDensity,
        Noisy,
        PosteriorEnergy,
        StudentT,
        TallPosterior,
        Target,
        from_sgd,
        logistic_regression,
    )
    from torchrex.tuning import Tuned, tune

__version__ = "0.1.0"

# Where the names below live.
_HOMES = {
    "checkpoint": "Checkpoints",
    "distributed": "ReplicaMesh replica_mesh",
    "errors": "TorchrexError",
    "exchange": (
        "AllInTurn BatchVariance ConstantFactor EvenOdd ExchangeReport KnownVariance Ladder "
        "NoSwaps PairedVariance PerExample ProportionalToGap RandomPair RepeatedDraws "
        "ReplicaExchange RunningMean Smoothing SwapBatchVariance TargetAcceptance "
        "expected_acceptance log_swap_ratio"
    ),
    "posterior": "Draws DrawStore PosteriorAverage Predictive classification_metrics load",
    "recording": "JsonLines LiveDisplay MLflow Observer TensorBoard Trace WandB",
    "samplers": "SGHMC SGLD AdamStart",
    "targets": (
        "DeviceLoader Gaussian GaussianMixture GaussianPrior LogDensity Noisy PosteriorEnergy "
        "StudentT TallPosterior Target from_sgd logistic_regression"
    ),
    "density": "DensityExchange TensorEnsemble",
    "sampling": "collect sample",
    "tuning": "Tuned tune",
    "network": (
        "MethodResult ModuleEnsemble ModuleExchange Outcome SideBySide TrainingRun "
        "deep_ensemble swag train train_together"
    ),
    "report.methods": "MethodTable compare",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Modules that are there after `import torchrex`, whether they are loaded yet or not.
_MODULES = (
    *(home for home in _HOMES if "." not in home),
    "diagnostics",
    "durable",
    "experiments",
    "lightning",
    "notebook",
    "processes",
    "report",
    "rng",
    "schedules",
    "screen",
    "vision",
)

__all__ = [
    "SGHMC",
    "SGLD",
    "AdamStart",
    "AllInTurn",
    "BatchVariance",
    "Checkpoints",
    "ConstantFactor",
    "DensityExchange",
    "DeviceLoader",
    "DrawStore",
    "Draws",
    "EvenOdd",
    "ExchangeReport",
    "Gaussian",
    "GaussianMixture",
    "GaussianPrior",
    "JsonLines",
    "KnownVariance",
    "Ladder",
    "LiveDisplay",
    "LogDensity",
    "MLflow",
    "MethodResult",
    "MethodTable",
    "ModuleEnsemble",
    "ModuleExchange",
    "NoSwaps",
    "Noisy",
    "Observer",
    "Outcome",
    "PairedVariance",
    "PerExample",
    "PosteriorAverage",
    "PosteriorEnergy",
    "Predictive",
    "ProportionalToGap",
    "RandomPair",
    "RepeatedDraws",
    "ReplicaExchange",
    "ReplicaMesh",
    "RunningMean",
    "SideBySide",
    "Smoothing",
    "StudentT",
    "SwapBatchVariance",
    "TallPosterior",
    "Target",
    "TargetAcceptance",
    "TensorBoard",
    "TensorEnsemble",
    "TorchrexError",
    "Trace",
    "TrainingRun",
    "Tuned",
    "WandB",
    "classification_metrics",
    "collect",
    "compare",
    "deep_ensemble",
    "expected_acceptance",
    "from_sgd",
    "load",
    "log_swap_ratio",
    "logistic_regression",
    "replica_mesh",
    "sample",
    "schedules",
    "swag",
    "train",
    "train_together",
    "tune",
]

if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of torchrun, which may be killed at any time
    importlib.import_module("torchrex.processes").leave_with_parent()


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"torchrex.{_HOME_OF[name]}"), name)
        globals()[name] = value  # found at once from now on
        return value
    if name in _MODULES:
        return importlib.import_module(f"torchrex.{name}")
    raise AttributeError(f"module 'torchrex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
