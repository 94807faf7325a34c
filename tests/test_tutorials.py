"""The tutorials: every cell runs, and what a reader sees in them is what their code gave.

`docs/site/notebooks.py` runs them in a notebook and keeps the outputs. Here the cells run without
Jupyter, with `!command` and `%%writefile` as a notebook has them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/github/torchrex/torchrex/blob/main/docs/tutorials/"
WIDEST = 75  # columns of code
LARGEST = 60_000  # bytes of a picture
MACHINE = re.compile(r"(?<![\w.])/(tmp|home|root|usr|opt|var|work|Users)/|0x[0-9a-f]{6}|ipykernel")

every_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def cells_of(path: Path, kind: str) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text())["cells"]
    return [{**c, "source": "".join(c["source"])} for c in cells if c["cell_type"] == kind]


def as_python(cell: str) -> str:
    first, _, rest = cell.partition("\n")
    if first.startswith("%%writefile "):
        return f"_write({first.split()[1]!r}, {rest!r})"
    return "\n".join(
        "" if line.startswith("%pip ") else f"_shell({line[1:]!r})" if line[:1] == "!" else line
        for line in cell.splitlines()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@every_tutorial
def test_it_runs(path, tmp_path, monkeypatch):
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names: dict[str, Any] = {
        "_write": lambda name, text: Path(name).write_text(text),
        "_shell": lambda command: subprocess.run(command, shell=True, check=True),
    }
    try:
        for k, cell in enumerate(cells_of(path, "code")):
            exec(compile(as_python(cell["source"]), f"{path.name}, code cell {k}", "exec"), names)
    finally:
        plt.close("all")


@every_tutorial
def test_it_begins_as_all_do(path):
    about, install = (cells_of(path, kind)[0]["source"] for kind in ("markdown", "code"))
    assert about.startswith("# ")
    assert f"({COLAB}{path.name})" in about
    assert "**You will see**" in about
    assert "**It takes**" in " ".join(about.split())
    assert re.fullmatch(r'%pip install -q ("torchrex\[[\w,]+\]"|torchrex)', install)


@every_tutorial
def test_its_code_is_narrow(path):
    for cell in cells_of(path, "code"):
        for line in cell["source"].splitlines():
            assert len(line) <= WIDEST, line


@every_tutorial
def test_its_outputs_are_those_of_its_code(path):
    code = [cell["source"] for cell in cells_of(path, "code")]
    known = json.loads(path.read_text())["metadata"]["code_sha256"]
    again = f"run: python docs/site/notebooks.py {path.stem}"
    assert known == hashlib.sha256("\0".join(code).encode()).hexdigest(), again


@every_tutorial
def test_its_outputs_are_small_and_name_no_machine(path):
    outputs = [output for cell in cells_of(path, "code") for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        texts = ["".join(output.get("text", ""))]
        for kind, data in output.get("data", {}).items():
            if kind == "image/png":
                assert len(base64.b64decode("".join(data))) < LARGEST
            else:
                assert kind in ("text/plain", "text/html")
                texts.append("".join(data))
        assert not MACHINE.search("\n".join(texts)), texts
        assert sum(map(len, texts)) < LARGEST


@every_tutorial
def test_its_links_lead_somewhere(path):
    text = "\n".join(cell["source"] for cell in cells_of(path, "markdown"))
    for name, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", text):
        page = path.parent / name
        assert page.exists(), name
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\s-]", "", each).lower().replace(" ", "-") for each in headings]
            assert anchor in slugs, anchor
