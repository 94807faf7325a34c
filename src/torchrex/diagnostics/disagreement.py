"""How differently replicas predict: the more, the more a swap, or an average over them, brings to
rung 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrex.diagnostics.estimate import Estimate, over_chains
from torchrex.errors import InvalidArgumentError


class Disagreement(NamedTuple):
    """Between every two replicas, (replicas, replicas), and of all together; errors are those of a
    finite set of examples.
    """

    differing: Tensor  # fraction of the examples on which their most probable classes differ
    divergence: Tensor  # mean Jensen-Shannon divergence, in nats, at most log 2
    mean_differing: Estimate  # over all pairs of replicas
    mutual_information: Estimate  # between the prediction and which replica makes it, in nats, at most log(replicas)


def replica_disagreement(probabilities: Tensor) -> Disagreement:
    """From predicted probabilities (replicas, n, classes).

        JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2
        I = H(mean over replicas of p) - mean over replicas of H(p)       (of two replicas, their JS)

    H is the entropy in nats; divergence and information are means over the n examples.
    """
    p = probabilities.detach().double()
    if p.ndim != 3 or len(p) < 2 or p.shape[1] == 0:
        raise InvalidArgumentError(
            f"give probabilities (replicas, n, classes) of 2 replicas or more, got {tuple(p.shape)}"
        )
    if not bool((p >= 0).all()) or not bool(((p.sum(-1) - 1.0).abs() < 1e-3).all()):
        raise InvalidArgumentError(
            "probabilities must be >= 0 and sum to 1 over the last axis; of logits take the softmax first"
        )
    n_replicas, choice, own = len(p), p.argmax(-1), entropy(p)
    differing = torch.zeros(n_replicas, n_replicas, dtype=torch.float64)
    divergence = torch.zeros_like(differing)
    pairs = [(i, j) for i in range(n_replicas) for j in range(i)]
    per_example = torch.zeros(p.shape[1], dtype=torch.float64)
    for i, j in pairs:
        apart = (choice[i] != choice[j]).double().cpu()
        per_example += apart / len(pairs)
        differing[i, j] = differing[j, i] = apart.mean()
        divergence[i, j] = divergence[j, i] = (
            (entropy((p[i] + p[j]) / 2) - (own[i] + own[j]) / 2).mean().cpu()
        )
    return Disagreement(
        differing,
        divergence,
        over_chains(per_example),
        over_chains((entropy(p.mean(0)) - own.mean(0)).cpu()),
    )


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum p log p over the last axis, in nats; 0 log 0 = 0."""
    negative: Tensor = torch.special.xlogy(p, p).sum(-1)
    return -negative
