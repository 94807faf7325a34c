"""Algorithm 1 and everything it is made of. Read `algorithm.py` first."""

from torchrex.exchange.algorithm import ExchangeState, Rules, StepInfo
from torchrex.exchange.correction import (
    ConstantFactor,
    FactorRule,
    ProportionalToGap,
    TargetAcceptance,
)
from torchrex.exchange.criterion import acceptance_probability, expected_acceptance, log_swap_ratio
from torchrex.exchange.ladder import Ladder
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

__all__ = [
    "AllInTurn",
    "BatchVariance",
    "ConstantFactor",
    "EvenOdd",
    "ExchangeState",
    "FactorRule",
    "KnownVariance",
    "Ladder",
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
    "Smoothing",
    "StepInfo",
    "TargetAcceptance",
    "acceptance_probability",
    "expected_acceptance",
    "log_swap_ratio",
]
