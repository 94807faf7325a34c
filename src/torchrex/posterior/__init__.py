"""From runs to posterior draws, averages and predictions."""

from torchrex.posterior.arviz_export import to_arviz, trace_to_datatree
from torchrex.posterior.average import PosteriorAverage
from torchrex.posterior.draws import Draws
from torchrex.posterior.metrics import Prediction, classification_metrics, predictive_entropy
from torchrex.posterior.store import DrawStore

__all__ = [
    "DrawStore",
    "Draws",
    "PosteriorAverage",
    "Prediction",
    "classification_metrics",
    "predictive_entropy",
    "to_arviz",
    "trace_to_datatree",
]
