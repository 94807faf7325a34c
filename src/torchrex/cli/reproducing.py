"""Which runs a figure or table needs, and running those that are not there; what is made of them is
in `made_of_runs`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrex.cli.budget import Clock
from torchrex.cli.consoles import stdout
from torchrex.cli.made_of_runs import report_digits, report_figure, report_figure1, report_table
from torchrex.cli.numbers import BEGUN, there_before
from torchrex.cli.running import folders_of, require_logs, run_group, run_groups
from torchrex.errors import ConfigError, NonFiniteEnergyError, RecipeError, RunFolderError
from torchrex.experiments.config import override
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.drawing import is_begun
from torchrex.experiments.gan import figure3_recipes, table3_recipes
from torchrex.experiments.groups import Group, group
from torchrex.experiments.images import figure2_recipes, table1_recipes, table2_recipes
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.recipes import Config, families_of, matches
from torchrex.experiments.run_folder import RunFolder, same_config

RECIPES: dict[str, Callable[[], Mapping[str, Config]]] = {
    "figure1": figure1_recipes,
    "digits": digits_recipes,
    "table1": table1_recipes,
    "table2": table2_recipes,
    "figure2": figure2_recipes,
    "table3": table3_recipes,
    "figure3": figure3_recipes,
}
OF_IMAGES = {
    "table1": report_table,
    "table2": report_table,
    "figure2": report_figure,
    "table3": report_table,
    "figure3": report_figure,
}
DEFAULT_SEEDS = {"digits": 5}  # 1 of the others


@dataclass(frozen=True)
class How:
    """Where and how the missing runs are made. With `rebuild` nothing is run, and those below `out`
    are taken as they are.
    """

    out: Path
    device: str = "auto"
    overwrite: bool = False
    rebuild: bool = False
    budget: float | None = None
    log: tuple[str, ...] = ()


def reproduce_it(
    what: str, assignments: Sequence[str], seed: int, seeds: int | None, only: str, how: How
) -> None:
    """Run the missing recipes for every seed, then write pictures, tables and numbers beside the
    run folders.
    """
    if what not in RECIPES:
        near = difflib.get_close_matches(what, RECIPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"cannot reproduce {what!r}, only {', '.join(RECIPES)}{hint}")
    if how.rebuild:
        require_nothing_to_run(what, assignments, seeds, overwrite=how.overwrite)
    known = RECIPES[what]()
    chosen = {
        name: override(config, assignments)
        for name, config in known.items()
        if matches(only, name, families_of(known))
    }
    if not chosen:
        some = ", ".join([*known][:4]) + (f" and {len(known) - 4} others" if len(known) > 4 else "")
        raise RecipeError(f"no recipe of {what} has {only!r} in its name; they are {some}")
    path = how.out / (
        f"{what}-{only.replace('/', '-')}" if only else what
    )  # a part does not replace the whole
    each = list(range(seed, seed + (DEFAULT_SEEDS.get(what, 1) if seeds is None else seeds)))
    if what in OF_IMAGES:
        if not how.rebuild:
            run_missing(trained_ones(chosen), each, how, announce=True)
        chosen_as_known: Any = {name: known[name] for name in chosen}
        OF_IMAGES[what](what, chosen_as_known, how.out, path, stdout)
        return
    folders = run_missing(chosen, each, how)
    {"figure1": report_figure1, "digits": report_digits}[what](chosen, folders, each, path, stdout)


def require_nothing_to_run(
    what: str, assignments: Sequence[str], seeds: int | None, *, overwrite: bool
) -> None:
    """`--rebuild` beside something that is meant for runs is a misunderstanding."""
    if what not in OF_IMAGES:
        raise ConfigError(
            f"--rebuild is for {', '.join(OF_IMAGES)}; without it {what} runs only what is not there yet"
        )
    for option, given in (
        ("--set", bool(assignments)),
        ("--seeds", seeds is not None),
        ("--overwrite", overwrite),
    ):
        if given:
            raise ConfigError(
                f"--rebuild runs nothing and takes the runs as they are; leave out {option}, or --rebuild"
            )


def trained_ones(chosen: Mapping[str, Config]) -> dict[str, Config]:
    """Without the recipes whose run has the same numbers as that of another chosen one."""
    same = {name: getattr(config, "same_run_as", None) for name, config in chosen.items()}
    return {name: config for name, config in chosen.items() if same[name] not in chosen}


def run_missing(
    configs: Mapping[str, Config], seeds: Sequence[int], how: How, *, announce: bool = False
) -> dict[str, list[RunFolder]]:
    """All run folders by recipe, those that were not there just made. `announce` says beforehand
    how much there is to do.
    """
    require_logs(list(configs.values()), how.log, how.out)
    todo, folders = [], {}
    for name, config in configs.items():
        config.place(how.device)
        folders[name] = [RunFolder.of(how.out, name, seed) for seed in seeds]
        for seed, folder in zip(seeds, folders[name], strict=True):
            if not how.overwrite and folder.config is not None and not same_config(folder, config):
                state = "a finished" if folder.finished else "an unfinished"
                raise RunFolderError(
                    f"{folder.path} holds {state} run with other settings; choose another --out, or add --overwrite"
                )
            if how.overwrite or not folder.finished:
                todo.append((config, seed))
    groups = group(todo, how.out, overwrite=how.overwrite)
    if todo and announce:
        stdout.print(
            f"to run: {_some(len(todo), 'run')} in {_some(len(groups), 'group')} side by side",
            highlight=False,
        )
    before = (
        {}
        if how.overwrite
        else there_before(RunFolder.of(how.out, config.recipe, seed) for config, seed in todo)
    )
    clock, again = (
        Clock(how.budget),
        f"the same command{' without --overwrite' if how.overwrite else ''}",
    )

    def run(each: Group) -> list[RunFolder]:
        # Shards have their checkpoints in folders of their own, and need not stand at one step to
        # go on.
        begun = any(is_begun(folder.path / "checkpoints") for folder in folders_of(each, how.out))
        unfinished = not how.overwrite and (begun or len(each.jobs) > 1)
        try:
            return run_group(
                each,
                how.out,
                device=how.device,
                overwrite=not unfinished,
                resume=unfinished,
                budget=clock.left(),
                how=again,
                log=how.log,
            )
        except NonFiniteEnergyError:
            if not announce:
                raise
            return folders_of(each, how.out)  # a table is made of what is finished

    for each, done in run_groups(groups, how.out, run=run, overwrite=how.overwrite, how=again):
        for (config, seed), folder in zip(each.jobs, done, strict=True):
            result = folder.result or {}
            took = f"{result.get('wall_seconds', 0.0):.1f} s{' in all' if before.get(folder.path) == BEGUN else ''}"
            told = took if folder.finished else result.get("error", result.get("status"))
            stdout.print(f"{config.recipe}, seed {seed}: {told}", soft_wrap=True, highlight=False)
    if not todo:
        stdout.print(
            f"all {len(configs) * len(seeds)} runs are there already; nothing was run again",
            highlight=False,
        )
    return folders


def _some(n: int, thing: str) -> str:
    return f"{n} {thing}{'' if n == 1 else 's'}"
