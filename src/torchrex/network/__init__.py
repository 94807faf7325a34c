"""Runs on modules: replicas, their step, its capture as a CUDA graph, and training them."""

from torchrex.network.baselines import MethodResult, deep_ensemble, swag
from torchrex.network.capture import compiled_or_plain, no_waiting
from torchrex.network.group import SideBySide
from torchrex.network.replicas import ModuleEnsemble, evaluating
from torchrex.network.run import ModuleExchange
from torchrex.network.training import TrainingRun, train, train_together
from torchrex.runs.config import Outcome

__all__ = [
    "MethodResult",
    "ModuleEnsemble",
    "ModuleExchange",
    "Outcome",
    "SideBySide",
    "TrainingRun",
    "compiled_or_plain",
    "deep_ensemble",
    "evaluating",
    "no_waiting",
    "swag",
    "train",
    "train_together",
]
