"""Figures show the data they are given; and the numbers that they and the tables show."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import pytest
import torch

from torchrex.diagnostics import History, Swaps
from torchrex.errors import InvalidArgumentError, MissingDependencyError
from torchrex.experiments.gallery import METHODS, MORE
from torchrex.experiments.gan import TABLE3
from torchrex.experiments.images import TABLE1
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.report import figures
from torchrex.report.figure1 import label_of
from torchrex.report.figures import DARK, LIGHT, Pair, rung_colours, settled_axis
from torchrex.report.plots import COLOURS, calibration, log_axis, look, panels, running_mean

HOSTILE = "<b>bold</b><a href='javascript:window.hacked=1'>&amp;</a>"


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
        temperature=(2.0 ** torch.arange(rungs)).repeat(k, 1),
        accepted=made,
        proposed=torch.full((n_pairs, chains), k),
        n_steps=k,
        correction=torch.full((k, n_pairs, chains), correction),
        swaps=Swaps(*(torch.tensor([w[i] for w in where], dtype=torch.long) for i in range(3))),
    )


def named(figure):
    return {trace.name: trace for trace in figure.data if trace.showlegend is not False}


def y(trace):
    return torch.as_tensor(trace.y).double()


def note_of(figure):
    return figure.layout.title.subtitle.text.replace("<br>", " ")


def test_energies_are_those_of_the_chains_and_swaps_are_marked():
    data = history(chains=6)
    drawn = figures.energies(data, {f"seed {k}": k for k in range(1, 6)})
    raw = next(trace for trace in drawn.data if trace.opacity and trace.legendgroup == "0")
    assert torch.allclose(y(raw), data.energy[:, 0, 1], atol=1e-4)
    cold = named(drawn)["rung 0 (coldest)"]
    assert torch.allclose(y(cold), running_mean(data.energy[:, 0, 1], 2), atol=1e-4)
    assert named(drawn)["swaps"].x.tolist() == [50, 51, 120]
    assert "4 of 5 runs are drawn" in note_of(drawn)
    assert sum(trace.name == "rung 0 (coldest), seed 3" for trace in drawn.data) == 1


def test_all_rungs_of_a_far_ladder_can_be_seen():
    """By hand: rungs 1, 3 and 10,000 above 40,000. On a linear axis the first two are one line."""
    data, levels = history(rungs=3), torch.tensor([1.0, 3.0, 1e4], dtype=torch.float64)
    energy = 40_000 + levels[:, None] * (0.5 + torch.rand(200, 3, 3, dtype=torch.float64))
    energy[100, 0, 0] = 40_000.25
    drawn = figures.energies(replace(data, energy=energy))
    raw = next(trace for trace in drawn.data if trace.opacity and trace.legendgroup == "1")
    assert torch.allclose(y(raw), energy[:, 1, 0] - 40_000.25, atol=1e-4)
    assert drawn.layout.yaxis.type == "log"
    assert "energy, 40,000.25, is subtracted" in note_of(drawn)
    low, high = (10**each for each in drawn.layout.yaxis.range)
    assert low < 1 < 9_000 < high < 100_000
    assert "minus" in drawn.layout.yaxis.title.text
    near = figures.energies(data)
    assert "subtracted" not in note_of(near)
    assert "minus" not in near.layout.yaxis.title.text


def test_a_legend_names_a_few_rungs_of_a_long_ladder():
    """The coldest, the hottest and four between; all twelve are drawn."""
    long = history(rungs=12)
    for drawn, hottest in (
        (figures.energies(long), "rung 11 (hottest)"),
        (figures.paths(long), "replica 11"),
        (figures.noise(long), "rungs 10–11"),
    ):
        shown = set(named(drawn)) - {"swaps"}
        assert len(shown) == 6
        assert hottest in shown
        assert len({trace.line.color for trace in drawn.data if trace.line.color}) >= 11
        assert "names 6 of 1" in note_of(drawn)
    assert "legend" not in note_of(figures.energies(history()))


def test_paths_follow_the_replicas_and_not_the_rungs():
    data = history(rungs=3, swaps=((50, 0), (120, 1)))  # replica 0: rung 0, 1, 2
    first = figures.paths(data).data[0]
    assert first.x.tolist() == [0, 50, 120, 199]
    assert first.customdata.tolist() == [0, 1, 2, 2]
    assert y(first).round().tolist() == [0, 1, 2, 2]


def test_paths_say_whose_they_are():
    assert note_of(figures.paths(history())) == "chain 1 of 3."
    assert note_of(figures.paths(history(), of="mine", chain=1)) == "mine: chain 2 of 3."
    assert note_of(figures.paths(history(chains=1), of="mine")) == "mine"


def test_of_many_swaps_the_occupancy_is_shown():
    """By hand: the replicas of two rungs change places after 50 of 200 steps."""
    assert figures.flow(history()).data[0].type == "scatter"
    many = history(swaps=tuple((50 + step, 0) for step in range(101)))
    assert figures.flow(many).data[0].type == "heatmap"
    once = figures.occupancy(history(swaps=((50, 0),)))
    assert once.data[0].z.tolist() == [[25, 75], [75, 25]]
    texts = {(each.x, each.y): each.text for each in once.layout.annotations}
    assert texts == {(0, 0): "25 %", (1, 0): "75 %", (0, 1): "75 %", (1, 1): "25 %"}


def test_bars_of_the_pairs():
    unknown = (math.nan, math.nan)
    pairs = [
        Pair("0–1", (0.2, 0.01), (0.25, 0.02), (4.0, 0.1), 1.5, 0.4533, 20, 100),
        Pair("1–2", (0.0, math.nan), unknown, (9.0, math.nan), 4.0, 0.0455, 0, 100),
    ]
    drawn = named(figures.acceptance(pairs))
    made, expected = drawn["swaps made"], drawn["from the energies"]
    assert y(made).tolist() == pytest.approx([20, 0])
    assert made.error_y.array.tolist() == pytest.approx([1, 0])
    assert y(expected)[0] == pytest.approx(25)
    assert expected.error_y.array[0] == pytest.approx(2)
    assert list(made.x) == ["0–1<br>s = 1.5", "1–2<br>s = 4"]
    assert y(drawn["allowed by the noise s"]).tolist() == pytest.approx([45.33, 4.55])
    wide = [pair._replace(observed=(0.4, 0.3)) for pair in pairs]
    assert figures.acceptance(wide).layout.yaxis.range[1] > 70, "error bars are in sight"
    assert made.error_y.color == figures.GREY, "on a dark ground too"
    without = [pair._replace(observed=unknown) for pair in pairs]
    assert "swaps made" not in named(figures.acceptance(without))


def test_sigma2_has_a_band_of_the_chains():
    data = history()
    low, high, middle = map(y, figures.noise(data).data)
    assert torch.allclose(middle, data.noise_variance[:, 0].double().mean(1), atol=1e-5)
    assert torch.allclose(high - middle, torch.tensor(2 * 0.1 / 3**0.5).double(), atol=1e-5)
    assert torch.allclose(high - middle, middle - low, atol=1e-5)


def test_a_burn_in_spoils_no_axis_and_what_lies_outside_is_counted():
    settled = 1.5 + 0.5 * torch.arange(990).cos()
    values = torch.cat([torch.full((10,), 1e6), settled])
    axis, words = settled_axis([values])
    assert 0.9 < axis["range"][0] < 1.1 < 1.9 < axis["range"][1] < 2.2
    assert words.startswith("10 of 1,000 values lie outside")
    axis, words = settled_axis([settled])
    assert (axis["range"], words) == (pytest.approx([0.95, 2.05], abs=1e-3), "")
    log, _ = settled_axis([torch.logspace(0, 2, 100)], log=True)
    assert log["range"] == pytest.approx([-0.1, 2.1])
    assert settled_axis([torch.full((5,), math.nan)])[0]["range"] is None
    around, words = settled_axis([settled], band=torch.full((990,), 4.0))
    assert (around["range"], words) == (pytest.approx([-3.45, 6.45], abs=1e-3), ""), "in sight"


def test_density_distance_and_averages():
    two = torch.stack([torch.full((10,), 0.5), torch.full((10,), 1.5)])
    edges, colours = torch.linspace(0, 1, 11), {"a": COLOURS[0], "b": COLOURS[0]}
    drawn = named(figures.density(edges, {"a": two, "b": two[:1]}, colours, torch.ones_like))
    assert y(drawn["a"]).tolist() == pytest.approx([1.0] * 10)
    assert (drawn["a"].line.dash, drawn["b"].line.dash) == ("solid", "dash"), "of one colour"
    w2 = (torch.tensor([10, 100]), torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    figure = figures.distance({"a": w2}, colours)
    low, high, middle = map(y, figure.data)
    assert middle.tolist() == [2, 1]
    assert high.tolist() == pytest.approx([4, 1])
    assert (low > 0).all(), "the axis is logarithmic"
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    figure = figures.averages({"a": [0.1, *[0.75] * 19, 0.76], "b": [0.2]}, colours, single="b")
    assert figure.data[0].x.tolist() == list(range(1, 22))
    assert y(figure.data[0]).tolist() == pytest.approx([10, *[75] * 19, 76])
    assert figure.layout.yaxis.range == pytest.approx((74.95, 76.05))
    assert figure.layout.title.subtitle.text.startswith("2 of 22 values lie below the axis")
    figure = figures.averages({"a": [0.75, 0.76]}, colours)
    assert (figure.layout.title.subtitle.text, figure.layout.xaxis.dtick) == ("", 1)


def test_reliability_bins_have_known_answers():
    """Two seeds of the same four images are no more certain than one of them."""
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.45, 0.55]])
    labels = torch.tensor([0, 1, 1, 1])
    found = calibration(probabilities, labels, bins=10)
    assert found.n.tolist() == [1, 1, 2]
    assert found.confidence.tolist() == pytest.approx([0.55, 0.7, 0.9])
    assert found.accuracy.tolist() == pytest.approx([1, 1, 0.5])
    ends = []
    for seeds in ([probabilities], [probabilities, probabilities]):
        drawn = figures.reliability({"a": seeds}, labels, {"a": COLOURS[0]}).data
        low, high, middle = map(y, drawn[1:4])
        assert drawn[3].x.tolist() == pytest.approx([55, 70, 90])
        assert middle.tolist() == pytest.approx([100, 100, 50])
        assert drawn[4].y.tolist() == [1, 1, 2]
        ends.append(high.tolist())
        assert low[2] == pytest.approx(50 - 200 * (0.25 / 6) ** 0.5)
    assert ends[0] == ends[1]
    several = figures.reliability(
        dict.fromkeys("ab", seeds), labels, dict.fromkeys("ab", "#000000")
    )
    assert "Band" not in note_of(several)


def luminance(colour):
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_colours_can_be_read_on_both_grounds(ground):
    """Contrast of 3 for lines and 4.5 for text, as WCAG 2 asks."""
    for colour in (*COLOURS, *rung_colours(7), ground["text"], ground["soft"]):
        bright, dim = sorted((luminance(colour), luminance(ground["ground"])), reverse=True)
        needed = 3 if colour.startswith("#") and colour not in ground.values() else 4.5
        assert (bright + 0.05) / (dim + 0.05) > needed, colour
    assert len(set(rung_colours(12))) == 12


def test_every_method_has_one_look_of_its_own():
    """Everything that tables, figure 1 and the gallery draw; one method, one colour."""
    titles = [line.title for line in (*TABLE1.lines, *TABLE3.lines)]
    labels = [label_of(config) for config in figure1_recipes().values()]
    assert all(look(name) for name in (*titles, *labels, *METHODS, *MORE))
    one_colour = (
        ("reSGLD", "reSGLD, F=1", "reSGHMC", "tuned", "corrected"),
        ("SGLD", "SGHMC", "one"),
        ("naive reSGLD", "naive"),
        ("no swaps", "no swaps, both rungs", "independent", "pooled", "best"),
        ("reSGHMC, both rungs",),
        ("M-SGD", "supervised only", "ensemble"),
        ("full",),
    )
    for first, *others in one_colour:
        assert {look(name) for name in others} <= {look(first)}
    assert len({look(first).color for first, *_ in one_colour}) == len(one_colour)


def test_pictures_are_written_twice_and_are_the_same_again(tmp_path):
    """The SVG has no date, few digits, and text as text; axes without data are not drawn."""
    for name in ("a", "b"):
        with panels(tmp_path / f"{name}.png", 1, 2, (4, 2)) as (_, ((axis, blank),)):
            axis.plot([0.0, 1 / 3, 1.0], [1.0, 2 / 3, 50.0], **look("reSGHMC").line)
            axis.set_title("A title, 0.125 wide")
            log_axis(axis)
        assert (axis.axison, blank.axison) == (True, False)
        assert [text.get_text() for text in axis.get_yticklabels()][1:3] == ["1", "10"]
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text()
    assert ">A title, 0.125 wide</text>" in svg
    assert "dc:date" not in svg
    assert not re.search(r"(?m)^L .*\.\d{3}", svg)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_names_are_text():
    """Plotly reads some HTML in names, titles and texts."""
    colours, probabilities = {HOSTILE: COLOURS[0]}, torch.eye(4)
    drawn = (
        figures.averages({HOSTILE: [0.5, 0.6]}, colours),
        figures.reliability({HOSTILE: [probabilities]}, torch.arange(4), colours),
        figures.distance({HOSTILE: (torch.tensor([1, 2]), torch.ones(2, 2))}, colours),
        figures.energies(history(), {"seed 0": 0, HOSTILE: 1}),
        figures.paths(history(), of=HOSTILE),
    )
    for figure in drawn:
        text = figure.to_json()
        assert "&lt;b&gt;" in text or "\\u0026lt;b\\u0026gt;" in text
        assert not re.search(r"<(?!br>|extra>|/extra>)|\\u003c(?!br|extra|/extra)", text)


def test_what_cannot_be_drawn_is_said(monkeypatch):
    alone = history(rungs=1, swaps=())
    with pytest.raises(InvalidArgumentError, match="one rung makes no swaps"):
        figures.noise(alone)
    figures.energies(alone)
    with pytest.raises(InvalidArgumentError, match="labels"):
        figures.reliability({"a": [torch.rand(4, 2)]}, torch.zeros(3), {"a": COLOURS[0]})
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingDependencyError, match=r"torchrex\[report\]") as caught:
        figures.energies(alone)
    assert "\n" not in str(caught.value)
