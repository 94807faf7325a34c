"""Targets: log densities, Gaussian mixtures, tall-data posteriors, noise on top of them, and the
posterior of a module.
"""

from torchrex.targets.base import Energy, Noise, Target
from torchrex.targets.density import LogDensity
from torchrex.targets.loader import DeviceLoader, Twice, require_no_dataset
from torchrex.targets.logistic import laplace, logistic_regression, simulate_logistic
from torchrex.targets.mixture import GaussianMixture
from torchrex.targets.noisy import Gaussian, NoiseModel, Noisy, StudentT
from torchrex.targets.posterior import (
    Batch,
    GaussianPrior,
    PosteriorEnergy,
    SummedScale,
    from_sgd,
    frozen,
    without_tracking,
)
from torchrex.targets.tall import TallPosterior

__all__ = [
    "Batch",
    "DeviceLoader",
    "Energy",
    "Gaussian",
    "GaussianMixture",
    "GaussianPrior",
    "LogDensity",
    "Noise",
    "NoiseModel",
    "Noisy",
    "PosteriorEnergy",
    "StudentT",
    "SummedScale",
    "TallPosterior",
    "Target",
    "Twice",
    "from_sgd",
    "frozen",
    "laplace",
    "logistic_regression",
    "require_no_dataset",
    "simulate_logistic",
    "without_tracking",
]
