"""Where commands print: results on stdout, everything else on stderr. Of several processes only the first does."""

from __future__ import annotations

import os

from rich.console import Console

_quiet = os.environ.get("RANK", "0") != "0"
stdout, stderr = Console(quiet=_quiet), Console(stderr=True, quiet=_quiet)
