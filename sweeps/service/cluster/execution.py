"""What follows the trainings of a sweep while they run."""

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
    """What follows the trainings of a sweep while they run.

    Attributes:
      folder: of the sweep.
      queue: the trials that are left, and those that are with Ray.
      on_result: takes a trial's name and result.
      budget: the ledger's part; None without a ledger.
      supervisor: follows attempts, and ends those that hang.
      stopping: ends trainings before their last step.
      watch: counts steps for the terminal; None in a sealed sweep.
      is_open: whether trials are shown and may be stopped; those of a sealed sweep are neither.
    """

    folder: SweepFolder
    queue: TrialQueue
    on_result: OnResult
    budget: SweepBudget | None
    supervisor: Supervisor
    stopping: Stopping
    watch: SweepWatch | None
    is_open: bool
