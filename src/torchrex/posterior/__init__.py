"""From runs to posterior draws, averages and predictions."""

from torchrex.posterior.arviz_export import (
    coordinate_labels,
    import_arviz,
    to_arviz,
    trace_to_datatree,
)
from torchrex.posterior.average import PosteriorAverage
from torchrex.posterior.draws import Draws
from torchrex.posterior.draws_file import SHAPES, checksums, with_another_sha256
from torchrex.posterior.evidence import log_evidence
from torchrex.posterior.prediction import Prediction, classification_metrics, predictive_entropy
from torchrex.posterior.predictive import Predictive, crps
from torchrex.posterior.saved import SavedRun, load
from torchrex.posterior.standard_error import mean_error
from torchrex.posterior.store import DrawStore

__all__ = [
    "SHAPES",
    "DrawStore",
    "Draws",
    "PosteriorAverage",
    "Prediction",
    "Predictive",
    "SavedRun",
    "checksums",
    "classification_metrics",
    "coordinate_labels",
    "crps",
    "import_arviz",
    "load",
    "log_evidence",
    "mean_error",
    "predictive_entropy",
    "to_arviz",
    "trace_to_datatree",
    "with_another_sha256",
]
