"""`torchrex reproduce`: runs what a figure or table needs, then makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from torchrex.cli.console import advise, count, say, stdout
from torchrex.cli.running import Session, command_again, exchange_of, require_logs, states, took
from torchrex.durable import replace_file, writing
from torchrex.errors import ConfigError, MissingDependencyError, RecipeError, RunFolderError
from torchrex.experiments import ExperimentConfig, Run, RunFolder, RunOptions, dumps, override
from torchrex.experiments.digits import digits_recipes
from torchrex.experiments.gallery import gallery_recipes
from torchrex.experiments.gan import TABLE3, figure3_recipes, table3_recipes
from torchrex.experiments.images import (
    TABLE1,
    TABLE2,
    figure2_recipes,
    table1_recipes,
    table2_recipes,
)
from torchrex.experiments.mixtures import figure1_recipes
from torchrex.experiments.runner import Group, group_runs, run_in
from torchrex.experiments.theory import theory_recipes
from torchrex.names import families_of, matches
from torchrex.report import digits, figure1, figure2, figure3, gallery, tables, theory
from torchrex.runs.folder import differences

Folders = Mapping[str, list[RunFolder]]


class Made(NamedTuple):
    """What is made of runs: a table for the terminal, lines below it, a page, numbers, picture."""

    table: Table
    lines: Sequence[str]
    markdown: str
    numbers: Mapping[str, Any]
    draw: Callable[[Path], None]


class Output(NamedTuple):
    """A figure or table. `of_folder`: it is made of all finished runs below OUT, whatever seeds."""

    recipes: Callable[[], Mapping[str, Any]]
    make: Callable[..., Made]
    of_folder: bool = True
    n_seeds: int = 1


def make_of_runs(
    report: Any, configs: Mapping[str, Any], folders: Folders, seeds: Sequence[int]
) -> Made:
    rows = report.rows(configs, folders)
    # Where and when the last run behind the rows was made.
    last = list(folders.values())[-1][0].result or {}
    origin = {key: last[key] for key in ("date", "device", "versions")}
    return Made(
        report.as_table(rows),
        report.NOTES,
        report.as_markdown(rows),
        {"rows": rows, "seeds": list(seeds), **origin},
        lambda picture: report.draw(configs, folders, picture),
    )


def make_table(paper: Any, what: str, chosen: Mapping[str, Any], out: Path) -> Made:
    """A table from all runs of the chosen recipes that are there, whatever their seeds."""
    table = tables.build(paper, out, chosen)
    _require_runs(what, table.cells, table.unfinished, out)
    return Made(
        tables.as_table(table, stdout),
        tables.difference_lines(table) + tables.notes(table),
        tables.as_markdown(table),
        table.as_numbers(),
        lambda picture: tables.draw(table, picture),
    )


def make_figure(figure: Any, what: str, chosen: Mapping[str, Any], out: Path) -> Made:
    found = figure.numbers(out, chosen)
    _require_runs(what, found.get("rows") or found.get("data"), found["unfinished"], out)
    return Made(
        figure.as_table(found, stdout),
        figure.notes(found),
        figure.as_markdown(found),
        found,
        lambda picture: figure.draw(found, picture),
    )


OUTPUTS = {
    "figure1": Output(figure1_recipes, partial(make_of_runs, figure1), of_folder=False),
    "digits": Output(digits_recipes, partial(make_of_runs, digits), of_folder=False, n_seeds=5),
    "theory": Output(theory_recipes, partial(make_figure, theory)),
    "table1": Output(table1_recipes, partial(make_table, TABLE1)),
    "table2": Output(table2_recipes, partial(make_table, TABLE2)),
    "figure2": Output(figure2_recipes, partial(make_figure, figure2)),
    "table3": Output(table3_recipes, partial(make_table, TABLE3)),
    "figure3": Output(figure3_recipes, partial(make_figure, figure3)),
    "gallery": Output(gallery_recipes, partial(make_figure, gallery)),
}


def require_rebuildable(what: str, given: Sequence[str]) -> None:
    """`--rebuild` runs nothing, so options for runs are a misunderstanding."""
    possible = [name for name, output in OUTPUTS.items() if output.of_folder]
    if what not in possible:
        raise ConfigError(
            f"--rebuild is for {', '.join(possible)}; without it {what} runs only what is missing"
        )
    if given:
        raise ConfigError(
            f"--rebuild runs nothing and takes the runs as they are; leave out {given[0]}, or "
            "--rebuild"
        )


def reproduce_it(
    what: str,
    assignments: Sequence[str],
    seed: int,
    n_seeds: int | None,
    only: str,
    out: Path,
    options: RunOptions,
    *,
    rebuild: bool,
) -> None:
    """Run the missing recipes for every seed, then write what is made of them next to the runs."""
    output, known = OUTPUTS[what], OUTPUTS[what].recipes()
    names = [name for name in known if matches(only, name, families_of(known))]
    if not names:
        some = ", ".join([*known][:4]) + (f" and {len(known) - 4} others" if len(known) > 4 else "")
        raise RecipeError(f"no recipe of {what} has {only!r} in its name; they are {some}")
    chosen = {name: override(known[name], assignments) for name in names}
    seeds = list(range(seed, seed + (n_seeds or output.n_seeds)))
    path = out / (f"{what}-{only.replace('/', '-')}" if only else what)
    if output.of_folder:
        if not rebuild:
            run_missing(_without_same_runs(chosen), seeds, out, options, announce=True)
        made = output.make(what, {name: known[name] for name in names}, out)
    else:
        made = output.make(chosen, run_missing(chosen, seeds, out, options), seeds)
    _write(made, path)


def _without_same_runs(chosen: Mapping[str, ExperimentConfig]) -> dict[str, ExperimentConfig]:
    """Without the recipes whose run has the same numbers as that of another chosen one."""
    same = {name: getattr(config, "same_run_as", None) for name, config in chosen.items()}
    return {name: config for name, config in chosen.items() if same[name] not in chosen}


def run_missing(
    configs: Mapping[str, ExperimentConfig],
    seeds: Sequence[int],
    out: Path,
    options: RunOptions,
    *,
    announce: bool = False,
) -> dict[str, list[RunFolder]]:
    """All run folders by recipe, after the missing runs are done. `announce` says first how much
    there is to do, and tolerates runs that fail.
    """
    require_logs(configs.values(), options)
    runs = {name: [run_in(out, config, s) for s in seeds] for name, config in configs.items()}
    todo = [run for each in runs.values() for run in each if _is_missing(run, options)]
    groups = group_runs(todo, overwrite=options.overwrite)
    if todo and announce:
        advise(f"to run: {count(len(todo), 'run')} in {count(len(groups), 'group')} side by side")
    before = {} if options.overwrite else states(todo)

    def adapted(options: RunOptions, group: Group) -> RunOptions:
        """A single run that has not begun starts anew, whatever a failed attempt left."""
        begun = any(run.folder.active.begun for run in group.runs)
        resume = not options.overwrite and (begun or len(group.runs) > 1)
        return replace(options, resume=resume, overwrite=not resume)

    session = Session(groups, options, command_again(), tolerant=announce)
    for group, done in session.run_all(adapted):
        for run, folder in zip(group.runs, done, strict=True):
            result = folder.result or {}
            failed = result.get("error", result.get("status"))
            exchange = f"; {words}" if (words := exchange_of(result)) else ""
            ended = f"{took(folder, before)}{exchange}" if folder.finished else failed
            say(f"{run.name}: {ended}")
    if not todo:
        advise(f"all {len(configs) * len(seeds)} runs are there already; nothing was run again")
    return {name: [run.folder for run in each] for name, each in runs.items()}


def _is_missing(run: Run, options: RunOptions) -> bool:
    run.config.device(options.device)  # an error in one line, before anything runs
    folder = run.folder.active
    if options.overwrite:
        return True
    if folder.config is not None and differences(folder, run.config):
        state = "a finished" if folder.finished else "an unfinished"
        raise RunFolderError(
            f"{folder.path} holds {state} run with other settings; choose another --out, or add "
            "--overwrite"
        )
    return not folder.finished


def _require_runs(what: str, found: object, unfinished: Sequence[str], out: Path) -> None:
    if not found:
        but = f" (but {len(unfinished)} unfinished, such as {unfinished[0]})" if unfinished else ""
        raise RunFolderError(
            f"there is no finished run of {what} below {out}{but}; give the folder of the runs "
            "with --out, such as results/images, results/gan or results/gallery of the repository"
        )


def _write(made: Made, path: Path) -> None:
    """PATH.json, PATH.md, PATH.png and PATH.svg; the table and the lines on the terminal."""
    contents = {"json": dumps(made.numbers), "md": made.markdown}
    files = {suffix: path.with_name(f"{path.name}.{suffix}") for suffix in (*contents, "png")}
    for suffix, text in contents.items():
        with writing(files[suffix], RunFolderError, "choose another --out"):
            replace_file(files[suffix], text.encode())
    stdout.print(made.table)
    for line in made.lines:
        stdout.print(line, highlight=False, markup=False)
    try:
        with writing(files["png"], RunFolderError, "choose another --out"):
            made.draw(files["png"])
        say(f"picture: {path}.png and .svg")
    except MissingDependencyError as missing:
        say(f"no picture: {missing}")
    say(f"table: {path}.md, numbers: {path}.json")
