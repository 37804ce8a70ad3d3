"""What `.ci/run` selects: the same for the same tree and base, what changed first, the rest by name."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from tests.mutants.breakages import Breakage
from tests.selection import (
    CI_MINUTES,
    CI_PROCESSES,
    NUM_BREAKAGES,
    ROOT,
    UNKNOWN_SECONDS,
    Tree,
    changed_breakages,
    changed_paths,
    in_turns,
    reached,
    read_seconds,
    read_tree,
    select,
    write_seconds,
)

TREE = Tree(
    packages={"dpgcl_core", "dpgcl_core/ledger", "trainers", "trainers/files", "sweeps"},
    imports={
        "dpgcl_core/__init__.py": set(),
        "dpgcl_core/ledger/store.py": set(),
        "dpgcl_core/ledger/report.py": set(),
        "trainers/files/journal.py": {"dpgcl_core/ledger/store.py"},
        "trainers/loop.py": {"trainers/files/journal.py"},
        "sweeps/group_size.py": {"dpgcl_core/__init__.py"},
        "tests/helper.py": set(),
        "tests/recorded/test_e.py": set(),
        "tests/trainers/test_c.py": set(),
        "tests/trainers/crash.py": set(),
        "tests/sweeps/test_run.py": {"tests/trainers/crash.py", "dpgcl_core/ledger/store.py"},
    },
)
LEDGER, FILES, LOOP = (
    "tests/dpgcl_core/ledger/test_a.py",
    "tests/trainers/files/test_b.py",
    "tests/trainers/test_c.py",
)
RUN, EXAMPLES, RECORDED = "tests/sweeps/test_run.py", "tests/examples/test_d.py", "tests/recorded/test_e.py"
ALL = {LEDGER, FILES, LOOP, RUN, EXAMPLES, RECORDED}
BUDGET = 60 * CI_MINUTES * CI_PROCESSES


def test_change_reaches_its_own_package_then_what_imports_it_and_what_may_use_all() -> None:
    near, far = reached(ALL, {"dpgcl_core/ledger/report.py"}, TREE)
    assert near == {LEDGER}
    assert far == {FILES, LOOP, EXAMPLES, RECORDED}  # by another file of the package, and not the sweeps


def test_tests_of_a_parent_folder_are_about_its_sub_packages_too() -> None:
    assert reached(ALL, {"trainers/files/journal.py"}, TREE)[0] == {FILES, LOOP}


def test_file_of_data_and_a_removed_file_are_of_their_package() -> None:
    for path in ("trainers/files/table.json", "trainers/files/gone.py"):
        assert FILES in reached(ALL, {path}, TREE)[0]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (LOOP, {LOOP}),
        ("tests/trainers/conftest.py", {FILES, LOOP}),
        ("tests/trainers/crash.py", {FILES, LOOP, RUN}),
        ("tests/recorded/expected/plan.txt", {RECORDED}),
        ("examples/custom_loop.py", {EXAMPLES}),
        ("docs/index.md", set()),
        ("README.md", set()),
        (".ci/base", set()),
        (".ci/seconds.json", set()),
    ],
)
def test_change_beside_the_source_reaches(path: str, expected: set[str]) -> None:
    near, far = reached(ALL, {path}, TREE)
    assert near | far == expected


@pytest.mark.parametrize(
    "path",
    [
        "tests/conftest.py",
        "tests/helper.py",
        "tests/support/clusters.py",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        ".ci/run",
        "clusters/anything.yaml",
    ],
)
def test_change_of_what_all_tests_use_reaches_everything(path: str) -> None:
    assert reached(ALL, {path}, TREE)[0] == ALL


def test_unknown_change_reaches_everything() -> None:
    assert reached(ALL, None, TREE)[0] == ALL


def test_no_change_selects_nothing() -> None:
    assert select(ALL, set(), TREE, {}).chosen == ()


def test_selection_fits_the_time_and_names_the_rest() -> None:
    seconds = dict.fromkeys(ALL, BUDGET / 4)
    selection = select(ALL, None, TREE, seconds)
    assert (len(selection.chosen), len(selection.cut)) == (4, 2)
    assert {*selection.chosen, *selection.cut} == ALL
    assert selection.lines()[1:] == sorted(selection.cut)


def test_own_package_comes_before_what_imports_it_however_long() -> None:
    seconds = dict.fromkeys(ALL, 1.0) | {LEDGER: BUDGET}
    selection = select(ALL, {"dpgcl_core/ledger/store.py"}, TREE, seconds)
    assert selection.chosen == (LEDGER,)


def test_file_that_does_not_fit_leaves_room_for_others() -> None:
    selection = select({LEDGER, FILES}, None, TREE, {LEDGER: BUDGET + 1, FILES: 1.0})
    assert (selection.chosen, selection.cut) == ((FILES,), (LEDGER,))


def test_file_without_seconds_takes_some() -> None:
    many = {f"tests/sweeps/test_{number}.py" for number in range(1000)}
    assert len(select(many, None, TREE, {}).chosen) == BUDGET // UNKNOWN_SECONDS


def test_selection_does_not_depend_on_the_order_of_the_files() -> None:
    files, seconds = sorted(ALL), dict.fromkeys(ALL, BUDGET / 3)
    expected = select(files, None, TREE, seconds)
    for seed in range(20):
        assert select(random.Random(seed).sample(files, len(files)), None, TREE, seconds) == expected


def test_order_takes_turns_over_the_packages() -> None:
    files = [f"tests/sweeps/test_{number}.py" for number in range(3)] + [FILES, LEDGER]
    seconds = dict.fromkeys(files, 9.0) | {files[2]: 1.0}
    assert select(files, None, TREE, seconds).chosen == (LEDGER, files[2], FILES, files[0], files[1])


def _breakage(name: str, file: str, test: str = "tests/x/test_x.py::test") -> Breakage:
    return Breakage(name=name, file=file, before="", after="", tests=(test,))


def test_breakages_are_those_whose_file_or_tests_changed() -> None:
    breakages = [_breakage("a", "a.py"), _breakage("b", "b.py", f"{RUN}::test"), _breakage("c", "c.py")]
    assert [each.name for each in changed_breakages(breakages, {"a.py", RUN})] == ["a", "b"]
    assert changed_breakages(breakages, None) == breakages


def test_breakages_are_cut_in_turns_over_the_files() -> None:
    breakages = [_breakage(f"{file}{number}", file) for file in ("b", "a") for number in range(NUM_BREAKAGES)]
    chosen = changed_breakages(breakages, None)
    assert [each.name for each in chosen[:4]] == ["a0", "b0", "a1", "b1"]
    assert len(chosen) == NUM_BREAKAGES
    assert in_turns(breakages, lambda each: each.file)[:NUM_BREAKAGES] == chosen


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of two commits, the first of which is its base."""
    root = tmp_path / "clone"
    (root / ".ci").mkdir(parents=True)
    _git(root, "init", "-q")
    (root / "kept.py").write_text("1\n")
    (root / "moved.py").write_text("2\n")
    _commit(root)
    (root / ".ci" / "base").write_text(_git(root, "rev-parse", "HEAD"))
    (root / "moved.py").rename(root / "new.py")
    _commit(root)
    return root


def _git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def _commit(root: Path) -> None:
    _git(root, "add", ".")
    _git(root, "commit", "-q", "-m", "a step")


def test_changed_paths_are_committed_uncommitted_untracked_and_removed_ones(clone: Path) -> None:
    assert changed_paths(clone) == {".ci/base", "moved.py", "new.py"}
    (clone / "kept.py").write_text("3\n")
    (clone / "a name.py").write_text("4\n")
    assert changed_paths(clone) == {".ci/base", "moved.py", "new.py", "kept.py", "a name.py"}


def test_base_that_is_no_ancestor_is_unknown(clone: Path) -> None:
    head = _git(clone, "rev-parse", "HEAD")
    _git(clone, "checkout", "-q", "HEAD~1")
    (clone / ".ci").mkdir(exist_ok=True)
    (clone / ".ci" / "base").write_text(head)
    assert changed_paths(clone) is None


def test_base_outside_a_shallow_history_is_unknown(clone: Path, tmp_path: Path) -> None:
    _git(tmp_path, "clone", "-q", "--depth", "1", clone.as_uri(), "shallow")
    assert changed_paths(tmp_path / "shallow") is None


def test_tree_has_imports_inside_functions_and_all_packages() -> None:
    tree = read_tree()
    assert {"dpgcl_core/ledger", "sweeps/service/running", "trainers/export", "dashboards"} <= tree.packages
    assert "dpgcl_core/noise/chacha20.py" in tree.imports
    assert "tests/selection.py" in tree.imports["tests/test_selection.py"]
    for file in tree.imports:
        assert (ROOT / file).is_file()


def test_written_seconds_replace_what_ran_and_drop_what_is_gone(tmp_path: Path) -> None:
    table = tmp_path / "seconds.json"
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).touch()
    old = {"test_a.py": 1.0, "test_b.py": 2.0, "test_gone.py": 3.0}
    table.write_text(json.dumps({"origin": "", "seconds": old}))
    write_seconds({"test_b.py": 4.04}, table, tmp_path)
    assert read_seconds(table) == {"test_a.py": 1.0, "test_b.py": 4.0}


def test_make_runs_as_many_processes_as_the_time_is_divided_by() -> None:
    assert f"CI_PROCESSES := -n {CI_PROCESSES}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
