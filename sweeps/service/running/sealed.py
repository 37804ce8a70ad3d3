"""Sealed sweeps: K trials in secret, of which one is published.

The order is what the theorems of `dpgcl_core.accounting.tuning.bounds` need: the tuned cost is charged, K and
all draws are made from the operating system's entropy and written down, then the trials run, each a fresh
independent draw of (setting, training); the best one alone is published, with ties broken by coins drawn
beforehand. A trial that fails, or that a crash interrupts, counts as the worst score and is never repeated.

The moment of publication is fixed before K is drawn (`sweeps.service.planning.publication`). Until then
nothing is written outside `trusted/`, nothing is sent to MLflow, and the process goes on; what is published
has been prepared by then, so that the moment itself takes as long whatever K was, and the process ends then.

Who sees what. Trusted are the operator, the terminal, the cluster's logs and `trusted/` in the sweep's
folder, where K and the progress lie. Readers of MLflow, of the statement, of the ledger and of `release/`
find one run, without its place among the others. Times that servers and file systems note by themselves are
those of the start or of the moment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from dashboards.compose.answer import Answer
from dashboards.errors import DashboardError
from dpgcl_core.accounting.filters import FILTER_ORDERS, StepClass, composed_event
from dpgcl_core.accounting.tuning.bounds import papernot_steinke_rdp
from dpgcl_core.accounting.tuning.laws import TrialCountLaw
from dpgcl_core.accounting.tuning.modes import SEALED, SEALED_THRESHOLD
from dpgcl_core.accounting.tuning.trials import cases_of
from dpgcl_core.errors import ConfigError, LedgerError, StorageError
from dpgcl_core.ledger.chain import Head
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import LedgerStatement
from dpgcl_core.release.metrics import Release, find_metric
from dpgcl_core.release.statement import RESEARCH, PrivacyStatement
from sweeps.service.options.data import data_path
from sweeps.service.options.release import ReleaseOptions, trial_law
from sweeps.service.options.service import ServiceOptions
from sweeps.service.planning.cost import candidates_of
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.account import account_of, bind_images, unit_of
from sweeps.service.privacy.budget import new_sweep_id, what_is_left
from sweeps.service.privacy.statement import STATEMENT, build_statement, statement_text, write_statement
from sweeps.service.running.answer import (
    answer_text,
    privacy_numbers,
    sweep_answer,
    trials_frame,
    write_answer,
)
from sweeps.service.running.clock import Clock
from sweeps.service.running.seen import files_of_workers
from sweeps.service.running.terminal import duration, say, warn
from sweeps.service.running.tune import DiskFull, Stopped, no_room_text
from sweeps.service.storage.folder import Repetition, SweepFolder, config_hash, write_json
from trainers.export.finished import PUBLISHED, released_state
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.durable import make_folder
from trainers.files.resuming import resume_line
from trainers.files.weights import write_weights
from trainers.tracking.runs import SEALED_TIME_MS, Tracker

_RESULT = "result.json"
_HIDDEN_PARAMS = ("repeat", "num_candidates")
_HIDDEN_METRICS = ("epsilon", "epsilon_rdp", "epsilon_prv", "num_restarts")
RunTrials = Callable[..., dict[str, str]]
Session = Callable[..., AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One trial as it was drawn, before any trial ran.

    Attributes:
      candidate: which setting.
      public_seed: of its initialisation and views; drawn too, for a counted one would tell its place.
      coin: breaks ties.
    """

    candidate: int
    public_seed: int
    coin: int


def draw_trials(law: TrialCountLaw, num_candidates: int) -> tuple[Draw, ...]:
    """Return K independent draws, K from `law` and all from the operating system's entropy."""
    return tuple(
        Draw(
            candidate=secrets.randbelow(num_candidates),
            public_seed=secrets.randbelow(2**31),
            coin=secrets.randbits(62),
        )
        for _ in range(law.draw())
    )


def drawn_trials(candidates: Sequence[Trial], draws: Sequence[Draw]) -> tuple[Trial, ...]:
    """Return the trials of the draws; their names number them, and stay on the trusted side."""
    found = []
    for number, draw in enumerate(draws):
        candidate = candidates[draw.candidate]
        config = dataclasses.replace(candidate.config, public_seed=draw.public_seed)
        params = {k: v for k, v in candidate.params.items() if k not in _HIDDEN_PARAMS}
        params |= {"public_seed": draw.public_seed}
        found.append(Trial(name=f"draw-{number}", config=config, params=params))
    return tuple(found)


def choose(
    trials: Sequence[Trial],
    draws: Sequence[Draw],
    results: Mapping[str, Mapping[str, Any]],
    *,
    select_by: str,
    min_score: float | None,
) -> Trial | None:
    """Return the trial to publish; None where none has a score (or none reaches `min_score`).

    Without a threshold it is the one with the best score, with it the first one that reaches it.
    """
    scored = []
    for trial, draw in zip(trials, draws, strict=True):
        score = results.get(trial.name, {}).get("metrics", {}).get(select_by)
        if score is not None and np.isfinite(score):
            scored.append((score, draw.coin, trial))
    if min_score is not None:
        return next((trial for score, _, trial in scored if score >= min_score), None)
    return max(scored, key=lambda each: each[:2])[2] if scored else None


def rdp_of_best(
    release: ReleaseOptions, trials: Sequence[Trial], max_trials: int | None = None
) -> Callable[[float], float]:
    """Return the RDP curve of the best of a secret number of trials, by Papernot and Steinke (2022).

    With noised scores it is the larger curve of the two cases of `dpgcl_core.accounting.tuning.trials`.
    """
    candidates, weights = candidates_of(trials)
    law = trial_law(release, max_trials)

    def curve_of(case: Sequence[Mapping[StepClass, int]], order: float) -> float:
        orders = np.array(sorted({*FILTER_ORDERS, order}))
        moments = [
            np.log(weight) + (orders - 1) * _rdp(steps, orders)
            for steps, weight in zip(case, weights, strict=True)
        ]
        one = np.logaddexp.reduce(moments, axis=0) / (orders - 1)
        return float(papernot_steinke_rdp(orders, one, law)[np.searchsorted(orders, order)])

    return lambda order: max(curve_of(case, order) for case in cases_of(candidates))


def _rdp(steps: Mapping[StepClass, int], orders: Any) -> Any:
    if not steps:  # a candidate without noised scores, to a record that is scored
        return np.zeros(len(orders))
    accountant = RdpAccountant(orders.tolist(), NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(composed_event(steps))
    rdp = np.asarray(accountant.rdp, dtype=np.float64)
    return np.where(rdp > 0, rdp, np.inf)  # what overflowed must not look free


def reserve(ledger: Ledger, dataset_id: str, plan: SweepPlan, label: str) -> LedgerStatement:
    """Charge the tuned bound once, before K is drawn; return the ledger's lines at that moment.

    By its RDP curve where the cap has an order and the mode a theorem, by basic composition otherwise. A
    later head would stand among rows with times, and tell how long the sweep took.

    Raises:
      BudgetExceeded, LedgerError: as `Ledger.reserve_sealed`; or the cost is not accounted.
    """
    cost, source = plan.cost, plan.source
    if cost is None or cost.tuned_epsilon is None:
        reason = cost.reason if cost is not None else "no candidate has a guarantee"
        raise LedgerError(f"a sealed sweep whose cost is not accounted cannot be charged: {reason}")
    path = data_path(source.dataset) if source.are_private else None
    if path is not None:
        for note in ledger.bind(dataset_id, path):
            say(f"note: {note}")
        bind_images(ledger, dataset_id, source)
    has_curve = plan.release.mode == SEALED and not ledger.spent(dataset_id, with_pld=False).cap.quotas
    ledger.reserve_sealed(
        dataset_id,
        label=label,
        epsilon=cost.tuned_epsilon,
        delta=cost.delta,
        rdp_curve=rdp_of_best(plan.release, plan.trials, plan.max_trials) if has_curve else None,
        unit=unit_of(source),
        neighboring_relation=cost.neighboring_relation,
    )
    if path is not None:
        bind_images(ledger, dataset_id, source)
    return ledger.statement(dataset_id)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What was fixed when the sweep began.

    Attributes:
      draws: of its trials.
      ledger: the ledger's lines from the moment of the charge; None without a ledger.
      left: what the ledger had left then: ε and trainings; None without a ledger.
      started: seconds since the epoch, before anything was drawn.
    """

    draws: tuple[Draw, ...]
    ledger: LedgerStatement | None
    started: float
    left: tuple[float | None, int] | None = None


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What the one run of MLflow will hold."""

    outcome: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    statement: PrivacyStatement
    answer: Answer | None


@dataclass(frozen=True)
class SealedFolder:
    """A sealed sweep's folder: `trusted/` stays, `release/` may leave.

    Attributes:
      folder: of the sweep; it holds the lock and the plan, without K.
    """

    folder: SweepFolder

    @property
    def trusted(self) -> SweepFolder:
        """Where trials and checkpoints lie."""
        return SweepFolder(self.folder.path / "trusted")

    @property
    def release(self) -> Path:
        """What may be handed on: the statement, the published run and its weights."""
        return self.folder.path / "release"

    @property
    def outgoing(self) -> Path:
        """What will be in `release/` from the moment on."""
        return self.trusted.path / "outgoing"

    @property
    def is_published(self) -> bool:
        """Whether the moment has passed, and `release/` is complete."""
        return (self.release / _RESULT).exists()

    def begin(
        self,
        plan: SweepPlan,
        ledger: Ledger | None,
        dataset_id: str | None,
        again: Repetition,
        started: float,
    ) -> Begun:
        """Return the draws: new ones, charged before they are made, or those of the resumed sweep.

        Args:
          plan: with the moment of publication.
          ledger, dataset_id: what is charged.
          again: what repeats and continues the sweep.
          started: the time now; a resumed sweep keeps its own.

        Raises:
          LedgerError: it cannot be charged; nothing was drawn.
          StorageError: a resumed sweep has lost its draws. A new one is charged in full again.
        """
        path = self.trusted.path / "sealed.json"
        if self.folder.read_plan() is not None:
            begun = self._read(path)
            if ledger is not None and begun.ledger is None:
                raise LedgerError(
                    f"the sweep {self.folder.name!r} was begun without a ledger, and cannot be charged "
                    "before it draws any more; resume it as it was begun"
                )
            return begun
        if plan.publication is None:
            raise ConfigError(
                "a sealed sweep needs a moment of publication before it draws its number of trials"
            )
        charged = reserve(ledger, str(dataset_id), plan, self.folder.name) if ledger is not None else None
        # Before K is drawn, so that it tells nothing of it; later rows are of other times.
        left = what_is_left(ledger, str(dataset_id), plan.trials) if ledger is not None else None
        draws = draw_trials(trial_law(plan.release, plan.max_trials), len(plan.trials))
        self._make_trusted()
        ledger_lines = dataclasses.asdict(charged) if charged is not None else None
        drawn = [vars(draw) for draw in draws]
        write_json(path, {"draws": drawn, "ledger": ledger_lines, "started": started, "left": left})
        facts = {"fingerprint": plan.fingerprint, "params": plan.params(), "sweep_id": new_sweep_id()}
        if charged is not None:
            facts["head"] = vars(charged.head)
        fixed = {"account": account_of(ledger, dataset_id), "publication": plan.publication.as_dict()}
        self.folder.create(facts | fixed, again)
        return Begun(draws=draws, ledger=charged, started=started, left=left)

    def _make_trusted(self) -> None:
        """Make all that will lie in `trusted/`, whose own times others see: they are those of the start."""
        make_folder(self.trusted.path, mode=0o700)
        for name in ("trials", "checkpoints", "started", "drawn", "ray", self.outgoing.name):
            make_folder(self.trusted.path / name)

    def _read(self, path: Path) -> Begun:
        try:
            values = json.loads(path.read_text())
            draws = tuple(Draw(**draw) for draw in values["draws"])
            lines = values["ledger"]
            charged = LedgerStatement(**{**lines, "head": Head(**lines["head"])}) if lines else None
            left = None if values.get("left") is None else tuple(values["left"])
            return Begun(draws=draws, ledger=charged, started=float(values["started"]), left=left)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{path} is gone or damaged, and with it the secret number of trials: this sweep cannot "
                "go on, and its charge stays; start another one under a new --name, which is charged in full "
                "again"
            ) from error


class SealedSweep:
    """One sealed sweep under way.

    Args:
      plan: its candidates.
      folder: of the sweep, held by this process.
      ledger: that is charged; None without one.
      dataset_id: of the data in the ledger.
      service: resources of its trainings, of which none is restarted.
      again: what repeats and continues the sweep.
      clock: that the moment of publication is kept by.
    """

    def __init__(
        self,
        plan: SweepPlan,
        folder: SweepFolder,
        ledger: Ledger | None,
        dataset_id: str | None,
        service: ServiceOptions,
        again: Repetition,
        clock: Clock,
    ) -> None:
        told = () if plan.publication is None else (plan.publication.note(),)
        self._plan = dataclasses.replace(plan, notes=(*plan.notes, *told))
        self._folder, self._again = SealedFolder(folder), again
        self._clock = clock
        self._ledger, self._dataset_id = ledger, dataset_id
        self._service = dataclasses.replace(service, max_restarts=0)
        self._name = folder.name

    def run(self, tracker: Tracker, session: Session, run_trials: RunTrials) -> int:
        """Run what is left of the trials, publish one at the moment, and return the exit code."""
        now = self._clock.now()
        begun = self._folder.begin(self._plan, self._ledger, self._dataset_id, self._again, now)
        if self._plan.publication is not None:
            say(self._plan.publication.text(begun.started))
        trials = drawn_trials(self._plan.trials, begun.draws)
        say(f"sealed sweep: {self._name}; what is printed here tells the number of trials: keep it")
        self._hashes = {trial.name: config_hash(trial.config) for trial in trials}
        self._count_interrupted(trials)
        done = self._finished()
        remaining = [trial for trial in trials if trial.name not in done]
        plan = dataclasses.replace(self._plan, trials=trials)
        try:
            if remaining:
                performance, root = trials[0].config.performance, self._folder.folder.root
                needed = files_of_workers(self._plan)
                with session(self._service, performance, root, needed) as opened:
                    failed = run_trials(opened, plan, self._folder.trusted, remaining, self._on_result)
                for name, error in failed.items():
                    warn(f"failed: {name} ({error}); it counts as the worst score")
                    self._keep(name, {"failed": error})
        except Stopped as stopped:
            name = signal.Signals(stopped.signal_number).name
            warn(f"stopped by {name}; continue with {resume_line(self._folder.folder.path)}")
            say("note: trials that had begun count as the worst score; the number of trials stays")
            return 128 + stopped.signal_number
        except DiskFull:
            warn(no_room_text(self._folder.folder))
            say("note: trials that had begun count as the worst score; the number of trials stays")
            return 1
        prepared = self._prepare(trials, begun)
        self._wait(begun.started)
        self._publish(tracker, prepared)
        return 0

    def _on_result(self, name: str, result: dict[str, Any]) -> None:
        self._keep(name, result)
        say(f"done: {name}")

    def _keep(self, name: str, result: dict[str, Any]) -> None:
        self._folder.trusted.keep(name, result | {"config_hash": self._hashes[name]})

    def _finished(self) -> dict[str, dict[str, Any]]:
        return self._folder.trusted.finished(self._hashes)

    def _count_interrupted(self, trials: Sequence[Trial]) -> None:
        """Keep a worst score for each trial that had begun when an earlier process ended.

        Begun is what was started: its checkpoints and its count may be lost.
        """
        trusted, done = self._folder.trusted, self._finished()
        for trial in trials:
            begun = trusted.drawn(trial.name) is not None or trusted.starts(trial.name).num_starts > 0
            if begun and trial.name not in done:
                self._keep(trial.name, {"failed": "interrupted; a repetition would not be independent"})

    def _prepare(self, trials: Sequence[Trial], begun: Begun) -> _Prepared:
        """Choose the trial, and write all that will be released on the trusted side."""
        options, outgoing = self._plan.release, self._folder.outgoing
        chosen = choose(
            trials,
            begun.draws,
            self._finished(),
            select_by=options.select_by,
            min_score=options.min_score if options.mode == SEALED_THRESHOLD else None,
        )
        outcome = "one model" if chosen is not None else "no model"
        metrics = self._visible(chosen)
        params = chosen.params if chosen is not None else {}
        statement = build_statement(self._plan, self._name, ledger=begun.ledger)
        for path in outgoing.iterdir():  # of an attempt that ended before the moment
            path.unlink()
        write_statement(statement, outgoing)
        if chosen is not None:
            self._copy_model(chosen)
        write_json(outgoing / _RESULT, {"outcome": outcome, "params": params, "metrics": metrics})
        answer = self._answered(params, metrics, begun) if chosen is not None else None
        if answer is not None:
            write_answer(answer, outgoing)
        return _Prepared(outcome=outcome, params=params, metrics=metrics, statement=statement, answer=answer)

    def _answered(
        self, params: Mapping[str, Any], metrics: Mapping[str, float], begun: Begun
    ) -> Answer | None:
        """Return the answer of what is published alone: that one run, which nothing is compared with."""
        row = {"guarantee_label": "proven", "params": params, "metrics": metrics}
        tags = {"data_is": self._plan.tags()["data_is"]}
        try:
            trials = trials_frame([row], tags)
            return sweep_answer(self._plan.question, trials, privacy_numbers(self._plan.cost, begun.left))
        except DashboardError as error:
            warn(f"warning: the answer: {error}")
            return None

    def _wait(self, started: float) -> None:
        """Wait for the next moment; where it has passed already, nothing is left to hide."""
        if self._plan.publication is None or self._folder.is_published:
            return
        now = self._clock.now()
        moment = self._plan.publication.moment(started, now)
        when = datetime.fromtimestamp(moment)
        say(f"all is ready; published at {when:%Y-%m-%d %H:%M:%S}, in {duration(moment - now)}")
        self._clock.sleep_until(moment)

    def _publish(self, tracker: Tracker, prepared: _Prepared) -> None:
        """Move everything out at once: files first, `result.json` last, then the run in MLflow."""
        outgoing, release = self._folder.outgoing, self._folder.release
        release.mkdir(exist_ok=True)
        names = sorted((path.name for path in outgoing.iterdir()), key=lambda name: (name == _RESULT, name))
        for name in names:
            part = release / f".{name}.part"
            shutil.copyfile(outgoing / name, part)  # a file moved here would keep the time of its making
            part.replace(release / name)
            self._hide_times()
        statement = prepared.statement
        tags = self._plan.tags() | {"outcome": prepared.outcome, "guarantee_label": statement.guarantee_label}
        texts = {STATEMENT: statement.to_json(), f"{STATEMENT}_page": statement.to_markdown()}
        sweep_id = (self._folder.folder.read_plan() or {})["sweep_id"]
        tracker.log_sealed(
            self._name,
            prepared.params,
            prepared.metrics,
            tags,
            texts,
            sweep_id=str(sweep_id),
            first=prepared.answer.first_lines() if prepared.answer is not None else (),
        )
        say(statement_text(statement))
        if prepared.answer is not None:
            warn(answer_text(prepared.answer))
        say(f"published: {prepared.outcome} in {release}")

    def _hide_times(self) -> None:
        """Take the times from what is in `release/`, after every write."""
        release = self._folder.release
        for path in (*release.iterdir(), release):
            os.utime(path, ns=(SEALED_TIME_MS * 10**6,) * 2)

    def _visible(self, chosen: Trial | None) -> dict[str, float]:
        """The metrics of the published trial that the bound covers; its own ε is not the sweep's."""
        if chosen is None:
            return {}
        metrics = self._finished()[chosen.name]["metrics"]
        return {
            name: value
            for name, value in metrics.items()
            if (metric := find_metric(name))
            and metric.release is not Release.PRIVATE_ONLY
            and name not in _HIDDEN_METRICS
        }

    def _copy_model(self, chosen: Trial) -> None:
        path = self._folder.trusted.checkpoint_folder(chosen.name)
        saved = CheckpointFolder(path, every_steps=1).load() if path.is_dir() else None
        if saved is not None:
            averaged = chosen.config.optimizer.ema_decay > 0
            data = "private" if self._plan.source.are_private else RESEARCH
            note = json.dumps({"data": data, "sweep": self._name})
            state = released_state(saved, averaged=averaged)
            write_weights(self._folder.outgoing / PUBLISHED, state, note=note)
