"""Run the tutorials and write into them what they show.

    make notebooks                              # all of them, some minutes
    python docs/site/notebooks.py NAME ...      # those named, with what the extra `docs` installs

Needs Chrome or Chromium for the pictures of Plotly (BROWSER_PATH, if it is not found). What is
written names no machine: `%pip` lines are not run, and paths, times and versions are left out.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

TUTORIALS = Path(__file__).parents[1] / "tutorials"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# What a command shows while it works, and takes back.
PROGRESS = re.compile(r"[^\n]*\n\x1b\[1A\x1b\[2K|\x1b\[[0-9;?]*[A-Za-z]")
# Plotly's figures become pictures, which GitHub shows too.
KEPT = ("image/png", "text/html", "text/plain")


def refresh(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    installs = [cell for cell in notebook.cells if cell.source.startswith("%pip")]
    for cell in installs:
        cell.metadata["tags"] = ["skip-execution"]
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=600,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        ).execute()
        for k, cell in enumerate(notebook.cells):
            cell.id, cell.metadata = f"cell-{k}", {}
            for output in cell.get("outputs", ()):
                clean(output, folder)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    notebook.metadata = {
        "code_sha256": hashlib.sha256("\0".join(code).encode()).hexdigest(),  # tests compare it
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


def clean(output: nbformat.NotebookNode, folder: str) -> None:
    if output.output_type == "stream":
        if "Traceback" in output.text:  # of a command, `!...`, which does not end the notebook
            raise SystemExit(output.text)
        output.text = without_machine(output.text, folder)
        return
    output.metadata = {}
    for kind in list(output.data):
        if kind not in KEPT or (kind == "text/html" and "image/png" in output.data):
            del output.data[kind]
        elif kind == "image/png":
            output.data[kind] = small(output.data[kind])
        else:
            output.data[kind] = without_machine(output.data[kind], folder)


def small(picture: str) -> str:
    """With 128 colours: a third of the size."""
    image, file = Image.open(io.BytesIO(base64.b64decode(picture))), io.BytesIO()
    image.convert("RGB").quantize(128).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def without_machine(text: str, folder: str) -> str:
    return ADDRESS.sub("", PROGRESS.sub("", text.replace("\r", "").replace(folder, ".")))


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    os.environ["PLOTLY_RENDERER"] = "png"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in names:
        print(name, flush=True)
        refresh(TUTORIALS / f"{name}.ipynb")
