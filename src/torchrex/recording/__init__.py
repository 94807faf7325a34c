"""Recorders and observers: what a person may want to know of a run, kept, shown or written."""

from torchrex.recording.live import Callback, LiveDisplay, progress_bar
from torchrex.recording.logs import JsonLines, read_log
from torchrex.recording.observer import Observer, Trace, Watched, Windows, count_swaps, on_host
from torchrex.recording.scalars import MLflow, TensorBoard, WandB, open_logs, remove_logs

__all__ = [
    "Callback",
    "JsonLines",
    "LiveDisplay",
    "MLflow",
    "Observer",
    "TensorBoard",
    "Trace",
    "WandB",
    "Watched",
    "Windows",
    "count_swaps",
    "on_host",
    "open_logs",
    "progress_bar",
    "read_log",
    "remove_logs",
]
