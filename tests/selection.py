"""Which tests marked `ci`, and which breakages, `.ci/run` takes: those of what changed since `.ci/base`.

A test file belongs to the package that its folder mirrors: `tests/dpgcl_core/ledger` to `dpgcl_core/ledger`.
A change reaches it when it changes that package or one that it imports; imports inside functions count. If
all that is reached takes too long, it is cut in a fixed order. The same tree and base select the same tests.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TypeVar

import grimp

from tests.mutants.breakages import Breakage

ROOT = Path(__file__).parents[1]
BASE = ROOT / ".ci" / "base"
SECONDS = ROOT / ".ci" / "seconds.json"

PACKAGES = ("dpgcl_core", "trainers", "dashboards", "sweeps", "benchmarks")
SUBJECTS_OF_ALL = ("", "docs", "examples")
"""What may use every package: pages, examples, and the test folders that mirror no package."""
WITHOUT_TESTS = (".ci/base", ".ci/seconds.json", "LICENSE", "mkdocs.yml")
"""Files that reach no test marked `ci`: `make test` and `make docs` check them."""

CI_PROCESSES = 3
CI_MINUTES = 16
"""What the chosen tests take on two idle cores with `CI_PROCESSES` processes.

`.ci/run` must end within 60 minutes on a busy machine, where everything takes twice as long: within 30 idle
ones. Lint and types take 2 of them, pages and wheel 2, `make test` 5, the breakages 2. The last 3 of the
remaining 19 are for the end of a run, when one process has a long file and the others have none.
"""
UNKNOWN_SECONDS = 60.0
"""What a test file takes that the table does not have."""
NUM_BREAKAGES = 20
"""Breakages that take two minutes, at six seconds each."""

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The Python files of source and tests.

    Attributes:
      packages: the folders that are packages of the source.
      imports: by file, the files that it imports.
    """

    packages: Set[str]
    imports: Mapping[str, Set[str]]

    def subject(self, path: str) -> str:
        """Return the package that a path is in or, below `tests`, that its folder mirrors; "" where none is.

        >>> tree = Tree(packages={"trainers", "trainers/files"}, imports={})
        >>> paths = ("trainers/files/a.css", "tests/trainers/files/test_a.py", "tests/test_b.py")
        >>> [tree.subject(path) for path in paths]
        ['trainers/files', 'trainers/files', '']
        """
        folders = map(str, PurePosixPath(path.removeprefix("tests/")).parents)
        return next((each for each in folders if each in self.packages or each in SUBJECTS_OF_ALL), "")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a run takes of the test files with tests marked `ci`.

    Attributes:
      chosen: the files to run.
      cut: files that are reached, for which the run has no time.
      num_unreached: of files that nothing reaches that changed.
    """

    chosen: tuple[str, ...]
    cut: tuple[str, ...]
    num_unreached: int

    def lines(self) -> list[str]:
        """Return what a run prints of it."""
        counts = f"{len(self.chosen)} files run, {self.num_unreached} files are reached by no change"
        if not self.cut:
            return [counts]
        missing = f"{len(self.cut)} more than {CI_MINUTES} minutes hold; `make test-long` runs them:"
        return [f"{counts}, {missing}", *sorted(self.cut)]


def select(
    files: Collection[str], changed: Set[str] | None, tree: Tree, seconds: Mapping[str, float]
) -> Selection:
    """Select test files.

    Args:
      files: all that have tests marked `ci`.
      changed: paths that differ from the base; None where that is not known, which reaches everything.
      tree: what imports what.
      seconds: what the `ci` tests of a file take, one after the other.
    """
    near, far = reached(files, changed, tree)
    chosen, cut = list[str](), list[str]()
    remaining = 60.0 * CI_MINUTES * CI_PROCESSES
    for file in (*fixed_order(near, tree, seconds), *fixed_order(far, tree, seconds)):
        needed = seconds.get(file, UNKNOWN_SECONDS)
        (chosen if needed <= remaining else cut).append(file)
        remaining -= needed if needed <= remaining else 0
    return Selection(chosen=tuple(chosen), cut=tuple(cut), num_unreached=len(files) - len(near) - len(far))


def reached(files: Collection[str], changed: Set[str] | None, tree: Tree) -> tuple[set[str], set[str]]:
    """Return the test files that changed or whose package did, and those that imports reach."""
    if changed is None or any(_reaches_everything(path, tree) for path in changed):
        return set(files), set()
    own_tests = {path for path in changed if _is_below_tests(path)}
    packages = {tree.subject(path) for path in changed - own_tests} - {""}
    folders = {_folder_of_tests(path, tree) for path in own_tests if not _is_test_file(path)}
    near = {
        file
        for file in files
        if file in own_tests
        or folders & _parents(file)
        or any(tree.subject(file) in {package, *_parents(package)} for package in packages)
    }
    affected = packages_importing(packages & tree.packages, tree)
    test_files = importers(own_tests, tree.imports)
    far = {file for file in files if tree.subject(file) in affected or file in test_files}
    return near, far - near


def _reaches_everything(path: str, tree: Tree) -> bool:
    """Return whether a path outside the tests is in no package."""
    is_page = "/" not in path and path.endswith(".md")
    return not (is_page or path in WITHOUT_TESTS or _is_below_tests(path) or tree.subject(path))


def _folder_of_tests(helper: str, tree: Tree) -> str:
    """Return the nearest folder above a helper or its data that has test files, in itself or below."""
    with_tests = {folder for file in tree.imports if _is_test_file(file) for folder in _parents(file)}
    return next(str(folder) for folder in PurePosixPath(helper).parents if str(folder) in {*with_tests, "."})


def _is_below_tests(path: str) -> bool:
    return path.startswith("tests/")


def _is_test_file(path: str) -> bool:
    return PurePosixPath(path).match("test_*.py")


def _parents(path: str) -> set[str]:
    return set(map(str, PurePosixPath(path).parents))


def packages_importing(packages: Set[str], tree: Tree) -> set[str]:
    """Return the packages that import one of `packages`, directly or not, and what may use all of them."""
    if not packages:
        return set()
    source = {file: imported for file, imported in tree.imports.items() if not _is_below_tests(file)}
    start = {file for file in source if tree.subject(file) in packages}
    return {tree.subject(file) for file in importers(start, source)} | packages | set(SUBJECTS_OF_ALL)


def importers(changed: Iterable[str], imports: Mapping[str, Set[str]]) -> set[str]:
    """Return what changed, and all that import it, directly or not.

    >>> sorted(importers({"a"}, {"b": {"a"}, "c": {"b"}, "d": set()}))
    ['a', 'b', 'c']
    """
    known = set(changed)
    while new := {name for name, imported in imports.items() if name not in known and imported & known}:
        known |= new
    return known


def fixed_order(files: Collection[str], tree: Tree, seconds: Mapping[str, float]) -> list[str]:
    """Return the files in turns, of each package one, and of a package the shortest first."""

    def size(file: str) -> tuple[float, str]:
        return seconds.get(file, UNKNOWN_SECONDS), file

    return in_turns(sorted(files, key=size), tree.subject)


def in_turns(items: Sequence[Item], group: Callable[[Item], str]) -> list[Item]:
    """Return the first item of each group, groups by name, then the second of each, and so on.

    >>> in_turns(["a1", "a2", "b1", "a3", "b2"], lambda item: item[0])
    ['a1', 'b1', 'a2', 'b2', 'a3']
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    rounds = zip_longest(*(groups[name] for name in sorted(groups)))
    return [item for turn in rounds for item in turn if item is not None]


def changed_breakages(breakages: Sequence[Breakage], changed: Set[str] | None) -> list[Breakage]:
    """Return the breakages whose file or tests changed: `NUM_BREAKAGES` at most, in turns over the files."""
    fit = [
        each
        for each in breakages
        if changed is None or changed & {each.file, *(test.split("::")[0] for test in each.tests)}
    ]
    return in_turns(fit, lambda each: each.file)[:NUM_BREAKAGES]


def changed_paths(root: Path = ROOT) -> frozenset[str] | None:
    """Return the paths that differ between the working tree and the commit in `.ci/base`, removed ones too.

    None where that cannot be known: the commit is no ancestor, or the clone has no history that holds it.
    """
    base = (root / ".ci" / "base").read_text(encoding="utf-8").strip()
    try:
        _git(root, "merge-base", "--is-ancestor", base, "HEAD")
        listed = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
        listed += _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(filter(None, listed.split("\0")))


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def read_tree(root: Path = ROOT) -> Tree:
    """Return what imports what, imports inside functions and for types alone included."""
    graph = grimp.build_graph(*PACKAGES, "tests", cache_dir=None)

    def file_of(module: str) -> str:
        path = module.replace(".", "/")
        return f"{path}/__init__.py" if (root / path).is_dir() else f"{path}.py"

    imports = {
        file_of(module): {file_of(name) for name in graph.find_modules_directly_imported_by(module)}
        for module in graph.modules
    }
    folders = {str(PurePosixPath(file).parent) for file in imports}
    return Tree(packages={each for each in folders if each.split("/")[0] in PACKAGES}, imports=imports)


def read_seconds(path: Path = SECONDS) -> dict[str, float]:
    """Return the committed table: what the tests marked `ci` of each file take."""
    table: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["seconds"]
    return table


def write_seconds(measured: Mapping[str, float], path: Path = SECONDS, root: Path = ROOT) -> None:
    """Put what was measured in place of the table's entries, and drop the files that are gone."""
    table = {file: read_seconds(path)[file] for file in read_seconds(path) if (root / file).is_file()}
    table |= {file: round(seconds, 1) for file, seconds in measured.items()}
    text = {"origin": "measured: --write-seconds", "seconds": dict(sorted(table.items()))}
    path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
