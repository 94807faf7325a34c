"""Targets: log densities, mixtures, tall-data posteriors, added noise, posteriors of modules."""

from torchrex.targets.density import Energy, LogDensity, Noise, Target
from torchrex.targets.loader import DeviceLoader, Twice, require_no_dataset
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
from torchrex.targets.tall import (
    TallPosterior,
    draw_points,
    laplace,
    logistic_regression,
    simulate_logistic,
)

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
    "draw_points",
    "from_sgd",
    "frozen",
    "laplace",
    "logistic_regression",
    "require_no_dataset",
    "simulate_logistic",
    "without_tracking",
]
