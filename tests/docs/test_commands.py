"""Every command on a page is one that its program understands: options are parsed, nothing is trained."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dpgcl_core.errors import DpgclError, StorageError
from sweeps.service.running import planner, strategies, strategy_bank, two_stage_policy
from sweeps.service.running.sweep import Outcome
from tests.docs.commands import ROOT, Command, commands

OUTSIDE = {"mkdocs", "pytest", "venv", "pip", "http.server"}
"""Modules that pages run and that are not this project's."""

COMMANDS = [command for command in commands() if command.program not in OUTSIDE]
SWEEPS = [command for command in COMMANDS if command.program.startswith("sweeps/")]
OTHERS = [command for command in COMMANDS if not command.program.startswith("sweeps/")]


class _Understood(Exception):  # noqa: N818 (an answer, not a fault)
    """A sweep got as far as its plan."""


def _stop(*_: Any, **__: Any) -> Outcome:
    raise _Understood


def _parse(monkeypatch: pytest.MonkeyPatch, program: str, arguments: tuple[str, ...]) -> None:
    """Runs a sweep's own `main` up to the plan; what it does not understand raises."""
    name = program.removesuffix(".py").replace("/", ".")
    path = list(sys.path)
    sweep: ModuleType = importlib.import_module(name)
    sys.path[:] = path  # a sweep puts its own copy of the code first
    for module, run in ((strategies, "run_with_strategy"), (two_stage_policy, "run_tuned_sweep")):
        monkeypatch.setattr(module, run, _stop)
    monkeypatch.setattr(strategy_bank.StrategyBank, "run", _stop)
    monkeypatch.setattr(planner, "run_plan", _stop)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(_Understood):
        sweep.main()


def _without_help_and_files(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments without those that end in a help text, or name a configuration of the reader's own."""
    kept = [each for each in arguments if each not in ("--help", "--help-all")]
    if "--config" in kept:
        at = kept.index("--config")
        del kept[at : at + 2]
    return tuple(kept)


def test_pages_show_commands() -> None:
    """The search for commands finds them: each sweep and each module of the command line at least once."""
    shown = {command.program for command in COMMANDS}
    for sweep in sorted((ROOT / "sweeps").glob("[a-z]*.py")):
        assert f"sweeps/{sweep.name}" in shown or f"`{sweep.name}`" in (ROOT / "docs/sweeps.md").read_text()
    assert {"dpgcl_core.ledger", "benchmarks.audit", "dpgcl_core.calculator", "trainers.export"} <= shown
    assert len(SWEEPS) > 30


@pytest.mark.parametrize("command", SWEEPS, ids=str)
def test_sweep_understands(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sweep parses the options and makes its points."""
    monkeypatch.delenv("DPGCL_LEDGER", raising=False)
    monkeypatch.setenv("DPGCL_STORAGE", str(tmp_path))
    is_resumed = "--resume" in command.arguments
    with pytest.raises(StorageError, match="nothing to resume") if is_resumed else contextlib.nullcontext():
        _parse(monkeypatch, command.program, _without_help_and_files(command.arguments))


def test_sweep_refuses_what_no_page_may_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt option does not pass as understood."""
    with pytest.raises(DpgclError, match="epsilon"):
        _parse(monkeypatch, "sweeps/group_size.py", ("--epsilom", "2"))


@cache
def _help(program: str, subcommand: str | None) -> str:
    """The help text of a module or a script, of one subcommand where it has any."""
    said, argv = io.StringIO(), sys.argv
    sys.argv = [program, *([subcommand] if subcommand else []), "--help"]
    path = list(sys.path)
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        sys.argv, sys.path[:] = argv, path
    return said.getvalue()


def _unknown(command: Command) -> list[str]:
    """The command's options and subcommand that its help text does not name."""
    first = command.arguments[0] if command.arguments else None
    subcommand = first if first and re.fullmatch(r"[a-z][a-z-]*", first) else None
    if subcommand and subcommand not in _help(command.program, None):
        return [subcommand]
    text = _help(command.program, subcommand)
    options = [word.split("=")[0] for word in command.arguments if word.startswith("--")]
    return [each for each in options if not re.search(rf"{re.escape(each)}(?![\w-])", text)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # modules that are imported already are run again
@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_help_names_every_option(command: Command) -> None:
    """Modules and benchmarks: each option that a page gives stands in the help text."""
    assert _unknown(command) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_unknown_options_are_found() -> None:
    """An option that a program has not, and a subcommand that it has not, are told."""
    assert _unknown(Command("page", "benchmarks.audit", ("--run", "3"))) == ["--run"]
    assert _unknown(Command("page", "dpgcl_core.ledger", ("shows",))) == ["shows"]


def test_sweeps_have_config_and_help_all() -> None:
    """The two options that the pages name of every sweep are there."""
    text = _help("sweeps/group_size.py", None)
    assert "--config" in text
    assert "--help-all" in text


def test_storage_folder_of_the_pages_is_the_default() -> None:
    """No page tells of the folder that was the default once."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        assert "sqlite:///results/" not in page.read_text(), page.name
        assert Path("results/mlflow.db").as_posix() not in page.read_text().replace("dpgcl-results", "")
