"""Every error torchrex raises on purpose: one small tree, each also the builtin a caller expects.

A message says what is wrong, what was given, and what to do. The command line prints it as one line
and exits with 2.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_WHOLE = 2**63 - 1  # of tensors and files; a larger number could be written but not read

# What Ctrl-C does to `train`, `sample` and `collect`, once everything is saved.
OnInterrupt = Literal["raise", "return"]


class TorchrexError(Exception):
    """Base of all errors of this package."""


class InvalidArgumentError(TorchrexError, ValueError):
    """An argument of a public function cannot be used."""


class LadderError(InvalidArgumentError):
    """Temperatures or learning rates do not form a ladder."""


class TargetError(InvalidArgumentError):
    """A density or a data set does not have the promised form."""


class NoiseError(InvalidArgumentError):
    """A noise estimator asks for something the target cannot give."""


class ConfigError(InvalidArgumentError):
    """A configuration value or a `--set` override is unknown or of the wrong type."""


class RecipeError(TorchrexError, LookupError):
    """No recipe of that name."""


class RunFolderError(TorchrexError, OSError):
    """A run folder cannot be written or read."""


class CheckpointError(RunFolderError):
    """A checkpoint or a stored draw is missing, damaged, or that of another run."""


class DataError(TorchrexError, OSError):
    """A data set is missing, damaged, or not what it should be."""


class DeviceError(TorchrexError, RuntimeError):
    """A device is absent or has not enough memory."""


class RankError(TorchrexError, RuntimeError):
    """Another process of the job is gone, stopped or too slow; `speaks` says whether this one
    should report it.
    """

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        super().__init__(message)
        self.speaks = speaks


class MissingDependencyError(TorchrexError, ImportError):
    """An optional dependency is not installed."""


class NonFiniteEnergyError(TorchrexError, FloatingPointError):
    """An energy became NaN or infinite; what was sampled before is in `draws`."""

    def __init__(
        self,
        *,
        replica: int,
        rung: int,
        run: int,
        step: int,
        value: float,
        draws: Any = None,
        advice: str = "",
    ) -> None:
        self.replica, self.rung, self.run, self.step, self.value = replica, rung, run, step, value
        self.draws, self.advice = draws, advice
        self.checkpoint: Any = None
        if value == float("-inf"):
            advice = "Is the sign of the log density wrong, or has it no upper bound?"
        elif not advice and step > 0:
            advice = (
                "Lower the learning rate of that rung, start elsewhere (initial=...), or check "
                "the density there. A parameter with bounds needs a transform: sample the log of "
                "a positive one."
            )
        elif not advice:
            advice = "The starting point is outside the support: choose another with initial=..."
        if draws is not None:
            advice += f" Draws before it: {draws.n_draws:,}, in the error's `draws`."
        super().__init__(
            f"the energy of replica {replica} on rung {rung} became {value} at step {step} "
            f"(run {run}). {advice}"
        )

    def because(self, part: str) -> NonFiniteEnergyError:
        """The same error, naming the part of the replica where it began."""
        self.args = (f"{self} It began with {part}.",)
        return self

    def with_checkpoint(self, path: Any) -> NonFiniteEnergyError:
        """The same error, naming the last checkpoint before it."""
        none, last = (
            "There is no checkpoint before it.",
            f"The last checkpoint before it is {path}.",
        )
        self.checkpoint, self.args = path, (f"{self} {none if path is None else last}",)
        return self


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C, after everything was saved: a KeyboardInterrupt, so that a loop over runs ends.

    What `sample` and `collect` have drawn is in `draws`, how far `train` came is in `outcome`.
    """

    def __init__(self, message: str, *, draws: Any = None, outcome: Any = None) -> None:
        super().__init__(message)
        self.draws, self.outcome = draws, outcome


def is_out_of_memory(error: BaseException) -> bool:
    """Is memory exhausted, on a CPU or a GPU? For a CPU torch raises a plain RuntimeError."""
    if isinstance(error, RuntimeError):
        words = ("DefaultCPUAllocator", "bad_alloc", "size calculation overflowed")
        is_of_gpu = type(error).__name__ == "OutOfMemoryError"
        return is_of_gpu or any(word in str(error) for word in words)
    return isinstance(error, MemoryError)


@contextlib.contextmanager
def explain_memory(explanation: Callable[[], str]) -> Iterator[None]:
    """Exhausted memory becomes a DeviceError that says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(explanation()) from None


def require_on_interrupt(on_interrupt: str) -> None:
    if on_interrupt not in ("raise", "return"):
        raise InvalidArgumentError(f"on_interrupt must be raise or return, got {on_interrupt!r}")


def require_whole(name: str, value: Any, least: int = 0) -> None:
    """Refuse an argument that is not a whole number of at least `least`; True and 1.0 are not."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{name} must be a whole number >= {least}, got {value!r}")
    if value > LARGEST_WHOLE:
        bits = value.bit_length()
        raise InvalidArgumentError(f"{name} must be a whole number < 2^63, got one of {bits} bits")


# What arguments of ours are called elsewhere.
OTHER_NAMES = {
    "learning_rate": "lr",
    "step_size": "lr",
    "num_steps": "n_steps",
    "draws": "n_steps",
    "n_chains": "n_runs",
    "num_chains": "n_runs",
    "chains": "n_runs",
    "temps": "temperatures",
    "thinning": "thin",
    "warmup": "burn_in",
}


def require_names(given: Iterable[str], names: Sequence[str], function: str) -> None:
    """Refuse an argument that is not one of `names`, with the nearest of them."""
    for name in given:
        if name not in names:
            known = OTHER_NAMES.get(name)
            near = [known] if known in names else difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
            raise InvalidArgumentError(f"unknown argument {name!r} of {function}; {hint}")


def known_arguments(*more: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function refuses unknown names before Python finds that others are missing."""

    def checked(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters.values()
        named = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            require_names(kwargs, [*named, *more], function.__name__)
            return function(*args, **kwargs)

        return call

    return checked


def import_extra(name: str, extra: str) -> Any:
    """An optional package, or one line that names the extra which installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingDependencyError(
            f"this needs {name}, which is not installed: pip install 'torchrex[{extra}]'"
        ) from None
