"""Help where there is no terminal: no line of any command is longer than 100 columns."""

from __future__ import annotations

import importlib
import io
import runpy
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *(
        "benchmarks.audit",
        "dpgcl_core.ledger",
        "dpgcl_core.calculator",
        "trainers.caption",
        "trainers.classify",
    ),
    *("trainers.export", "trainers.embed", "benchmarks.audit.training_step", "dashboards"),
    *("sweeps.doctor", "sweeps.settle"),
)
SCRIPTS = tuple(sorted(path.name for path in (ROOT / "sweeps").glob("*.py") if path.name != "__init__.py"))


def longest(monkeypatch: pytest.MonkeyPatch, run: str, name: str) -> int:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        if run == "module" and hasattr(module := importlib.import_module(name), "main"):
            module.main()
        elif run == "module":
            runpy.run_module(name, run_name="__main__")
        else:
            runpy.run_path(str(ROOT / "sweeps" / name), run_name="__main__")
    assert "--help" in said.getvalue()
    return max(map(len, said.getvalue().splitlines()))


@pytest.mark.parametrize("name", MODULES)
def test_help_of_a_command_keeps_to_100_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest(monkeypatch, "module", name) <= 100


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_a_sweep_keeps_to_100_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest(monkeypatch, "script", name) <= 100
