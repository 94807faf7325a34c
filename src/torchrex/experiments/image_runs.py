"""Training on images: data, averages, traces and numbers of some jobs that go side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrex.errors import DataError, NonFiniteEnergyError
from torchrex.experiments.curves import MOST_SWAPS, binned, rounded
from torchrex.experiments.images import N_TRAINING, ImageConfig
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.members import member_of
from torchrex.network import Outcome, TrainingRun, train_together
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Callback
from torchrex.rng import derive_seed
from torchrex.targets import DeviceLoader
from torchrex.vision.augment import Augment, Normalise, evaluation_batches
from torchrex.vision.data import data_folder, load_images, stratified_split, stratified_subset

logger = logging.getLogger("torchrex")

TRACES_PER_EPOCH = 15  # energies kept of an epoch
EVALUATION_BATCH = 2500
MANY_IMAGES = 10**6  # more than a CPU trains on while one waits


def train_images(
    jobs: Sequence[Job],
    *,
    device: str,
    resume: bool,
    budget: float | None,
    progress: Callback | None,
) -> tuple[Outcome, list[Trained]]:
    """Train jobs of one company side by side; what came of each, in the same order."""
    config: ImageConfig = jobs[0].config
    on = config.place(device).device
    loader, extra, test = data_of(config, on)
    if on.type == "cpu" and config.n_steps * config.batch_size > MANY_IMAGES:
        logger.warning(
            "%s is made for a GPU, and %s steps on this CPU will take days; to look at it here: --set epochs=1 --set subset=512 "
            "--set test_subset=200 --set net=resnet8",
            config.recipe,
            f"{config.n_steps:,}",
        )
    energies: dict[tuple[float, bool], Any] = {}
    members = []
    for job in jobs:
        energy = job.config.energy()
        energy = energies.setdefault(
            (job.config.weight_decay, job.config.prior_in_swaps), energy
        )  # its repr is rounded
        run, traced = (
            job.config.run(job.seed, on, energy),
            max(1, config.steps_per_epoch // TRACES_PER_EPOCH),
        )
        members.append(
            member_of(
                job,
                run,
                test,
                every=config.steps_per_epoch,
                burn_in=job.config.burn_in,
                traced=traced,
            )
        )
    try:
        outcome = train_together(
            members,
            loader,
            config.n_steps,
            checkpoint_every=config.checkpoint_every * config.steps_per_epoch,
            resume=resume,
            budget=budget,
            progress=progress,
            extra=extra,
            on_interrupt="return",
        )
    except NonFiniteEnergyError:
        if any(member.failure is None for member in members):
            raise
        outcome = Outcome("failed")  # all of them, each for its own reason
    if outcome.status == "paused" and outcome.steps < config.steps_per_epoch:
        logger.warning(
            "the budget of %.3g s was used up after %d of the %d steps of an epoch; they are saved, but give it more time",
            budget or 0.0,
            outcome.steps,
            config.steps_per_epoch,
        )
    return outcome, [
        _trained(job.config, member, outcome) for job, member in zip(jobs, members, strict=True)
    ]


def data_of(
    config: ImageConfig, device: torch.device
) -> tuple[DeviceLoader, DeviceLoader, list[tuple[Tensor, Tensor]]]:
    """Training batches, batches for repeated energies (the same images in another order), and what
    is evaluated.

    The order and the augmentation depend on `data_seed` alone, not on who takes part.
    """
    images = load_images(config.data)
    x, y = images.train_images, images.train_labels
    if config.subset is None and len(x) != N_TRAINING:
        raise DataError(
            f"{config.data} in {data_folder()} has {len(x):,} training images instead of {N_TRAINING:,}; import or fetch it again"
        )
    held_out = (images.test_images, images.test_labels)
    if config.validation:
        chosen, validation = stratified_split(y, config.validation, seed=config.data_seed)
        held_out = (x[validation], y[validation])
        x, y = x[chosen], y[chosen]
    if config.subset is not None:
        few = stratified_subset(y, config.subset, seed=config.data_seed)
        x, y = x[few], y[few]
    if config.test_subset is not None:
        few = stratified_subset(held_out[1], config.test_subset, seed=config.data_seed)
        held_out = (held_out[0][few], held_out[1][few])
    x, y = x.to(device), y.to(device)
    loader, extra = (
        DeviceLoader(
            (x, y), config.batch_size, seed=derive_seed(config.data_seed, name), augment=Augment()
        )
        for name in ("training", "repeated energies")
    )
    return loader, extra, evaluation_batches(*held_out, Normalise(), EVALUATION_BATCH, device)


def _trained(config: ImageConfig, member: TrainingRun, outcome: Outcome) -> Trained:
    assert member.trace is not None
    if member.failure is not None or outcome.status != "finished":
        return Trained(member.trace, failure=member.failure)
    (average,) = member.averages
    metrics = metrics_of(config, average) | {
        "seconds_per_epoch": outcome.total_seconds / config.epochs
    }
    curves = curves_of(config, member.trace.tensors(), average)
    return Trained(member.trace, metrics, curves, {"probabilities": average.probabilities(0)})


def metrics_of(config: ImageConfig, average: PosteriorAverage) -> dict[str, Any]:
    """Of rung 0, and with the prefix `pooled_` of both rungs: the average of probabilities,
    `logits_` the paper's sum of logits, `single_` the newest network alone, `best_` the best over
    epochs on the evaluated images, as the authors reported it.
    """
    metrics: dict[str, Any] = {"n_draws": average.n_draws}
    for prefix, rung in (("", 0), ("pooled_", None)) if config.n_rungs > 1 else (("", 0),):
        for kind, of in (("", "probabilities"), ("logits_", "logits"), ("single_", "last")):
            numbers = average.metrics(rung, of=of)  # type: ignore[arg-type]
            metrics |= {f"{prefix}{kind}{name}": value for name, value in numbers.items()}
            metrics[f"{prefix}{kind}best_accuracy"] = float(average.history(rung)[of].max())
    metrics["mutual_information"] = float(average.mutual_information(0).mean())
    return metrics


def curves_of(
    config: ImageConfig, trace: dict[str, Tensor], average: PosteriorAverage
) -> dict[str, Any]:
    """Per epoch: mean energies per rung, noise variance and correction; the first swaps; the
    accuracies after each draw.
    """
    epoch = trace["steps"] // config.steps_per_epoch
    curves: dict[str, Any] = {
        "epoch": list(range(config.epochs)),
        "energy": [
            rounded(binned(values, epoch, config.epochs)) for values in trace["energy"].unbind(1)
        ],
    }
    for name in ("noise_variance", "correction"):
        curves[name] = [
            rounded(binned(values, epoch, config.epochs)) for values in trace[name].unbind(1)
        ]
    curves["swap_epochs"] = rounded(
        trace["swap_steps"].double()[:MOST_SWAPS] / config.steps_per_epoch
    )
    for prefix, rung in (("", 0), ("pooled_", None)) if config.n_rungs > 1 else (("", 0),):
        history = average.history(rung)
        curves["draw_epoch"] = (history["step"] // config.steps_per_epoch).tolist()
        curves |= {
            f"{prefix}{of}_accuracy": rounded(history[of])
            for of in ("probabilities", "logits", "last")
        }
    return curves
