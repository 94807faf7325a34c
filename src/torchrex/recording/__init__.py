"""Recorders and observers: what a person may want to know of a run, kept, shown or written while it
goes.
"""

from torchrex.recording.jsonlines import JsonLines, read_log
from torchrex.recording.live import LiveDisplay
from torchrex.recording.logs import open_logs, remove_logs
from torchrex.recording.observer import Observer, Watched, Windows, counted_so_far, on_host
from torchrex.recording.progress import Callback, progress_bar
from torchrex.recording.tensorboard import TensorBoard
from torchrex.recording.trace import Trace, count_swaps

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
