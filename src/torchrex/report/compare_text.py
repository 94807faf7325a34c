"""How comparisons are written: lines for a terminal of any width or for a pipe, Markdown, JSON. No
name is ever cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from torchrex.experiments.config import to_json
from torchrex.report.compare import LEVEL, Comparison, Row
from torchrex.report.settings_that_matter import ABSENT

COLUMNS = ("metric", "better", "first", "other", "difference", "seeds", "verdict")
GAP = "  "
MARK = "<!-- torchrex compare -->\n"  # by which a Markdown file of ours is known
LEAST_FOR_VERDICT = 12  # columns; with fewer a table is no table


def cells(row: Row, apart: Sequence[str] = ()) -> list[str]:
    """One row as text, for the columns above. Between different problems a difference means
    nothing.
    """
    error = "" if row.error is None else f" +- {row.error:.2g}"
    difference = "" if apart else f"{row.difference:+.4g}{error}"
    verdict = "" if apart else row.verdict  # the same for all, and said above
    return [
        row.metric,
        row.better,
        f"{row.first:.6g}",
        f"{row.other:.6g}",
        difference,
        str(row.n),
        verdict,
    ]


def lines(comparison: Comparison, width: int | None = None) -> list[str]:
    """The whole comparison. Within `width` columns words are wrapped; without one, as for a pipe, a
    row is a line.
    """
    head, *rest = about(comparison)
    return [
        *wrapped(head, width),
        "",
        *table(comparison, width),
        "",
        *(line for each in rest for line in wrapped(each, width)),
    ]


def table(comparison: Comparison, width: int | None = None) -> list[str]:
    """Aligned columns, the verdict wrapped. Where that is too wide, without columns that the words
    around it tell as well; and where even those are too wide, a block for each metric.
    """
    rows = [cells(row, comparison.apart) for row in comparison.rows]
    filled = [
        k for k, name in enumerate(COLUMNS[:-1]) if name == "metric" or any(row[k] for row in rows)
    ]
    for spared in ((), ("seeds",), ("seeds", "better")):
        shown = [k for k in filled if COLUMNS[k] not in spared]
        widths = [max(len(each[k]) for each in (COLUMNS, *rows)) for k in shown]
        room = None if width is None else width - sum(widths) - len(GAP) * len(widths)
        if room is None or room >= LEAST_FOR_VERDICT:
            return _aligned(rows, shown, widths, room)
    return _blocks(rows, filled, width or 0)


def _aligned(
    rows: Sequence[Sequence[str]], shown: Sequence[int], widths: Sequence[int], room: int | None
) -> list[str]:
    made = []
    told = any(row[-1] for row in rows)
    for row in (COLUMNS if told else (*COLUMNS[:-1], ""), *rows):
        start = "".join(row[k].ljust(n) + GAP for k, n in zip(shown, widths, strict=True))
        verdict = wrapped(row[-1], room)
        made += [(start + verdict[0]).rstrip(), *(" " * len(start) + more for more in verdict[1:])]
    return made


def _blocks(rows: Sequence[Sequence[str]], shown: Sequence[int], width: int) -> list[str]:
    made = []
    for row in rows:
        told = [f"{COLUMNS[k]} {row[k]}" for k in shown[1:] if row[k]]
        words = ", ".join(told) + (f": {row[-1]}" if row[-1] else "")
        made += [row[0], *(f"{GAP}{line}" for line in wrapped(words, max(1, width - len(GAP))))]
    return made


def wrapped(text: str, width: int | None) -> list[str]:
    """Lines of whole words: one that is too long stands alone and goes beyond the width."""
    if width is None:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def about(comparison: Comparison) -> list[str]:
    """Sentences around the table: what is compared, what differs in settings, what was left out,
    and the test.
    """
    first, other = comparison.first.name, comparison.other.name
    said = [f"first: {first}; other: {other}; seeds {', '.join(map(str, comparison.seeds))}"]
    if comparison.apart:
        said.append(
            f"they are not comparable: they differ in {', '.join(comparison.apart)}, so that neither is better or worse"
        )
    else:
        errors = any(row.error is not None for row in comparison.rows)
        said[0] += f"; difference = other - first{', +- its standard error' if errors else ''}"
    return [
        *said,
        *_settings(comparison),
        *(f"note: {note}" for note in comparison.notes),
        f"test: {comparison.test}",
    ]


def _settings(comparison: Comparison) -> list[str]:
    both = {key: pair for key, pair in comparison.settings.items() if ABSENT not in pair}
    told = "; ".join(f"{key}: {_shown(a)} / {_shown(b)}" for key, (a, b) in both.items())
    said = [f"settings that differ: {told}"] if told else []
    for which, k in (("first", 1), ("other", 0)):
        if alone := [key for key, pair in comparison.settings.items() if pair[k] == ABSENT]:
            said.append(f"settings that only {which} has: {', '.join(alone)}")
    if not comparison.settings_known:
        return [
            "settings are not told: config.json of one side or both is missing or damaged, so they may be different problems"
        ]
    return said or ["no setting that matters differs"]


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    parts = [MARK]
    for comparison in comparisons:
        made = [f"## {comparison.other.name} against {comparison.first.name}", ""]
        made += [f"- {line}" for line in about(comparison)]
        rows = [cells(row, comparison.apart) for row in comparison.rows]
        shown = [
            k for k, name in enumerate(COLUMNS) if name == "metric" or any(row[k] for row in rows)
        ]
        made += ["", "| " + " | ".join(COLUMNS[k] for k in shown) + " |", "|---" * len(shown) + "|"]
        made += ["| " + " | ".join(row[k] for k in shown) + " |" for row in rows]
        parts.append("\n".join(made) + "\n")
    return "\n".join(parts)


def as_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [
        {
            "first": {"recipe": each.first.name, "path": str(each.first.path)},
            "other": {"recipe": each.other.name, "path": str(each.other.path)},
            "seeds": list(each.seeds),
            "comparable": not each.apart,
            "not_comparable_because_of": list(each.apart),
            "test": {
                "kind": "paired t" if each.tested else "none",
                "two_sided": True,
                "level": LEVEL,
                "adjustment": "Holm",
                "metrics": len(each.rows),
                "words": each.test,
            },
            "settings_known": each.settings_known,
            "settings": {key: {"first": a, "other": b} for key, (a, b) in each.settings.items()},
            "notes": list(each.notes),
            "rows": [to_json(row) for row in each.rows],
        }
        for each in comparisons
    ]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
