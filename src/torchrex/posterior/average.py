"""The posterior average, updated while the run goes: sums over draws, and few draws or none.

A draw is the output of the replica on a rung, over all of `data`. For every recorded rung of a
classifier the average keeps the sums of softmax(logits), of the logits and of the entropies, and
the newest logits; of any other output the mean, the variance and at most `keep` draws. So memory
does not grow with the number of draws. Every pass over `data` must show the same examples in the
same order; a shuffled loader is noticed by its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from torchrex.posterior.predictive import Likelihood, Predictive, rebuilt, terms_of
from torchrex.posterior.store_format import slot_of
from torchrex.targets import require_no_dataset

if TYPE_CHECKING:
    from torchrex.posterior.store import DrawStore

SUMS = ("probabilities", "logits", "entropy")
OutputFunction = Callable[[nn.Module, Any], Any]


class PredictingRun(Protocol):
    """What an average asks of a run."""

    @property
    def n_steps(self) -> int: ...

    @property
    def n_rungs(self) -> int: ...

    def predict(
        self, batch: Any, rung: int = 0, *, output: OutputFunction | None = None
    ) -> Any: ...

    def live_module_at(self, rung: int) -> nn.Module: ...


class PosteriorAverage:
    """Streaming average of predictions: one draw every `every` steps after `burn_in`, on `rungs`.

    `data` is any re-iterable of batches as they are given in training. With a `store` the weights
    of every draw go there as well. Only rung 0 samples the posterior; hotter rungs are recorded to
    be compared with it, or pooled with `rung=None`. With `history` the accuracies after every draw
    are kept as well.

    `output` is what is averaged: the softmax of the "logits" of a classifier, the "values" that any
    other module returns (a tensor, or a tuple or dict of tensors), or those of a function of the
    module and a batch. They have one row per example, or are one number for all of the data.
    `predictive()` has the result. With `likelihood`, a function of one draw of the output that
    returns a `torch.distributions.Distribution`, it predicts observations. At most `keep` draws of
    the output stay in memory, for quantiles and metrics.
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
        output: Literal["logits", "values"] | OutputFunction = "logits",
        likelihood: Likelihood | None = None,
        keep: int = 100,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("burn_in", burn_in)
        require_whole("keep", keep, 1)
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
        parts = data if isinstance(data, tuple) and data else (data,)
        if all(isinstance(part, Tensor) for part in parts):
            raise InvalidArgumentError(
                "data must be batches: give a DataLoader, a list [(x, y)], or [x] without targets"
            )
        if output not in ("logits", "values") and not callable(output):
            raise InvalidArgumentError(
                f'output must be "logits", "values" or a function (model, batch), got {output!r}'
            )
        self._classes = output == "logits"
        if history if not self._classes else likelihood is not None:
            raise InvalidArgumentError(
                'history needs output="logits"; a likelihood needs output="values" or a function'
            )
        self.data, self.every, self.burn_in, self.rungs = data, every, burn_in, tuple(rungs)
        self.store, self.target_key = store, target_key
        self._history: list[Tensor] | None = [] if history else None
        self._n_draws = 0
        self._last_step = -1
        self._examples: Examples | None = None
        # Of classifiers (rungs, n, classes), `entropy` (rungs, n). Of other outputs means over
        # draws, (rungs, n, ...), with sums of squared deviations.
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._kept: list[dict[str, Tensor]] = []  # draws of the outputs, each (rungs, n, ...)
        self._kind = ""  # of other outputs: a "tensor", "tuple" or "dict"
        self._last: Tensor | None = None  # (rungs, n, classes): logits of the newest draw
        self.output, self.likelihood, self.keep = output, likelihood, keep

    @property
    def n_draws(self) -> int:
        """Draws taken so far; one draw covers all recorded rungs."""
        return self._n_draws

    @property
    def is_classifier(self) -> bool:
        """Does it average the probabilities of classes?"""
        return self._classes

    @property
    def is_labelled(self) -> bool:
        """Do the data of the draws have targets?"""
        return self._examples is not None and self._examples.labelled

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
        more = {"output": self.output} if callable(self.output) else {}
        self._draw(
            lambda batch, k: run.predict(batch, rung=self.rungs[k], **more),
            [f"rung {rung} at step {step}" for rung in self.rungs],
            step,
            run,
        )
        return True

    @torch.no_grad()
    def add(self, predict: Callable[[Any], Any], name: str) -> None:
        """Take a draw of `predict(batch)`, which error messages call `name`, in place of a run."""
        self._draw(lambda batch, k: predict(batch), [name], self._n_draws + 1)

    def _draw(
        self,
        predict: Callable[[Any, int], Any],
        names: Sequence[str],
        step: int,
        run: PredictingRun | None = None,
    ) -> None:
        classes, n = self._classes, self._n_draws
        found = predict_all(
            self.data,
            predict,
            names=names,
            first=self._examples,
            target_key=self.target_key,
            classes=classes,
        )
        if self._history is not None and not found.examples.labelled:
            raise InvalidArgumentError("history needs targets: give batches (x, y)")
        if classes:
            p, logits = found.values["probabilities"], found.values["logits"]
            new = (p, logits.double(), predictive_entropy(p))
            terms = dict(zip(SUMS, new, strict=True))
        else:
            terms = terms_of(found, self.likelihood)
        now, then = ({k: tuple(v.shape) for k, v in t.items()} for t in (terms, self._sums))
        if n and (now, found.kind) != (then, self._kind):
            raise InvalidArgumentError(
                f"outputs (rungs, n, ...) changed from {then} to {now} between two draws"
            )
        if run is not None and self.store is not None:
            for rung in self.rungs:
                module = run.live_module_at(rung)  # a collective call: all processes make it
                if is_main_process():
                    self.store.add(module, step=step, rung=rung)
        for name, term in terms.items():
            if classes:
                before = self._sums.get(name)
                self._sums[name] = term if before is None else before.to(term.device).add_(term)
                continue
            # Welford 1962: a difference of large sums would lose a small variance.
            both = (self._sums, self._squares)
            mean, square = (t.get(name, torch.zeros_like(term)).to(term.device) for t in both)
            change = term - mean
            self._sums[name] = mean.add_(change / (n + 1))
            self._squares[name] = square.add_(change * (term - mean))
        if classes:
            self._last = found.values["logits"]
        # A function of the number alone, so there is no random state.
        slot = slot_of(n, keep="reservoir", capacity=self.keep, seed=0)
        if not classes and slot is not None:
            self._kept[slot : slot + 1] = [found.values]
        self._kind, self._last_step, self._n_draws = found.kind, step, n + 1
        self._examples = self._examples or found.examples
        if self._history is not None:
            self._history.append(self._accuracies())

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

    def predictive(self, rung: int | None = 0, *, of: str | None = None) -> Predictive:
        """The predicted observation if there is a `likelihood`, else the output; `of` names one of
        several outputs ("0", "1" for those of a tuple). `rung=None` pools the rungs.
        """
        rows = self._rows(rung)
        if self._classes:
            raise InvalidArgumentError(
                'an average of logits has probabilities() and metrics(); give output="values"'
            )
        likelihood = self.likelihood if of is None else None
        name = f"output.{of or 'output'}" if likelihood is None else "observation"
        if name not in self._sums:
            names = [key.partition(".")[2] for key in self._sums if "." in key]
            raise InvalidArgumentError(
                f"choose one of the outputs by of=..., from {names}, or give a likelihood of them"
            )
        means, device = self._sums[name][rows], self._sums[name].device
        mean = means.mean(0)
        within = self._squares[name][rows].mean(0) / self._n_draws
        kept = [{k: v[row] for k, v in each.items()} for each in self._kept for row in rows]
        if likelihood is None:
            kept = [{name: each[name[7:]]} for each in kept]
        return Predictive(
            mean,
            within + (means - mean).square().mean(0),
            None if likelihood is None else self._sums["noise"][rows].mean(0),
            self.labels if self.is_labelled else None,
            self._count(rung),
            [rebuilt("" if likelihood is None else self._kind, each, device) for each in kept],
            likelihood,
        )

    def metrics(
        self,
        rung: int | None = 0,
        *,
        of: Literal["probabilities", "logits", "last"] = "probabilities",
    ) -> dict[str, float]:
        """`accuracy`, `nll`, `brier`, `ece` of the mean probabilities, of softmax(mean logits), or
        of the newest draw alone. Of any other output those of `predictive(rung)`.
        """
        if not self._classes and of == "probabilities":
            return self.predictive(rung).metrics()
        rows = self._rows(rung, classes=True)
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

    def _rows(self, rung: int | None, classes: bool = False) -> list[int]:
        """The rows of a rung, or of all rungs, in the sums; `classes`: of a classifier."""
        if self._n_draws == 0:
            raise InvalidArgumentError(
                "no draw has been taken yet; call update(run) after each step, the first is due at "
                f"{self.burn_in + self.every} (burn_in={self.burn_in}, every={self.every})"
            )
        if classes and not self._classes:
            raise InvalidArgumentError(
                f"that is for classifiers, and this average has output={_named(self.output)!r}: "
                "use predictive()"
            )
        if rung is None:
            return list(range(len(self.rungs)))
        if rung not in self.rungs:
            raise InvalidArgumentError(f"rung {rung!r} is not recorded; give one of {self.rungs}")
        return [self.rungs.index(rung)]

    def _sum(self, name: str, rung: int | None) -> Tensor:
        rows = self._rows(rung, classes=True)
        return self._sums[name][rows].sum(0)

    def _count(self, rung: int | None) -> int:
        return self._n_draws * len(self._rows(rung))

    def _settings(self) -> dict[str, Any]:
        more: dict[str, Any] = {"history": True} if self._history is not None else {}
        if not self._classes:
            more |= {"output": _named(self.output), "keep": self.keep}
            more["likelihood"] = self.likelihood is not None
        return {"every": self.every, "burn_in": self.burn_in, "rungs": list(self.rungs), **more}

    def state_dict(self) -> dict[str, Any]:
        """All that an exact continuation needs, the store's state included."""
        tensors = {f"sum.{name}": value.clone() for name, value in self._sums.items()}
        tensors |= {f"square.{name}": value.clone() for name, value in self._squares.items()}
        for name in self._kept[0] if self._kept else ():
            tensors[f"kept.{name}"] = torch.stack([each[name].cpu() for each in self._kept])
        if self._last is not None:
            tensors["last"] = self._last.clone()
        if self._examples is not None:
            tensors["marks"] = self._examples.marks.clone()
        if self._history:
            tensors["history"] = torch.stack([row.cpu() for row in self._history])
        return {
            "settings": self._settings(),
            "n_draws": self._n_draws,
            "last_step": self._last_step,
            "labelled": self.is_labelled,
            **({} if self._classes else {"kind": self._kind}),
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
            if given != settings:
                raise CheckpointError(f"the state is of {given}, this average has {settings}")
            last: Tensor | None = None
            n_draws, last_step = int(state["n_draws"]), int(state["last_step"])
            labelled, store = bool(state["labelled"]), state["store"]
            tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
            sums, squares, kept = (
                {
                    name.removeprefix(part): value
                    for name, value in tensors.items()
                    if name.startswith(part)
                }
                for part in ("sum.", "square.", "kept.")
            )
            if self._classes and n_draws:
                sums, last = {name: sums[name] for name in SUMS}, tensors["last"]
            kind = "tensor" if self._classes else str(state["kind"])
            n_kept = len(next(iter(kept.values()), ()))
            examples = Examples(tensors["marks"], labelled) if n_draws else None
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"not the state of a PosteriorAverage ({error!r}); give what state_dict returned"
            ) from None
        if (store is None) != (self.store is None):
            raise CheckpointError(
                "the state has a store, but this average has none; pass store=DrawStore(...)"
                if self.store is None
                else "this average has a store, but the state was taken without one; omit store"
            )
        if self.store is not None and is_main_process():
            self.store.load_state_dict(store)
        self._kind, self._squares = kind, squares
        self._kept = [{name: value[k] for name, value in kept.items()} for k in range(n_kept)]
        self._n_draws, self._last_step, self._sums, self._last = n_draws, last_step, sums, last
        self._examples = examples
        if self._history is not None:
            self._history = list(tensors.get("history", ()))

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], likelihood: Likelihood | None = None
    ) -> PosteriorAverage:
        """The average of a `state_dict`, without its data and store, and without its functions:
        quantiles and metrics of observations need the `likelihood` again.
        """

        def missing(*given: Any) -> Any:
            raise InvalidArgumentError(
                "no checkpoint holds the likelihood, which is a function: give likelihood=... again"
            )

        settings = dict(state["settings"])
        if settings.get("output", "values") != "values":
            settings["output"] = missing
        if settings.pop("likelihood", False):
            settings["likelihood"] = likelihood or missing
        average = cls([], **settings)
        average.load_state_dict({**state, "store": None})
        return average

    def _repr_html_(self) -> str:
        when = "at every step" if self.every == 1 else f"one every {self.every:,} steps"
        after = f" after {self.burn_in:,}" if self.burn_in else ""
        about = f"{self._n_draws:,} draws, {when}{after}"
        rungs = [*self.rungs, None] if len(self.rungs) > 1 else list(self.rungs)
        try:
            found, rows = {rung: self.metrics(rung) for rung in rungs}, []
        except InvalidArgumentError:  # no draws, or no targets
            return notebook.panel("PosteriorAverage", about)
        for rung, metrics in found.items():
            values = (f"{value:.4g}" for value in metrics.values())
            rows.append(("all pooled" if rung is None else str(rung), *values))
        head = ("rung", *found[rungs[0]])
        return notebook.panel("PosteriorAverage", about, notebook.table(head, rows))

    def __repr__(self) -> str:
        return (
            f"PosteriorAverage({self._n_draws} draws of rungs {self.rungs}, "
            f"every={self.every}, burn_in={self.burn_in})"
        )


def _named(output: Any) -> str:
    return output if isinstance(output, str) else "a function"
