"""Adaptive replica exchange stochastic gradient MCMC for PyTorch.

`sample` for a log density, `ReplicaExchange` for more control; the algorithm itself is in `torchrex.exchange.algorithm`.
"""

from torchrex import schedules
from torchrex.errors import TorchrexError
from torchrex.exchange import (
    AllInTurn,
    ConstantFactor,
    EvenOdd,
    KnownVariance,
    Ladder,
    PairedVariance,
    PerExample,
    ProportionalToGap,
    RandomPair,
    RepeatedDraws,
    ReplicaExchange,
    RunningMean,
    Smoothing,
    TargetAcceptance,
    TensorEnsemble,
    expected_acceptance,
    log_swap_ratio,
)
from torchrex.posterior import Draws, collect, sample
from torchrex.samplers import SGHMC, SGLD
from torchrex.targets import (
    Gaussian,
    GaussianMixture,
    LogDensity,
    Noisy,
    StudentT,
    TallPosterior,
    Target,
    logistic_regression,
)

__version__ = "0.1.0"

__all__ = [
    "SGHMC",
    "SGLD",
    "AllInTurn",
    "ConstantFactor",
    "Draws",
    "EvenOdd",
    "Gaussian",
    "GaussianMixture",
    "KnownVariance",
    "Ladder",
    "LogDensity",
    "Noisy",
    "PairedVariance",
    "PerExample",
    "ProportionalToGap",
    "RandomPair",
    "RepeatedDraws",
    "ReplicaExchange",
    "RunningMean",
    "Smoothing",
    "StudentT",
    "TallPosterior",
    "Target",
    "TargetAcceptance",
    "TensorEnsemble",
    "TorchrexError",
    "collect",
    "expected_acceptance",
    "log_swap_ratio",
    "logistic_regression",
    "sample",
    "schedules",
]
