"""What `import torchrex` gives, each module loaded when it is used; and what a release contains."""

from __future__ import annotations

import importlib.metadata
import os
import pydoc
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
import torch

import torchrex
from torchrex.errors import InvalidArgumentError
from torchrex.exchange.run import warn_of_newer_torch

ROOT = Path(__file__).parents[1]
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


@pytest.mark.parametrize(
    ("version", "warns"), [("2.8.0", 0), ("2.15.9+cu132", 0), ("2.100.0a0", 1)]
)
@pytest.mark.filterwarnings("error")
def test_a_torch_newer_than_all_tested_ones_is_logged_once(version, warns, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", version)
    warn_of_newer_torch.cache_clear()
    for _ in range(2):
        torchrex.DensityExchange(DENSITY, LADDER)
    assert caplog.text.count(f"torch {version} is newer than") == warns


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


def test_every_file_states_the_same_requirements_version_and_address():
    """The conda recipe, the citation, the Makefile and the templates repeat pyproject.toml."""
    yaml = pytest.importorskip("yaml")
    read = {name: (ROOT / name).read_text() for name in ("pyproject.toml", "Makefile")}
    build, project = (tomllib.loads(read["pyproject.toml"])[n] for n in ("build-system", "project"))
    recipe, citation = (
        yaml.safe_load((ROOT / name).read_text()) for name in ("recipe/recipe.yaml", "CITATION.cff")
    )

    def in_conda(names):
        return {re.sub(r"\s*>=\s*", " >=", re.sub(r"^torch\b", "pytorch", each)) for each in names}

    needs = recipe["requirements"]
    python = f"python {project['requires-python']}"
    assert set(needs["run"]) == in_conda([python, *project["dependencies"]])
    assert set(needs["host"]) == {"python 3.11.*", "pip", *in_conda(build["requires"])}
    assert recipe["context"]["version"] == citation["version"] == torchrex.__version__
    ((name, call),) = project["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {call}"]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == citation["license"] == project["license"]
    oldest = next(each for each in project["dependencies"] if each.startswith("torch>="))
    assert f"{oldest.replace('>=', '==')}.*" in read["Makefile"]

    address = project["urls"]["Repository"]
    assert citation["repository-code"] == recipe["about"]["repository"] == address
    named = [ROOT / "pyproject.toml", ROOT / "CODE_OF_CONDUCT.md", ROOT / "recipe/recipe.yaml"]
    for file in [*named, *(ROOT / ".github").rglob("*.yml")]:
        for link in re.findall(r"https://github.com/[^\s\"')]+", file.read_text()):
            assert link.startswith(address), f"{file.name} names {link}"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist of this checkout, and the wheel that is made from it alone."""
    pytest.importorskip("hatchling", reason="pip install hatchling hatch-fancy-pypi-readme")
    out = tmp_path_factory.mktemp("distributions")

    def build(kind, folder):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out],
            cwd=folder,
            check=True,
        )

    build("sdist", ROOT)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    build("wheel", out / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_release_works_without_the_repository(distributions, tmp_path):
    """In an environment of its own, which borrows torch and the others, but not the checkout."""
    venv.create(tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    install = [*pip, "install", "--no-deps", "--no-index", distributions]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    borrowed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "borrowed.pth").write_text("\n".join(borrowed))  # whose own .pth files are not read
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def answer(*words, code=0):
        done = subprocess.run(
            [programs / "torchrex", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    where = "import torchrex; print(torchrex.__file__)"
    found = subprocess.check_output(
        [programs / "python", "-c", where], cwd=tmp_path, env=environment
    )
    assert Path(found.decode().strip()).is_relative_to(site)
    assert "figure1/case1-resgld" in answer("list")
    short = ("--set", "epochs=2", "--set", "burn_in_epochs=1")
    answer("run", "digits/resghmc", *short, "--out", "runs")
    few = ("--only", "case1", "--set", "n_steps=200", "--set", "n_runs=2")
    assert "picture: " in answer("reproduce", "figure1", *few, "--out", "runs")
    answer("report", "runs", "--out", "page.html")
    assert "digits/resghmc" in (tmp_path / "page.html").read_text()
    (line,) = answer("reproduce", "table1", "--rebuild", code=2).splitlines()
    assert "results/images" in line


@pytest.mark.slow
def test_the_readme_of_a_release_has_no_link_into_the_checkout(distributions):
    (found,) = importlib.metadata.distributions(path=[str(distributions)])
    metadata = found.metadata
    text = metadata.get_payload() or metadata["Description"]
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(link.startswith(("https://", "http://", "#")) for link in links), links
    tree = re.compile(r"https://github.com/torchrex/torchrex/(?:raw|blob)/v([\d.]+)/([^#]+)")
    ours = [found for link in links if (found := tree.match(link))]
    assert len(ours) >= len(re.findall(r"\]\((?!http|#)", (ROOT / "README.md").read_text())) > 0
    for link in ours:
        assert link[1] == torchrex.__version__
        assert (ROOT / link[2]).exists(), link[0]
