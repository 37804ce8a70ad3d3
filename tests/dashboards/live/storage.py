"""Storage folders as sweeps leave them, and a clock, for tests of the live page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.live.state import Reader
from tests.trainers.databases import copy_empty_database
from trainers.tracking.runs import STOPPED_TAG, Tracker

METRICS = {"knn_accuracy": 0.75, "linear_probe_accuracy": 0.5, "epsilon": 9.5}
ODD = '<b onload="x">&amp;ε*_`|[a](b)</b>'
BOTH_QUOTES = "'\"><script>x</script>"
"""Names with quotes, angle brackets, Markdown and Unicode."""


@dataclass
class Storage:
    """One storage folder with a database, and the times that a reader is told."""

    root: Path
    now: float = 0.0

    def __post_init__(self) -> None:
        self.uri = copy_empty_database(self.root)
        self.tracker = Tracker.open(None, self.root, "experiment")

    def reader(self, uri: str = "", ledger: str | None = None) -> Reader:
        given = uri or self.uri
        return Reader(self.root, given, ledger, clock=lambda: self.now, now=lambda: 1e9 + self.now)

    def folder(self, name: str, num_trials: int = 4, **plan: Any) -> Path:
        path = self.root / "sweeps" / name
        path.mkdir(parents=True)
        params = {"num_trials": num_trials, "question": "group-size", "dataset": "digits"}
        (path / "plan.json").write_text(json.dumps({"params": params, **plan}))
        return path

    def tell(self, name: str, trial: str, step: int, num_steps: int = 100) -> None:
        path = self.root / "sweeps" / name / "checkpoints" / trial / "progress.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step": step, "num_steps": num_steps}))
        os.utime(path, (1e9 + self.now,) * 2)

    def finish(self, name: str, trial: str) -> None:
        path = self.root / "sweeps" / name / "trials" / f"{trial}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")

    def sweep(self, name: str, data_is: str = "public", **params: Any) -> str:
        """Begin a sweep in MLflow; returns its run."""
        told = {"num_trials": 4, "question": "group-size", "dataset": "digits", **params}
        tags = {"data_is": data_is, "tuning_cost": "Open release: ε = 40", "tuned_epsilon": "40.0"}
        return self.tracker.start_sweep(name, told, tags)

    def trial(
        self,
        parent: str,
        name: str,
        metrics: Mapping[str, float] = METRICS,
        *,
        size: int = 8,
        guarantee: str = "proven",
        data_is: str = "public",
        stopped_at: str = "",
    ) -> str:
        params = {
            "group_size": size,
            "target_epsilon": 10.0,
            "repeat": 0,
            "num_steps": 100,
            "dataset": "digits",
        }
        params |= {"target_delta": 1e-5, "num_augmentations": 1, "num_records_public": 1000}
        params |= {"sampling_prob": 0.1, "noise_multiplier": 1.0, "method": "dp_gcl"}
        tags = {"guarantee_label": guarantee, "data_is": data_is}
        tags |= {STOPPED_TAG: stopped_at} if stopped_at else {}
        return self.tracker.log_trial(parent, name, params, metrics, {}, tags, is_new=True)


def sealed(storage: Storage, name: str) -> Path:
    """A sealed sweep under way, with trainings that have ended and that run."""
    path = storage.folder(name)
    plan = {"params": {"num_candidates": 5, "question": "group-size", "dataset": "secret-data"}}
    (path / "plan.json").write_text(json.dumps({**plan, "publication": {"interval_seconds": 60}}))
    for trial in ("draw-0", "draw-1"):
        folder = path / "trusted" / "checkpoints" / trial
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text('{"step": 3, "num_steps": 9}')
    (path / "trusted" / "trials").mkdir()
    (path / "trusted" / "trials" / "draw-0.json").write_text("{}")
    return path
