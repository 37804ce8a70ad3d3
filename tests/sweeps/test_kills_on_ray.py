"""kill -9 on real Ray: the charge covers every draw, whoever dies and whenever.

Sweeps of every kind, on one worker and on two, are killed again and again: the driver, a training's process,
the raylet, or all at once, each after a random number of draws. The draws are counted by journals
(`tests.sweeps.killed`), which know nothing of the ledger. `.ci/run` kills three times;
DPGCL_TEST_SEED chooses the places.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from tests.sweeps.support import ROOT, Driver, write_npz

pytestmark = [pytest.mark.ray, pytest.mark.timeout(7200)]  # thirty kills take an hour on a busy machine

NUM_STEPS, EVERY_STEPS = 12, 4
SEED = int(os.environ.get("DPGCL_TEST_SEED") or secrets.randbelow(10**6))
VICTIMS = ("driver", "training", "raylet", "all")

COMMON = (
    *("--tiny", "--name=one", "--network=tests.sweeps.killed:network"),
    *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY_STEPS}", "--max-concurrent-trials=1"),
    *("--expected-batch-size=32", "--num-records-public=128", "--dataset-id=scans"),
)
TWO_WORKERS = ("--num-workers=2", "--worker-processes")


@dataclass(frozen=True)
class Kind:
    """A kind of sweep: its script and options."""

    script: str
    options: tuple[str, ...]

    @property
    def sealed(self) -> bool:
        """Whether the whole sweep is one charge, and no trial is ever repeated."""
        return "sealed" in self.options


OPEN = ("--repeats=2", "--group-sizes=4", "--noise-multiplier=1")
SCORED = ("--evaluate-on=digits", "--max-index-records=200", "--max-query-records=200")
SEALED = (*SCORED, "--group-sizes", "4", "8", "--noise-multiplier=1", "--release", "sealed")
SEALED += ("--mean-trials", "2", "--publish-after", "150")
SEARCH = (*SCORED, "--num-trials=3", "--noise-multiplier-range", "1", "2", "--sampler=random")
METHODS = (*SCORED, "--methods", "dp_gcl", "dp_clip", "--repeats=1", "--epsilon=8")
KINDS = {
    "open": Kind("group_size", OPEN),
    "open, two workers": Kind("group_size", (*OPEN, *TWO_WORKERS)),
    "sealed": Kind("group_size", SEALED),
    "sealed, two workers": Kind("group_size", (*SEALED, *TWO_WORKERS)),
    "search": Kind("search", SEARCH),
    "methods": Kind("methods", METHODS),
}


@dataclass(frozen=True)
class Seen:
    """Steps of one training at one moment: what was drawn, and then what was charged."""

    sweep: str
    trial: str
    drawn: int
    charged: int


@dataclass
class Killed:
    """One sweep under fire.

    Attributes:
      top: everything lies below it.
      moments: what was seen all along.
      victims: who was killed, in order.
      codes: of every run.
      said: by the last run.
    """

    kind: Kind
    top: Path
    draw: random.Random
    moments: list[Seen] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    said: str = ""

    def prepare(self) -> None:
        for folder in ("journals", "processes"):
            (self.top / folder).mkdir(parents=True)
        write_npz(self.top / "own.npz", 128)
        ledger = Ledger.create(str(self.top / "ledger.db"))
        ledger.register("scans", Cap(epsilon=400.0, delta=7e-3, order=2.0), num_records_public=128)

    def journals(self) -> dict[tuple[str, str], int]:
        """The draws of every training so far, by sweep and trial."""
        found = {}
        for path in (self.top / "journals").iterdir():
            sweep, trial = path.name.split(" ")
            found[sweep, trial] = path.stat().st_size
        return found

    def look(self) -> int:
        """Read the journals first: what is drawn meanwhile was charged before. Return all draws."""
        drawn = self.journals()
        ledger = Ledger.open(str(self.top / "ledger.db"))
        for (sweep, trial), num in drawn.items():
            self.moments.append(Seen(sweep, trial, num, self._charged(ledger, sweep, trial)))
        return sum(drawn.values())

    def _charged(self, ledger: Ledger, sweep: str, trial: str) -> int:
        if self.kind.sealed:  # one charge for the law of all trials, and each draws its steps once
            return NUM_STEPS if ledger.read_charges("scans", with_pld=False).num_sealed else 0
        plan = json.loads((self.top / "storage/sweeps" / sweep / "plan.json").read_text())
        reservation = ledger.reservation("scans", f"{sweep}-{plan['sweep_id']}/{trial}")
        return reservation.num_steps_charged if reservation is not None else 0

    def start(self) -> Driver:
        resume = ("--resume",) if (self.top / "storage/sweeps/one/plan.json").exists() else ()
        return Driver(
            *(*COMMON, *self.kind.options, *resume, "--ledger", str(self.top / "ledger.db")),
            *("--storage", str(self.top / "storage"), "--dataset", f"npz:{self.top / 'own.npz'}"),
            home=self.top / "home",
            env={"DPGCL_TEST_FOLDER": str(self.top)},
            script=ROOT / "sweeps" / f"{self.kind.script}.py",
        )

    def run(self, num_kills: int) -> None:
        """Kill it that often, as long as it lives, and let it come to its end."""
        driver, last = self.start(), 0
        while True:
            victims = self._wait(driver, self.look() + self.draw.randint(0, NUM_STEPS), num_kills)
            if not victims:
                break
            self._kill(driver, victims)
            num_kills -= 1
            if driver.ended():
                self._end(driver)
                driver = self.start()
        last = self._end(driver)
        # The last run may itself have been killed in its last moments; what is left is done undisturbed.
        if last != 0:
            driver = self.start()
            self._wait(driver, 0, 0)
            self._end(driver)

    def _wait(self, driver: Driver, until: int, num_kills: int) -> tuple[str, list[int]] | None:
        """Look until so many draws are seen, and choose a victim; None at the driver's end."""
        wanted = self.draw.choice(VICTIMS)
        while not driver.ended():
            if self.look() >= until and num_kills:
                found = self._processes(driver, wanted)
                if found:
                    return wanted, found
            time.sleep(0.1)
        return None

    def _processes(self, driver: Driver, victim: str) -> list[int]:
        below = dict(_below(driver.pid))
        trainings = {int(path.name) for path in (self.top / "processes").iterdir()} & below.keys()
        if not (self.top / "storage/sweeps/one/plan.json").exists() or not below:
            return []
        if victim == "training":
            return [self.draw.choice(sorted(trainings))] if trainings else []
        if victim == "raylet":
            return [pid for pid, name in below.items() if name == "raylet"]
        return [driver.pid, *below] if victim == "all" else [driver.pid]

    def _kill(self, driver: Driver, victims: tuple[str, list[int]]) -> None:
        name, processes = victims
        ray = list(_below(driver.pid))
        for pid in processes:
            _end_process(pid)
        self.victims.append(name)
        if name == "training":  # the driver lives, and may start the training again
            return
        while not driver.ended():
            self.look()
            time.sleep(0.1)
        for pid, was in ray:  # what outlives its driver may go on for a while; the next run must not meet it
            while _name(pid) == was:
                self.look()
                time.sleep(0.1)

    def _end(self, driver: Driver) -> int:
        self.codes.append(driver.wait())
        self.said = driver.stdout + driver.stderr
        self.look()
        return self.codes[-1]


def _below(pid: int) -> Iterator[tuple[int, str]]:
    """All processes that a process has started, and theirs, with their names."""
    parents: dict[int, int] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(int(path.name))) is not None:
            parents[int(path.name)] = int(stat[1])
    wanted = {pid}
    while more := {child for child, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    for found in sorted(wanted - {pid}):
        if name := _name(found):
            yield found, name


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on; None where there is no such process, or it is dead already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields


def _name(pid: int) -> str | None:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    return name if _stat(pid) is not None else None


def _end_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(({"open": 3}, 3), marks=pytest.mark.ci, id="few"),
        pytest.param(
            (dict(zip(KINDS, (8, 6, 3, 3, 5, 5), strict=True)), 30),
            marks=pytest.mark.long,
            id="many",
        ),
    ],
)
def killed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[Killed]:
    """At least so many kills in all; sealed sweeps, which end early when they are killed, are begun again."""
    print(f"DPGCL_TEST_SEED={SEED}")
    kills, at_least = request.param
    top, draw = tmp_path_factory.mktemp("killed"), random.Random(SEED)
    found: list[Killed] = []
    for name, number in kills.items():
        left = number
        while left > 0:
            sweep = Killed(KINDS[name], top / str(len(found)), draw)
            sweep.prepare()
            sweep.run(left)
            found.append(sweep)
            left -= len(sweep.victims)
            assert sweep.victims, (SEED, name, sweep.said)
    assert sum(len(sweep.victims) for sweep in found) >= at_least
    print(Counter(victim for sweep in found for victim in sweep.victims))
    return found


def test_charge_covers_every_draw_at_every_moment(killed: list[Killed]) -> None:
    short = [seen for sweep in killed for seen in sweep.moments if seen.charged < seen.drawn]
    assert short == [], SEED
    assert all(len(sweep.moments) > 20 for sweep in killed)


def test_killed_sweeps_come_to_their_end(killed: list[Killed]) -> None:
    ends = [(sweep.codes, sweep.said) for sweep in killed if sweep.codes[-1] != 0]
    assert ends == [], SEED


def test_ledger_verifies_after_all_kills(killed: list[Killed]) -> None:
    for sweep in killed:
        ledger = Ledger.open(str(sweep.top / "ledger.db"))
        assert ledger.verify(ledger.head()).head == ledger.head(), SEED


def test_finished_training_reports_no_fewer_steps_than_it_drew(killed: list[Killed]) -> None:
    for sweep in killed:
        for (name, trial), drawn in sweep.journals().items():
            result = sweep.top / "storage/sweeps" / name / "trials" / f"{trial}.json"
            if not sweep.kind.sealed:
                assert json.loads(result.read_text())["metrics"]["num_steps_charged"] >= drawn, SEED


def test_killed_open_sweeps_repeated_steps(killed: list[Killed]) -> None:
    """Otherwise nothing above could have failed; three kills may all come between a checkpoint and a draw."""
    drawn = [number for sweep in killed if not sweep.kind.sealed for number in sweep.journals().values()]
    many = sum(len(sweep.victims) for sweep in killed) >= 10
    assert max(drawn) >= NUM_STEPS + many


def test_sealed_trials_repeat_no_step_and_are_charged_once(killed: list[Killed]) -> None:
    for sweep in killed:
        if sweep.kind.sealed:
            assert max(sweep.journals().values()) <= NUM_STEPS, SEED
            ledger = Ledger.open(str(sweep.top / "ledger.db"))
            assert ledger.read_charges("scans", with_pld=False).num_sealed == 1, SEED
