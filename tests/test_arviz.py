"""The export to ArviZ, with the real package and real files; convergence; plots and notebooks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import matplotlib
import numpy as np
import pytest
import torch

import torchrex as tr
from torchrex.diagnostics import convergence
from torchrex.errors import InvalidArgumentError, MissingDependencyError, import_extra
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.mixtures import CASES
from torchrex.experiments.runner import run_recipe
from torchrex.posterior import import_arviz, to_arviz, trace_to_datatree

matplotlib.use("Agg")
import matplotlib.pyplot as plt

az, xr = import_arviz(), import_extra("xarray", "diagnostics")


def gaussian(x):
    return -0.5 * x.square().sum(-1)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def mixture():
    return replace(CASES["case1"], n_steps=2000, n_runs=4, thin=5).draw(0)


@pytest.fixture(scope="module")
def three_rungs():
    size = {"dim": 3, "n_steps": 60, "n_runs": 5, "thin": 4, "burn_in": 20}
    return tr.sample(gaussian, temperatures=(1.0, 2.0, 4.0), lr=0.1, **size)


@pytest.fixture(scope="module")
def digits_traces(tmp_path_factory):
    # Naive swaps, because the unbiased test makes none in so few steps.
    naive = {"correction_factor": math.inf, "epochs": 4, "burn_in_epochs": 1, "hidden": 8}
    config = replace(digits_recipes()["digits/resghmc"], **naive)
    return [
        run_recipe(config, seed, tmp_path_factory.mktemp("runs"), device="cpu").trace()
        for seed in (0, 1)
    ]


# ---- the tree


def test_groups_axes_and_values(three_rungs):
    draws, tree = three_rungs, three_rungs.to_datatree(["a", "b", "c"])
    assert list(tree.children) == ["posterior", "sample_stats", "replica_exchange"]
    x = tree["posterior"]["x"]
    assert x.dims == ("chain", "draw", "coordinate")
    assert np.array_equal(x.sel(coordinate="b"), draws.values[:, :, 1])
    stats, ladder = tree["sample_stats"], tree["replica_exchange"]
    # Axes of the tensors are (draws, rungs or pairs, chains).
    by_rung, by_pair = ("chain", "draw", "rung"), ("chain", "draw", "pair")
    for group, name, dims, expected in (
        (stats, "minibatch_energy", ("chain", "draw"), draws.energy[:, 0].T),
        (stats, "noise_variance", by_pair, draws.noise_variance.permute(2, 0, 1)),
        (ladder, "noise_variance", by_pair, draws.noise_variance.permute(2, 0, 1)),
        (ladder, "energy", by_rung, draws.energy.permute(2, 0, 1)),
        (ladder, "replica_at", by_rung, draws.replica_at.permute(2, 0, 1)),
        (ladder, "accepted", ("chain", "pair"), draws.accepted.T),
        (ladder, "proposed", ("chain", "pair"), draws.proposed.T),
    ):
        assert group[name].dims == dims
        assert np.array_equal(group[name], expected)
    for group in tree.children.values():
        assert group["step"].values.tolist() == draws.steps.tolist() == list(range(24, 61, 4))
    assert not {"lp", "energy"} & set(stats.data_vars)  # names of exact energies
    assert all({"chain", "draw"} <= set(variable.dims) for variable in stats.data_vars.values())
    replica = draws.replica_at[:, 0].T
    swapped = np.diff(replica, axis=1, prepend=replica[:, :1]) != 0
    assert stats["swapped"].values.tolist() == swapped.tolist()
    assert 0 < swapped.sum() < replica.numel()
    for attrs in (tree.attrs, tree["posterior"].attrs):
        assert attrs["inference_library_version"] == tr.__version__
        assert (attrs["n_steps"], attrs["status"]) == (60, "finished")
        assert json.loads(attrs["settings"]) == draws.settings
    alone = tr.sample(gaussian, dim=1, temperatures=(1.0,), lr=0.1, n_steps=20, n_runs=2)
    assert set(alone.to_datatree()["replica_exchange"].data_vars) == {"energy", "replica_at"}


@pytest.mark.parametrize(("names", "row"), [(None, "x"), ("mass", "mass")])
def test_one_coordinate_is_a_scalar(mixture, names, row):
    tree = mixture.to_datatree(names)
    assert list(tree["posterior"].data_vars) == [row]
    assert tree["posterior"][row].dims == ("chain", "draw")
    assert np.array_equal(tree["posterior"][row], mixture.values[:, :, 0])
    assert list(az.summary(to_arviz(tree)).index) == [row]
    assert mixture.plot(names)[0, 0].get_xlabel() == mixture.plot(names)[0, 1].get_ylabel() == row


def test_names_must_fit(three_rungs, mixture):
    for name in ("chain", "draw", "step", "a/b"):
        with pytest.raises(InvalidArgumentError, match="chain, draw, step"):
            mixture.to_datatree([name])
    for names in (["a"], ["a", "b", "b"], ["a", "b", 3], "abc"):
        for use in (three_rungs.to_datatree, three_rungs.plot, partial(convergence, three_rungs)):
            with pytest.raises(InvalidArgumentError, match="3 different strings"):
                use(names)


# ---- files


@pytest.mark.parametrize("kind", ["netcdf", "zarr"])
def test_files_give_back_the_same_tree(three_rungs, digits_traces, tmp_path, kind):
    network = trace_to_datatree(digits_traces, settings={"recipe": "digits/resghmc"})
    for k, tree in enumerate((three_rungs.to_datatree(["alpha", "β", "c"]), network)):
        path = tmp_path / f"{k}.{kind}"
        if kind == "netcdf":
            tree.to_netcdf(path)
        else:
            tree.to_zarr(path, consolidated=False)
        options = {} if kind == "netcdf" else {"engine": "zarr", "consolidated": False}
        with xr.open_datatree(path, **options) as back:
            assert back.identical(tree)


# ---- ArviZ itself


def plot_trace(data, **options):
    """By its name in the installed ArviZ."""
    plot = az.plot_trace_dist if hasattr(az, "plot_trace_dist") else az.plot_trace
    return plot(data, **options)


def test_arviz_on_densities(mixture, three_rungs):
    for draws, names, rows in (
        (mixture, ["position"], ["position"]),
        (three_rungs, ["age", "income", "height"], ["x[age]", "x[income]", "x[height]"]),
    ):
        data = draws.to_arviz(names)
        table = az.summary(data, round_to="none")
        assert list(table.index) == rows
        assert np.allclose(table["mean"], draws.mean(), rtol=1e-4)
        assert np.allclose(table["sd"], draws.std(), rtol=1e-3)
        plot_trace(data)
        assert plt.get_fignums()
    assert "noise_variance[0]" in az.summary(mixture.to_arviz(), group="sample_stats").index


def test_arviz_on_a_digits_run(digits_traces):
    data = to_arviz(trace_to_datatree(digits_traces, burn_in=20))
    table = az.summary(data, group="sample_stats", round_to="none")
    energy = torch.stack([trace["energy"][20:, 0] for trace in digits_traces]).double()
    assert table.loc["minibatch_energy", "mean"] == pytest.approx(float(energy.mean()), rel=1e-4)
    stats = data["sample_stats"] if hasattr(az, "plot_trace_dist") else data.sample_stats
    plot_trace(stats, var_names=["minibatch_energy", "noise_variance"])
    assert plt.get_fignums()


# ---- traces of networks


def test_seeds_become_chains(digits_traces):
    tree = trace_to_datatree(digits_traces, settings={"recipe": "digits/resghmc"})
    assert list(tree.children) == ["sample_stats", "replica_exchange"]
    ladder = tree["replica_exchange"]
    assert dict(ladder.sizes) == {"chain": 2, "draw": 80, "rung": 2, "pair": 1}
    for chain, trace in enumerate(digits_traces):
        for name in ("energy", "replica_at", "noise_variance", "accepted", "proposed"):
            assert np.array_equal(ladder[name].sel(chain=chain), trace[name], equal_nan=True)
        assert np.array_equal(ladder["swaps"].sel(chain=chain).sum("draw"), trace["accepted"])
        assert 0 < int(trace["accepted"]) < 80
    assert ladder["step"].values.tolist() == list(range(1, 81))
    assert json.loads(tree.attrs["settings"]) == {"recipe": "digits/resghmc"}
    later = trace_to_datatree(digits_traces, burn_in=30)
    assert later["sample_stats"]["step"].values.tolist() == list(range(31, 81))
    energy = digits_traces[1]["energy"][30:, 0]
    assert np.array_equal(later["sample_stats"]["minibatch_energy"][1], energy)


def thinned_trace(**changes):
    """Steps 0, 3 and 6 of eight; swaps of pair 0 at 0, 1, 2, 3 and 7, of pair 1 at 4 and 6."""
    tensors = {
        "steps": torch.tensor([0, 3, 6]),
        "energy": torch.arange(9.0).view(3, 3),
        "replica_at": torch.tensor([[1, 0, 2], [1, 0, 2], [2, 1, 0]]),
        "noise_variance": torch.ones(3, 2),
        "swap_steps": torch.tensor([0, 1, 2, 3, 4, 6, 7]),
        "swap_pairs": torch.tensor([0, 0, 0, 0, 1, 1, 0]),
        "accepted": torch.tensor([5, 2]),
        "proposed": torch.tensor([8, 8]),
    }
    return tensors | changes


def test_swaps_are_counted_between_kept_steps():
    tree = trace_to_datatree(thinned_trace())
    assert tree["replica_exchange"]["swaps"].values.tolist() == [[[1, 0], [3, 0], [0, 2]]]
    assert tree["sample_stats"]["swapped"].values.tolist() == [[0, 0, 1]]
    later = trace_to_datatree(thinned_trace(), burn_in=1)["replica_exchange"]
    assert later["swaps"].values.tolist() == [[[3, 0], [0, 2]]]


@pytest.mark.parametrize(
    ("traces", "options", "words"),
    [
        ([], {}, "no trace"),
        (tr.Trace().tensors(), {}, "trace 0 has no steps, energy"),
        ([thinned_trace(), {"w2": torch.ones(1)}], {}, "trace 1 has no"),
        ([thinned_trace(), thinned_trace(energy=torch.ones(3, 2))], {}, "on 2 rungs"),
        (thinned_trace(), {"burn_in": 7}, "burn_in=7"),
        (thinned_trace(), {"burn_in": -1}, "whole number"),
    ],
)
def test_traces_that_cannot_be_exported(traces, options, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        trace_to_datatree(traces, **options)
    assert "\n" not in str(caught.value)


# ---- convergence

N_CHAINS, N_DRAWS, N_REPEATS = 4, 2000, 60


def autoregression(rho, *, seed, n_repeats=N_REPEATS):
    """Stationary x' = rho x + sqrt(1 - rho^2) z of variance 1: (chains, draws, repeats)."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(N_DRAWS, N_CHAINS, n_repeats, generator=generator, dtype=torch.float64)
    x = [z[0]]
    for row in z[1:]:
        x.append(rho * x[-1] + math.sqrt(1 - rho**2) * row)
    return torch.stack(x, dim=1)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_ess_and_mcse_of_an_autoregression(rho):
    """ESS = n (1 - rho) / (1 + rho); 4 % are allowed for the truncated autocorrelation.

    Over 60 independent repeats the mean of ESS is known to a standard error of about 1 %.
    """
    chains = autoregression(rho, seed=1)
    found, exact = convergence(chains), N_CHAINS * N_DRAWS * (1 - rho) / (1 + rho)
    for numbers, answer in ((found.ess_bulk, exact), (found.mcse_mean, exact**-0.5)):
        error = float(numbers.std()) / math.sqrt(N_REPEATS)
        assert abs(float(numbers.mean()) / answer - 1) < 0.04 + 5 * error / answer
    # Means over all draws, in units of their standard error, have variance 1.
    z = chains.mean((0, 1)) / found.mcse_mean
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / N_REPEATS)
    assert float(found.rhat.mean()) == pytest.approx(1.0, abs=0.01)
    if rho == 0.0:
        assert float(found.ess_tail.mean()) == pytest.approx(exact, rel=0.05)
    else:  # indicators of the tail forget sooner than the chain
        assert exact < float(found.ess_tail.mean()) < 8000


def test_convergence_of_chains_apart_of_one_chain_and_of_none():
    chains = autoregression(0.5, seed=2, n_repeats=3)
    chains[:2, :, 1] += 10.0  # in different modes
    found = convergence(chains, ["a", "stuck", "c"])
    assert found.worst_rhat == float(found.rhat[1]) > 1.5
    assert found.rhat[[0, 2]].max() < 1.02
    assert found.least_ess == float(found.ess_bulk[1]) < 10
    assert "stuck" in found.summary(most=1)
    chains[:, :, 2] = 3.0  # never moves
    assert math.isnan(convergence(chains).worst_rhat)
    alone = convergence(chains[:1].float())
    assert alone.rhat.isnan().all()
    assert alone.ess_bulk[0] == pytest.approx(2000 / 3, rel=0.3)
    with pytest.raises(InvalidArgumentError, match="2 chains of 3"):
        convergence(torch.zeros(2, 3, 1))
    with pytest.raises(InvalidArgumentError, match=r"\(2, 30\)"):
        convergence(torch.zeros(2, 30))


def test_convergence_agrees_with_the_table_of_arviz(mixture):
    found = convergence(mixture, ["position"])
    table = az.summary(mixture.to_arviz(["position"]), round_to="none")
    assert found.names == ("position",)
    for name in ("rhat", "ess_bulk", "ess_tail", "mcse_mean"):
        expected = table.loc["position", "r_hat" if name == "rhat" else name]
        assert float(getattr(found, name)) == pytest.approx(expected, rel=1e-3)


# ---- notebooks and pictures


def test_plot(three_rungs, mixture):
    axes = three_rungs.plot(["a", "b", "c"])
    assert axes.shape == (3, 2)
    assert [axis.get_xlabel() for axis in axes[:, 0]] == ["x[a]", "x[b]", "x[c]"]
    for k, trace in enumerate(axes[:, 1]):
        assert len(trace.lines) == 5
        for chain, line in enumerate(trace.lines):
            assert np.array_equal(line.get_xdata(), three_rungs.steps)
            assert np.allclose(line.get_ydata(), three_rungs.values[chain, :, k])
    for density in axes[:, 0]:
        bars = [patch for patch in density.patches if hasattr(patch, "get_width")]
        area = sum(bar.get_width() * bar.get_height() for bar in bars)
        assert area == pytest.approx(1.0)
    _, own = plt.subplots(1, 2)
    assert mixture.plot(axes=own, most_chains=2)[0, 1] is own[1]
    assert len(own[1].lines) == 2
    assert three_rungs.plot(most=1).shape == (1, 2)


def test_plots_of_long_and_of_empty_draws(mixture, three_rungs):
    axes = replace(mixture, values=torch.randn(1, 8000, 1), steps=torch.arange(1, 8001)).plot()
    assert len(axes[0, 1].lines[0].get_xdata()) == 2000
    assert "one draw in 4" in axes[0, 1].get_title()
    with pytest.raises(InvalidArgumentError, match="nothing to plot"):
        three_rungs.after(60).plot()
    with pytest.raises(InvalidArgumentError, match="3 x 2"):
        three_rungs.plot(axes=plt.subplots(1, 2)[1])


# ---- without the extra


@pytest.mark.parametrize(
    ("absent", "use", "extra"),
    [
        ("xarray", lambda draws: draws.to_datatree(), "diagnostics"),
        ("arviz", convergence, "diagnostics"),
        ("matplotlib.pyplot", lambda draws: draws.plot(), "plots"),
    ],
)
def test_missing_package_names_the_extra(three_rungs, monkeypatch, absent, use, extra):
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(MissingDependencyError, match=rf"torchrex\[{extra}\]") as caught:
        use(three_rungs)
    assert absent.split(".")[0] in str(caught.value)


@pytest.mark.slow
def test_nothing_optional_is_imported_before_it_is_needed():
    optional = "{'arviz', 'xarray', 'matplotlib'}"
    code = f"import sys, torchrex.diagnostics; print({optional} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
