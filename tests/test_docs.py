"""Every Python snippet of README and docs runs, in the order of the page, and passes mypy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchrex

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
OTHERS = tuple(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING"))
TEXTS = (*OTHERS, *DOCS)


def snippets_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


PAGES = [page for page in TEXTS if snippets_of(page)]
QUICK = ("README.md", "index.md", "scaling.md")
MARKED = [
    pytest.param(page, id=page.name, marks=() if page.name in QUICK else pytest.mark.slow)
    for page in PAGES
]


@pytest.mark.parametrize("page", MARKED)
def test_snippets_run(page, capsys):
    names = {"torchrex": torchrex}
    for snippet in snippets_of(page):
        exec(compile(snippet, page.name, "exec"), names)
    if "draws" in names:
        assert names["draws"].values.isfinite().all()
    if "predictive" in names:
        metrics = names["predictive"].metrics()  # of sin(2 x) with noise 0.3
        assert 0.25 < metrics["rmse"] < 0.36
        assert 0.8 < metrics["coverage_90"] < 0.98
    if "average" in names:
        assert names["average"].metrics()["accuracy"] > 0.8, "the example does not learn"


@pytest.mark.slow  # a minute while mypy has no cache of torch
def test_snippets_pass_a_type_checker(tmp_path):
    pytest.importorskip("mypy")
    for page in PAGES:
        text = "\n".join(["import torchrex", *snippets_of(page)])
        (tmp_path / f"{page.stem.replace('-', '_')}.py").write_text(text)
    flags = ["--config-file=", "--check-untyped-defs", "--ignore-missing-imports"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, f"--cache-dir={ROOT / '.mypy_cache' / 'docs'}", "."],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_on_the_site():
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}
    tutorials = {
        page.relative_to(ROOT / "docs").with_suffix(".md").as_posix() for page in NOTEBOOKS
    }
    assert pages | tutorials <= named
    assert {page for page in named if not page.startswith("tutorials/")} == pages


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    named = {name.removeprefix("torchrex.") for name in re.findall(r"^::: (\S+)$", pages, re.M)}
    assert set(torchrex.__all__) <= named


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 100


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_code_fits_the_page(page):
    """A page of the site shows 75 columns."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for kind, code in blocks if kind != "math" for line in code.splitlines()]
    assert [line for line in lines if len(line) > 75] == []


def sentences_of(page: Path) -> list[str]:
    """Without code, formulas, tables, headings and generated parts; a link is its text."""
    text = page.read_text()
    text = re.sub(r"<!-- \w+ -->.*?<!-- end -->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$[^$]+\$", "x", re.sub(r"`[^`]+`", "x", text))
    text = re.sub(r"!\[[^]]*\]\([^)]*\)|\]\([^)]*\)", "", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.) )", text)
    prose = [p.strip() for p in paragraphs if not p.lstrip().startswith(("|", "#", ":::"))]
    return [s for p in prose for s in re.split(r"(?<=[.!?])[*\")\]_]*\s+", " ".join(p.split()))]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_sentences_are_short(page):
    long = [
        s for s in sentences_of(page) if sum(bool(re.search(r"\w", w)) for w in s.split()) >= 25
    ]
    assert long == []


def test_the_reproduction_has_the_numbers_of_its_tables():
    cell = re.compile(r"(?<=\| )\d\d\.\d\d(?:±\d+\.\d+)?(?= \|)")
    short, tables = (
        set(cell.findall((ROOT / "docs" / name).read_text()))
        for name in ("reproduction.md", "reproduction-tables.md")
    )
    assert short
    assert short <= tables


def test_links_lead_somewhere():
    more = (ROOT / "CODE_OF_CONDUCT.md", ROOT / "SECURITY.md", ROOT / "benchmarks" / "README.md")
    for page in (*TEXTS, *more):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            found = link.startswith("http") or (page.parent / link).exists()
            assert found, f"{page.name} links to {link}"


def test_links_to_headings_find_them():
    for page in DOCS:
        for name, anchor in re.findall(r"\]\(([\w.][^):#]*)?#([^)]+)\)", page.read_text()):
            text = (page.parent / (name or page.name)).read_text()
            slugs = {
                re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
                for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            }
            assert anchor in slugs, f"{page.name} links to {name}#{anchor}"
