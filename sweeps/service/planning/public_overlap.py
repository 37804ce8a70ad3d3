"""Private images that are also in public data: refused, or left out of the training by `--drop-overlap`.

**Copies** (see `trainers.data.image_digests`) are refused. Public data are scored and shown without noise, so
a private image among them means that they are not public, or that the private image is public, too. Like
every refusal of data, this one discloses a bit that no ε covers: that some image is shared. How many and
which are in the error's details, for the trusted side.

**Similar images** are only listed in a terminal. A hash also finds different images of one composition, so a
refusal would stop sound sweeps, and disclose another bit.

**Dropping.** Let E be the public data, which do not depend on the private data D, and f(D) the records of D
that have no image in E. Whether f keeps a record depends on only this record and E, so f(D ∪ {r}) is f(D) or
f(D) ∪ {r}: neighbouring data sets become neighbouring or equal. What is (ε, δ) for adding or removing one
record of f(D) is therefore (ε, δ) for adding or removing one record of D, with the same N ≥ |D| ≥ |f(D)|. N
must be declared: if N were |f(D)|, zeroing out one record of D could change N. The number of dropped records
is shown in a terminal alone.

A record with several images is dropped as a whole if one of them is in E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, show_on_a_terminal
from sweeps.service.options.data import Overlap
from trainers.data.dataset import AnyRecords, Dataset
from trainers.data.image_digests import find_copies, find_similar
from trainers.data.stored_images import digests_of


def without_overlap(
    private: Dataset, public: Mapping[str, Sequence[AnyRecords]], overlap: Overlap
) -> AnyRecords:
    """Return the private training records of which no image is in public data, see the module.

    Private test records are as private as the others: their images are refused, too. Dropping leaves them as
    they are, since no training uses them.

    Args:
      private: the private data.
      public: the public records, listed by option.
      overlap: the images whose records are dropped; with "none", copies are refused.

    Raises:
      ConfigError: public data hold copies of private images. Details state which images these are.
    """
    train = private.train
    if not any(public.values()):
        return train
    private_digests = _digests([train, *([private.test] if private.test else [])])
    is_in_public = np.zeros(len(private_digests), dtype=np.bool_)
    details: dict[str, Any] = {}
    for option, records in public.items():
        public_digests = _digests(records)
        copies, similar = (find(private_digests, public_digests) for find in (find_copies, find_similar))
        if (copies >= 0).any() and overlap == "none":
            error = ConfigError(
                f"{option} must be public; it holds images of the private training data. Remove them from "
                "either, or pass --drop-overlap copies"
            )
            is_shared = find_copies(public_digests, private_digests) >= 0
            error.details = {
                f"private images in {option}": np.flatnonzero(is_shared).tolist(),
                "their copies in the training data": _names(private, copies),
            }
            raise error
        details[f"images in {option} like private ones"] = np.unique(similar[similar >= 0]).tolist()
        details[f"training images like those in {option}"] = _names(private, similar)
        is_in_public |= (copies if overlap == "copies" else similar) >= 0
    if overlap != "none":
        starts = np.arange(len(train)) if train.row_starts is None else train.row_starts[:-1]
        is_dropped = np.logical_or.reduceat(is_in_public[: train.images.shape[0]], starts)
        details["training records dropped (--drop-overlap)"] = int(is_dropped.sum())
        train = train.take(~is_dropped)
    show_on_a_terminal(details)
    return train


def _digests(parts: Sequence[AnyRecords]) -> NDArray[np.void]:
    """Return the digests of each image, `[num_images of all parts]`."""
    return np.concatenate([digests_of(part.images) for part in parts])


def _names(private: Dataset, matches: NDArray[np.int64]) -> list[Any]:
    """Return the names of the images that have a match; without names, their positions."""
    rows = np.flatnonzero(matches >= 0).tolist()
    return rows if private.names is None else [str(private.names[row]) for row in rows]
