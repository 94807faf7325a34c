"""All networks by the names that recipes and the command line use."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from torch import nn

from torchrex.errors import InvalidArgumentError
from torchrex.vision.resnet import resnet8, resnet20, resnet32, resnet56, resnet56_basic
from torchrex.vision.wide_resnet import wrn_16_8, wrn_28_10

NETS: dict[str, Callable[[int], nn.Module]] = {  # each takes the number of classes
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet56": resnet56,  # the authors', with bottlenecks
    "resnet56-basic": resnet56_basic,
    "wrn-16-8": wrn_16_8,
    "wrn-28-10": wrn_28_10,
}


def build_net(name: str, n_classes: int) -> nn.Module:
    """A new network with random weights from torch's own generator."""
    if name not in NETS:
        likeness = {
            known: difflib.SequenceMatcher(None, str(name).lower(), known).ratio() for known in NETS
        }
        near = max(NETS, key=likeness.__getitem__)
        advice = f"did you mean {near!r}?" if likeness[near] > 0.3 else "take one of these."
        raise InvalidArgumentError(
            f"no network is called {name!r}; {advice} There are {', '.join(NETS)}."
        )
    if isinstance(n_classes, bool) or not isinstance(n_classes, int) or n_classes < 1:
        raise InvalidArgumentError(f"n_classes must be a whole number from 1 on, got {n_classes!r}")
    return NETS[name](n_classes)
