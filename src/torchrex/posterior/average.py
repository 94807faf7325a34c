"""The posterior average of a classifier, updated while the run goes: sums over draws, no draws.

A draw is the output of the replica on a rung, over all of `data`. For every recorded rung the
average keeps the sums of softmax(logits), of the logits and of the entropies, and the newest
logits, so memory does not grow with the number of draws. Every pass over `data` must show the same
examples in the same order; a shuffled loader is noticed by its labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from torchrex import notebook
from torchrex.distributed import is_main_process
from torchrex.errors import CheckpointError, InvalidArgumentError, require_whole
from torchrex.posterior.prediction import (
    Examples,
    classification_metrics,
    predict_all,
    predictive_entropy,
)
from torchrex.targets import require_no_dataset

if TYPE_CHECKING:
    from torchrex.posterior.store import DrawStore

SUMS = ("probabilities", "logits", "entropy")


class PredictingRun(Protocol):
    """What an average asks of a run."""

    @property
    def n_steps(self) -> int: ...

    @property
    def n_rungs(self) -> int: ...

    def predict(self, batch: Any, rung: int = 0) -> Tensor: ...

    def live_module_at(self, rung: int) -> nn.Module: ...


class PosteriorAverage:
    """Streaming average of predictions: one draw every `every` steps after `burn_in`, on `rungs`.

    `data` is any re-iterable of batches as they are given in training. With a `store` the weights
    of every draw go there as well. Only rung 0 samples the posterior; hotter rungs are recorded to
    be compared with it, or pooled with `rung=None`. With `history` the accuracies after every draw
    are kept as well.
    """

    def __init__(
        self,
        data: Iterable[Any],
        *,
        every: int = 1,
        burn_in: int = 0,
        rungs: Sequence[int] = (0,),
        store: DrawStore | None = None,
        target_key: str = "target",
        history: bool = False,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("burn_in", burn_in)
        for rung in rungs:
            require_whole("each of rungs", rung)
        if not 0 < len(set(rungs)) == len(rungs):
            raise InvalidArgumentError(f"rungs must be one or more different rungs, got {rungs!r}")
        require_no_dataset(data, shuffle=False)
        if isinstance(data, Iterator):
            raise InvalidArgumentError(
                f"data can be read only once ({type(data).__name__}); give a list of batches or a "
                "DataLoader with shuffle=False"
            )
        if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
            raise InvalidArgumentError("data must be batches: give a DataLoader or a list [(x, y)]")
        self.data, self.every, self.burn_in, self.rungs = data, every, burn_in, tuple(rungs)
        self.store, self.target_key = store, target_key
        self._history: list[Tensor] | None = [] if history else None
        self._n_draws = 0
        self._last_step = -1
        self._examples: Examples | None = None
        self._sums: dict[str, Tensor] = {}  # (rungs, n, classes), `entropy` (rungs, n)
        self._last: Tensor | None = None  # (rungs, n, classes): logits of the newest draw

    @property
    def n_draws(self) -> int:
        """Draws taken so far; one draw covers all recorded rungs."""
        return self._n_draws

    @torch.no_grad()
    def update(self, run: PredictingRun) -> bool:
        """Take a draw if one is due: `n_steps - burn_in` is a positive multiple of `every`.

        Returns whether it took one. After an error the average is as it was before.
        """
        step = run.n_steps
        if step < self._last_step:
            raise InvalidArgumentError(
                f"the run is at step {step}, but the average has a draw of step {self._last_step}; "
                "after a resume call load_state_dict, for another run make another PosteriorAverage"
            )
        if step == self._last_step or step <= self.burn_in or (step - self.burn_in) % self.every:
            return False
        if max(self.rungs) >= run.n_rungs:
            raise InvalidArgumentError(
                f"the run has {run.n_rungs} rungs; recorded are {self.rungs}"
            )
        logits, probabilities, examples = predict_all(
            self.data,
            lambda batch, k: run.predict(batch, rung=self.rungs[k]),
            names=[f"rung {rung} at step {step}" for rung in self.rungs],
            first=self._examples,
            target_key=self.target_key,
        )
        if self._last is not None and self._last.shape != logits.shape:
            raise InvalidArgumentError(
                "logits (rungs, n, classes) changed shape from "
                f"{tuple(self._last.shape)} to {tuple(logits.shape)}"
            )
        if self._history is not None and not examples.labelled:
            raise InvalidArgumentError("history needs targets: give batches (x, y)")
        if self.store is not None:
            for rung in self.rungs:
                module = run.live_module_at(rung)  # a collective call: all processes make it
                if is_main_process():
                    self.store.add(module, step=step, rung=rung)
        terms = (probabilities, logits.double(), predictive_entropy(probabilities))
        for name, term in zip(SUMS, terms, strict=True):
            before = self._sums.get(name)
            self._sums[name] = term if before is None else before.to(term.device).add_(term)
        self._last, self._last_step = logits, step
        self._examples = self._examples or examples
        self._n_draws += 1
        if self._history is not None:
            self._history.append(self._accuracies())
        return True

    def _accuracies(self) -> Tensor:
        """Of the mean probabilities, the summed logits and the newest draw: (3, rungs + 1).

        The last column pools the rungs. The numbers stay on the device, so nothing waits.
        """
        assert self._last is not None
        kinds = self._sums["probabilities"], self._sums["logits"], self._last.double().softmax(-1)
        pooled = [torch.cat([sums, sums.sum(0, keepdim=True)]) for sums in kinds]
        votes = torch.stack([sums.argmax(-1) for sums in pooled])
        return (votes == self.labels.to(votes.device)).double().mean(-1)

    def history(self, rung: int | None = 0) -> dict[str, Tensor]:
        """The `step` of each draw, and the accuracy after it of the mean `probabilities`, of the
        summed `logits` and of the `last` draw alone.
        """
        if self._history is None:
            raise InvalidArgumentError("no history was kept; make the average with history=True")
        column = len(self.rungs) if rung is None else self._rows(rung)[0]
        values = torch.stack([row.cpu() for row in self._history])[..., column].unbind(1)
        steps = self.burn_in + self.every * torch.arange(1, self._n_draws + 1)
        names = ("step", "probabilities", "logits", "last")
        return dict(zip(names, (steps, *values), strict=True))

    def probabilities(self, rung: int | None = 0) -> Tensor:
        """Mean over draws of softmax(logits), (n, classes); `rung=None` pools the rungs."""
        return self._sum("probabilities", rung) / self._count(rung)

    def logit_sum(self, rung: int | None = 0) -> Tensor:
        """Sum over draws of the logits, (n, classes), as Deng et al. (2020) average them."""
        return self._sum("logits", rung)

    def predictive_entropy(self, rung: int | None = 0) -> Tensor:
        """Entropy of the mean over draws, (n,), in nats: the total uncertainty."""
        return predictive_entropy(self.probabilities(rung))

    def mutual_information(self, rung: int | None = 0) -> Tensor:
        """Entropy of the mean minus mean of the entropies, (n,): how much the draws disagree."""
        return self.predictive_entropy(rung) - self._sum("entropy", rung) / self._count(rung)

    def metrics(
        self,
        rung: int | None = 0,
        *,
        of: Literal["probabilities", "logits", "last"] = "probabilities",
    ) -> dict[str, float]:
        """`accuracy`, `nll`, `brier`, `ece` of the mean probabilities, of softmax(mean logits), or
        of the newest draw alone.
        """
        rows = self._rows(rung)
        assert self._last is not None
        if of == "probabilities":
            probabilities = self.probabilities(rung)
        elif of == "logits":
            probabilities = (self.logit_sum(rung) / self._count(rung)).softmax(-1)
        elif of == "last":
            probabilities = self._last[rows].double().softmax(-1).mean(0)
        else:
            raise InvalidArgumentError(f"of must be probabilities, logits or last, got {of!r}")
        return classification_metrics(probabilities, self.labels)

    @property
    def labels(self) -> Tensor:
        """The targets in the order of `data`, (n,)."""
        self._rows(None)
        assert self._examples is not None
        if not self._examples.labelled:
            raise InvalidArgumentError("the data are without targets; give batches (x, y)")
        return self._examples.marks

    def _rows(self, rung: int | None) -> list[int]:
        """The rows of a rung, or of all rungs, in the sums."""
        if self._n_draws == 0:
            raise InvalidArgumentError(
                "no draw has been taken yet; call update(run) after each step, the first is due at "
                f"{self.burn_in + self.every} (burn_in={self.burn_in}, every={self.every})"
            )
        if rung is None:
            return list(range(len(self.rungs)))
        if rung not in self.rungs:
            raise InvalidArgumentError(f"rung {rung!r} is not recorded; give one of {self.rungs}")
        return [self.rungs.index(rung)]

    def _sum(self, name: str, rung: int | None) -> Tensor:
        rows = self._rows(rung)
        return self._sums[name][rows].sum(0)

    def _count(self, rung: int | None) -> int:
        return self._n_draws * len(self._rows(rung))

    def _settings(self) -> dict[str, Any]:
        kept = {"history": True} if self._history is not None else {}
        return {"every": self.every, "burn_in": self.burn_in, "rungs": list(self.rungs), **kept}

    def state_dict(self) -> dict[str, Any]:
        """All that an exact continuation needs, the store's state included."""
        tensors = {f"sum.{name}": value.clone() for name, value in self._sums.items()}
        if self._last is not None and self._examples is not None:
            tensors |= {"last": self._last.clone(), "marks": self._examples.marks.clone()}
        if self._history:
            tensors["history"] = torch.stack([row.cpu() for row in self._history])
        return {
            "settings": self._settings(),
            "n_draws": self._n_draws,
            "last_step": self._last_step,
            "labelled": self._examples is not None and self._examples.labelled,
            "tensors": tensors,
            "store": self.store.state_dict()
            if self.store is not None and is_main_process()
            else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a `state_dict`, the store included; other settings are refused."""
        settings = self._settings()
        try:
            given = {**state["settings"], "rungs": list(state["settings"]["rungs"])}
            n_draws, last_step = int(state["n_draws"]), int(state["last_step"])
            labelled, store = bool(state["labelled"]), state["store"]
            tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
            sums = {name: tensors[f"sum.{name}"] for name in (SUMS if n_draws else ())}
            last = tensors["last"] if n_draws else None
            examples = Examples(tensors["marks"], labelled) if n_draws else None
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"not the state of a PosteriorAverage ({error!r}); give what state_dict returned"
            ) from None
        if given != settings:
            raise CheckpointError(f"the state is of {given}, this average has {settings}")
        if (store is None) != (self.store is None):
            raise CheckpointError(
                "the state has a store, but this average has none; pass store=DrawStore(...)"
                if self.store is None
                else "this average has a store, but the state was taken without one; omit store"
            )
        if self.store is not None and is_main_process():
            self.store.load_state_dict(store)
        self._n_draws, self._last_step, self._sums, self._last = n_draws, last_step, sums, last
        self._examples = examples
        if self._history is not None:
            self._history = list(tensors.get("history", ()))

    def _repr_html_(self) -> str:
        when = "at every step" if self.every == 1 else f"one every {self.every:,} steps"
        after = f" after {self.burn_in:,}" if self.burn_in else ""
        about = f"{self._n_draws:,} draws, {when}{after}"
        if self._examples is None or not self._examples.labelled:
            return notebook.panel("PosteriorAverage", about)
        rungs = [*self.rungs, None] if len(self.rungs) > 1 else list(self.rungs)
        rows = []
        for rung in rungs:
            values = (f"{value:.4g}" for value in self.metrics(rung).values())
            rows.append(("all pooled" if rung is None else str(rung), *values))
        head = ("rung", "accuracy", "nll", "brier", "ece")
        return notebook.panel("PosteriorAverage", about, notebook.table(head, rows))

    def __repr__(self) -> str:
        return (
            f"PosteriorAverage({self._n_draws} draws of rungs {self.rungs}, "
            f"every={self.every}, burn_in={self.burn_in})"
        )
