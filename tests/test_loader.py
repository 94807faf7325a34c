"""DeviceLoader: every example has its turn, the seed decides the order, and it resumes exactly."""

from __future__ import annotations

import pytest
import torch

import torchrex as tr
from modules import same
from torchrex.errors import InvalidArgumentError

N = 23
LAST = pytest.mark.parametrize("last", ["drop", "wrap", "keep"])


def numbered(n=N):
    """Example i is i everywhere, so that exchanged rows are seen."""
    number = torch.arange(n)
    return number[:, None].float() * torch.ones(3), number


def loader(batch_size=5, *, n=N, **options):
    return tr.DeviceLoader(numbered(n), batch_size, **options)


def labels(data):
    """The labels of one pass, batch by batch."""
    return [y.tolist() for _, y in data]


def flat(lists):
    return [label for part in lists for label in part]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 5, 22, 23])
def test_keep_gives_every_example_once_an_epoch(batch_size, shuffle):
    data = loader(batch_size, last="keep", shuffle=shuffle)
    for _ in range(3):
        batches = labels(data)
        assert (flat(batches) if not shuffle else sorted(flat(batches))) == list(range(N))
        assert len(batches) == len(data) == -(-N // batch_size)
        assert all(len(batch) == batch_size for batch in batches[:-1])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 5, 22, 23])
def test_wrap_gives_every_example_equally_often(batch_size, shuffle):
    data = loader(batch_size, last="wrap", shuffle=shuffle)
    before = torch.get_rng_state()
    seen = [data.next() for _ in range(N * 4)]
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is not used
    for x, y in seen:
        assert torch.equal(x, y[:, None].float().expand(-1, 3))  # rows stay together
        x.fill_(-1.0)  # a copy
    seen = [y.tolist() for _, y in seen]
    assert {len(y) for y in seen} == {batch_size}
    seen = flat(seen)
    for start in range(0, len(seen) - N + 1, N):
        assert sorted(seen[start : start + N]) == list(range(N))


@pytest.mark.parametrize("batch_size", [1, 5, 12, 23])
def test_drop_leaves_out_what_does_not_fill_a_batch(batch_size):
    data = loader(batch_size)
    left_out = set()
    for _ in range(40):
        batches = labels(data)
        assert [len(batch) for batch in batches] == [batch_size] * len(data)
        seen = flat(batches)
        assert len(set(seen)) == len(seen) == N - N % batch_size
        left_out |= set(range(N)) - set(seen)
    assert left_out == (set(range(N)) if N % batch_size else set()), "always the same left out"


@LAST
def test_the_seed_and_the_epoch_decide_the_order(last):
    mine, again, other = (loader(seed=seed, last=last) for seed in (4, 4, 5))
    torch.manual_seed(0)
    first = [labels(mine) for _ in range(3)]
    torch.manual_seed(1)
    assert [labels(again) for _ in range(3)] == first
    assert labels(other) != first[0]
    assert len({str(epoch) for epoch in first}) == 3


def test_the_order_is_random():
    """Chi-square of the first example: 23 cells of 100, below its 1 - 1e-6 quantile."""
    data = loader(N, seed=1)
    counts = torch.zeros(N)
    for _ in range(100 * N):
        counts[data.next()[1][0]] += 1
    assert float(((counts - 100.0).square() / 100.0).sum()) < 70.0


def jitter(batch, generator):
    x, y = batch
    return x + torch.rand(x.shape, generator=generator), y


def test_augmentation_draws_from_the_loaders_generator():
    mine, again, other = (loader(seed=seed, augment=jitter) for seed in (1, 1, 2))
    torch.manual_seed(8)
    first = [x for x, _ in mine]
    torch.manual_seed(9)
    assert same([x for x, _ in again], first)
    fractions = [x.frac() for x in first]
    assert not torch.equal(fractions[0], fractions[1])
    assert not torch.equal(next(iter(other))[0].frac(), fractions[0])
    noise = torch.cat([x - y[:, None] for x, y in mine])
    assert 0.0 <= float(noise.min()) < float(noise.max()) < 1.0


# Resuming


@LAST
@pytest.mark.parametrize("shuffle", [True, False])
def test_it_continues_from_every_position(last, shuffle):
    def make():
        return loader(5, seed=6, last=last, shuffle=shuffle, augment=jitter)

    reference, states, batches = make(), [], []
    for _ in range(17):  # into the fourth epoch
        states.append(reference.state_dict())
        batches.append(reference.next())
    for position, state in enumerate(states):
        resumed = make()
        for _ in range(position % 4):
            resumed.next()  # it may have been used before
        resumed.load_state_dict(state)
        assert same([resumed.next() for _ in range(17 - position)], batches[position:]), position


@LAST
def test_iterating_gives_the_rest_of_the_epoch(last):
    reference = loader(5, seed=2, last=last)
    complete, following = labels(reference), labels(reference)
    for k in range(len(complete)):
        stopped, resumed = (loader(5, seed=2, last=last) for _ in range(2))
        for _ in range(k):
            stopped.next()
        resumed.load_state_dict(stopped.state_dict())
        for data in (stopped, resumed):
            assert labels(data) == complete[k:]
            assert labels(data) == following


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"batch_size": 6}, {"last": "keep"}, {"n": 24}, {"augment": jitter}],
    ids=lambda other: next(iter(other)),
)
def test_the_state_of_another_loader_is_refused(other):
    mine = loader()
    mine.next()
    with pytest.raises(InvalidArgumentError, match="the state is that of DeviceLoader"):
        mine.load_state_dict(loader(**other).state_dict())
    assert (mine.epoch, mine.position) == (0, 5)


X, Y = numbered()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tr.DeviceLoader((X, Y[:-1]), 5), r"same first size.*\(23, 3\), \(22,\)"),
        (lambda: loader(24), "between 1 and the 23 examples, got 24"),
        (lambda: loader(2.5), "batch_size .* got 2.5"),
        (lambda: loader(last="pad"), "drop, wrap or keep, got 'pad'"),
        (lambda: tr.DeviceLoader((), 5), "sequence or a dict of tensors"),
        (lambda: tr.DeviceLoader(X, 2), r"got one tensor; give a tuple: \(x,\)"),
        (lambda: tr.DeviceLoader(torch.utils.data.TensorDataset(X, Y), 5), "pass dataset.tensors"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make()


def test_a_dict_gives_dicts():
    data = tr.DeviceLoader({"input": X, "target": Y}, 5, seed=3)
    batch = data.next()
    assert torch.equal(batch["input"][:, 0].long(), batch["target"])
    assert batch["target"].tolist() == loader(5, seed=3).next()[1].tolist()
