"""A node is cut off while its worker trains: the training goes on elsewhere, and every draw is charged.

On real hosts of their own (network namespaces), judged by counts: the draws by the journal of
`tests.sweeps.faulty`, the charge by the ledger.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from tests.sweeps.head import REPOSITORY, wait_for
from tests.sweeps.hosts import Hosts, why_no_hosts
from tests.sweeps.support import write_npz
from trainers.files.checkpoint import read_drawn

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts()),
]

NUM_STEPS, EVERY_STEPS, HELD_AT = 12, 4, 6
TRIAL = "S4-Na1-private-r0"


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_training_goes_on_elsewhere_and_the_cut_off_worker_draws_nothing_more(top: Path) -> None:
    write_npz(top / "own.npz", 128)
    url = str(top / "ledger.db")
    Ledger.create(url).register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=128)
    (top / "hold-0").write_text(str(HELD_AT))
    count_file = top / f"storage/sweeps/one/drawn/{TRIAL}.json"
    env = {"DPGCL_TEST_FOLDER": str(top), "PYTHONPATH": str(REPOSITORY)}
    log = top / "driver.log"
    with Hosts(top, nodes=(1, 1), env=env) as hosts:
        driver = hosts.start(
            *(0, log),
            *(sys.executable, str(REPOSITORY / "sweeps/group_size.py"), "--tiny", "--noise-multiplier=1"),
            *("--repeats=1", "--name=one", "--network=tests.sweeps.faulty:network", "--dataset-id=scans"),
            *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY_STEPS}"),
            *("--expected-batch-size=32", "--num-records-public=128", f"--ledger={url}"),
            *(f"--dataset=npz:{top / 'own.npz'}", f"--storage={top / 'storage'}"),
        )

        def wait_until(condition: Callable[[], object], what: str) -> None:
            """Waits as long as the driver lives."""
            wait_for(lambda: condition() or driver.poll() is not None, timeout_seconds=600, what=what)
            assert condition(), log.read_text()

        wait_until((top / "held").exists, "the worker to be held amid its draws")
        cut_off = int((top / "held").read_text())
        node = hosts.host_of(cut_off)
        hosts.cut_off(node)
        attempts = count_file.with_suffix(".attempts")
        # The first one's two, the driver's, and the restart's first.
        wait_until(lambda: len(list(attempts.glob("*.json"))) >= 4, "the restart")
        assert hosts.host_of(cut_off) == node, "the worker that was cut off lives"
        assert _drawn(top) == HELD_AT
        (top / "hold-0").unlink()
        assert driver.wait(600) == 0, log.read_text()
        # It ended with the step that it was in.
        assert _drawn(top) == HELD_AT + NUM_STEPS - EVERY_STEPS
    plan = json.loads((top / "storage/sweeps/one/plan.json").read_text())
    reservation = Ledger.open(url).reservation("scans", f"one-{plan['sweep_id']}/{TRIAL}")
    counted = read_drawn(count_file)
    assert reservation is not None
    assert counted is not None
    assert _drawn(top) <= counted.num_steps <= reservation.num_steps_charged
    result = json.loads((top / f"storage/sweeps/one/trials/{TRIAL}.json").read_text())
    assert result["metrics"]["num_steps_charged"] >= _drawn(top)


def _drawn(top: Path) -> int:
    return os.stat(top / "journal-0").st_size
