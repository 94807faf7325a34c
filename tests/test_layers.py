"""Data flows one way: a module imports only from rooms above its own."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "torchrex"
ORDER = [
    {"errors", "rng", "schedules", "durable", "notebook", "settings"},
    {"distributed"},
    {"targets"},
    {"samplers"},
    {"exchange"},
    {"checkpoint"},
    {"posterior"},
    {"recording"},
    {"density"},
    {"network"},
    {"diagnostics"},
    {"vision"},
    {"experiments"},
    {"report"},
    {"cli"},
]
FOUNDATIONS_KNOW = {
    "rng": {"errors"},
    "schedules": {"errors"},
    "errors": set(),
    "durable": set(),
    "notebook": set(),
    "settings": {"errors"},
}


def level(room: str) -> int:
    return next(k for k, rooms in enumerate(ORDER) if room in rooms)


def imported_rooms(source: str) -> set[str]:
    """Rooms of the package that a module imports from; `import torchrex` alone, for the version,
    does not count.
    """
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "torchrex"
                else [node.module or ""]
            )
        rooms |= {name.split(".")[1] for name in names if name.startswith("torchrex.")}
    return rooms


def backward_imports(room: str, source: str) -> set[str]:
    if room in FOUNDATIONS_KNOW:
        return imported_rooms(source) - FOUNDATIONS_KNOW[room]
    return {
        other
        for other in imported_rooms(source)
        if level(other) > level(room) or (level(other) == level(room) and other != room)
    }


def test_no_import_points_backwards():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            wrong += [
                f"{relative} imports {other}" for other in backward_imports(room, path.read_text())
            ]
    assert not wrong, wrong


def test_the_walk_sees_a_backward_import():
    assert backward_imports("targets", "from torchrex.exchange import Ladder") == {"exchange"}
    assert backward_imports("rng", "from torchrex import targets") == {"targets"}
    assert backward_imports("cli", "import torchrex.exchange.ladder") == set()


def test_every_room_has_a_place():
    rooms = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    assert rooms - {"__init__", "__main__", "__pycache__", "py.typed"} <= set().union(*ORDER)
