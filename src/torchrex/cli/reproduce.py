"""`torchrex reproduce`: run what is missing, then draw and print."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from torchrex.errors import MissingDependencyError, RecipeError, RunFolderError
from torchrex.experiments.config import dumps, override
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.groups import Group, group
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.recipes import Config
from torchrex.experiments.runner import RunFolder, same_config
from torchrex.report import digits, figure1

RECIPES: dict[str, Callable[[], Mapping[str, Config]]] = {"figure1": figure1_recipes, "digits": digits_recipes}
DEFAULT_SEEDS = {"figure1": 1, "digits": 5}
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
    run_them: RunThem,
    console: Console,
) -> None:
    """Run the missing recipes for every seed, then write pictures, tables and numbers beside the run folders."""
    if what not in RECIPES:
        near = difflib.get_close_matches(what, RECIPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"cannot reproduce {what!r}, only {', '.join(RECIPES)}{hint}")
    known = RECIPES[what]()
    chosen = {name: override(config, assignments) for name, config in known.items() if only in name}
    if not chosen:
        raise RecipeError(f"no recipe of {what} has {only!r} in its name; they are {', '.join(known)}")
    each = list(range(seed, seed + (DEFAULT_SEEDS[what] if seeds is None else seeds)))
    folders = run_missing(chosen, each, out, overwrite=overwrite, run_them=run_them, console=console)
    name = f"{what}-{only.replace('/', '-')}" if only else what  # a part does not replace the whole
    report = {"figure1": report_figure1, "digits": report_digits}[what]
    report(chosen, folders, each, out / name, console)


def run_missing(
    configs: Mapping[str, Config], seeds: Sequence[int], out: Path, *, overwrite: bool, run_them: RunThem, console: Console
) -> dict[str, list[RunFolder]]:
    """All run folders by recipe, those that were not there just made."""
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
    for each in group(todo, out, overwrite=overwrite):
        for (config, seed), folder in zip(each.jobs, run_them(each), strict=True):
            result = folder.result or {}
            told = f"{result['wall_seconds']:.1f} s" if result["status"] == "finished" else result.get("error", result["status"])
            console.print(f"{config.recipe}, seed {seed}: {told}", soft_wrap=True, highlight=False)
    if not todo:
        console.print(f"all {len(configs) * len(seeds)} runs are there already; nothing was run again", highlight=False)
    return folders


def report_figure1(
    configs: Mapping[str, Any], folders: Mapping[str, list[RunFolder]], seeds: Sequence[int], path: Path, console: Console
) -> None:
    runs = {name: (configs[name], folders[name]) for name in configs}
    rows = figure1.rows(runs)
    write_numbers(rows, folders, seeds, figure1.as_markdown(rows), path)
    console.print(figure1.as_table(rows))
    with_picture(path, console, lambda picture: figure1.draw(runs, picture))
    console.print(f"numbers: {path}.json", soft_wrap=True)


def report_digits(
    configs: Mapping[str, Any], folders: Mapping[str, list[RunFolder]], seeds: Sequence[int], path: Path, console: Console
) -> None:
    rows = digits.rows(folders)
    write_numbers(rows, folders, seeds, digits.as_markdown(rows), path)
    console.print(digits.as_table(rows))
    console.print("In brackets the standard error over seeds; 500 held-out images.", highlight=False)
    shown = next((name for name in ("digits/resghmc", *configs) if name in configs), "")
    config, folder = configs[shown], folders[shown][0]
    title = f"{shown}, seed {seeds[0]}: energies, standings and swaps"

    def draw(picture: Path) -> None:
        digits.draw(folder.trace(), picture, steps_per_epoch=config.steps_per_epoch, title=title)

    with_picture(path, console, draw)
    console.print(f"numbers: {path}.json", soft_wrap=True)


def write_numbers(rows: Any, folders: Mapping[str, list[RunFolder]], seeds: Sequence[int], markdown: str, path: Path) -> None:
    """PATH.json and PATH.md."""
    last = next(folder.result or {} for each in reversed(list(folders.values())) for folder in each)
    numbers = {"rows": rows, "seeds": list(seeds), **{key: last[key] for key in ("date", "device", "versions")}}
    path.with_name(f"{path.name}.json").write_text(dumps(numbers))
    path.with_name(f"{path.name}.md").write_text(markdown)


def with_picture(path: Path, console: Console, draw: Callable[[Path], None]) -> None:
    try:
        draw(path.with_name(f"{path.name}.png"))
        console.print(f"picture: {path}.png", soft_wrap=True)
    except MissingDependencyError as missing:
        console.print(f"no picture: {missing}", soft_wrap=True, markup=False)
