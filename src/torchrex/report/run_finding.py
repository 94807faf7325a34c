"""Which folders are runs: where they lie below a folder, and which are named like runs but hold
nothing of one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchrex.errors import RunFolderError

FILES = ("config.json", "result.json", "draws.safetensors", "trace.safetensors", "checkpoints")


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below `root`, sorted by recipe and seed. Folders that wait to be replaced
    are left out.
    """
    return [path for path in _folders(root) if holds_a_run(path)]


def find_empty(root: Path) -> list[Path]:
    """Folders at or below `root` that are named like those of a run, but hold nothing of one."""
    return [path for path in _folders(root) if seed_in(path) is not None and not holds_a_run(path)]


def holds_a_run(path: Path) -> bool:
    return any((path / name).exists() for name in FILES)


def seed_in(path: Path) -> int | None:
    """The seed that the name of a folder tells, as seed=3 does."""
    found = re.match(r"seed=(\d+)", path.name)
    return int(found[1]) if found else None


def recipe_in(path: Path) -> str:
    """The recipe that the place of a run folder tells: OUT/digits/sghmc/seed=0 is one of
    digits/sghmc.
    """
    return "/".join(path.resolve().parts[-3:-1])


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise RunFolderError(
            f"there is no folder {root}; give a run folder, or one that holds run folders"
        )
    found = []
    for place, folders, _ in os.walk(root):
        path = Path(place)
        found.append(path)
        if holds_a_run(path):
            folders.clear()  # what lies in a run folder belongs to that run
        waiting = (".new", ".old", ".replaced")  # next to the run that they replace
        folders[:] = [n for n in folders if not (n.endswith(waiting) and _stem(n) in folders)]
    return sorted(found, key=lambda path: (str(path.parent), seed_in(path) or 0, path.name))
