"""The command line. What is imported here, before the first line of a command, is small: torch
takes seconds to load.
"""

from torchrex.cli.main import main

__all__ = ["main"]
