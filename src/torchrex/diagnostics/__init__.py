"""Numbers from draws and run folders."""

from torchrex.diagnostics.distance import distance_curve, mean_and_error, wasserstein

__all__ = ["distance_curve", "mean_and_error", "wasserstein"]
