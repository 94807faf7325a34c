"""The command line in the process of the test: what a person types, and what comes back."""

from __future__ import annotations

import sys

import pytest

from torchrex.cli.main import main


def run_command(monkeypatch, capsys, *words, settings=()):
    """Runs `torchrex *words --set ...`: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["torchrex", *map(str, words), *set_words(settings)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


def set_words(settings):
    return [word for setting in settings for word in ("--set", setting)]


def refused(answer, *expected):
    """Exit code 2, one line on stderr with these words, nothing on stdout."""
    code, out, err = answer
    assert (code, out) == (2, "")
    assert err.startswith("torchrex: ")
    assert len(err.strip().splitlines()) == 1
    assert all(words in err for words in expected), err
