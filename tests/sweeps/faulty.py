"""A user's own network whose trainings keep a journal of their draws, and die or wait where a test says so.

Before each draw one byte is written to `journal-SEED` in $DPGCL_TEST_FOLDER, by the public seed of the
training. Where that makes as many bytes as `die-SEED` says, the process ends at once, and the file is gone;
as long as there are at least as many as `hold-SEED` says, the training waits. Where there is a file
`raise-SEED`, it raises. Where there is a file `clock`, a driver's time budget runs by the seconds in it.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpgcl_core.sampling.slots import SampledGroups

_draw = SampledGroups.draw


def network(shape: tuple[int, int, int]) -> nn.Module:
    """The factory."""
    folder, seed = Path(os.environ["DPGCL_TEST_FOLDER"]), torch.initial_seed()

    def noted_draw(stage: SampledGroups, *given: Any, **generators: Any) -> Any:
        file = os.open(folder / f"journal-{seed}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, b".")
        os.close(file)
        _obey(folder, seed)
        return _draw(stage, *given, **generators)

    SampledGroups.draw = noted_draw  # type: ignore[method-assign]
    if (clock := folder / "clock").exists():
        _run_by(clock)
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )


def _run_by(clock: Path) -> None:
    from sweeps.service.cluster.stopping import Stopping

    Stopping.__init__.__defaults__ = (lambda: float(clock.read_text()),)  # type: ignore[misc]


def _obey(folder: Path, seed: int) -> None:
    drawn = (folder / f"journal-{seed}").stat().st_size
    die, hold = folder / f"die-{seed}", folder / f"hold-{seed}"
    if (folder / f"raise-{seed}").exists():
        raise RuntimeError("the words of a record")
    if drawn >= _number_in(die):
        die.unlink()
        os._exit(17)
    part = folder / f"held-{seed}.part"  # of its own: several trainings may be held at once
    while drawn >= _number_in(hold):
        part.write_text(str(os.getpid()))
        part.rename(folder / "held")  # whoever sees it finds the number in it
        time.sleep(0.02)


def _number_in(path: Path) -> float:
    """Returns what the file says; infinity once it is gone, which may be at any moment."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return math.inf
