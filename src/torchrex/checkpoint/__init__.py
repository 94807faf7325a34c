"""State trees on disk: saved whole or not at all, checked before they are used, and never executed."""

from torchrex.checkpoint.folder import Checkpoint, Checkpoints

__all__ = ["Checkpoint", "Checkpoints"]
