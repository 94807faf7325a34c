"""The config object of a run from its config.json, and the ladder it ran on."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchrex.errors import RecipeError, TorchrexError
from torchrex.exchange import Ladder
from torchrex.experiments.digits import N_TEST, DigitsConfig
from torchrex.experiments.images import ImageConfig
from torchrex.experiments.mixtures import MixtureConfig
from torchrex.experiments.recipes import Config, get_recipe
from torchrex.experiments.tall import LogisticConfig


class Rebuilt(NamedTuple):
    """The config object and its ladder, None where they cannot be had; `usable` is False if the values are what forbids it."""

    settings: Config | None
    ladder: Ladder | None
    usable: bool = True


def rebuild(recipe: str, config: Mapping[str, Any], problems: list[str]) -> Rebuilt:
    """From the values of a config.json. What stands against it becomes a problem in words."""
    if not config:
        return Rebuilt(None, None)
    try:
        settings = config_from_json(get_recipe(recipe), config, problems)
        return Rebuilt(settings, ladder_of(settings))
    except RecipeError as error:
        problems.append(f"{error}; so its ladder is not known")
        return Rebuilt(None, None)
    except (TorchrexError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        problems.append(f"the settings in config.json cannot be used ({error}); so its ladder is not known")
        return Rebuilt(None, None, usable=False)


def config_from_json(base: Config, values: Mapping[str, Any], problems: list[str]) -> Config:
    """`base` with the values of a config.json: what `to_json` wrote, back. Fields that only one side knows are problems."""
    known = {field.name for field in dataclasses.fields(base)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        problems.append(f"config.json has settings that this version does not know: {', '.join(unknown)}")
    if missing := sorted(known - set(values)):
        problems.append(f"config.json lacks {', '.join(missing)}: those of the recipe are taken")
    return typing.cast(Config, _from_json(base, values))


def _from_json(base: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(type(base))
    changes = {}
    for field in dataclasses.fields(base):
        if field.name not in values:
            continue
        value, now = values[field.name], getattr(base, field.name)
        changes[field.name] = _from_json(now, value) if dataclasses.is_dataclass(now) else _plain(value, hints[field.name])
    return dataclasses.replace(base, **changes)


def _plain(value: Any, kind: Any) -> Any:
    """JSON has no tuples and no infinities."""
    if typing.get_origin(kind) is tuple:
        return tuple(_plain(each, typing.get_args(kind)[0]) for each in value)
    return float(value) if kind is float else value


def ladder_of(config: Any) -> Ladder | None:
    """The ladder a config runs on; None for a config of a kind that is not known here."""
    if isinstance(config, MixtureConfig):
        return Ladder(config.temperatures, config.lr)
    if isinstance(config, LogisticConfig):
        return Ladder(config.temperatures, config.lr_of_mean / config.n_data)
    if isinstance(config, DigitsConfig):
        return config.ladder(1797 - N_TEST)
    return config.ladder() if isinstance(config, ImageConfig) else None
