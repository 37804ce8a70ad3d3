"""The deliberate breakages fit the code and the tests as they are; `make mutants` runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.breakages import BREAKAGES, Breakage

ROOT = Path(__file__).resolve().parents[2]
_EACH = pytest.mark.parametrize("breakage", BREAKAGES, ids=[each.name for each in BREAKAGES])


@_EACH
def test_breakage_fits_the_code(breakage: Breakage) -> None:
    source = (ROOT / breakage.file).read_text(encoding="utf-8")
    assert source.count(breakage.before) == 1
    broken = source.replace(breakage.before, breakage.after)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


@_EACH
def test_tests_that_must_fail_exist(breakage: Breakage) -> None:
    assert breakage.tests
    for test in breakage.tests:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


def test_names_differ() -> None:
    assert len({each.name for each in BREAKAGES}) == len(BREAKAGES) >= 30
