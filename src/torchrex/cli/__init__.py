"""The command line. Nothing that takes time to load is imported before a command needs it."""

from torchrex.cli.main import main

__all__ = ["main"]
