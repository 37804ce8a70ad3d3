"""The sampler of small mistakes: which it makes, where it finds them again, and what it leaves alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import mutation_sampling
from benchmarks.mutation_sampling import Found, Mutant, find, mutants_of

SOURCE = '''"""A module."""
LIMIT = 3


def share(count: int, of: int = 2) -> float:
    """Return a share."""
    if not count < LIMIT:
        raise ValueError(f"at most {LIMIT + 1}")
    for each in (1,):
        if each == of:
            continue
        if each:
            return each
    return min(count, 5) / of
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutation_sampling, "ROOT", tmp_path)
    (tmp_path / "dpgcl_core").mkdir()
    (tmp_path / "dpgcl_core" / "shares.py").write_text(SOURCE)
    return tmp_path


def found_in(root: Path) -> list[Found]:
    return list(mutants_of(root / "dpgcl_core" / "shares.py", "area"))


def test_mutants_are_the_small_mistakes_of_functions(root: Path) -> None:
    changes = {(each.mutant.before, each.mutant.after) for each in found_in(root)}
    assert changes == {
        ("not count < LIMIT", "(count < LIMIT)"),
        ("count < LIMIT", "(count <= LIMIT)"),
        ("raise ValueError(f'at most {LIMIT + 1}')", "pass"),
        ("1", "2"),
        ("each == of", "(each != of)"),
        ("continue", "pass"),
        ("return each", "pass"),
        ("min(count, 5) / of", "(min(count, 5) * of)"),
        ("min(count, 5)", "(max(count, 5))"),
        ("5", "6"),
    }


def test_applied_mutant_changes_its_place_alone(root: Path) -> None:
    for each in found_in(root):
        broken = each.applied(SOURCE.encode()).decode()
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(SOURCE))
        unchanged = sum(a == b for a, b in zip(SOURCE.splitlines(), broken.splitlines(), strict=True))
        assert unchanged == len(SOURCE.splitlines()) - 1


def test_mutant_is_found_again_in_another_file_and_on_another_line(root: Path) -> None:
    before = found_in(root)
    moved = root / "dpgcl_core" / "package" / "share.py"
    moved.parent.mkdir()
    moved.write_text(SOURCE.replace("LIMIT = 3\n", "LIMIT = 3\nOTHER = 4\n").replace("a share", "one"))
    (root / "dpgcl_core" / "shares.py").unlink()
    for each in before:
        again = find(each.mutant)
        assert again is not None
        assert again.mutant.file == "dpgcl_core/package/share.py"
        assert again.first_line == each.first_line + 1


def test_mutant_is_found_again_where_a_variable_has_another_name(root: Path) -> None:
    before = found_in(root)
    renamed = SOURCE.replace("count", "number")
    (root / "dpgcl_core" / "shares.py").write_text(renamed)
    for each in before:
        again = find(each.mutant)
        assert again is not None
        assert again.begin == each.begin or "number" in renamed.splitlines()[again.begin[0] - 1]


def test_mutant_of_code_that_is_gone_is_not_found(root: Path) -> None:
    gone = Mutant(
        area="area", file="none.py", function="share", statement="x", before="x", after="y", occurrence=0
    )
    assert find(gone) is None


def test_sample_is_the_same_for_a_seed_and_alike_for_every_area(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    areas = {name: ("dpgcl_core/shares.py",) for name in ("one", "two")}
    monkeypatch.setattr(mutation_sampling, "AREAS", areas)
    drawn = mutation_sampling.sample(6, seed=1)
    assert drawn == mutation_sampling.sample(6, seed=1)
    assert [each.area for each in drawn] == ["one", "two"] * 3
