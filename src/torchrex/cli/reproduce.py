"""`torchrex reproduce`: run what is missing, then draw and print."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console

from torchrex.errors import MissingDependencyError, RecipeError, RunFolderError
from torchrex.experiments.config import dumps, override
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.recipes import Config
from torchrex.experiments.runner import RunFolder, same_config
from torchrex.report import figure1

FIGURES = ("figure1",)


def reproduce_figure1(
    what: str,
    assignments: Sequence[str],
    seeds: Iterable[int],
    only: str,
    out: Path,
    *,
    overwrite: bool,
    run_one: Callable[[Config, int], RunFolder],
    console: Console,
) -> None:
    """Run the missing recipes of figure 1 for every seed, then write figure1.png, .md and .json beside the run folders."""
    if what not in FIGURES:
        near = difflib.get_close_matches(what, FIGURES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"cannot reproduce {what!r}, only {', '.join(FIGURES)}{hint}")
    chosen = {name: override(config, assignments) for name, config in figure1_recipes().items() if only in name}
    if not chosen:
        raise RecipeError(f"no recipe of figure1 has {only!r} in its name; they are {', '.join(figure1_recipes())}")
    seeds = list(seeds)
    todo, runs = [], {}
    for name, config in chosen.items():
        folders = [RunFolder.of(out, name, seed) for seed in seeds]
        runs[name] = (config, folders)
        for seed, folder in zip(seeds, folders, strict=True):
            if overwrite or not folder.finished:
                todo.append((config, seed))
            elif not same_config(folder, config):
                raise RunFolderError(
                    f"{folder.path} holds a finished run with other settings; choose another --out, or add --overwrite"
                )
    for config, seed in todo:
        folder = run_one(config, seed)
        seconds = (folder.result or {})["wall_seconds"]
        console.print(f"{config.recipe}, seed {seed}: {seconds:.1f} s", soft_wrap=True, highlight=False)
    if not todo:
        console.print(f"all {len(runs) * len(seeds)} runs are there already; nothing was run again", highlight=False)
    rows = figure1.rows(runs)
    last = next(folder.result or {} for _, folders in reversed(runs.values()) for folder in folders)
    numbers = {"rows": rows, "seeds": seeds, **{key: last[key] for key in ("date", "device", "versions")}}
    name = f"figure1-{only.replace('/', '-')}" if only else "figure1"  # a part does not replace the whole
    (out / f"{name}.json").write_text(dumps(numbers))
    (out / f"{name}.md").write_text(figure1.as_markdown(rows))
    console.print(figure1.as_table(rows))
    try:
        figure1.draw(runs, out / f"{name}.png")
        console.print(f"picture: {out / name}.png", soft_wrap=True)
    except MissingDependencyError as missing:
        console.print(f"no picture: {missing}", soft_wrap=True, markup=False)
    console.print(f"numbers: {out / name}.json", soft_wrap=True)
