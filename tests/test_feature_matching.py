"""The stronger discriminator and the loss by feature matching against plain forms of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torchrex as tr
from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.vision.bayesian_gan import (
    BayesianGAN,
    Consistency,
    GanBatch,
    convolved_as_product,
    disagreement,
    gan_losses,
    supervised_losses,
)
from torchrex.vision.feature_matching import (
    DROPPED,
    Convolution,
    Linear,
    Matching,
    MatchingDiscriminator,
)

SIZES = {"size": 8, "channels": 1, "width": 6}
EXACT = {"rtol": 1e-9, "atol": 1e-12}  # in float64


def small(n_generators=3):
    """Generators of different brightness; scales and biases that are none of the first ones."""
    torch.manual_seed(0)
    judge = MatchingDiscriminator(4, **SIZES)
    gan = BayesianGAN(4, n_generators, **SIZES, latent=5, discriminator=judge).double()
    for name, parameter in judge.named_parameters():
        if not name.endswith("free"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    if n_generators:
        gan.generators.layers[-1].bias.data.copy_(torch.tensor([[-1.0], [0.0], [1.5]]))
    return gan


def masks(n, seed=5):
    generator = torch.Generator().manual_seed(seed)
    shapes = [shape for _, shape in MatchingDiscriminator.dropout(**SIZES)]
    return tuple(torch.rand(n, c, h, w, generator=generator) < 0.7 for h, w, c in shapes)


def batch_of(n=6, latents=4, *, dropped=True):
    """Twice as many generated images as labelled ones; masks for all of them."""
    generator = torch.Generator().manual_seed(1)
    x, u, again = torch.rand(3, n, 1, 8, 8, generator=generator, dtype=torch.float64) * 2 - 1
    z = torch.rand(latents, 3, 5, generator=generator, dtype=torch.float64) * 2 - 1
    kept = masks(3 * n + 3 * latents) if dropped else ()
    return GanBatch(0.3 * x + 0.5, torch.arange(n) % 4, u, z, again, kept)


def centred(free):
    """Weights (out, ...) without the mean of each output."""
    return free - free.mean(tuple(range(1, free.ndim)), keepdim=True)


def normed(layer):
    """Torch's own layer with the weights of ours."""
    if isinstance(layer, Linear):
        plain = nn.Linear(*reversed(layer.free.shape))
    else:
        out, into, kernel, _ = layer.free.shape
        plain = nn.Conv2d(into, out, kernel, layer.stride, layer.padding)
    plain = weight_norm(plain.double(), dim=0)
    plain.parametrizations.weight.original0.data.copy_(
        layer.scale.detach().view(-1, *[1] * (layer.free.ndim - 1))
    )
    plain.parametrizations.weight.original1.data.copy_(centred(layer.free.detach()))
    plain.bias.data.copy_(layer.bias.detach())
    return plain


def plain_features(judge, x, kept=()):
    """Torch's layers one after the other; dropout where a block begins."""
    for k, block in enumerate(judge.features.blocks):
        if kept:
            x = x * kept[k] / (1 - DROPPED[k])
        for layer in block:
            weight = F.normalize(centred(layer.free), dim=(1, 2, 3))
            weight = weight * layer.scale[:, None, None, None]
            x = F.conv2d(x, weight, layer.bias, stride=layer.stride, padding=layer.padding)
            x = F.leaky_relu(x, 0.2)
    return x.flatten(2).mean(2)


def plain_logits(judge, x, kept=()):
    weight = F.normalize(centred(judge.classes.free), dim=1) * judge.classes.scale[:, None]
    real = plain_features(judge, x, kept) @ weight.T + judge.classes.bias
    return torch.cat([real, torch.zeros(len(x), 1, dtype=x.dtype)], 1)


def part(kept, *where):
    return tuple(mask[slice(*where)] for mask in kept)


# Networks


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Linear(5, 7), (4, 7)),
        (Convolution(3, 5, 3, 2, 1), (4, 3, 6, 6)),
        (Convolution(3, 5, 1, 1, 0), (4, 3, 6, 6)),
    ],
)
def test_layers_are_torchs_weight_norm_of_centred_weights(layer, shape):
    """Values and all gradients. Mutants: a norm or a mean over all outputs, or none; no gradient
    through them. What all inputs have in common changes nothing. The first scale undoes what the
    leaky ReLU takes from a standard normal.
    """
    before_relu = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(10**5) + 0.5) / 10**5)
    left = float(F.leaky_relu(before_relu, 0.2).square().mean())
    assert layer.scale.tolist() == pytest.approx([left**-0.5] * 5, rel=1e-3)
    assert not layer.bias.any()
    torch.manual_seed(0)
    layer = layer.double()
    for parameter in (layer.scale, layer.bias):
        nn.init.uniform_(parameter, 0.5, 1.5)
    plain, x = normed(layer), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer(x), plain(x)
    theirs = theirs if isinstance(layer, Linear) else F.leaky_relu(theirs, 0.2)
    torch.testing.assert_close(ours, theirs, **EXACT)
    weights = torch.linspace(-1.0, 2.0, ours.numel(), dtype=torch.float64).view(ours.shape)
    given = (x, layer.scale, layer.bias, layer.free)
    original = plain.parametrizations.weight
    found = torch.autograd.grad((ours * weights).sum(), given)
    given = (x, original.original0, plain.bias, original.original1)
    *expected, of_centred = torch.autograd.grad((theirs * weights).sum(), given)
    expected.append(centred(of_centred))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.view_as(one), **EXACT)
    inside = slice(1, -1) if len(shape) == 4 and layer.padding else slice(None)
    shifted, ours = (
        each[..., inside, inside] if each.ndim == 4 else each for each in (layer(x + 3.0), ours)
    )
    torch.testing.assert_close(shifted, ours, **EXACT)


def test_the_network_is_that_of_salimans():
    """Nine convolutions of 96 and 192 channels, without padding in the third block; what dropout
    drops has the shapes of what comes into the blocks.
    """
    judge, shapes, entering = MatchingDiscriminator(10), [], []
    for block in judge.features.blocks:
        block.register_forward_pre_hook(lambda _, given: entering.append(given[0].shape[1:]))
        for layer in block:
            layer.register_forward_hook(lambda _, given, made: shapes.append(made.shape[1:]))
    assert judge(torch.zeros(2, 3, 32, 32)).shape == (2, 11)
    pixels = zip([96] * 3 + [192] * 6, (32, 32, 16, 16, 16, 8, 6, 6, 6), strict=True)
    assert shapes == [(channels, side, side) for channels, side in pixels]
    layers = [layer for block in judge.features.blocks for layer in block]
    kernels = [(layer.free.shape[2], layer.stride) for layer in layers]
    assert kernels == [(3, 1), (3, 1), (3, 2)] * 2 + [(3, 1), (1, 1), (1, 1)]
    assert entering == [(3, 32, 32), (96, 16, 16), (192, 8, 8)]
    dropped = [(p, (c, h, w)) for p, (h, w, c) in MatchingDiscriminator.dropout()]
    assert dropped == list(zip((0.2, 0.5, 0.5), entering, strict=True))
    assert judge.classes.free.shape == (10, 192)
    assert all(isinstance(layer, Linear | Convolution) for layer in (*layers, judge.classes))


@pytest.mark.parametrize("size", [8, 12, 16])
def test_small_images_fit(size):
    """Those of 8 x 8 pixels are padded in the third block, or nothing would be left."""
    judge, sizes = MatchingDiscriminator(4, **{**SIZES, "size": size}), {**SIZES, "size": size}
    kept = tuple(torch.ones(2, c, h, w) > 0 for _, (h, w, c) in judge.dropout(**sizes))
    assert judge(torch.zeros(2, 1, size, size), kept=kept).isfinite().all()


@pytest.mark.parametrize("size", [4, 10])
def test_other_sizes_are_refused(size):
    with pytest.raises(InvalidArgumentError, match=f"a multiple of 4 from 8 on, got {size}"):
        MatchingDiscriminator(4, size=size)


@pytest.mark.parametrize("training", [True, False])
def test_what_is_kept_comes_from_the_batch(training):
    """Logits by hand; the last is 0. Nothing is dropped without masks; masks of all scale by
    1 / (1 - p). Neither the mode nor the parts of a batch change anything: images are judged alone.
    """
    gan, batch = small(), batch_of()
    judge, x = gan.discriminator.train(training), batch.unlabelled
    every = tuple(torch.ones_like(mask[:6]) for mask in batch.kept)
    found = []
    for kept in ((), every, part(batch.kept, 6)):
        logits = judge(x, parts=2, kept=kept)
        torch.testing.assert_close(logits, plain_logits(judge, x, kept), **EXACT)
        assert not logits[:, -1].any()
        alone = [judge(x[k : k + 1], kept=part(kept, k, k + 1)) for k in range(6)]
        torch.testing.assert_close(logits, torch.cat(alone), **EXACT)
        found.append(logits)
    assert not any(torch.allclose(found[k], found[k - 1], atol=1e-3) for k in range(3))
    assert torch.equal(gan(x), found[0][:, :-1])
    scaled = judge.features.blocks[0](x / 0.8)
    for block in judge.features.blocks[1:]:
        scaled = block(scaled / 0.5)
    torch.testing.assert_close(judge.features(x, every), scaled.mean((2, 3)), **EXACT)


def test_replicas_drop_the_same():
    """Two replicas with equal weights have equal energies at the first step. The mutant is
    nn.Dropout in the network: each replica draws its own.
    """

    def first_energies(factory):
        energy = tr.PosteriorEnergy.of(supervised_losses, n_data=100)
        ensemble = tr.ModuleEnsemble(factory, energy, tr.SGHMC(0.1))
        run = tr.ModuleExchange(ensemble, tr.Ladder((0.01, 0.02), 1e-5), swap_start=9, seed=0)
        return run.step(batch_of()).energy.flatten().tolist()

    def mutant():
        gan = small()
        gan.discriminator.features.blocks[1].insert(0, nn.Dropout(0.5))
        return gan

    cold, hot = first_energies(small)
    assert cold == hot
    cold, hot = first_energies(mutant)
    assert abs(cold - hot) > 1e-3 * abs(cold)


# Losses


def disagreement_of(one, other, certain):
    """From the probabilities of the real classes."""
    if not certain:
        return (one - other).square().sum(1)
    likeliest = one.argmax(1)[:, None]
    is_certain = one.gather(1, likeliest) > certain
    return -(is_certain * other.gather(1, likeliest).log())[:, 0]


def by_hand(gan, batch, weight=0.0, certain=0.0, judging=1.0):
    """Energy terms, and the distance of each generator; generated images lie latent by latent."""
    judge, n, fakes = gan.discriminator, len(batch.labels), gan.generators(batch.latent)
    of_labelled, of_unlabelled = part(batch.kept, n), part(batch.kept, n, 2 * n)
    of_again, of_fakes = part(batch.kept, 2 * n, 3 * n), part(batch.kept, 3 * n, None)
    known = plain_logits(judge, batch.labelled, of_labelled).softmax(1)[:, :4]
    unknown = plain_logits(judge, batch.unlabelled, of_unlabelled).softmax(1)[:, 4]
    one, other = (
        plain_logits(judge, *each)[:, :4].softmax(1)
        for each in ((batch.unlabelled, of_unlabelled), (batch.again, of_again))
    )
    fake = plain_logits(judge, fakes.detach().flatten(0, 1), of_fakes).softmax(1)[:, 4]
    supervised = -(known[torch.arange(n), batch.labels]).log()
    energy = supervised - judging * ((1 - unknown).log() + fake.log().view(n, -1).mean(1))
    energy = energy + weight * disagreement_of(one, other, certain)
    wanted = plain_features(judge, batch.unlabelled, of_unlabelled).mean(0).detach()
    distances = [
        (plain_features(judge, fakes[:, k], part(of_fakes, k, None, 3)).mean(0) - wanted)
        for k in range(3)
    ]
    return energy, [distance.abs().mean() for distance in distances]


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (3, 1, 0), (1, 1, 0), (5, 2, 2)]
)
def test_a_product_is_the_convolution(kernel, stride, padding):
    """Images of unequal sides, values and all gradients. Mutants: the places of the kernel in
    another order; a wrong number of columns of zeros.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    given = (numbers(4, 3, 8, 12), numbers(5, 3, kernel, kernel), numbers(5))
    ours = convolved_as_product(*given, stride, padding)
    theirs = F.conv2d(*given, stride, padding)
    torch.testing.assert_close(ours, theirs, **EXACT)
    found, expected = (torch.autograd.grad(y.square().sum(), given) for y in (ours, theirs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize(
    ("weight", "certain", "judging"),
    [(0.0, 0.0, 1.0), (3.0, 0.0, 1.0), (3.0, 0.0, 0.1), (3.0, 0.45, 0.1)],
)
def test_matching_losses_by_hand(dropped, weight, certain, judging):
    """Mutants: a mean over generators; one distance for the images of all of them; the means of
    labelled images; generated images in another order than their masks; the masks of images that
    are augmented again on generated ones; probabilities of all classes.
    """
    gan, batch = small(), batch_of(dropped=dropped)
    energy, descended = Matching(weight, certain, judging)(gan, batch)
    expected, distances = by_hand(gan, batch, weight, certain, judging)
    torch.testing.assert_close(energy, expected, **EXACT)
    torch.testing.assert_close(descended, expected.mean() + sum(distances), **EXACT)
    assert min(distances) > 1e-3
    few = batch_of(dropped=False)._replace(latent=batch.latent[:3])
    with pytest.raises(TargetError, match="as many unlabelled as labelled images"):
        Matching(weight, certain, judging)(gan, few)


def test_only_what_is_certain_must_agree():
    """By hand: the class of the first image is certain, of the others not, or only by the logit of
    "fake". Gradients reach the second augmentation alone. The mutant compares with that one.
    """
    one = torch.tensor([[3.0, 0.0, 9.0], [0.5, 0.0, 0.0], [0.0, 1.0, -9.0]], requires_grad=True)
    other = torch.tensor([[0.0, 1.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0]], requires_grad=True)
    found = disagreement(one, other, 0.8)
    missed = math.log(1.0 + math.e)
    torch.testing.assert_close(found, torch.tensor([missed, 0.0, 0.0]))
    moves, moved = torch.autograd.grad(found.sum(), [one, other], allow_unused=True)
    assert moves is None or not moves.any()
    assert moved[0, :2].all()
    assert not moved[0, 2]
    assert not moved[1:].any()


def test_each_network_descends_its_own_loss():
    """The discriminator the energy alone, each generator its own distance alone. Mutants: the
    energy moves the generators; the distances move the discriminator, by either of their ends.
    """
    gan, batch = small(), batch_of()
    judged, generating = (list(each.parameters()) for each in (gan.discriminator, gan.generators))
    found = torch.autograd.grad(Matching()(gan, batch)[1], judged + generating)
    energy, distances = by_hand(gan, batch)
    expected = torch.autograd.grad(energy.mean(), judged)
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, **EXACT)
    for k, distance in enumerate(distances):
        alone = torch.autograd.grad(distance, generating, retain_graph=True)
        for ours, theirs in zip(found[len(judged) :], alone, strict=True):
            mine, *others = (theirs.chunk(3)[(k + shift) % 3] for shift in range(3))
            torch.testing.assert_close(ours.chunk(3)[k], mine, **EXACT)
            assert not any(other.any() for other in others)
        assert any(theirs.chunk(3)[k].any() for theirs in alone)


def test_losses_without_generators_drop_as_the_batch_says():
    """The masks of the labelled images, of the unlabelled ones, and of those augmented again."""
    gan, batch = small(0), batch_of()
    logits = [
        plain_logits(gan.discriminator, images, part(batch.kept, 6 * k, 6 * k + 6))
        for k, images in enumerate((batch.labelled, batch.unlabelled, batch.again))
    ]
    alone = F.cross_entropy(logits[0], batch.labels, reduction="none")
    torch.testing.assert_close(supervised_losses(gan, batch), alone, **EXACT)
    p, q = (each[:, :4].softmax(1) for each in logits[1:])
    for certain in (0.0, 0.7):
        expected = alone + 3 * disagreement_of(p, q, certain)
        torch.testing.assert_close(Consistency(3.0, certain)(gan, batch), expected, **EXACT)


def test_the_losses_of_the_paper_drop_too():
    """By the same network; there the masks are those of one generator after the other."""
    gan, batch = small(), batch_of()
    n, fakes = 6, gan.generators(batch.latent)
    images = (batch.labelled, batch.unlabelled, fakes.transpose(0, 1).flatten(0, 1))
    masks_of = (part(batch.kept, n), part(batch.kept, n, 2 * n), part(batch.kept, 3 * n, None))
    known, unknown, fake = (
        plain_logits(gan.discriminator, *each).softmax(1)
        for each in zip(images, masks_of, strict=True)
    )
    generated = -fake[:, 4].log().view(3, 4).T.reshape(n, 2).mean(1)
    real = -(1 - unknown[:, 4]).log()
    expected = -known[torch.arange(n), batch.labels].log() + real + generated
    energy, descended = gan_losses(gan, batch)
    torch.testing.assert_close(energy, expected, **EXACT)
    deceived = -3 * (1 - fake[:, 4]).log().mean()
    torch.testing.assert_close(descended, expected.mean() + deceived, **EXACT)
