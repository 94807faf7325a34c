"""The posterior of a module: per-example losses, how many data stand behind them, and a prior.

The energy is the negative log posterior, a SUM over the data. A loss that is a negative log
likelihood of one example (cross entropy) enters as it is, and a minibatch of n out of N examples
estimates the sum by N/n times its own.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrex.errors import InvalidArgumentError, TargetError, TorchrexError

Batch = Any  # a tuple (inputs..., target), a dict with the target under `target_key`, or one tensor
Loss = Callable[..., Tensor]
ONE_CLASS_EACH = (
    "cross_entropy",
    "nll_loss",
    "CrossEntropyLoss",
    "NLLLoss",
)  # losses of torch that take class numbers
PerExampleLoss = Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, init=False, repr=False)
class GaussianPrior:
    """Independent N(0, 1 / precision) on every trainable parameter: energy precision / 2 * |w|^2.

    A weight decay d on a mean loss over N examples is the precision d * N. `groups` gives other
    precisions to some parameters: it maps a part of a parameter's name to a precision, and the
    first that fits counts; 0 means no prior there.

    >>> GaussianPrior(25.0, groups={"bias": 0.0, "bn": 0.0})
    GaussianPrior(25, bias: 0, bn: 0)
    """

    precision: float
    groups: tuple[tuple[str, float], ...]

    def __init__(self, precision: float, groups: Mapping[str, float] | None = None) -> None:
        for name, value in {"precision": precision, **(groups or {})}.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < float("inf")
            ):
                raise InvalidArgumentError(
                    f"a prior precision must be finite and >= 0, but {name} has {value!r}"
                )
        object.__setattr__(self, "precision", float(precision))
        object.__setattr__(
            self, "groups", tuple((name, float(value)) for name, value in (groups or {}).items())
        )

    def precision_of(self, name: str) -> float:
        """Precision for the parameter of that name."""
        return next((value for part, value in self.groups if part in name), self.precision)

    def require_fit(self, names: Sequence[str]) -> None:
        """Refuse a group that fits none of a model's parameters: the numbers of a Sequential are
        easily forgotten.
        """
        for part, _ in self.groups:
            if not any(part in name for name in names):
                some = ", ".join([*names[:6], *(["..."] if len(names) > 6 else [])])
                raise InvalidArgumentError(
                    f"the group {part!r} of {self!r} fits no parameter; give a part of a name, of which the model has {some}"
                )

    def __repr__(self) -> str:
        return f"GaussianPrior({', '.join([f'{self.precision:g}', *(f'{name}: {value:g}' for name, value in self.groups)])})"


Prior = GaussianPrior | Callable[[dict[str, Tensor]], Tensor]


class PosteriorEnergy:
    """`-log prior(w) + N/n sum_i loss_i(w)` over a minibatch of n of `n_data` = N examples (Eq. 6).

    `loss` is a loss of torch, as a function or a module (its reduction is set to "none" here), or a
    function (output, target) that returns one value per example. `prior` is a GaussianPrior, None
    for a flat one, or a function from {name: parameter} to a scalar energy; with
    `prior_in_swaps=False` it pulls on the weights but is left out of the energies that the swap
    test compares, as in the paper's authors' code. A batch is `(x, y)` or `(x1, x2, ..., y)`, which
    calls `loss(model(x1, x2, ...), y)`; a dict, which calls `loss(model(**rest),
    batch[target_key])`; or one tensor, which calls `loss(model(x))`. For anything else see `of`.

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
        _require_count(n_data)
        if not callable(loss):
            raise InvalidArgumentError(
                f"loss must be a loss of torch or a function of (output, target), got {loss!r}"
            )
        if prior is not None and not isinstance(prior, GaussianPrior) and not callable(prior):
            raise InvalidArgumentError(
                f"prior must be GaussianPrior(...), None or a function of the parameters, got {prior!r}"
            )
        self.n_data, self.prior, self.target_key = n_data, prior, target_key
        self.prior_in_swaps = prior_in_swaps
        self._name = getattr(loss, "__name__", type(loss).__name__)
        self._per_example: PerExampleLoss | None = None
        self._loss = _without_reduction(loss)

    @classmethod
    def of(
        cls, per_example: PerExampleLoss, *, n_data: int, prior: Prior | None = None
    ) -> PosteriorEnergy:
        """From a function (module, batch) that returns one loss per example: for models and batches
        of any other form.

        Where replicas are not to follow the gradient of their energy, as with modules that are
        trained against each other, it returns a pair: one term of the energy per example, which the
        swaps compare, and one number whose gradient is followed, on the scale of a mean over
        examples. `torchrex.targets.frozen` keeps a module's parameters out of a term of it.
        """
        energy = cls(cast(Loss, per_example), n_data=n_data, prior=prior)
        energy._per_example = per_example
        return energy

    def losses(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Loss of each example of the batch, (n,), and what is descended where that is not their
        mean.
        """
        descended: Any = None
        losses: Any
        if self._per_example is not None:
            losses = self._per_example(module, batch)
            if isinstance(losses, tuple) and len(losses) == 2:
                losses, descended = losses
                if not isinstance(descended, Tensor) or descended.ndim != 0:
                    given = (
                        f"shape {tuple(descended.shape)}"
                        if isinstance(descended, Tensor)
                        else type(descended).__name__
                    )
                    raise TargetError(
                        f"{self._name} must return (terms of the energy, one number to descend), in this order, but the second "
                        f"has {given}"
                    )
        else:
            target = self._target(batch)
            output = self.output(module, batch)
            arguments = (output,) if target is None else (output, target)
            losses = (
                self._loss(*arguments)
                if isinstance(output, Tensor)
                else self._loss_of_parts(*arguments)
            )
            if (
                isinstance(losses, Tensor)
                and isinstance(output, Tensor)
                and losses.numel() > output.numel()
            ):
                raise TargetError(
                    f"{self._name} has shape {tuple(losses.shape)} for outputs of shape {tuple(output.shape)}"
                    + (
                        f" and targets of shape {tuple(target.shape)}"
                        if isinstance(target, Tensor)
                        else ""
                    )
                    + ": one was spread over the other; give both the same shape"
                )
        if not isinstance(losses, Tensor):
            pair = (
                ", or that and one number to descend as a pair (terms, number)"
                if self._per_example is not None
                else ""
            )
            raise TargetError(
                f"{self._name} must return a tensor with one value per example{pair}; got {type(losses).__name__}"
            )
        if losses.ndim == 0:
            raise TargetError(
                f"{self._name} returned one number for the whole batch; the noise of the swap test needs one value per example, "
                f'shape (n,): pass a loss of torch itself (F.cross_entropy), or use reduction="none" in yours'
            )
        # Outputs of several numbers per example (mse_loss on (n, d)) add up: a likelihood is a
        # product over them.
        return (losses.flatten(1).sum(1) if losses.ndim > 1 else losses), descended

    def per_example(self, module: nn.Module, batch: Batch) -> Tensor:
        """Loss of each example of the batch, (n,)."""
        return self.losses(module, batch)[0]

    def tried(self, module: nn.Module, batch: Batch) -> Tensor:
        """`per_example` for the first batch: what torch does not like about it is said in words of
        the batch.

        Class numbers are looked at on the host: on a GPU one that is too large ends the process
        later, elsewhere.
        """
        output: Any = None
        try:
            if self._per_example is None:
                target = self._target(batch)
                output = self.output(module, batch)
                self._require_classes(output, target)
            return self.per_example(module, batch)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = (
                None
                if isinstance(error, TorchrexError)
                else self._what_is_wrong(module, batch, output, error)
            )
            if reason is None or isinstance(error, torch.OutOfMemoryError):
                raise
            words = " ".join(str(error).split())
            raise TargetError(
                f"{reason} (torch: {words[:150]}{'...' if len(words) > 150 else ''})"
            ) from error

    def _require_classes(self, output: Any, target: Any) -> None:
        if (
            self._name not in ONE_CLASS_EACH
            or not isinstance(output, Tensor)
            or not isinstance(target, Tensor)
        ):
            return
        if output.ndim < 2 or target.is_floating_point() or not target.numel():
            return
        ignored = getattr(self._loss, "ignore_index", -100)
        counted = target[target != ignored]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < output.shape[1]:
            raise TargetError(
                f"labels must be class numbers from 0 to {output.shape[1] - 1}, because the model has {output.shape[1]} outputs; "
                f"the batch has labels {_described(target)}: number the classes from 0, or give the model more outputs"
            )

    def _what_is_wrong(
        self, module: nn.Module, batch: Batch, output: Any, error: Exception
    ) -> str | None:
        """Why a model or a loss may have failed on a batch, by what they were given; None if that
        does not tell.
        """
        alone = isinstance(batch, Tensor) or (isinstance(batch, tuple | list) and len(batch) == 1)
        if self._per_example is None and alone and isinstance(error, TypeError):
            return "a batch holds one tensor and no labels; give batches (x, y), or for other forms use PosteriorEnergy.of(...)"
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        given = (
            dict(enumerate(batch))
            if isinstance(batch, tuple | list)
            else batch
            if isinstance(batch, Mapping)
            else {0: batch}
        )
        inputs = next((value for key, value in given.items() if key != self.target_key), None)
        if (
            output is None
            and dtype is not None
            and isinstance(inputs, Tensor)
            and isinstance(error, RuntimeError)
        ):
            are_numbers = (
                inputs.is_floating_point() or inputs.dtype == torch.uint8
            )  # and not the numbers of words, say
            of_types = "same dtype" in str(error) or "should be the same" in str(error)
            if inputs.dtype != dtype and (are_numbers or of_types):
                return f"the model is of {_short(dtype)}, but the inputs are {_described(inputs)}; give x.to({dtype})"
            if (wanted := _features_missed(module, inputs)) is not None:
                return f"the first layer of the model takes {wanted}, but the inputs are {_described(inputs)}; make both agree"
        target = None if self._per_example is not None else self._target(batch)
        if (
            not isinstance(output, Tensor)
            or not isinstance(target, Tensor)
            or not _is_from_torch(error)
        ):
            return None
        advice = "give outputs and labels of the form that the loss takes"
        if self._name in ONE_CLASS_EACH:
            advice = f"give class numbers of shape ({len(output)},) and dtype int64: labels.long(), labels.squeeze(1)"
        elif self._name.startswith(("binary", "BCE")):
            advice = f"give labels of the outputs' dtype and shape: labels.to({output.dtype})"
        return f"{self._name} failed on outputs {_described(output)} with labels {_described(target)}; {advice}"

    def output(self, module: nn.Module, batch: Batch) -> Any:
        """What the module makes of the inputs of a batch."""
        if isinstance(batch, Mapping):
            return module(**{key: value for key, value in batch.items() if key != self.target_key})
        if isinstance(batch, tuple | list):
            return module(*batch[:-1])
        return module(batch)

    def _loss_of_parts(self, output: Any, *target: Any) -> Any:
        """The loss of an output that is no tensor: a loss may be made for such, but those of torch
        are not.
        """
        try:
            return self._loss(output, *target)
        except (TypeError, AttributeError) as error:
            raise TargetError(
                f"the model returned a {type(output).__name__} and not a tensor, and {self._name} failed on it "
                f"({type(error).__name__}); say which part of it the loss takes: PosteriorEnergy.of(lambda module, batch: "
                f'loss(module(batch[0])[0], batch[1], reduction="none"), n_data=...)'
            ) from error

    def _target(self, batch: Batch) -> Any:
        if isinstance(batch, Mapping):
            if self.target_key not in batch:
                raise TargetError(
                    f"a batch is a dict without {self.target_key!r}; it has {', '.join(map(repr, batch))}: say which entry is "
                    f"the target by target_key=..."
                )
            return batch[self.target_key]
        return batch[-1] if isinstance(batch, tuple | list) else None

    def settings(self) -> dict[str, Any]:
        """What distinguishes one energy from another."""
        own = {k: v for k, v in vars(self).items() if k[0] != "_"}
        return {"loss": self._name if inspect.isfunction(self._loss) else self._loss, **own}

    def __repr__(self) -> str:
        prior = (
            self.prior
            if isinstance(self.prior, GaussianPrior) or self.prior is None
            else "a function"
        )
        where = "" if self.prior_in_swaps else ", not in swaps"
        return f"PosteriorEnergy({self._name}, n_data={self.n_data:,}, prior={prior}{where})"


def _is_from_torch(error: Exception) -> bool:
    """Was it raised by torch, and not by a user's own code?"""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return (
        frames is not None
        and str(frames.tb_frame.f_globals.get("__name__")).split(".")[0] == "torch"
    )


def _features_missed(module: nn.Module, inputs: Tensor) -> str | None:
    """What the first layer takes, if the inputs have another number of features or channels."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            fits = inputs.ndim > 0 and layer.in_features in (
                inputs.shape[-1],
                inputs.shape[1:].numel(),
            )
            return None if fits else f"{layer.in_features} features"
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            fits = inputs.ndim > 1 and layer.in_channels == inputs.shape[1]
            return (
                None
                if fits
                else f"{layer.in_channels} channels, shape (n, {layer.in_channels}, ...)"
            )
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    """dtype, shape and range of a tensor."""
    spread = (
        f", {tensor.min().item():g} to {tensor.max().item():g}"
        if tensor.numel() and not tensor.is_complex()
        else ""
    )
    return f"of {_short(tensor.dtype)}, shape {tuple(tensor.shape)}{spread}"


def frozen(module: nn.Module) -> Callable[..., Any]:
    """The module as a function whose parameters are constants and whose buffers stay as they are;
    inputs get their gradients.

    So a generator can descend a loss of a discriminator's output that the discriminator itself does
    not descend.
    """
    constants = {name: parameter.detach() for name, parameter in module.named_parameters()}
    constants |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return lambda *inputs: torch.func.functional_call(module, constants, inputs)


def without_tracking(module: nn.Module) -> Callable[..., Any]:
    """The module as a function that leaves its buffers as they are: for inputs that are not to
    count in running statistics.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return lambda *inputs: torch.func.functional_call(module, buffers, inputs)


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
    if not takes_reduction:
        return loss

    def unreduced(*arguments: Any) -> Tensor:
        return loss(*arguments, reduction="none")

    return unreduced


def _require_count(n_data: int) -> None:
    if isinstance(n_data, bool) or not isinstance(n_data, int) or n_data < 1:
        raise InvalidArgumentError(
            f"n_data must be the number of training examples, a whole number >= 1, got {n_data!r}"
        )


@dataclass(frozen=True)
class SummedScale:
    """Settings of `torch.optim.SGD` on a mean loss, as this package's summed energy wants them."""

    lr: float  # lr / n_data
    friction: float  # 1 - momentum
    prior: GaussianPrior | None  # weight decay * n_data


def from_sgd(
    optimizer: torch.optim.Optimizer | None = None, *, n_data: int, **settings: float
) -> SummedScale:
    """Convert SGD on a mean loss: give the optimizer, or its settings `lr`, `momentum`,
    `weight_decay`.

    At temperature 0 the converted settings take the same steps; lr 0.1 over 50,000 examples is 2e-6
    on the sum, and a weight decay of 5e-4 is the precision 25.

    >>> from_sgd(n_data=50_000, lr=0.1, momentum=0.9, weight_decay=5e-4)
    SummedScale(lr=2e-06, friction=0.1, prior=GaussianPrior(25))
    """
    _require_count(n_data)
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise InvalidArgumentError(
                f"only torch.optim.SGD has a counterpart at temperature 0, got {type(optimizer).__name__}"
            )
        if len(optimizer.param_groups) > 1:
            raise InvalidArgumentError(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups; convert lr and momentum by hand and give the "
                f"weight decays as GaussianPrior(precision, groups={{name: precision}})"
            )
        (group,) = optimizer.param_groups
        if group["nesterov"] or group["dampening"] or group["maximize"]:
            raise InvalidArgumentError(
                "nesterov, dampening and maximize have no counterpart in SGHMC; use plain momentum"
            )
        settings = {key: float(group[key]) for key in ("lr", "momentum", "weight_decay")} | settings
    if set(settings) - {"lr", "momentum", "weight_decay"} or "lr" not in settings:
        given = ", ".join(sorted(settings)) or "nothing"
        raise InvalidArgumentError(f"give lr and, if any, momentum and weight_decay; got {given}")
    decay = settings.get("weight_decay", 0.0)
    friction = round(1.0 - settings.get("momentum", 0.0), 12)
    return SummedScale(
        settings["lr"] / n_data, friction, GaussianPrior(decay * n_data) if decay else None
    )
