"""Closes the reservations of an unfinished sweep in a ledger, without continuing the sweep.

Use it for a sweep that nobody will resume, or that an older version began and this version cannot resume.
Nothing is trained, and the sweep's folder loses only its grants.

*Charges.* A finished training is charged the steps in its result and the steps of lost attempts, as its own
driver would have charged it; its further releases stay charged in full. Every other training stays charged in
full, because the number of its steps may depend on the records.

*Refunds.* On the operator's request, a training that never began is given back. Its grant exists, and there
is no start, no count, no checkpoint and no result. The folder must be the one that the sweep ran in: a copy
from before a training began looks the same, and no test of the folder can distinguish it.

*No later draws.* The folder is locked, so no driver starts a training in the meantime. Grants are withdrawn
and every training's attempt is outdated before anything is settled. So a disconnected worker draws nothing
after its current step, which was counted before and belongs to a training that began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpgcl_core.durable_files import storage_errors
from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.account import Reservation
from dpgcl_core.ledger.chain import Head
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.privacy.ledger_choice import account_of
from sweeps.service.privacy.reservations import SCORES, SNR
from sweeps.service.storage.sweep_folder import SweepFolder
from sweeps.service.storage.sweep_lock import hold_sweep
from trainers.files.checkpoint import GRANT_FILE, Grant, attempts_of, read_grant, write_grant

_LABEL = re.compile(rf"(?P<trial>.+?)(?:~\d+)?(?:{SNR}|{SCORES})?")  # ~2: reserved again by an older version


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """One reservation, before and after it is settled.

    Attributes:
      label: the reservation's label.
      num_steps_reserved, num_steps_charged: the steps before and after.
    """

    label: str
    num_steps_reserved: int
    num_steps_charged: int


@dataclass(frozen=True, kw_only=True)
class _Traces:
    """A training's traces in the sweep's folder: grant, result, and whether it may have drawn a step."""

    grant: Grant | None
    result: Mapping[str, Any] | None
    has_begun: bool


def close_reservations(
    folder: SweepFolder, ledger: Ledger, *, give_back_unstarted: bool = False
) -> list[Settlement]:
    """Settle every open reservation of a sweep that is not running, and return the settlements.

    Args:
      folder: the sweep's folder, of this layout or an older layout.
      ledger: the ledger that the sweep was charged to.
      give_back_unstarted: refund trainings that never began in full; only for a folder that is not an older
        copy.

    Raises:
      LedgerError: the sweep was charged to another ledger, to none, or as a whole (a sealed sweep, whose one
        charge stays); the ledger lacks rows recorded in the sweep's plan; or a training drew
        more steps than reserved.
      StorageError: the sweep is running, or one of its counts is damaged.
    """
    plan = folder.read_plan()
    account = None if plan is None else plan.get("account")
    if plan is None or account is None or "sweep_id" not in plan or plan.get("publication") is not None:
        raise LedgerError(
            f"the sweep {folder.name!r} must have a reservation for each training in a ledger; its plan in "
            f"{folder.path} names none, so there is nothing to settle"
        )
    if account != account_of(ledger, account["dataset_id"]):
        raise LedgerError(
            f"the sweep {folder.name!r} is charged to ledger {account['ledger_id']}. Pass that ledger "
            "as --ledger"
        )
    if "head" in plan:
        ledger.check_has(Head(**plan["head"]), f"the plan of the sweep {folder.name!r}")
    prefix = f"{folder.name}-{plan['sweep_id']}/"
    with hold_sweep(folder), storage_errors(folder.path):
        return list(_settle_all(folder, ledger, account["dataset_id"], prefix, give_back_unstarted))


def _settle_all(
    folder: SweepFolder, ledger: Ledger, dataset_id: str, prefix: str, give_back_unstarted: bool
) -> Iterator[Settlement]:
    """Withdraw all grants and outdate all attempts, then settle the open reservations one by one."""
    open_reservations = {
        reservation.label: reservation
        for reservation in ledger.reservations(dataset_id)
        if reservation.num_steps_executed is None and reservation.label.startswith(prefix)
    }
    matches = {label: _LABEL.fullmatch(label.removeprefix(prefix)) for label in open_reservations}
    trials = {label: match["trial"] for label, match in matches.items() if match is not None}
    traces = {trial: _withdraw_grant(folder, trial) for trial in sorted(set(trials.values()))}
    for label, trial in trials.items():
        reservation, trial_traces = open_reservations[label], traces[trial]
        num_steps = 0
        if trial_traces.has_begun or not give_back_unstarted:
            num_steps = _num_charged(reservation, trial_traces, open_reservations)
        ledger.settle(reservation, num_steps)
        yield Settlement(label=label, num_steps_reserved=reservation.num_steps, num_steps_charged=num_steps)
    folder.keep_head(vars(ledger.head_of(dataset_id)))


def _withdraw_grant(folder: SweepFolder, trial: str) -> _Traces:
    """Withdraw a training's grant and outdate its attempts, then return its traces.

    A missing grant stays missing, so that a later run still detects that a folder was lost.
    """
    path = folder.checkpoint_folder(trial)
    grant, attempts = read_grant(path), attempts_of(folder.count_file(trial))
    if grant is not None:
        write_grant(path, replace(grant, num_steps=0))
    attempts.claim()
    has_files = grant is not None and any(file.name != GRANT_FILE for file in path.iterdir())
    has_begun = folder.has_begun(trial) or attempts.total().num_attempts > 0
    result = folder.result(trial)
    is_lost_or_done = grant is None or result is not None
    return _Traces(grant=grant, result=result, has_begun=has_files or has_begun or is_lost_or_done)


def _num_charged(reservation: Reservation, traces: _Traces, reservations: Mapping[str, Reservation]) -> int:
    """Return the number of steps to charge; above the reserved number only if too many steps were drawn."""
    is_extra = reservation.label.endswith((SNR, SCORES))
    if traces.result is None or traces.grant is None or is_extra:
        return reservation.num_steps
    total = int(traces.result["metrics"]["num_steps_charged"]) + traces.grant.num_steps_lost
    first_steps = reservations.get(f"{reservation.label}{SNR}")
    num_first = 0 if first_steps is None else first_steps.num_steps
    return max(min(total, reservation.num_steps), total - num_first)
