"""Names of classes, listed from text labels.

They go into the prompts of zero-shot scores and nowhere else. The class names of private data are as private
as the records: one additional record can add a class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from trainers.data.faults import RecordsError

ClassNames = tuple[str, ...]
"""One name for every label 0, 1, …; empty if unknown."""


def class_indices(
    columns: list[NDArray[Any] | None],
) -> tuple[list[NDArray[np.int64] | None], ClassNames]:
    """Return the labels of each split as integers, and the class names if the labels are text.

    Integers are unchanged and have no names. A text becomes its index in the sorted classes of all splits.

    Args:
      columns: for each split, the labels as stored, `[num_rows]`, or None.

    Raises:
      DataError: some splits have labels and others none, or they are neither all integers nor all text.

    >>> class_indices([np.array(["dog", "cat"]), np.array(["eel"])])
    ([array([1, 0]), array([2])], ('cat', 'dog', 'eel'))
    """
    present = [column for column in columns if column is not None]
    if not present:
        return list(columns), ()
    if len(present) < len(columns):
        raise DataError("training and test records must both have labels, or neither; only one has them")
    kinds = {
        "integer" if c.dtype.kind in "iub" else "text" if c.dtype.kind in "USO" else "other" for c in present
    }
    if len(kinds) > 1 or "other" in kinds:
        types = ", ".join(str(column.dtype) for column in present)
        raise DataError(f"labels must be all integers or all strings; got {types}")
    if kinds == {"text"}:
        texts = [as_text(column) for column in present]
        classes = sorted(set[str]().union(*texts))
        index_of = {name: index for index, name in enumerate(classes)}
        indices = [np.fromiter(map(index_of.__getitem__, text), np.int64, len(text)) for text in texts]
        return list(indices), tuple(map(encodable, classes))
    # An unsigned label that is too large becomes negative here and is rejected with the negative labels.
    integers = [column.astype(np.int64) for column in present]
    negative = sum(int((column < 0).sum()) for column in integers)
    if negative:
        raise RecordsError(f"integer labels must be in [0, 2^63); {negative} are not")
    return list(integers), ()


def as_text(values: NDArray[Any]) -> list[str]:
    """Return strings, bytes (as Latin-1) or integers as text."""
    return [v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in values.tolist()]


def encodable(name: str) -> str:
    r"""Return a name as valid Unicode, so that it can be hashed or tokenised; a file's name may be invalid.

    >>> encodable("caf\udce9") != encodable("caf\udcea"), encodable("café")
    (True, 'café')
    """
    return name.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")
