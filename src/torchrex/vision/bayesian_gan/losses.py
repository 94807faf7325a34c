"""What discriminator and generators descend, and the energy that the swaps compare.

    discriminator   mean -log p(y | x) of labelled images, mean -log(1 - p_fake) of unlabelled ones, mean -log p_fake of generated
    each generator  mean -log(1 - p_fake) of what it generates, the discriminator as it is

A batch is (labelled images, labels, unlabelled images, latent), with equally many images of the
first two kinds and so many latents that the generated images are a multiple of them. The energy is
what the discriminator descends, as a sum over the data: given the generators it moves in a
potential, and swaps compare that potential. Example i of a batch carries the i-th of each kind and
some generated images, drawn independently. The variance over examples is that of the sum but for
two things: BatchNorm in training mode lets examples depend on each other, which makes it less
(benchmarks/batchnorm_variance.py), and all generators have the same share of every batch, so that
it is somewhat more where they differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.errors import TargetError
from torchrex.targets import aside, frozen
from torchrex.vision.bayesian_gan.nets import BayesianGAN

GanBatch = tuple[Tensor, Tensor, Tensor, Tensor]


def log_real(logits: Tensor) -> Tensor:
    """log(1 - p_fake) from the logits of all classes, of which the last is "fake"."""
    return logits[..., :-1].logsumexp(-1) - logits.logsumexp(-1)


def log_fake(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., -1]


def gan_terms(
    discriminator: nn.Module, batch: GanBatch, generated: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The discriminator's three losses of every example, (n,) each; that of generated images is a
    mean over those of an example.

    The real images go through together and alone leave their mark in the running statistics of
    BatchNorm: test images, which are real, are normalised by them.
    """
    labelled, labels, unlabelled, _ = batch
    n, n_generated = len(labels), generated.shape[:2].numel()
    if len(unlabelled) != n or n_generated % n:
        raise TargetError(
            f"a batch must have as many unlabelled images as labelled ones, and latents x generators a multiple of that; got {n} "
            f"labelled, {len(unlabelled)} unlabelled and {n_generated} generated"
        )
    known, unknown = _full(discriminator(torch.cat([labelled, unlabelled]))).chunk(2)
    fakes = _full(aside(discriminator)(generated.flatten(0, 1)))
    return (
        F.cross_entropy(known, labels, reduction="none"),
        -log_real(unknown),
        -log_fake(fakes).view(n, -1).mean(1),
    )


def gan_losses(module: nn.Module, batch: GanBatch) -> tuple[Tensor, Tensor]:
    """For `PosteriorEnergy.of(gan_losses, n_data=...)` on a `BayesianGAN`: the terms of the energy,
    and what is descended.
    """
    assert isinstance(module, BayesianGAN)
    assert module.generators is not None
    generated = module.generators(batch[3])
    energy = torch.stack(gan_terms(module.discriminator, batch, generated.detach())).sum(0)
    seen = _full(frozen(module.discriminator)(generated.flatten(0, 1)))
    # A sum over generators: each is a sample by itself and has a whole potential, however many
    # there are.
    deceived = -log_real(seen).view(generated.shape[:2]).mean(0).sum()
    return energy, energy.mean() + deceived


def supervised_losses(module: nn.Module, batch: GanBatch) -> Tensor:
    """The labelled images of the same batches and nothing else, by the same discriminator."""
    assert isinstance(module, BayesianGAN)
    return F.cross_entropy(_full(module.discriminator(batch[0])), batch[1], reduction="none")


def _full(logits: Tensor) -> Tensor:
    """Log-probabilities need more digits than autocast leaves."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits
