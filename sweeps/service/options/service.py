"""The options of a sweep's repeats, resources and storage, and of the ledger that it is charged to."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dpgcl_core.errors import ConfigError, require_each, require_least, require_positive
from sweeps.service.options.data import DataOptions
from trainers.config.tree import option


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Repeats and resources of a sweep's trainings."""

    repeats: int = 3
    """Trainings per point, each with its own public seed."""
    total_epsilon: float | None = None
    """Maximum ε of the whole sweep: the sweep computes the largest ε of one training or, if that ε is set,
    the largest number of repeats up to --repeats."""
    seed: int = 0
    """Public seed of the first repeat, for initialisation, views and evaluation subsets, never for noise."""
    gpus_per_worker: float = 0.0
    """GPUs of one worker; a fraction lets several trials share one."""
    max_concurrent_trials: int | None = None
    """Maximum trainings at once; by default as many as fit on the cluster, with nodes that join later."""
    wait_for_resources: float = 15.0
    """Minutes to wait until the cluster can run one training; 0 fails at once."""
    max_restarts: int = 2
    """Maximum restarts of a crashed training from its checkpoint; repeated steps are charged."""
    trial_timeout: float | None = None
    """Time limit of one attempt at a training, in minutes; an attempt beyond it counts as a crash."""
    stall_timeout: float | None = None
    """Minutes without a checkpoint after which an attempt is stopped and counts as a crash."""
    time_budget: float | None = None
    """Minutes of training; then running trainings save and stop, and no others start. --resume continues."""
    early_stopping: Literal["none", "asha", "median"] = "none"
    """Stop trainings early by their scores: successive halving or the median rule; ε counts all steps."""
    references: bool = True
    """Also score raw pixels and HOG features, once per sweep, on the same public records; costs no ε."""
    dry_run: bool = False
    """Print the trials, their ε and the estimated time, then stop."""
    listener: str | None = None
    """Your own listener, `package.module:Class`: called at the beginning, with each result and at the end."""
    quiet: bool = False
    """Print only the result, warnings and errors, as for a log; a dry run still prints its plan."""

    def __post_init__(self) -> None:
        require_least(self, 1, "repeats", "max_concurrent_trials")
        require_least(self, 0, "max_restarts", "seed")
        require_positive(self, "total_epsilon")
        limits = ("trial_timeout", "stall_timeout", "time_budget")
        require_each(self, limits, "be a positive number of minutes", lambda value: 0 < value < math.inf)
        amounts = ("gpus_per_worker", "wait_for_resources")
        require_each(self, amounts, "be finite and not negative", lambda value: 0 <= value < math.inf)

    @property
    def is_quiet(self) -> bool:
        """Whether only essential lines are printed."""
        return self.quiet and not self.dry_run


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Result storage and resuming."""

    folder: Path | None = field(default=None, metadata=option("storage"))
    """Absolute folder for results, MLflow database, calibrations and checkpoints ($DPGCL_STORAGE)."""
    name: str | None = None
    """Name of the sweep; by default made from question, data set and time."""
    resume: bool = False
    """Continue the named sweep; without --name, the script's last unfinished one."""
    tracking_uri: str | None = None
    """MLflow server ($MLFLOW_TRACKING_URI); by default a SQLite database under the storage folder."""


@dataclass(frozen=True, kw_only=True)
class LedgerOptions:
    """The budget ledger that the steps are charged to."""

    url: str | None = field(default=None, metadata=option("ledger"))
    """Budget ledger ($DPGCL_LEDGER): a path, or a SQLite or PostgreSQL URL; every step is charged to it."""
    dataset_id: str | None = None
    """The data set's id in the ledger."""
    no_ledger: bool = False
    """Train on private data without a budget ledger; the privacy statement will report it."""


def ledger_url(data: DataOptions, options: LedgerOptions) -> str | None:
    """Return the ledger's address; None without one.

    `$DPGCL_LEDGER` without a data set's id does not apply to public data, which need no ledger.
    """
    if options.no_ledger:
        if options.url is not None:
            raise ConfigError("set a ledger or no_ledger, not both")
        return None
    environment = os.environ.get("DPGCL_LEDGER")
    wanted = data.are_private or options.dataset_id is not None
    return options.url or (environment if wanted else None)
