"""The Bayesian GAN's networks and losses against plain forms of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchrex as tr
from assertions import assert_mean_is, assert_mean_is_not
from modules import same
from torchrex.errors import InvalidArgumentError, NonFiniteEnergyError, TargetError
from torchrex.exchange import StepInfo
from torchrex.experiments import gan
from torchrex.experiments.gan import digits_gan_recipes
from torchrex.vision.augment import Augment, Erasing
from torchrex.vision.bayesian_gan import (
    BayesianGAN,
    Consistency,
    Discriminator,
    GanBatch,
    Generators,
    Upsampling,
    WithLabelled,
    gan_losses,
    gan_terms,
    log_fake,
    log_real,
    normalised_apart,
    sample_grid,
    supervised_losses,
    variety,
)
from torchrex.vision.feature_matching import Matching

SIZES = {"size": 8, "channels": 1, "width": 6}


def small(n_generators=3, *, apart=False):
    torch.manual_seed(0)
    judge = Discriminator(4, **SIZES, apart=apart)
    return BayesianGAN(4, n_generators, **SIZES, latent=5, discriminator=judge)


def batch_of(n=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, u = (torch.rand(n, 1, 8, 8, generator=generator) * 2 - 1 for _ in range(2))
    x = 0.3 * x + 0.5  # brighter, as the statistics of BatchNorm show
    latent = torch.rand(n, 3, 5, generator=generator) * 2 - 1
    return GanBatch(x, torch.arange(n) % 4, u, latent)


def test_layers_are_those_of_the_paper():
    """One generator against torch's own layers; the discriminator by kinds; weights N(0, 0.02)."""
    torch.manual_seed(0)
    ours = Generators(1, size=8, channels=1, width=6, latent=5).double()
    plain = nn.Sequential(
        nn.Linear(5, 4 * 12, bias=False),
        nn.Unflatten(1, (2, 2, 12)),
        Permuted(0, 3, 1, 2),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 6, 5, stride=2, padding=2, output_padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 1, 5, stride=2, padding=2, output_padding=1),
        nn.Tanh(),
    ).double()
    plain[0].weight.data.copy_(ours.first[0].T)
    pairs = zip(ours.layers, ((plain[5], 12, 6), (plain[8], 6, 1)), strict=True)
    for mine, (layer, into, out) in pairs:
        layer.weight.data.copy_(mine.weight[0].view(into, 5, 5, out).permute(0, 3, 1, 2))
    plain[8].bias.data.copy_(ours.layers[1].bias[0].data.fill_(0.3))
    z = torch.rand(7, 5, dtype=torch.float64) * 2 - 1
    torch.testing.assert_close(ours(z[:, None])[:, 0], plain(z), rtol=1e-9, atol=1e-12)

    discriminator, large = Discriminator(10), Generators(1)
    assert large(torch.zeros(2, 1, 100)).shape == (2, 1, 3, 32, 32)
    assert discriminator(torch.zeros(2, 3, 32, 32)).shape == (2, 11)
    convolutions = [m for m in discriminator.modules() if isinstance(m, nn.Conv2d)]
    sizes = [(m.in_channels, m.out_channels, m.kernel_size, m.stride) for m in convolutions]
    widths = ((3, 64), (64, 128), (128, 256), (256, 512))
    assert sizes == [(a, b, (5, 5), (2, 2)) for a, b in widths]
    shapes = [tuple(m.weight.shape) for m in large.layers]
    assert shapes == [(1, b, 25 * a) for a, b in reversed(widths)]
    kinds = [type(layer).__name__ for layer in discriminator.features]
    normalised = ["Conv2d", "BatchNorm2d", "LeakyReLU"]
    assert kinds == ["Conv2d", "LeakyReLU", *normalised, *normalised, *normalised]
    slopes = {m.negative_slope for m in discriminator.modules() if isinstance(m, nn.LeakyReLU)}
    assert slopes == {0.2}
    drawn = [m.weight for m in discriminator.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for weight in (*drawn, large.first, *(layer.weight for layer in large.layers)):
        # 6 standard errors of the 4,800 numbers of the smallest.
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.06)


class Permuted(nn.Module):
    def __init__(self, *order):
        super().__init__()
        self.order = order

    def forward(self, x):
        return x.permute(*self.order)


@pytest.mark.parametrize("training", [True, False])
def test_generators_side_by_side_are_generators_alone(training):
    """Images, gradients and running statistics."""
    together = small().generators.double().train(training)
    z = batch_of().latent.double()
    images = together(z)
    weights = torch.linspace(-1.0, 2.0, images.numel(), dtype=torch.float64).view(images.shape)
    named = dict(together.named_parameters())
    gradients = torch.autograd.grad((images * weights).sum(), list(named.values()))
    by_name = dict(zip(named, gradients, strict=True))
    for k in range(3):
        alone = Generators(1, size=8, channels=1, width=6, latent=5).double().train(training)
        fresh = small().generators.double().state_dict()
        for name, tensor in alone.state_dict().items():
            if tensor.ndim:
                tensor.copy_(fresh[name].chunk(3)[k])
        mine = alone(z[:, k : k + 1])[:, 0]
        torch.testing.assert_close(mine, images[:, k], rtol=1e-9, atol=1e-12)
        (mine * weights[:, k]).sum().backward()
        for name, parameter in alone.named_parameters():
            expected = by_name[name].chunk(3)[k]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-12)
        for name, buffer in alone.named_buffers():
            if buffer.ndim:
                torch.testing.assert_close(buffer, dict(together.named_buffers())[name].chunk(3)[k])


def unlike_generators(*, apart):
    """Their images differ in brightness, and so do the statistics of BatchNorm."""
    gan = small(apart=apart)
    gan.generators.layers[-1].bias.data.copy_(torch.tensor([[-1.0], [0.0], [1.5]]))
    return gan


def logits_of(discriminator, *parts):
    """Of each part by itself if they are normalised apart; otherwise of all parts together."""
    if discriminator.apart:
        return [discriminator(part) for part in parts]
    return discriminator(torch.cat(parts)).split([len(part) for part in parts])


@pytest.mark.parametrize("apart", [False, True])
def test_losses_by_hand(apart):
    """Real images go through the discriminator together, generated ones separately; or labelled,
    unlabelled and every generator's images apart. Mutants: parts of some images of every generator;
    the logits in the order of these parts.
    """
    gan, batch = unlike_generators(apart=apart), batch_of()
    energy, descended = gan_losses(gan, batch)
    x, y, u, z, *_ = batch
    fakes = gan.generators(z)
    known, unknown = (logits.softmax(1) for logits in logits_of(gan.discriminator, x, u))
    p_fake = torch.stack(logits_of(gan.discriminator, *fakes.unbind(1)), 1).softmax(2)[..., 4]
    supervised, real = -known[torch.arange(6), y].log(), -(1 - unknown[:, 4]).log()
    generated = -p_fake.log().mean(1)  # as many latents as labelled images
    expected = supervised + real + generated
    assert torch.allclose(energy, expected, atol=1e-5)
    assert torch.allclose(descended, expected.mean() - 3 * (1 - p_fake).log().mean(), atol=1e-5)
    terms = gan_terms(gan.discriminator, batch, fakes)
    for term, by_hand in zip(terms, (supervised, real, generated), strict=True):
        assert term.shape == (6,)
        assert torch.allclose(term, by_hand, atol=1e-5)
    alone = -gan.discriminator(x).log_softmax(1)[torch.arange(6), y]
    assert torch.allclose(supervised_losses(gan, batch), alone, atol=1e-6)
    with pytest.raises(TargetError, match="as many unlabelled as labelled images"):
        gan_losses(gan, batch._replace(unlabelled=u[:5]))


@pytest.mark.parametrize("apart", [False, True])
def test_each_network_descends_its_own_loss(apart):
    """The discriminator sees detached images; a generator's loss leaves the discriminator alone.
    Half as many latents as labelled images do too.
    """
    gan, batch = unlike_generators(apart=apart), batch_of()
    x, y, u, z, *_ = batch = batch._replace(latent=batch.latent[:4])
    networks = [list(part.parameters()) for part in (gan.discriminator, gan.generators)]
    found = torch.autograd.grad(gan_losses(gan, batch)[1], networks[0] + networks[1])
    fakes = gan.generators(z)
    logits = torch.cat(logits_of(gan.discriminator, *fakes.detach().unbind(1)))
    known, unknown = logits_of(gan.discriminator, x, u)
    loss = F.cross_entropy(known, y) + F.cross_entropy(logits, torch.full((12,), 4))
    loss = loss - (1 - unknown.softmax(1)[:, 4]).log().mean()
    seen = torch.cat(logits_of(gan.discriminator, *fakes.unbind(1))).softmax(1)[:, 4]
    deceiving = -3 * (1 - seen).log().mean()
    expected = torch.autograd.grad(loss, networks[0]) + torch.autograd.grad(deceiving, networks[1])
    for ours, by_hand in zip(found, expected, strict=True):
        assert torch.allclose(ours, by_hand, atol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_consistency_by_hand(apart):
    """Losses and gradients; distances are those of the real classes, some tenths here. Mutants: the
    first image is a constant; the class "fake" takes part; a mean over classes.
    """
    gan = small(0, apart=apart)
    gan.discriminator.classes.weight.data *= 30.0
    batch = batch_of()
    batch = batch._replace(again=batch_of(seed=2).unlabelled)
    found = Consistency(0.7)(gan, batch)
    parts = (batch.labelled, batch.unlabelled, batch.again)
    known, first, second = logits_of(gan.discriminator, *parts)
    p, q = (logits[:, :4].softmax(1) for logits in (first, second))
    distance = ((p - q) ** 2).sum(1)
    assert float(distance.detach().mean()) > 0.05
    expected = F.cross_entropy(known, batch.labels, reduction="none") + 0.7 * distance
    assert torch.allclose(found, expected, atol=1e-5)
    ours, by_hand = (
        torch.autograd.grad(each.sum(), gan.parameters()) for each in (found, expected)
    )
    for one, other in zip(ours, by_hand, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        TargetError, match=r"augmented twice: WithLabelled\(augment=\.\.\.\)"
    ) as caught:
        Consistency(0.7)(gan, batch._replace(again=None))
    assert "\n" not in str(caught.value)


def test_losses_of_logits_far_out_are_finite():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 200.0], [200.0, 0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([4.0, 1.0]).log() - torch.tensor([200.0, 0.0])
    assert torch.allclose(log_real(logits), expected, atol=1e-5)
    assert torch.allclose(log_fake(logits), torch.tensor([0.0, -200.0]))


@pytest.mark.parametrize("apart", [False, True])
def test_running_statistics_come_from_real_images_alone(apart):
    """The discriminator's from one pass of them all, the generators' from one pass of theirs."""
    gan, other = small(apart=apart), small(apart=apart)
    batch = batch_of()
    gan_losses(gan, batch)
    other.discriminator(torch.cat([batch.labelled, batch.unlabelled]), parts=2)
    other.generators(batch.latent)
    changed = 0
    for name, buffer in gan.named_buffers():
        assert torch.equal(buffer, dict(other.named_buffers())[name]), name
        changed += not torch.equal(buffer, dict(small().named_buffers())[name])
    assert changed > 5


# Parts of a batch, normalised apart


def discriminators(*, apart):
    """With two layers of BatchNorm, whose parameters and statistics are none of the first ones."""
    torch.manual_seed(0)
    network = Discriminator(4, size=16, channels=1, width=6, apart=apart)
    for layer in network.features:
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                nn.init.uniform_(tensor, 0.5, 1.5)
    return network


def unlike_images(parts, n=5):
    """Each part with another mean and another contrast."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 1, 16, 16, generator=generator) * (1 + k) + 2 * k for k in range(parts)]


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_are_normalised_by_themselves(parts):
    """Logits, all gradients and the running statistics against nn.BatchNorm2d on each part alone,
    whose statistics are averaged. Mutants: all parts together; parts of every other image; running
    variances that are biased, or move once for each part.
    """
    together, images = discriminators(apart=True), unlike_images(parts)
    alone = [discriminators(apart=False) for _ in images]
    found = together(torch.cat(images), parts=parts)
    expected = torch.cat([network(x) for network, x in zip(alone, images, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1.0, 2.0, found.numel()).view(found.shape)
    for logits in (found, expected):
        (logits * weights).sum().backward()
    for name, parameter in together.named_parameters():
        theirs = torch.stack([network.get_parameter(name).grad for network in alone]).sum(0)
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-4)
    buffers = dict(together.named_buffers())
    assert len(buffers) == 6
    for name, buffer in buffers.items():
        theirs = torch.stack([network.get_buffer(name).double() for network in alone]).mean(0)
        torch.testing.assert_close(buffer.double(), theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, discriminators(apart=False)(torch.cat(images)), atol=0.01)


@pytest.mark.parametrize(
    ("apart", "parts", "training"), [(True, 1, True), (True, 3, False), (False, 3, True)]
)
def test_otherwise_batchnorm_is_the_ordinary_one(apart, parts, training):
    """Bit for bit: a single part, in evaluation mode, and without `apart`."""
    network, plain = discriminators(apart=apart), discriminators(apart=False)
    x = torch.cat(unlike_images(3))
    assert torch.equal(network.train(training)(x, parts=parts), plain.train(training)(x))
    assert same(dict(network.named_buffers()), dict(plain.named_buffers()))


def test_apart_in_bfloat16_has_the_statistics_of_float32():
    """A mean of 30 and a standard deviation of 0.5, of which bfloat16 leaves two digits at most."""
    generator = torch.Generator().manual_seed(4)
    x = (30 + 0.5 * torch.randn(6, 2, 4, 4, generator=generator)).bfloat16()
    found = normalised_apart(nn.BatchNorm2d(2), x, 2)
    assert found.dtype == torch.bfloat16
    expected = torch.cat([nn.BatchNorm2d(2)(part) for part in x.float().chunk(2)])
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-4)


# A generator that breaks


def gan_run(sampler=None, *, shared=("generators.",), **options):
    energy = tr.PosteriorEnergy.of(gan_losses, n_data=100, prior=tr.GaussianPrior(1.0))
    sampler = tr.SGHMC(0.1) if sampler is None else sampler
    ensemble = tr.ModuleEnsemble(small, energy, sampler, initial="independent", shared=shared)
    ladder = tr.Ladder((0.01, 0.02), 1e-5)
    return tr.ModuleExchange(ensemble, ladder, noise=tr.PairedVariance(0.3), seed=0, **options)


@pytest.mark.parametrize("part", ["first", "layers.1.bias"])
@pytest.mark.parametrize("shared", [(), ("generators.",)])
def test_a_broken_generator_is_named(part, shared):
    """Its weights become NaN in one replica or, shared, in all; the next step names it."""
    run = gan_run(shared=shared)
    data = [batch_of(seed=k) for k in range(4)]
    list(run.advance(2, data))
    assert run.ensemble.nonfinite_part(1) is None
    for module in run.ensemble.modules if shared else run.ensemble.modules[1:]:
        dict(module.generators.named_parameters())[part].data[2] = float("nan")
    with pytest.raises(NonFiniteEnergyError, match=r"It began with generator 2 of 3\.") as caught:
        list(run.advance(3, data))
    assert "\n" not in str(caught.value)
    assert caught.value.step == 2
    assert (caught.value.rung == 0) if shared else (caught.value.replica == 1)
    run = gan_run(shared=shared)
    run.ensemble.modules[1].discriminator.classes.bias.data[0] = float("nan")
    with pytest.raises(NonFiniteEnergyError) as caught:
        run.step(batch_of())
    assert "generator" not in str(caught.value)


def test_the_first_one_stays_the_culprit():
    """By the time one looks the discriminator has spread it to all of them."""
    generators, z = small().generators, batch_of().latent
    for broken in (2, 0):
        generators.first.data[broken] = float("nan")
        generators(z)
    assert int(generators.broken) == 2


def test_of_generators_that_break_at_once_none_is_the_culprit():
    """The discriminator broke before them. Mutant: generator 0, the first of them."""
    generators, z = small().generators, batch_of()[3]
    generators.first.data[:] = float("nan")
    for _ in range(2):
        generators(z)
        assert generators.first_broken() == -1


# Batches


def labelled_digits(n=40, n_labelled=12):
    """Images whose first pixel is their number, and labels that belong to the number."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 8, 8, 1), generator=generator, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(n, dtype=torch.uint8)
    return images[:n_labelled], 3 * torch.arange(n_labelled) % 10, images[n_labelled:]


def loader():
    images, labels, unlabelled = labelled_digits()
    augment = WithLabelled(images, labels, 3, 14, 5)
    return tr.DeviceLoader((unlabelled,), 7, seed=1, last="wrap", augment=augment)


def number_of(images):
    return ((images[:, 0, 0, 0] * 0.5 + 0.5) * 255).round().long()


def test_batches_hold_images_in_the_unit_range_and_labels_that_belong_to_them():
    x, labels, _ = labelled_digits()
    seen, drawn = set(), set()
    data = loader()
    for _ in range(40):
        images, y, u, z, again, kept = data.next()
        assert (again, kept) == (None, ())
        assert images.shape == u.shape == (7, 1, 8, 8)
        assert z.shape == (14, 3, 5)
        for each in (images, u, z):
            assert float(each.min()) >= -1.0
            assert float(each.max()) <= 1.0
        assert torch.equal(y, labels[number_of(images)])
        expected = (x[number_of(images)].float() / 127.5 - 1).permute(0, 3, 1, 2)
        assert torch.allclose(images, expected, atol=1e-6)
        drawn |= set(number_of(images).tolist())
        seen |= set(number_of(u).tolist())
    assert drawn == set(range(12))
    assert seen == set(range(12, 40))
    assert float(z.std()) > 0.4  # uniform on [-1, 1]: 0.577


PADDING = 2  # pixels
DROPPED = ((0.2, (8, 8, 1)), (0.5, (4, 5, 6)))
LABELS = 3 * torch.arange(12) % 10


def numbered(first, n):
    """Images whose pixels are all their number."""
    numbers = torch.arange(first, first + n, dtype=torch.uint8)
    return numbers[:, None, None, None].expand(n, 8, 8, 1).clone()


def augmented_batch(seed, *, n=200, dropout=(), stronger=None):
    """Unlabelled images 1, ..., n and the labelled ones 201, ..., 212, all drawn by a seed."""
    augment = Augment(PADDING, False, None, (0.5,), (0.5,))
    batches = WithLabelled(numbered(201, 12), LABELS, 3, 14, 5, augment, dropout, stronger)
    return batches((numbered(1, n),), torch.Generator().manual_seed(seed))


def number_and_shift(images):
    """The number of each image, and how many pixels it was shifted down and right."""
    pixels = ((images[:, 0] * 0.5 + 0.5) * 255).round().long()
    inside = pixels > 0
    number = pixels.amax((1, 2))
    assert torch.equal(pixels, number[:, None, None] * inside)
    sides = [inside.any(axis).long() for axis in (2, 1)]
    return number, torch.stack([side.argmax(1) - side.flip(1).argmax(1) for side in sides], 1)


def test_images_are_augmented_and_unlabelled_ones_twice():
    """Labels still belong to their images. The two shifts of an image are independent: so their
    product is 0 on average, and they are equal for one image in 25. Mutants: one augmentation
    repeated; another image the second time; labels of other images.
    """
    shifts = []
    for seed in range(10):
        batch = augmented_batch(seed)
        for images in (batch.labelled, batch.unlabelled, batch.again):
            assert (images.shape, images.dtype) == ((200, 1, 8, 8), torch.float32)
            assert float(images.min()) >= -1.0
        assert batch.latent.shape == (14, 3, 5)
        assert batch.kept == ()
        labelled, shift = number_and_shift(batch.labelled)
        assert set(labelled.tolist()) == set(range(201, 213))
        assert torch.equal(batch.labels, LABELS[labelled - 201])
        assert len(shift.unique(dim=0)) == 25
        (first, shift), (second, other) = map(number_and_shift, (batch.unlabelled, batch.again))
        assert torch.equal(first, torch.arange(1, 201))
        assert torch.equal(second, first)
        shifts.append(torch.stack([shift, other]))
    one, other = torch.cat(shifts, 1)
    assert one.abs().max() == other.abs().max() == PADDING
    for axis in (0, 1):
        assert_mean_is((one * other)[:, axis], 0.0)
        assert_mean_is_not((one * one)[:, axis], 0.0)
    assert_mean_is((one == other).all(1), 1 / 25)


def test_the_stronger_augmentation_is_for_labelled_images_and_the_second_time():
    """Here it erases a third of every image and shifts none. Mutants: unlabelled images are erased
    the first time too, or labelled ones are not; labels of other images.
    """
    stronger = Augment(0, False, Erasing(1.0, (0.3, 0.3), (0.8, 1.2), fill=(7.0,)), (0.5,), (0.5,))
    batch = augmented_batch(0, stronger=stronger)
    for images in (batch.labelled, batch.again):
        erased = (images == 7.0).double().mean((1, 2, 3))
        assert 0.2 < float(erased.min()) <= float(erased.max()) < 0.4
    kept = batch.labelled.where(batch.labelled < 7.0, -1.0).amax((1, 2, 3))
    number = ((kept * 0.5 + 0.5) * 255).round().long()
    assert torch.equal(batch.labels, LABELS[number - 201])
    first, shift = number_and_shift(batch.unlabelled)
    assert torch.equal(first, torch.arange(1, 201))
    assert len(shift.unique(dim=0)) == 25
    with pytest.raises(InvalidArgumentError, match="needs augment"):
        WithLabelled(numbered(201, 12), LABELS, 3, 14, stronger=stronger)
    with pytest.raises(InvalidArgumentError, match=r"mean=\(0\.5,\) and std=\(0\.5,\)"):
        augmented_batch(0, stronger=Augment(0, False, None, (0.0,), (0.5,)))


def test_how_much_dropout_keeps():
    """An own mask for each of 3 x 200 real images and 14 x 3 generated ones; five standard
    deviations of the binomial law. The mutant keeps what should be dropped.
    """
    kept = augmented_batch(0, dropout=DROPPED).kept
    assert [tuple(mask.shape) for mask in kept] == [(642, 1, 8, 8), (642, 6, 4, 5)]
    for mask, (probability, _) in zip(kept, DROPPED, strict=True):
        assert mask.dtype == torch.bool
        assert len(mask.flatten(1).unique(dim=0)) == 642
        assert_mean_is(mask, 1 - probability)
    assert_mean_is_not(~kept[0], 0.8)


def test_a_batch_is_its_generators_alone():
    """The global generator neither decides nor moves."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = augmented_batch(0, dropout=DROPPED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert same(one, augmented_batch(0, dropout=DROPPED))
    other = augmented_batch(1, dropout=DROPPED)
    for name in GanBatch._fields:
        assert not same(getattr(one, name), getattr(other, name)), name


def test_bad_arguments():
    x, y, _ = labelled_digits()
    with pytest.raises(InvalidArgumentError, match=r"mean=\(0\.5,\) and std=\(0\.5,\)"):
        WithLabelled(x, y, 3, 14, augment=Augment(erase=None, mean=(0.0,), std=(1.0,)))
    with pytest.raises(TargetError, match="needs the features of a MatchingDiscriminator"):
        Matching()(small(), batch_of())
    with pytest.raises(InvalidArgumentError, match="got 12 images and 11 labels"):
        WithLabelled(x, y[:11], 3, 14)
    with pytest.raises(InvalidArgumentError, match="power of 2 from 4 on"):
        Discriminator(10, size=12)
    with pytest.raises(InvalidArgumentError, match="n_generators must be at least 1, got 0"):
        Generators(0)


# Pictures


def test_a_grid_shows_each_generator_in_a_row():
    generators = small().generators
    z = torch.rand((4, 3, 5), generator=torch.Generator().manual_seed(7)) * 2 - 1
    assert generators.training
    before = {name: buffer.clone() for name, buffer in generators.named_buffers()}
    grid = sample_grid(generators, 4, 7)
    assert generators.training
    assert same(before, dict(generators.named_buffers()))
    assert grid.shape == (3 * 34 + 2, 4 * 34 + 2, 1)  # 8 x 8 pixels are shown four times as large
    assert grid.dtype == torch.uint8
    images = ((generators.eval()(z) + 1) * 127.5).round().byte()
    for row in range(3):
        for column in range(4):
            top, left = 2 + 34 * row, 2 + 34 * column
            shown = grid[top : top + 32, left : left + 32, 0]
            image = images[column, row, 0].repeat_interleave(4, 0).repeat_interleave(4, 1)
            assert torch.equal(shown, image)
    assert set(grid[:2].flatten().tolist()) == {255}
    assert sample_grid(generators, 4, 7, most_rows=2).shape == (2 * 34 + 2, 4 * 34 + 2, 1)
    assert not torch.equal(sample_grid(generators, 4, 8), grid)


def test_variety_is_that_within_a_generator():
    """Real images that differ by 2 in every pixel; two of three generators make one image each."""
    # The standard deviation of each pixel is sqrt(2).
    real = torch.stack([torch.full((1, 8, 8), -1.0), torch.full((1, 8, 8), 1.0)])
    generators = small().generators
    z = torch.rand((100, 3, 5), generator=torch.Generator().manual_seed(7)) * 2 - 1
    with torch.no_grad():
        generators.first[1:] = 0.0  # whatever the latent
        for k in (1, 2):
            generators.norms[0].bias[k * len(generators.norms[0].bias) // 3 :] = 0.5 * k
    before = {name: buffer.clone() for name, buffer in generators.named_buffers()}
    found = variety(generators, real, 7)
    assert same(before, dict(generators.named_buffers()))
    images = copy.deepcopy(generators).eval()(z).detach()
    assert images[:, 1:].std(0).max() < 1e-6
    assert images.mean(0).std(0).mean() > 1e-3  # the generators differ, which is no variety
    assert found == pytest.approx(float(images[:, 0].std(0).mean()) / 3 / 2**0.5, rel=1e-4)
    assert found > 0


# On the engine


def test_the_statistics_of_shared_generators_are_one():
    """Both rungs feed them the same latents."""
    run = gan_run(tr.AdamStart(tr.SGHMC(0.1), 3, n_data=100), momentum="refresh", swap_start=3)
    for k in range(6):
        run.step(batch_of(seed=k))
    one, other = run.ensemble.modules
    assert same(dict(one.generators.state_dict()), dict(other.generators.state_dict()))
    assert not same(dict(one.discriminator.state_dict()), dict(other.discriminator.state_dict()))


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_gpu(networks="paper", **settings):
    """A run of the digits recipe with both rungs and its batches, on a GPU, in float32."""
    config = digits_gan_recipes()["gan/digits-100"]
    of_a_test = {"steps": 400, "warm_start": 100, "average_every": 10}
    of_a_test |= {"networks": networks, "augment": networks == "matching"}
    of_a_test |= {"precision": "float32", "correction_factor": math.inf}
    config = dataclasses.replace(config, **{**of_a_test, **settings})
    config.check()
    device = torch.device("cuda")
    return config.run(0, device, config.energy()), config.batches(0, device).train


def infos(run, data, n):
    blocks = list(run.advance(n, data))
    return {
        name: torch.cat([getattr(block, name) for block in blocks]) for name in StepInfo._fields
    }


@needs_gpu
@pytest.mark.parametrize("networks", ["paper", "matching"])
@pytest.mark.parametrize("generators", ["shared", "own"])
@pytest.mark.parametrize(("warm_start", "tolerance"), [(0, 1e-5), (12, 1e-3)])
def test_captured_and_eager_agree(monkeypatch, generators, warm_start, tolerance, networks):
    """In float32. Adam divides by the size of a gradient, so by rounding near 0. The gradient of a
    matching distance jumps where the distance is 0, so there rounding grows within few steps.
    """
    n = 20 if networks == "paper" else 4
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    captured, data = on_gpu(networks, generators=generators, warm_start=warm_start)
    monkeypatch.setattr(gan, "ModuleExchange", functools.partial(tr.ModuleExchange, compiled=False))
    eager, again = on_gpu(networks, generators=generators, warm_start=warm_start)
    a, b = infos(captured, data, n), infos(eager, again, n)
    assert not captured.graphs.failed
    assert captured.graphs.compiled
    assert eager.graphs is None
    assert torch.equal(a["accepted"], b["accepted"])
    torch.testing.assert_close(a["energy"], b["energy"], rtol=tolerance, atol=0)
    for one, other in zip(captured.ensemble.modules, eager.ensemble.modules, strict=True):
        left, right = (
            torch.cat([p.detach().reshape(-1) for p in module.parameters()])
            for module in (one, other)
        )
        assert float((left - right).norm() / right.norm()) < tolerance


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stop", [50, 100, 256, 300])
@pytest.mark.parametrize("networks", ["paper", "matching"])
def test_resume_is_exact_on_a_gpu(stop, precision, networks):
    """Bit for bit: inside the warm start, at its end, at the end of a block and within the next."""
    whole, data = on_gpu(networks, precision=precision)
    list(whole.advance(310, data))
    assert not whole.graphs.failed
    first, data = on_gpu(networks, precision=precision)
    list(first.advance(stop, data))
    saved, position = first.state_dict(), data.state_dict()
    second, data = on_gpu(networks, precision=precision)
    second.load_state_dict(saved)
    data.load_state_dict(position)
    list(second.advance(310 - stop, data))
    assert not second.graphs.failed
    assert same(whole.state_dict()["replicas"], second.state_dict()["replicas"])
    assert same(whole.state_dict()["exchange"], second.state_dict()["exchange"])


@needs_gpu
def test_shared_generators_are_one_on_a_gpu():
    run, data = on_gpu()
    accepted = infos(run, data, 310)["accepted"]
    assert bool(accepted.any())
    one, other = run.ensemble.modules
    assert same(dict(one.generators.state_dict()), dict(other.generators.state_dict()))
    assert not same(dict(one.discriminator.state_dict()), dict(other.discriminator.state_dict()))


@needs_gpu
def test_a_broken_generator_is_named_on_a_gpu():
    run, data = on_gpu()
    list(run.advance(3, data))
    for module in run.ensemble.modules:
        module.generators.first.data[1] = float("nan")
    with pytest.raises(NonFiniteEnergyError, match=r"It began with generator 1 of"):
        list(run.advance(300, data))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("bias", [True, False])
def test_upsampling_is_a_transposed_convolution_of_each_group(bias, device):
    """Images and all gradients in float64; the weights of a group are (into, 5, 5, out)."""
    torch.manual_seed(0)
    groups, into, out, n = 3, 4, 2, 5
    layer = Upsampling(groups, into, out, bias=bias).double().to(device)
    if bias:
        nn.init.normal_(layer.bias)
    kind = {"dtype": torch.float64, "device": device}
    x = torch.randn(groups, n, 6, 3, into, **kind).requires_grad_()
    target = torch.randn(groups, n, 12, 6, out, **kind)
    found = layer(x)
    assert found.shape == target.shape
    parameters = list(layer.parameters())
    ours = torch.autograd.grad((found * target).sum(), [x, *parameters])
    alone = [
        F.conv_transpose2d(
            x[k].permute(0, 3, 1, 2),
            layer.weight[k].view(into, 5, 5, out).permute(0, 3, 1, 2),
            layer.bias[k] if bias else None,
            stride=2,
            padding=2,
            output_padding=1,
        )
        for k in range(groups)
    ]
    expected = torch.stack(alone).permute(0, 1, 3, 4, 2)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    theirs = torch.autograd.grad((expected * target).sum(), [x, *parameters])
    for mine, by_torch in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, by_torch, rtol=1e-10, atol=1e-12)
