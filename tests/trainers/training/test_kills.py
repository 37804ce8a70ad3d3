"""kill -9 at random moments: the ledger's charge covers every draw, at every moment and at the end.

Sweeps of two trainings, charged to a ledger, are killed and resumed again and again. The true number of
draws is counted by a journal that gets its byte before each draw (`tests.trainers.crashing`). Half of the
kills come at a random time, half at a random event: before or after a durable write, a row of the ledger or
its commit, or at a draw; they hit everything, the driver alone (its training goes on for a while), or the
training's process alone. The few kills of `.ci/run` come at places that DPGCL_TEST_SEED chooses.

Others are charged to no ledger but for R repeated steps in advance: however they are killed, no training
draws more than T + R, and what is stated is what an undisturbed sweep states.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from tests.sweeps.support import ROOT
from tests.trainers.crashing import ALL, DRIVER, EVERY_STEPS, NUM_STEPS, RESTART_STEPS, WORKER, Request
from trainers.files.checkpoint import read_drawn

TRIALS = ("S4-Na1-private-r0", "S4-Na1-private-r1")
SEED = int(os.environ.get("DPGCL_TEST_SEED") or secrets.randbelow(10**6))

# Where a crash is most likely to hide a charge; the random ones may miss them.
AIMED = (
    *("draw", "after grant.json", "before ledger commit", "after ledger commit"),
    *("after drawn/S4-Na1-private-r0.json", "before checkpoint.pt", "after checkpoint.pt"),
    *("before trials/S4-Na1-private-r0.json", "after trials/S4-Na1-private-r0.json", "before ledger row"),
)

Ask = Callable[[Request], dict[str, Any]]


@dataclass(frozen=True)
class Amount:
    """How much is killed: at least so many sweeps and kills, at most so many kills of one sweep."""

    num_sweeps: int
    num_kills: int
    kills_of_a_sweep: int


FEW, MANY = Amount(3, 3, 1), Amount(len(AIMED), 30, 4)


@dataclass(frozen=True)
class Seen:
    """Steps of one training at one moment: what was drawn, and then what was charged."""

    trial: str
    drawn: int
    charged: int


@dataclass
class Sweep:
    """What was seen of one sweep.

    Attributes:
      folder: its storage folder.
      moments: after every kill and at the end.
      last_events: the last event before each kill; for one of a training alone, of the whole run.
      asked: the kills that were asked for, and the codes the runs ended with.
      code: of its last run.
    """

    folder: Path
    moments: list[Seen] = field(default_factory=list)
    last_events: list[str] = field(default_factory=list)
    asked: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    code: int | None = None

    def look(self) -> None:
        """Reads the journals first: what is drawn meanwhile was charged before."""
        drawn = {trial: self.drawn(trial) for trial in TRIALS}
        ledger = Ledger.open(str(self.folder / "ledger.db"))
        plan = self.folder / "sweeps/one/plan.json"
        sweep_id = json.loads(plan.read_text())["sweep_id"] if plan.exists() else ""
        for trial in TRIALS:
            reservation = ledger.reservation("scans", f"one-{sweep_id}/{trial}")
            charged = reservation.num_steps_charged if reservation is not None else 0
            self.moments.append(Seen(trial, drawn[trial], charged))

    def drawn(self, trial: str) -> int:
        journal = self.folder / f"{trial}.journal"
        return journal.stat().st_size if journal.exists() else 0

    def events(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def begun(self) -> bool:
        return (self.folder / "sweeps/one/plan.json").exists()

    def result(self, trial: str) -> dict[str, Any]:
        path = self.folder / "sweeps/one/trials" / f"{trial}.json"
        return json.loads(path.read_text())["metrics"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """A process that forks sweeps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.trainers.crashing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def request(wanted: Request) -> dict[str, Any]:
        print(json.dumps(asdict(wanted)), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())  # type: ignore[union-attr, no-any-return]

    yield request
    process.stdin.close()
    process.wait(60)


def make_sweep(folder: Path) -> Sweep:
    folder.mkdir()
    cap = Cap(epsilon=100.0, delta=5e-5)
    Ledger.create(str(folder / "ledger.db")).register("scans", cap, num_records_public=1445)
    return Sweep(folder)


@dataclass
class Killed:
    """All sweeps, and how an undisturbed one went.

    Attributes:
      amount: what was asked for.
      events: of the undisturbed sweep.
      aims: the kind of event at which each sweep is killed first.
      sweeps: what was seen.
    """

    amount: Amount
    events: list[str]
    aims: list[str]
    sweeps: list[Sweep] = field(default_factory=list)

    def num_kills(self) -> int:
        return sum(len(sweep.last_events) for sweep in self.sweeps)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FEW, marks=pytest.mark.ci, id="few"),
        pytest.param(MANY, marks=pytest.mark.long, id="many"),
    ],
)
def killed(ask: Ask, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Killed:
    top, amount = tmp_path_factory.mktemp("killed"), request.param
    print(f"DPGCL_TEST_SEED={SEED}")
    whole = make_sweep(top / "whole")
    seconds = ask(Request(folder=str(whole.folder), resume=False))["seconds"]
    draw = random.Random(SEED)
    aims = [AIMED[0], *draw.sample(AIMED[1:], amount.num_sweeps - 1)]  # a kill at a draw makes it repeat
    found = Killed(amount, whole.events(), aims)
    while len(found.sweeps) < amount.num_sweeps or found.num_kills() < amount.num_kills:
        sweep = make_sweep(top / str(len(found.sweeps)))
        _kill_again_and_again(ask, sweep, draw, found, seconds)
        found.sweeps.append(sweep)
    return found


def _kill_again_and_again(
    ask: Ask, sweep: Sweep, draw: random.Random, killed: Killed, seconds: float
) -> None:
    """One kill at a chosen kind of event, then some at random, each followed by a resume; then to the end."""
    aim = killed.aims[len(killed.sweeps) % len(killed.aims)]
    places = [number for number, name in enumerate(killed.events, start=1) if name == aim]
    kill: dict[str, Any] = {"die_at": draw.choice(places), "victim": ALL}
    while sweep.code != 0:
        num_before = len(sweep.events())
        found = ask(Request(folder=str(sweep.folder), resume=sweep.begun(), **kill))
        sweep.look()
        sweep.code = found["code"]
        sweep.asked.append((kill, sweep.code))
        at_worker = kill.get("victim") == WORKER and len(sweep.events()) - num_before >= kill["die_at"]
        if sweep.code == -9 or at_worker:
            sweep.last_events.append(next(reversed(sweep.events()), "start"))
        elif sweep.code != 0:
            return  # it does not come to its end, and a test tells
        at_event = {"die_at": draw.randint(1, 30), "victim": draw.choice([ALL, DRIVER, WORKER])}
        kill = draw.choice([at_event, {"die_after_seconds": draw.uniform(0, seconds * 0.7)}])
        if len(sweep.last_events) >= killed.amount.kills_of_a_sweep:
            kill = {}
    sweep.look()


def test_kills_are_many_and_come_everywhere(killed: Killed) -> None:
    kinds = {event for sweep in killed.sweeps for event in sweep.last_events}
    assert killed.num_kills() >= killed.amount.num_kills
    assert kinds >= set(killed.aims), SEED


def test_ledger_covers_every_draw_at_every_moment(killed: Killed) -> None:
    short = [seen for sweep in killed.sweeps for seen in sweep.moments if seen.charged < seen.drawn]
    assert short == [], SEED


def test_ledger_charges_no_more_than_kills_can_repeat(killed: Killed) -> None:
    for sweep in killed.sweeps:
        # A crash between noting a checkpoint and writing it counts the steps before it once more, and one
        # between counting a start and its first trace all steps.
        most = NUM_STEPS + max(NUM_STEPS, 2 * EVERY_STEPS) * len(sweep.last_events)
        assert [seen for seen in sweep.moments if seen.charged > most] == [], (SEED, sweep)


def test_reported_charge_covers_every_draw(killed: Killed) -> None:
    for sweep in killed.sweeps:
        for trial in TRIALS:
            assert sweep.result(trial)["num_steps_charged"] >= sweep.drawn(trial), SEED


def test_killed_sweeps_come_to_their_end(killed: Killed) -> None:
    codes = {sweep.folder.name: sweep.code for sweep in killed.sweeps}
    assert set(codes.values()) == {0}, (SEED, codes)
    done = {sweep.result(trial)["num_steps_done"] for sweep in killed.sweeps for trial in TRIALS}
    assert done == {NUM_STEPS}, SEED


def test_kills_made_steps_repeat(killed: Killed) -> None:
    """Otherwise nothing above could have failed."""
    drawn = [sweep.drawn(trial) for sweep in killed.sweeps for trial in TRIALS]
    assert max(drawn) > NUM_STEPS


def counted(sweep: Sweep) -> dict[str, tuple[int, int]]:
    """Of each training the draws by its journal, and what its count says."""
    found = {}
    for trial in TRIALS:
        drawn = sweep.drawn(trial)  # first: what is drawn meanwhile was counted before
        count = read_drawn(sweep.folder / f"sweeps/one/drawn/{trial}.json")
        found[trial] = drawn, count.num_steps if count is not None else 0
    return found


def stated(sweep: Sweep) -> dict[str, Any]:
    """What the sweep's statement says it costs."""
    statement = json.loads((sweep.folder / "sweeps/one/privacy_statement.json").read_text())
    return statement["cost"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("num_sweeps", "num_kills"),
    [
        pytest.param(2, 3, marks=pytest.mark.ci, id="few"),
        pytest.param(10, 4, marks=pytest.mark.long, id="many"),
    ],
)
def test_sweeps_without_a_ledger_draw_and_state_what_is_charged_in_advance(
    num_sweeps: int, num_kills: int, ask: Ask, tmp_path: Path
) -> None:
    print(f"DPGCL_TEST_SEED={SEED}")
    draw, whole = random.Random(SEED), make_sweep(tmp_path / "whole")
    assert ask(Request(folder=str(whole.folder), resume=False, paid=False))["code"] == 0
    for number in range(num_sweeps):
        sweep, left = make_sweep(tmp_path / str(number)), num_kills
        while left > -3 and sweep.code != 0:
            kill: dict[str, Any] = {
                "die_at": draw.randint(1, 45),
                "victim": draw.choice([ALL, DRIVER, WORKER]),
            }
            request = Request(
                folder=str(sweep.folder), resume=sweep.begun(), paid=False, **(kill if left > 0 else {})
            )
            sweep.code, left = ask(request)["code"], left - 1
            for drawn, count in counted(sweep).values():
                assert drawn <= NUM_STEPS + RESTART_STEPS, (SEED, sweep.events())
                assert drawn <= count or count == 0 == drawn, (SEED, sweep.events())
        assert sweep.code == 0, (SEED, (sweep.folder / "said").read_text())
        assert stated(sweep) == stated(whole), SEED
