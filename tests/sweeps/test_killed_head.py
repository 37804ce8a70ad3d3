"""The whole head dies in the middle of a sweep; a new one and `--resume` end it. Judged by counts."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from tests.sweeps.head import Head
from tests.sweeps.support import Driver, tracked_runs, write_npz
from trainers.tracking.mlflow_server import connect

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="the test's head needs a second loopback address"),
]

NUM_STEPS, EVERY, NUM_TRIALS = 6, 2, 3
HELD = 1, EVERY + 1
"""The trial, and the draw at which it waits, when the head is killed."""
ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--no-references", f"--repeats={NUM_TRIALS}", "--name=one"),
    *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY}", "--max-concurrent-trials=1"),
    *("--network=tests.sweeps.faulty:network", "--dataset-id=scans"),
    *("--expected-batch-size=32", "--num-records-public=128"),
)


def _start(head: Head, top: Path, *more: str) -> Driver:
    given = (
        f"--storage={top / 'storage'}",
        f"--ledger={top / 'ledger.db'}",
        f"--dataset=npz:{top / 'own.npz'}",
    )
    env = {key: value for key, value in head.environment.items() if key != "HOME"}
    return Driver(*ARGUMENTS, *given, *more, home=top / "home", env=env | {"RAY_ADDRESS": head.gcs_address})


def _head(top: Path) -> Head:
    found = Head()
    found.environment["DPGCL_TEST_FOLDER"] = str(top)
    return found


def _drawn(top: Path) -> list[int]:
    journals = [top / f"journal-{number}" for number in range(NUM_TRIALS)]
    return [path.stat().st_size if path.exists() else 0 for path in journals]


def _charged(top: Path) -> int:
    spent = Ledger.open(str(top / "ledger.db")).read_charges("scans", with_pld=False)
    return sum(spent.num_steps.values())


def test_sweep_whose_head_was_killed_is_resumed_on_a_new_one(tmp_path: Path) -> None:
    """Every trial is once in MLflow, and the ledger has every draw and no more than the repeated ones."""
    write_npz(tmp_path / "own.npz", 128)
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=128)
    trial, at = HELD
    (tmp_path / f"hold-{trial}").write_text(str(at))
    with _head(tmp_path) as head:
        driver = _start(head, tmp_path)
        driver.wait_for((tmp_path / "held").exists)
        assert _drawn(tmp_path) == [NUM_STEPS, at, 0]
        head.kill()
        driver.kill(signal.SIGKILL)  # it was a process of that machine
        driver.wait()
    assert _charged(tmp_path) >= sum(_drawn(tmp_path))
    (tmp_path / f"hold-{trial}").unlink()
    with _head(tmp_path) as head:
        driver = _start(head, tmp_path, "--resume")
        assert driver.wait() == 0, driver.stdout + driver.stderr
    assert f"sweep: one (1 of {NUM_TRIALS} trials done)" in driver.stdout
    assert _drawn(tmp_path) == [NUM_STEPS, NUM_STEPS + at - EVERY, NUM_STEPS]
    assert _charged(tmp_path) == NUM_TRIALS * NUM_STEPS + EVERY
    runs = tracked_runs(connect(f"sqlite:///{tmp_path}/storage/mlflow.db"), "tags.`dpgcl.role` = 'trial'")
    found = Counter(run.data.tags["dpgcl.trial"] for run in runs)
    assert found == Counter(f"S4-Na1-private-r{number}" for number in range(NUM_TRIALS))
