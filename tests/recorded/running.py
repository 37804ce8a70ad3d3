"""Runs a case in an empty folder and keeps of what it did all that depends on no chance, time or place."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.programs import run_program
from tests.recorded.cases import Case, Command

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("expected")
RELATIVE_TOLERANCE = 1e-8  # of floating-point functions of other processors, and of what tests make at once

_OWN = ("DPGCL_STORAGE", "DPGCL_LEDGER", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
_SCORE = re.compile(r"((?:accuracy|recall_at_\d+|snr\w*)(?:,|:)? )[-+.\de]+")
_RANDOM_COLUMN = re.compile(r"(accuracy|recall|snr|_seconds).*_(mean|standard_error|share)$")
_POINT = re.compile(r"  (\S+)\s+σ = (\S+)\s+ε of one trial = (\S+)\s+(\S+)$")
_LEFT_OUT_KEYS = {"versions", "sha256", "head_hash", "ledger_id"}


def record(case: Case, folder: Path) -> dict[str, Any]:
    """Run all commands of a case and return what is recorded of them.

    Args:
      case: the case.
      folder: an empty folder, which the case fills.

    Returns:
      `commands` (exit code, plan, lines), `statements`, `models`, `tables` and `tracked`.
    """
    case.prepare(folder)
    return {
        "commands": [_run(command, folder) for command in case.commands],
        "statements": {
            _place(path, folder): _json(path, folder) for path in _found(folder, "*statement.json")
        },
        "models": {_place(path, folder): _json(path, folder) for path in _found(folder, "model.json")},
        "tables": {_place(path, folder): _table(path) for path in _found(folder, "*.csv")},
        "tracked": [_tracked(path) for path in _found(folder, "mlflow.db")],
    }


def expected(case: Case) -> dict[str, Any]:
    """Return what was recorded of a case."""
    found: dict[str, Any] = json.loads((EXPECTED / f"{case.name}.json").read_text())
    return found


def write(case: Case, folder: Path) -> None:
    """Record a case anew."""
    text = json.dumps(record(case, folder), indent=1, ensure_ascii=False)
    (EXPECTED / f"{case.name}.json").write_text(text + "\n")


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield every difference of two records, with its place.

    >>> list(differences({"a": [1.0, "x"]}, {"a": [1.0 + 1e-12, "y"]}))
    ["/a/1: 'x' before, 'y' now"]
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key, "(nothing)"), now.get(key, "(nothing)"), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{place}/{number}")
    elif isinstance(before, float) and isinstance(now, float):
        if not math.isclose(before, now, rel_tol=RELATIVE_TOLERANCE):
            yield f"{place}: {before!r} before, {now!r} now"
    elif before != now:
        yield f"{place}: {before!r} before, {now!r} now"


def _run(command: Command, folder: Path) -> dict[str, Any]:
    words = [word.replace("{folder}", str(folder)) for word in command]
    if words[0] != "-m":
        words[0] = str(ROOT / words[0])
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    environment |= {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    environment |= {"DPGCL_STORAGE": str(folder / "storage"), "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = run_program(words, cwd=folder, environment=environment, timeout_seconds=1500)
    lines = done.stdout.splitlines()
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error:", "warning:"))]
    return {
        "command": " ".join(command),
        "exit_code": done.returncode,
        "plan": _plan(lines),
        "printed": _results_sorted([_printed(line, folder) for line in _without_chance(lines)]),
        "errors": [_text(line, folder) for line in errors if "is not distinguishable above" not in line],
    }


def _plan(lines: list[str]) -> dict[str, Any]:
    """The numbers of a printed plan: n, q, T, δ, and of every point σ, ε and guarantee."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith("n = "):
            found["numbers"] = dict(part.split(" = ") for part in line.split(", ") if " = " in part)
        elif point := _POINT.match(line):
            name, *numbers = point.groups()
            found.setdefault("points", {})[name] = numbers
    return found


def _without_chance(lines: list[str]) -> list[str]:
    """The lines without times, and without the sentences of an answer, which secret noise decides."""
    found, is_answer = [], False
    for line in lines:
        is_answer = line.startswith("answer: ") or (is_answer and line.startswith("  "))
        if not is_answer or line.startswith(("answer: ", "  The ledger allows")):
            found.append("answer: #" if line.startswith("answer: ") else line)
    return [line for line in found if not line.startswith(("estimate:", "… "))]


def _printed(line: str, folder: Path) -> Any:
    """A printed line, or the JSON object that it is."""
    return _cleaned(json.loads(line), folder) if line.startswith("{") else _text(line, folder)


def _text(text: str, folder: Path) -> str:
    """A line without places, times, hashes, scores and names of source files."""
    text = text.replace(str(folder), "<folder>").replace(str(ROOT), "<root>")
    text = re.sub(r"\d{8}-\d{6}", "<time>", text)
    text = re.sub(r"(?<![.\d])[0-9a-f]{16,}\b", "<hash>", text)
    text = re.sub(r"(?<![.\d])[0-9a-f]{8,}…", "<hash>…", text)
    text = re.sub(r"[\w/]+\.py\b", "<source>", text)
    text = re.sub(r" \((\d+ h )?\d+ min( \d+ s)? left\)$", "", text)
    text = re.sub(r" Valid: .*", "", text)
    text = re.sub(r"[-+]?\d+\.\d+ points", "# points", text)
    return _SCORE.sub(r"\1#", text)


def _results_sorted(lines: list[Any]) -> list[Any]:
    """The lines with those of finished trials, which end in any order, without their number and sorted."""
    numbered = re.compile(r"\[\d+/(\d+)\]")
    found = [isinstance(line, str) and numbered.match(line) is not None for line in lines]
    results = [
        numbered.sub(r"[…/\1]", line) for line, is_result in zip(lines, found, strict=True) if is_result
    ]
    ordered = iter(sorted(results))
    return [next(ordered) if is_result else line for line, is_result in zip(lines, found, strict=True)]


def _found(folder: Path, pattern: str) -> list[Path]:
    """Every file of that name but MLflow's copies."""
    return sorted(path for path in folder.rglob(pattern) if "mlartifacts" not in path.parts)


def _place(path: Path, folder: Path) -> str:
    return re.sub(r"\d{8}-\d{6}", "<time>", str(path.relative_to(folder)))


def _json(path: Path, folder: Path) -> Any:
    return _cleaned(json.loads(path.read_text()), folder)


def _cleaned(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {
            key: dict.fromkeys(each, "#")
            if key == "scores" and isinstance(each, dict)
            else _cleaned(each, folder)
            for key, each in value.items()
            if key not in _LEFT_OUT_KEYS
        }
    if isinstance(value, list):
        return [_cleaned(each, folder) for each in value]
    return _text(value, folder) if isinstance(value, str) else value


def _table(path: Path) -> dict[str, Any]:
    """Columns of a table, and of every row the values that chance has no part in."""
    with path.open(newline="") as file:
        columns, *rows = list(csv.reader(file))
    kept = [number for number, column in enumerate(columns) if not _RANDOM_COLUMN.search(column)]
    return {"columns": columns, "rows": [[_number(row[number]) for number in kept] for row in rows]}


def _number(cell: str) -> float | str:
    try:
        return float(cell) if math.isfinite(float(cell)) else cell
    except ValueError:
        return cell


def _tracked(path: Path) -> dict[str, list[str]]:
    """Names of all that MLflow holds of a sweep's runs."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return {
            table: [
                key
                for (key,) in database.execute(f"SELECT DISTINCT key FROM {table} ORDER BY key")
                # MLflow's own find user, source and commit.
                if not key.startswith("mlflow.")
            ]
            for table in ("params", "metrics", "tags")
        }
