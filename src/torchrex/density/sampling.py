"""`sample`: from a log density to draws in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrex.density.run import DensityExchange
from torchrex.density.sampling_drawing import Drawing, Folder, as_checkpoints
from torchrex.density.shards import Shards, process_group_for
from torchrex.density.tensor_ensemble import TensorEnsemble
from torchrex.distributed import ALONE
from torchrex.errors import (
    CheckpointError,
    InvalidArgumentError,
    OnInterrupt,
    RunInterrupted,
    require_on_interrupt,
)
from torchrex.exchange import Ladder, RuleOptions, resolve_device, warn_of_dead_pairs
from torchrex.exchange.run import require_known
from torchrex.posterior import Draws
from torchrex.recording import Callback, progress_bar
from torchrex.rng import Streams, derive_seed
from torchrex.samplers import Sampler
from torchrex.targets import LogDensity, Target
from torchrex.targets.tall import draw_points

logger = logging.getLogger("torchrex")

Progress = Callback | bool


def sample(
    target: Target | Callable[[Tensor], Tensor],
    *,
    dim: int | None = None,
    temperatures: Sequence[float] | None = None,
    lr: float | Sequence[float] | None = None,
    ladder: Ladder | None = None,
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
    checkpoints: Folder | None = None,
    checkpoint_every: int = 100_000,
    resume: bool = True,
    budget: float | None = None,
    shards: int | None = None,
    on_interrupt: OnInterrupt = "raise",
    **rules: Unpack[RuleOptions],
) -> Draws:
    """Sample a target by adaptive replica exchange and return the draws of the coldest rung.

    `target` is a Target or a log density that maps points (n, dim) to (n,). The ladder is given by
    `temperatures` and `lr` (one, or one per rung) or as a `Ladder`. One temperature is plain SGLD
    or SGHMC; `correction_factor=float("inf")` is the naive test. `n_runs` independent runs proceed
    side by side; every `thin`-th draw after `burn_in` steps is kept.

    Ctrl-C raises RunInterrupted, a KeyboardInterrupt, with what was drawn so far in its `draws`;
    with `on_interrupt="return"` it returns these draws, with status "interrupted". A NaN or
    infinite energy raises NonFiniteEnergyError with the draws so far in `draws`. `progress=True`
    shows a bar; a function is called as `progress(done, total)` after every block. `initial` is
    where the replicas start: a number, a tensor that broadcasts to (rungs, runs, dim), or a
    distribution of torch.distributions from which each replica of each run gets its own point.
    Without it that is the prior of a target that can draw from it (`logistic_regression`), else 0
    for all; runs that start at one point flatter R-hat. `rules` are the rules of the exchange
    (`RuleOptions`: noise, swap_interval, ...); see docs/choosing.md.

    With `checkpoints` (a folder) everything, the draws included, is saved every `checkpoint_every`
    steps, at the end and at Ctrl-C, and a call that finds checkpoints of the same setting there
    goes on from the newest, bit for bit as if it had not stopped; with `resume=False` it begins
    anew, in a folder without later ones. After `budget` seconds it saves and returns what was
    drawn, with status "paused".

    `shards` divides the runs into so many groups, each with random numbers of its own. Under
    torchrun every process samples some of them, and all return all draws: the same on any number of
    processes, of which there can be as many as shards.

    >>> draws = sample(lambda x: -0.5 * x.square().sum(-1), dim=2, temperatures=(1.0, 4.0), lr=0.05, n_steps=200, n_runs=4)
    >>> draws.values.shape
    torch.Size([4, 200, 2])
    """
    require_known(rules, "sample", ("n_steps", *(sample.__kwdefaults__ or ())))
    for name, value, least in (
        ("n_steps", n_steps, 1),
        ("n_runs", n_runs, 1),
        ("thin", thin, 1),
        ("burn_in", burn_in, 0),
        ("checkpoint_every", checkpoint_every, 1),
    ):
        _require_whole(name, value, least)
    if not isinstance(target, Target):
        if dim is None:
            raise InvalidArgumentError(
                "a log density needs its dimension: sample(log_density, dim=...)"
            )
        target = LogDensity(target, dim)
    elif dim not in (None, target.dim):
        raise InvalidArgumentError(
            f"dim={dim} was given, but {target!r} has dim={target.dim}; leave dim out"
        )
    if n_steps - burn_in < thin:
        raise InvalidArgumentError(
            f"n_steps={n_steps} keeps no draw with burn_in={burn_in} and thin={thin}; raise n_steps"
        )
    if ladder is None:
        if temperatures is None or lr is None:
            raise InvalidArgumentError("give temperatures=... and lr=..., or ladder=Ladder(...)")
        ladder = Ladder(temperatures, lr)
    elif temperatures is not None or lr is not None:
        raise InvalidArgumentError(
            "give either ladder=... or temperatures=... and lr=..., not both"
        )

    process_group = process_group_for(shards, n_runs)
    n_rungs = ladder.n_rungs
    whole = TensorEnsemble.start(
        target,
        sampler,
        n_rungs=n_rungs,
        n_runs=n_runs,
        initial=_starting_points(initial, target, (n_rungs, n_runs), Streams(seed)),
        device=resolve_device(device),
        dtype=dtype,
    )
    divided = Shards(whole, 1 if shards is None else shards, seed, process_group)
    folder = as_checkpoints(checkpoints)

    def make(k: int) -> Drawing:
        run = DensityExchange(
            divided.ensemble(k), ladder, seed=divided.seed_of(k), compiled=compiled, **rules
        )
        return Drawing(
            run,
            n_steps,
            thin=thin,
            burn_in=burn_in,
            checkpoints=divided.checkpoints(folder, k),
            checkpoint_every=checkpoint_every,
            shard=divided.name(k),
        )

    numbers: dict[str, Any] = {
        "seed": seed,
        "n_steps": n_steps,
        "n_runs": n_runs,
        "thin": thin,
        "burn_in": burn_in,
        "shards": divided.n_shards,
    }
    numbers |= {} if folder is None else {"checkpoints": str(folder.folder.absolute())}
    divided.require_same_everywhere(numbers)
    with process_group.all_or_none("look at the checkpoints", CheckpointError):
        divided.require_same_cut(folder)
    settings = {"run": f"DensityExchange({whole!r}, {ladder!r})", "seed": seed}
    settings |= {"shards": divided.n_shards} if divided.n_shards > 1 else {}
    return _draw(
        divided,
        make,
        n_steps,
        settings,
        resume=resume,
        budget=budget,
        progress=progress if process_group.is_main else None,
        on_interrupt=on_interrupt,
    )


def collect(
    run: DensityExchange,
    n_steps: int,
    *,
    thin: int = 1,
    burn_in: int = 0,
    progress: Progress | None = None,
    settings: dict[str, Any] | None = None,
    checkpoints: Folder | None = None,
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
        raise InvalidArgumentError(
            "collect is for runs on densities; a run on a network goes on by train"
        )
    for name, value, least in (("n_steps", n_steps, 1), ("thin", thin, 1), ("burn_in", burn_in, 0)):
        _require_whole(name, value, least)
    _require_whole("checkpoint_every", checkpoint_every, 1)
    folder = as_checkpoints(checkpoints)
    # Not repr(run), which says where the run stands now; that is worth a word only if it has gone
    # some way before.
    earlier = {"steps_before": run.n_steps} if run.n_steps else {}
    settings = {
        "run": f"DensityExchange({run.ensemble!r}, {run.rules.ladder!r})",
        **earlier,
        **(settings or {}),
    }
    alone = Shards(run.ensemble, 1, run.streams.seed, ALONE)
    alone.require_same_cut(folder)

    def make(k: int) -> Drawing:
        return Drawing(
            run,
            n_steps,
            thin=thin,
            burn_in=burn_in,
            checkpoints=folder,
            checkpoint_every=checkpoint_every,
        )

    return _draw(
        alone,
        make,
        n_steps,
        settings,
        resume=resume,
        budget=budget,
        progress=progress,
        on_interrupt=on_interrupt,
    )


def _draw(
    shards: Shards,
    make: Callable[[int], Drawing],
    n_steps: int,
    settings: dict[str, Any],
    *,
    resume: bool,
    budget: float | None,
    progress: Progress | None,
    on_interrupt: OnInterrupt,
) -> Draws:
    require_on_interrupt(on_interrupt)
    if budget is not None and not budget > 0:
        raise InvalidArgumentError(f"budget must be a number of seconds > 0, got {budget!r}")
    start = shards.whole.position
    if start.shape[1] > 1 and bool((start == start[:, :1]).all()):
        settings = {**settings, "started_at_one_point": True}
    if progress is True:
        with progress_bar("sampling", n_steps) as bar:
            return _draw(
                shards,
                make,
                n_steps,
                settings,
                resume=resume,
                budget=budget,
                progress=bar,
                on_interrupt=on_interrupt,
            )
    draws = shards.draw(
        make,
        settings,
        resume=resume,
        budget=budget,
        progress=progress if callable(progress) else None,
    )
    if draws is None:
        raise KeyboardInterrupt  # there is nothing to keep
    if draws.status == "finished" and shards.process_group.is_main:
        warn_of_dead_pairs(draws.pairs())
    if draws.status == "interrupted":
        how = f"interrupted after {draws.n_steps:,} of {n_steps:,} steps"
        if on_interrupt == "raise":
            raise RunInterrupted(
                f"{how}; the draws so far are in the `draws` of this exception", draws=draws
            )
        if shards.process_group.is_main:
            logger.warning("%s; the draws so far are kept", how)
    return draws


def _starting_points(
    initial: Tensor | float | Distribution | None,
    target: Target,
    shape: tuple[int, int],
    streams: Streams,
) -> Tensor | float:
    """Drawn on the CPU for all runs at once, so that neither device nor shards change them."""
    if initial is None:
        drawn = target.draw_initial(streams["initial"], shape)
        return 0.0 if drawn is None else drawn
    if not isinstance(initial, Distribution):
        return initial
    return draw_points(initial, shape, target.dim, derive_seed(streams.seed, "initial"))


def _require_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{name} must be a whole number >= {least}, got {value!r}")
