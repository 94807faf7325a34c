"""What `torchrex reproduce` makes of runs: tables on the terminal, and picture, page and numbers
beside the run folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torchrex.durable import replace_file
from torchrex.errors import MissingDependencyError, RunFolderError
from torchrex.experiments.config import dumps
from torchrex.experiments.gan import TABLE3
from torchrex.experiments.images import TABLE1, TABLE2
from torchrex.experiments.run_folder import RunFolder
from torchrex.report import digits, figure1, figure2, figure3, tables

TABLES = {"table1": TABLE1, "table2": TABLE2, "table3": TABLE3}
FIGURES: dict[str, Any] = {"figure2": figure2, "figure3": figure3}


def report_figure1(
    configs: Mapping[str, Any],
    folders: Mapping[str, list[RunFolder]],
    seeds: Sequence[int],
    path: Path,
    console: Console,
) -> None:
    runs = {name: (configs[name], folders[name]) for name in configs}
    rows = figure1.rows(runs)
    write_numbers(with_origin(rows, folders, seeds), figure1.as_markdown(rows), path)
    console.print(figure1.as_table(rows))
    with_picture(path, console, lambda picture: figure1.draw(runs, picture))
    console.print(f"numbers: {path}.json", soft_wrap=True)


def report_digits(
    configs: Mapping[str, Any],
    folders: Mapping[str, list[RunFolder]],
    seeds: Sequence[int],
    path: Path,
    console: Console,
) -> None:
    rows = digits.rows(folders)
    write_numbers(with_origin(rows, folders, seeds), digits.as_markdown(rows), path)
    console.print(digits.as_table(rows))
    console.print(
        "In brackets the standard error over seeds; 500 held-out images.", highlight=False
    )
    shown = next((name for name in ("digits/resghmc", *configs) if name in configs), "")
    config, folder = configs[shown], folders[shown][0]
    title = f"{shown}, seed {seeds[0]}: energies, standings and swaps"

    def draw(picture: Path) -> None:
        digits.draw(folder.trace(), picture, steps_per_epoch=config.steps_per_epoch, title=title)

    with_picture(path, console, draw)
    console.print(f"numbers: {path}.json", soft_wrap=True)


def report_table(
    what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console
) -> None:
    """A table from all runs of the chosen recipes that are there, whatever their seeds."""
    table = tables.build(TABLES[what], out, chosen)
    require_runs(what, table.cells, table.unfinished, out)
    write_numbers(table.as_numbers(), tables.as_markdown(table), path)
    said = tables.difference_lines(table) + tables.notes(table)
    shown = tables.as_table(table, console)
    tell(shown, said, "all columns", path, console, lambda picture: tables.draw(table, picture))


def report_figure(
    what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console
) -> None:
    figure = FIGURES[what]
    found = figure.numbers(out, chosen)
    require_runs(
        what, found["rows"] if "rows" in found else found["data"], found["unfinished"], out
    )
    write_numbers(found, figure.as_markdown(found), path)
    shown = figure.as_table(found, console)
    tell(
        shown,
        figure.notes(found),
        "table",
        path,
        console,
        lambda picture: figure.draw(found, picture),
    )


def tell(
    shown: Table,
    said: Sequence[str],
    page: str,
    path: Path,
    console: Console,
    draw: Callable[[Path], None],
) -> None:
    """The table, what is to be said of it, the picture, and where all of it is; `page` says what
    PATH.md has.
    """
    console.print(shown)
    for words in said:
        console.print(words, highlight=False, markup=False)
    with_picture(path, console, draw)
    console.print(f"{page}: {path}.md, numbers: {path}.json", soft_wrap=True, highlight=False)


def require_runs(what: str, found: object, unfinished: Sequence[str], out: Path) -> None:
    if not found:
        but = f" (but {len(unfinished)} unfinished)" if unfinished else ""
        raise RunFolderError(
            f"there is no finished run of {what} below {out}{but}; give the folder of the runs with --out"
        )


def with_origin(
    rows: Any, folders: Mapping[str, list[RunFolder]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Rows, and where and when the last run behind them was made."""
    last = next(folder.result or {} for each in reversed(list(folders.values())) for folder in each)
    return {
        "rows": rows,
        "seeds": list(seeds),
        **{key: last[key] for key in ("date", "device", "versions")},
    }


def write_numbers(numbers: Mapping[str, Any], markdown: str, path: Path) -> None:
    """PATH.json and PATH.md."""
    try:
        replace_file(path.with_name(f"{path.name}.json"), dumps(numbers).encode())
        replace_file(path.with_name(f"{path.name}.md"), markdown.encode())
    except OSError as failure:
        raise RunFolderError(
            f"cannot write {path}.json and .md ({failure.strerror}); choose another --out"
        ) from None


def with_picture(path: Path, console: Console, draw: Callable[[Path], None]) -> None:
    try:
        draw(path.with_name(f"{path.name}.png"))
        console.print(f"picture: {path}.png", soft_wrap=True)
    except MissingDependencyError as missing:
        console.print(f"no picture: {missing}", soft_wrap=True, markup=False)
