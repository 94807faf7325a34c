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
from torchrex.experiments.run_folder import RunFolder
from torchrex.report import (
    digits,
    figure1,
    figure2,
    gan,
    gan_figure,
    gan_pictures,
    gan_tables,
    image_pictures,
    image_tables,
    images,
)


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
    """Table 1 or 2 from all runs of the chosen recipes that are there, whatever their seeds."""
    table = images.tabulate(what, out, chosen)
    require_runs(what, table.cells, table.unfinished, out)
    write_numbers(table.as_numbers(), image_tables.as_markdown(what, table), path)
    shown, heads = image_tables.as_table(table, console)
    said = [
        image_tables.SWAPS_HEAD,
        *image_tables.swap_lines(table),
        *image_tables.notes(table, heads),
    ]
    said += ["not finished: " + ", ".join(table.unfinished)] if table.unfinished else []
    tell(
        shown,
        said,
        "all columns",
        path,
        console,
        lambda picture: image_pictures.draw_cells(table.cells, picture),
    )


def report_table3(
    what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console
) -> None:
    table = gan.tabulate(out, chosen)
    require_runs(what, table.cells, table.unfinished, out)
    write_numbers(table.as_numbers(), gan_tables.as_markdown(table), path)
    shown, heads = gan_tables.as_table(table, console)
    contributed = gan_tables.contribution_lines(table)
    said = [gan_tables.CONTRIBUTIONS_HEAD, *contributed] if contributed else []
    said += gan_tables.notes(table, heads)
    said += ["not finished: " + ", ".join(table.unfinished)] if table.unfinished else []
    tell(
        shown,
        said,
        "all columns",
        path,
        console,
        lambda picture: gan_pictures.draw_cells(table.cells, picture),
    )


def report_figure2(
    what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console
) -> None:
    figure = figure2.numbers(out, chosen)
    require_runs(what, figure["rows"], figure["unfinished"], out)
    write_numbers(figure, figure2.as_markdown(figure), path)
    said = figure2.notes(figure)
    tell(
        figure2.as_table(figure),
        said,
        "table",
        path,
        console,
        lambda picture: image_pictures.draw(figure, picture),
    )


def report_figure3(
    what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console
) -> None:
    figure = gan_figure.numbers(out, chosen)
    require_runs(what, figure["data"], figure["unfinished"], out)
    write_numbers(figure, gan_figure.as_markdown(figure), path)
    said = gan_figure.notes(figure)
    shown = gan_figure.as_table(figure, console)
    tell(
        shown,
        said,
        "all columns",
        path,
        console,
        lambda picture: gan_pictures.draw(figure, picture),
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
