"""Data flows one way: a module imports only from folders above its own."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "torchrex"
ORDER = [
    {
        "cpp",
        "errors",
        "rng",
        "schedules",
        "durable",
        "lock",
        "names",
        "notebook",
        "processes",
        "screen",
        "settings",
        "xoshiro",
    },
    {"distributed"},
    {"targets"},
    {"samplers"},
    {"exchange"},
    {"checkpoint"},
    {"posterior"},
    {"diagnostics"},
    {"recording"},
    {"density"},
    {"runs"},
    {"network"},
    {"tuning"},
    {"sampling", "lightning"},
    {"vision"},
    {"experiments"},
    {"report"},
    {"cli"},
]
FOUNDATIONS_KNOW = {
    "cpp": set(),
    "rng": {"errors"},
    "schedules": {"errors"},
    "errors": set(),
    "durable": {"errors"},
    "lock": {"durable", "errors"},
    "names": {"errors"},
    "notebook": set(),
    "processes": {"errors"},
    "screen": set(),
    "settings": {"errors"},
    "xoshiro": {"cpp"},
}


def level(folder: str) -> int:
    return next(k for k, folders in enumerate(ORDER) if folder in folders)


def imported_folders(source: str) -> set[str]:
    """Folders of the package that a module imports from; `import torchrex` alone, for the version,
    does not count.
    """
    folders = set()
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
        folders |= {name.split(".")[1] for name in names if name.startswith("torchrex.")}
    return folders


def backward_imports(folder: str, source: str) -> set[str]:
    if folder in FOUNDATIONS_KNOW:
        return imported_folders(source) - FOUNDATIONS_KNOW[folder]
    return {
        other
        for other in imported_folders(source)
        if level(other) > level(folder) or (level(other) == level(folder) and other != folder)
    }


def test_no_import_points_backwards():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        folder = relative.parts[0].removesuffix(".py")
        if folder not in ("__init__", "__main__"):
            wrong += [
                f"{relative} imports {other}"
                for other in backward_imports(folder, path.read_text())
            ]
    assert not wrong, wrong


def test_the_walk_sees_a_backward_import():
    assert backward_imports("targets", "from torchrex.exchange import Ladder") == {"exchange"}
    assert backward_imports("rng", "from torchrex import targets") == {"targets"}
    assert backward_imports("cli", "import torchrex.exchange.ladder") == set()


def test_every_folder_has_a_place():
    folders = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert folders - {"__init__", "__main__", "__pycache__", "py.typed"} <= set().union(*ORDER)
