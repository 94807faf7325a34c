"""Runs on densities: all replicas of many runs in one tensor, the compiled loop."""

from torchrex.density.drawing import Progress
from torchrex.density.loop import few_threads
from torchrex.density.run import DensityExchange
from torchrex.density.shards import shard_folders
from torchrex.density.tensor_ensemble import TensorEnsemble

__all__ = ["DensityExchange", "Progress", "TensorEnsemble", "few_threads", "shard_folders"]
