"""Plots show the data they are given, on the axis they are given, in grey as well."""

from __future__ import annotations

import matplotlib
import pytest
import torch

from torchrex.diagnostics import History, Swaps
from torchrex.errors import InvalidArgumentError
from torchrex.report import plots
from torchrex.report.plots import acceptance_over_time, calibration, running_mean

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture
def axis():
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def history(k=200, rungs=2, chains=3, correction=2.0, swaps=((50, 0), (51, 0), (120, 0))):
    generator = torch.Generator().manual_seed(0)
    energy = 100 + torch.rand(k, rungs, chains, generator=generator, dtype=torch.float64)
    replica_at = torch.arange(rungs)[None, :, None].repeat(k, 1, chains)
    for step, pair in swaps:
        replica_at[step:, [pair, pair + 1]] = replica_at[step:, [pair + 1, pair]]
    n_pairs = rungs - 1
    made = torch.tensor(
        [[sum(p == pair for _, p in swaps)] * chains for pair in range(n_pairs)]
    ).reshape(n_pairs, chains)
    where = [(step, pair, chain) for chain in range(chains) for step, pair in swaps]
    return History(
        steps=torch.arange(k),
        energy=energy,
        replica_at=replica_at,
        noise_variance=torch.linspace(1, 4, k)[:, None, None].repeat(1, n_pairs, chains)
        + 0.1 * torch.arange(chains),
        temperature=torch.tensor([[1.0, 2.0, 4.0][:rungs]]).repeat(k, 1),
        accepted=made,
        proposed=torch.full((n_pairs, chains), k),
        n_steps=k,
        correction=torch.full((k, n_pairs, chains), correction),
        swaps=Swaps(*(torch.tensor([w[i] for w in where], dtype=torch.long) for i in range(3))),
    )


def labels(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_energies_are_those_of_the_chain_and_swaps_are_marked(axis):
    data = history()
    assert plots.plot_energies(data, axis, chain=1) is axis
    drawn = {line.get_label(): torch.as_tensor(line.get_ydata()) for line in axis.lines}
    raw = [line for line in axis.lines if line.get_alpha() == 0.35]
    assert torch.equal(torch.as_tensor(raw[-1].get_ydata()), data.energy[:, 0, 1])
    assert torch.allclose(drawn["rung 0 (coldest)"], running_mean(data.energy[:, 0, 1], 2))
    assert axis.lines[-1].get_xdata().tolist() == [50, 51, 120]
    assert labels(axis)[-1] == "3 swaps"


def test_paths_follow_the_replicas_and_not_the_rungs(axis):
    data = history(rungs=3, swaps=((50, 0), (120, 1)))  # replica 0: rung 0, 1, 2
    plots.plot_replica_paths(data, axis)
    first = torch.as_tensor(axis.lines[0].get_ydata()).round()
    assert (first[:50] == 0).all()
    assert (first[50:120] == 1).all()
    assert (first[120:] == 2).all()
    assert labels(axis) == ["replica 0", "replica 1", "replica 2"]


def test_acceptance_over_time_has_known_answers():
    """Equal energies at correction c accept exp(-gap * c); swaps are counted in the window in which
    they were made.
    """
    data = history(chains=1)
    data.energy[:] = 5.0
    step, expected, observed = acceptance_over_time(data, windows=4)
    assert step.tolist() == [25, 75, 125, 175]
    assert torch.allclose(
        expected, torch.tensor(-0.5 * 2.0, dtype=torch.float64).exp().expand(4, 1)
    )
    assert observed.flatten().tolist() == pytest.approx([0, 2 / 50, 1 / 50, 0])


def test_acceptance_is_in_percent_and_sigma2_has_a_band_of_the_chains(axis):
    data = history()
    plots.plot_acceptance(data, axis)
    expected = 100 * acceptance_over_time(data).expected[:, 0]
    assert axis.lines[0].get_ydata().tolist() == pytest.approx(expected.tolist())
    axis.clear()
    plots.plot_noise_variance(data, axis)
    mean = data.noise_variance[:, 0].double().mean(1)
    assert axis.lines[0].get_ydata().tolist() == pytest.approx(mean.tolist())
    top = axis.collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(4.1 + 2 * 0.1 / 3**0.5, rel=1e-5)


def test_correction_against_the_difference_of_its_pair(axis):
    data = history(rungs=3)
    plots.plot_correction(data, axis, pair=1)
    difference, correction = axis.lines[:2]
    assert torch.allclose(
        torch.as_tensor(difference.get_ydata()), data.energy[:, 1, 0] - data.energy[:, 2, 0]
    )
    assert set(correction.get_ydata()) == {2.0}
    assert labels(axis)[-1] == "0 swaps"  # all were those of pair 0


def test_density_against_truth(axis):
    density = torch.stack([torch.full((10,), 0.5), torch.full((10,), 1.5)])
    plots.plot_density(torch.linspace(0, 1, 11), density, axis, truth=torch.ones_like)
    assert labels(axis) == ["truth", "single chains", "draws of 2 chains"]
    assert axis.patches[-1].get_data().values.tolist() == pytest.approx([1.0] * 10)


def test_reliability_bins_have_known_answers(axis):
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    found = calibration(probabilities, torch.tensor([0, 1, 1, 1]), bins=10)
    assert found.n.tolist() == [1, 1, 2]
    assert found.confidence.tolist() == pytest.approx([0.55, 0.7, 0.9])
    assert found.accuracy.tolist() == pytest.approx([1, 1, 0.5])
    assert found.error.tolist() == pytest.approx([0, 0, 0.125**0.5])
    plots.plot_reliability(probabilities, torch.tensor([0, 1, 1, 1]), axis, bins=10)
    assert axis.lines[1].get_xdata().tolist() == pytest.approx([55, 70, 90])


def test_accuracy_and_distance(axis):
    plots.plot_accuracy(
        {"average": torch.tensor([0.5, 0.75]), "last": torch.tensor([0.5, 0.25])}, axis
    )
    assert axis.lines[0].get_xdata().tolist() == [1, 2]
    assert axis.lines[0].get_ydata().tolist() == [50, 75]
    figure, other = plt.subplots()
    plots.plot_distance(torch.tensor([10, 100]), torch.tensor([[1.0, 3.0], [1.0, 1.0]]), other)
    assert other.lines[0].get_ydata().tolist() == [2, 1]
    assert other.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(2 + 2 * 1.0)
    assert (other.get_xscale(), other.get_yscale()) == ("log", "log")
    plt.close(figure)


@pytest.mark.parametrize(
    "plot",
    [
        plots.plot_energies,
        plots.plot_replica_paths,
        plots.plot_acceptance,
        plots.plot_noise_variance,
        plots.plot_correction,
        lambda _, axis: plots.plot_accuracy(
            {"average": torch.rand(5), "last": torch.rand(5)}, axis
        ),
        lambda _, axis: plots.plot_distance(torch.tensor([10, 100]), torch.rand(2, 3), axis),
    ],
)
def test_every_axis_is_labelled_and_lines_differ_in_more_than_colour(plot, axis):
    plot(history(rungs=3), axis)
    assert axis.get_xlabel()
    assert axis.get_ylabel()
    named = [line for line in axis.lines if not line.get_label().startswith("_")]
    looks = [(line.get_linestyle(), line.get_marker(), line.get_markersize()) for line in named]
    assert len(set(looks)) == len(looks)
    axis.figure.canvas.draw()


def test_what_cannot_be_drawn_is_said(axis):
    alone = history(rungs=1, swaps=())
    for plot in (plots.plot_acceptance, plots.plot_noise_variance, plots.plot_correction):
        with pytest.raises(InvalidArgumentError, match="one rung makes no swaps"):
            plot(alone, axis)
    plots.plot_energies(alone, axis)
    with pytest.raises(InvalidArgumentError, match="no chain 3"):
        plots.plot_energies(history(), axis, chain=3)
    with pytest.raises(InvalidArgumentError, match="labels"):
        plots.plot_reliability(torch.rand(4, 2), torch.zeros(3), axis)
