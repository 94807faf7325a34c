"""What `import torchrex` brings: every public room by its name, and none of them before it is asked
for.
"""

from __future__ import annotations

import pydoc
import subprocess
import sys

import pytest

import torchrex
from torchrex.errors import InvalidArgumentError
from torchrex.network import ModuleExchange

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


def test_help_shows_what_a_run_can_do():
    """Of both kinds; and a run on a density says what is for networks."""
    shown = pydoc.render_doc(torchrex.ReplicaExchange, renderer=pydoc.plaintext)
    network = {
        name
        for name in vars(ModuleExchange)
        if not name.startswith("_") and callable(getattr(ModuleExchange, name))
    }
    inner = {
        "eager_step",
        "learn_variance",
        "look",
        "prepare",
        "to_device",
        "workings",
    }  # what SideBySide asks of a run
    for name in network - inner:
        assert f" {name}(self" in shown, name
        assert getattr(torchrex.ReplicaExchange, name).__doc__
    ensemble = torchrex.TensorEnsemble.start(
        torchrex.GaussianMixture([1.0], [0.0], [1.0]), n_rungs=2
    )
    run = torchrex.ReplicaExchange(ensemble, torchrex.Ladder((1.0, 2.0), 0.1))
    for call in (
        run.module_at,
        run.live_module_at,
        lambda: run.predict(None),
        lambda: run.measure([]),
        lambda: run.replica_at(0),
    ):
        with pytest.raises(InvalidArgumentError, match="is for runs on networks"):
            call()
