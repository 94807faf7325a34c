"""State trees on disk: saved whole or not at all, checked before they are used, and never executed."""

from torchrex.checkpoint.files import (
    MOST_JSON,
    one_line,
    parse_json,
    printable,
    read_file,
    require_file,
)
from torchrex.checkpoint.folder import Checkpoint, Checkpoints

__all__ = [
    "MOST_JSON",
    "Checkpoint",
    "Checkpoints",
    "one_line",
    "parse_json",
    "printable",
    "read_file",
    "require_file",
]
