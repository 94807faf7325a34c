"""Build hooks of the documentation site: committed results and benchmark notes, which pages link
to, become part of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """In the repository they lie beside docs/, on the site within it."""
    for folder in OUTSIDE:
        markdown = markdown.replace(f"](../{folder}/images)", f"](../{folder}/images/table1.md)")
        markdown = markdown.replace(f"](../{folder}/", f"]({folder}/")
    return re.sub(
        r"\[([^\]]+)\]\(\.\./src/[^)]+\)", r"\1", markdown
    )  # the source is not part of the site
