"""Decides whether a training continues, by messages between it and its driver in files next to its count.

Before each step a training checks whether it must stop. If its sweep stops early by scores, the training
sends each intermediate score to its driver, and waits for the answer before it draws any more. So the number
of its steps depends on the released values, and not on the speed of a driver or a file system.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgcl_core.durable_files import make_folder, replacing


class TrainingStopped(Exception):  # noqa: N818 (an answer, not a fault)
    """Raised when the sweep's time is over; the checkpoint contains all steps that were drawn."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@dataclass(frozen=True, kw_only=True)
class Question:
    """A training's question whether to continue.

    Attributes:
      token: random identifier of this question.
      step: number of steps done.
      scores: those scores of the network after these steps that may leave the training.
    """

    token: str
    step: int
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Oversight:
    """The messages between a training and its driver; each side uses its own methods.

    Attributes:
      count_file: the file in which the training's steps are counted.
      by_scores: whether the training asks after each intermediate score if it should continue.
    """

    count_file: Path
    by_scores: bool = False

    def must_stop(self) -> bool:
        """Whether the driver has requested the training to stop."""
        return self._file("stop").exists()

    def stop(self) -> None:
        """Request the training to stop before its next step."""
        make_folder(self.count_file.parent)
        self._file("stop").touch(mode=0o600)

    def ended_at(self) -> int | None:
        """Return the step at which the driver ended the training for its scores; None if it has not.

        The end also holds for every later attempt, even under another driver. An attempt that continued would
        draw steps that were to be omitted, and its final network would get the scores of an earlier one.
        """
        step = _read(self._file("ended")).get("step")
        return None if step is None else int(step)

    def begin(self) -> None:
        """Delete the messages to earlier attempts, except an end that was decided by scores."""
        for name in ("stop", "asked", "answer"):
            self._file(name).unlink(missing_ok=True)

    def goes_on(self, step: int, scores: Mapping[str, float], check_attempt: Callable[[], None]) -> bool:
        """Ask the driver whether the training continues, and wait for the answer.

        Args:
          step, scores: as in `Question`.
          check_attempt: function called while waiting; it raises if a newer attempt has begun.
        """
        token = secrets.token_hex(8)
        _write(self._file("asked"), {"token": token, "step": step, "scores": dict(scores)})
        while not self.must_stop():
            answer = _read(self._file("answer"))
            if answer.get("token") == token:
                return bool(answer["goes_on"])
            check_attempt()
            time.sleep(0.05)
        return True  # a stop: the training loop itself checks `must_stop`

    def question(self) -> Question | None:
        """Return the training's unanswered question, or None."""
        asked = _read(self._file("asked"))
        if not asked or asked["token"] == _read(self._file("answer")).get("token"):
            return None
        return Question(token=asked["token"], step=asked["step"], scores=asked["scores"])

    def answer(self, question: Question, *, goes_on: bool) -> None:
        """Answer a question; an end is recorded before the answer is sent."""
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
        content: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content
