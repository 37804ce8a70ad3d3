"""Links between the pages lead somewhere, and files that a page names exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from docs.griffe_doctests import fenced
from docs.site_hooks import ELSEWHERE, modules_by_package, reference_pages, site_path, with_site_links
from tests.docs.commands import ROOT, pages

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(
    r"`((?:dpgcl_core|trainers|sweeps|dashboards|benchmarks|tests|docs|examples)/[\w./*{},-]*)`"
)
REFERENCE = "reference/"


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    slugify = importlib.import_module("markdown.extensions.toc").slugify
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {slugify(re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title), "-") for title in titles}


def dead_links(page: Path, text: str) -> list[str]:
    """Return the links of a page's text that lead nowhere in the repository."""
    dead = []
    for link in _LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        if target.startswith(REFERENCE):  # made from the packages when the site is built
            if target not in reference_pages(ROOT):
                dead.append(link)
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_dead_links_are_found() -> None:
    """A file, an anchor and a reference page that are not there."""
    page = ROOT / "docs/ledger.md"
    text = "[a](limits.md#the-ledger) [b](nothing.md) [c](limits.md#nothing) [d](reference/nothing.md)"
    assert dead_links(page, text) == ["nothing.md", "limits.md#nothing", "reference/nothing.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Patterns such as `{a,b}.py` match at least one file each; `sweeps/NAME/` is the reader's own."""
    named = [each for each in _PATH.findall(page.read_text()) if not re.search(r"\b[A-Z]{2,}/", each)]
    assert [each for each in named if not all(map(_exists, _spelled_out(each)))] == []


def _spelled_out(pattern: str) -> list[str]:
    braces = re.search(r"\{([^}]*)\}", pattern)
    if braces is None:
        return [pattern]
    ends = pattern[: braces.start()], pattern[braces.end() :]
    return [found for each in braces[1].split(",") for found in _spelled_out(f"{ends[0]}{each}{ends[1]}")]


def _exists(pattern: str) -> bool:
    return any(ROOT.glob(pattern.rstrip("/")))


def test_every_page_is_in_the_navigation() -> None:
    """A page that is written is listed, and one that is listed is written."""
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE))
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    elsewhere = set(ELSEWHERE.values()) | {"results/README.md"}
    assert listed == written | elsewhere


def test_links_out_of_docs_become_pages() -> None:
    """What reads well in the repository reads well on the site."""
    assert with_site_links("[a](../ARCHITECTURE.md)", "docs/index.md") == "[a](architecture.md)"
    assert with_site_links("[a](docs/limits.md)", "CONTRIBUTING.md") == "[a](limits.md)"
    assert (
        with_site_links("[a](https://example.org/x.md)", "docs/index.md") == "[a](https://example.org/x.md)"
    )
    assert site_path("pyproject.toml") is None


def test_reference_lists_every_public_module() -> None:
    """A package that moves or is added is in the reference without a word."""
    listed = "\n".join(reference_pages(ROOT).values())
    for package in ("dpgcl_core", "trainers", "dashboards"):
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if not any(part.startswith("_") for part in parts):
                assert f"::: {'.'.join(parts)}\n" in listed + "\n"
    assert modules_by_package(ROOT, "dpgcl_core")["dpgcl_core"][0] == "dpgcl_core"


def test_docs_extra_is_part_of_dev() -> None:
    """Whoever installs for development can build the site."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["docs"]) <= set(extras["dev"])


def test_theme_asks_no_other_machine() -> None:
    """No web fonts, and neither scripts nor styles from elsewhere."""

    text = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  font: false\b", text, re.MULTILINE)
    assert "//" not in re.sub(r"^site_url:.*$", "", text, flags=re.MULTILINE)
    assert "mermaid" not in text  # Material fetches it from another machine


def test_doctests_become_code_blocks() -> None:
    """Wherever they stand in a docstring, with their output and nothing after it."""
    prompt = ">" * 3
    found = fenced(f"One.\n\n{prompt} 1 + 1\n2\n\nTwo.")
    assert found == f"One.\n\n```pycon\n{prompt} 1 + 1\n2\n```\n\nTwo."


def test_site_is_built_strictly_and_aloud() -> None:
    """MkDocs counts no warnings under --quiet, so that --strict would let dead links pass."""
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    assert "--strict" in line
    assert "--quiet" not in line
