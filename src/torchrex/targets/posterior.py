"""The posterior of a module: per-example losses, the number of data they stand for, and a prior.

The energy is the negative log posterior, a SUM over the data. A loss that is a negative log
likelihood of one example (cross entropy) enters as it is. A minibatch of n of N examples estimates
the sum by N/n times its own.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchrex.errors import (
    InvalidArgumentError,
    TargetError,
    TorchrexError,
    is_out_of_memory,
    require_whole,
)
from torchrex.targets.density import NotedChecks, described_shape

logger = logging.getLogger("torchrex")

Batch = Any  # a tuple (inputs..., target), a dict with the target under `target_key`, or one tensor
Loss = Callable[..., Tensor]
PerExampleLoss = Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]]
# Losses of torch that take class numbers.
ONE_CLASS_EACH = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")


def value_in_groups(groups: Mapping[str, float], name: str, otherwise: float) -> float:
    """The value of the first group whose name is a part of the parameter's."""
    return next((value for part, value in groups.items() if part in name), otherwise)


def require_group_values(groups: Mapping[str, Any], what: str) -> None:
    for name, value in groups.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise InvalidArgumentError(f"{what} must be finite and >= 0; {name} has {value!r}")


def require_groups_fit(groups: Mapping[str, float], names: Sequence[str], of: str) -> None:
    """Refuse a group that fits no parameter; parts of a Sequential have numbers as names."""
    for part in groups:
        if not any(part in name for name in names):
            some = ", ".join([*names[:6], *(["..."] if len(names) > 6 else [])])
            raise InvalidArgumentError(
                f"the group {part!r} of {of} fits no parameter; give a part of a name, of "
                f"which the model has {some}"
            )


@dataclass(frozen=True, init=False, repr=False)
class GaussianPrior:
    """Independent N(0, 1 / precision) on every trainable parameter: energy precision / 2 * |w|^2.

    A weight decay d on a mean loss over N examples is the precision d * N. `groups` gives other
    precisions to some parameters: it maps a part of a parameter's name to a precision. The first
    that fits counts; 0 means no prior there.

    >>> GaussianPrior(25.0, groups={"bias": 0.0, "bn": 0.0})
    GaussianPrior(25, bias: 0, bn: 0)
    """

    precision: float
    groups: tuple[tuple[str, float], ...]

    def __init__(self, precision: float, groups: Mapping[str, float] | None = None) -> None:
        groups = groups or {}
        require_group_values({"precision": precision, **groups}, "a precision")
        object.__setattr__(self, "precision", float(precision))
        object.__setattr__(self, "groups", tuple((k, float(v)) for k, v in groups.items()))

    def precision_of(self, name: str) -> float:
        """Precision for the parameter of that name."""
        return value_in_groups(dict(self.groups), name, self.precision)

    def __repr__(self) -> str:
        groups = [f"{name}: {value:g}" for name, value in self.groups]
        return f"GaussianPrior({', '.join([f'{self.precision:g}', *groups])})"


Prior = GaussianPrior | Callable[[dict[str, Tensor]], Tensor]


class PosteriorEnergy:
    """`-log prior(w) + N/n sum_i loss_i(w)` over a minibatch of n of `n_data` = N examples (Eq. 6).

    `loss` is a loss of torch, as a function or a module (its reduction is set to "none" here), or a
    function (output, target) that returns one value per example. `prior` is a GaussianPrior, None
    for a flat one, or a function from {name: parameter} to a scalar energy. With
    `prior_in_swaps=False` it acts on the weights but not in the energies that the swap test
    compares, as in the code of the paper's authors.

    A batch is `(x, y)` or `(x1, x2, ..., y)`, which calls `loss(model(x1, x2, ...), y)`; a dict,
    which calls `loss(model(**rest), batch[target_key])`; or one tensor, which calls
    `loss(model(x))`. For anything else see `of`.

    >>> import torch.nn.functional as F
    >>> PosteriorEnergy(F.cross_entropy, n_data=50_000, prior=GaussianPrior(25.0))
    PosteriorEnergy(cross_entropy, n_data=50,000, prior=GaussianPrior(25))
    """

    def __init__(
        self,
        loss: Loss,
        *,
        n_data: int,
        prior: Prior | None = None,
        target_key: str = "target",
        prior_in_swaps: bool = True,
    ) -> None:
        require_whole("n_data", n_data, 1)
        if not callable(loss):
            raise InvalidArgumentError(f"loss must be a function of (output, target), got {loss!r}")
        if prior is not None and not callable(prior) and not isinstance(prior, GaussianPrior):
            raise InvalidArgumentError(f"prior must be GaussianPrior or a function, got {prior!r}")
        self.n_data, self.prior, self.target_key = n_data, prior, target_key
        self.prior_in_swaps = prior_in_swaps
        self._name = getattr(loss, "__name__", type(loss).__name__)
        self._per_example: PerExampleLoss | None = None
        self._loss = _without_reduction(loss)

    @classmethod
    def of(
        cls, per_example: PerExampleLoss, *, n_data: int, prior: Prior | None = None
    ) -> PosteriorEnergy:
        """From a function (module, batch) that returns one loss per example: for any other form.

        If replicas do not follow the gradient of their energy, as with modules that are trained
        against each other, it returns a pair. The first has one term of the energy per example,
        which the swaps compare; the second is one number whose gradient is followed, on the scale
        of a mean over examples. `torchrex.targets.frozen` keeps parameters out of it.
        """
        energy = cls(cast(Loss, per_example), n_data=n_data, prior=prior)
        energy._per_example = per_example
        return energy

    def losses(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Loss of each example, (n,), and what is descended where that is not their mean."""
        losses: Any
        descended: Any = None
        if self._per_example is None:
            losses = self._loss_of_output(self._target(batch), self.output(module, batch))
        else:
            losses = self._per_example(module, batch)
            if isinstance(losses, tuple) and len(losses) == 2:
                losses, descended = losses
                if not isinstance(descended, Tensor) or descended.ndim != 0:
                    raise TargetError(
                        f"{self._name} must return (terms of the energy, one number to descend), "
                        f"but the second has {described_shape(descended)}"
                    )
        if not isinstance(losses, Tensor):
            pair = "" if self._per_example is None else ", or (terms, one number to descend)"
            raise TargetError(
                f"{self._name} must return a tensor with one value per example{pair}; got "
                f"{type(losses).__name__}"
            )
        if losses.ndim == 0:
            raise TargetError(
                f"{self._name} returned one number for all examples; the swap test needs one value "
                f'per example, shape (n,): pass a loss of torch itself, or use reduction="none"'
            )
        # Outputs of several numbers per example (mse_loss on (n, d)) add up: a likelihood is a
        # product over them.
        return (losses.flatten(1).sum(1) if losses.ndim > 1 else losses), descended

    def _loss_of_output(self, target: Any, output: Any) -> Any:
        arguments = (output,) if target is None else (output, target)
        is_one = isinstance(output, Tensor)
        losses = self._loss(*arguments) if is_one else self._loss_of_parts(*arguments)
        parts = _tensors_in(output)
        # Parts may be smaller than the target: one scale for all its numbers, for example.
        sizes = [t.numel() for t in (parts if is_one else _tensors_in(arguments))]
        if isinstance(losses, Tensor) and sizes and losses.numel() > max(sizes):
            outputs = ", ".join(str(tuple(part.shape)) for part in parts)
            targets = f" and targets of {described_shape(target)}" if target is not None else ""
            raise TargetError(
                f"{self._name} has shape {tuple(losses.shape)} for outputs of shape {outputs}"
                f"{targets}: torch broadcast them; give all the same shape"
            )
        return losses

    def _loss_of_parts(self, output: Any, *target: Any) -> Any:
        """The loss of an output that is no tensor: a user's loss may take it, torch's do not."""
        try:
            return self._loss(output, *target)
        except (TypeError, AttributeError) as error:
            first = repr(next(iter(output), "...")) if isinstance(output, Mapping) else "0"
            raise TargetError(
                f"the model returned a {type(output).__name__} and not a tensor, and {self._name} "
                f"failed on it ({type(error).__name__}); give a function that takes all parts and "
                f"returns one loss per example: PosteriorEnergy(lambda output, target: "
                f"loss_of(output[{first}], ...), n_data=...)"
            ) from error

    def losses_or_nan(
        self, module: nn.Module, batch: Batch, losses: Any = None, *, moved: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """`losses`; not finite if a ValueError refuses what a diverged replica returns.

        A distribution of torch refuses NaN or a scale of 0; unchecked, its losses are not finite.
        Before a replica has `moved`, a ValueError of finite outputs is always raised.
        """
        try:
            return (losses or self.losses)(module, batch)
        except ValueError as error:
            if isinstance(error, TorchrexError):
                raise
            terms, descended, outputs = None, None, list[Any]()
            with (
                contextlib.suppress(ValueError),
                NotedChecks(),
                module.register_forward_hook(lambda *call: outputs.append(call[-1])),
            ):
                terms, descended = self.losses(module, batch)
            broken = not all(bool(part.isfinite().all()) for part in _tensors_in(outputs))
            refused = terms is None or not bool(terms.isfinite().all())
            if not refused or not (broken or (moved and terms is not None)):
                raise
            logger.warning(f"{self._name} failed on what a diverged replica returns: {error}"[:250])
        if terms is None:
            n = next((len(each) for each in _tensors_in([batch, outputs]) if each.ndim), 1)
            total = torch.stack([p.sum() for p in module.parameters() if p.requires_grad]).sum()
            terms = (float("nan") * total).expand(n)
        return terms, descended

    def per_example(self, module: nn.Module, batch: Batch, *, moved: bool = True) -> Tensor:
        """Loss of each example of the batch, (n,)."""
        return self.losses_or_nan(module, batch, moved=moved)[0]

    def output(self, module: nn.Module, batch: Batch) -> Any:
        """What the module returns for the inputs of a batch."""
        if isinstance(batch, Mapping):
            return module(**{key: value for key, value in batch.items() if key != self.target_key})
        if isinstance(batch, (tuple, list)):
            return module(*batch[:-1])
        return module(batch)

    def _target(self, batch: Batch) -> Any:
        if isinstance(batch, Mapping):
            if self.target_key not in batch:
                raise TargetError(
                    f"a batch is a dict without {self.target_key!r}; it has "
                    f"{', '.join(map(repr, batch))}: name the target by target_key=..."
                )
            return batch[self.target_key]
        # No `tuple | list`, which the compiler of torch 2.8 cannot trace.
        return batch[-1] if isinstance(batch, (tuple, list)) else None

    def tried(self, module: nn.Module, batch: Batch, *, moved: bool = False) -> Tensor:
        """`per_example` of the first batch; an error of torch is explained by what was given.

        Class numbers are checked on the host: on a GPU a wrong one ends the process later.
        """
        output: Any = None
        try:
            if self._per_example is None:
                target = self._target(batch)
                output = self.output(module, batch)
                self._require_classes(output, target)
            return self.per_example(module, batch, moved=moved)
        except TorchrexError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            if (reason := self._explain(module, batch, output, error)) is None:
                raise
            words = " ".join(str(error).split())
            short = f"{words[:150]}..." if len(words) > 150 else words
            raise TargetError(f"{reason} (torch: {short})") from error

    def _require_classes(self, output: Any, target: Any) -> None:
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return
        if self._name not in ONE_CLASS_EACH or output.ndim < 2 or target.is_floating_point():
            return
        n_classes = output.shape[1]
        counted = target[target != getattr(self._loss, "ignore_index", -100)]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < n_classes:
            raise TargetError(
                f"labels must be class numbers from 0 to {n_classes - 1}, because the model has "
                f"{n_classes} outputs; the batch has labels {_described(target)}: number the "
                f"classes from 0, or give the model more outputs"
            )

    def _explain(
        self, module: nn.Module, batch: Batch, output: Any, error: Exception
    ) -> str | None:
        """Why the model or the loss may have failed on a batch; None if what was given fits."""
        alone = isinstance(batch, Tensor) or (isinstance(batch, (tuple, list)) and len(batch) == 1)
        if self._per_example is None and alone and isinstance(error, TypeError):
            return (
                "a batch holds one tensor and no labels; give batches (x, y), or for other forms "
                "use PosteriorEnergy.of(...)"
            )
        if output is None and isinstance(error, RuntimeError):
            return self._explain_inputs(module, batch, str(error))
        target = None if self._per_example is not None else self._target(batch)
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            return None
        if not _is_from_torch(error):
            return None
        advice = "give outputs and labels of the form that the loss takes"
        if self._name in ONE_CLASS_EACH:
            shape = f"({len(output)},)"
            advice = f"give class numbers int64 of shape {shape}: labels.long(), labels.squeeze(1)"
        elif self._name.startswith(("binary", "BCE")):
            advice = f"give labels of the outputs' dtype and shape: labels.to({output.dtype})"
        given = f"outputs {_described(output)} with labels {_described(target)}"
        return f"{self._name} failed on {given}; {advice}"

    def _explain_inputs(self, module: nn.Module, batch: Batch, error: str) -> str | None:
        """Why a model may have failed on its first input: another dtype, or other features."""
        if isinstance(batch, Mapping):
            inputs = next((value for key, value in batch.items() if key != self.target_key), None)
        else:
            inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        if dtype is None or not isinstance(inputs, Tensor):
            return None
        are_numbers = inputs.is_floating_point() or inputs.dtype == torch.uint8  # not words
        if inputs.dtype != dtype and (are_numbers or "same" in error):
            return (
                f"the model is of {_short(dtype)}, but the inputs are {_described(inputs)}; "
                f"give x.to({dtype})"
            )
        if (wanted := _features_missed(module, inputs)) is not None:
            return (
                f"the first layer of the model takes {wanted}, but the inputs are "
                f"{_described(inputs)}; make both agree"
            )
        return None

    def settings(self) -> dict[str, Any]:
        """What distinguishes one energy from another."""
        own = {k: v for k, v in vars(self).items() if k[0] != "_"}
        return {"loss": self._name if inspect.isfunction(self._loss) else self._loss, **own}

    def __repr__(self) -> str:
        is_plain = self.prior is None or isinstance(self.prior, GaussianPrior)
        prior = self.prior if is_plain else "a function"
        where = "" if self.prior_in_swaps else ", not in swaps"
        return f"PosteriorEnergy({self._name}, n_data={self.n_data:,}, prior={prior}{where})"


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_from_torch(error: Exception) -> bool:
    """Was it raised by torch, and not by a user's own code?"""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    module = "" if frames is None else str(frames.tb_frame.f_globals.get("__name__"))
    return module.split(".")[0] == "torch"


def _features_missed(module: nn.Module, inputs: Tensor) -> str | None:
    """What the first layer takes, if the inputs have another number of features or channels."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            sizes = (inputs.shape[-1], inputs.shape[1:].numel()) if inputs.ndim else ()
            return None if layer.in_features in sizes else f"{layer.in_features} features"
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            n = layer.in_channels
            fits = inputs.ndim > 1 and n == inputs.shape[1]
            return None if fits else f"{n} channels, shape (n, {n}, ...)"
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    """dtype, shape and range of a tensor."""
    spread = ""
    if tensor.numel() and not tensor.is_complex():
        spread = f", {tensor.min().item():g} to {tensor.max().item():g}"
    return f"of {_short(tensor.dtype)}, shape {tuple(tensor.shape)}{spread}"


def frozen(module: nn.Module) -> Callable[..., Any]:
    """The module as a function with constant parameters and buffers; inputs get gradients.

    So a generator can descend a loss of a discriminator's output that the discriminator itself does
    not descend.
    """
    constants = {name: parameter.detach() for name, parameter in module.named_parameters()}
    constants |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return lambda *inputs, **named: torch.func.functional_call(module, constants, inputs, named)


def without_tracking(module: nn.Module) -> Callable[..., Any]:
    """The module as a function that changes no buffers, so no running statistics."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return lambda *inputs, **named: torch.func.functional_call(module, buffers, inputs, named)


def _without_reduction(loss: Loss) -> Loss:
    """The same loss giving one value per example, where torch's own argument for it can be set."""
    if isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        loss = copy.copy(loss)
        loss.reduction = "none"  # type: ignore[assignment]
        return loss
    try:
        takes_reduction = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        takes_reduction = False

    def unreduced(*arguments: Any) -> Tensor:
        return loss(*arguments, reduction="none")

    return unreduced if takes_reduction else loss


@dataclass(frozen=True)
class SummedScale:
    """Settings of `torch.optim.SGD` on a mean loss, converted to the summed energy."""

    lr: float  # lr / n_data
    friction: float  # 1 - momentum
    prior: GaussianPrior | None  # weight decay * n_data
    # Of parameter groups: lr / lr of the first group, for `ModuleEnsemble(lr_factors=...)`.
    lr_factors: dict[str, float] = field(default_factory=dict, hash=False)


def from_sgd(
    optimizer: torch.optim.Optimizer | None = None,
    *,
    n_data: int,
    model: nn.Module | None = None,
    **settings: float,
) -> SummedScale:
    """Convert SGD on a mean loss: the optimizer, or its settings `lr`, `momentum`, `weight_decay`.

    At temperature 0 the converted settings take the same steps; lr 0.1 over 50,000 examples is 2e-6
    on the sum, and a weight decay of 5e-4 is the precision 25. An optimizer with parameter groups
    needs the `model`, for the names of its parameters: `lr` is then that of the first group, and
    `lr_factors` and `prior` name the parameters that have another lr or weight decay. If a
    scheduler of torch has changed the lr, the one that it began with counts, and the log says so.

    >>> from_sgd(n_data=50_000, lr=0.1, momentum=0.9, weight_decay=5e-4)
    SummedScale(lr=2e-06, friction=0.1, prior=GaussianPrior(25), lr_factors={})
    """
    require_whole("n_data", n_data, 1)
    of_each: dict[str, dict[str, float]] = {}
    if optimizer is not None:
        first, of_each = _sgd_settings(optimizer, model, settings)
        if of_each and settings:
            raise InvalidArgumentError("of parameter groups no settings may be given again")
        settings = first | settings
    if set(settings) - {"lr", "momentum", "weight_decay"} or "lr" not in settings:
        given = ", ".join(sorted(settings)) or "nothing"
        raise InvalidArgumentError(f"give lr and, if any, momentum and weight_decay; got {given}")
    decay = settings.get("weight_decay", 0.0)
    decays = _exact_groups({n: each["weight_decay"] for n, each in of_each.items()}, decay)
    groups = {name: each * n_data for name, each in decays.items()}
    lr = settings["lr"]
    return SummedScale(
        lr / n_data,
        round(1.0 - settings.get("momentum", 0.0), 12),
        GaussianPrior(decay * n_data, groups) if decay or groups else None,
        _exact_groups({n: each["lr"] / lr for n, each in of_each.items()}, 1.0),
    )


def _sgd_settings(
    optimizer: torch.optim.Optimizer, model: nn.Module | None, given: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Those of the first parameter group, and if there are more, of every parameter's group."""
    if not isinstance(optimizer, torch.optim.SGD):
        is_one, name = isinstance(optimizer, torch.optim.Optimizer), type(optimizer).__name__
        cure = "give lr, momentum and weight_decay of an SGD that trains your model"
        cure = cure if is_one else 'give the optimizer in it, as ["optimizer"] or [0]'
        raise InvalidArgumentError(f"only SGD can be converted, got {name}; {cure}")
    groups, of_each = optimizer.param_groups, dict[str | None, dict[str, float]]()
    own: list[dict[str, float]] = []
    named = {} if model is None else dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    for group in groups:
        if group["nesterov"] or group["dampening"] or group["maximize"]:
            raise InvalidArgumentError("SGHMC has no nesterov, dampening or maximize")
        now = {key: float(group[key]) for key in ("lr", "momentum", "weight_decay")}
        own.append(_before_scheduler(now, group, given))
        of_each |= {names.get(id(parameter)): own[-1] for parameter in group["params"]}
    if len(groups) == 1:
        return own[0], {}
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    if not trained or None in of_each or trained - of_each.keys():
        raise InvalidArgumentError(
            f"the optimizer has {len(groups)} parameter groups; give the model of exactly these "
            "parameters, which have names there: from_sgd(optimizer, n_data=..., model=model)"
        )
    if len({each["momentum"] for each in own}) > 1 or not own[0]["lr"] > 0:
        raise InvalidArgumentError(
            f"parameter groups must have one momentum, and the first a lr above 0; got {own}"
        )
    return own[0], {str(name): each for name, each in of_each.items()}


def _before_scheduler(own: dict[str, float], group: Any, given: Any) -> dict[str, float]:
    """With the lr that a scheduler of torch began with, not the one that it left."""
    before = own | {"lr": float(group.get("initial_lr", own["lr"]))}
    moves_lr = "lr" not in given and (before["lr"] != own["lr"] or "max_lr" in group)
    if moves_lr or ("max_momentum" in group and "momentum" not in given):
        names = ("initial_lr", "lr", "max_lr", "base_momentum", "max_momentum")
        listed = ", ".join(f"{name}={float(group[name]):g}" for name in names if name in group)
        logger.warning(
            f"a scheduler has changed the optimizer ({listed}): from_sgd takes lr={before['lr']:g} "
            f"and momentum={before['momentum']:g}; for others give lr=... and momentum=..."
        )
    return before


def _exact_groups(values: Mapping[str, float], usual: float) -> dict[str, float]:
    """Groups for the parameters whose value is not the usual one, and for those whose names contain
    one of theirs. Longer names come first, because the first part of a name that fits counts.
    """
    other = [name for name, value in values.items() if value != usual]
    listed = [name for name in values if any(part in name for part in other)]
    return {name: values[name] for name in sorted(listed, key=len, reverse=True)}
