"""What discriminator and generators descend, and the energy that the swaps compare.

    discriminator   mean -log p(y | x) of labelled images, mean -log(1 - p_fake) of unlabelled ones, mean -log p_fake of generated
    generators      mean -log(1 - p_fake) of what they generate, the discriminator as it is

A batch is (labelled images, labels, unlabelled images, latent), equally many of each. The energy is what the discriminator
descends, as a sum over the data: given the generators it moves in a potential, and swaps compare that potential. Example i of a
batch carries the i-th of each kind, which are independent draws, so that the variance over examples is that of the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrex.targets import frozen
from torchrex.vision.bayesian_gan.nets import BayesianGAN

GanBatch = tuple[Tensor, Tensor, Tensor, Tensor]


def log_real(logits: Tensor) -> Tensor:
    """log(1 - p_fake) from the logits of all classes, of which the last is "fake"."""
    return logits[..., :-1].logsumexp(-1) - logits.logsumexp(-1)


def log_fake(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., -1]


def gan_terms(discriminator: Callable[[Tensor], Tensor], batch: GanBatch, generated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The discriminator's three losses of every example, (n,) each; that of generated images is a mean over generators."""
    labelled, labels, unlabelled, _ = batch
    n, n_generators = generated.shape[:2]
    supervised = F.cross_entropy(discriminator(labelled), labels, reduction="none")
    real = -log_real(discriminator(unlabelled))
    fake = -log_fake(discriminator(generated.flatten(0, 1))).view(n, n_generators).mean(1)
    return supervised, real, fake


def gan_losses(module: nn.Module, batch: GanBatch) -> tuple[Tensor, Tensor]:
    """For `PosteriorEnergy.of(gan_losses, n_data=...)` on a `BayesianGAN`: the terms of the energy, and what is descended."""
    assert isinstance(module, BayesianGAN)
    generated = module.generators(batch[3])
    energy = torch.stack(gan_terms(module.discriminator, batch, generated.detach())).sum(0)
    deceived = -log_real(frozen(module.discriminator)(generated.flatten(0, 1))).mean()
    return energy, energy.mean() + deceived
