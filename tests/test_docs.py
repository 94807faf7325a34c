"""Every Python snippet of the README and the docs runs, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchrex

ROOT = Path(__file__).parents[1]


PAGES = [
    "README.md",
    "docs/index.md",
    "docs/density.md",
    "docs/choosing.md",
    "docs/your-model.md",
    "docs/looking.md",
    "docs/scaling.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page, capsys):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(snippets) >= 2
    names = {"torchrex": torchrex}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    if "draws" in names:
        assert names["draws"].values.isfinite().all()
    if "average" in names:
        assert names["average"].metrics()["accuracy"] > 0.8, "the example does not learn"


def test_every_snippet_of_the_docs_is_run():
    with_snippets = {
        page for page in (ROOT / "docs").glob("*.md") if "```python\n" in page.read_text()
    }
    assert with_snippets <= {ROOT / page for page in PAGES}


def test_every_page_is_on_the_site():
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_links_lead_somewhere():
    for page in [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "benchmarks" / "README.md",
    ]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (
                f"{page.name} links to {link}"
            )


def test_links_to_headings_find_them():
    for page in (ROOT / "docs").glob("*.md"):
        for name, anchor in re.findall(r"\]\((\w[^):#]*)?#([^)]+)\)", page.read_text()):
            headings = re.findall(
                r"^#+ (.*)$", (page.parent / (name or page.name)).read_text(), re.MULTILINE
            )
            slugs = {
                re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
                for heading in headings
            }
            assert anchor in slugs, f"{page.name} links to {name}#{anchor}"
