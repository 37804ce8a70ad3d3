"""The preparation before the first worker: options, data, plan and ledger checks give a `PreparedSweep`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpgcl_core.errors import BudgetExceeded, ConfigError, StorageError
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.cluster.ray_session import check_this_machine, trials_at_once
from sweeps.service.console.display import doing
from sweeps.service.console.terminal import estimate_text, name_suffix, print_line, short_name, warn
from sweeps.service.options.options_file import options_text
from sweeps.service.options.resume_options import command_of
from sweeps.service.options.service import ServiceOptions, StorageOptions
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.duration import seconds_of_trials
from sweeps.service.planning.inputs import PlanInputs, num_records
from sweeps.service.planning.plan import Fit, SweepPlan, data_facts
from sweeps.service.planning.publication import Publication
from sweeps.service.planning.size_to_data import fitted_to_size
from sweeps.service.planning.sweep_data import load_training_data
from sweeps.service.planning.trials import Point
from sweeps.service.privacy.budget import SweepBudget, new_sweep_id, sweep_budget
from sweeps.service.privacy.ledger_choice import (
    account_of,
    check_ledger_options,
    check_starts,
    ledger_missing,
    marks_note,
    open_ledger,
    with_registered_number,
)
from sweeps.service.running.listeners import Listener, own_listener
from sweeps.service.running.outbox import patiently
from sweeps.service.running.total_epsilon import Limits
from sweeps.service.running.trial_policy import TrialPolicy
from sweeps.service.storage.calibrations import CalibrationCache, calibrations
from sweeps.service.storage.mlflow_location import tracking_address
from sweeps.service.storage.slot_files import SlotFiles
from sweeps.service.storage.sweep_folder import Repetition, SweepFolder, find_folder, named_folder
from sweeps.service.storage.sweep_lock import check_not_running, hold_sweep
from trainers.config.tree import replace_options
from trainers.files.storage import check_writable, details_kept, storage_root
from trainers.tracking.mlflow_server import check_address, connect, is_database


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A sweep that may start: planned and checked, but nothing is written or charged yet.

    Attributes:
      plan: its trials and their cost.
      inputs: the plan's inputs, with the registered number of records, sizes fitted to it and the fitted ε.
      folder: the folder for its results.
      policy: decides which trials it trains.
      service: resources and limits of its trainings.
      tracking_uri: the address of MLflow.
      ledger, dataset_id: the ledger and data set that it is charged to; None without a ledger.
      budget: an open sweep's reservations in the ledger; None without a ledger and for sealed sweeps.
      calibrations: the cache of noise multipliers, with those that planning has calibrated.
      slot_files: the files of slot tables; the table of the plan's data is stored before the first training.
      repetition: the options and command that repeat and continue it.
      known_plan: the plan that its folder had during planning; None for a new sweep.
      sweep_id: random id that distinguishes it from a sweep of the same name elsewhere.
      facts: the facts of `ChargedTrials`, which a search and the sweeps that it starts from share.
      listeners: the listener that the user's options name, or none.
    """

    plan: SweepPlan
    inputs: PlanInputs
    folder: SweepFolder
    policy: TrialPolicy
    service: ServiceOptions
    tracking_uri: str
    ledger: Ledger | None
    dataset_id: str | None
    budget: SweepBudget | None
    calibrations: CalibrationCache
    slot_files: SlotFiles
    repetition: Repetition
    known_plan: dict[str, Any] | None
    sweep_id: str
    facts: Mapping[str, Any]
    listeners: tuple[Listener, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether no earlier process began the sweep."""
        return self.known_plan is None

    @contextmanager
    def hold_folder(self) -> Iterator[None]:
        """Lock the folder within this context, and first store the slot table.

        Raises:
          StorageError: another process runs the sweep, or has run it since planning began.
        """
        source, release = self.plan.source, self.plan.release
        is_closed = source.are_private and release.is_open  # a sealed sweep closes only `trusted/`
        with hold_sweep(self.folder, is_closed=is_closed):
            if self.folder.read_plan() != self.known_plan:
                raise StorageError(
                    f"another process ran the sweep {self.folder.name!r} while this one was planning. Add "
                    "--resume to continue it, or choose another --name"
                )
            if (slots := self.plan.data.slots) is not None:
                self.slot_files.keep(slots)
            yield


@contextmanager
def prepare_sweep(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    policy: TrialPolicy,
    *,
    repeat_options: SweepOptions | None,
) -> Iterator[PreparedSweep]:
    """Plan a sweep, check it, and print its plan; a dry run also prints its estimated duration.

    Args:
      question: the name of the sweep's question, for example `group-size`.
      options: the user's options.
      points: the settings to compare.
      policy: decides which trials the sweep trains.
      repeat_options: the options of both sweeps, stored for repeating them, if `options` are for one of two.

    Raises:
      DpgclError: any error of the user, before anything is written, charged or started.
    """
    data, service = options.data, options.service
    check_ledger_options(data, options.ledger, dry_run=service.dry_run)
    listeners = () if service.listener is None else (own_listener(service.listener),)
    ledger, dataset_id = open_ledger(data, options.ledger), options.ledger.dataset_id
    registered = with_registered_number(options.mechanism, ledger, dataset_id)
    options = replace(options, mechanism=registered)
    root = _checked_root(options.storage)
    uri = tracking_address(options.storage.tracking_uri, root)
    is_resumed = options.storage.resume and options.storage.name is not None
    print_line(f"storage: {root}{f'; resuming {options.storage.name}' if is_resumed else ''}")
    check_address(uri)
    if not is_database(uri):  # opening a database may create its file, before the plan is accepted
        patiently(lambda: connect(uri), warn)  # planning, which takes minutes, begins after an answer
    doing("loading the data and calibrating the noise")
    slot_files = SlotFiles.of(data, root, has_ledger=ledger is not None)
    with details_kept(root):
        records, notes = load_training_data(
            data,
            score_on_held_out=options.evaluation.score_on_held_out,
            num_records_public=options.mechanism.num_records_public,
            slots_for=slot_files.holding,
            has_shards=options.mechanism.shards > 1,
        )
    with calibrations(root) as cache:
        repeat_options = repeat_options or options
        facts = data_facts(data, records) | {
            "num_records_public": options.mechanism.num_records_public or num_records(records),
            "score_on_held_out": options.evaluation.score_on_held_out,
            "account": account_of(ledger, dataset_id),
        }
        earlier = policy.read_earlier(options, root, facts)
        options, points, size_notes = fitted_to_size(options, points, num_records(records))
        inputs = PlanInputs(
            question=question,
            options=options,
            points=points,
            data=records,
            notes=[*notes, *size_notes, *marks_note(data, ledger)],
            calibration_folder=cache.folder,
            earlier=earlier,
        )
        limits = Limits(
            options=options,
            points=points,
            trials_of=lambda changed_options: policy.trials(replace(inputs, options=changed_options)),
            total_epsilon=service.total_epsilon,
            account=None if ledger is None or dataset_id is None else (ledger, dataset_id),
            earlier=earlier,
        )
        if (fit := _fit(inputs, limits, root, has_fixed_noise=policy.fixes_noise(inputs))) is not None:
            epsilon = {} if fit.epsilon is None else {"epsilon": fit.epsilon}
            options = replace_options(options, repeats=fit.repeats, **epsilon)
        inputs = replace(inputs, options=options)
        plan = replace(policy.plan(inputs), fit=fit)
        folder = find_folder(
            root,
            name=options.storage.name,
            fingerprint=plan.fingerprint,
            resume=options.storage.resume,
            params=plan.params(),
            prefix=sweep_prefix(question, options),
        )
        budget = sweep_budget(plan, ledger, dataset_id, folder)
        check_starts(plan.private_starts, ledger)
        folder_plan = folder.read_plan()
        if not plan.release.is_open:
            plan = replace(plan, publication=_publication(plan, folder_plan, service))
        policy.print_plan(plan, in_full=service.dry_run)
        if fit is not None:
            print_line(f"--total-epsilon: {limits.text(fit, [*plan.trials, *plan.later])}")
        if budget is not None:
            try:
                budget.check()
            except BudgetExceeded as error:
                advice = ""
                with suppress(ConfigError):  # no ε may be given if a search has a range for ε
                    advice = limits.what_would_fit(has_fixed_noise=True)
                raise BudgetExceeded(f"{error}{advice}") from error
            print_line(budget.text())
        if service.dry_run:
            _print_estimate(options, plan)
        else:
            check_this_machine(service, options.performance)
        yield PreparedSweep(
            plan=plan,
            inputs=inputs,
            folder=folder,
            policy=policy,
            service=service,
            tracking_uri=uri,
            ledger=ledger,
            dataset_id=dataset_id,
            budget=budget,
            calibrations=cache,
            slot_files=slot_files,
            repetition=Repetition(
                options=options_text(repeat_options),
                command=command_of(repeat_options, policy.resumed_name(folder.name)),
            ),
            known_plan=folder_plan,
            sweep_id=_sweep_id(folder_plan, budget),
            facts=facts,
            listeners=listeners,
        )


def _fit(inputs: PlanInputs, limits: Limits, root: Path, *, has_fixed_noise: bool) -> Fit | None:
    """Return the ε of one training or the repeats that fit `--total-epsilon`; None without that option.

    A resumed sweep keeps the values in its plan, which were already charged.

    Raises:
      ConfigError: nothing fits, or the resumed sweep has another total.
    """
    options = inputs.options
    if limits.total_epsilon is None:
        return None
    if options.storage.resume and options.storage.name is not None:
        folder_plan = named_folder(root, options.storage.name).read_plan() or {}
        fit = Fit.read(folder_plan.get("params", {}))
        if fit is not None:
            if fit.total_epsilon != limits.total_epsilon:
                raise ConfigError(
                    f"a resumed sweep keeps its --total-epsilon, which is {fit.total_epsilon:g}; got "
                    f"{limits.total_epsilon:g}. Leave it out, or start another sweep"
                )
            return fit
    doing("finding how many repeats fit" if has_fixed_noise else "finding the largest ε of one training")
    return limits.fit(has_fixed_noise=has_fixed_noise)


def _checked_root(storage: StorageOptions) -> Path:
    """Return the storage folder, which must be writable; no sweep of this name may be running there."""
    root = storage_root(storage.folder)
    check_writable(root)
    if storage.name is not None:
        check_not_running(named_folder(root, storage.name))
    return root


def sweep_prefix(question: str, options: SweepOptions) -> str:
    """Return a new sweep's name; a number is appended later if the name is taken."""
    return f"{question}-{short_name(options.data.dataset)}-{name_suffix(options.release)}"


def _sweep_id(known_plan: dict[str, Any] | None, budget: SweepBudget | None) -> str:
    if known_plan is not None:
        return str(known_plan["sweep_id"])
    return budget.reservations.sweep_id if budget is not None else new_sweep_id()


def _publication(plan: SweepPlan, known_plan: dict[str, Any] | None, service: ServiceOptions) -> Publication:
    """Return when a sealed sweep is published; for a resumed sweep, as stored in its plan."""
    if known_plan is not None:
        return Publication.read(known_plan.get("publication"))
    longest = max(seconds_of_trials(plan))
    at_once = trials_at_once(service, plan.trials[0].config.performance)
    return Publication.planned(plan.release, longest, at_once)


def _print_estimate(options: SweepOptions, plan: SweepPlan) -> None:
    """Print, in a dry run, the problems that would stop the sweep, and its estimated duration."""
    try:
        check_this_machine(options.service, options.performance)
    except ConfigError as error:
        print_line(f"note: this machine cannot run the sweep: {error}")
    if missing := ledger_missing(options.data, options.ledger):
        print_line(f"note: without --dry-run the sweep would not start: {missing}")
    doing("measuring a step of every kind")
    print_line(estimate_text(plan))
    if plan.publication is not None:
        print_line(f"estimate: {plan.publication.text()}")
