"""Algorithm 1 and everything it is made of. Read `algorithm.py` first."""

from torchrex.exchange.algorithm import ExchangeState, Rules, StepInfo
from torchrex.exchange.correction import (
    ConstantFactor,
    FactorRule,
    ProportionalToGap,
    TargetAcceptance,
)
from torchrex.exchange.criterion import acceptance_probability, expected_acceptance, log_swap_ratio
from torchrex.exchange.inputs import ExchangeInputs, draw_exchange_inputs, n_usable
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
    SwapBatchVariance,
)
from torchrex.exchange.pairing import AllInTurn, EvenOdd, NoSwaps, Pairing, RandomPair
from torchrex.exchange.run import ReplicaExchange, RuleOptions, resolve_device
from torchrex.exchange.swap_report import (
    ExchangeReport,
    LogEvidence,
    PairReport,
    SwapCounts,
    count_trips,
    exchange_line,
    report_pairs,
    rung_of,
    warn_of_dead_pairs,
)

__all__ = [
    "AllInTurn",
    "BatchVariance",
    "ConstantFactor",
    "EvenOdd",
    "ExchangeInputs",
    "ExchangeReport",
    "ExchangeState",
    "FactorRule",
    "KnownVariance",
    "Ladder",
    "LogEvidence",
    "NoSwaps",
    "NoiseEstimator",
    "PairReport",
    "PairedVariance",
    "Pairing",
    "PerExample",
    "ProportionalToGap",
    "RandomPair",
    "RepeatedDraws",
    "ReplicaExchange",
    "RuleOptions",
    "Rules",
    "RunningMean",
    "Smoothing",
    "StepInfo",
    "SwapBatchVariance",
    "SwapCounts",
    "TargetAcceptance",
    "acceptance_probability",
    "count_trips",
    "draw_exchange_inputs",
    "exchange_line",
    "expected_acceptance",
    "log_swap_ratio",
    "n_usable",
    "report_pairs",
    "resolve_device",
    "rung_of",
    "warn_of_dead_pairs",
]
