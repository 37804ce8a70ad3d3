"""The recorded command lines do what they did: exit codes, plans, statements, tables, printed lines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.recorded.cases import CASES, Case
from tests.recorded.running import differences, expected, record

# One command of a case that takes long may take minutes beside other work.
pytestmark = pytest.mark.timeout(1800)
_PARAMETERS = [
    pytest.param(case, id=case.name, marks=[getattr(pytest.mark, case.marker)] if case.marker else [])
    for case in CASES
]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a case does now; each is run once."""

    @cache
    def run(case: Case) -> dict[str, Any]:
        return record(case, Path(tmp_path_factory.mktemp(case.name)).resolve())

    return run


@pytest.mark.ci
@pytest.mark.parametrize("case", _PARAMETERS)
@pytest.mark.parametrize("aspect", ["exit_code", "plan", "printed", "errors"])
def test_command_does_what_it_did(case: Case, aspect: str, recorded: Any) -> None:
    before, now = (
        [{"command": each["command"], aspect: each[aspect]} for each in found["commands"]]
        for found in (expected(case), recorded(case))
    )
    assert list(differences(before, now)) == []


@pytest.mark.parametrize("case", _PARAMETERS)
@pytest.mark.parametrize("aspect", ["statements", "models", "tables", "tracked"])
def test_command_writes_what_it_wrote(case: Case, aspect: str, recorded: Any) -> None:
    assert list(differences(expected(case)[aspect], recorded(case)[aspect])) == []
