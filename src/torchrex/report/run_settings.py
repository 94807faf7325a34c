"""The config object of a run from its config.json, and the ladder it ran on."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchrex.checkpoint import one_line
from torchrex.errors import ConfigError, RecipeError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments import ExperimentConfig as Config
from torchrex.experiments import get_recipe
from torchrex.experiments.digits import DigitsConfig
from torchrex.experiments.folder import added_later
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.experiments.tall import LogisticConfig


class Rebuilt(NamedTuple):
    """The config object and its ladder, None where they cannot be had; `usable` is False if the
    values are what forbids it.
    """

    settings: Config | None
    ladder: Ladder | None
    usable: bool = True


def rebuild(recipe: str, config: Mapping[str, Any], problems: list[str]) -> Rebuilt:
    """From the values of a config.json. What stands against it becomes a problem in words."""
    if not config:
        return Rebuilt(None, None)
    try:
        settings = config_from_json(get_recipe(recipe), config, problems)
        _require_usable(settings)
        return Rebuilt(settings, ladder_of(settings))
    except RecipeError as error:
        problems.append(f"{one_line(error)}; so its ladder is not known")
        return Rebuilt(None, None)
    except (
        TorchrexError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
    ) as error:
        problems.append(
            f"the settings in config.json cannot be used ({one_line(error)}); so its ladder is not known"
        )
        return Rebuilt(None, None, usable=False)


def config_from_json(base: Config, values: Mapping[str, Any], problems: list[str]) -> Config:
    """`base` with the values of a config.json: what `to_json` wrote, back. Fields that only one
    side knows are problems.
    """
    known = {field.name for field in dataclasses.fields(base)}
    if unknown := sorted(set(values) - known):
        problems.append(
            f"config.json has settings that this version does not know: {one_line(', '.join(unknown))}"
        )
    if missing := sorted(known - set(values) - set(added_later(base))):
        problems.append(f"config.json lacks {', '.join(missing)}: those of the recipe are taken")
    return typing.cast(Config, _from_json(base, values))


def _from_json(base: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(type(base))
    changes = {}
    for field in dataclasses.fields(base):
        if field.name not in values:
            continue
        value, now = values[field.name], getattr(base, field.name)
        if dataclasses.is_dataclass(now):
            if not isinstance(value, dict):
                raise _other_kind(field.name, value, hints[field.name])
            changes[field.name] = _from_json(now, value)
        else:
            changes[field.name] = _plain(value, hints[field.name], field.name)
    return dataclasses.replace(base, **changes)


def _plain(value: Any, kind: Any, name: str) -> Any:
    """A value of the annotated type. JSON has no tuples and no infinities."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None and type(None) in args else _plain(value, args[0], name)
    if origin is tuple and isinstance(value, list):
        return tuple(_plain(each, args[0], name) for each in value)
    if origin is dict and isinstance(value, dict):
        return {key: _plain(each, args[1], name) for key, each in value.items()}
    if origin is typing.Literal and isinstance(value, str) and value in args:
        return value
    if kind is float and (
        value in ("inf", "-inf") if isinstance(value, str) else type(value) in (int, float)
    ):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    raise _other_kind(name, value, kind)


def _other_kind(name: str, value: Any, kind: Any) -> ConfigError:
    wanted = (
        getattr(kind, "__name__", None)
        if not typing.get_args(kind)
        else str(kind).removeprefix("typing.")
    )
    return ConfigError(f"{name} is {one_line(repr(value), 80)} and not {wanted}")


def _require_usable(settings: Any) -> None:
    """What charts and findings are made from must be there: how many steps, and a mixture that is
    one. Settings that `--set` would refuse for other reasons are told as they are.
    """
    if settings.n_steps < 0:
        raise ConfigError(f"n_steps is {settings.n_steps}")
    if isinstance(settings, MixtureConfig):
        settings.mixture()


def ladder_of(config: Any) -> Ladder | None:
    """The ladder a config runs on; None for a config of a kind that is not known here."""
    if isinstance(config, MixtureConfig):
        return Ladder(config.temperatures, config.lr)
    if isinstance(config, LogisticConfig):
        return Ladder(config.temperatures, config.lr_of_mean / config.n_data)
    if isinstance(config, DigitsConfig):
        return config.ladder()
    return config.ladder() if isinstance(config, ImageConfig) else None
