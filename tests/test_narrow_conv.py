"""Convolutions of few channels: the layer is nn.Conv2d; on a GPU it is as accurate as cuDNN."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchrex.vision.narrow_conv import NarrowConv2d, narrow_conv, narrow_conv_weight, triton

ON_HOPPER = (
    torch.cuda.is_available() and triton is not None and torch.cuda.get_device_capability()[0] == 9
)
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU and Triton")
SHAPES = [(3, 16, 32, 32), (16, 16, 32, 32), (32, 32, 16, 16), (16, 16, 5, 6)]


def layers(channels_in, channels_out, **options):
    """The same weights in our layer and in torch's."""
    torch.manual_seed(0)
    options = {"kernel_size": 3, "padding": 1, "bias": False, **options}
    ours = NarrowConv2d(channels_in, channels_out, **options)
    theirs = nn.Conv2d(channels_in, channels_out, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def images(n, channels, height, width, *, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(n, channels, height, width, device="cuda", generator=generator).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def results(layer, x, dy):
    """Output, input gradient and weight gradient under autocast."""
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, layer.weight], dy)


def exact_results(layer, x, dy):
    """The same in float64, from the weights as autocast rounds them."""
    exact = copy.deepcopy(layer).double()
    exact.weight.data = layer.weight.data.bfloat16().double()
    x = x.double().requires_grad_()
    y = F.conv2d(x, exact.weight, padding=1)
    return y.detach(), *torch.autograd.grad(y, [x, exact.weight], dy.double())


def error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


def test_on_a_cpu_it_is_torchs_layer():
    ours, theirs = layers(16, 16)
    x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    assert list(ours.state_dict()) == ["weight"]
    assert torch.equal(ours(x), theirs(x))
    mine, reference = (
        torch.autograd.grad(layer(x).square().sum(), layer.weight)[0] for layer in (ours, theirs)
    )
    assert torch.equal(mine, reference)


@needs_hopper
@pytest.mark.parametrize("n", [1, 3, 256])
@pytest.mark.parametrize(("channels_in", "channels_out", "height", "width"), SHAPES)
def test_values_are_as_good_as_cudnns(channels_in, channels_out, height, width, n):
    ours, theirs = (layer.cuda() for layer in layers(channels_in, channels_out))
    x, dy = images(n, channels_in, height, width), images(n, channels_out, height, width, seed=1)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert ours._fits(x)
    exact = exact_results(theirs, x, dy)
    for mine, cudnn, truth in zip(results(ours, x, dy), results(theirs, x, dy), exact, strict=True):
        assert mine.dtype == cudnn.dtype
        assert mine.shape == cudnn.shape
        assert error(mine, truth) < min(1e-2, 2 * error(cudnn, truth))


@needs_hopper
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("channels_in", "channels_out", "height", "width"), SHAPES)
def test_borders(channels_in, channels_out, height, width, channels_last):
    """Single bright pixels in the corners and the middle: every sum has one term and is exact."""
    ours, theirs = (layer.cuda() for layer in layers(channels_in, channels_out))
    if channels_last:
        ours = ours.to(memory_format=torch.channels_last)
    x = torch.zeros_like(images(6, channels_in, height, width))
    dy = images(6, channels_out, height, width, seed=1)
    bottom, right = height - 1, width - 1
    places = [(0, 0), (0, right), (bottom, 0), (bottom, right), (height // 2, width // 2)]
    for image, (row, column) in enumerate(places):
        x[image, image % channels_in, row, column] = 1.0
    assert torch.equal(results(ours, x, dy)[0].double(), exact_results(theirs, x, dy)[0])
    for image in range(len(places)):  # one image at a time, so that each number is one product
        one = x[image : image + 1], dy[image : image + 1]
        assert torch.equal(results(ours, *one)[2].double(), exact_results(theirs, *one)[2])
    x, dy = images(6, channels_in, height, width, seed=2), impulses(x, channels_out)
    assert torch.equal(results(ours, x, dy)[1].double(), exact_results(theirs, x, dy)[1])


def impulses(x, channels):
    """The bright pixels of x, in the first channel of as many as asked for."""
    dy = x.new_zeros(len(x), channels, *x.shape[2:]).contiguous(memory_format=torch.channels_last)
    dy[:, 0] = x.sum(1)
    return dy


@needs_hopper
def test_the_same_bits_each_time():
    ours = layers(16, 16)[0].cuda()
    x, dy = images(256, 16, 32, 32), images(256, 16, 32, 32, seed=1)
    first = results(ours, x, dy)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, results(ours, x, dy), strict=True))


@needs_hopper
@pytest.mark.filterwarnings("ignore")
def test_compiled():
    """Without a break in the graph, and with the same gradients."""
    net = nn.Sequential(
        layers(3, 16)[0], nn.ReLU(), layers(16, 16)[0], nn.ReLU(), layers(16, 16)[0]
    )
    net = net.cuda().to(memory_format=torch.channels_last)
    x = images(8, 3, 32, 32, dtype=torch.float32)

    def gradients(function):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = function(x)
        return torch.autograd.grad(y.float().square().mean(), list(net.parameters()))

    compiled = torch.compile(net, fullgraph=True, dynamic=False)
    for eager, fast in zip(gradients(net), gradients(compiled), strict=True):
        assert error(fast, eager.double()) < 1e-2


@needs_hopper
def test_captured_on_side_streams():
    ours = [layers(16, 16)[0].cuda() for _ in range(3)]
    x, dy = images(16, 16, 32, 32), images(16, 16, 32, 32, seed=1)

    def side_by_side():
        outcomes, main = [], torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in ours]
        for layer, stream in zip(ours, streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                outcomes.append(results(layer, x, dy))
        for stream in streams:
            main.wait_stream(stream)
        return outcomes

    side_by_side()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = side_by_side()
    x.copy_(images(16, 16, 32, 32, seed=2))
    graph.replay()
    torch.cuda.synchronize()
    for layer, outcome in zip(ours, captured, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(results(layer, x, dy), outcome, strict=True))


@needs_hopper
@pytest.mark.filterwarnings("ignore")
def test_the_operators_keep_torchs_rules():
    x = images(2, 16, 8, 8).requires_grad_()
    weight = torch.randn(16, 16, 3, 3, device="cuda", requires_grad=True)
    checked = torch.library.opcheck(narrow_conv, (x, weight))
    checked |= torch.library.opcheck(
        narrow_conv_weight, (x.detach(), images(2, 16, 8, 8), weight.detach())
    )
    assert set(checked.values()) == {"SUCCESS"}


@needs_hopper
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"stride": 2}, None),
        ({"kernel_size": 1, "padding": 0}, None),
        ({"bias": True}, None),
        ({"padding": 0}, None),
        ({"groups": 2}, None),
        ({"padding_mode": "circular"}, None),
        ({}, "contiguous"),
        ({}, "odd width"),
        ({}, "no autocast"),
    ],
)
def test_everything_else_is_torchs_layer(options, change):
    ours, theirs = (layer.cuda() for layer in layers(16, 16, **options))
    x = images(4, 16, 32, 33 if change == "odd width" else 32, dtype=torch.float32)
    if change == "contiguous":
        x = x.contiguous()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=change != "no autocast"):
        assert not ours._fits(x)
        assert torch.equal(ours(x), theirs(x))
