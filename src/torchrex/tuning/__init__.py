"""A ladder that tunes itself."""

from torchrex.tuning.rounds import Round, Tuned, tune

__all__ = ["Round", "Tuned", "tune"]
