"""Runs on densities: all replicas of many runs in one tensor, the compiled loop, `sample`."""

from torchrex.density.run import DensityExchange
from torchrex.density.sampling import collect, sample
from torchrex.density.tensor_ensemble import TensorEnsemble

__all__ = ["DensityExchange", "TensorEnsemble", "collect", "sample"]
