"""How good a predictive distribution is, and how uncertain: the definitions behind every accuracy
and calibration number.

    accuracy   share of examples whose most probable class is the label
    nll        mean over examples of -log p(label)
    brier      mean over examples of the SUM over classes of (p - onehot(label))^2: 0 to 2, twice the binary convention
    ece        15 equal bins of the top probability, sum over bins of share * |accuracy - mean confidence| (l1)

All are in natural logarithms and computed in float64, except that torchmetrics bins confidences in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrex.errors import InvalidArgumentError, MissingDependencyError

ECE_BINS = 15
SUM_TOLERANCE = (
    1e-3  # how far a row of probabilities may be from summing to one; wide enough for float16
)


def classification_metrics(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """`accuracy`, `nll`, `brier` and `ece` of `probabilities` (n, classes) given `labels` (n,).

    A probability that underflowed to 0 counts as the smallest normal number of its dtype, so the
    nll stays finite (at most 87.3 an example in float32, 708.4 in float64). One host
    synchronisation, at the end.
    """
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error
    except ImportError:
        raise MissingDependencyError(
            "accuracy and calibration error need torchmetrics, which is not installed: pip install 'torchrex[metrics]'"
        ) from None
    if (
        probabilities.ndim != 2
        or len(probabilities) == 0
        or probabilities.shape[1] < 2
        or not probabilities.is_floating_point()
    ):
        raise InvalidArgumentError(
            f"probabilities must be floating numbers of shape (n, classes) with n >= 1 and at least two classes, "
            f"got {probabilities.dtype} of shape {tuple(probabilities.shape)}"
        )
    n_classes = probabilities.shape[1]
    if labels.shape != probabilities.shape[:1] or labels.is_floating_point() or labels.is_complex():
        raise InvalidArgumentError(
            f"labels must be {len(probabilities)} class numbers, one for each row of probabilities, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    given = labels.to(probabilities.device, torch.long)
    label = given.clamp(
        0, n_classes - 1
    )  # an index out of range would end the CUDA context; it is reported below
    p = probabilities.detach().double()
    row_sum_error = (p.sum(1) - 1).abs().max()
    # torchmetrics takes anything outside [0, 1] for logits and applies a softmax: a rounding error
    # must not cause that.
    unit = p.clamp(0, 1)
    of_label = p.gather(1, label[:, None]).squeeze(1)
    onehot = torch.arange(n_classes, device=p.device) == label[:, None]
    values = {
        "accuracy": (unit.argmax(1) == label).double().mean(),
        "nll": -of_label.clamp(min=torch.finfo(probabilities.dtype).tiny).log().mean(),
        "brier": (p - onehot.double()).square().sum(1).mean(),
        "ece": multiclass_calibration_error(
            unit, label, num_classes=n_classes, n_bins=ECE_BINS, norm="l1", validate_args=False
        ),
    }
    checks = [row_sum_error, p.min(), given.min(), given.max()]
    *numbers, off, lowest, first, last = torch.stack(
        [value.double() for value in [*values.values(), *checks]]
    ).tolist()
    if not (off <= SUM_TOLERANCE and lowest >= -SUM_TOLERANCE):  # written so that NaN fails
        raise InvalidArgumentError(
            f"every row of probabilities must be >= 0 and sum to 1, but the worst sum is off by {off:.3g} and the lowest entry "
            f"is {lowest:.3g}; for logits pass logits.softmax(1)"
        )
    if first < 0 or last >= n_classes:
        raise InvalidArgumentError(
            f"labels must lie in 0..{n_classes - 1} for {n_classes} classes, got labels from {first:g} to {last:g}"
        )
    return dict(zip(values, numbers, strict=True))


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Entropy - sum_c p_c log p_c over the last axis, in nats; a class of probability 0 adds
    nothing.
    """
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy


@dataclass(repr=False)
class Prediction:
    """The predictive distribution of a set of draws on a data set."""

    probabilities: Tensor  # (n, classes): mean over draws of softmax(logits)
    labels: Tensor | None  # (n,), or None if the data carry no targets
    entropy: Tensor  # (n,): entropy of the mean, the total uncertainty
    mutual_information: Tensor  # (n,): entropy of the mean minus mean of the entropies, what the draws disagree about
    n_draws: int

    def metrics(self) -> dict[str, float]:
        """`accuracy`, `nll`, `brier` and `ece` of the mean over draws."""
        if self.labels is None:
            raise InvalidArgumentError(
                "metrics need targets, but the batches of data hold inputs alone; give batches (x, y)"
            )
        return classification_metrics(self.probabilities, self.labels)

    def __repr__(self) -> str:
        n, classes = self.probabilities.shape
        return f"Prediction({self.n_draws} draws on {n:,} examples, {classes} classes)"
