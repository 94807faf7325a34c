"""The Bayesian GAN's networks and losses against plain forms of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from torchrex.errors import InvalidArgumentError
from torchrex.vision.bayesian_gan import BayesianGAN, Discriminator, Generators, gan_losses


def small(n_generators=3):
    torch.manual_seed(0)
    return BayesianGAN(4, n_generators, size=8, channels=1, width=6, latent=5)


def batch_of(n=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, u = (torch.rand(n, 1, 8, 8, generator=generator) * 2 - 1 for _ in range(2))
    return x, torch.arange(n) % 4, u, torch.rand(n, 3, 5, generator=generator) * 2 - 1


def test_shapes_and_sizes_are_those_of_the_paper():
    generators, discriminator = Generators(1), Discriminator(10)
    assert generators(torch.zeros(2, 1, 100)).shape == (2, 1, 3, 32, 32)
    assert discriminator(torch.zeros(2, 3, 32, 32)).shape == (2, 11)
    convolutions = [m for m in discriminator.modules() if isinstance(m, nn.Conv2d)]
    assert [(m.in_channels, m.out_channels, m.kernel_size, m.stride) for m in convolutions] == [
        (a, b, (5, 5), (2, 2)) for a, b in ((3, 64), (64, 128), (128, 256), (256, 512))
    ]
    assert [m.out_channels for m in generators.modules() if isinstance(m, nn.ConvTranspose2d)] == [256, 128, 64, 3]
    assert generators.first.shape == (1, 100, 512 * 2 * 2)


def test_generators_side_by_side_are_generators_alone():
    together = small().generators
    z = batch_of()[3]
    images = together(z)
    for k in range(3):
        alone = Generators(1, size=8, channels=1, width=6, latent=5)
        mine, theirs = alone.state_dict(), together.state_dict()
        for name, tensor in mine.items():
            if tensor.ndim:
                tensor.copy_(theirs[name].chunk(3)[k])
        assert torch.allclose(alone(z[:, k : k + 1])[:, 0], images[:, k], atol=1e-6)


def test_losses_by_hand():
    gan, batch = small(), batch_of()
    energy, descended = gan_losses(gan, batch)
    x, y, u, z = batch
    fakes = gan.generators(z)
    p_fake = [gan.discriminator(images).softmax(1)[:, 4] for images in (u, fakes.flatten(0, 1))]
    supervised = -gan.discriminator(x).log_softmax(1)[torch.arange(6), y]
    expected = supervised - (1 - p_fake[0]).log() - p_fake[1].log().view(6, 3).mean(1)
    assert torch.allclose(energy, expected, atol=1e-5)
    assert torch.allclose(descended, expected.mean() - (1 - p_fake[1]).log().mean(), atol=1e-5)


def test_each_network_descends_its_own_loss():
    gan, batch = small(), batch_of()
    _, descended = gan_losses(gan, batch)
    discriminating, generating = list(gan.discriminator.parameters()), list(gan.generators.parameters())
    found = torch.autograd.grad(descended, discriminating + generating)
    x, y, u, z = batch
    fakes = gan.generators(z)
    logits = gan.discriminator(fakes.detach().flatten(0, 1))
    loss = F.cross_entropy(gan.discriminator(x), y) + F.cross_entropy(logits, torch.full((18,), 4))
    loss = loss - (1 - gan.discriminator(u).softmax(1)[:, 4]).log().mean()
    deceiving = -(1 - gan.discriminator(fakes.flatten(0, 1)).softmax(1)[:, 4]).log().mean()
    expected = torch.autograd.grad(loss, discriminating) + torch.autograd.grad(deceiving, generating)
    for ours, by_hand in zip(found, expected, strict=True):
        assert torch.allclose(ours, by_hand, atol=1e-5)


def test_the_look_of_the_generators_leaves_no_trace_in_the_statistics():
    gan, other, batch = small(), small(), batch_of()
    gan_losses(gan, batch)
    for images in (batch[0], batch[2], other.generators(batch[3]).flatten(0, 1)):
        other.discriminator(images)
    for name, buffer in gan.named_buffers():
        assert torch.allclose(buffer.double(), dict(other.named_buffers())[name].double(), atol=1e-6), name


def test_it_runs_on_the_engine():
    energy = tr.PosteriorEnergy.of(gan_losses, n_data=100, prior=tr.GaussianPrior(1.0))
    ensemble = tr.ModuleEnsemble(small, energy, tr.SGHMC(0.1), initial="independent")
    run = tr.ReplicaExchange(ensemble, tr.Ladder((0.01, 0.02), 1e-5), noise=tr.PairedVariance(0.3), seed=0)
    infos = [run.step(batch_of(seed=k)) for k in range(4)]
    assert all(info.energy.isfinite().all() for info in infos)
    assert float(run.state.noise_variance) > 0
    assert run.predict((batch_of()[0], None)).shape == (6, 5)


@pytest.mark.parametrize("size", [2, 12, 33])
def test_sizes_that_cannot_be(size):
    with pytest.raises(InvalidArgumentError, match="power of 2 from 4 on"):
        Discriminator(10, size=size)
