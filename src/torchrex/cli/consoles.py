"""Where commands print: results on stdout, everything else on stderr. Of several processes only the
first does.
"""

from __future__ import annotations

from rich.console import Console

from torchrex.cli.voice import is_first

stdout, stderr = Console(quiet=not is_first()), Console(stderr=True, quiet=not is_first())
