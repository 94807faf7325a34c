"""The `torchrex` command: list, run, reproduce. Errors of ours are one line on stderr and exit code 2; Ctrl-C is 130."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

import torchrex
from torchrex.cli.compare import compare
from torchrex.cli.data import data_app
from torchrex.cli.doctor import doctor
from torchrex.cli.report import report
from torchrex.cli.reproduce import RECIPES, reproduce_it
from torchrex.errors import ConfigError, NonFiniteEnergyError, RunFolderError, TorchrexError
from torchrex.experiments import recipes
from torchrex.experiments.config import descriptions, override, to_json
from torchrex.experiments.groups import Group, group
from torchrex.experiments.recipes import Config, TrainingConfig, get_recipe
from torchrex.experiments.run_folder import RunFolder
from torchrex.experiments.runner import run_recipe, run_together
from torchrex.recording import LiveDisplay, open_logs

app = typer.Typer(
    help="Adaptive replica exchange stochastic gradient MCMC: run recipes, reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
stdout, stderr = Console(), Console(stderr=True)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of `torchrex list RECIPE`. May be repeated."),
]
Seed = Annotated[int, typer.Option(min=0, help="First seed.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds to run, counted up from --seed.")]
Out = Annotated[Path, typer.Option(help="Folder for run folders.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace finished runs.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with unfinished runs from their checkpoints.")]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="KIND", help="Write a log into each run folder: jsonl or tensorboard. May be repeated."),
]
Budget = Annotated[str, typer.Option(metavar="TIME", help="Stop in time with a checkpoint, e.g. 9m, 90s, 1.5h.")]


class Interrupted(Exception):  # noqa: N818 - not an error
    """A signal during a run, after what was done has been written."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"torchrex {torchrex.__version__}")
        raise typer.Exit


@app.command("list")
def list_recipes(
    recipe: Annotated[str, typer.Argument(help="Show the settings of this one, or all with this in their name.")] = "",
) -> None:
    """Show all recipes, those with a word in their name, or the settings of one."""
    shown = {name: config for name, config in recipes().items() if recipe in name}
    if recipe and (recipe in shown or not shown):
        settings = Table("setting", "value", "", box=None, header_style="bold")
        config = get_recipe(recipe)
        said = descriptions(config)
        for name, value in to_json(config).items():
            settings.add_row(name, ",".join(map(str, value)) if isinstance(value, list) else str(value), said.get(name, ""))
        stdout.print(settings)
        stdout.print(f" {config.n_steps:,} steps in all", highlight=False)
        return
    table = Table("recipe", "rungs", "F", "steps", "runs", box=None, header_style="bold")
    table.columns[0].no_wrap, table.columns[0].min_width = True, max(map(len, shown))
    for name, config in shown.items():
        rungs = len(getattr(config, "temperatures", ())) or 1
        swaps = rungs > 1 and getattr(config, "swaps", True)
        factor = f"{getattr(config, 'correction_factor', 1.0):g}" if swaps else "-"
        table.add_row(name, str(rungs), factor, f"{config.n_steps:,}", str(getattr(config, "n_runs", 1)))
    stdout.print(table)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A name from `torchrex list`.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Seeds = 1,
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
    resume: Resume = False,
    budget: Budget = "",
    log: Log = None,
) -> None:
    """Run one recipe into OUT/RECIPE/seed=S/."""
    if resume and overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite begins it anew; give one of them")
    config = override(get_recipe(recipe), set_ or [])
    open_logs(log or (), out)  # unknown names and missing packages are told before anything runs
    clock = Clock(budget)
    groups = group([(config, s) for s in range(seed, seed + seeds)], out, overwrite=overwrite)
    failed: list[RunFolder] = []
    how = f"the same command with --resume{' instead of --overwrite' if overwrite else ''}"
    for each in groups:
        try:
            folders = run_group(
                each, out, device=device, overwrite=overwrite, resume=resume, budget=clock.left(), how=how, log=log or ()
            )
        except NonFiniteEnergyError:
            if len(groups) == 1 or not isinstance(config, TrainingConfig):
                raise
            folders = [RunFolder.of(out, config.recipe, s) for _, s in each.jobs]  # it is in their results; the others go on
        show(folders, config)
        failed += [folder for folder in folders if folder.failed]
        for folder in folders:
            if not goes_on(folder, how):
                return
    if failed:
        raise RunFolderError(f"{len(failed)} of {seeds} runs failed; the first is {failed[0].path}")


def show(folders: Sequence[RunFolder], config: Config) -> None:
    """The numbers of finished runs, and how far the others came."""
    for folder in folders:
        result = folder.result or {}
        metrics = Table("metric", "value", box=None, header_style="bold")
        for name, value in result["metrics"].items():
            metrics.add_row(name, "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
        where = (
            f" at step {result['steps_done']:,} of {config.n_steps:,}"
            if result["status"] in ("paused", "interrupted") and "steps_done" in result
            else ""
        )
        head = f"{config.recipe}, seed {result['seed']}: {result['status']}{where} in {result['wall_seconds']:.1f} s"
        others = result.get("replicas_side_by_side", 1) - getattr(config, "n_rungs", 1)
        stdout.print(f"{head}{f' beside {others} other replicas' if others > 0 else ''}", highlight=False)
        if result["metrics"]:
            for pair in result["swaps"] if "steps_done" in result else ():
                metrics.add_row(
                    f"swaps of rungs {pair['pair'][0]} and {pair['pair'][1]}", f"{pair['accepted']:,} of {pair['proposed']:,}"
                )
            stdout.print(metrics)
        if "error" in result:
            stdout.print(result["error"], soft_wrap=True, markup=False, highlight=False)
        stdout.print(f"run folder: {folder.path}", soft_wrap=True)


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    set_: Set = None,
    seed: Seed = 0,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; by default 5 for digits, 1 for the others.")] = None,
    only: Annotated[
        str, typer.Option(help="Only recipes with this in their name, e.g. case1, or with all of resnet20/cifar10.")
    ] = "",
    out: Out = Path("runs"),
    device: Device = "auto",
    overwrite: Overwrite = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Run nothing, use the runs that are there.")] = False,
    budget: Budget = "",
    log: Log = None,
) -> None:
    """Run what is missing of a figure or table, draw it, and print the numbers, beside the paper's where it has some."""
    if rebuild and log:
        raise ConfigError("--rebuild runs nothing and takes the runs as they are; leave out --log, or --rebuild")
    open_logs(log or (), out)
    clock = Clock(budget)

    def run_them(each: Group) -> list[RunFolder]:
        unfinished = not overwrite and (bool(each.steps) or len(each.jobs) > 1)
        how = f"the same command{' without --overwrite' if overwrite else ''}"
        folders = run_group(
            each,
            out,
            device=device,
            overwrite=not unfinished,
            resume=unfinished,
            budget=clock.left(),
            how=how,
            log=log or (),
        )
        for folder in folders:
            if not goes_on(folder, how):
                raise typer.Exit
        return folders

    reproduce_it(
        what, set_ or [], seed, seeds, only, out, overwrite=overwrite, rebuild=rebuild, run_them=run_them, console=stdout
    )


for command in (report, doctor, compare):
    app.command()(command)
app.add_typer(data_app, name="data")


class Clock:
    """How much is left of a budget such as 9m."""

    UNITS: ClassVar[dict[str, float]] = {"s": 1.0, "m": 60.0, "h": 3600.0}

    def __init__(self, budget: str) -> None:
        self.began, self.budget = time.monotonic(), None
        if budget:
            number, unit = (budget[:-1], budget[-1]) if budget[-1] in self.UNITS else (budget, "s")
            try:
                self.budget = float(number) * self.UNITS[unit]
            except ValueError:
                self.budget = -1.0
            if not 0 < self.budget < float("inf"):
                raise ConfigError(f"--budget must be a time such as 9m, 90s or 1.5h, got {budget!r}")

    def left(self) -> float | None:
        return None if self.budget is None else max(0.0, self.budget - (time.monotonic() - self.began))


def run_group(
    each: Group,
    out: Path,
    *,
    device: str,
    overwrite: bool,
    resume: bool,
    budget: float | None,
    how: str,
    log: Sequence[str] = (),
) -> list[RunFolder]:
    """Run the jobs of a group, with a live display. `how` says how to go on after an interruption."""
    (config, seed), n_steps = each.jobs[0], each.jobs[0][0].n_steps
    folders = [RunFolder.of(out, job.recipe, s) for job, s in each.jobs]
    with LiveDisplay(each.name, n_steps, console=stderr) as display, told_if_early(folders, how):
        if len(each.jobs) == 1:
            folder = run_recipe(
                config,
                seed,
                out,
                device=device,
                overwrite=overwrite,
                resume=resume,
                budget=budget,
                progress=display.progress,
                observers=[display],
                log=log,
            )
            return [folder]
        jobs = [(config, seed) for config, seed in each.jobs if isinstance(config, TrainingConfig)]
        return run_together(
            jobs, out, device=device, overwrite=overwrite, resume=resume, budget=budget, observers=[display], log=log
        )


@contextlib.contextmanager
def told_if_early(folders: Sequence[RunFolder], how: str) -> Iterator[None]:
    """Ctrl-C outside the steps of some runs, while they compile or are measured, for example: one line, not silence."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # the signal that came during the last save
            raise Interrupted(f"interrupted; {folders[0].path} is finished", interrupt.args[0]) from None
        begun = [folder.path for folder in folders if (folder.path / "checkpoints").is_dir() and not folder.finished]
        if begun:
            raise Interrupted(f"interrupted; the checkpoints are in {begun[0]}, and {how} goes on") from None
        raise Interrupted("interrupted before the first steps were done; nothing was written") from None


def goes_on(folder: RunFolder, how: str) -> bool:
    """False if the budget is used up; raises if a signal came. `how` says how to go on then."""
    result = folder.result or {}
    if result.get("status") == "interrupted":
        number = result.get("signal") or signal.SIGINT
        advice = f"; {how} goes on" if "signal" in result else ""
        raise Interrupted(f"interrupted; what was done is in {folder.path}{advice}", number)
    if result.get("status") == "paused":
        where = f" at step {result['steps_done']:,}" if "steps_done" in result else ""
        stdout.print(f"the budget is used up{where}; {how} goes on with {folder.path}", highlight=False, soft_wrap=True)
        return False
    return True


def main() -> None:
    """Entry point: turns our errors into one line and an exit code."""
    handler = RichHandler(console=stderr, show_time=False, show_path=False, markup=False)
    logging.getLogger("torchrex").addHandler(handler)
    try:
        app(standalone_mode=True)
    except TorchrexError as error:
        stderr.print(f"torchrex: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted as interrupted:
        stderr.print(f"torchrex: {interrupted}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(interrupted.exit_code)
    except KeyboardInterrupt:
        stderr.print("torchrex: interrupted before the first steps were done; nothing was written")
        sys.exit(130)
