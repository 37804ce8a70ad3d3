"""Slices of work and the folder of their results: what is finished is kept, and not done again.

A slice is complete by itself. Its row is in the folder before the next one begins, so a run that is
stopped at any moment loses one slice at most.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, say
from dpgcl_core.errors import ConfigError, DataError, DpgclError
from trainers.torchvision_import import ensure_torchvision_import

PARTS = {
    "a": "checks that need a GPU",
    "b": "the private over the non-private step",
    "c": "Fashion-MNIST in the paper's setting",
    "d": "masked auto-encoder and captioner",
    "e": "the regime in which private data matter",
}
HEADING = "run.json"
OPEN_CLIP, PEFT = "open_clip", "peft"
"""Libraries that some slices need and that need not be there."""

_SAME = {"version": "another version of the code", "device_name": "another device", "toy": "another size"}
"""What all results of a folder share, and what they are where they do not."""


class CheckError(Exception):
    """What was checked does not hold."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One piece of work.

    Attributes:
      part: of `PARTS`.
      name: its own within the part.
      run: what it does, given the rows of its part that are there, by name; returns what it found.
      libraries: without which it is skipped.
      minutes: that it takes at most.
      like: what the slices of a part that take about as long have in common; empty for none.
    """

    part: str
    name: str
    run: Callable[[Mapping[str, Row]], Row]
    libraries: tuple[str, ...] = ()
    minutes: float = 8.0
    like: str = ""


class Results:
    """The folder of the results of one device, one file of JSON lines per part.

    Args:
      folder: made if it is not there.
      heading: what the results are of: `_SAME` and more.

    Raises:
      ConfigError: the folder holds results of something else, or cannot be read.
    """

    def __init__(self, folder: Path, heading: Row) -> None:
        self._folder = folder
        found = read_heading(folder) if (folder / HEADING).exists() else heading
        for name, what in _SAME.items():
            if found[name] != heading[name]:
                raise ConfigError(
                    f"the results in {folder} are of {what} ({found[name]}, and this is {heading[name]}): "
                    "give another --output"
                )
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / HEADING, json.dumps(heading, indent=1) + "\n")

    def rows(self, part: str) -> dict[str, Row]:
        """Return the rows of a part by the names of their slices."""
        return read_rows(self._folder, part)

    def add(self, part: str, row: Row) -> None:
        """Keep a row in the place of an older one of its name."""
        rows = {**self.rows(part), row["name"]: row}
        _replace(_file(self._folder, part), "".join(json.dumps(each) + "\n" for each in rows.values()))


def read_heading(folder: Path) -> Row:
    """Return what the results of a folder are of.

    Raises:
      ConfigError: it holds none, or a damaged heading.
    """
    try:
        found: dict[str, Any] = json.loads((folder / HEADING).read_text())
        return {**found, **{name: found[name] for name in _SAME}}
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder} must hold results of python -m benchmarks.gpu; it does not") from None


def read_rows(folder: Path, part: str) -> dict[str, Row]:
    """Return the rows of a part by name; none where nothing was run.

    Raises:
      ConfigError: a line is damaged.
    """
    path = _file(folder, part)
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return {row["name"]: row for row in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged: delete it, and run part {part} again") from None


def _file(folder: Path, part: str) -> Path:
    return folder / f"part-{part}.jsonl"


def _replace(path: Path, text: str) -> None:
    """Write a file whole: a process that is killed leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text)
    temporary.replace(path)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time of one call.

    Attributes:
      minutes: of the call; None for no limit.
      clock: seconds that only grow.
      started: the clock's, when the call began.
    """

    minutes: float | None
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0

    def allows(self, minutes: float) -> bool:
        """Whether so many minutes are left."""
        return self.minutes is None or self.clock() - self.started + 60 * minutes <= 60 * self.minutes


def run_slices(slices: Sequence[Slice], results: Results, budget: Budget, *, again: bool) -> bool:
    """Run what is not finished, in order, while time is left; return whether nothing has failed.

    Args:
      slices: of one or several parts.
      results: where rows are looked for and kept.
      budget: a slice that might not end in time is not begun, and none after it.
      again: whether failed ones are run once more.
    """
    for number, each in enumerate(slices):
        found = results.rows(each.part).get(each.name, {})
        if "found" in found or ("failed" in found and not again):
            continue
        if not budget.allows(_expected_minutes(each, results.rows(each.part))):
            say(f"stopped in time before part {each.part}, {each.name}: {len(slices) - number} left at most")
            break
        say(f"part {each.part}, {each.name}")
        row = outcome(each, results.rows(each.part))
        say(
            "  "
            + (f"{row['seconds']:.1f} s" if "found" in row else f"{row.get('skipped', row.get('failed'))}")
        )
        results.add(each.part, row)
    return not any("failed" in row for part in PARTS for row in results.rows(part).values())


def _expected_minutes(each: Slice, earlier: Mapping[str, Row]) -> float:
    """Half as long again as the longest of its like, and no longer than a slice may take."""
    finished = [row for row in earlier.values() if "found" in row and row["like"] == each.like]
    if not each.like or not finished:
        return each.minutes
    return min(each.minutes, 1.5 * float(max(row["seconds"] for row in finished)) / 60)


def outcome(each: Slice, earlier: Mapping[str, Row]) -> Row:
    """Run one slice and return its row, with what it `found`, or why it was `skipped` or has `failed`.

    That a training does not fit into this GPU's memory, say, is a result; the next slice may fit.

    Raises:
      DataError: a data set is not on this machine.
    """
    row = {"part": each.part, "name": each.name, "like": each.like, "torch": torch.__version__}
    missing = missing_libraries(each.libraries)
    if missing:
        return row | {"skipped": f"{' and '.join(missing)} cannot be imported here"}
    started = time.perf_counter()
    try:
        return row | {"found": each.run(earlier), "seconds": time.perf_counter() - started}
    except DataError:
        raise  # what is not there yet is no result
    except DpgclError as error:
        return row | {"failed": str(error)}
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return row | {"failed": f"{type(error).__name__}: {first}"}
    finally:
        if torch.cuda.is_available():
            gc.collect()  # modules and hooks refer to each other
            torch.cuda.empty_cache()


def missing_libraries(names: Sequence[str]) -> list[str]:
    """Return those that cannot be imported."""
    return [name for name in names if not _imports(name)]


def _imports(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    try:
        ensure_torchvision_import()
        importlib.import_module(name)
    except Exception:  # a library built for another torch fails in any way
        return False
    return True
