"""Where commands print: results on stdout, everything else on stderr. Of several processes only the
first does.
"""

from __future__ import annotations

from rich.console import Console

from torchrex.cli.voice import is_main_process

stdout, stderr = (
    Console(quiet=not is_main_process()),
    Console(stderr=True, quiet=not is_main_process()),
)
