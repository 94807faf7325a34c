"""Build hooks of the documentation site.

Committed results and benchmark notes, which pages link to, become part of it. Notebooks become
pages, with the outputs that are stored in them. Formulas become MathML, which browsers draw without
JavaScript; a font for it (STIX Two Math, from ziamath) is part of the site.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import ziamath
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = ("results", "benchmarks")
KINDS = (".json", ".md", ".png")


def on_files(files: Files, *, config: Any) -> Files:
    for folder in OUTSIDE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in KINDS:
                files.append(
                    File.generated(
                        config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)
                    )
                )
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=page_of(notebook)))
    font = Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    files.append(File.generated(config, "math.ttf", abs_src_path=str(font)))
    return files


def page_of(notebook: File) -> str:
    """The cells of a notebook and their stored outputs as Markdown, then the file itself."""
    parts = []
    for cell in json.loads(notebook.content_string)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source.strip():
            parts.append(f"```python\n{source}\n```")
            parts += [shown for output in cell["outputs"] if (shown := output_of(output))]
    parts.append(f'<a href="../{Path(notebook.src_uri).name}" download>This notebook</a>')
    return "\n\n".join(parts)


def output_of(output: dict[str, Any]) -> str:
    """A picture where there is one, else text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="output of the cell above" src="data:image/png;base64,{picture}">'
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(data.get("text/plain", ""))).rstrip()
    return f"``` {{ .text .output }}\n{text}\n```" if text else ""


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """What lies beside docs/ in the repository is within it on the site. Links to the source lead
    to the repository, links to notebooks to their pages.
    """
    source = f"]({config.repo_url}/blob/main/"
    markdown = re.sub(r"\]\((?:\.\./)+(?=src/|[A-Z]+\.)", source, markdown)
    if page.file.src_uri.startswith(OUTSIDE):
        return markdown.replace("](../docs/", "](../")
    markdown = re.sub(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(OUTSIDE)})/)", r"](\1", markdown)
    markdown = markdown.replace("](results/images)", "](results/images/table1.md)")
    return re.sub(r"(\]\((?!http)[^)\s]+)\.ipynb(?=[)#])", r"\1.md", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas, which are marked by pymdownx.arithmatex, as MathML."""
    inline = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
    block = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
    content = inline.sub(lambda found: convert(html.unescape(found[1])), content)
    return block.sub(
        lambda found: (
            f'<div class="formula">{convert(html.unescape(found[1]), display="block")}</div>'
        ),
        content,
    )
