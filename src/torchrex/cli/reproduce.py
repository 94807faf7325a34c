"""`torchrex reproduce`: run what is missing, then draw and print."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from torchrex.durable import replace_file
from torchrex.errors import ConfigError, MissingDependencyError, NonFiniteEnergyError, RecipeError, RunFolderError
from torchrex.experiments.config import dumps, override
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.groups import Group, group
from torchrex.experiments.image_recipes import table1_recipes, table2_recipes
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.recipes import Config
from torchrex.experiments.run_folder import RunFolder, same_config
from torchrex.report import digits, figure1, figure2, image_pictures, image_tables, images

RECIPES: dict[str, Callable[[], Mapping[str, Config]]] = {
    "figure1": figure1_recipes,
    "digits": digits_recipes,
    "table1": table1_recipes,
    "table2": table2_recipes,
    "figure2": figure2.figure_recipes,
}
OF_IMAGES = ("table1", "table2", "figure2")
DEFAULT_SEEDS = {"digits": 5}  # 1 of the others
RunThem = Callable[[Group], list[RunFolder]]


def reproduce_it(
    what: str,
    assignments: Sequence[str],
    seed: int,
    seeds: int | None,
    only: str,
    out: Path,
    *,
    overwrite: bool,
    rebuild: bool = False,
    run_them: RunThem,
    console: Console,
) -> None:
    """Run the missing recipes for every seed, then write pictures, tables and numbers beside the run folders.

    With `rebuild` nothing is run, and the runs below `out` are taken as they are.
    """
    if what not in RECIPES:
        near = difflib.get_close_matches(what, RECIPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"cannot reproduce {what!r}, only {', '.join(RECIPES)}{hint}")
    if rebuild:
        require_nothing_to_run(what, assignments, seeds, overwrite=overwrite)
    known = RECIPES[what]()
    chosen = {name: override(config, assignments) for name, config in known.items() if matches(only, name)}
    if not chosen:
        raise RecipeError(f"no recipe of {what} has {only!r} in its name; they are {', '.join(known)}")
    name = f"{what}-{only.replace('/', '-')}" if only else what  # a part does not replace the whole
    each = list(range(seed, seed + (DEFAULT_SEEDS.get(what, 1) if seeds is None else seeds)))
    if what in OF_IMAGES:
        if not rebuild:
            to_run = trained_ones(chosen, only)
            run_missing(to_run, each, out, overwrite=overwrite, run_them=run_them, console=console, announce=True)
        chosen_as_known: Any = {name: known[name] for name in chosen}
        (report_figure2 if what == "figure2" else report_table)(what, chosen_as_known, out, out / name, console)
        return
    folders = run_missing(chosen, each, out, overwrite=overwrite, run_them=run_them, console=console)
    report = {"figure1": report_figure1, "digits": report_digits}[what]
    report(chosen, folders, each, out / name, console)


def matches(only: str, name: str) -> bool:
    """Does every part of `only`, split at "/", occur in the name? Numbers are whole: cifar10 does not occur in cifar100."""

    def occurs(part: str) -> bool:
        before, after = (r"(?<!\d)" if part[0].isdigit() else ""), (r"(?!\d)" if part[-1].isdigit() else "")
        return re.search(before + re.escape(part) + after, name) is not None

    return all(occurs(part) for part in only.split("/") if part)


def require_nothing_to_run(what: str, assignments: Sequence[str], seeds: int | None, *, overwrite: bool) -> None:
    """`--rebuild` beside something that is meant for runs is a misunderstanding."""
    if what not in OF_IMAGES:
        raise ConfigError(f"--rebuild is for {', '.join(OF_IMAGES)}; without it {what} runs only what is not there yet")
    for option, given in (("--set", bool(assignments)), ("--seeds", seeds is not None), ("--overwrite", overwrite)):
        if given:
            raise ConfigError(f"--rebuild runs nothing and takes the runs as they are; leave out {option}, or --rebuild")


def trained_ones(chosen: Mapping[str, Config], only: str) -> dict[str, Config]:
    """Without the recipes whose run is that of another one: SGHMC, which is rung 0 of the pair without swaps, unless `only` names
    it, and M-SGD of the clean family where that of icml2020 is run.
    """
    named = "sghmc" in only.split("/")
    return {
        name: config
        for name, config in chosen.items()
        if not (name.endswith("-sghmc") and not named)
        and not (name.endswith("-msgd") and name.startswith("clean/") and name.replace("clean/", "icml2020/") in chosen)
    }


def run_missing(
    configs: Mapping[str, Config],
    seeds: Sequence[int],
    out: Path,
    *,
    overwrite: bool,
    run_them: RunThem,
    console: Console,
    announce: bool = False,
) -> dict[str, list[RunFolder]]:
    """All run folders by recipe, those that were not there just made. `announce` says beforehand how much there is to do."""
    todo, folders = [], {}
    for name, config in configs.items():
        folders[name] = [RunFolder.of(out, name, seed) for seed in seeds]
        for seed, folder in zip(seeds, folders[name], strict=True):
            if not overwrite and folder.config is not None and not same_config(folder, config):
                state = "a finished" if folder.finished else "an unfinished"
                raise RunFolderError(
                    f"{folder.path} holds {state} run with other settings; choose another --out, or add --overwrite"
                )
            if overwrite or not folder.finished:
                todo.append((config, seed))
    groups = group(todo, out, overwrite=overwrite)
    if todo and announce:
        console.print(f"to run: {_some(len(todo), 'run')} in {_some(len(groups), 'group')} side by side", highlight=False)
    for each in groups:
        try:
            done = run_them(each)
        except NonFiniteEnergyError:
            if not announce:
                raise
            done = [RunFolder.of(out, config.recipe, seed) for config, seed in each.jobs]  # a table is made of what is finished
        for (config, seed), folder in zip(each.jobs, done, strict=True):
            result = folder.result or {}
            told = f"{result['wall_seconds']:.1f} s" if result["status"] == "finished" else result.get("error", result["status"])
            console.print(f"{config.recipe}, seed {seed}: {told}", soft_wrap=True, highlight=False)
    if not todo:
        console.print(f"all {len(configs) * len(seeds)} runs are there already; nothing was run again", highlight=False)
    return folders


def _some(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"


def report_figure1(
    configs: Mapping[str, Any], folders: Mapping[str, list[RunFolder]], seeds: Sequence[int], path: Path, console: Console
) -> None:
    runs = {name: (configs[name], folders[name]) for name in configs}
    rows = figure1.rows(runs)
    write_numbers(with_origin(rows, folders, seeds), figure1.as_markdown(rows), path)
    console.print(figure1.as_table(rows))
    with_picture(path, console, lambda picture: figure1.draw(runs, picture))
    console.print(f"numbers: {path}.json", soft_wrap=True)


def report_digits(
    configs: Mapping[str, Any], folders: Mapping[str, list[RunFolder]], seeds: Sequence[int], path: Path, console: Console
) -> None:
    rows = digits.rows(folders)
    write_numbers(with_origin(rows, folders, seeds), digits.as_markdown(rows), path)
    console.print(digits.as_table(rows))
    console.print("In brackets the standard error over seeds; 500 held-out images.", highlight=False)
    shown = next((name for name in ("digits/resghmc", *configs) if name in configs), "")
    config, folder = configs[shown], folders[shown][0]
    title = f"{shown}, seed {seeds[0]}: energies, standings and swaps"

    def draw(picture: Path) -> None:
        digits.draw(folder.trace(), picture, steps_per_epoch=config.steps_per_epoch, title=title)

    with_picture(path, console, draw)
    console.print(f"numbers: {path}.json", soft_wrap=True)


def report_table(what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console) -> None:
    """Table 1 or 2 from all runs of the chosen recipes that are there, whatever their seeds."""
    table = images.tabulate(what, out, chosen)
    require_runs(what, table.cells, table.unfinished, out)
    write_numbers(table.as_numbers(), image_tables.as_markdown(what, table), path)
    console.print(image_tables.as_table(table, console))
    told = [image_tables.SWAPS_HEAD, *image_tables.swap_lines(table), *image_tables.notes(table)]
    for words in (*told, *(["not finished: " + ", ".join(table.unfinished)] if table.unfinished else [])):
        console.print(words, highlight=False, markup=False)
    with_picture(path, console, lambda picture: image_pictures.draw_cells(table.cells, picture))
    console.print(f"all columns: {path}.md, numbers: {path}.json", soft_wrap=True, highlight=False)


def report_figure2(what: str, chosen: Mapping[str, Any], out: Path, path: Path, console: Console) -> None:
    figure = figure2.numbers(out, chosen)
    require_runs(what, figure["data"], figure["unfinished"], out)
    write_numbers(figure, figure2.as_markdown(figure), path)
    console.print(figure2.as_table(figure))
    for words in figure2.notes(figure):
        console.print(words, highlight=False, markup=False)
    with_picture(path, console, lambda picture: image_pictures.draw(figure, picture))
    console.print(f"table: {path}.md, numbers: {path}.json", soft_wrap=True, highlight=False)


def require_runs(what: str, found: object, unfinished: Sequence[str], out: Path) -> None:
    if not found:
        but = f" (but {len(unfinished)} unfinished)" if unfinished else ""
        raise RunFolderError(f"there is no finished run of {what} below {out}{but}; give the folder of the runs with --out")


def with_origin(rows: Any, folders: Mapping[str, list[RunFolder]], seeds: Sequence[int]) -> dict[str, Any]:
    """Rows, and where and when the last run behind them was made."""
    last = next(folder.result or {} for each in reversed(list(folders.values())) for folder in each)
    return {"rows": rows, "seeds": list(seeds), **{key: last[key] for key in ("date", "device", "versions")}}


def write_numbers(numbers: Mapping[str, Any], markdown: str, path: Path) -> None:
    """PATH.json and PATH.md."""
    try:
        replace_file(path.with_name(f"{path.name}.json"), dumps(numbers).encode())
        replace_file(path.with_name(f"{path.name}.md"), markdown.encode())
    except OSError as failure:
        raise RunFolderError(f"cannot write {path}.json and .md ({failure.strerror}); choose another --out") from None


def with_picture(path: Path, console: Console, draw: Callable[[Path], None]) -> None:
    try:
        draw(path.with_name(f"{path.name}.png"))
        console.print(f"picture: {path}.png", soft_wrap=True)
    except MissingDependencyError as missing:
        console.print(f"no picture: {missing}", soft_wrap=True, markup=False)
