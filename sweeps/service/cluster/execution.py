"""The parts that monitor a sweep's trainings while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sweeps.service.cluster.stopping import Stopping
from sweeps.service.cluster.supervision import Supervisor
from sweeps.service.cluster.training_progress import SweepWatch
from sweeps.service.cluster.trial_queue import TrialQueue
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.storage.sweep_folder import SweepFolder

OnResult = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The parts that monitor a sweep's trainings while they run.

    Attributes:
      folder: the sweep's folder.
      queue: the remaining trials, and the trials that were handed to Ray.
      on_result: called with a trial's name and its result.
      budget: the sweep's reservations; None without a ledger.
      supervisor: monitors attempts, and ends attempts that hang.
      stopping: ends trainings before their last step.
      watch: the progress for the terminal; None in a sealed sweep.
      is_open: whether trials are shown and may be stopped; neither applies to a sealed sweep's trials.
    """

    folder: SweepFolder
    queue: TrialQueue
    on_result: OnResult
    budget: SweepBudget | None
    supervisor: Supervisor
    stopping: Stopping
    watch: SweepWatch | None
    is_open: bool
