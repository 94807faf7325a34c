"""What a measured number is: a value and its standard error, honest about correlation.

Chains are independent, so their spread gives the error whatever the correlation within each; it
needs two or more of them. With one chain there is only its own past, and the error comes from the
means of long batches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST_BATCHES = 4


class Estimate(NamedTuple):
    """A value and its standard error, of equal shape; an error of NaN means that the data cannot
    tell.
    """

    value: Tensor
    error: Tensor


def over_chains(per_chain: Tensor) -> Estimate:
    """Mean over the last axis, which holds one value per independent chain, and its standard error;
    NaN for one chain.

    error = std / sqrt(chains)
    """
    values = per_chain.double()
    n, mean = values.shape[-1], values.mean(-1)
    return Estimate(
        mean, values.std(-1) / math.sqrt(n) if n > 1 else torch.full_like(mean, math.nan)
    )


def batch_means(series: Tensor) -> Estimate:
    """Mean of a stationary series along the last axis, and its standard error from the spread of
    about sqrt(k) batch means.

        error = std(batch means) / sqrt(batches)

    Batches have to be long against the correlation time; if they are not, the error comes out too
    small. A series of fewer than 16 values tells no error (NaN). Values that do not fill a batch
    are missing from the error, not from the mean.
    """
    values = series.double()
    n, mean = values.shape[-1], values.mean(-1)
    n_batches = math.isqrt(n)
    if n_batches < FEWEST_BATCHES:
        return Estimate(mean, torch.full_like(mean, math.nan))
    length = n // n_batches
    batches = (
        values[..., n - n_batches * length :]
        .reshape(*values.shape[:-1], n_batches, length)
        .mean(-1)
    )
    return Estimate(mean, over_chains(batches).error)


def mean_of(values: Tensor) -> Estimate:
    """Mean of values (..., chains, k): error between the chains where there are several, else by
    batches of the one.
    """
    return (
        over_chains(values.double().mean(-1))
        if values.shape[-2] > 1
        else batch_means(values.squeeze(-2))
    )
