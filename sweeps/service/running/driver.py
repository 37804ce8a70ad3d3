"""The driver of all sweeps: a release policy begins, the remaining trials train on Ray, the policy concludes.

The trial policy decides on the sweep's trials. The release policy, `open_release` or `sealed`, decides which
of their values are charged, stored and shown, and when.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sweeps.service.cluster.file_visibility import files_of_workers
from sweeps.service.cluster.interruption import DiskFull, StopRequest, no_room_text
from sweeps.service.cluster.ray_session import ray_session
from sweeps.service.cluster.trial_failure import TrialFailure
from sweeps.service.cluster.trial_queue import TrialSource
from sweeps.service.cluster.trial_runner import run_trials
from sweeps.service.console.terminal import print_line, warn
from sweeps.service.options.service import ServiceOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.files.launch_record import resume_line


class ReleasePolicy(Protocol):
    """Decides which values of a sweep's trials are charged, stored and shown, and when.

    Attributes:
      plan: the sweep's plan; after `remaining`, a sealed sweep's plan has the drawn trials.
      service: resources and limits of the trainings.
      folder: the folder with the trials' results and checkpoints.
      budget: the reservations that the ledger must confirm while trainings run; None if it need not.
    """

    plan: SweepPlan
    service: ServiceOptions
    folder: SweepFolder
    budget: SweepBudget | None

    def remaining(self) -> Sequence[Trial]:
        """Return the trials without a result, before Ray is started."""

    def begin(self, remaining: Sequence[Trial]) -> None:
        """Prepare the sweep, for example charge it, before any worker begins the first training."""

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return the source that hands out the remaining trials one by one."""

    def on_result(self, name: str, result: Mapping[str, Any]) -> None:
        """Handle the result of a trial that has just ended."""

    def interrupt(self, stop: StopRequest | None) -> str:
        """End early: for a signal, or for a full disk if `stop` is None. Return a note on the cost, or ""."""

    def conclude(self, failures: Mapping[str, TrialFailure]) -> int:
        """End the sweep after its trials have ended, and return the exit code."""


def drive(sweep: PreparedSweep, release: ReleasePolicy) -> int:
    """Run the trials that a sweep still lacks, conclude it, and return the exit code.

    This process must hold the lock on the sweep's folder.
    """
    folder = sweep.folder
    remaining = release.remaining()
    failures: Mapping[str, TrialFailure] = {}
    try:
        if not remaining:
            release.begin(remaining)
        else:
            performance, files = sweep.plan.trials[0].config.performance, files_of_workers(sweep.plan)
            with ray_session(release.service, performance, folder.root, files) as session:
                release.begin(remaining)
                failures = run_trials(
                    session,
                    release.plan,
                    release.folder,
                    remaining,
                    release.on_result,
                    release.budget,
                    release.source(remaining),
                )
    except StopRequest as stop:
        name = signal.Signals(stop.signal_number).name
        # Printed before anything slower, because a Ray job is killed soon after its signal.
        warn(f"stopped by {name}; continue with {resume_line(folder.path)}")
        _print_note(release.interrupt(stop))
        return 128 + stop.signal_number
    except DiskFull:
        warn(no_room_text(folder))
        _print_note(release.interrupt(None))
        return 1
    return release.conclude(failures)


def _print_note(note: str) -> None:
    if note:
        print_line(f"note: {note}")
