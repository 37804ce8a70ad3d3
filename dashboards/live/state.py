"""What goes on in a storage folder and in MLflow, read and never written.

*Who tells what.* Results and the privacy that they cost are MLflow's; how far trainings are that run is in
the files beside their checkpoints. A server that does not answer takes only its part away.

*What may be seen.* Of a sealed sweep, nothing but the run that MLflow has from its publication on: nothing in
its folder but the plan is opened. Of private data, released numbers, trainings with a proven guarantee, and
the number of steps done; no rate, for how long a step takes depends on what is drawn.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from dashboards.compose.answer import OWN, Answer, answer_of
from dashboards.compose.questions import QUESTIONS
from dashboards.errors import DashboardError
from dashboards.live.folders import Folder, folder_of, open_folders
from dashboards.live.pace import Pace, fraction_done, sweep_seconds_left
from dashboards.query.documents import load_answer
from dashboards.query.trials import load_trials, metrics_of
from dashboards.report.content import LEFT_AFTER, LEFT_BEFORE
from dpgcl_core.addresses import masked_text
from dpgcl_core.errors import DpgclError
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.remaining import remaining_of
from dpgcl_core.release.metrics import Release, find_metric
from trainers.files.progress import Progress
from trainers.files.resuming import resume_line
from trainers.tracking.runs import (
    PARENT_TAG,
    ROLE_TAG,
    SEALED_ROLE,
    STOPPED_TAG,
    SWEEP_ROLE,
    SWEEP_TAG,
    TRIAL_TAG,
    TUNING_COST_TAG,
)
from trainers.tracking.server import connect, search_runs, server_errors

if TYPE_CHECKING:
    from mlflow.entities import Run

_T = TypeVar("_T")
UNFIT = (DashboardError, KeyError, ValueError, TypeError, IndexError, AttributeError)
"""What trials of another version, or foreign ones, make figures raise."""
PROVEN, PUBLIC = "proven", "public"
_LEAST_SECONDS = 1.0
_PAUSE, _LONGEST_PAUSE = 2.0, 10.0
"""After a look of a second comes a pause of so many; none is longer than that."""
_QUIET_SECONDS = 300.0
_STATES = {"RUNNING": "running", "FINISHED": "finished", "FAILED": "incomplete", "KILLED": "stopped"}


@dataclass(frozen=True, kw_only=True)
class RunningTrial:
    """A training that has begun and has no result.

    Attributes:
      name: of the trial.
      progress: its steps.
      rate: steps per second; None where unknown or withheld.
      seconds_left: until its last step, likewise.
    """

    name: str
    progress: Progress
    rate: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedTrial:
    """A training with a run in MLflow.

    Attributes:
      name: of the trial.
      run_id: of its run.
      guarantee: its label.
      metrics: those that may be seen.
      stopped_at: the step at which its scores ended it; "" where it made all.
    """

    name: str
    run_id: str
    guarantee: str
    metrics: Mapping[str, float]
    stopped_at: str = ""


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """One sweep, as far as it may be seen.

    Attributes:
      name: of the sweep.
      status: running, finished, incomplete, stopped, published, or unknown.
      question: of the sweep, or "".
      dataset: what is trained on, or "".
      is_sealed: whether one run stands for all.
      is_public: whether the data are.
      started: in seconds since the epoch; None where that is masked or unknown.
      num_trials: planned; None where unknown.
      num_done: finished.
      running: begun and not finished; none once the sweep has ended.
      seconds_left: until all trainings end; None where unknown or withheld.
      trials: finished ones that may be seen, the latest first.
      frame: the same for figures; None where there is none.
      recorded: the answer of a sweep that has ended; None where there is none.
      params: of a sealed sweep's run.
      tuning_cost: a sentence.
      numbers: ε and δ by name, where they are recorded.
      experiment_id, run_id: of its run in MLflow; "" without one.
      has_report: whether its report lies in its folder.
      notes: what is missing, and why.
    """

    name: str
    status: str = "unknown"
    question: str = ""
    dataset: str = ""
    is_sealed: bool = False
    is_public: bool = False
    started: float | None = None
    num_trials: int | None = None
    num_done: int = 0
    running: tuple[RunningTrial, ...] = ()
    seconds_left: float | None = None
    trials: tuple[FinishedTrial, ...] = ()
    frame: pd.DataFrame | None = field(default=None, compare=False, repr=False)
    recorded: Answer | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tuning_cost: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    experiment_id: str = ""
    run_id: str = ""
    has_report: bool = False
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        """The share of all steps that are done; None where the number of trainings is unknown."""
        if not self.num_trials:
            return None
        shares = (fraction_done(each.progress) for each in self.running)
        return min(1.0, (self.num_done + sum(shares)) / self.num_trials)

    def answer(self) -> Answer | None:
        """Return the recorded answer, else that of the trials so far; None where they have none."""
        if self.frame is None or self.recorded is not None:
            return self.recorded
        try:
            return answer_of(self.frame, QUESTIONS.get(self.question, OWN))
        except UNFIT:
            return None


@dataclass
class _Watched:
    """The trainings of one sweep that this process has seen running."""

    paces: dict[str, Pace] = field(default_factory=dict)
    first: tuple[float, float] | None = None
    furthest: dict[str, Progress] = field(default_factory=dict)

    def in_tenths(self, begun: Mapping[str, Progress], done: Collection[str]) -> dict[str, Progress]:
        """Return what is told of trainings on private data, by name.

        Tenths of their steps, never fewer than before, and one that is between two attempts is still there:
        single steps cannot be timed, and restarts cannot be counted, by who looks on.
        """
        for name, progress in begun.items():
            before, now = self.furthest.get(name), progress.in_tenths
            if before is None or now.step > before.step:
                self.furthest[name] = now
        self.furthest = {name: each for name, each in self.furthest.items() if name not in done}
        return dict(self.furthest)


class Reader:
    """Read sweeps, each at most every second and less often where that takes long.

    Args:
      root: the storage folder.
      tracking_uri: of MLflow.
      ledger: address of a ledger to show; None for none.
      clock: seconds, for rates.
      now: seconds since the epoch, to tell how long nothing has moved.
    """

    def __init__(
        self,
        root: Path,
        tracking_uri: str,
        ledger: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.root, self.tracking_uri, self._ledger = root, tracking_uri, ledger
        self._clock, self._now = clock, now
        self._lock = threading.RLock()
        self._kept: dict[str, tuple[float, Any]] = {}
        self._watched: dict[str, _Watched] = {}

    def sweeps(self) -> tuple[list[SweepState], tuple[str, ...]]:
        """Return all sweeps that may be seen, the latest first, and what could not be read."""
        return self._at_most_often("sweeps", self._sweeps)

    def sweep(self, name: str) -> SweepState | None:
        """Return one sweep with its trials; None where there is none that may be seen."""
        return self._at_most_often(f"sweep {name}", lambda: self._sweep(name))

    def ledger_lines(self) -> tuple[str, ...]:
        """Return what a ledger has left, line by line; what it says where it cannot be read."""
        return self._at_most_often("ledger", self._ledger_lines)

    def report(self, name: str) -> Path | None:
        """Return the report of a sweep that may be seen; None without one."""
        state = self.sweep(name)
        folder = folder_of(self.root, name) if state is not None and not state.is_sealed else None
        return folder.report if folder is not None else None

    def _at_most_often(self, key: str, read: Callable[[], _T]) -> _T:
        with self._lock:
            due, value = self._kept.get(key, (-math.inf, None))
            if (began := self._clock()) >= due:
                value = read()
                ended = self._clock()
                pause = min(_LONGEST_PAUSE, max(_LEAST_SECONDS, _PAUSE * (ended - began)))
                self._kept[key] = ended + pause, value
            found: _T = value
            return found

    def _sweeps(self) -> tuple[list[SweepState], tuple[str, ...]]:
        parents, notes = self._parents()
        folders = {folder.name: folder for folder in open_folders(self.root)}
        states = [
            self._with_progress(self._of_run(name, parents.get(name)), folders.get(name))
            for name in dict.fromkeys((*parents, *folders))
        ]
        return sorted(states, key=lambda each: -(each.started or 0.0)), notes

    def _sweep(self, name: str) -> SweepState | None:
        parents, notes = self._parents()
        run, folder = parents.get(name), folder_of(self.root, name)
        if run is None and folder is None:
            return None
        state = self._of_run(name, run, notes)
        if run is not None and not state.is_sealed:
            state = self._with_trials(state, run)
        return self._with_progress(state, folder)

    def _parents(self) -> tuple[dict[str, Run], tuple[str, ...]]:
        """The runs that stand for sweeps, by name; sealed ones from their publication on."""
        try:
            client = connect(self.tracking_uri)
            with server_errors(self.tracking_uri, "listing the sweeps"):
                ids = [each.experiment_id for each in client.search_experiments(max_results=1000)]
                found = [
                    run
                    for role in (SWEEP_ROLE, SEALED_ROLE)
                    for run in search_runs(client, ids, {ROLE_TAG: role})
                    if role == SWEEP_ROLE or run.info.status == "FINISHED"
                ]
        except DpgclError as error:
            return {}, (str(error),)
        named: dict[str, Run] = {}
        for run in found:  # the latest of a name
            if name := run.data.tags.get(SWEEP_TAG):
                named.setdefault(name, run)
        return named, ()

    def _of_run(self, name: str, run: Run | None, notes: tuple[str, ...] = ()) -> SweepState:
        if run is None:
            return SweepState(name=name, notes=notes)
        tags, params, sealed = run.data.tags, run.data.params, _role(run) == SEALED_ROLE
        public = tags.get("data_is") == PUBLIC
        shown, withheld = released(metrics_of(run), is_public=public)
        return SweepState(
            name=name,
            status="published" if sealed else _STATES.get(run.info.status, "unknown"),
            question=params.get("question", ""),
            dataset=masked_text(params.get("dataset", "")),
            is_sealed=sealed,
            is_public=public,
            started=None if sealed else run.info.start_time / 1000,
            num_trials=None if sealed else _whole(params.get("num_trials")),
            num_done=int(sealed),
            trials=(_finished(run, shown),) if sealed else (),
            params=dict(params) if sealed else {},
            tuning_cost=tags.get(TUNING_COST_TAG, ""),
            numbers=_numbers(run),
            experiment_id=run.info.experiment_id,
            run_id=run.info.run_id,
            notes=(*notes, *_withheld_note(withheld)),
        )

    def _with_trials(self, state: SweepState, parent: Run) -> SweepState:
        """The state with what MLflow has of its trials."""
        try:
            client = connect(self.tracking_uri)
            with server_errors(self.tracking_uri, "reading the runs"):
                runs = search_runs(client, [parent.info.experiment_id], {PARENT_TAG: parent.info.run_id})
        except DpgclError as error:
            return dataclasses.replace(state, notes=(*state.notes, str(error)))
        finished = [run for run in runs if run.info.status == "FINISHED"]
        notes, withheld, trials = list(state.notes), set[str](), []
        for run in sorted(finished, key=lambda run: -(run.info.end_time or 0)):
            shown, kept = released(metrics_of(run), is_public=state.is_public)
            withheld |= kept
            if state.is_public or run.data.tags.get("guarantee_label") == PROVEN:
                trials.append(_finished(run, shown))
        if others := len(runs) - len(finished):
            notes.append(f"Not shown: {_count(others, 'run')} in MLflow, failed or half-written.")
        if lone := len(finished) - len(trials):
            told = _count(lone, "training")
            notes.append(f"Withheld: {told} of private data without a proven guarantee.")
        if stopped := sum(bool(trial.stopped_at) for trial in trials):
            told = _count(stopped, "training")
            notes.append(f"Not compared: {told} that early stopping ended; ε counts all planned steps.")
        return dataclasses.replace(
            state,
            trials=tuple(trials),
            num_done=len(finished),
            frame=self._frame(state.name) if trials else None,
            recorded=self._recorded(state.name) if trials and state.status == "finished" else None,
            notes=(*notes, *_withheld_note(withheld)),
        )

    def _frame(self, name: str) -> pd.DataFrame | None:
        try:
            return load_trials(self.tracking_uri, name)
        except (DpgclError, *UNFIT):  # the table has the rest
            return None

    def _recorded(self, name: str) -> Answer | None:
        with suppress(DpgclError):
            return load_answer(self.tracking_uri, name)
        return None

    def _with_progress(self, state: SweepState, folder: Folder | None) -> SweepState:
        """The state with what its folder tells of trainings that run."""
        if folder is None or state.is_sealed:
            return state
        done = folder.finished()
        state = dataclasses.replace(
            state,
            num_trials=state.num_trials or _whole(folder.params.get("num_trials")),
            question=state.question or str(folder.params.get("question", "")),
            dataset=state.dataset or masked_text(str(folder.params.get("dataset", ""))),
            num_done=max(state.num_done, len(done)),
            has_report=folder.report is not None,
        )
        watched = self._watched.setdefault(state.name, _Watched())
        begun = folder.begun(done)
        if not state.is_public:
            begun = watched.in_tenths(begun, done)
        if state.status not in ("running", "unknown") or not begun:
            return state
        now = self._clock()
        for name, progress in begun.items():
            watched.paces.setdefault(name, Pace()).see(now, progress)
        running = tuple(self._running(name, watched, now, state.is_public) for name in begun)
        still = self._now() - folder.last_sign
        quiet = (
            f"Nothing has moved for {still / 60:.0f} min; if its driver has ended, this continues it: "
            f"{resume_line(folder.path)}",
        )
        return dataclasses.replace(
            state,
            status="running" if state.status == "unknown" and still < _QUIET_SECONDS else state.status,
            running=running,
            seconds_left=self._seconds_left(state, watched, running, now) if state.is_public else None,
            notes=(*state.notes, *(quiet if still >= _QUIET_SECONDS else ())),
        )

    def _running(self, name: str, watched: _Watched, now: float, is_public: bool) -> RunningTrial:
        pace = watched.paces[name]
        assert pace.latest is not None
        if not is_public:
            return RunningTrial(name=name, progress=pace.latest)
        left = pace.seconds_left(now)
        return RunningTrial(name=name, progress=pace.latest, rate=pace.rate, seconds_left=left)

    def _seconds_left(
        self, state: SweepState, watched: _Watched, running: tuple[RunningTrial, ...], now: float
    ) -> float | None:
        shares = [fraction_done(each.progress) for each in running]
        done = state.num_done + sum(shares)
        watched.first = watched.first or (now, done)
        waiting = max(0, (state.num_trials or 0) - state.num_done - len(running))
        return sweep_seconds_left(now - watched.first[0], done - watched.first[1], shares, waiting)

    def _ledger_lines(self) -> tuple[str, ...]:
        if self._ledger is None:
            return ()
        try:
            ledger = Ledger.open(self._ledger)
            return tuple(line for each in ledger.dataset_ids() for line in remaining_of(ledger, each).lines())
        except DpgclError as error:
            return (f"The ledger cannot be read: {error}",)


def released(metrics: Mapping[str, float], *, is_public: bool) -> tuple[dict[str, float], set[str]]:
    """Return the metrics that may be seen, and the names of those withheld.

    Of private data these are the private-only ones, and any that is not declared.

    >>> released({"knn_accuracy": 0.5, "train_loss": 1.0, "own": 2.0}, is_public=False)[0]
    {'knn_accuracy': 0.5}
    """
    shown = {
        name: value
        for name, value in metrics.items()
        if is_public or ((found := find_metric(name)) and found.release is not Release.PRIVATE_ONLY)
    }
    return shown, metrics.keys() - shown.keys() - _OF_THE_PAGE - _best_names(metrics)


_OF_THE_PAGE = {"tuned_epsilon", LEFT_BEFORE, LEFT_AFTER}
"""Numbers of the sweep's own run that the page shows, of the answer and of the ledger."""


def _best_names(metrics: Mapping[str, float]) -> set[str]:
    """The names of the answer's numbers, which a sweep's own run has."""
    return {name for name in metrics if name.startswith("best_")}


def _finished(run: Run, shown: Mapping[str, float]) -> FinishedTrial:
    name = run.data.tags.get(TRIAL_TAG) or run.info.run_name or run.info.run_id
    label = run.data.tags.get("guarantee_label", "none")
    stopped_at = run.data.tags.get(STOPPED_TAG, "")
    return FinishedTrial(
        name=name, run_id=run.info.run_id, guarantee=label, metrics=shown, stopped_at=stopped_at
    )


def _numbers(run: Run) -> dict[str, float]:
    """ε of the whole sweep, of one training, δ, and what a ledger has left."""
    found: dict[str, float] = {}
    for name in ("training_epsilon", "tuned_epsilon", "tuned_delta", "epsilon_remaining"):
        text = run.data.metrics.get(name, run.data.tags.get(name, "none"))
        try:
            found[name] = float(text)
        except ValueError:
            continue
    return found


def _withheld_note(names: set[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (f"Withheld by the release policy: {', '.join(sorted(names))}.",)


def _role(run: Run) -> str:
    return str(run.data.tags.get(ROLE_TAG, ""))


def _whole(value: object) -> int | None:
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
