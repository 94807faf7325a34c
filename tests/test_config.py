"""Configs, overrides, recipes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import FrozenInstanceError, dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from torchrex.errors import ConfigError, RecipeError
from torchrex.experiments.recipes import get_recipe, recipes
from torchrex.runs.config import descriptions, dumps, override


@dataclass(frozen=True)
class Inner:
    law: Literal["a", "b"] = "a"
    scale: float = 1.0


@dataclass(frozen=True)
class Outer:
    n: int = 1
    rate: float = 0.5
    on: bool = False
    name: str = "x"
    many: tuple[float, ...] = (1.0,)
    maybe: float | None = None
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("assignment", "field", "value"),
    [
        ("n=3", "n", 3),
        ("n=1e5", "n", 100_000),
        ("n=100_000", "n", 100_000),
        ("rate=2", "rate", 2.0),
        ("rate=inf", "rate", math.inf),
        ("on=true", "on", True),
        ("many=1,2.5", "many", (1.0, 2.5)),
        ("many=(3,)", "many", (3.0,)),
        ("maybe=4", "maybe", 4.0),
        ("maybe=none", "maybe", None),
        ("name=a=b", "name", "a=b"),
        ("inner.scale=7", "inner", Inner(scale=7.0)),
        ("inner.law=b", "inner", Inner(law="b")),
    ],
)
def test_overrides(assignment, field, value):
    assert getattr(override(Outer(), [assignment]), field) == value


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("n", "form key=value"),
        ("=3", "form key=value"),
        ("n=1.5", "'n' must be a whole number < 2^63, got '1.5'"),
        ("n=many", "whole number"),
        ("n=9223372036854775808", "whole number < 2^63"),
        ("n=-1e30", "whole number < 2^63"),
        ("rate=fast", "'rate' must be a number"),
        ("rate=nan", "must be a number"),
        ("on=1", "true or false"),
        ("many=1,x", "'many' must be a number"),
        ("rat=1", "did you mean rate"),
        ("zzz=1", "it has n, rate"),
        ("inner=1", "inner.law, inner.scale"),
        ("inner.law=c", "one of a, b"),
        ("inner.scal=1", "did you mean scale"),
        ("n.x=1", "no parts"),
    ],
)
def test_bad_overrides(assignment, word):
    with pytest.raises(ConfigError, match=re.escape(word)):
        override(Outer(), [assignment])


def test_json_is_plain():
    plain = {"n": 1, "rate": "inf", "on": False, "name": "x", "many": [1.0], "maybe": None}
    plain["inner"] = {"law": "a", "scale": 1.0}
    assert json.loads(dumps(Outer(rate=math.inf, maybe=math.nan))) == plain


def test_recipes_are_complete_and_frozen():
    known = recipes()
    assert len([name for name in known if name.startswith("figure1/")]) == 11
    for name, config in known.items():
        assert config.recipe == name
        with pytest.raises(FrozenInstanceError):
            config.n_steps = 1
    factors = [
        config.correction_factor
        for name, config in known.items()
        if "case3-" in name and name[-4:] != "sgld"
    ]
    assert set(factors) >= {1.0, 2.0, 4.0, math.inf}
    with pytest.raises(ConfigError, match="setting 'recipe' belongs to the recipe and is fixed"):
        override(known["figure1/case1-resgld"], ["recipe=x"])


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(RecipeError, match="did you mean figure1/case1-resgld"):
        get_recipe("figure1/case1-regsld")
    for near, meant in (
        ("resnet21", "resnet20"),
        ("resnet30", "resnet32"),
    ):  # 20 and 32 have as many letters in common
        with pytest.raises(RecipeError, match=rf"did you mean icml2020/cifar10-{meant}[?]"):
            get_recipe(f"icml2020/cifar10-{near}")
    with pytest.raises(LookupError, match="torchrex list"):
        get_recipe("qqq")


def test_the_beginning_of_a_name_brings_those_that_begin_so():
    f1, f2, f4 = (f"figure1/case3-resgld-F{factor}" for factor in (1, 2, 4))
    resgld = f"did you mean {f1}, {f2} or {f4}[?]"
    for words, given in (
        (resgld, "figure1/case3-resgld"),
        ("figure1/case3-naive, .* or 2 others[?]", "figure1/case3"),
    ):
        with pytest.raises(RecipeError, match=f"{words} `torchrex list {given}` shows"):
            get_recipe(given)
    with pytest.raises(RecipeError, match=r"did you mean tall/logistic[?] `torchrex list logis`"):
        get_recipe("logis")


def test_what_is_said_of_a_setting_names_its_choices():
    for config in {type(config): config for config in recipes().values()}.values():
        said = descriptions(config)
        for name, kind in get_type_hints(type(config)).items():
            if get_origin(kind) is Literal and said.get(name) != "fixed":
                assert all(choice in said.get(name, "") for choice in get_args(kind)), name


@dataclass
class Commented:
    first: int = 1  # one,
    # two,
    # three
    second: int = 2


def test_a_comment_on_a_setting_may_have_several_lines():
    assert descriptions(Commented()) == {"first": "one, two, three"}
    said = descriptions(get_recipe("icml2020/cifar10-resnet20"))
    assert (
        "as their test has the sum of two variances (the paper's 3e5 is 150000 here)"
        in said["correction_factor"]
    )
    assert said["factor_per_swap"].startswith("F is multiplied")
    assert "repeated: 10 energies once an epoch" in said["variance"]
