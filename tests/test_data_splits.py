"""Splits: balanced, decided by the seed alone, and refused where they cannot be balanced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrex.errors import InvalidArgumentError
from torchrex.vision.data import label_subset, stratified_split, stratified_subset


def labels_of(*sizes, seed=0):
    """Labels with these class sizes in a random order."""
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


def counts(labels, index, n_classes):
    return torch.bincount(labels[index], minlength=n_classes).tolist()


@given(
    sizes=st.lists(st.integers(2, 30), min_size=1, max_size=8),
    data=st.data(),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_split_is_balanced_and_complete(sizes, data, seed):
    labels = labels_of(*sizes)
    n = data.draw(st.integers(1, (min(sizes) - 1) * len(sizes)))
    train, validation = stratified_split(labels, n, seed)
    assert sorted(torch.cat([train, validation]).tolist()) == list(range(len(labels)))
    found = counts(labels, validation, len(sizes))
    assert sum(found) == n
    assert max(found) - min(found) <= 1
    assert min(counts(labels, train, len(sizes))) >= 1
    assert train.tolist() == sorted(train.tolist())
    assert validation.tolist() == sorted(validation.tolist())


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    data=st.data(),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_subset_is_as_balanced_as_it_can_be(sizes, data, seed):
    """A class gives less than another only if it gives all it has, to within one."""
    labels = labels_of(*sizes)
    n = data.draw(st.integers(1, len(labels)))
    index = stratified_subset(labels, n, seed)
    assert len(set(index.tolist())) == n
    found = counts(labels, index, len(sizes))
    for size, count in zip(sizes, found, strict=True):
        assert count == size or count >= max(found) - 1


def test_the_seed_decides():
    labels = labels_of(50, 50, 50)
    functions = (
        lambda seed: stratified_split(labels, 20, seed)[1],
        lambda seed: label_subset(labels, 30, seed),
    )
    for choose in (*functions, lambda seed: stratified_subset(labels, 31, seed)):
        torch.manual_seed(1)
        first = choose(0)
        torch.manual_seed(2)
        assert torch.equal(first, choose(0))
        assert not torch.equal(first, choose(1))
    # Which classes give one more is not always the same either.
    assert (
        len({tuple(counts(labels, stratified_split(labels, 20, seed)[1], 3)) for seed in range(20)})
        == 3
    )
    # The examples chosen differ from purpose to purpose.
    assert not torch.equal(stratified_split(labels, 30, 0)[1], label_subset(labels, 30, 0))


def test_labels_for_a_few():
    labels = labels_of(20, 30, 25, 20)
    index = label_subset(labels, 40, 3)
    assert counts(labels, index, 4) == [10] * 4
    assert torch.equal(label_subset(labels.to(torch.uint8), 40, 3), index)
    # More labels are more, not others.
    assert set(index.tolist()) < set(label_subset(labels, 60, 3).tolist())


def test_the_choice_is_for_ever():
    """Written down: another choice for the same seed would be another validation set in every
    result.
    """
    labels = torch.arange(12) % 3
    assert stratified_split(labels, 4, 0)[1].tolist() == [0, 1, 2, 4]
    assert label_subset(labels, 6, 0).tolist() == [1, 2, 3, 6, 7, 8]
    assert stratified_subset(labels, 5, 0).tolist() == [0, 1, 2, 6, 7]


BALANCED = labels_of(6, 5, 7)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stratified_split(BALANCED, 13, 0), r"from 1 to 12, got 13"),
        (lambda: stratified_split(BALANCED, 2.0, 0), r"got 2\.0"),
        (lambda: label_subset(BALANCED, 18, 0), "from 1 to 15, got 18"),
        (lambda: label_subset(BALANCED, 8, 0), "multiple of the 3 classes, got 8; .* is 9"),
        (lambda: stratified_subset(BALANCED, 19, 0), "from 1 to 18, got 19"),
        (lambda: stratified_subset(torch.tensor([0, 2, 3]), 2, 0), "class 1 has no examples"),
        (lambda: stratified_split(torch.tensor([0, -1]), 1, 0), "got the label -1"),
        (lambda: stratified_split(torch.tensor([], dtype=torch.int64), 1, 0), "got none"),
        (lambda: stratified_split(torch.zeros(3), 1, 0), "got torch.float32"),
        (lambda: stratified_split([0, 1], 1, 0), "got list"),
        (lambda: stratified_split(BALANCED, 3, -1), "seed must be a whole number >= 0, got -1"),
    ],
)
def test_what_cannot_be_chosen(call, words):
    with pytest.raises(InvalidArgumentError, match=words):
        call()
