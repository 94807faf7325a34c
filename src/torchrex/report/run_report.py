"""`run.report()` and `draws.report()`: doctor's findings as text, and in a notebook."""

from __future__ import annotations

import html
from functools import cached_property
from pathlib import Path

import torch

from torchrex import notebook
from torchrex.diagnostics import History
from torchrex.durable import replace_file
from torchrex.errors import MissingDependencyError
from torchrex.exchange import Ladder
from torchrex.posterior import Draws
from torchrex.report.doctor import as_text, diagnose
from torchrex.report.findings import Diagnosis
from torchrex.report.reader import LoadedRun
from torchrex.runs.folder import NO_FOLDER
from torchrex.runs.script import ScriptConfig

IN_MEMORY = "draws"  # the name of a run without a folder


def run_of(draws: Draws) -> LoadedRun:
    """Draws in memory as reports see a run folder. Of an annealed ladder the temperatures of the
    last step alone are known, so what needs the others is left out.
    """
    known = draws.settings
    temperatures = tuple(float(t) for t in known.get("temperatures") or ())
    factors = known.get("correction_factor") or [1.0]
    ladder = settings = history = None
    if temperatures and temperatures[0] > 0 and not known.get("annealed"):
        settings = ScriptConfig(
            IN_MEMORY,
            made_by="sample",
            n_steps=draws.n_steps,
            n_runs=draws.n_chains,
            temperatures=temperatures,
            lrs=tuple(known.get("lrs") or (0.0,) * len(temperatures)),
            sampler=known.get("sampler", ""),
            n_data=known.get("n_data"),
            batch_size=known.get("batch_size"),
            correction_factor=float(torch.tensor(factors).max()),
            swaps=bool(draws.proposed.any()),
            tempering=known.get("tempering", "posterior"),
            swap_batch=known.get("swap_batch"),
            swap_interval=known.get("swap_interval", 1),
            dim=draws.values.shape[-1],
        )
        ladder = Ladder(temperatures, settings.lrs)
        if draws.n_draws:
            factor = settings.correction_factor
            history = History.from_draws(draws, ladder, correction_factor=factor)
    return LoadedRun(
        path=NO_FOLDER.path,
        recipe=IN_MEMORY,
        seed=known.get("seed", -1),
        config={},
        result=None,
        status=draws.status,
        ladder=ladder,
        draws=draws,
        trace={},
        history=history,
        problems=(),
        settings=settings,
    )


class RunReport:
    """Findings about one run: what is wrong, what to change, and the numbers behind it."""

    def __init__(self, run: LoadedRun) -> None:
        self.run = run

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return diagnose(self.run)

    def __str__(self) -> str:
        (_, head), *findings = as_text(self.diagnosis)
        return "\n".join([head, *(f"  {severity}: {words}" for severity, words in findings)])

    __repr__ = __str__

    def page(self) -> str:
        """The page of the run, as `torchrex report` writes it."""
        from torchrex.report.page import page_of

        return page_of([self.run], title=self.run.name)

    def save(self, path: Path | str) -> None:
        """Write the page to a file."""
        replace_file(Path(path), self.page().encode())

    def _repr_html_(self) -> str:
        """The page in a frame of its own; without Plotly a table of the findings."""
        try:
            inner = html.escape(self.page())
        except MissingDependencyError as error:
            found = self.diagnosis
            rows = [(each.severity, each.title, each.words) for each in found.findings]
            table = notebook.table(("", "finding", "what it means"), rows)
            return notebook.panel("Report", f"{found.name}: {found.verdict}; {error}", table)
        return f'<iframe srcdoc="{inner}" style="width:100%;height:45em;border:0"></iframe>'
