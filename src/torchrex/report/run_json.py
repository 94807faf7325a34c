"""The two JSON files of a run: what must be in them, and what is used of a file that has another
shape.

A file that is no JSON, or no object, is not used at all. Of a result.json with parts of the wrong
kind the others are used, but the run is damaged: nobody knows what else happened to it.
"""

from __future__ import annotations

from json import JSONDecodeError
from pathlib import Path
from typing import Any

from torchrex.checkpoint import one_line, parse_json, printable, read_file

NEEDED: dict[str, Any] = {"recipe": str, "seed": int, "status": str, "metrics": dict, "swaps": list}
WHERE_THERE: dict[str, Any] = {
    **{"date": str, "wall_seconds": int | float, "device": str, "versions": dict},
    **{"steps_done": int, "replicas_side_by_side": int, "curves": dict, "error": str},
}
WORDS = {
    str: "text",
    int: "a whole number",
    dict: "an object",
    list: "a list",
    int | float: "a number",
}
LARGEST = 1e150  # of a number: its square is one as well
STATUSES = ("finished", "paused", "interrupted", "failed")  # that a result.json has


def read_json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; None, with a problem in words, if there is none.

    Its words are shown in terminals and on pages, so whatever is in them that these would obey is
    there as its escape.
    """
    try:
        found = printable(parse_json(read_file(path)))
    except FileNotFoundError:
        if path.name == "config.json":
            problems.append("there is no config.json: with what settings it ran is not known")
        return None
    except JSONDecodeError as error:
        problems.append(
            f"{path.name} is damaged at line {error.lineno}, column {error.colno} ({error.msg}); none of it is used"
        )
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read ({one_line(error)}); none of it is used")
        return None
    if not isinstance(found, dict):
        problems.append(
            f"{path.name} is damaged: it holds {_kind(found)} in place of an object; none of it is used"
        )
        return None
    return found


def read_result(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """What is sound of a result.json; None if nothing is."""
    found = read_json(path, problems)
    if found is None:
        return None
    lacking = [name for name in NEEDED if name not in found]
    wrong = [
        name
        for name, kind in (NEEDED | WHERE_THERE).items()
        if name in found and not _is(found[name], kind)
    ]
    if "metrics" not in wrong and not all(
        _is_number(value) for value in _dict(found.get("metrics")).values()
    ):
        wrong.append("metrics")
    if "swaps" not in wrong and not all(_is_pair(each) for each in found.get("swaps") or ()):
        wrong.append("swaps")
    beyond = [name for name in found if name not in wrong and not _possible(name, found[name])]
    words = [f"it lacks {', '.join(lacking)}"] if lacking else []
    words += [_wrong(name, found[name]) for name in wrong]
    words += [f"{name} has a value that no run gives" for name in beyond]
    if words:
        problems.append(f"{path.name} is damaged: {'; '.join(words)}")
    return {
        name: value for name, value in found.items() if name not in wrong and name not in beyond
    }


def _wrong(name: str, value: Any) -> str:
    kind = (NEEDED | WHERE_THERE)[name]
    if _is(value, kind):
        return (
            "metrics holds other things than numbers"
            if name == "metrics"
            else "swaps lacks the counts of a pair"
        )
    return f"{name} is {_kind(value)} in place of {WORDS[kind]}"


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """JSON has no NaN and no infinities: they are null and text here."""
    return value is None or value in ("inf", "-inf") or isinstance(value, int | float)


def _possible(name: str, value: Any) -> bool:
    """Whether counts are counts and shares are shares; what is computed from them takes it for
    granted.
    """
    if name in ("seed", "steps_done", "wall_seconds", "replicas_side_by_side"):
        return bool(0 <= value <= LARGEST)
    if name == "metrics":
        numbers = {key: each for key, each in value.items() if _is(each, int | float)}
        if not all(abs(each) <= LARGEST for each in numbers.values()):
            return False
        if not all(
            each == 0 or each >= 1 / LARGEST for key, each in numbers.items() if key.endswith("_se")
        ):
            return False
    if name == "swaps":
        return all(
            0 <= each["accepted"] <= each["proposed"] and min(each["pair"]) >= 0 for each in value
        )
    if name in ("metrics", "curves"):
        shares = [
            each
            for key, inner in value.items()
            if key.endswith(("accuracy", "acceptance_rate"))
            for each in _list(inner)
        ]
        return all(0 <= each <= 1 for each in shares if _is(each, int | float))
    return True


def _is_pair(each: Any) -> bool:
    if not isinstance(each, dict) or not all(
        _is(each.get(name), int) for name in ("accepted", "proposed")
    ):
        return False
    pair, rate = each.get("pair"), each.get("acceptance_rate")
    rungs = isinstance(pair, list) and len(pair) == 2 and all(_is(rung, int) for rung in pair)
    return rungs and (rate is None or _is(rate, int | float))


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing (null)", True: "true", False: "false"}[value]
    return next(
        (words for kind, words in WORDS.items() if isinstance(value, kind)), "something else"
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
