"""The page: one file that loads nothing, with the verdict first.

Everything that comes from a run folder is text: escaped in the HTML, and in JSON without a `<` for
Plotly. The page forbids the browser any script but its own two, by their hashes, and any picture
that is not in the page. Texts and tables need no script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from html import escape, unescape
from pathlib import Path
from typing import Any, NamedTuple

import torchrex
from torchrex.durable import one_line, printable, replace_file, writing
from torchrex.errors import RunFolderError, import_extra
from torchrex.report import doctor
from torchrex.report.figures import DARK, LIGHT, template
from torchrex.report.findings import number, several, tally
from torchrex.report.page.details import Picture, details_of, pictures_of, swaps_of, within_the_page
from torchrex.report.page.drawn import Drawn, of_answers, of_ladder
from torchrex.report.page.markup import Cell, badge, badges, items, link_to, table
from torchrex.report.page.rows import (
    Family,
    Group,
    cell,
    columns,
    groups,
    label,
    paper_of,
    settings_that_differ,
)
from torchrex.report.plots import COLOURS
from torchrex.report.reader import LoadedRun, NotRead, read_tree, require_ours
from torchrex.report.tables import value_and_error

MARK = "<!-- torchrex report -->"
HERE = Path(__file__).parent
SECONDS = 8.0  # for doctor, all runs together; importing ArviZ takes half of it on a busy machine
OPEN = 8  # so many lines are shown without a click
FIRST_SHOWN = 1  # families that are open at the start
MOST_SETTINGS = 12  # columns of the table of settings
OF_LADDER = ("swap", "rung", "noise", "ladder", "round trip", "sigma2", "F above", "correction")
PAGE = """<!doctype html>{mark}
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style></head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>Written by torchrex {version} from the run folders named above.</footer>
<script type="application/json" id="templates">{templates}</script>
<script type="text/plain" id="plotly">{plotly}</script>
<script>{script}</script>
</body></html>
"""

Runs = Sequence[LoadedRun]
# "verdict"; "quick": something was left out; "problems" and "warnings": how many, None if not
# known; "findings": severity, title, words
Advice = dict[str, Any]


class Written(NamedTuple):
    """What is on a page."""

    runs: int
    not_whole: int  # of those runs
    empty: int  # folders that hold nothing of a run
    unreadable: int  # folders that cannot be read


def write_page(
    roots: Sequence[Path], out: Path, *, title: str = "", doctor_seconds: float = SECONDS
) -> Written:
    """Read all runs at or below `roots` and write the page; doctor begins no run after
    `doctor_seconds`.
    """
    if os.path.isdir(out):
        raise RunFolderError(f"--out {out} is a folder; give a file, such as {out / 'page.html'}")
    require_ours(out, [MARK], "report", within=200)
    places = [Path(os.path.realpath(root)) for root in roots]
    found: dict[Path, LoadedRun | NotRead] = {}
    for place in places:
        nothing = NotRead(place, "empty", "it holds nothing of a run")
        for each in list(read_tree(place)) or [nothing]:
            found.setdefault(each.path, each)
    loaded = [each for each in found.values() if isinstance(each, LoadedRun)]
    others = [each for each in found.values() if isinstance(each, NotRead)]
    if not loaded:
        others.sort(key=lambda each: each.status != "unreadable")
        first = [f" (such as {each.path}: {each.words})" for each in others]
        named = f"there is no run in {', '.join(map(str, roots))}{''.join(first[:1])}"
        raise RunFolderError(f"{one_line(named)}; give a folder with RECIPE/seed=S")
    title = printable(title or f"torchrex: {', '.join(place.name for place in places)}")
    text = page_of(loaded, out, title=title, others=others, doctor_seconds=doctor_seconds)
    with writing(out, RunFolderError, "choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, text.encode())
    statuses = Counter(each.status for each in others)
    not_whole = sum(not is_complete(run) for run in loaded)
    return Written(len(loaded), not_whole, statuses["empty"], statuses["unreadable"])


def page_of(
    runs: Runs,
    out: Path | None = None,
    *,
    title: str = "",
    others: Sequence[NotRead] = (),
    doctor_seconds: float = SECONDS,
) -> str:
    """The page as text, of one run or many. Links to run folders are relative to `out`."""
    pictures = {id(run): pictures_of(run) for run in runs}
    within_the_page([each for each, _ in pictures.values()])
    advice = advice_for(runs, doctor_seconds)
    page = _Page(runs, others, out or Path("page.html"), advice, pictures)
    compressed, its_hash = _plotly()
    colours = "".join(f".m{k}{{background:{colour}}}" for k, colour in enumerate(COLOURS))
    style = (HERE / "page.css").read_text() + colours
    script = (HERE / "page.js").read_text()
    # Plotly adds an empty style element, which it fills by rules, and style attributes.
    ours = f"style-src '{_hash(style)}' '{_hash('')}'; style-src-attr 'unsafe-inline'"
    ours += f"; script-src '{_hash(script)}' '{its_hash}'; img-src data:"
    return PAGE.format(
        mark=MARK,
        policy=f"default-src 'none'; {ours}; base-uri 'none'; form-action 'none'",
        title=escape(printable(title or f"torchrex: {', '.join({run.name: 0 for run in runs})}")),
        style=style,
        body=page.body(),
        version=escape(torchrex.__version__),
        templates=_json({"light": template(LIGHT), "dark": template(DARK)}),
        plotly=compressed,
        script=script,
    )


@lru_cache(1)
def _plotly() -> tuple[str, str]:
    """plotly.js, compressed for the page, and its hash."""
    source = import_extra("plotly.offline", "report").get_plotlyjs()
    packed = gzip.compress(source.encode(), 9, mtime=0)
    return base64.b64encode(packed).decode(), _hash(source)


def _json(value: Any) -> str:
    """JSON that cannot end its element: < > & are only inside strings."""
    text = str(import_extra("plotly.io", "report").to_json(value, validate=False))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def is_complete(run: LoadedRun) -> bool:
    return run.status == "finished" and not run.problems


# What doctor says


def advice_for(runs: Runs, seconds: float = SECONDS) -> dict[int, Advice]:
    """By `id` of the run. Small runs come first, and none is begun after so many seconds."""
    found, until = {}, time.monotonic() + seconds
    for run in sorted(runs, key=lambda run: 0 if run.draws is None else run.draws.values.numel()):
        if time.monotonic() < until:
            found[id(run)] = advice_of(run, quick=math.isfinite(seconds))
        else:
            words = "doctor was not asked, to keep this page quick; use `report --doctor all`"
            found[id(run)] = unknown(words)
    return found


def advice_of(run: LoadedRun, *, quick: bool = False) -> Advice:
    """All findings about one run, without what the page says of its files anyway."""
    try:
        diagnosis = doctor.diagnose(run, quick=quick)
    except Exception as error:  # whatever it is, the page goes on
        return unknown(f"doctor failed on this run ({type(error).__name__}: {error})")
    new = [each for each in diagnosis.findings if not each.words.startswith(run.problems)]
    return {
        "verdict": diagnosis.verdict,
        "quick": diagnosis.quick,
        "findings": [[each.severity, each.title, each.words] for each in new],
        "problems": len(diagnosis.of("problem")),
        "warnings": len(diagnosis.of("warning")),
    }


def unknown(why: str) -> Advice:
    return {"verdict": why, "quick": False, "problems": None, "warnings": None, "findings": []}


# The parts of the page


@dataclass(frozen=True)
class _Page:
    runs: Runs
    others: Sequence[NotRead]
    out: Path
    advice: Mapping[int, Advice]  # by `id` of the run
    pictures: Mapping[int, tuple[list[Picture], str]]

    @cached_property
    def groups(self) -> list[Group]:
        return groups(self.runs, self.others)

    @cached_property
    def families(self) -> list[Family]:
        return [family for group in self.groups for family in group.families]

    @cached_property
    def number(self) -> dict[int, int]:
        """Of runs and families in the ids of the page, by their `id`."""
        both = (self.runs, self.families)
        return {id(each): k for every in both for k, each in enumerate(every)}

    def body(self) -> str:
        tables = "".join(map(self._group_table, self.groups))
        swapped = [
            each for each in self.families if each.ladder and each.ladder.history.accepted.any()
        ]
        first = (swapped or self.families)[:FIRST_SHOWN]
        parts = [self._verdict(), f'<section id="families">{tables}</section>']
        for group in self.groups:
            opened = [family for family in group.families if family in first]
            others = [family for family in group.families if family not in first]
            parts += [self._family(family, True) for family in opened]
            parts += [self._compared(group), *(self._family(family, False) for family in others)]
        return "\n".join(parts)

    def _verdict(self) -> str:
        """How many runs there are, what doctor found, and what is not complete."""
        runs, n = self.runs, len(self.runs)
        finished = sum(run.status == "finished" for run in runs)
        facts: dict[str, Any] = {
            "run" if n == 1 else "runs": n,
            "family" if len(self.families) == 1 else "families": len(self.families),
            "finished": finished,
            **({"not finished": n - finished} if finished < n else {}),
            **Counter(each.status for each in self.others),
            "of computing (runs that train together count once)": in_words(total_seconds(runs)),
        }
        tiles = "".join(f"<li><b>{value}</b> {name}</li>" for name, value in facts.items())
        lines = self._found()
        found = f'<ul class="verdict">{"".join(lines[:OPEN])}</ul>'
        if len(lines) > OPEN:
            found += f"<details><summary>{OPEN} of {len(lines)} shown</summary>"
            found += f"<ul>{''.join(lines[OPEN:])}</ul></details>"
        return (
            f'<section id="verdict"><h2>Verdict</h2><p>{escape(self._doctor())}</p>{found}'
            f'<ul class="facts">{tiles}</ul>{self._not_complete()}'
            "<noscript><p>Figures need JavaScript.</p></noscript></section>"
        )

    def _found(self) -> list[str]:
        """Problems and warnings, each once, with links to the families and runs that have it."""
        found: dict[tuple[str, str], list[tuple[LoadedRun, str]]] = {}
        for run in self.runs:
            for severity, title, words in self.advice[id(run)]["findings"]:
                if severity in ("problem", "warning"):
                    found.setdefault((severity, title), []).append((run, words))
        ranked = sorted(found.items(), key=lambda each: (each[0][0], -len(each[1])))
        lines = []
        for (severity, title), of_runs in ranked:
            has = {id(run) for run, _ in of_runs}
            where = []
            for family in self.families:
                there = [run for run in family.runs if id(run) in has]
                if there:
                    ids = {self.number[id(run)]: max(run.seed, 0) for run in there}
                    seeds = "".join(f' <a href="#run-{k}">{seed}</a>' for k, seed in ids.items())
                    ladder = any(word in title for word in OF_LADDER) and family.ladder is not None
                    of = f"{'ladder' if ladder else 'family'}-{self.number[id(family)]}"
                    name = escape(family.title)
                    where.append(f'{swatch(family)}<a href="#{of}">{name}</a> (seeds{seeds})')
            first, words = of_runs[0]
            said = f"{first.name}: {words}" if len(of_runs) > 1 else words
            places = ", ".join(where[:OPEN])
            if len(where) > OPEN:
                places += f" ({OPEN} of {len(where)} families shown)"
            lines.append(
                f"<li>{badge(severity)} <b>{escape(title)}</b>: {places}."
                f' <span class="note">{escape(said)}</span></li>'
            )
        return lines

    def _doctor(self) -> str:
        every = [self.advice[id(run)] for run in self.runs]
        asked = [each for each in every if each["problems"] is not None]
        line = f"Doctor looked at {several(len(asked), 'run')}: " if asked else ""
        line += tally([(each["problems"], each["warnings"]) for each in asked]) + "." * bool(asked)
        if quick := sum(each["quick"] for each in asked):
            line += f" It took only a quick look at {quick}; --doctor all takes a full one."
        if len(asked) < len(every):
            line += f" It did not look at {len(every) - len(asked)}; use --doctor all."
        return line.strip()

    def _not_complete(self) -> str:
        lines = []
        for run in self.runs:
            if not is_complete(run):
                error = (run.result or {}).get("error")
                words = [*(run.problems or [f"its status is {run.status!r}"]), error or ""]
                link = f'<a href="#run-{self.number[id(run)]}">{escape(run.name)}</a>'
                folder = escape(link_to(run.path, self.out)[1])
                lines.append(f"<li>{link} {badges(run)} in {folder}{items(words)}</li>")
        for each in self.others:
            name = escape(link_to(each.path, self.out)[1])
            lines.append(f"<li>{name} {badge(each.status)} {escape(each.words)}</li>")
        if not lines:
            return ""
        opened, n = " open" if len(lines) <= OPEN else "", len(self.runs) + len(self.others)
        head = f"Not complete: {len(lines)} of {n} folders; tables use finished runs."
        return (
            f'<details class="problems"{opened}><summary>{head}</summary>'
            f"<ul>{''.join(lines)}</ul></details>"
        )

    def _group_table(self, group: Group) -> str:
        """A row for every family, its numbers next to the paper's."""
        chosen, every = columns(group)
        papers = [paper_of(family.settings) for family in group.families]
        stated = {metric for paper in papers for metric in paper}
        head = ["family", "seeds"]
        for metric in chosen:
            head += [label(metric), *(["paper"] if metric in stated else [])]
        head += ["accepted, %", "noise s", "barrier", "round trips", "swaps"]
        rows: list[list[Cell]] = []
        for family, paper in zip(group.families, papers, strict=True):
            link = f'<a href="#family-{self.number[id(family)]}">{escape(family.title)}</a>'
            cells: list[Cell] = [(swatch(family) + link, family.title)]
            cells.append((escape(family.seeds), len(family.finished)))
            for metric in chosen:
                cells.append(cell(family, metric))
                if metric in stated:
                    cells.append(paper.get(metric, ("-", None)))
            rows.append([*cells, *_ladder_cells(family)])
        # The acceptance of the ladder is that of the metrics.
        twice = {"accepted, %"} if "acceptance_rate" in chosen else {""}
        kept = [k for k, name in enumerate(head) if k < 2 or any(row[k][0] for row in rows)]
        kept = [k for k in kept if head[k] not in twice]
        settings = [each.settings for each in group.families if each.settings is not None]
        notes = sorted({each.paper_note for each in settings if each.paper_numbers} - {""})
        words = (
            "Means over finished seeds; in brackets the standard error of the last digit(s), from"
            " the chains of the runs if known, else from the spread over seeds."
        )
        words += f" {len(chosen)} of {every} metrics shown." * (len(chosen) < every)
        words += f" Paper: {'; '.join(notes)}." if notes else ""
        made = table([head[k] for k in kept], [[row[k] for k in kept] for row in rows])
        return f'<h2>{escape(group.name)}</h2>{made}<p class="note">{escape(words)}</p>'

    def _compared(self, group: Group) -> str:
        """The figures of the families of a group over each other, and the settings that differ."""
        if len(group.families) < 2:
            return ""
        made = figures_html(of_answers(group.families))
        different = settings_that_differ(group)
        if different:
            names = list(different)[:MOST_SETTINGS]
            values = [different[name] for name in names]
            rows = [
                [(f"{swatch(x)}{escape(x.label)}", ""), *(_setting(y[k]) for y in values)]
                for k, x in enumerate(group.families)
            ]
            of = f"{len(names)} of {len(different)} shown" * (len(names) < len(different))
            made += f"<h4>Settings that differ</h4>{table(['family', *names], rows)}"
            made += f'<p class="note">{of}</p>' * bool(of)
        name = escape(group.name)
        return f"<section><h2>{name}: families next to each other</h2>{made}</section>"

    def _family(self, family: Family, shown: bool) -> str:
        k, ladder, drawn = self.number[id(family)], family.ladder, of_answers([family])
        swaps = ""
        if ladder is not None:
            drawn = of_ladder(ladder, family.colour) + drawn
            swaps = f'<div id="ladder-{k}">{swaps_of(ladder)}</div>'
        nothing = '<p class="note">Nothing was recorded that could be drawn.</p>'
        made = swaps + (figures_html(drawn) or nothing)
        more = ((run, id(run)) for run in family.runs)
        of = ((x, self.number[i], self.out, self.advice[i], *self.pictures[i]) for x, i in more)
        runs = "".join(details_of(*each) for each in of)
        heading = f"{swatch(family)}{escape(family.recipe)}"
        extra = family.title.removeprefix(family.short)
        return (
            f'<section><details class="family"{" open" * shown}><summary><h2>{heading}'
            f"<small>{escape(extra)}, {several(len(family.runs), 'run')}</small></h2></summary>"
            f'<div id="family-{k}">{made}<h4>Runs</h4>{runs}</div></details></section>'
        )


def _ladder_cells(family: Family) -> list[Cell]:
    """Acceptance, noise, barrier and round trips of all chains together, and counts of swaps."""
    blank: Cell = ("", None)
    swaps = [counts for run in family.finished if (counts := run.swap_counts) is not None]
    made, tested = sum(a for a, _ in swaps), sum(p for _, p in swaps)
    words = f"{made:,} of {tested:,}" if tested else "none tested"
    last: Cell = (words, made) if swaps else blank
    ladder = family.ladder
    if ladder is None or not ladder.pairs:
        return [blank, blank, blank, blank, last]
    (barrier, error), n, (trips, value) = ladder.barrier, len(ladder.pairs), ladder.trips
    s = max(pair.noise for pair in ladder.pairs)
    noise: Cell = (number(s, 3), s) if s == s else blank
    if math.isnan(barrier):
        return [blank, noise, blank, blank, last]
    rate = 100 * (1 - barrier / n)
    accepted: Cell = (value_and_error(rate, 100 * error / n), rate)
    return [accepted, noise, (value_and_error(barrier, error), barrier), (trips, value), last]


def _setting(value: Any) -> Cell:
    text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return escape(text), value if number else text


def swatch(family: Family) -> str:
    """The colour of a family, as on every figure."""
    return f'<span class="swatch m{COLOURS.index(family.colour)}"></span>'


def figures_html(drawn: Sequence[Drawn]) -> str:
    """Figures as data, which the script of the page draws; titles and notes are text."""
    made = []
    for kind, figure in drawn:
        data = figure.to_plotly_json()
        layout = data["layout"]
        del layout["template"]
        title = layout.pop("title")
        note = unescape(title.get("subtitle", {}).get("text", "").replace("<br>", " "))
        said = f'<p class="note">{escape(note)}</p>' if note else ""
        made.append(
            f'<figure data-kind="{kind}"><figcaption>{escape(unescape(title["text"]))}</figcaption>'
            f'<div class="plot"></div>{said}<script type="application/json">'
            f"{_json(data)}</script></figure>"
        )
    return f'<div class="figures">{"".join(made)}</div>' if made else ""


# Time


def clock(run: LoadedRun) -> tuple[float | None, str]:
    """Runs that trained together have one clock: the same seconds to the last digit."""
    result, settings, alone = run.result or {}, run.settings, False
    seconds = result.get("wall_seconds")
    if settings is not None:
        replicas = result.get("replicas_side_by_side", settings.n_rungs + 1)
        alone = settings.batch_key(0) is None or replicas <= settings.n_rungs
    return seconds, str(run.path) if alone or seconds is None else str(result.get("device"))


def total_seconds(runs: Runs) -> float:
    return sum(seconds or 0.0 for seconds, _ in set(map(clock, runs)))


def in_words(seconds: float) -> str:
    """`12 s`, `20.7 min`, `1.9 h`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
