"""Whether a training goes on: what it and its sweep's driver tell each other, in files beside its count.

A training looks before each step whether it must stop. One whose sweep stops early by scores tells its driver
each score on the way, and waits for the answer before it draws any more: so the number of its steps follows
what has been released, and not how quick a driver or a file system was.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.files.durable_files import make_folder, replacing

_LOOK_EVERY_SECONDS = 0.05


class TrainingStopped(Exception):  # noqa: N818 (an answer, not a fault)
    """The sweep's time is over; the training's checkpoint has all that it has drawn."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@dataclass(frozen=True, kw_only=True)
class Question:
    """A training's question whether to go on.

    Attributes:
      token: random, of this one question.
      step: steps that it has made.
      scores: of the iterate after them, those that leave the training.
    """

    token: str
    step: int
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Oversight:
    """One training's side and its driver's, of the same files.

    Attributes:
      count_file: where the training's steps are counted.
      by_scores: whether it asks after each score on the way.
    """

    count_file: Path
    by_scores: bool = False

    def must_stop(self) -> bool:
        """Whether the driver has told the training to stop."""
        return self._file("stop").exists()

    def stop(self) -> None:
        """Tell the training to stop before its next step."""
        make_folder(self.count_file.parent)
        self._file("stop").touch(mode=0o600)

    def ended_at(self) -> int | None:
        """Return the step at which the driver ended the training for its scores; None where it has not.

        It stands for every later attempt, under another driver, too: one that went on would draw steps that
        were to be left out, and give its final network scores that were drawn of an earlier one.
        """
        step = _read(self._file("ended")).get("step")
        return None if step is None else int(step)

    def begin(self) -> None:
        """Forget what was told to earlier attempts, but for the end that scores have decided."""
        for name in ("stop", "asked", "answer"):
            self._file(name).unlink(missing_ok=True)

    def goes_on(self, step: int, scores: Mapping[str, float], look: Callable[[], None]) -> bool:
        """Ask the driver whether the training goes on, and wait for its answer.

        Args:
          step, scores: as of `Question`.
          look: called while it waits; raises where a newer attempt has taken the training over.
        """
        token = secrets.token_hex(8)
        _write(self._file("asked"), {"token": token, "step": step, "scores": dict(scores)})
        while not self.must_stop():
            answer = _read(self._file("answer"))
            if answer.get("token") == token:
                return bool(answer["goes_on"])
            look()
            time.sleep(_LOOK_EVERY_SECONDS)
        return True  # the loop sees for itself

    def question(self) -> Question | None:
        """Return the training's question; None where it has asked nothing that is unanswered."""
        asked = _read(self._file("asked"))
        if not asked or asked["token"] == _read(self._file("answer")).get("token"):
            return None
        return Question(token=asked["token"], step=asked["step"], scores=asked["scores"])

    def answer(self, question: Question, *, goes_on: bool) -> None:
        """Answer a question; an end is noted before it is told."""
        if not goes_on:
            _write(self._file("ended"), {"step": question.step})
        _write(self._file("answer"), {"token": question.token, "goes_on": goes_on})

    def _file(self, name: str) -> Path:
        return self.count_file.with_suffix(f".{name}")


def _write(path: Path, content: Mapping[str, object]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found
