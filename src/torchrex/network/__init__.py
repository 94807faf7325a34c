"""Runs on modules: replicas, their step, its capture as a CUDA graph, and training them."""

from torchrex.network.ensemble import ModuleEnsemble
from torchrex.network.run import ModuleExchange
from torchrex.network.side_by_side import SideBySide
from torchrex.network.training import Outcome, TrainingRun, train, train_together

__all__ = [
    "ModuleEnsemble",
    "ModuleExchange",
    "Outcome",
    "SideBySide",
    "TrainingRun",
    "train",
    "train_together",
]
