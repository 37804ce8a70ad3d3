"""Storage folders as sweeps leave them, and a clock, for tests of the dashboard's server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.serve.index import SweepIndex

ODD = "<b onload=x>&amp;ε*_`|[a](b)<"
"""A name with angle brackets, Markdown and Unicode, as far as a folder may have it."""


@dataclass
class Storage:
    """One storage folder, and the time that its index is told."""

    root: Path
    now: float = 0.0

    def index(self) -> SweepIndex:
        return SweepIndex(self.root, now=lambda: 1e9 + self.now)

    def sweep(self, name: str, data_is: str | None = "public", *, status: str = "", **plan: Any) -> Path:
        """Make the folder of a sweep of four trials, which runs unless `status` says how it ended."""
        path = self.root / "sweeps" / name
        path.mkdir(parents=True)
        params = {"num_trials": 4, "question": "group-size", "dataset": "digits"}
        told = {"params": params} | ({"data_is": data_is} if data_is else {})
        (path / "plan.json").write_text(json.dumps({**told, **plan}))
        self.log(name, "begun", "0 of 4 trials done")
        if status:
            self.log(name, "ended", status)
        return path

    def log(self, name: str, event: str, text: str) -> None:
        with (self.root / "sweeps" / name / "log.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, "text": text}) + "\n")

    def tell(self, name: str, trial: str, step: int, num_steps: int = 100) -> None:
        path = self.root / "sweeps" / name / "checkpoints" / trial / "progress.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step": step, "num_steps": num_steps}))
        os.utime(path, (1e9 + self.now,) * 2)

    def finish(self, name: str, trial: str) -> None:
        path = self.root / "sweeps" / name / "trials" / f"{trial}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")


def sealed(storage: Storage, name: str) -> Path:
    """A sealed sweep under way, with trainings that have ended and that run, and a stray report."""
    path = storage.sweep(name, "private")
    plan = {"params": {"num_candidates": 5, "question": "group-size", "dataset": "secret-data"}}
    (path / "plan.json").write_text(json.dumps({**plan, "publication": {"interval_seconds": 60}}))
    for trial in ("draw-0", "draw-1"):
        folder = path / "trusted" / "checkpoints" / trial
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text('{"step": 3, "num_steps": 9}')
    (path / "trusted" / "trials").mkdir()
    (path / "trusted" / "trials" / "draw-0.json").write_text("{}")
    (path / "report.html").write_text("<p>")
    return path
