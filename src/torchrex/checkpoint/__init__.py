"""State trees on disk: saved completely or not at all, checked before use, and never executed."""

from torchrex.checkpoint.folder import (
    Checkpoint,
    Checkpoints,
    DamagedError,
    expect_form,
    owned,
    read,
    seconds_in,
)
from torchrex.durable import MOST_JSON, one_line, parse_json, printable, read_file, require_file

__all__ = [
    "MOST_JSON",
    "Checkpoint",
    "Checkpoints",
    "DamagedError",
    "expect_form",
    "one_line",
    "owned",
    "parse_json",
    "printable",
    "read",
    "read_file",
    "require_file",
    "seconds_in",
]
