"""Training runs on modules: steps, averages, traces, checkpoints, for one run or several side by side."""

from torchrex.training.members import Member, Outcome
from torchrex.training.together import train, train_together

__all__ = ["Member", "Outcome", "train", "train_together"]
