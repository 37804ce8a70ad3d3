"""`python -m sweeps.settle`: close a budget ledger's reservations of a sweep that nobody will resume.

    python -m sweeps.settle --name NAME --ledger sqlite:////safe/ledger.db
    python -m sweeps.settle --name NAME --storage FOLDER --give-back-unstarted

Finished trainings are charged the steps that they took, and all others stay charged in full. With
--give-back-unstarted, trainings that never began are refunded; use it only if the folder is no older copy.
"""

from __future__ import annotations

import os
from pathlib import Path

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, exit_on_bad_input


def settle_command(
    name: str,
    storage: Path | None = None,
    ledger: str | None = None,
    give_back_unstarted: bool = False,
) -> int:
    """Settle, print a line for each reservation, and return 0.

    Args:
      name: the sweep's name, which is the name of its folder in STORAGE/sweeps.
      storage: folder for results; $DPGCL_STORAGE or ~/dpgcl-results by default.
      ledger: budget ledger, a path or URL; $DPGCL_LEDGER by default.
      give_back_unstarted: give back the reservations of trainings that never began; the folder must be the
        one that the sweep ran in, not a copy from before they began.

    Raises:
      ConfigError: no ledger is given.
      LedgerError, StorageError: as `sweeps.service.privacy.settling.close_reservations`.
    """
    from dpgcl_core.ledger.ledger import Ledger
    from sweeps.service.privacy.settling import close_reservations
    from sweeps.service.storage.sweep_folder import named_folder
    from trainers.files.storage import storage_root

    url = ledger or os.environ.get("DPGCL_LEDGER")
    if url is None:
        raise ConfigError("the ledger of the reservations is needed: pass --ledger URL or set $DPGCL_LEDGER")
    folder = named_folder(storage_root(storage), name)
    closed = close_reservations(folder, Ledger.open(url), give_back_unstarted=give_back_unstarted)
    for each in closed:
        print(f"{each.label}: {each.num_steps_charged} of {each.num_steps_reserved} steps stay charged")
    print(f"settled {len(closed)} reservations" if closed else "no reservation was open")
    return 0


def main() -> int:
    """Run the command line."""
    return int(run_command(settle_command, prog="python -m sweeps.settle", description=__doc__))


if __name__ == "__main__":
    exit_on_bad_input(main)
