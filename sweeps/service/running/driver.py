"""The one way in which trials are run: a release policy begins, trains what remains on Ray, and concludes.

Which trials there are is the trial policy's. What is charged, kept and shown of them, and when, is the
release policy's: `open_release`, or `sealed`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sweeps.service.cluster.file_visibility import files_of_workers
from sweeps.service.cluster.interruption import DiskFull, Stopped, no_room_text
from sweeps.service.cluster.ray_session import ray_session
from sweeps.service.cluster.trial_failure import TrialFailure
from sweeps.service.cluster.trial_queue import TrialSource
from sweeps.service.cluster.trial_runner import run_trials
from sweeps.service.console.terminal import say, warn
from sweeps.service.options.service import ServiceOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.running.prepare import PreparedSweep
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.files.launch_record import resume_line


class ReleasePolicy(Protocol):
    """What is charged, kept and shown of a sweep's trials, and when."""

    @property
    def plan(self) -> SweepPlan:
        """The plan that Ray runs, with the trials that are charged."""

    @property
    def service(self) -> ServiceOptions:
        """Resources and limits of the trainings."""

    @property
    def folder(self) -> SweepFolder:
        """Where trials and checkpoints lie."""

    @property
    def budget(self) -> SweepBudget | None:
        """What is asked of the ledger while trainings run; None for nothing."""

    def remaining(self) -> Sequence[Trial]:
        """Return the trials that have no result yet, before Ray is started."""

    def begin(self, remaining: Sequence[Trial]) -> None:
        """Do what must be done before the first training, which no worker has begun by then."""

    def source(self, remaining: Sequence[Trial]) -> TrialSource:
        """Return what decides which trial comes next."""

    def on_result(self, name: str, result: Mapping[str, Any]) -> None:
        """Take the result of a trial that has just ended."""

    def interrupt(self, stop: Stopped | None) -> str:
        """End early, for a signal or (None) a full disk; return what that costs, "" where nothing is said."""

    def conclude(self, failures: Mapping[str, TrialFailure]) -> int:
        """End the sweep, of whose trials these have failed, and return the exit code."""


def drive(sweep: PreparedSweep, release: ReleasePolicy) -> int:
    """Run what is left of a sweep whose folder this process holds, and return the exit code."""
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
    except Stopped as stop:
        name = signal.Signals(stop.signal_number).name
        # First: a Ray job is killed soon after its signal.
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
        say(f"note: {note}")
