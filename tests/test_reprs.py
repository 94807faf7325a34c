"""Every public object prints in one line; notebooks show tables without markup from the data."""

from __future__ import annotations

from html.parser import HTMLParser

import torch

import torchrex as tr
from modules import batches, classes, cross_entropy, make_run


def objects(tmp_path):
    """One of every public class."""
    mixture = tr.GaussianMixture([0.4, 0.6], means=[-3.0, 2.0], stds=[0.7, 0.5])
    run, average, trace = make_run(), tr.PosteriorAverage(batches(2), every=5), tr.Trace()
    values = tr.PosteriorAverage(batches(2), output="values")
    outcome = tr.train(run, batches(7), 10, average=[average, values], trace=trace)
    ensemble = tr.TensorEnsemble.start(mixture, n_rungs=2)
    repeated = tr.RepeatedDraws(10)
    features = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    # fmt: off
    return [
        run, average, trace, outcome, ensemble, repeated, mixture, run.ensemble, run.exchange(),
        run.ensemble.source,
        tr.TrainingRun(run), tr.SideBySide([run]), tr.SGHMC(0.1), tr.SGLD(),
        tr.AdamStart(tr.SGHMC(0.5), 9, n_data=40), tr.AllInTurn(), tr.EvenOdd(), tr.NoSwaps(),
        tr.RandomPair(), tr.KnownVariance(), tr.RunningMean(repeated), tr.Smoothing(0.3, repeated),
        tr.PerExample(), tr.ConstantFactor(), tr.ProportionalToGap(2.0), tr.BatchVariance(),
        tr.TargetAcceptance(0.2), tr.Ladder((0.1, 0.2), 0.01), tr.GaussianPrior(25.0),
        tr.SwapBatchVariance(), tr.Tuned(tr.Ladder((0.1, 0.2), 0.01), {"swap_batch": 9}),
        tr.Gaussian(2.0), tr.StudentT(5.0), tr.Noisy(mixture, tr.Gaussian(2.0)),
        tr.LogDensity(lambda x: -x.square().sum(-1), 1), cross_entropy(),
        tr.logistic_regression(features, features[:, 0] > 0, batch_size=8),
        tr.DeviceLoader(classes(), 8), tr.Checkpoints(tmp_path / "c"),
        tr.DrawStore(tmp_path / "d", capacity=3),
        tr.sample(mixture, temperatures=(1.0, 2.0), lr=0.1, n_steps=20), tr.Observer(),
        tr.JsonLines(tmp_path / "l"), tr.TensorBoard(tmp_path / "t"), tr.LiveDisplay(),
        tr.WandB(tmp_path / "w"), tr.MLflow(tmp_path / "m"),
        tr.DensityExchange(ensemble, tr.Ladder((1.0, 2.0), 0.1)), make_run(), tr.replica_mesh(4),
        tr.MethodResult(average, 1e6), tr.compare({"one": tr.MethodResult(average, 1e6)}),
        values, values.predictive(),
    ]
    # fmt: on


NOT_MADE = {"Target", "TorchrexError", "PairedVariance"}  # abstract, an error, a function


def test_every_public_object_prints_in_one_line(tmp_path):
    found = objects(tmp_path)
    classes_of = {name for name in tr.__all__ if isinstance(getattr(tr, name), type)} - NOT_MADE
    missing = {
        name for name in classes_of if not any(isinstance(one, getattr(tr, name)) for one in found)
    }
    assert not missing, f"give one of {missing} to this test"
    for one in found:
        text = repr(one)
        assert "\n" not in text
        assert " at 0x" not in text, f"{type(one).__name__} has no repr of its own: {text}"
        assert len(text) < 700


def some_draws():
    target = tr.LogDensity(lambda x: -x.square().sum(-1), 1)
    return tr.sample(target, temperatures=(1.0, 2.0), lr=0.1, n_steps=20)


class Cells(HTMLParser):
    """The texts of table cells, and a stack that must end empty."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def cells_of(one):
    parser = Cells()
    parser.feed(one._repr_html_())
    parser.close()
    assert parser.open == []
    tags = "div p b table thead tbody tr th td details summary code"
    assert parser.tags <= set(tags.split())
    return parser.cells


def test_tables_in_notebooks():
    ladder = tr.Ladder((0.5, 1.0), (1e-3, 2e-3), anneal=tr.schedules.geometric(0.5))
    run, trace = make_run(ladder=ladder), tr.Trace()
    average = tr.PosteriorAverage(batches(2), every=5, rungs=(0, 1))
    for empty in (average, trace):
        assert cells_of(empty) == []
    tr.train(run, batches(7), 10, average=average, trace=trace)
    assert cells_of(ladder) == ["rung", "temperature", "lr", "0", "0.5", "0.001", "1", "1", "0.002"]
    assert cells_of(run)[4:6] == [f"{0.5 * 0.5**10:g}", "0.001"]  # as it is now
    accepted, proposed = trace.tensors()["accepted"].item(), trace.tensors()["proposed"].item()
    assert cells_of(trace)[5:8] == ["0 – 1", str(accepted), str(proposed)]
    assert cells_of(average)[5:7] == ["0", f"{average.metrics(0)['accuracy']:.4g}"]
    assert cells_of(average)[15:17] == ["all pooled", f"{average.metrics(None)['accuracy']:.4g}"]
    assert cells_of(tr.PosteriorAverage([x for x, _ in batches(2)])) == []  # no labels
    draws = some_draws()
    assert cells_of(draws)[6] == f"{float(draws.mean()[0]):.4g}"
    assert cells_of(run.exchange())[9:12] == ["0 – 1", str(accepted), str(proposed)]


def test_what_is_zero_or_one_is_not_said():
    run, display = make_run(), tr.LiveDisplay()
    assert "step" not in repr(display)
    assert "step 0 of 9" in repr(tr.LiveDisplay("t", 9))
    every = tr.PosteriorAverage(batches(2))
    some = tr.PosteriorAverage(batches(2), every=5, burn_in=1000)
    tr.train(run, batches(7), 2, average=[every, some], trace=(trace := tr.Trace()))
    assert "2 draws, at every step</p>" in every._repr_html_()
    assert "0 draws, one every 5 steps after 1,000</p>" in some._repr_html_()
    assert "2 steps, all kept</p>" in trace._repr_html_()
    assert "0 steps, one in 3 kept</p>" in tr.Trace(3)._repr_html_()


def test_tables_hold_no_colours_and_nothing_in_them_is_markup():
    """So they are readable in a dark notebook, and safe."""
    draws = some_draws()
    draws.status, draws.settings = "<b>&", {"<script>": "x"}
    text = draws._repr_html_()
    assert "color" not in text
    assert "background" not in text
    assert "&lt;b&gt;&amp;" in text
    assert "<script>" not in text


def test_a_summary_is_text_in_a_notebook_too(monkeypatch):
    """Where rich finds a notebook it would also display what it captures, as an empty cell."""
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *arguments: shown.append(arguments))
    mixture = tr.GaussianMixture([1.0], means=[0.0], stds=[1.0])
    draws = tr.sample(mixture, temperatures=(1.0,), lr=0.1, n_steps=40, n_runs=2)
    assert "se of mean" in draws.summary()
    assert "R-hat" in tr.diagnostics.convergence(draws).summary()
    assert shown == []
