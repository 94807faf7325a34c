"""The networks: the paper's numbers of parameters, the right structure, fit for the fast path."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchrex.errors import InvalidArgumentError
from torchrex.vision.narrow_conv import NarrowConv2d
from torchrex.vision.nets import (
    NETS,
    BasicBlock,
    Bottleneck,
    ResNet,
    WideBlock,
    WideResNet,
    build_net,
)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler"
)
SMALL = {  # of every kind the smallest
    "basic": lambda: ResNet(1, 7),
    "bottleneck": lambda: ResNet(1, 7, block=Bottleneck),
    "wide": lambda: WideResNet(10, 2, 7),
}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def small(kind):
    torch.manual_seed(0)
    return SMALL[kind]()


def images(n=4, size=32):
    x = torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))
    return x.to(memory_format=torch.channels_last)


def test_parameter_counts():
    with torch.device("meta"):
        found = {name: [count(build_net(name, n)) for n in (10, 100)] for name in NETS}
        of_he = build_net("resnet56-basic", 10)
        projections = sum(count(block.shortcut) for block in of_he.blocks)
        assert count(of_he) - projections == 853_018  # with identity shortcuts
        # Depth 9 n + 2 = 56 would mean n = 6; the authors' number of parameters says n = 9.
        assert count(ResNet(6, block=Bottleneck)) == 591_322
        # Stored draws and checkpoints go by the names.
        basic, bottleneck, wide = (set(SMALL[kind]().state_dict()) for kind in SMALL)
    assert {"conv1.weight", "bn1.weight", "blocks.1.shortcut.0.weight", "linear.bias"} <= basic
    assert {"blocks.0.bn3.running_var", "blocks.0.shortcut.1.weight"} <= bottleneck
    assert {"blocks.0.projection.weight", "blocks.2.bn1.bias", "bn.weight"} <= wide
    assert found == {
        "resnet8": [78_042, 83_892],
        "resnet20": [272_474, 278_324],
        "resnet32": [466_906, 472_756],
        "resnet56": [869_530, 892_660],
        "resnet56-basic": [855_770, 861_620],
        "wrn-16-8": [10_961_370, 11_007_540],
        "wrn-28-10": [36_479_194, 36_536_884],
    }


# Against the definition, written out


def conv_bn(conv, bn, x):
    y = F.conv2d(x, conv.weight, stride=conv.stride, padding=conv.kernel_size[0] // 2)
    return F.batch_norm(y, None, None, bn.weight, bn.bias, training=True)


def activated(bn, x):
    return F.relu(F.batch_norm(x, None, None, bn.weight, bn.bias, training=True))


def reference_shortcut(block, x):
    return x if isinstance(block.shortcut, nn.Identity) else conv_bn(*block.shortcut, x)


def reference_basic(block, x):
    y = conv_bn(block.conv2, block.bn2, F.relu(conv_bn(block.conv1, block.bn1, x)))
    return F.relu(y + reference_shortcut(block, x))


def reference_bottleneck(block, x):
    y = F.relu(conv_bn(block.conv1, block.bn1, x))
    y = conv_bn(block.conv3, block.bn3, F.relu(conv_bn(block.conv2, block.bn2, y)))
    return F.relu(y + reference_shortcut(block, x))


def reference_wide(block, x):
    a = activated(block.bn1, x)
    y = F.conv2d(a, block.conv1.weight, stride=block.conv1.stride, padding=1)
    y = F.conv2d(activated(block.bn2, y), block.conv2.weight, padding=1)
    if block.projection is None:
        return y + x
    return y + F.conv2d(a, block.projection.weight, stride=block.projection.stride)


@pytest.mark.parametrize(
    ("block", "reference", "expansion"),
    [
        (BasicBlock, reference_basic, 1),
        (Bottleneck, reference_bottleneck, 4),
        (WideBlock, reference_wide, 1),
    ],
)
@pytest.mark.parametrize(
    ("width_in", "width", "stride"), [(16, 16, 1), (64, 16, 1), (16, 32, 2), (32, 32, 2)]
)
def test_blocks(block, reference, expansion, width_in, width, stride):
    torch.manual_seed(0)
    part = block(width_in, width, stride)
    for module in part.modules():
        if isinstance(module, nn.BatchNorm2d):  # else all weights of them are alike
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    x = torch.randn(3, width_in, 8, 8)
    y = part(x)
    assert y.shape == (3, expansion * width, 8 // stride, 8 // stride)
    assert torch.allclose(y, reference(part, x), atol=1e-5)


@pytest.mark.parametrize("kind", SMALL)
def test_he_initialisation(kind):
    """Standard deviation sqrt(2 / fan out), fan out = channels out x kernel; 5 standard errors."""
    for module in small(kind).modules():
        if isinstance(module, nn.Conv2d):
            is_narrow = kind != "wide" and module.kernel_size == (3, 3)
            assert isinstance(module, NarrowConv2d) == is_narrow
            weight = module.weight.detach().double()
            expected = 2 / (module.out_channels * module.kernel_size[0] ** 2)
            ratio = float(weight.square().mean()) / expected
            assert abs(ratio - 1) < 5 * (2 / weight.numel()) ** 0.5
            assert module.bias is None
        elif isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 1).all() and (module.bias == 0).all())


# Fit for the fast path


@pytest.mark.parametrize("kind", SMALL)
def test_channels_last_under_autocast(kind):
    """Every layer keeps the memory order; bfloat16 changes loss and gradient by little."""
    net = small(kind).to(memory_format=torch.channels_last)
    x, y = images(8), torch.arange(8) % 7
    orders = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            module.register_forward_hook(lambda module, x, output: orders.append(output))

    def gradient_of(loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    exact = F.cross_entropy(net(x), y)
    gradient = gradient_of(exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
        loss = F.cross_entropy(logits, y)
    rounded = gradient_of(loss)
    assert logits.dtype == torch.bfloat16
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in orders)
    assert torch.allclose(loss, exact, rtol=0.05)
    assert float(F.cosine_similarity(gradient, rounded, dim=0)) > 0.98


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bottleneck", "wide"])
def test_compiled_in_one_graph(kind):
    net = small(kind).to(memory_format=torch.channels_last).eval()
    compiled = torch.compile(net, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(images(2, 8)), net(images(2, 8)), atol=1e-4)


# By name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build_net("resnet-20", 10), "'resnet-20'; did you mean 'resnet20'"),
        (lambda: build_net("?", 10), "there are resnet8, resnet20"),
        (lambda: build_net("resnet8", 0), "n_classes must be a whole number >= 1, got 0"),
        (lambda: WideResNet(20, 1), "depth must be .* got 20"),
        (lambda: WideResNet(16, 0), "widening must be at least 1, got 0"),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make()
