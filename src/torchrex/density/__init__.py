"""Runs on densities: all replicas of many runs in one tensor, the compiled loop, `sample`."""

from torchrex.density.drawing import Progress
from torchrex.density.loop import few_threads
from torchrex.density.run import DensityExchange
from torchrex.density.sampling import collect, sample
from torchrex.density.shards import shard_folders
from torchrex.density.tensor_ensemble import TensorEnsemble

__all__ = [
    "DensityExchange",
    "Progress",
    "TensorEnsemble",
    "collect",
    "few_threads",
    "sample",
    "shard_folders",
]
