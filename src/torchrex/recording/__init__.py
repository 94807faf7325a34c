"""Recorders and observers: what a person may want to know of a run, kept, shown or written while it
goes.
"""

from torchrex.recording.jsonlines import JsonLines, read_log
from torchrex.recording.live import LiveDisplay
from torchrex.recording.logs import open_logs, remove_logs
from torchrex.recording.observer import Observer, Watched
from torchrex.recording.tensorboard import TensorBoard
from torchrex.recording.trace import Trace, count_swaps

__all__ = [
    "JsonLines",
    "LiveDisplay",
    "Observer",
    "TensorBoard",
    "Trace",
    "Watched",
    "count_swaps",
    "open_logs",
    "read_log",
    "remove_logs",
]
