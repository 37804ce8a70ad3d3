"""A process that runs sweeps in children which may be killed: everything is imported once, then forked.

    python -m tests.trainers.crashing

It reads a request per line and answers each with a line, both JSON. A child runs a whole sweep, charged to
a ledger or for its restarts in advance, by the code that every sweep is run by; only Ray and MLflow are stood
in for. Each training has a process of its own, as on Ray, and is started again when that dies. Before a step
is drawn, one byte is written to a journal of the training: the true number of draws, whatever the program
believes.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dpgcl_core.ledger.session import LedgerSession
from dpgcl_core.ledger.store import LedgerStore
from dpgcl_core.sampling.slots import SampledGroups
from sweeps.group_size import points
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.running import driver, mlflow_listener, trial_policy
from sweeps.service.running import sweep as service
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import options, plan, run_sweep
from tests.trainers.conftest import make_data, make_records
from trainers.training.loop import train

NUM_RECORDS = 1445  # as the plan has, of digits, and the ledger
NUM_STEPS = 9
EVERY_STEPS = 4
ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--no-non-private", "--repeats=2", "--name=one"),
    *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY_STEPS}"),
    *("--no-also-untrained", "--max-views-per-microbatch=64"),
)
RESTART_STEPS = EVERY_STEPS
PAID = ("--dataset-id=scans", f"--num-records-public={NUM_RECORDS}")
IN_ADVANCE = (f"--restart-steps={RESTART_STEPS}",)
MAX_RESTARTS = 2

_PATIENCE = 60.0
ALL, DRIVER, WORKER = "all", "driver", "worker"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run and when to kill it.

    Attributes:
      folder: the storage folder; `ledger.db` and the journals lie in it.
      resume: continue what is there.
      paid: charged to the ledger; else restarts are charged in advance.
      die_at: number of the event at which to kill; None for none.
      die_after_seconds: when to kill everything; None for never.
      victim: what is killed at an event: everything, the driver alone, or the training's process alone.
    """

    folder: str
    resume: bool
    paid: bool = True
    die_at: int | None = None
    die_after_seconds: float | None = None
    victim: str = ALL


class Events:
    """Counts what a sweep does to its disk, in all its processes, and kills it at the number asked for."""

    def __init__(self, request: Request) -> None:
        self._request, self._shared, self._driver = request, mmap.mmap(-1, 8), os.getpid()
        self._log = os.open(f"{request.folder}/events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, name: str) -> None:
        number = int.from_bytes(self._shared[:], "little") + 1
        self._shared[:] = number.to_bytes(8, "little")
        os.write(self._log, f"{name}\n".encode())
        if number != self._request.die_at:
            return
        if self._request.victim != WORKER and os.getpid() != self._driver:
            os.kill(self._driver, signal.SIGKILL)
        if self._request.victim != DRIVER or os.getpid() == self._driver:
            os.kill(os.getpid(), signal.SIGKILL)


def watch(events: Events, folder: Path) -> Callable[[str], None]:
    """Notes every durable write and every draw of this process; returns how to name the training."""
    replace, add, draw = Path.replace, LedgerStore.add, SampledGroups.draw
    writing, journal = LedgerSession.writing, {"file": -1}

    def noted_replace(path: Path, target: Any) -> Any:
        *_, folder, name = Path(target).parts
        name = f"{folder}/{name}" if folder in ("drawn", "started", "trials") else name
        events.note(f"before {name}")
        found = replace(path, target)
        events.note(f"after {name}")
        return found

    def noted_add(store: LedgerStore, connection: Any, entries: Any) -> None:
        events.note("before ledger row")
        add(store, connection, entries)
        events.note("before ledger commit")

    @contextmanager
    def noted_writing(session: LedgerSession) -> Iterator[Any]:
        with writing(session) as draft:
            yield draft
        events.note("after ledger commit")

    def noted_draw(stage: SampledGroups, *given: Any, **generators: Any) -> Any:
        os.write(journal["file"], b".")
        events.note("draw")
        return draw(stage, *given, **generators)

    Path.replace = noted_replace  # type: ignore[method-assign]
    LedgerStore.add = noted_add  # type: ignore[method-assign]
    LedgerSession.writing = noted_writing  # type: ignore[method-assign]
    SampledGroups.draw = noted_draw  # type: ignore[method-assign]

    def begin(trial: str) -> None:
        path = folder / f"{trial}.journal"
        journal["file"] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    return begin


def run_trials(
    begin: Callable[[str], None],
    session: Any,
    plan: SweepPlan,
    folder: SweepFolder,
    trials: Sequence[Trial],
    on_result: Any,
    budget: SweepBudget | None,
) -> dict[str, str]:
    """Stands in for Ray: one training after the other, each in a process of its own."""
    failed = {}
    for trial in trials:
        for _ in range(1 + MAX_RESTARTS):
            if budget is not None:
                budget.confirm(every_seconds=0)
            folder.mark_start(trial.name)
            charged = budget is not None
            result = _in_own_process(lambda t=trial, c=charged: _trained(begin, plan, folder, t, charged=c))  # type: ignore[misc]
            if result is not None:
                break
            if budget is not None:
                budget.restarted(trial.name)
        if result is None or isinstance(result, str):
            failed[trial.name] = result or "its process died"
        else:
            on_result(trial.name, result)
    return failed


def _trained(
    begin: Callable[[str], None], plan: SweepPlan, folder: SweepFolder, trial: Trial, *, charged: bool
) -> Any:
    begin(trial.name)
    every = trial.config.performance.checkpoint_every_steps
    checkpoints = folder.checkpoints(trial.name, every_steps=every, is_paid=charged)
    try:
        result = train(trial.config, plan.data, checkpoints=checkpoints)
    except Exception as error:
        return str(error)
    return {"metrics": result.metrics, "series": result.series}


def _in_own_process(work: Callable[[], Any]) -> Any:
    """The result of `work` from a fork of this process; None where that died."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _let_go("sweeps/one/lock")
            os.write(writer, pickle.dumps(work()))  # nobody reads where the driver is dead
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        content = file.read()
    os.waitpid(child, 0)
    return pickle.loads(content) if content else None


def _let_go(name: str) -> None:
    """Closes the files of this name that a fork brought along: on Ray a training has none of its driver's."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(link.readlink()).endswith(name):
                os.close(int(link.name))


class Silent:
    """Stands in for MLflow."""

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *given, **named: ""


class AtOnce:
    """Stands in for the thread that sends to MLflow, for a process that forks has no threads."""

    def __init__(self, send: Callable[[str], None], *_: object) -> None:
        self.put = send

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing."""

    def finish(self, *_: object) -> list[str]:
        return []


def run_child(request: Request, planned: SweepPlan) -> int:
    """Runs the sweep of a request in this process and returns its exit code."""
    folder = Path(request.folder)
    begin = watch(Events(request), folder)
    trial_policy.build_plan = lambda *given, **named: planned
    service.Tracker = SimpleNamespace(open=lambda *given: Silent())  # type: ignore[assignment,misc]
    mlflow_listener.Outbox = AtOnce  # type: ignore[assignment,misc]
    driver.ray_session = lambda *_: nullcontext()  # type: ignore[assignment,misc,return-value]
    driver.run_trials = lambda *given: run_trials(begin, *given[:6])  # type: ignore[assignment,misc]
    mlflow_listener.cross_checks = lambda *given: {}
    more = ("--resume",) if request.resume else ()
    paying = (*PAID, f"--ledger={folder / 'ledger.db'}") if request.paid else IN_ADVANCE
    chosen = options(*ARGUMENTS, f"--storage={folder}", *paying, *more)
    return run_sweep("group-size", chosen, points(chosen), lambda *given: [])


def _lives(group: int) -> bool:
    """Whether a process of this group still runs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = stat.read_text().rsplit(")", 1)[1].split()[:3]
            # A zombie whose threads have not all ended still holds its files.
            if int(pgrp) == group and (state != "Z" or len(os.listdir(stat.parent / "task")) > 1):
                return True
    return False


def answer(request: Request, planned: SweepPlan) -> dict[str, Any]:
    """Forks a child for a request, kills it when it is time, and tells how it ended."""
    started, child = time.monotonic(), os.fork()
    if child == 0:
        os.setsid()
        with open(f"{request.folder}/said", "a") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = 99
            try:
                code = run_child(request, planned)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
    if request.die_after_seconds is not None:
        time.sleep(request.die_after_seconds)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while request.victim == ALL and _lives(child) and time.monotonic() - started < _PATIENCE:
        time.sleep(0.01)  # a training that dies after its driver holds the folder's lock until then
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - started}


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # loads torch's compiler, seconds
    data = dataclasses.replace(make_data(private=True), train=make_records(NUM_RECORDS))
    planned = {
        True: dataclasses.replace(plan(*ARGUMENTS, *PAID, "--ledger=unused"), data=data),
        False: dataclasses.replace(plan(*ARGUMENTS, *IN_ADVANCE), data=data),
    }
    assert all(each.cost is not None for each in planned.values())
    for repeated in range(3 * EVERY_STEPS + 1):
        planned[True].trials[0].config.epsilon(NUM_STEPS + repeated)
    planned[False].trials[0].config.epsilon()
    print("ready", flush=True)
    for line in sys.stdin:
        request = Request(**json.loads(line))
        print(json.dumps(answer(request, planned[request.paid])), flush=True)


if __name__ == "__main__":
    main()
