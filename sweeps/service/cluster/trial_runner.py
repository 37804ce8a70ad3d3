"""Running a plan's trials on Ray Tune, one Ray Train run each."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.service.cluster.execution import Execution, OnResult
from sweeps.service.cluster.ray_session import RaySession, joins_cluster
from sweeps.service.cluster.stopping import Stopping
from sweeps.service.cluster.supervision import Supervisor
from sweeps.service.cluster.training_progress import SweepWatch
from sweeps.service.cluster.trial_failure import TrialFailure
from sweeps.service.cluster.trial_queue import TrialQueue, TrialSource
from sweeps.service.console.display import doing, watching
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.storage.log import SweepLog
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.data.dataset import modality_of


def run_trials(
    session: RaySession,
    plan: SweepPlan,
    folder: SweepFolder,
    trials: Sequence[Trial],
    on_result: OnResult,
    budget: SweepBudget | None,
    source: TrialSource,
) -> dict[str, TrialFailure]:
    """Run `trials` and call `on_result(name, result)` in this process as each one ends.

    Every start is counted in `folder` before the trial can draw. With a budget, the driver regularly checks
    that the ledger confirms the reservations, and charges the ledger before a restart. The source hands out
    the real trials, under the names of `trials`; a search's trial costs at most as much as the one here.

    Returns:
      The failures, by name, of trials that will not be restarted; their checkpoints stay. When the sweep's
      time is over, trials that were stopped or did not begin have neither a failure nor a result.

    Raises:
      StopRequest: a signal was received; all finished results have been reported.
      DiskFull: no space is left; every result that could be stored has been stored.
    """
    from sweeps.service.cluster.ray_tune import tune_trials
    from trainers.ray_internals import logs_folder

    is_open = plan.release.is_open
    logs = logs_folder() if joins_cluster() else f"{logs_folder()}, until the sweep ends"
    execution = Execution(
        folder=folder,
        queue=TrialQueue(source, len(trials), session.capacity, requests_nodes=is_open),
        on_result=on_result,
        budget=budget,
        supervisor=Supervisor(folder, session.service, log_of(plan, folder), logs),
        stopping=Stopping(folder, session.service, modality_of(plan.data.train)),
        watch=_watch(plan, len(plan.trials) - len(trials)),
        is_open=is_open,
    )
    execution.stopping.begin(plan.trials)
    if execution.watch is None:
        doing("running the sealed sweep; its trials are not shown", as_line=False)
        return tune_trials(execution, session, trials, plan.data)
    with watching(execution.watch):
        return tune_trials(execution, session, trials, plan.data)


def _watch(plan: SweepPlan, num_over: int) -> SweepWatch | None:
    """Return the object that tracks the trainings' progress; None for a sealed sweep."""
    if not plan.release.is_open:
        return None
    return SweepWatch(len(plan.trials), num_over, shows_times=plan.data.train_is_public)


def log_of(plan: SweepPlan, folder: SweepFolder) -> SweepLog | None:
    """Return the log of an open sweep; None for a sealed sweep, as the file's time would reveal K."""
    return SweepLog(folder.path) if plan.release.is_open else None
