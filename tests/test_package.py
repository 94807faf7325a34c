"""What `import torchrex` gives: every public module by its name, each loaded when it is used."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import pytest
import torch

import torchrex
from torchrex.errors import InvalidArgumentError

LATE = ("diagnostics", "experiments", "report", "vision")


def printed_by(code: str) -> list[str]:
    """Words printed by a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_modules_are_loaded_when_they_are_named():
    classes = ("vision.Augment", "diagnostics.History", "experiments.run_recipe", "report")
    named = ", ".join(f"torchrex.{name}.__name__" for name in classes)
    code = f"import torchrex; print({named})"
    assert printed_by(code) == ["Augment", "History", "run_recipe", "torchrex.report"]


def test_importing_the_package_loads_none_of_them():
    loaded = printed_by("import sys, torchrex; print(*sys.modules)")
    assert "torch" not in loaded
    assert [name for name in loaded if name.startswith("torchrex.")] == []
    assert set(LATE) <= set(dir(torchrex))


def test_doctor_does_not_load_the_statistics_of_scipy():
    loaded = printed_by("import sys, torchrex.report.doctor; print(*sys.modules)")
    assert not {"scipy.stats", "scipy.integrate"} & set(loaded)


KINDS = (torchrex.DensityExchange, torchrex.ModuleExchange)


@pytest.mark.parametrize("kind", KINDS)
def test_help_shows_the_arguments_of_a_run(kind):
    shown = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    assert "ensemble: " in shown
    assert "RuleOptions" in shown


@pytest.mark.parametrize("kind", [torchrex.ReplicaExchange, *KINDS])
def test_each_kind_of_run_names_the_other(kind):
    ladder = torchrex.Ladder((1.0, 2.0), 0.1)
    with pytest.raises(
        InvalidArgumentError,
        match=r"DensityExchange.*ModuleExchange|ModuleExchange.*DensityExchange",
    ):
        kind("not an ensemble", ladder, seed=1)


TARGET = torchrex.GaussianMixture([1.0], [0.0], [1.0])
LADDER = torchrex.Ladder((1.0, 2.0), 0.1)
DENSITY = torchrex.TensorEnsemble.start(TARGET, n_rungs=2)
NETWORK = torchrex.ModuleEnsemble(
    torch.nn.Linear(1, 1), torchrex.PosteriorEnergy(torch.nn.functional.mse_loss, n_data=4)
)


@pytest.mark.parametrize(
    ("call", "given", "options", "meant"),
    [
        (torchrex.DensityExchange, DENSITY, {"swap_intervall": 2}, "swap_interval"),
        (torchrex.DensityExchange, DENSITY, {"compield": False}, "compiled"),
        (torchrex.ModuleExchange, NETWORK, {"divergense": "stop"}, "divergence"),
        (torchrex.sample, TARGET, {"temperature": (1.0, 2.0), "n_steps": 10}, "temperatures"),
        (torchrex.sample, TARGET, {"nsteps": 10}, "n_steps"),
        (torchrex.sample, TARGET, {"n_steps": 10, "swap_intervall": 2}, "swap_interval"),
        (torchrex.train, NETWORK, {"nsteps": 10}, "n_steps"),
        (torchrex.train_together, NETWORK, {"checkpoints_every": 10}, "checkpoint_every"),
        (torchrex.collect, DENSITY, {"burnin": 10}, "burn_in"),
    ],
)
def test_a_misspelt_argument_names_the_nearest(call, given, options, meant):
    with pytest.raises(InvalidArgumentError, match=f"did you mean {meant}"):
        call(given, **options, ladder=LADDER)
