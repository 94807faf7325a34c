"""Targets: log densities, Gaussian mixtures, tall-data posteriors, and noise on top of them."""

from torchrex.targets.base import Energy, Noise, Target
from torchrex.targets.density import LogDensity
from torchrex.targets.logistic import laplace, logistic_regression, simulate_logistic
from torchrex.targets.mixture import GaussianMixture
from torchrex.targets.noisy import Gaussian, NoiseModel, Noisy, StudentT
from torchrex.targets.tall import TallPosterior

__all__ = [
    "Energy",
    "Gaussian",
    "GaussianMixture",
    "LogDensity",
    "Noise",
    "NoiseModel",
    "Noisy",
    "StudentT",
    "TallPosterior",
    "Target",
    "laplace",
    "logistic_regression",
    "simulate_logistic",
]
