"""`sample`: from a log density to draws in one call."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.checkpoint import Checkpoints, owned
from torchrex.density.drawing import Drawing, DrawOptions, End, Progress, draw_all
from torchrex.density.run import DensityExchange
from torchrex.density.shards import Shards, process_group_for
from torchrex.density.tensor_ensemble import TensorEnsemble, as_target, starting_points
from torchrex.distributed import ALONE, Rendezvous
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    NonFiniteEnergyError,
    OnInterrupt,
    RunFolderError,
    RunInterrupted,
    TorchrexError,
    explain_memory,
    known_arguments,
    require_whole,
)
from torchrex.exchange import (
    ExchangeReport,
    Ladder,
    RuleOptions,
    resolve_device,
    warn_of_dead_pairs,
)
from torchrex.exchange.noise import warn_of_shape
from torchrex.posterior import Draws
from torchrex.processes import terminating
from torchrex.recording import count_swaps, progress_bar
from torchrex.rng import Streams
from torchrex.runs.folder import RunResult
from torchrex.runs.script import ScriptConfig, ScriptRun, owned_folders
from torchrex.samplers import Sampler
from torchrex.targets import Noisy, Target
from torchrex.tuning import Tuned, tune

logger = logging.getLogger("torchrex")

MOST_MEANS = 5  # coordinates whose means are in result.json
# For the temperature of rung 0: points, and a part of the gradients of the run.
MOST_POINTS, PART = 1_000, 100
STATUSES = ("finished", "paused", "interrupted", "failed")  # the worst of all shards is that of all


@known_arguments(*RuleOptions.__annotations__)
def sample(
    target: Target | Callable[[Tensor], Tensor],
    *,
    dim: int | None = None,
    temperatures: Sequence[float] | None = None,
    lr: float | Sequence[float] | None = None,
    ladder: Ladder | Tuned | Literal["auto"] | None = None,
    n_steps: int,
    n_runs: int = 1,
    thin: int = 1,
    burn_in: int = 0,
    seed: int = 0,
    sampler: Sampler | None = None,
    initial: Tensor | float | Distribution | None = None,
    compiled: bool | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    out: Path | str | None = None,
    checkpoints: Checkpoints | Path | str | None = None,
    checkpoint_every: int = 100_000,
    resume: bool = True,
    budget: float | None = None,
    shards: int | None = None,
    on_interrupt: OnInterrupt = "raise",
    **rules: Unpack[RuleOptions],
) -> Draws:
    """Sample a target by adaptive replica exchange and return the draws of the coldest rung.

    `target` is a Target or a log density that maps points (n, dim) to (n,). The ladder is given by
    `temperatures` and `lr` (one, or one per rung), as a `Ladder`, or as what `tune` returned;
    `ladder="auto"` with `lr` calls `tune` first. One temperature is plain SGLD or SGHMC;
    `correction_factor=float("inf")` is the naive test. `n_runs` independent runs proceed
    together; every `thin`-th draw after `burn_in` steps is kept. `rules` are the rules of the
    exchange (`RuleOptions`: noise, swap_interval, ...); see docs/choosing.md.

    `initial` is where the replicas start: a number, a tensor that broadcasts to (rungs, runs, dim),
    or a distribution of torch.distributions from which each replica of each run gets its own point.
    Without it that is the prior of a target that can draw from it (`logistic_regression`), else 0
    for all; runs that start at one point make R-hat too small.

    Ctrl-C raises RunInterrupted, a KeyboardInterrupt, with what was drawn so far in its `draws`;
    with `on_interrupt="return"` it returns these draws, with status "interrupted". SIGTERM and
    SIGHUP do the same, as SystemExit(143) and SystemExit(129). Before the first step there are no
    draws: RunInterrupted in any case, and `draws` is None. A NaN or infinite energy raises
    NonFiniteEnergyError with the draws so far in `draws`. `progress=True` shows a bar; a function
    is called as `progress(done, total)` after every block.

    `out="runs/mydensity/seed=0"` writes a run folder as a recipe does: settings, draws, swaps and
    checkpoints. `torchrex report`, `doctor` and `compare` read it.

    With `checkpoints` (a folder; `out` has its own) everything, the draws included, is saved every
    `checkpoint_every` steps, at the end and at Ctrl-C. A call that finds checkpoints of the same
    setting there goes on from the newest, bit for bit as if it had not stopped; with `resume=False`
    it begins anew, in a folder without later ones. After `budget` seconds it saves and returns what
    was drawn, with status "paused".

    `shards` divides the runs into so many groups, each with random numbers of its own. Under
    torchrun every process samples some of them, and all return all draws: the same on any number of
    processes, of which there can be as many as shards.

    >>> draws = sample(
    ...     lambda x: -0.5 * x.square().sum(-1),
    ...     dim=2, temperatures=(1.0, 4.0), lr=0.05, n_steps=200, n_runs=4,
    ... )
    >>> draws.values.shape
    torch.Size([4, 200, 2])
    """
    written = None
    if out is not None:
        if checkpoints is not None:
            raise InvalidArgumentError(
                f"out={str(out)!r} holds the checkpoints too; leave checkpoints out"
            )
        written = ScriptRun(out, "sample", seed)
        checkpoints = written.checkpoints
    saving = (checkpoints, checkpoint_every, resume)
    options = DrawOptions(n_steps, thin, burn_in, progress, *saving, budget, on_interrupt)
    n_shards = 1 if shards is None else shards
    require_whole("n_runs", n_runs, 1)
    require_whole("shards", n_shards, 1)
    if n_steps - burn_in < thin:
        raise InvalidArgumentError(
            f"n_steps={n_steps} keeps no draw with burn_in={burn_in} and thin={thin}; raise n_steps"
        )
    target, tuning = as_target(target, dim), (0.0, 0.0)
    if ladder is not None and not isinstance(ladder, Ladder):
        if ladder == "auto":
            if temperatures is not None or not isinstance(lr, int | float):
                raise InvalidArgumentError(
                    'ladder="auto" chooses the temperatures and needs one lr, that of rung 0: '
                    f"got temperatures={temperatures} and lr={lr}"
                )
            began = time.monotonic()
            ladder = _tuned(
                options,
                target,
                lr=lr,
                n_steps=n_steps,
                n_runs=n_runs,
                seed=seed,
                sampler=sampler,
                initial=initial,
                device=device,
                dtype=dtype,
                show=bool(progress),
                **rules,
            )
            lr, tuning = None, (ladder.examples, time.monotonic() - began)
        if not isinstance(ladder, Tuned):
            raise InvalidArgumentError(
                f'ladder must be a Ladder, what tune returned, or "auto", got {ladder!r}'
            )
        rules, ladder = cast("RuleOptions", {**rules, **ladder.rules}), ladder.ladder
    if ladder is None:
        if temperatures is None or lr is None:
            raise InvalidArgumentError("give temperatures=... and lr=..., or ladder=Ladder(...)")
        ladder = Ladder(temperatures, lr)
        known = target.prior_variance
        if rules.get("tempering") == "likelihood" and isinstance(lr, int | float) and known:
            ladder = Ladder.for_likelihood(temperatures, lr, prior_variance=known)
    elif temperatures is not None or lr is not None:
        raise InvalidArgumentError("give ladder=... or temperatures=... and lr=..., not both")
    rungs = ladder
    process_group = process_group_for(n_shards, n_runs)
    ensemble = TensorEnsemble.start(
        target,
        sampler,
        n_rungs=rungs.n_rungs,
        n_runs=n_runs,
        initial=starting_points(initial, target, (rungs.n_rungs, n_runs), Streams(seed)),
        device=resolve_device(device),
        dtype=dtype,
    )
    divided = Shards(ensemble, n_shards, seed, process_group)

    def make_run(k: int) -> DensityExchange:
        return DensityExchange(
            divided.ensemble(k), rungs, seed=divided.seed_of(k), compiled=compiled, **rules
        )

    numbers = {"seed": seed, "n_steps": n_steps, "n_runs": n_runs, "thin": thin, "burn_in": burn_in}
    folder = "" if options.folder is None else str(options.folder.folder.absolute())
    divided.require_same_everywhere({**numbers, "shards": n_shards, "checkpoints": folder})
    settings = {"run": f"DensityExchange({ensemble!r}, {ladder!r})", "seed": seed}
    settings |= {"shards": n_shards} if n_shards > 1 else {}
    runs = [] if written is None else [written]
    with owned_folders(runs, process_group), owned([options.folder], process_group):
        return _draw(divided, make_run, options, settings, written, tuning)


@known_arguments()
def collect(
    run: DensityExchange,
    n_steps: int,
    *,
    thin: int = 1,
    burn_in: int = 0,
    progress: Progress | None = None,
    settings: dict[str, Any] | None = None,
    checkpoints: Checkpoints | Path | str | None = None,
    checkpoint_every: int = 100_000,
    resume: bool = True,
    budget: float | None = None,
    on_interrupt: OnInterrupt = "raise",
) -> Draws:
    """Advance a run by `n_steps` and keep its draws; memory is bounded by what is kept.

    `checkpoints`, `resume`, `budget` and `on_interrupt` are as in `sample`: to go on, make the run
    as before and call this again.
    """
    if not isinstance(run, DensityExchange):
        raise InvalidArgumentError("collect is for runs on densities; use train for networks")
    saving = (checkpoints, checkpoint_every, resume)
    options = DrawOptions(n_steps, thin, burn_in, progress, *saving, budget, on_interrupt)
    # Not repr(run), which says at which step the run is now.
    own: dict[str, Any] = {"run": f"DensityExchange({run.ensemble!r}, {run.rules.ladder!r})"}
    own |= {"steps_before": run.n_steps} if run.n_steps else {}
    alone = Shards(run.ensemble, 1, run.streams.seed, ALONE)
    with owned([options.folder]):
        return _draw(alone, lambda k: run, options, {**own, **(settings or {})})


def _draw(
    shards: Shards,
    make_run: Callable[[int], DensityExchange],
    options: DrawOptions,
    settings: dict[str, Any],
    written: ScriptRun | None = None,
    tuning: tuple[float, float] = (0.0, 0.0),  # examples, seconds
) -> Draws:
    """Draw the shards of this process, wait for the others, put all draws together, and write the
    run folder.
    """
    group, start = shards.process_group, shards.all_runs.position
    if start.shape[1] > 1 and bool((start == start[:, :1]).all()):
        settings = {**settings, "started_at_one_point": True}
    enough_memory = functools.partial(explain_memory, lambda: _out_of_memory(start, options))
    with enough_memory(), group.all_or_none("reading of the checkpoints", CheckpointError):
        shards.require_same_cut(options.folder)
        drawings = [
            Drawing(make_run(k), options, shards.checkpoints(options.folder, k), shards.name(k))
            for k in shards.mine
        ]
    with group.all_or_none("making of the run folder", RunFolderError):
        if written is not None and group.is_main:
            written.begin(_config(drawings[0].run, shards, options, written), start.device)
    meeting = Rendezvous(group)
    error: TorchrexError | OSError | None = None
    end = End("interrupted")
    with contextlib.ExitStack() as stack:
        stack.enter_context(group.reporting_errors())
        received = stack.enter_context(terminating())
        progress = options.progress if group.is_main else None
        if progress is True:
            progress = stack.enter_context(progress_bar("sampling", options.n_steps))
        try:
            with enough_memory():
                end = draw_all(drawings, options, progress or None, meeting.stop_requested)
        except (TorchrexError, OSError) as met:
            error = met
        if error is not None or end.status in ("interrupted", "failed"):
            meeting.request_stop()
        meeting.wait("end of the sampling")
    with group.all_or_none("sampling", TorchrexError):
        if error is not None:
            raise error
    failure: dict[str, Any] | None = None
    if end.failure is not None:  # as plain values, with the run counted among all
        names = ("replica", "rung", "run", "step", "value", "advice")
        failure = {name: getattr(end.failure, name) for name in names}
        failure["run"] += shards.runs[shards.mine[end.failed]].start
    ends: list[list[Any]] = group.gather([end.status, failure, received], "end of the sampling")
    status = max((each for each, _, _ in ends), key=STATUSES.index)
    signals = [number for _, _, numbers in ends for number in numbers]  # all ranks end alike
    with enough_memory():
        draws = shards.gather([drawing.draws(status, settings) for drawing in drawings])
    if draws is not None and draws.n_draws:
        draws.settings.update(_temperature_of_rung_0(drawings[0].run, draws))
    failures = [
        NonFiniteEnergyError(**values, draws=draws) for _, values, _ in ends if values is not None
    ]
    with group.all_or_none("writing of the run folder", RunFolderError):
        if written is not None and draws is not None and group.is_main:
            examples, took = tuning
            seconds = took + max(drawing.seconds for drawing in drawings)
            _write(written, draws, failures[:1], seconds, group.size, examples)
    if failures:
        raise failures[0]
    if status == "finished" and draws is not None and group.is_main:
        run = drawings[0].run
        warn_of_shape(run.noise_shape(), run.correction_factor.mean(1))
        if run.rules.swaps:
            warn_of_dead_pairs(draws.pairs(), all_steps=run.n_steps == draws.n_steps)
    if status == "interrupted" or draws is None:
        _report_interrupt(draws, options, signals, is_main=group.is_main)
    assert draws is not None
    return draws


def _temperature_of_rung_0(run: DensityExchange, draws: Draws) -> dict[str, Any]:
    """What equipartition reads, if gradients are exact. Afterwards nobody has the density: `doctor`
    and `report` compare this number with the temperature.
    """
    from torchrex.diagnostics import FEWEST_DRAWS, equipartition_temperature  # scipy loads slowly

    target, burn_in = run.ensemble.target, draws.n_steps // 10
    if isinstance(target, Noisy) and target.gradient_noise is None:
        target = target.target
    if target.has_noise or draws.settings.get("annealed") or int(draws.steps[-1]) <= burn_in:
        return {}
    some = draws.after(burn_in)
    if some.n_draws < FEWEST_DRAWS:
        return {}
    gradients = draws.n_steps * run.n_rungs * draws.n_chains
    n = max(FEWEST_DRAWS, min(MOST_POINTS, gradients // PART) // some.n_chains)  # of a chain
    every = -(-some.n_draws // n)
    x = some.values[:, ::every]
    with contextlib.suppress(Exception):  # a density need not take so many points
        positions = x.to(run.ensemble.position).flatten(0, 1)[None]
        _, gradient = target.energy_and_gradient(positions, {})
        forces = gradient.cpu().view_as(x)
        value, error = map(float, equipartition_temperature(x, forces))
        # Two chains may agree by chance: not less than the error of independent draws.
        work = ((x - x.mean((0, 1))) * forces).double().mean(-1)
        error = max(error, float(work.std()) / math.sqrt(work.numel()))
        if math.isfinite(value + error):
            return {"equipartition": [value, error]}
    return {}


def _config(
    run: DensityExchange, shards: Shards, options: DrawOptions, written: ScriptRun
) -> ScriptConfig:
    return ScriptConfig.of(
        run,
        written.folder.path,
        options.n_steps,
        made_by="sample",
        n_runs=shards.all_runs.position.shape[1],
        batch_size=run.ensemble.target.batch_size,
        burn_in=options.burn_in,
        thin=options.thin,
        model=repr(run.ensemble.target),
    )


def _write(
    written: ScriptRun,
    draws: Draws,
    failures: Sequence[NonFiniteEnergyError],
    seconds: float,
    n_processes: int,
    tuning_examples: float,
) -> None:
    draws.save(written.folder.path / "draws.safetensors")
    report = draws.exchange()
    result = RunResult(
        metrics={**_summary_of(draws, report), "tuning_examples": tuning_examples},
        failure=failures[0] if failures else None,
        swaps=count_swaps(draws.accepted.sum(1), draws.proposed.sum(1)),
        exchange=report.numbers,
        steps_done=None if draws.status == "finished" else draws.n_steps,
    )
    status = "failed" if failures else draws.status
    written.write(result, status, seconds, n_processes=n_processes)


def _summary_of(draws: Draws, report: ExchangeReport) -> dict[str, Any]:
    """Numbers of the first coordinates, and of the ladder, for result.json."""
    metrics: dict[str, Any] = {"n_steps": draws.n_steps, "n_runs": draws.n_chains}
    rate = draws.acceptance_rate
    if len(rate) and bool(rate.isfinite().all()):
        metrics["acceptance_rate"] = float(rate.mean())
    if draws.n_draws > 1:
        mean, sd, error = draws.mean(), draws.std(), draws.standard_error()
        for k in range(min(MOST_MEANS, len(mean))):
            names = (f"mean_{k}", f"mean_{k}_se", f"sd_{k}")
            metrics |= dict(zip(names, map(float, (mean[k], error[k], sd[k])), strict=True))
        if bool((error > 0).all()):
            metrics["ess"] = float((sd / error).square().min())
    if (evidence := report.log_evidence) is not None:
        by_stones = math.isfinite(evidence.stepping_stones)
        value, error_of_it = evidence[2:4] if by_stones else evidence[:2]
        metrics |= {"log_evidence": value, "log_evidence_se": error_of_it}
    return metrics


def _tuned(options: DrawOptions, target: Target, **arguments: Any) -> Tuned:
    try:
        return tune(target, **arguments)
    except KeyboardInterrupt:
        how = f"interrupted while the ladder was tuned, before the first of {options.n_steps:,}"
        raise RunInterrupted(f"{how} steps", draws=None) from None


def _out_of_memory(start: Tensor, options: DrawOptions) -> str:
    rungs, runs, dim = start.shape
    kept = (options.n_steps - options.burn_in) // options.thin
    words = "; what was saved is complete, and the same call goes on from it"
    return (
        f"{start.device} has not enough memory for {runs:,} runs of {rungs} rungs in {dim:,} "
        f"dimensions with {kept:,} draws of each ({runs * kept * dim * start.itemsize / 1e9:.3g} "
        f"GB); raise thin, or lower n_runs{'' if options.folder is None else words}"
    )


def _report_interrupt(
    draws: Draws | None, options: DrawOptions, received: Sequence[int], *, is_main: bool
) -> None:
    """Raise what Ctrl-C or one of the `received` signals asks for, or log that the draws so far are
    returned. Without a draw there is nothing to return.
    """
    how = f"interrupted before the first of {options.n_steps:,} steps was done"
    if draws is not None:
        how = f"interrupted after {draws.n_steps:,} of {options.n_steps:,} steps"
    leaves = draws is None or options.on_interrupt == "raise"
    if leaves and not received:
        there = "; the draws so far are in `draws` of this error" if draws is not None else ""
        there += "" if options.folder is None else "; the same call goes on"
        raise RunInterrupted(f"{how}{there}", draws=draws)
    if is_main:
        lost = "nothing was saved without checkpoints" if options.folder is None else "it is saved"
        lost = "there are no draws" if draws is None else lost
        logger.warning("%s; %s", how, lost if leaves else "the draws so far are returned")
    if leaves:
        raise SystemExit(128 + received[0])
