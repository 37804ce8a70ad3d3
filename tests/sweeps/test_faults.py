"""A real sweep that is charged to a ledger: its workers die, its driver is killed, its ledger is taken away.

The true number of draws is in the journals of `tests.sweeps.faulty`. It is compared with the ledger's charge
all along, several times a second.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from tests.sweeps.support import Driver, write_npz
from trainers.files.checkpoint import read_grant

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_STEPS = 12
EVERY_STEPS = 4
SEED = int(os.environ.get("DPGCL_TEST_SEED", secrets.randbelow(10**6)))

ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--repeats=2", "--name=one", "--network=tests.sweeps.faulty:network"),
    *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY_STEPS}", "--max-concurrent-trials=1"),
    *("--expected-batch-size=32", "--num-records-public=128", "--dataset-id=scans"),
)


@dataclass(frozen=True)
class Seen:
    """Steps of one training at one moment: what was drawn, and then what was charged."""

    seed: int
    drawn: int
    charged: int


@dataclass
class Faults:
    """A sweep that meets one fault after the other.

    Attributes:
      top: everything lies below it.
      moments: what was seen all along.
      stages: the last of these at the end of each stage, by its name; `codes` and `said` likewise.
    """

    top: Path
    moments: list[Seen] = field(default_factory=list)
    stages: dict[str, list[Seen]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Path:
        return self.top / "ledger" / "ledger.db"

    @property
    def away(self) -> Path:
        return self.top / "away.db"

    def drawn(self, seed: int) -> int:
        journal = self.top / f"journal-{seed}"
        return journal.stat().st_size if journal.exists() else 0

    def look(self) -> list[Seen]:
        """Reads the journals first: what is drawn meanwhile was charged before."""
        drawn = [self.drawn(seed) for seed in (0, 1)]
        ledger = Ledger.open(str(self.ledger if self.ledger.exists() else self.away))
        plan = self.top / "storage/sweeps/one/plan.json"
        sweep_id = json.loads(plan.read_text())["sweep_id"] if plan.exists() else ""
        now = []
        for seed in (0, 1):
            reservation = ledger.reservation("scans", f"one-{sweep_id}/{self.trial(seed)}")
            charged = reservation.num_steps_charged if reservation is not None else 0
            now.append(Seen(seed, drawn[seed], charged))
        self.moments += now
        return now

    def trial(self, seed: int) -> str:
        return f"S4-Na1-private-r{seed}"

    def metrics(self, seed: int) -> dict[str, float]:
        path = self.top / "storage/sweeps/one/trials" / f"{self.trial(seed)}.json"
        return json.loads(path.read_text())["metrics"]  # type: ignore[no-any-return]

    def granted(self, seed: int) -> int:
        grant = read_grant(self.top / "storage/sweeps/one/checkpoints" / self.trial(seed))
        return grant.num_steps if grant is not None else 0

    def start(self, *more: str) -> Driver:
        (self.top / "held").unlink(missing_ok=True)
        arguments = (*ARGUMENTS, f"--storage={self.top / 'storage'}", f"--ledger={self.ledger}")
        data = f"--dataset=npz:{self.top / 'own.npz'}"
        env = {"DPGCL_TEST_FOLDER": str(self.top)}
        return Driver(*arguments, data, *more, home=self.top / "home", env=env)

    def watch(self, driver: Driver, condition: Callable[[], Any]) -> None:
        """Looks until the condition holds."""
        driver.wait_for(lambda: self.look() and condition())

    def end(self, stage: str, driver: Driver) -> None:
        """Looks until the sweep has ended."""
        while not driver.ended():
            self.look()
            time.sleep(0.1)
        self.codes[stage], self.said[stage] = driver.wait(), driver.stdout + driver.stderr
        self.stages[stage] = self.look()


def _ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    found, draw = Faults(tmp_path_factory.mktemp("faults")), random.Random(SEED)
    print(f"DPGCL_TEST_SEED={SEED}")
    top, held = found.top, (found.top / "held").exists
    write_npz(top / "own.npz", 128)
    Ledger.create(str(found.ledger)).register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=128)

    (top / "die-0").write_text(str(draw.randint(EVERY_STEPS + 2, NUM_STEPS)))
    (top / "hold-1").write_text(str(draw.randint(1, NUM_STEPS - EVERY_STEPS)))
    driver = found.start()
    found.watch(driver, held)
    training = int((top / "held").read_text())
    driver.kill(signal.SIGKILL)
    found.end("driver killed", driver)
    while not _ended(training):
        time.sleep(0.05)

    hold = found.drawn(1) + draw.randint(1, 3)
    (top / "hold-1").write_text(str(hold))
    driver = found.start("--resume")
    found.watch(driver, held)
    found.stages["ledger taken"] = found.look()
    found.ledger.rename(found.away)
    found.watch(driver, lambda: found.granted(1) == 0)
    (top / "hold-1").unlink()
    found.end("ledger gone", driver)

    found.away.rename(found.ledger)
    (top / "die-1").write_text(str(found.drawn(1) + draw.randint(1, 2)))
    found.end("mended", found.start("--resume"))
    return found


def test_ledger_covers_every_draw_at_every_moment_of_a_real_sweep(faults: Faults) -> None:
    assert [seen for seen in faults.moments if seen.charged < seen.drawn] == [], SEED
    assert len(faults.moments) > 100


def test_dead_worker_is_charged_before_it_starts_again(faults: Faults) -> None:
    first = faults.stages["driver killed"][0]
    assert first.drawn > NUM_STEPS, "the worker did not die, or repeated nothing"
    counted = faults.top / "storage/sweeps/one/drawn" / f"{faults.trial(0)}.json"
    assert json.loads(counted.read_text())["num_attempts"] == 2
    assert first.drawn <= first.charged == NUM_STEPS + EVERY_STEPS


def test_sweep_whose_ledger_is_gone_stops_at_the_next_checkpoint(faults: Faults) -> None:
    before, after = faults.stages["ledger taken"][1], faults.stages["ledger gone"][1]
    assert after.drawn - before.drawn < EVERY_STEPS
    assert faults.codes["ledger gone"] == 1
    assert (
        "the ledger is unreachable; every training stopped at its next checkpoint"
        in faults.said["ledger gone"]
    )
    assert f"failed: {faults.trial(1)} (LedgerError (its message is withheld" in faults.said["ledger gone"]


def test_sweep_goes_on_when_its_ledger_is_back(faults: Faults) -> None:
    assert faults.codes["mended"] == 0, faults.said["mended"]
    assert faults.metrics(1)["num_steps_done"] == NUM_STEPS


def test_reported_charge_covers_every_draw_of_a_real_sweep(faults: Faults) -> None:
    for seed in (0, 1):
        assert faults.metrics(seed)["num_steps_charged"] >= faults.drawn(seed), SEED
