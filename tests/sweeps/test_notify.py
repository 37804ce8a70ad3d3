"""What `--notify` runs is told how a sweep ended, by its environment alone, and changes nothing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from dpgcl_core.errors import BudgetExceeded, ConfigError
from sweeps.service.options.service import ServiceOptions
from sweeps.service.running import sweep as service
from sweeps.service.running.notify import notify
from tests.sweeps.support import contents, run_script, train_here


@pytest.fixture
def listener(tmp_path: Path) -> tuple[str, Path]:
    """A command that writes its arguments and its own variables down, and the file."""
    script, heard = tmp_path / "listen.py", tmp_path / "heard.json"
    script.write_text(
        "import json, os, sys\n"
        f"with open({str(heard)!r}, 'a') as file:\n"
        "    told = {k: v for k, v in os.environ.items() if k.startswith('DPGCL_')}\n"
        "    file.write(json.dumps([sys.argv[1:], told]) + '\\n')\n"
    )
    return f"{sys.executable} {script}", heard


def heard_in(file: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.is_file() else []


def sweep(monkeypatch: pytest.MonkeyPatch, top: Path, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setenv("HOME", str(top))
    train_here(monkeypatch)
    given = ("--tiny", "--num-steps", "2", "--noise-multiplier", "1", "--no-references")
    return run_script("group_size", *given, "--storage", str(top / "storage"), "--name", "one", *arguments)


def test_no_shell_reads_the_command_or_what_is_told(listener: tuple[str, Path], tmp_path: Path) -> None:
    command, file = listener
    trap = f"; touch {tmp_path / 'trap'}; $(touch {tmp_path / 'trap'}) `touch {tmp_path / 'trap'}`"
    notify(f"{command} '{trap}' $HOME", "finished", trap, tmp_path, {"ANSWER": trap})
    ((arguments, told),) = heard_in(file)
    assert arguments == [trap, "$HOME"]
    assert (told["DPGCL_SWEEP"], told["DPGCL_ANSWER"]) == (trap, trap)
    assert "trap" not in contents(tmp_path)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{sys.executable} -c 'import sys; sys.exit(3)'", "ended with code 3"),
        ("/there/is/no/such/program --token=secret", "could not be run (No such file or directory)"),
    ],
)
def test_command_that_fails_is_told_in_one_line(
    command: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notify(command, "finished", "one", tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line
    assert "secret" not in line


@pytest.mark.parametrize("command", ["", "  ", "mail 'never closed"])
def test_command_that_is_none_is_refused_before_the_sweep(command: str) -> None:
    with pytest.raises(ConfigError, match="notify must be a program with its arguments"):
        ServiceOptions(notify=command)


def test_address_with_a_password_is_masked_in_what_is_told(
    listener: tuple[str, Path], tmp_path: Path
) -> None:
    command, file = listener
    notify(command, "refused", "one", tmp_path, {"REASON": "postgresql://me:hunter2@host/db is gone"})
    assert "hunter2" not in file.read_text()


@pytest.mark.ci
def test_open_sweep_tells_outcome_answer_and_place(
    listener: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, file = listener
    code, out, _ = sweep(monkeypatch, tmp_path, "--notify", command)
    ((_, told),) = heard_in(file)
    assert code == 0, out
    assert told["DPGCL_OUTCOME"] == "finished"
    assert told["DPGCL_EXIT_CODE"] == "0"
    assert told["DPGCL_TRIALS"] == "2 of 2"
    assert told["DPGCL_SWEEP"] == "one"
    assert Path(told["DPGCL_FOLDER"]) == tmp_path / "storage/sweeps/one"
    assert f"answer: {told['DPGCL_ANSWER']}" in out


@pytest.mark.ci
def test_sweep_that_is_refused_after_its_start_tells_why(
    listener: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BudgetExceeded("the cap does not hold it")

    monkeypatch.setattr(service.OpenSweep, "_charge", refuse)
    command, file = listener
    code, _, err = sweep(monkeypatch, tmp_path, "--notify", command)
    ((_, told),) = heard_in(file)
    assert (code, told["DPGCL_OUTCOME"], told["DPGCL_EXIT_CODE"]) == (2, "refused", "2")
    assert told["DPGCL_REASON"] in err


@pytest.mark.ci
def test_dry_run_tells_nobody(
    listener: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, file = listener
    code, _, _ = sweep(monkeypatch, tmp_path, "--notify", command, "--dry-run")
    assert (code, heard_in(file)) == (0, [])


@pytest.mark.ci
def test_sealed_sweep_tells_at_its_moment_and_only_what_is_published(
    listener: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, file = listener
    quiet = {name for name in os.environ if name.startswith("DPGCL_")}
    events: list[str] = []
    release = tmp_path / "storage/sweeps/one/release/result.json"
    tell = service.notify

    def noted(*arguments: object) -> None:
        events.append(f"told, published: {release.is_file()}")
        tell(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(service, "notify", noted)
    monkeypatch.setattr(service.SystemClock, "sleep_until", lambda *_: events.append("the moment"))
    sealed = ("--release", "sealed", "--mean-trials", "1.5", "--publish-after", "6000", "--notify", command)
    code, out, err = sweep(monkeypatch, tmp_path, *sealed)
    assert (code, events) == (0, ["the moment", "told, published: True"]), out + err
    ((_, told),) = heard_in(file)
    assert told.keys() - quiet == {"DPGCL_OUTCOME", "DPGCL_SWEEP", "DPGCL_FOLDER"}
    assert told["DPGCL_OUTCOME"] == "published"
    assert Path(told["DPGCL_FOLDER"]) == release.parent
