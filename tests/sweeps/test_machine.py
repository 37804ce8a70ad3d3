"""System metrics of a sweep: of public data alone, few however long it takes, written with its end."""

from __future__ import annotations

import threading

import pytest

from sweeps.service.running import machine
from sweeps.service.running import sweep as service
from sweeps.service.running.machine import MachineWatch, sample
from tests.sweeps.support import write_npz
from tests.trainers.databases import open_tracker
from tests.trainers.exporting import run_small_sweep


def test_sample_has_the_names_that_mlflow_shows():
    assert all(name.startswith("system/") for name in sample())
    assert 0 < sample()["system/system_memory_usage_percentage"] <= 100


def test_samples_stay_few_and_cover_the_whole_time():
    watch = MachineWatch(most=10)
    for second in range(1000):
        watch.add(second, {"system/a": second})
    kept = [time_ms for time_ms, _ in watch.samples]
    assert len(kept) <= 10
    assert (kept[0], kept == sorted(kept)) == (0, True)


def test_watch_samples_until_it_is_left(monkeypatch):
    taken = threading.Event()

    def sampled():
        taken.set()
        return {"system/a": 1.0}

    monkeypatch.setattr(machine, "sample", sampled)
    with MachineWatch(seconds=0.0) as watch:
        assert taken.wait(60)
    assert watch.samples
    assert not watch._thread.is_alive()


@pytest.mark.ci
def test_samples_are_written_with_their_times(tmp_path):
    tracker = open_tracker(tmp_path)
    parent = tracker.start_sweep("one", {}, {})
    tracker.log_system(parent, [(1000, {"system/a": 1.0}), (2000, {"system/a": 3.0})])
    found = tracker.client.get_metric_history(parent, "system/a")
    assert [(point.timestamp, point.step, point.value) for point in found] == [(1000, 0, 1.0), (2000, 1, 3.0)]


@pytest.mark.ci
@pytest.mark.parametrize("private", [False, True])
def test_machine_is_watched_where_data_are_public_alone(private, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(service, "MachineWatch", lambda: made.append(1) or MachineWatch())
    more = ("--dataset", write_npz(tmp_path / "scans.npz", 400), "--no-ledger") if private else ()
    run_small_sweep(tmp_path, "one", *more)
    assert len(made) == (0 if private else 1)
    run_small_sweep(tmp_path, "sealed", "--release", "sealed")
    assert len(made) == (0 if private else 1)
