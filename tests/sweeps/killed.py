"""A user's own network whose trainings keep a journal of their draws, whatever the method.

Before each draw one byte goes to `journals/SWEEP TRIAL` in $DPGCL_TEST_FOLDER; every training process is
noted in `processes/`. A draw waits a moment, so that kills come in the middle of trainings, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.sampling.stage import DrawnGroups, GroupStage

SECONDS_OF_A_DRAW = 0.1

_group_stage = Mechanism.group_stage


class Journaled:
    """A group stage that notes every draw before it is made."""

    def __init__(self, stage: GroupStage, journal: Path) -> None:
        self._stage, self._journal = stage, journal
        self.yields_incomplete = stage.yields_incomplete

    def draw(self, num_records: int, **draws: Any) -> DrawnGroups:
        file = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, b".")
        os.close(file)
        time.sleep(SECONDS_OF_A_DRAW)
        return self._stage.draw(num_records, **draws)


def network(shape: tuple[int, int, int]) -> nn.Module:
    """The factory; outside a training it notes nothing."""
    folder = next(_checkpoint_folders(), None)
    if folder is not None:
        top = Path(os.environ["DPGCL_TEST_FOLDER"])
        (top / "processes" / str(os.getpid())).touch()
        journal = top / "journals" / f"{folder.parents[1].name} {folder.name}"
        Mechanism.group_stage = lambda self: Journaled(_group_stage(self), journal)  # type: ignore[method-assign, assignment, return-value]
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )


def _checkpoint_folders() -> Iterator[Path]:
    """That of the training which builds the network, from the arguments of its function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        trial = frame.f_locals.get("trial")
        if frame.f_code.co_name == "_train" and trial is not None:
            yield trial.checkpoint_folder
        frame = frame.f_back
