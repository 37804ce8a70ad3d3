"""`python -m dpgcl_core.methods`: the table of all methods."""

from __future__ import annotations

import pytest

from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.methods.__main__ import main


def test_table_has_every_method_and_keeps_to_100_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(" ")[0] for line in lines} >= METHODS.keys()
    assert max(map(len, lines)) <= 100
