"""Recorders and observers: what a person may want to know of a run, kept, shown or written."""

from torchrex.recording.live import Callback, LiveDisplay, progress_bar
from torchrex.recording.logs import JsonLines, TensorBoard, open_logs, read_log, remove_logs
from torchrex.recording.observer import (
    Observer,
    Trace,
    Watched,
    Windows,
    count_swaps,
    counted_so_far,
    on_host,
)

__all__ = [
    "Callback",
    "JsonLines",
    "LiveDisplay",
    "Observer",
    "TensorBoard",
    "Trace",
    "Watched",
    "Windows",
    "count_swaps",
    "counted_so_far",
    "on_host",
    "open_logs",
    "progress_bar",
    "read_log",
    "remove_logs",
]
