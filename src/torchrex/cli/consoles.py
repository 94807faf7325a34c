"""Where commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

from rich.console import Console

stdout, stderr = Console(), Console(stderr=True)
