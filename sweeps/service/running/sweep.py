"""From options to figure: the one way every sweep is run."""

from __future__ import annotations

import dataclasses
import math
import shlex
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dashboards.compose.answer import OWN, POINT, Answer
from dashboards.compose.questions import QUESTIONS
from dashboards.report.content import LEFT_BEFORE
from dpgcl_core.errors import (
    BudgetExceeded,
    ConfigError,
    DpgclError,
    LedgerError,
    StorageError,
    TrackingError,
)
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.metrics import is_reference
from dpgcl_core.release.statement import PrivacyStatement
from sweeps.service.options.data import data_path
from sweeps.service.options.file import options_text
from sweeps.service.options.resuming import command_of
from sweeps.service.options.service import ServiceOptions, StorageOptions
from sweeps.service.options.sweep import SweepOptions, errors_in_flags
from sweeps.service.planning.duration import seconds_of_trials
from sweeps.service.planning.plan import (
    Earlier,
    Fit,
    SweepPlan,
    build_plan,
    cross_checks,
    num_records,
    planned_trials,
)
from sweeps.service.planning.publication import Publication
from sweeps.service.planning.records import load_training_data
from sweeps.service.planning.size import fitted_to_size
from sweeps.service.planning.trials import Charged, Point, Trial, trial_class
from sweeps.service.privacy.account import (
    account_of,
    check_account,
    check_ledger_options,
    check_starts,
    ledger_missing,
    marks_note,
    open_ledger,
    with_registered_number,
)
from sweeps.service.privacy.budget import SweepBudget, new_sweep_id, sweep_budget
from sweeps.service.privacy.statement import (
    build_statement,
    statement_text,
    steps_left_out,
    what_one_drew,
    what_was_drawn,
    withdraw_statement,
    write_statement,
)
from sweeps.service.running.answer import (
    answer_text,
    privacy_numbers,
    sweep_answer,
    trials_frame,
    write_answer,
)
from sweeps.service.running.clock import Clock, SystemClock
from sweeps.service.running.display import displayed, doing, put_result
from sweeps.service.running.outbox import AT_A_STOP, AT_THE_END, Outbox, patiently
from sweeps.service.running.reporting import Reporter
from sweeps.service.running.sealed import SealedSweep
from sweeps.service.running.seen import files_of_workers
from sweeps.service.running.stopping import stopped_at
from sweeps.service.running.terminal import (
    count,
    duration,
    estimate_text,
    headline,
    name_suffix,
    print_plan,
    question_text,
    run_name,
    say,
    say_link,
    short_name,
    warn,
)
from sweeps.service.running.total import (
    Limits,
    TrialsOf,
    fit_of_resumed,
    fit_text,
    fitted,
    fixes_noise,
    what_would_fit,
)
from sweeps.service.running.tune import (
    DiskFull,
    RaySession,
    Stopped,
    check_this_machine,
    no_room_text,
    ray_session,
    run_trials,
    trials_at_once,
)
from sweeps.service.storage.calibrations import CalibrationCache, calibrations
from sweeps.service.storage.folder import Repetition, SweepFolder, find_folder, known_params, named_folder
from sweeps.service.storage.log import BEGUN, ENDED, FAILED, FINISHED, SweepLog
from sweeps.service.storage.runs import tracking_address
from sweeps.service.storage.slot_files import SlotFiles
from trainers.config.training import TrainingConfig
from trainers.config.tree import changed
from trainers.data.dataset import TrainingData
from trainers.evaluation.references import reference_scores
from trainers.files.resuming import CONFIG_FILE, resume_line
from trainers.files.storage import check_writable, details_kept, storage_root
from trainers.tracking.runs import ROLE_TAG, STOPPED_TAG, SWEEP_TAG, TRIAL_ROLE, Tracker
from trainers.tracking.server import (
    NoAnswer,
    check_address,
    connect,
    is_database,
    runs_link,
)

SEALED_EXPERIMENT = "dpgcl"
"""Of all sealed sweeps: one of their own would tell when it began."""
SYSTEM_CLOCK = SystemClock()
_BEGINNING = ""
"""What the server gets before the first trial, in the queue of their names."""
Figure = Callable[[str, str, Path], Sequence[Path]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a sweep.

    Attributes:
      code: exit code.
      plan: the sweep's.
      folder: where its results lie; None after a dry run.
      results: of its finished trials, by name; none of a sealed sweep.
      statement: of an open sweep that ran and could be stated.
      answer: of an open sweep that ran and has scores.
    """

    code: int
    plan: SweepPlan
    folder: SweepFolder | None = None
    results: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    statement: PrivacyStatement | None = None
    answer: Answer | None = None


def run_sweep(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    figure: Figure,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Run a sweep from plan to figure and return the exit code.

    Everything the user can have got wrong is found before the first worker starts, and nothing is
    written before that.

    Args:
      question: name of the sweep, for example `group-size`.
      options: the user's.
      points: the sweep's points.
      figure: draws the sweep's figure from MLflow alone: (tracking uri, sweep name, folder) → files.
      clock: that a sealed sweep is published by.

    Returns:
      0; 1 when trials failed or MLflow did not take all results (`--resume` continues), or when every
      training was left out; 128 + signal when stopped.

    Raises:
      DpgclError: bad input; exit code 2.
    """
    with errors_in_flags(type(options)):
        return execute(question, options, points, figure, clock=clock).code


def execute(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    figure: Figure | None,
    *,
    earlier: Earlier | None = None,
    kind: type[OpenSweep] | None = None,
    told: SweepOptions | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Outcome:
    """Run a sweep as `run_sweep`, for code that goes on with its results.

    Args:
      question, options, points: as `run_sweep`.
      figure: None for none.
      earlier: the sweep whose results chose these points; its cost is added.
      kind: of an open sweep that plans, shows or chooses its trials in its own way.
      told: the options that repeat all of it, where these are those of a part.
      clock: that a sealed sweep is published by.
    """
    with displayed(quiet=options.service.is_quiet):
        return _execute(question, options, points, figure, earlier=earlier, kind=kind, told=told, clock=clock)


def _execute(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    figure: Figure | None,
    *,
    earlier: Earlier | None,
    kind: type[OpenSweep] | None,
    told: SweepOptions | None,
    clock: Clock,
) -> Outcome:
    kind = kind or OpenSweep
    data, service = options.data, options.service
    check_ledger_options(data, options.ledger, dry_run=service.dry_run)
    ledger, dataset_id = open_ledger(data, options.ledger), options.ledger.dataset_id
    registered = with_registered_number(options.mechanism, ledger, dataset_id)
    options = dataclasses.replace(options, mechanism=registered)
    root = _checked_root(options.storage)
    uri = tracking_address(options.storage.tracking_uri, root)
    say(f"storage: {root}{_resumed_text(options.storage)}")
    _check_server(uri)
    doing("loading the data and finding the noise")
    slot_files = SlotFiles.of(data, root, has_ledger=ledger is not None)
    with details_kept(root):
        records, notes = load_training_data(
            data,
            score_on_held_out=options.evaluation.score_on_held_out,
            num_records_public=options.mechanism.num_records_public,
            slots_for=slot_files.holding,
        )
    with calibrations(root) as found:

        def trials_of(options: SweepOptions, points: Sequence[Point]) -> Sequence[Trial]:
            return kind.trials(options, points, records, found.folder)

        asked = options
        options, points, lowered = fitted_to_size(options, points, num_records(records))
        limits = Limits(total_epsilon=service.total_epsilon, ledger=ledger, dataset_id=dataset_id)
        fixed = kind.fixes_noise(options, points)
        given, fit = options, None
        if service.total_epsilon is not None:
            fit = _fit(question, options, points, trials_of, limits, root=root, fixed=fixed)
            options = _with_fit(options, fit)
        plan = kind.planned(
            question,
            options,
            points,
            records,
            notes=[*notes, *lowered, *marks_note(data, ledger)],
            calibration_folder=found.folder,
            earlier=earlier,
        )
        plan = dataclasses.replace(plan, fit=fit)
        folder = find_folder(
            root,
            name=options.storage.name,
            fingerprint=plan.fingerprint,
            resume=options.storage.resume,
            params=plan.params(),
            prefix=sweep_prefix(question, options),
        )
        budget = sweep_budget(plan, ledger, dataset_id, folder) if options.release.is_open else None
        check_account(folder, ledger, dataset_id)
        check_starts(plan.private_starts, ledger)
        if not plan.release.is_open:
            plan = _with_publication(plan, folder, service)
        kind.show(plan, in_full=service.dry_run)
        if fit is not None:
            say(f"--total-epsilon: {fit_text(fit, limits, [*plan.trials, *plan.later])}")
        if budget is not None:
            try:
                budget.check()
            except BudgetExceeded as error:
                more = ""
                with suppress(ConfigError):  # no ε may be given where a search has a range of them
                    more = what_would_fit(given, points, trials_of, limits, fixed=True)
                raise BudgetExceeded(f"{error}{more}") from error
            say(budget.text())
        if service.dry_run:
            _tell_what_is_missing(options)
            doing("measuring a step of every kind")
            say(estimate_text(plan))
            if plan.publication is not None:
                say(f"estimate: {plan.publication.text()}")
            return Outcome(code=0, plan=plan)
        check_this_machine(service, options.performance)
        known = folder.read_plan()
        is_closed = data.are_private and options.release.is_open  # a sealed one has `trusted/` for it
        with folder.locked(is_closed=is_closed), ThreadPoolExecutor(1) as beside:
            if folder.read_plan() != known:
                raise StorageError(
                    f"the sweep {folder.name!r} was run by another process while this one planned; add "
                    "--resume to continue it, or choose another --name"
                )
            if records.slots is not None:
                slot_files.keep(records.slots)
            named = experiment_of(plan)
            # MLflow opens while Ray starts.
            opened = beside.submit(lambda: patiently(lambda: Tracker.open(uri, root, *named), warn))
            again = Repetition(
                options=options_text(told or asked),
                command=command_of(told or asked, kind.whole_name(folder.name)),
            )
            if not options.release.is_open:
                doing("opening MLflow")
                sealed = SealedSweep(plan, folder, ledger, dataset_id, service, again, clock)
                code = sealed.run(opened.result(), ray_session, run_trials)
                return Outcome(code=code, plan=plan, folder=folder)
            account = account_of(ledger, dataset_id)
            sweep = kind(plan, folder, found, uri, budget, account, service, again)
            code = sweep.run(opened, figure)
            return Outcome(
                code=code,
                plan=plan,
                folder=folder,
                results=sweep.results(),
                statement=sweep.statement,
                answer=sweep.answer,
            )


def _checked_root(storage: StorageOptions) -> Path:
    """Return the storage folder, which can be written and holds no sweep of the name that is running."""
    root = storage_root(storage.folder)
    check_writable(root)
    if storage.name is not None:
        named_folder(root, storage.name).refuse_running()
    return root


def _resumed_text(storage: StorageOptions) -> str:
    return f"; resuming {storage.name}" if storage.resume and storage.name is not None else ""


def sweep_prefix(question: str, options: SweepOptions) -> str:
    """Return the name of a new sweep, unless it is taken."""
    return f"{question}-{short_name(options.data.dataset)}-{name_suffix(options.release)}"


def experiment_of(plan: SweepPlan) -> tuple[str, str]:
    """Return name and description of the MLflow experiment of a sweep: one for each question and data set."""
    if not plan.release.is_open:
        return SEALED_EXPERIMENT, ""
    dataset, question = plan.source.dataset, plan.question.removesuffix("-tuning")
    asked = QUESTIONS.get(question, OWN).asked
    about = (
        f"{asked} Sweeps of {question} on {dataset}: one parent run for each sweep, whose description "
        "begins with its answer, and one run below for each training."
    )
    return f"{question} on {short_name(dataset)}", about


def _fit(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    trials_of: TrialsOf,
    limits: Limits,
    *,
    root: Path,
    fixed: bool,
) -> Fit:
    """Return how the sweep fits its total ε; that of a resumed one, whose charges stand already, is known."""
    if options.storage.resume:
        known = known_params(root, options.storage.name)
        if (fit := fit_of_resumed(options, question, known)) is not None:
            return fit
    doing("finding how many repeats fit" if fixed else "finding the largest ε of one training")
    return fitted(options, points, trials_of, limits, fixed=fixed)


def _with_fit(options: SweepOptions, fit: Fit) -> SweepOptions:
    found = {} if fit.epsilon is None else {"epsilon": fit.epsilon}
    return changed(options, repeats=fit.repeats, **found)


def _with_publication(plan: SweepPlan, folder: SweepFolder, service: ServiceOptions) -> SweepPlan:
    """Return the plan of a sealed sweep with its moment: a new one, or that of the sweep that is resumed."""
    if (known := folder.read_plan()) is not None:
        return dataclasses.replace(plan, publication=Publication.read(known.get("publication")))
    longest = max(seconds_of_trials(plan))
    at_once = trials_at_once(service, plan.trials[0].config.performance)
    return dataclasses.replace(plan, publication=Publication.planned(plan.release, longest, at_once))


def _tell_what_is_missing(options: SweepOptions) -> None:
    """Say in a dry run what would refuse the sweep itself."""
    try:
        check_this_machine(options.service, options.performance)
    except ConfigError as error:
        say(f"note: this machine cannot run it: {error}")
    if missing := ledger_missing(options.data, options.ledger):
        say(f"note: it would be refused: {missing}")


def _check_server(uri: str) -> None:
    """Refuse a server that does not answer before planning takes its minutes.

    A database is opened only when the plan is good, for that may write its file.
    """
    check_address(uri)
    if not is_database(uri):
        patiently(lambda: connect(uri), warn)


class OpenSweep:
    """One sweep under way.

    Attributes:
      answers: whether it ends in an answer to its question.
    """

    answers = True
    _tracker: Tracker

    @staticmethod
    def trials(
        options: SweepOptions, points: Sequence[Point], data: TrainingData, calibration_folder: Path
    ) -> Sequence[Trial]:
        """Return all trials that its cost is about."""
        return planned_trials(options, points, data, calibration_folder)

    @staticmethod
    def fixes_noise(options: SweepOptions, points: Sequence[Point]) -> bool:
        """Whether options or points give the noise of every private training."""
        return fixes_noise(options, points)

    @staticmethod
    def planned(
        question: str,
        options: SweepOptions,
        points: Sequence[Point],
        data: TrainingData,
        *,
        notes: Sequence[str],
        calibration_folder: Path,
        earlier: Earlier | None,
    ) -> SweepPlan:
        """Return the plan."""
        return build_plan(
            question,
            options,
            points,
            data,
            notes=notes,
            calibration_folder=calibration_folder,
            earlier=earlier,
        )

    @staticmethod
    def whole_name(name: str) -> str:
        """Return the name that the sweep is resumed by; of the first of two sweeps, that of the second."""
        return name

    @staticmethod
    def show(plan: SweepPlan, *, in_full: bool) -> None:
        """Print the plan."""
        print_plan(plan, in_full=in_full)

    def __init__(
        self,
        plan: SweepPlan,
        folder: SweepFolder,
        found: CalibrationCache,
        uri: str,
        budget: SweepBudget | None,
        account: dict[str, Any] | None,
        service: ServiceOptions,
        again: Repetition,
    ) -> None:
        self._plan, self._folder, self._found, self._uri = plan, folder, found, uri
        self._budget, self._account, self._service = budget, account, service
        self._again = again
        self.statement: PrivacyStatement | None = None
        self.answer: Answer | None = None
        self._trials = {trial.name: trial for trial in plan.trials}
        self._hashes = dict(plan.hashes)
        self._checks: dict[Any, dict[str, float]] = {}
        self._results: dict[str, dict[str, Any]] | None = None
        self._parent = ""
        self._untracked: list[str] = []
        self._before: dict[str, float] | None = None
        self._runs: dict[str, str] | None = None
        self._outbox = Outbox(self._track, warn, str(folder.path))
        self._log = SweepLog(folder.path)
        self._reporter = Reporter(uri, folder.path)
        self._unstated = False

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of finished trials, by name; read once, as only this driver writes here."""
        if self._results is None:
            self._results = self._folder.finished(self._hashes)
        return self._results

    def run(self, opened: Future[Tracker], figure: Figure | None) -> int:
        with self._outbox:
            return self._run(opened, figure)

    def _run(self, opened: Future[Tracker], figure: Figure | None) -> int:
        done = self.results()
        left_out = self._left_out(done)
        over = done.keys() | left_out.keys()
        remaining = [trial for trial in self._plan.trials if trial.name not in over]
        self._tell_restarts(over)
        failed: dict[str, str] = {}
        try:
            if remaining:
                performance = self._plan.trials[0].config.performance
                storage, needed = self._folder.root, files_of_workers(self._plan)
                with ray_session(self._service, performance, storage, needed) as session:
                    self._begin(opened, done, remaining)
                    failed = self._train(session, remaining)
            else:
                doing("opening MLflow")
                self._begin(opened, done, remaining)
        except Stopped as stopped:
            self._untracked = self._outbox.finish(AT_A_STOP)
            self._close("KILLED")
            name = signal.Signals(stopped.signal_number).name
            warn(f"stopped by {name}; continue with {resume_line(self._folder.path)}")
            say(f"note: {_stop_note(self._plan.trials[0].config, is_saved=stopped.is_saved)}")
            return 128 + stopped.signal_number
        except DiskFull:
            self._untracked = self._outbox.finish(AT_A_STOP)
            self._close("KILLED")
            warn(no_room_text(self._folder))
            return 1
        for name, why in left_out.items():
            warn(f"{name}: {why}")
        code = self._end(failed, figure)
        self._report()
        say(f"files: {self._folder.path}")
        return code

    def _left_out(self, done: Mapping[str, Any]) -> dict[str, str]:
        """Return the trainings that no attempt may continue any more, by name, and why.

        What the others release is charged for all trainings, these included, so they go on without them.
        """
        found = {}
        for name, trial in self._trials.items():
            mechanism = trial.config.mechanism
            if name in done or not self._folder.starts(name).num_starts:
                continue
            every = trial.config.performance.checkpoint_every_steps
            known = self._folder.checkpoints(name, every_steps=every)
            if why := known.refusal(mechanism.num_steps, mechanism.num_restart_steps):
                found[name] = why
        return found

    def _tell_restarts(self, over: Collection[str]) -> None:
        """Say of every training that goes on how much of R is left, the steps charged in advance."""
        for name, trial in self._trials.items():
            restarts = trial.config.mechanism.num_restart_steps
            if name in over or restarts is None or not self._folder.starts(name).num_starts:
                continue
            every = trial.config.performance.checkpoint_every_steps
            known = self._folder.checkpoints(name, every_steps=every)
            if known.drawn().num_attempts:
                say(f"{name}: {known.goes_on_text(restarts)}")

    def _train(self, session: RaySession, remaining: Sequence[Trial]) -> dict[str, str]:
        return run_trials(session, self._plan, self._folder, remaining, self._on_result, self._budget)

    def _begin(
        self, opened: Future[Tracker], done: dict[str, dict[str, Any]], remaining: Sequence[Trial]
    ) -> None:
        """Open the parent run and the folder, charge the ledger, and send what MLflow lacks of results.

        No worker has started yet; where the ledger refuses, none does.
        """
        self._tracker = opened.result()
        self._found.keep()
        named, described = self._folder.name, question_text(self._plan)
        shared = self._plan.params(), self._plan.tags()
        sweep_id = self._sweep_id()
        self._parent = patiently(
            lambda: self._tracker.start_sweep(named, *shared, described, sweep_id=sweep_id), warn
        )
        if self._folder.read_plan() is None:
            facts = {"fingerprint": self._plan.fingerprint, "params": self._plan.params()}
            facts["data_is"] = self._plan.tags()["data_is"]
            self._folder.create(facts | {"sweep_id": sweep_id, "account": self._account}, self._again)
            self._note_beginning()
        self._charge(remaining)
        if remaining:
            withdraw_statement(self._folder.path, self._plan.question)
            self._reporter.withdraw()
        self._outbox.put(_BEGINNING)
        for name, result in done.items():
            self._settle(name, result)
            self._outbox.put(name)
        begun = f"{len(done)} of {count(len(self._trials), 'trial')} done"
        say(f"sweep: {self._folder.name} ({begun})")
        self._log.write(BEGUN, "", begun)
        self._started, self._num_before, self._num_done = time.monotonic(), len(done), len(done)

    def _sweep_id(self) -> str:
        """Return what tells the sweep from any other: that of its plan, or a new one."""
        if (plan := self._folder.read_plan()) is not None:
            return str(plan["sweep_id"])
        return self._budget.sweep_id if self._budget is not None else new_sweep_id()

    def _note_beginning(self) -> None:
        """Note what the ledger has left before it is charged: for the report, which tells it."""
        self._before = {}
        with suppress(LedgerError):
            if self._budget is not None and (left := self._budget.left()[0]) is not None:
                self._before = {LEFT_BEFORE: left}

    def _track_beginning(self) -> None:
        """Log what repeats the sweep, and ask once which trials have runs.

        A server that refuses this may take the trials all the same: each is asked for by itself then.

        Raises:
          NoAnswer: the server does not answer; call again.
        """
        try:
            if self._before is not None:
                self._tracker.log_artifact(self._parent, self._folder.path / CONFIG_FILE)
                self._tracker.log_metrics(self._parent, self._before)
                self._before = None
            self._runs = self._tracker.trial_statuses(self._parent)
        except NoAnswer:
            raise
        except TrackingError:
            return

    def _charge(self, remaining: Sequence[Trial]) -> None:
        if self._budget is None:
            return
        try:
            source = self._plan.source  # public data may be charged too, but are never marked private
            self._budget.begin(remaining, data_path(source.dataset) if source.are_private else None)
        except LedgerError:
            self._close("FAILED")
            raise

    def _settle(self, name: str, result: dict[str, Any]) -> None:
        """Settle a finished trial; a ledger that is gone keeps the whole charge until a later attempt."""
        try:
            if self._budget is not None:
                self._budget.settle(name, result["metrics"])
        except LedgerError as error:
            warn(f"warning: {name} is not settled: {error}")

    def _on_result(self, name: str, result: dict[str, Any]) -> None:
        kept: dict[str, Any] = {"config_hash": self._hashes[name], "params": self._trials[name].params}
        kept["ended_ms"] = int(time.time() * 1000)
        self._folder.keep(name, result | kept)
        self.results()[name] = result | kept
        self._settle(name, result)
        self._outbox.put(name)
        self._num_done += 1
        spent, done = time.monotonic() - self._started, self._num_done
        left = spent / max(1, done - self._num_before) * (len(self._trials) - done)
        shown = ", ".join(headline(result["metrics"]))
        if (step := stopped_at(self._trials[name], result["metrics"])) is not None:
            shown += f"; ended by its scores after {count(step, 'step')}"
        put_result(f"[{done}/{len(self._trials)}] {name}: {shown} ({duration(left)} left)")
        self._log.write(FINISHED, name, shown)

    def _track(self, name: str) -> None:
        """Log a finished trial, or the beginning, beside the loop. Raises as `Tracker.log_trial`."""
        if name == _BEGINNING:
            self._track_beginning()
            return
        if (self._runs or {}).get(name) == "FINISHED":
            return
        trial, result = self._trials[name], self.results()[name]
        is_new = self._runs is not None and name not in self._runs
        try:
            self._tracker.log_trial(
                self._parent,
                name,
                trial.params,
                _without_constants(trial, result["metrics"]) | self._cross_checks(trial, result["metrics"]),
                result["series"],
                self._tags_of(trial, result["metrics"]),
                axes=self._axes(trial),
                run_name=run_name(trial),
                times_ms=times_ms(result),
                is_new=is_new,
            )
        except TrackingError:
            self._runs = None  # a run of it may have been begun
            raise
        self._reporter.refresh()

    def _axes(self, trial: Trial) -> dict[str, Any]:
        """Return what the sweep's question is about, of one training."""
        question = QUESTIONS.get(self._plan.question.removesuffix("-tuning"), OWN)
        if question is OWN:
            return {POINT: trial.name.rpartition("-r")[0]}
        if question.axis.column in trial.params:
            return {question.axis.column: trial.params[question.axis.column]}
        every = [each.params for each in self._plan.trials]
        varied = [name for name in question.splits if len({str(params.get(name)) for params in every}) > 1]
        return {name: trial.params[name] for name in varied if name in trial.params}

    def _tags_of(self, trial: Trial, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The tags of a trial's run; its restarts are told where the charge for them tells of them, too.

        Private trainings without a ledger are charged T + R steps whatever happens, so that nothing which
        leaves the sweep says how often they were restarted.
        """
        tags = self._plan.tags() | {"guarantee_label": trial.config.guarantee_label}
        in_advance = trial.config.mechanism.num_restart_steps is not None
        told = [] if in_advance else self._log.restarts(trial.name)
        if metrics is not None and (step := stopped_at(trial, metrics)) is not None:
            tags |= {STOPPED_TAG: str(step)}
        return tags | {"restarts": "; ".join(told)} if told else tags

    def _cross_checks(self, trial: Trial, metrics: dict[str, float]) -> dict[str, float]:
        if trial.config.guarantee_label != "proven":
            return {}
        drawn = what_one_drew(trial, self._folder, {"metrics": metrics})
        if not trial.config.mechanism.rules.plain_event:
            return _with_lost(trial, metrics, drawn)
        key = (trial_class(trial, drawn), trial.config.mechanism.target_delta)
        if key not in self._checks:
            found = cross_checks(*key)
            self._checks[key] = {name: value for name, value in found.items() if math.isfinite(value)}
        return self._checks[key] | _with_lost(trial, metrics, drawn)

    def _end(self, failed: dict[str, str], figure: Figure | None) -> int:
        results = self.results()
        doing("stating, drawing and answering", aloud=False)
        self._untracked = self._outbox.finish(AT_THE_END)
        for name, error in failed.items():
            warn(f"failed: {name} ({error})")
            self._log.write(FAILED, name, error)
        if lost := [name for name in self._untracked if name != _BEGINNING]:
            warn(f"MLflow did not take {count(len(lost), 'result')}; kept in {self._folder.path}.")
        unfinished = self._tell_unfinished(results, failed)
        if self._budget is not None and self._budget.lost is not None:
            warn(
                f"the ledger is gone, and every training stopped at its next checkpoint: {self._budget.lost}"
            )
        if not self._untracked:
            self._state(results)
        if results and self.answers:
            self._answer(results, self._reference_scores())
        if results and figure is not None and not self._untracked:
            self._draw(figure)
        self._say_link()
        again = f"continue with {resume_line(self._folder.path)}"
        if failed or self._untracked or self._unstated or unfinished:
            self._close("KILLED" if unfinished and not failed else "FAILED")
            warn(again)
            return 1
        if not results:
            self._close("FAILED")
            warn("no training was finished")
            return 1
        self._close("FINISHED")
        return 0

    def _tell_unfinished(self, results: Mapping[str, Any], failed: Mapping[str, str]) -> bool:
        """Say which trainings the sweep's time was too short for; return whether there are any.

        Those that had not begun have drawn nothing, and go back to the ledger.
        """
        over = results.keys() | failed.keys() | self._left_out(results).keys()
        left = [name for name in self._trials if name not in over]
        if self._service.time_budget is None or not left:
            return False
        begun = [name for name in left if self._folder.starts(name).num_starts]
        waiting = [name for name in left if name not in begun]
        say(
            f"the time is over (--time-budget {self._service.time_budget:g} min): "
            f"{count(len(begun), 'training')} stopped and saved, {len(waiting)} not begun"
        )
        if self._budget is not None:
            returned = self._budget.give_back(waiting)
            say(f"the ledger has the steps of {returned} back; a resume reserves them again")
        return True

    def _state(self, results: dict[str, dict[str, Any]]) -> None:
        """Write, log and print the privacy statement, with what restarts have repeated.

        Comes before the figure, which quotes its tuning cost.
        """
        try:
            drawn = what_was_drawn(self._plan, self._folder, results)
            ledger = self._budget.statement() if self._budget is not None else None
            self.statement = statement = self._statement(drawn, ledger)
            if statement.cost != self._plan.cost:
                self._tracker.set_tags(self._parent, self._plan.tags(statement.cost))
            paths = write_statement(statement, self._folder.path)
            say(statement_text(statement))
            for path in paths:
                self._tracker.log_artifact(self._parent, path)
        except StorageError as error:
            self._unstated = True
            warn(f"there is no privacy statement: {error}")
        except DpgclError as error:
            warn(f"warning: the privacy statement: {error}")

    def _statement(self, drawn: Mapping[str, Charged], ledger: LedgerStatement | None) -> PrivacyStatement:
        return build_statement(self._plan, self._folder.name, drawn=drawn, ledger=ledger)

    def _reference_scores(self) -> dict[str, float]:
        """Score what needs no training, once per sweep: of public records alone, so it costs no ε."""
        data, evaluation = self._plan.data, self._plan.trials[0].config.evaluation
        if not self._service.references or self._untracked or (data.queries is None and not data.probes):
            return {}
        try:
            logged = self._tracker.metrics_of(self._parent)
            if known := {name: value for name, value in logged.items() if is_reference(name)}:
                return known
            doing("scoring raw pixels and HOG")
            scores = reference_scores(data, evaluation)
            self._tracker.log_metrics(self._parent, scores)
        except (DpgclError, MemoryError) as error:
            warn(f"warning: no scores of raw pixels and HOG: {error}")
            return {}
        return scores

    def _draw(self, figure: Figure) -> None:
        try:
            for path in figure(self._uri, self._folder.name, self._folder.path):
                self._tracker.log_artifact(self._parent, path)
        except DpgclError as error:
            warn(f"warning: no figure: {error}")

    def _answer(self, results: dict[str, dict[str, Any]], references: Mapping[str, float]) -> None:
        """Write, log and print the answer; MLflow gets it where it has all results.

        Comes before the figure, which quotes it.
        """
        try:
            self.answer = answer = self._answered(results, references)
            if answer is None:
                return
            warn(answer_text(answer))
            path = write_answer(answer, self._folder.path)
            if not self._untracked:
                self._tracker.log_artifact(self._parent, path)
                self._tracker.log_metrics(self._parent, answer.metrics())
                self._tracker.set_note(self._parent, answer.first_lines())
        except DpgclError as error:
            warn(f"warning: the answer: {error}")

    def _answered(
        self, results: Mapping[str, Mapping[str, Any]], references: Mapping[str, float]
    ) -> Answer | None:
        rows = [
            {"trial": name, "guarantee_label": self._trials[name].config.guarantee_label, **results[name]}
            for name in self._trials
            if name in results and stopped_at(self._trials[name], results[name]["metrics"]) is None
        ]
        if not rows:
            return None
        cost = self.statement.cost if self.statement is not None else self._plan.cost
        left = None
        if self._budget is not None:
            with suppress(LedgerError):  # gone meanwhile: the answer does without
                left = self._budget.left()
        trials = trials_frame(rows, {**self._plan.tags(), **references})
        numbers = privacy_numbers(cost, left)
        return sweep_answer(self._plan.question, trials, numbers, self._folder.outcomes())

    def _report(self) -> None:
        """Write the report for the last time, log it, and say where it lies; without MLflow there is none."""
        if self._untracked:
            return
        try:
            path = self._reporter.finish()
            say(f"report: {path}")
            self._tracker.log_artifact(self._parent, path)
        except (DpgclError, OSError) as error:
            warn(f"warning: the report: {error}")

    def _say_link(self) -> None:
        """Say where MLflow shows the sweep's trainings, the best one first."""
        tags = {SWEEP_TAG: self._folder.name, ROLE_TAG: TRIAL_ROLE}
        score = None if self.answer is None else self.answer.score
        link = runs_link(self._uri, self._tracker.experiment_id, tags, score)
        ui = f"mlflow ui --backend-store-uri {shlex.quote(self._uri)}  # then " * is_database(self._uri)
        say_link(f"runs: {ui}", link)

    def _close(self, status: str) -> None:
        """Say in MLflow how the sweep ended; one that does not take results now is not asked for more."""
        self._log.write(ENDED, "", status)
        if self._untracked:
            return
        try:
            self._tracker.finish_sweep(self._parent, status)
        except TrackingError as error:
            warn(f"warning: {error}")


def times_ms(result: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return when a training began and ended; None where its duration is withheld, as of private records."""
    seconds = [result["metrics"].get(name) for name in ("train_seconds", "evaluation_seconds")]
    if "ended_ms" not in result or seconds[0] is None:
        return None
    return result["ended_ms"] - int(1000 * sum(each or 0.0 for each in seconds)), result["ended_ms"]


def _without_constants(trial: Trial, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without the number of steps where it is the planned one, a param."""
    planned = trial.config.mechanism.num_steps
    return {name: value for name, value in metrics.items() if (name, value) != ("num_steps_done", planned)}


def _stop_note(config: TrainingConfig, *, is_saved: bool) -> str:
    """What a stop costs."""
    if is_saved:
        return (
            "a training that has saved its step repeats none; one that was lost repeats steps, and is charged"
        )
    restarts = config.mechanism.num_restart_steps
    if restarts is None:
        steps = count(config.performance.checkpoint_every_steps, "repeated step")
        return f"an interrupted private training is charged up to {steps} on top"
    steps = count(restarts, "repeated step")
    return f"{steps} of each training, charged in advance: one that would repeat more is left out"


def _with_lost(trial: Trial, metrics: dict[str, float], drawn: Charged | None) -> dict[str, float]:
    """The metrics of a training that differ once attempts count of which its checkpoints know nothing."""
    left_out = steps_left_out(trial, metrics)
    if drawn is None or drawn.num_steps <= metrics["num_steps_charged"] + left_out:
        return {}
    epsilon = trial.config.epsilon(
        drawn.num_steps, num_restarts=drawn.num_first_steps - 1, num_scorings=drawn.num_scorings
    )
    return {"num_steps_charged": float(drawn.num_steps - left_out), "epsilon": epsilon}
