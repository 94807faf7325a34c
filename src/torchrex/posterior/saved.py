"""A run of `train` as it is on disk, for predictions: without its run, loader and trace.

runs/mynet/seed=0/
    draws/         a DrawStore, if the run had one; its draws of rung 0 make the predictions
    checkpoints/   the newest has the averages, and the last weights of rung 0
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchrex.checkpoint import Checkpoints, expect_form
from torchrex.errors import CheckpointError, InvalidArgumentError, RunFolderError
from torchrex.posterior.average import PosteriorAverage
from torchrex.posterior.prediction import Prediction
from torchrex.posterior.predictive import Likelihood, Predictive
from torchrex.posterior.store import DrawStore, Model, StoredWeights, made
from torchrex.posterior.store_format import INDEX, plain_name, require_same_shapes

logger = logging.getLogger("torchrex")


class LastWeights(StoredWeights):
    """The weights and buffers that were at rung 0 when a checkpoint was written: one draw."""

    def __init__(self, state: Mapping[str, Any], path: Path) -> None:
        self.name = f"the checkpoint {path}"
        replica = int(state["run"]["exchange"]["replica_at"][0, 0])
        # What all replicas share is saved with the first of them.
        parts = [
            state["replicas"][k][part]
            for k in (0, replica)
            for part in ("parameters", "frozen", "buffers")
        ]
        self._saved = {plain_name(name): tensor for part in parts for name, tensor in part.items()}
        self._state: dict[str, Tensor] = {}

    def fit(self, module: nn.Module) -> LastWeights:
        """Take the form of a module, which gets the weights: tied ones were saved once."""
        mine = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        require_same_shapes(mine, self._saved, self.name)
        for name, tensor in mine.items():
            tensor.data.copy_(self._saved[plain_name(name)])
        self._state = module.state_dict()
        return self

    def states(self, rung: int | None) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        if rung:
            raise InvalidArgumentError(f"{self.name} gives rung 0 alone, not rung {rung}")
        yield self.name, self._state


@dataclass(frozen=True, repr=False, eq=False)
class SavedRun:
    """What `torchrex.load` found. `averages` are those of the newest checkpoint, with its data's
    predictions and metrics; `predict` and `predictive` are for other data.
    """

    folder: Path
    model: Model
    draws: StoredWeights  # the DrawStore, or the last weights
    averages: list[PosteriorAverage]
    step: int | None  # of the newest checkpoint, if there is one
    likelihood: Likelihood | None = None

    def predict(self, data: Iterable[Any], **options: Any) -> Prediction:
        """Of a classifier, with the options of `DrawStore.predict`."""
        return self.draws.predict(self.model, data, **options)

    def predictive(self, data: Iterable[Any], **options: Any) -> Predictive:
        """Of any output, with the options of `DrawStore.predictive`."""
        return self.draws.predictive(self.model, data, **{"likelihood": self.likelihood, **options})

    def __repr__(self) -> str:
        source = self.draws if isinstance(self.draws, DrawStore) else "the last weights alone"
        return f"SavedRun({source}, step {self.step}, {len(self.averages)} averages)"


def load(folder: str | Path, model: Model, *, likelihood: Likelihood | None = None) -> SavedRun:
    """A run folder of `train`, for predictions on any data.

    `model` is a function that makes a module of the same architecture, or such a module, which is
    copied. The predictions are those of the draws of rung 0 in `draws/`. Without such draws they
    are those of the last weights of rung 0 in the newest checkpoint, and a warning says so.
    `likelihood` is for observations, as in `PosteriorAverage`. Nothing on disk is changed or
    executed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunFolderError(f"no run folder {folder}; give the folder that train wrote")
    store = DrawStore.load(folder / "draws") if (folder / "draws" / INDEX).exists() else None
    if store is not None and not any(rung == 0 for _, rung in store.draws):
        store = None
    # With draws the weights of the replicas are not needed, and not read.
    checkpoints = Checkpoints(folder / "checkpoints")
    found = checkpoints.load_newest(replicas=None if store is None else ())
    if store is None and found is None:
        raise CheckpointError(
            f"{folder} has no checkpoint in checkpoints/ and no draws of rung 0 in draws/; give "
            "the folder of a run of train with checkpoints, or with a DrawStore"
        )
    averages, last, module = [], None, made(model)
    if found is not None:
        with expect_form(found.path):
            saved = found.state["averages"]
            # Deep ensembles and SWAG keep that of the user in their own.
            states = [each.get("average", each) for each in saved]
            averages = [PosteriorAverage.from_state(each, likelihood) for each in states]
            last = LastWeights(found.state, found.path) if store is None else None
    if store is not None:
        name, state = next(store.states(0))
        require_same_shapes(module.state_dict(), state, name)
    draws = store if last is None else last.fit(module)
    assert draws is not None
    if draws is last:
        words = "no draws in %s: predictions are those of the last weights of rung 0 alone"
        logger.warning(words, folder / "draws")
    return SavedRun(folder, model, draws, averages, found and found.step, likelihood)
