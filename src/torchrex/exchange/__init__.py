"""Algorithm 1 and everything it is made of. Read `algorithm.py` first."""

from torchrex.exchange.algorithm import ExchangeState, Rules, StepInfo
from torchrex.exchange.correction import ConstantFactor, FactorRule, ProportionalToGap, TargetAcceptance
from torchrex.exchange.criterion import acceptance_probability, expected_acceptance, log_swap_ratio
from torchrex.exchange.density_run import DensityExchange
from torchrex.exchange.ladder import Ladder
from torchrex.exchange.module_ensemble import ModuleEnsemble
from torchrex.exchange.module_run import ModuleExchange
from torchrex.exchange.noise import (
    BatchVariance,
    KnownVariance,
    NoiseEstimator,
    PairedVariance,
    PerExample,
    RepeatedDraws,
    RunningMean,
    Smoothing,
)
from torchrex.exchange.pairing import AllInTurn, EvenOdd, NoSwaps, Pairing, RandomPair
from torchrex.exchange.run import ReplicaExchange
from torchrex.exchange.side_by_side import SideBySide
from torchrex.exchange.tensor_ensemble import TensorEnsemble

__all__ = [
    "AllInTurn",
    "BatchVariance",
    "ConstantFactor",
    "DensityExchange",
    "EvenOdd",
    "ExchangeState",
    "FactorRule",
    "KnownVariance",
    "Ladder",
    "ModuleEnsemble",
    "ModuleExchange",
    "NoSwaps",
    "NoiseEstimator",
    "PairedVariance",
    "Pairing",
    "PerExample",
    "ProportionalToGap",
    "RandomPair",
    "RepeatedDraws",
    "ReplicaExchange",
    "Rules",
    "RunningMean",
    "SideBySide",
    "Smoothing",
    "StepInfo",
    "TargetAcceptance",
    "TensorEnsemble",
    "acceptance_probability",
    "expected_acceptance",
    "log_swap_ratio",
]
