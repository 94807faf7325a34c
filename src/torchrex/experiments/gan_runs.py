"""Training of semi-supervised GANs: labelled and unlabelled images, averages, traces and numbers of
jobs that go side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrex.density import few_threads
from torchrex.errors import DataError, NonFiniteEnergyError
from torchrex.experiments.curves import MOST_SWAPS, binned, rounded
from torchrex.experiments.digits import digit_images
from torchrex.experiments.gan import GanConfig
from torchrex.experiments.jobs import Job, Trained
from torchrex.experiments.members import member_of
from torchrex.network import ModuleExchange, Outcome, TrainingRun, train_together
from torchrex.network.work import evaluating
from torchrex.posterior import PosteriorAverage
from torchrex.recording import Callback
from torchrex.rng import derive_seed
from torchrex.targets import DeviceLoader, without_tracking
from torchrex.vision.augment import evaluation_batches
from torchrex.vision.bayesian_gan import (
    BayesianGAN,
    WithLabelled,
    sample_grid,
    to_unit_range,
    variety,
)
from torchrex.vision.data import (
    data_folder,
    label_subset,
    load_images,
    stratified_split,
    stratified_subset,
)

logger = logging.getLogger("torchrex")

TRACE_EVERY = 10  # steps
CURVE_POINTS = 150  # of a run, in result.json
EVALUATION_BATCH = 2500
SAMPLES = 10  # images of each generator in the picture
REAL = 500  # images that what the generators make is compared with
MANY_STEPS = 2_000  # of the networks for 32 x 32 pixels, more than a CPU takes while one waits


class GanImages(NamedTuple):
    """What the seed makes of a data set."""

    labelled: Tensor
    labels: Tensor
    unlabelled: Tensor
    held_out: tuple[Tensor, Tensor]


def train_gans(
    jobs: Sequence[Job],
    *,
    device: str,
    resume: bool,
    budget: float | None,
    progress: Callback | None,
) -> tuple[Outcome, list[Trained]]:
    """Train jobs of one company side by side; what came of each, in the same order."""
    config: GanConfig = jobs[0].config
    seed = jobs[0].seed
    on = config.place(device).device
    images = images_of(config, seed)
    if on.type == "cpu" and config.data != "digits" and config.steps > MANY_STEPS:
        logger.warning(
            "%s is made for a GPU, and %s steps on this CPU will take %s; to look at it here: `torchrex run gan/digits-100`",
            config.recipe,
            f"{config.steps:,}",
            "hours" if all(job.config.method == "supervised" for job in jobs) else "days",
        )
    loader = loader_of(config, images, seed, on)
    normalise = to_unit_range(config.kind.channels)
    test = evaluation_batches(*images.held_out, normalise, EVALUATION_BATCH, on)
    energies: dict[tuple[bool, float], Any] = {}
    members = []
    for job in jobs:
        supervised = job.config.method == "supervised"
        energy = energies.setdefault((supervised, job.config.prior_precision), job.config.energy())
        run = job.config.run(job.seed, on, energy)
        times = {
            "every": job.config.average_every,
            "burn_in": job.config.warm_start,
            "traced": TRACE_EVERY,
        }
        members.append(member_of(job, run, test, **times))
    try:
        with few_threads(0):
            outcome = train_together(
                members,
                loader,
                config.n_steps,
                checkpoint_every=config.checkpoint_every,
                resume=resume,
                budget=budget,
                progress=progress,
                on_interrupt="return",
            )
    except NonFiniteEnergyError:
        if any(member.failure is None for member in members):
            raise
        outcome = Outcome("failed")  # all of them, each for its own reason
    real = normalise(images.unlabelled[:REAL])
    return outcome, [
        _trained(job, member, outcome, test, real)
        for job, member in zip(jobs, members, strict=True)
    ]


def images_of(config: GanConfig, seed: int) -> GanImages:
    """Labelled, unlabelled and evaluated images as bytes; which ones keep their labels is the
    seed's choice.
    """
    if config.data == "digits":
        (x, y), held_out = digit_images()
    else:
        found = load_images(config.data)
        (x, y), held_out = (
            (found.train_images, found.train_labels),
            (found.test_images, found.test_labels),
        )
    if len(x) != config.kind.n_train:
        raise DataError(
            f"{config.data} in {data_folder()} has {len(x):,} training images instead of {config.kind.n_train:,}; import or "
            f"fetch it again"
        )
    missing = (torch.bincount(y, minlength=config.kind.n_classes) == 0).nonzero().flatten().tolist()
    if missing:
        raise DataError(
            f"{config.data} in {data_folder()} has no image of class {missing[0]} to label; import or fetch it again"
        )
    if config.validation:
        chosen, validation = stratified_split(y, config.validation, seed=0)
        held_out = (x[validation], y[validation])
        x, y = x[chosen], y[chosen]
    if config.test_subset is not None:
        few = stratified_subset(held_out[1], min(config.test_subset, len(held_out[1])), seed=0)
        held_out = (held_out[0][few], held_out[1][few])
    labelled = label_subset(y, config.n_labelled, seed=seed)
    unlabelled = torch.ones(len(y), dtype=torch.bool)
    unlabelled[labelled] = False
    return GanImages(x[labelled], y[labelled], x[unlabelled], held_out)


def loader_of(
    config: GanConfig, images: GanImages, seed: int, device: torch.device
) -> DeviceLoader:
    """Batches as `gan_losses` wants them; their order and everything drawn for them come from the
    seed.
    """
    beside = WithLabelled(
        images.labelled.to(device), images.labels.to(device), config.n_generators, config.latents
    )
    unlabelled = (images.unlabelled.to(device),)
    return DeviceLoader(
        unlabelled,
        config.batch_size,
        seed=derive_seed(seed, "unlabelled"),
        last="wrap",
        augment=beside,
    )


def _trained(
    job: Job, member: TrainingRun, outcome: Outcome, test: list[tuple[Tensor, Tensor]], real: Tensor
) -> Trained:
    assert member.trace is not None
    if member.failure is not None or outcome.status != "finished":
        return Trained(member.trace, failure=member.failure)
    config: GanConfig = job.config
    assert isinstance(member.run, ModuleExchange)
    (average,) = member.averages
    metrics = metrics_of(config, average) | authors_score(member.run, test, config.batch_size)
    metrics["seconds_per_step"] = outcome.total_seconds / config.n_steps
    module = member.run.live_module_at(0)
    assert isinstance(module, BayesianGAN)
    pictures = {}
    if module.generators is not None:
        pictures["samples"] = sample_grid(module.generators, SAMPLES, job.seed)
        metrics["variety"] = variety(module.generators, real, job.seed)
    curves = curves_of(config, member.trace.tensors(), average)
    return Trained(
        member.trace,
        metrics,
        curves,
        {"probabilities": average.probabilities(0)},
        pictures=pictures,
    )


def metrics_of(config: GanConfig, average: PosteriorAverage) -> dict[str, Any]:
    """Over the real classes, all evaluated images: of rung 0, and with the prefix `pooled_` of both
    rungs; the average of probabilities, `single_` the newest network alone, `best_` the best over
    draws.
    """
    metrics: dict[str, Any] = {"n_draws": average.n_draws}
    for prefix, rung in (("", 0), ("pooled_", None)) if config.n_rungs > 1 else (("", 0),):
        metrics |= {f"{prefix}{name}": value for name, value in average.metrics(rung).items()}
        metrics |= {
            f"{prefix}single_{name}": value
            for name, value in average.metrics(rung, of="last").items()
        }
        metrics[f"{prefix}best_accuracy"] = float(average.history(rung)["probabilities"].max())
    metrics["mutual_information"] = float(average.mutual_information(0).mean())
    return metrics


def authors_score(
    run: ModuleExchange, test: list[tuple[Tensor, Tensor]], batch_size: int
) -> dict[str, float]:
    """Accuracy as the authors' code counts it: by the newest network on rung 0 alone, images it
    calls generated left out.

    `training_mode_accuracy` is theirs to the letter: BatchNorm normalises each batch of test images
    by itself, so that an answer depends on the images beside it.
    """
    module = run.live_module_at(0)
    assert isinstance(module, BayesianGAN)
    discriminator, beside = module.discriminator, without_tracking(module.discriminator)

    def of_each(x: Tensor) -> Tensor:
        with evaluating(module), run.ensemble.casting():
            vote: Tensor = discriminator(x).argmax(1)
            return vote

    def of_batches(x: Tensor) -> Tensor:
        parts = x.tensor_split(max(1, len(x) // batch_size))
        with torch.no_grad(), run.ensemble.casting():
            return torch.cat([beside(part).argmax(1) for part in parts])

    accuracy, called_fake = _score_of(test, of_each, module.n_classes)
    in_training, _ = _score_of(test, of_batches, module.n_classes)
    return {
        "paper_accuracy": accuracy,
        "called_fake": called_fake,
        "training_mode_accuracy": in_training,
    }


def _score_of(
    test: list[tuple[Tensor, Tensor]], votes: Callable[[Tensor], Tensor], n_classes: int
) -> tuple[float, float]:
    """Accuracy on the images that are not called generated, and the share of the others."""
    right = kept = total = 0
    for x, y in test:
        vote = votes(x)
        real = vote < n_classes
        right, kept, total = (
            right + int((vote == y)[real].sum()),
            kept + int(real.sum()),
            total + len(y),
        )
    return right / max(1, kept), 1.0 - kept / total


def curves_of(
    config: GanConfig, trace: dict[str, Tensor], average: PosteriorAverage
) -> dict[str, Any]:
    """Over the run: mean energies per rung, noise variance and correction; the first swaps; the
    accuracies after each draw.
    """
    n_bins = min(CURVE_POINTS, len(trace["steps"]))
    bins = trace["steps"] * n_bins // config.n_steps
    curves: dict[str, Any] = {"step": [k * config.n_steps // n_bins for k in range(n_bins)]}
    for name in ("energy", "noise_variance", "correction"):
        curves[name] = [rounded(binned(values, bins, n_bins)) for values in trace[name].unbind(1)]
    curves["swap_steps"] = trace["swap_steps"][:MOST_SWAPS].tolist()
    for prefix, rung in (("", 0), ("pooled_", None)) if config.n_rungs > 1 else (("", 0),):
        history = average.history(rung)
        curves["draw_step"] = history["step"].tolist()
        curves |= {
            f"{prefix}{of}_accuracy": rounded(history[of]) for of in ("probabilities", "last")
        }
    return curves
