"""Closing what an unfinished sweep has reserved in a ledger, without continuing it.

Meant for a sweep that nobody will resume, or that an older version began and this one cannot. Nothing is
trained, and the sweep's folder only loses its grants.

*Why no charge is lost.* The folder is locked, so no driver starts a training meanwhile. The grants are taken
back first, so a training that was cut off draws nothing more than the step it is in, which is counted. Then
- a training that finished is settled at the steps that its result says were charged, with those of lost
  attempts, as its own driver would have done; what it released besides its steps stays charged in full,
- a training that never began is given back whole: its grant is there, and there is no start and no count,
- every other one is settled in full. How far it came may depend on the records, and nobody needs to know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.account import Reservation
from dpgcl_core.ledger.chain import Head
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.privacy.account import account_of
from sweeps.service.privacy.budget import SCORES, SNR
from sweeps.service.storage.folder import SweepFolder
from trainers.files.checkpoint import Grant, attempts_of, read_grant, write_grant

_PART = re.compile(rf"(?P<trial>.+?)(?:~\d+)?(?P<part>{SNR}|{SCORES})?")


@dataclass(frozen=True, kw_only=True)
class Closed:
    """What became of one reservation.

    Attributes:
      label: of the reservation.
      num_steps_reserved, num_steps_charged: before and after.
    """

    label: str
    num_steps_reserved: int
    num_steps_charged: int


def close_reservations(folder: SweepFolder, ledger: Ledger) -> list[Closed]:
    """Settle every open reservation of a sweep that does not run, and return what became of each.

    Args:
      folder: of the sweep, of this layout or an older one.
      ledger: that it was charged to.

    Raises:
      LedgerError: the sweep was charged to another ledger, to none, or as a whole (a sealed sweep, whose one
        charge stays); or the ledger lacks rows that the sweep's plan knows.
      StorageError: the sweep is running, or a count of it is damaged.
    """
    plan = folder.read_plan()
    account = None if plan is None else plan.get("account")
    if plan is None or account is None or "sweep_id" not in plan:
        raise LedgerError(
            f"the sweep {folder.name!r} must have a reservation for each training in a ledger; its plan in "
            f"{folder.path} names none, so there is nothing to settle"
        )
    if account != account_of(ledger, account["dataset_id"]):
        raise LedgerError(
            f"the sweep {folder.name!r} is charged to ledger {account['ledger_id']}: give that one with "
            "--ledger"
        )
    if "head" in plan:
        ledger.check_has(Head(**plan["head"]), f"the plan of the sweep {folder.name!r}")
    prefix = f"{folder.name}-{plan['sweep_id']}/"
    with folder.locked():
        return list(_close(folder, ledger, account["dataset_id"], prefix))


def _close(folder: SweepFolder, ledger: Ledger, dataset_id: str, prefix: str) -> Iterator[Closed]:
    opened = [
        (reservation, match)
        for reservation in ledger.reservations(dataset_id)
        if reservation.num_steps_executed is None and reservation.label.startswith(prefix)
        if (match := _PART.fullmatch(reservation.label.removeprefix(prefix)))
    ]
    begun = {trial: _take_back(folder, trial) for trial in {match["trial"] for _, match in opened}}
    for reservation, match in opened:
        charged = _num_charged(folder, reservation, match, has_begun=begun[match["trial"]])
        ledger.settle(reservation, charged)
        yield Closed(
            label=reservation.label,
            num_steps_reserved=reservation.num_steps,
            num_steps_charged=charged,
        )
    folder.keep_head(vars(ledger.head_of(dataset_id)))


def _take_back(folder: SweepFolder, trial: str) -> bool:
    """Grant no step more, and return whether the training may have drawn any."""
    path = folder.checkpoint_folder(trial)
    grant = read_grant(path)
    has_begun = folder.has_begun(trial)
    write_grant(path, replace(grant or Grant(num_steps=0), num_steps=0))
    if has_begun:
        attempts_of(folder.count_file(trial)).claim()
    return has_begun or grant is None or folder.result(trial) is not None


def _num_charged(
    folder: SweepFolder, reservation: Reservation, match: re.Match[str], *, has_begun: bool
) -> int:
    if not has_begun:
        return 0
    result, grant = folder.result(match["trial"]), read_grant(folder.checkpoint_folder(match["trial"]))
    if result is None or grant is None or match["part"]:
        return reservation.num_steps
    total = int(result["metrics"]["num_steps_charged"]) + grant.num_steps_lost
    return min(total, reservation.num_steps)
