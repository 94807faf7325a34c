"""The command line."""

from torchrex.cli.main import main

__all__ = ["main"]
