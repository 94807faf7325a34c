"""What `import torchrex` brings: every public room by its name, and none of them before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchrex

LATE = ("diagnostics", "experiments", "report", "vision")


def printed_by(code: str) -> list[str]:
    """Words printed by a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_rooms_are_loaded_when_they_are_named():
    named = "torchrex.vision.Augment.__name__, torchrex.diagnostics.History.__name__, torchrex.experiments.run_recipe.__name__"
    code = f"import torchrex; print({named}, torchrex.report.__name__)"
    assert printed_by(code) == ["Augment", "History", "run_recipe", "torchrex.report"]


def test_importing_the_package_loads_none_of_them():
    loaded = printed_by("import sys, torchrex; print(*sys.modules)")
    assert "torch" not in loaded
    assert [name for name in loaded if name.startswith("torchrex.")] == []
    assert set(LATE) <= set(dir(torchrex))


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'torchrex' has no attribute 'visoin'$"):
        _ = torchrex.visoin
