"""The figure of a ledger: what each data set's budget had left after each row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dashboards.compose.burn_down import burn_down_of
from dashboards.errors import DashboardError
from dashboards.figures import write_drawing
from dpgcl_core.addresses import masked
from dpgcl_core.ledger.ledger import Ledger


def draw_burn_down(
    ledger: str, folder: Path, name_of: Callable[[str], str], dataset_id: str | None = None
) -> list[Path]:
    """Draw the budget of each data set, write the files (`burn_down_NAME.png`, …) and return their paths.

    Args:
      ledger: address of the ledger.
      folder: created if missing.
      name_of: a name fit for files, of a data set's id.
      dataset_id: of the one data set to draw; all unless given.

    Raises:
      LedgerError: the ledger cannot be read, or its rows contradict each other.
      DashboardError: it does not know the data set, or has none.
      OSError: the folder cannot be written.
    """
    opened = Ledger.open(ledger)
    asked = [dataset_id] if dataset_id is not None else list(opened.dataset_ids())
    if not asked:
        raise DashboardError(
            f"the ledger {masked(ledger)} has no data set; `python -m dpgcl_core.ledger cap` registers one"
        )
    entries, paths, taken = opened.entries(), list[Path](), set[str]()
    for each in asked:
        stem = f"burn_down_{name_of(each)}"
        stem += f"_{len(taken)}" * (stem in taken)
        taken.add(stem)
        paths += write_drawing(*burn_down_of(entries, each), folder, stem)
    return paths
