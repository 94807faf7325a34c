"""Adaptive replica exchange stochastic gradient MCMC for PyTorch.

`sample` for a log density, `ReplicaExchange` with a `ModuleEnsemble` for a network; the algorithm itself is in
`torchrex.exchange.algorithm`.
"""

from torchrex import schedules
from torchrex.checkpoint import Checkpoints
from torchrex.errors import TorchrexError
from torchrex.exchange import (
    AllInTurn,
    ConstantFactor,
    EvenOdd,
    KnownVariance,
    Ladder,
    ModuleEnsemble,
    NoSwaps,
    PairedVariance,
    PerExample,
    ProportionalToGap,
    RandomPair,
    RepeatedDraws,
    ReplicaExchange,
    RunningMean,
    SideBySide,
    Smoothing,
    TargetAcceptance,
    TensorEnsemble,
    expected_acceptance,
    log_swap_ratio,
)
from torchrex.posterior import Draws, DrawStore, PosteriorAverage, classification_metrics, collect, sample
from torchrex.recording import JsonLines, LiveDisplay, Observer, TensorBoard, Trace
from torchrex.samplers import SGHMC, SGLD
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
from torchrex.training import Member, Outcome, train, train_together

__version__ = "0.1.0"

__all__ = [
    "SGHMC",
    "SGLD",
    "AllInTurn",
    "Checkpoints",
    "ConstantFactor",
    "DeviceLoader",
    "DrawStore",
    "Draws",
    "EvenOdd",
    "Gaussian",
    "GaussianMixture",
    "GaussianPrior",
    "JsonLines",
    "KnownVariance",
    "Ladder",
    "LiveDisplay",
    "LogDensity",
    "Member",
    "ModuleEnsemble",
    "NoSwaps",
    "Noisy",
    "Observer",
    "Outcome",
    "PairedVariance",
    "PerExample",
    "PosteriorAverage",
    "PosteriorEnergy",
    "ProportionalToGap",
    "RandomPair",
    "RepeatedDraws",
    "ReplicaExchange",
    "RunningMean",
    "SideBySide",
    "Smoothing",
    "StudentT",
    "TallPosterior",
    "Target",
    "TargetAcceptance",
    "TensorBoard",
    "TensorEnsemble",
    "TorchrexError",
    "Trace",
    "classification_metrics",
    "collect",
    "expected_acceptance",
    "from_sgd",
    "log_swap_ratio",
    "logistic_regression",
    "sample",
    "schedules",
    "train",
    "train_together",
]
