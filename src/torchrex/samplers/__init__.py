"""Samplers: one move, given gradients, learning rate and temperature."""

from torchrex.samplers.base import Sampler
from torchrex.samplers.sghmc import SGHMC, sghmc
from torchrex.samplers.sgld import SGLD, sgld

__all__ = ["SGHMC", "SGLD", "Sampler", "sghmc", "sgld"]
