"""The rows of each record, and the row that represents it at a step: privacy-critical, so defined only here.

`row_starts` is int64 `[num_records + 1]`: record i has the rows from `row_starts[i]` up to, but not
including, `row_starts[i + 1]`. It is None if every record has one row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import Ids, keyed_uniform

NO_STEP = -1
"""The `step` of a row that is chosen once and for all; no step of a training has this number."""

RowStarts = NDArray[np.int64]


def check_row_starts(row_starts: RowStarts | None, *, num_records: int, num_rows: int) -> None:
    """Check that every row belongs to one record, and that every record has a row.

    Raises:
      DataError: a row or a record has none; the message states the rule and no number of records.
    """
    if row_starts is not None and (
        row_starts.shape != (num_records + 1,)
        or row_starts[0] != 0
        or row_starts[-1] != num_rows
        or (np.diff(row_starts) < 1).any()
    ):
        raise DataError("row_starts must assign one or more consecutive rows to each record, in order")


def rows_of(
    row_starts: RowStarts | None, records: NDArray[np.int64]
) -> tuple[NDArray[np.int64], RowStarts | None]:
    """Return all rows of `records`, record by record, and the `row_starts` of only these records."""
    if row_starts is None:
        return records, None
    firsts, ends = row_starts[records], row_starts[records + 1]
    starts = np.concatenate([[0], np.cumsum(ends - firsts)]).astype(np.int64)
    return np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], ends - firsts), starts


def row_of_each(
    row_starts: RowStarts | None, ids: Ids, records: NDArray[np.int64], *, seed: int = 0, step: int = NO_STEP
) -> NDArray[np.int64]:
    """Return the row that represents each of `records` at `step`, `[n]`.

    The row is a function of the record's own id and number of rows, the public seed and the step. Adding or
    removing one record changes no other record's row.
    """
    if row_starts is None:
        return records
    firsts = row_starts[records]
    sizes = row_starts[records + 1] - firsts
    uniform = keyed_uniform(ids[records], "row", int(seed), int(step))
    rows: NDArray[np.int64] = firsts + np.minimum((uniform * sizes).astype(np.int64), sizes - 1)
    return rows
