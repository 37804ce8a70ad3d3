"""MkDocs hooks: pages from elsewhere in the repository, the API reference, no resource from other machines.

The Markdown files under `docs/` link to other files of the repository by their real relative path, so that
they read well in the repository, too; on the site these links lead to the pages named in `ELSEWHERE`.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dpgcl_core", "trainers", "dashboards")
RESULTS = "benchmarks/results"
ELSEWHERE = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
"""Site page by file of the repository."""

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(```.*?```|`[^`]*`|\]\([^)\s]+\))", re.DOTALL)  # the target of a link, too
_SUBSCRIPT = re.compile(
    r"(?<=[A-Za-zα-ωΑ-Ωℓ∇∏'°\u0302])_(?:\{([^}]*)\}|([A-Za-z0-9α-ω]{1,4})(?![A-Za-z0-9α-ω_]))"
)
_SUPERSCRIPT = re.compile(r"\^(?:\{([^}]*)\}|\(([^()]*)\)|([−-]?\([^()]*\)|[−-]?[A-Za-z0-9α-ω\u0302]+))")
_RESULT_FILES = {".md", ".png", ".csv", ".json"}
_REMOTE = re.compile(
    r"""<(?:link|script|img|iframe|source)\b[^>]*?(?:href|src)=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:@import\s+|url\()["']?((?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)


def site_path(repository_path: str) -> str | None:
    """Return the site path of a file of the repository, None for one that has no page.

    >>> site_path("docs/limits.md"), site_path("benchmarks/results/README.md"), site_path("pyproject.toml")
    ('limits.md', 'results/README.md', None)
    """
    if repository_path in ELSEWHERE:
        return ELSEWHERE[repository_path]
    for folder, place in (("docs/", ""), (f"{RESULTS}/", "results/"), ("examples/", "examples/")):
        if repository_path.startswith(folder):
            return place + repository_path.removeprefix(folder)
    return None


def repository_path(site: str) -> str:
    """Return the file of the repository that a page of the site is made from.

    >>> repository_path("architecture.md"), repository_path("results/README.md"), repository_path("ledger.md")
    ('ARCHITECTURE.md', 'benchmarks/results/README.md', 'docs/ledger.md')
    """
    for source, page in ELSEWHERE.items():
        if site == page and page != "index.md":
            return source
    return f"benchmarks/{site}" if site.startswith("results/") else f"docs/{site}"


def with_site_links(markdown: str, source: str) -> str:
    """Return Markdown of the repository's file `source` with its links between pages made those of the site.

    >>> with_site_links("[how](docs/ledger.md#caps)", "ARCHITECTURE.md")
    '[how](ledger.md#caps)'
    >>> with_site_links("[measured](../../benchmarks/results/README.md)", "docs/theory/groups.md")
    '[measured](../results/README.md)'
    """
    page = site_path(source)
    assert page is not None, source

    def moved(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        place = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if place is None:
            return found[0]  # the strict build refuses what is no page
        return f"{found[1]}{posixpath.relpath(place, posixpath.dirname(page) or '.')}{mark}{anchor}{found[3]}"

    return _LINK.sub(moved, markdown)


def with_indices(markdown: str) -> str:
    """Return Markdown whose `x_i` and `x^i` outside code and links are set as indices and powers.

    >>> with_indices("Σ_{i<n} c_in g_in ≤ e^(ε−s)·s^m_ij, but `sampling_prob` and dp_accounting")
    'Σ<sub>i&lt;n</sub> c<sub>in</sub> g<sub>in</sub> ≤ e<sup>ε−s</sup>·s<sup>m</sup><sub>ij</sub>, but \
`sampling_prob` and dp_accounting'
    >>> with_indices("σ_t ([numbers](results/one_run-2026.json))")
    'σ<sub>t</sub> ([numbers](results/one_run-2026.json))'
    """
    parts = _CODE.split(markdown)
    for at, part in enumerate(parts):
        if part.startswith(
            "```text"
        ):  # a formula of its own: the lines as they stand, in the text's own letters
            formula = html.escape(part.removeprefix("```text").removesuffix("```").strip("\n"), quote=False)
            parts[at] = f'<pre class="formula">{_indexed(formula)}</pre>'
        elif at % 2 == 0:
            parts[at] = _indexed(part)
    return "".join(parts)


def _indexed(text: str) -> str:
    def escaped(found: re.Match[str]) -> str:
        return re.sub(r"<", "&lt;", found[1] or found[2])

    lowered = _SUBSCRIPT.sub(lambda found: f"<sub>{escaped(found)}</sub>", text)
    return _SUPERSCRIPT.sub(lambda found: f"<sup>{found[1] or found[2] or found[3]}</sup>", lowered)


def modules_by_package(root: Path, package: str) -> dict[str, list[str]]:
    """Return the public modules of every package under `package`, by the package's dotted name."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / package).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        *folders, stem = parts
        modules = found.setdefault(".".join(folders), [])
        modules.insert(0, ".".join(folders)) if stem == "__init__" else modules.append(".".join(parts))
    return dict(sorted(found.items()))


def reference_pages(root: Path) -> dict[str, str]:
    """Return the Markdown of the API reference by site path: one page per package, each module a section."""
    pages = {}
    for package in PACKAGES:
        for name, modules in modules_by_package(root, package).items():
            body = "\n\n".join(f"::: {module}" for module in modules)
            pages[f"reference/{name}.md"] = f"# `{name}`\n\n{body}\n"
    return pages


def remote_resources(text: str) -> list[str]:
    """Return the addresses of other machines that HTML or CSS loads something from; links do not count.

    >>> remote_resources('<a href="https://example.org"></a> <script src="https://cdn.example/x.js"></script>')
    ['https://cdn.example/x.js']
    >>> remote_resources("@import '//fonts.example/a.css'; a { background: url(data:image/png;base64,AA) }")
    ['//fonts.example/a.css']
    """
    return [first or second for first, second in _REMOTE.findall(text)]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the API reference to the navigation."""
    sections: dict[str, list[dict[str, str]]] = {package: [] for package in PACKAGES}
    for page in reference_pages(ROOT):
        name = page.removeprefix("reference/").removesuffix(".md")
        package, _, rest = name.partition(".")
        sections[package].append({rest or package: page})
    nav: list[Any] = config.nav or []
    nav.append({"API reference": [{package: pages} for package, pages in sections.items()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere and those of the API reference."""
    for source, page in ELSEWHERE.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for file in sorted((ROOT / RESULTS).rglob("*")):
        if file.suffix in _RESULT_FILES:
            place = f"results/{file.relative_to(ROOT / RESULTS).as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(file)))
    for file in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{file.name}", abs_src_path=str(file)))
    for page, markdown in reference_pages(ROOT).items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Make the repository's links those of the site."""
    site = str(page.file.src_uri)
    if site.startswith("reference/"):
        return markdown
    linked = with_site_links(markdown, repository_path(site))
    return with_indices(linked) if site.startswith("theory/") else linked


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that would load anything from another machine.

    Raises:
      PluginError: names the file and the address.
    """
    for file in sorted(Path(config.site_dir).rglob("*")):
        if file.suffix in {".html", ".css"} and (found := remote_resources(file.read_text())):
            raise PluginError(f"{file} loads {found[0]}; the site must hold all it needs")
