"""Sweeps as MLflow would hold them."""

from __future__ import annotations

import json

import pytest

from dashboards.report.record import SweepRecord
from tests.dashboards.conftest import log_trials
from tests.trainers.databases import open_tracker

HOSTILE = '</script><img src=x onerror=alert(1)> "it\'s" `a`, **b** [c](javascript:alert(2)) Σ漢 & |'
COST = {
    "training_epsilon": 9.99,
    "tuned_epsilon": 40.0,
    "delta": 1.5e-6,
    "theorem": "composition by PLD",
    "neighboring_relation": "add or remove one record",
}
STATEMENT = {
    "headline": "All that this sweep releases together is (ε = 40.0000, …) private.",
    "cost": COST,
    "unit": "one row",
    "released": "open: every trial",
    "data": "private",
    "ledger": {"dataset_id": "scans", "epsilon": 50.0, "delta": 1e-5, "rule": "RDP filter at order 3"},
}
CONFIG = "version: 1\nmechanism: {epsilon: 10.0}\n"


@pytest.fixture(scope="session")
def make_record(make_trials):
    """A finished sweep over S, changed as asked; trials as of `make_trials`."""

    def make(trials=None, **changes):
        rows = make_trials(num_repeats=3) if trials is None else trials
        if len(rows):
            rows = rows.assign(
                sweep="one",
                trial=[f"t{i}" for i in range(len(rows))],
                run_id=[f"run{i}" for i in range(len(rows))],
            )
        given = {
            "name": "one",
            "status": "FINISHED",
            "tags": {"data_is": "public", "release_mode": "open", "tuning_cost": "All together ε = 40."},
            "params": {"question": "group-size", "dataset": "fashion_mnist"},
            "metrics": {"epsilon_remaining_before": 50.0, "epsilon_remaining": 9.87654321},
            "trials": rows,
            "num_planned": len(rows),
            "statement": STATEMENT,
            "config": CONFIG,
        }
        return SweepRecord(**(given | changes))

    return make


@pytest.fixture
def store(tmp_path, make_trials):
    """Return a function that logs a sweep to MLflow, with its documents, and gives the address."""
    tracker = open_tracker(tmp_path)

    def log(name="one", trials=None, documents=None, status="FINISHED", **params):
        given = {"question": "group-size", "dataset": "fashion_mnist", "num_trials": 24} | params
        parent = tracker.start_sweep(name, given, {"data_is": "public", "release_mode": "open"})
        log_trials(tracker, parent, make_trials() if trials is None else trials)
        for file, content in (documents or {}).items():
            path = tmp_path / file
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
            tracker.log_artifact(parent, path)
        if status != "RUNNING":
            tracker.finish_sweep(parent, status)
        return f"sqlite:///{tmp_path / 'mlflow.db'}"

    log.tracker = tracker
    return log
