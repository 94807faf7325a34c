"""Runs on modules: replicas, their step, its capture as a CUDA graph, and training them."""

from torchrex.network.capture import compiled_or_plain, no_waiting
from torchrex.network.group import SideBySide
from torchrex.network.replicas import ModuleEnsemble, evaluating
from torchrex.network.run import ModuleExchange
from torchrex.network.training import TrainingRun, train, train_together
from torchrex.runs.config import Outcome

__all__ = [
    "ModuleEnsemble",
    "ModuleExchange",
    "Outcome",
    "SideBySide",
    "TrainingRun",
    "compiled_or_plain",
    "evaluating",
    "no_waiting",
    "train",
    "train_together",
]
