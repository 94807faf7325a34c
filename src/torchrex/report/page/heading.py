"""The top of the page: how many runs and how long they took, which of them are not whole, and what
doctor thinks of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchrex.report.page.details import link_to
from torchrex.report.page.html import badge, badges, plural
from torchrex.report.page.wall_time import groups, in_words, total_seconds
from torchrex.report.runs import LoadedRun

OPEN = 8  # so many lines are shown without a click


def is_whole(run: LoadedRun) -> bool:
    return run.status == "finished" and not run.problems


def summary(
    runs: Sequence[LoadedRun],
    details: Mapping[int, Mapping[str, Any]],
    empty: Sequence[Path],
    out: Path,
) -> str:
    finished = sum(run.status == "finished" for run in runs)
    n_recipes = len({run.recipe for run in runs})
    facts = [
        (str(n), word if n == 1 else f"{word}s")
        for n, word in ((len(runs), "run"), (n_recipes, "recipe"))
    ]
    facts += [(str(finished), "finished"), (str(len(runs) - finished), "not finished")]
    facts += [(str(len(empty)), "empty")] if empty else []
    facts += [(in_words(total_seconds(runs)), "of computing")]
    tiles = "".join(f"<li><b>{escape(value)}</b> {escape(name)}</li>" for value, name in facts)
    together = [group for group in groups(runs) if len(group) > 1]
    shared = ""
    if together:
        n = sum(map(len, together))
        words = f"{n} runs trained side by side in {plural(len(together), 'group')}; the time of a group counts once."
        shared = f'<p class="note">{words}</p>'
    return (
        f'<section id="summary"><h2>Summary</h2><ul class="facts">{tiles}</ul>{shared}{_not_whole(runs, details, empty, out)}'
        f"{_doctor(runs, details)}"
        f"<noscript><p>Charts and the runs one by one need JavaScript; the tables do not.</p></noscript></section>"
    )


def _not_whole(
    runs: Sequence[LoadedRun],
    details: Mapping[int, Mapping[str, Any]],
    empty: Sequence[Path],
    out: Path,
) -> str:
    lines = []
    for k, run in enumerate(runs):
        if is_whole(run):
            continue
        words = list(run.problems) or [f"its status is {run.status!r}"]
        if isinstance((run.result or {}).get("error"), str):
            words.append(str((run.result or {})["error"]))
        inner = "".join(f"<li>{escape(word)}</li>" for word in words)
        where = escape(details[id(run)]["folder"]["text"])
        lines.append(
            f'<li><a href="#runs" data-show="{k}">{escape(run.name)}</a> {badges(run)} in {where}<ul>{inner}</ul></li>'
        )
    lines += [
        f"<li>{escape(link_to(path, out)['text'])} {badge('empty')} it holds nothing of a run</li>"
        for path in empty
    ]
    if not lines:
        return ""
    n = len(runs) + len(empty)
    how_many = (
        f"{len(lines)} of {n} folders {'is' if len(lines) == 1 else 'are'}"
        if n > 1
        else "The folder is"
    )
    opened = " open" if len(lines) <= OPEN else ""
    return (
        f'<details class="problems"{opened}><summary>{how_many} not whole: what is there is shown, tables use finished runs '
        f"alone</summary><ul>{''.join(lines)}</ul></details>"
    )


def _doctor(runs: Sequence[LoadedRun], details: Mapping[int, Mapping[str, Any]]) -> str:
    """One line; what it found stands with each run."""
    advice = [details[id(run)]["doctor"] for run in runs]
    asked = [each for each in advice if each["problems"] is not None]
    counts = [("with problems", sum(each["problems"] > 0 for each in asked))]
    counts += [
        ("with warnings alone", sum(each["problems"] == 0 < each["warnings"] for each in asked))
    ]
    counts += [("with neither", sum(each["problems"] == each["warnings"] == 0 for each in asked))]
    told = ", ".join(f"{n} {words}" for words, n in counts if n)
    line = f"Doctor looked at {plural(len(asked), 'run')}: {told}." if asked else ""
    if quick := sum(each["quick"] for each in asked):
        line += f" Of {quick} it took a quick look, without what takes seconds; `report --doctor all` does not."
    if len(asked) < len(runs):
        line += f" Of {len(runs) - len(asked)} it does not tell; `torchrex doctor DIR` does, or `report --doctor all`."
    return f'<p class="note">{escape(line.strip())}</p>'
