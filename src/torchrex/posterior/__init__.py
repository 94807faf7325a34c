"""From runs to posterior draws."""

from torchrex.posterior.draws import Draws
from torchrex.posterior.sampling import collect, sample

__all__ = ["Draws", "collect", "sample"]
