"""Samplers: one move, given gradients, learning rate and temperature."""

from torchrex.samplers.adam_start import AdamStart
from torchrex.samplers.base import Momentum, NoState, Sampler, State, named_tensors
from torchrex.samplers.sghmc import SGHMC, sghmc
from torchrex.samplers.sgld import SGLD, sgld

__all__ = [
    "SGHMC",
    "SGLD",
    "AdamStart",
    "Momentum",
    "NoState",
    "Sampler",
    "State",
    "named_tensors",
    "sghmc",
    "sgld",
]
