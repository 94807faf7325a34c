"""Recorders: what a person may want to know of a run, kept while it goes."""

from torchrex.recording.trace import Trace, count_swaps

__all__ = ["Trace", "count_swaps"]
