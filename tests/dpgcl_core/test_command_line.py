"""Command lines from typed functions and dataclasses: what is read, and one line for what cannot be."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpgcl_core.command_line import Command, run_command
from dpgcl_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown."""

    num_steps: int
    """How many."""
    sizes: tuple[int, ...] = (2, 4)
    """Each of them."""
    json: bool = False
    """Print one object."""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {self.num_steps}")


def shown(*, num_steps: int, json: bool = False) -> tuple[int, bool]:
    """Return the options.

    Args:
      num_steps: how many.
      json: print one object.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps must be at least 1; got {num_steps}")
    return num_steps, json


def test_function_is_called_with_its_options() -> None:
    assert run_command(shown, prog="shown", arguments=["--num-steps", "3", "--json"]) == (3, True)


def test_subcommand_is_called_by_name() -> None:
    commands = {"one": shown, "other": lambda: None}
    assert run_command(commands, prog="shown", arguments=["one", "--num-steps", "3"]) == (3, False)


def test_dataclass_is_returned_with_its_defaults() -> None:
    found = run_command(Shown, prog="shown", arguments=["--num-steps=3", "--sizes", "8", "16"])
    assert found == Shown(num_steps=3, sizes=(8, 16))


@pytest.mark.parametrize("command", [shown, Shown])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-stesp", "3"], "unknown option '--num-stesp'; did you mean '--num-steps'"),
        (["--num-steps", "many"], "^--num-steps must be a whole number; got 'many'$"),
        (["--num-steps", "0"], "^num_steps must be at least 1; got 0$"),
        (["--json"], "--num-steps"),
    ],
)
def test_bad_input_is_refused_in_one_line(command: Command, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run_command(command, prog="shown", arguments=arguments)
    assert "\n" not in str(caught.value)


def test_address_where_a_path_is_needed_is_refused_and_no_folder_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*, to: Path = Path("here")) -> Path:
        to.mkdir()
        return to

    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^--to must be a path on this machine; got the address s3:.*aws s3 cp"
    ):
        run_command(written, prog="written", arguments=["--to", "s3://bucket/x"])
    assert list(tmp_path.iterdir()) == []
    assert run_command(written, prog="written", arguments=["--to", "a:b"]).is_dir()


def test_help_names_every_option_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run_command(Shown, prog="shown", arguments=["--help"])
    assert not stop.value.code
    out = capsys.readouterr().out
    for text in ("--num-steps", "--sizes", "--json", "How many", "Each of them"):
        assert text in out


def test_help_keeps_to_100_columns_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit):
        run_command({"shown": Shown}, prog="shown", description="many words " * 50, arguments=["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("many words" in line for line in lines) > 5


@pytest.mark.parametrize("module", ["benchmarks.audit", "dpgcl_core.calculator", "dpgcl_core.ledger"])
def test_module_is_a_program(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    assert f"usage: python -m {module}" in capsys.readouterr().out
