"""The command line in the process of the test: what a person types, and what comes back."""

from __future__ import annotations

import sys

import pytest

from torchrex.cli.main import main


def run_command(monkeypatch, capsys, *words):
    """Runs `torchrex *words`: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["torchrex", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err
