"""`sample`: from a log density to draws in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError
from torchrex.exchange import FactorRule, Ladder, NoiseEstimator, Pairing, ReplicaExchange, TensorEnsemble
from torchrex.exchange.momentum import MomentumPolicy
from torchrex.exchange.run import steps_on
from torchrex.exchange.threads import few_threads
from torchrex.posterior.draw_recorder import DrawRecorder
from torchrex.posterior.draws import Draws
from torchrex.posterior.progress import Callback, progress_bar
from torchrex.samplers import Sampler
from torchrex.targets import LogDensity, Target

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
    initial: Tensor | float = 0.0,
    noise: NoiseEstimator | None = None,
    correction_factor: float | FactorRule = 1.0,
    pairing: Pairing | None = None,
    swap_interval: int = 1,
    swap_intensity: float | None = None,
    momentum: MomentumPolicy = "rescale",
    compiled: bool | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Draws:
    """Sample a target by adaptive replica exchange and return the draws of the coldest rung.

    `target` is a Target or a log density that maps points (n, dim) to (n,). The ladder is given by `temperatures` and `lr`
    (one, or one per rung) or as a `Ladder`. One temperature is plain SGLD or SGHMC; `correction_factor=float("inf")` is the naive
    test. `n_runs` independent runs proceed side by side; every `thin`-th draw after `burn_in` steps is kept.

    Ctrl-C returns what was drawn so far, with status "interrupted". A NaN or infinite energy raises NonFiniteEnergyError with the
    draws so far in `draws`. `progress=True` shows a bar; a function is called as `progress(done, total)` after every block.
    `initial` broadcasts to (rungs, runs, dim). The rest are arguments of `ReplicaExchange`; see docs/choosing.md.

    >>> draws = sample(lambda x: -0.5 * x.square().sum(-1), dim=2, temperatures=(1.0, 4.0), lr=0.05, n_steps=200, n_runs=4)
    >>> draws.values.shape
    torch.Size([4, 200, 2])
    """
    for name, value, least in (
        ("n_steps", n_steps, 1),
        ("n_runs", n_runs, 1),
        ("thin", thin, 1),
        ("burn_in", burn_in, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgumentError(f"{name} must be a whole number >= {least}, got {value!r}")
    if not isinstance(target, Target):
        if dim is None:
            raise InvalidArgumentError("a log density needs its dimension: sample(log_density, dim=...)")
        target = LogDensity(target, dim)
    elif dim not in (None, target.dim):
        raise InvalidArgumentError(f"dim={dim} was given, but {target!r} has dim={target.dim}; leave dim out")
    if n_steps - burn_in < thin:
        raise InvalidArgumentError(f"n_steps={n_steps} keeps no draw with burn_in={burn_in} and thin={thin}; raise n_steps")
    if ladder is None:
        if temperatures is None or lr is None:
            raise InvalidArgumentError("give temperatures=... and lr=..., or ladder=Ladder(...)")
        ladder = Ladder(temperatures, lr)
    elif temperatures is not None or lr is not None:
        raise InvalidArgumentError("give either ladder=... or temperatures=... and lr=..., not both")

    ensemble = TensorEnsemble.start(
        target,
        sampler,
        n_rungs=ladder.n_rungs,
        n_runs=n_runs,
        initial=initial,
        device=steps_on(device),
        dtype=dtype,
    )
    run = ReplicaExchange(
        ensemble,
        ladder,
        noise=noise,
        correction_factor=correction_factor,
        pairing=pairing,
        swap_interval=swap_interval,
        swap_intensity=swap_intensity,
        momentum=momentum,
        seed=seed,
        compiled=compiled,
    )
    return collect(run, n_steps, thin=thin, burn_in=burn_in, progress=progress, settings={"seed": seed})


def collect(
    run: ReplicaExchange,
    n_steps: int,
    *,
    thin: int = 1,
    burn_in: int = 0,
    progress: Progress | None = None,
    settings: dict[str, Any] | None = None,
) -> Draws:
    """Advance a run by `n_steps` and keep its draws; memory is bounded by what is kept."""
    if progress is True:
        with progress_bar("sampling", n_steps) as bar:
            return collect(run, n_steps, thin=thin, burn_in=burn_in, progress=bar, settings=settings)
    recorder = DrawRecorder(n_steps, thin=thin, burn_in=burn_in)
    # Not repr(run), which says where the run stands now; that is worth a word only if it has gone some way before.
    earlier = {"steps_before": run.n_steps} if run.n_steps else {}
    described = f"ReplicaExchange({cast(Any, run).ensemble!r}, {run.rules.ladder!r})"
    settings = {"run": described, **earlier, **(settings or {})}
    status = "finished"
    try:
        for info in run.advance(n_steps):
            with few_threads(info.energy[0].numel()):
                recorder.record(info)
            if callable(progress):
                progress(recorder.n_seen, n_steps)
    except KeyboardInterrupt:
        status = "interrupted"
        if recorder.n_seen == 0:
            raise  # there is nothing to keep
        logger.warning("interrupted after %s of %s steps; the draws so far are kept", f"{recorder.n_seen:,}", f"{n_steps:,}")
    except NonFiniteEnergyError as error:
        raise NonFiniteEnergyError(
            replica=error.replica,
            rung=error.rung,
            run=error.run,
            step=error.step,
            value=error.value,
            draws=recorder.draws("failed", settings),
        ) from None
    draws = recorder.draws(status, settings)
    assert draws is not None
    return draws
