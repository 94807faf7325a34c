"""Sampling from a LightningModule as it is: its `training_step` gives the energy.

Used are its weights, `training_step` with the one loss of torch that it returns, and `forward` for
predictions. Not used are its optimizers, schedulers, callbacks and hooks, and what it adds to the
loss. Nothing of Lightning is imported, so `lightning` and `pytorch_lightning` both fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrex.errors import InvalidArgumentError, TargetError
from torchrex.exchange import Ladder
from torchrex.network import ModuleEnsemble, ModuleExchange, train
from torchrex.network.replicas import copied
from torchrex.samplers import Sampler
from torchrex.targets import Batch, PosteriorEnergy
from torchrex.targets.posterior import Prior

GIVE_ENERGY = (
    "give energy=PosteriorEnergy(loss, n_data=...), which uses forward, or PosteriorEnergy.of"
)


def ensemble(
    module: nn.Module,
    data: Any,
    *,
    prior: Prior | None = None,
    n_data: int | None = None,
    energy: PosteriorEnergy | None = None,
    sampler: Sampler | None = None,
    **options: Any,
) -> ModuleEnsemble:
    """The replicas of a LightningModule, for `tune` and `ModuleExchange`; all begin with its
    weights.

    The energy is the loss that `training_step` returns, of every example, summed over the data, and
    the prior. That loss must be one of torch (`F.cross_entropy`, `nn.MSELoss`), returned as it is:
    of a sum of losses, or one of your own, no part for each example is known. Then give `energy`.
    `n_data` is that of `data`, a loader or a LightningDataModule, unless given. `options` go to
    ModuleEnsemble. The module itself is not changed.
    """
    if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
        raise InvalidArgumentError(
            f"module must be a LightningModule, got {type(module).__name__}; for other modules use "
            "torchrex.ModuleEnsemble"
        )
    if energy is None:
        loader = loader_of(data)
        examples = getattr(loader, "dataset", None)
        known = len(examples) if isinstance(examples, Sized) else getattr(loader, "n_data", None)
        if (n_data := n_data or known) is None:
            name = type(loader).__name__
            raise InvalidArgumentError(f"{name} does not say how many examples it has; give n_data")
        energy = PosteriorEnergy.of(training_step, n_data=n_data, prior=prior)
    elif (prior, n_data) != (None, None):
        raise InvalidArgumentError("energy has a prior and n_data of its own; give them there")
    return ModuleEnsemble(_without_trainer(module), energy, sampler, **options)


def sample(
    module: nn.Module,
    data: Any,
    *,
    ladder: Ladder,
    n_steps: int,
    seed: int = 0,
    rules: Mapping[str, Any] | None = None,
    **options: Any,
) -> ModuleExchange:
    """Sample the weights of a LightningModule: `options` are the `prior`, `n_data`, `energy` and
    `sampler` of `ensemble`, and those of `train` (`average`, `checkpoints`, `observers`, ...).

    `data` is a loader of the training data, or a LightningDataModule; `rules` are those of
    `ModuleExchange`. Returns the run: `run.module_at(0)` is a draw, again a LightningModule.
    """
    loader, names = loader_of(data), ("prior", "n_data", "energy", "sampler")
    made = ensemble(module, loader, **{n: options.pop(n) for n in names if n in options})
    run = ModuleExchange(made, ladder, seed=seed, **(rules or {}))
    train(run, loader, n_steps, **options)
    return run


def loader_of(data: Any) -> Any:
    """The training data of a LightningDataModule; a loader is left as it is."""
    if not hasattr(data, "train_dataloader"):
        return data
    if getattr(data, "trainer", None) is None:  # a Trainer has done this already
        data.prepare_data()
        data.setup("fit")
    return data.train_dataloader()


def _without_trainer(module: nn.Module) -> nn.Module:
    """A copy that knows no Trainer: that would be copied as well, with its data."""
    trainer = vars(module).pop("_trainer", None)
    try:
        copy = copied(module)
    finally:
        vars(module)["_trainer"] = trainer
    vars(copy)["_trainer"] = None
    return copy


class _Losses(TorchFunctionMode):
    """Notes every loss of torch that is reduced to one number, together with its terms."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        value = function(*args, **kwargs)
        # The losses of torch, as functions or modules, give their reduction by name here.
        if kwargs.get("reduction", "none") != "none":
            self.seen.append((value, function(*args, **{**kwargs, "reduction": "none"})))
        return value


def training_step(module: Any, batch: Batch) -> Tensor:
    """The terms of the loss that `module.training_step(batch, 0)` returns, one per example."""
    # Lightning gives the number of the batch to a step that takes two arguments.
    arguments = (batch, 0)[: len(inspect.signature(module.training_step).parameters)]
    vars(module).update(log=_ignore, log_dict=_ignore)  # both ask for a Trainer
    try:
        with _Losses() as losses:
            loss = module.training_step(*arguments)
    except Exception as error:
        if "Trainer" not in str(error):
            raise
        words = " ".join(str(error).split())
        raise TargetError(f"training_step needs a Trainer ({words}); {GIVE_ENERGY}") from error
    finally:
        for name in ("log", "log_dict"):
            del vars(module)[name]
    loss = loss.get("loss") if isinstance(loss, Mapping) else loss
    for value, terms in losses.seen:
        if value is loss:
            return terms  # type: ignore[no-any-return]
    raise TargetError(
        "training_step must return one loss of torch (F.cross_entropy, nn.MSELoss) as it is, for "
        f"only of such a loss the term of each example is known; {GIVE_ENERGY}"
    )


def _ignore(*arguments: Any, **options: Any) -> None:
    """Takes the place of `self.log`."""
