"""Stages 2 and 3 combined: the secret draw of a step's groups, and the mask of those that contribute.

A group that is not complete is computed like any other, so that shapes and work reveal nothing about the
records, and contributes exactly zero (`dpgcl_core.clipping.clipper`). The training loop only passes rows and
mask on, however they were drawn.

`SampledRecords` draws records and cuts them into groups: all of its groups are complete. A stage that draws
*groups* of slots, some of which may be empty, must meet these conditions:

- the number of slots is a public capacity, the same for both neighbours, and `num_records` slots are
  filled; more records than slots are refused before the first step;
- the placement of the records is an injection into the slots whose law does not depend on which slots are
  filled, never a numbering of the present records;
- whole groups are kept, each independently with fresh secret bits, and **all** kept groups are returned: a
  group with an empty slot is marked as not complete, and the slot gets any existing row, whose values are
  not used;
- the number and shape of the rows depend only on secret draws, never on which slots are filled;
- `yields_incomplete` is True, so that rules whose terms compare all groups of a step refuse the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.groups import Grouper


class Sampler(Protocol):
    """Draws one step's records."""

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Return the rows of the sampled records, ascending."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DrawnGroups:
    """One step's groups, **private-only** like all draws.

    Attributes:
      rows: int64 `[groups, group_size]`, rows of the records, each below the number of records.
      complete: bool `[groups]`; a group that is not complete contributes zero.
      batch_size: the number of records, or slots, that the step drew; 0 on workers that drew nothing.
    """

    rows: NDArray[np.int64]
    complete: NDArray[np.bool_]
    batch_size: int

    @classmethod
    def all_complete(cls, rows: NDArray[np.int64], *, batch_size: int | None = None) -> DrawnGroups:
        """Return groups that all contribute; `batch_size` is by default their number of records.

        >>> DrawnGroups.all_complete(np.arange(6).reshape(3, 2)).complete.tolist()
        [True, True, True]
        """
        return cls(
            rows=rows,
            complete=np.ones(len(rows), dtype=np.bool_),
            batch_size=rows.size if batch_size is None else batch_size,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_grouped(self) -> int:
        """The number of records in groups that contribute."""
        return int(np.count_nonzero(self.complete)) * int(self.rows.shape[1])

    def take(self, part: slice) -> DrawnGroups:
        """Return the groups of a slice, with their mask."""
        return DrawnGroups(rows=self.rows[part], complete=self.complete[part], batch_size=self.batch_size)

    def filled_up(self, multiple: int) -> DrawnGroups:
        """Return the groups, followed by incomplete groups up to a multiple of `multiple`.

        The added groups refer to row 0, but their inputs are replaced by zeros before a pass. The result can
        be cut into parts of `multiple` groups, all of one shape.

        >>> groups = DrawnGroups.all_complete(np.arange(6).reshape(3, 2)).filled_up(2)
        >>> groups.rows.tolist(), groups.complete.tolist()
        ([[0, 1], [2, 3], [4, 5], [0, 0]], [True, True, True, False])
        """
        num_added = -len(self) % multiple
        return DrawnGroups(
            rows=np.concatenate([self.rows, np.zeros((num_added, self.rows.shape[1]), dtype=np.int64)]),
            complete=np.concatenate([self.complete, np.zeros(num_added, dtype=np.bool_)]),
            batch_size=self.batch_size,
        )


class GroupStage(Protocol):
    """Draws one step's groups."""

    @property
    def yields_incomplete(self) -> bool:
        """Whether a group may be incomplete; this is public and the same for both neighbours."""

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        """Return the groups of one step.

        Args:
          num_records: the number of records of the data set.
          sampling: secret draws that select records or groups.
          permutation: secret draws that place records into groups.
        """


@dataclass(frozen=True, kw_only=True)
class SampledRecords:
    """Samples records, then cuts them into groups.

    Guarantee: the joint guarantee of sampler and grouper, see `dpgcl_core.sampling.groups`.

    >>> from dpgcl_core.sampling.groups import FixedSizeGroups
    >>> from dpgcl_core.sampling.poisson import PoissonSampler
    >>> stage = SampledRecords(
    ...     sampler=PoissonSampler(sampling_prob=1.0), grouper=FixedSizeGroups(group_size=2)
    ... )
    >>> drawn = stage.draw(5, sampling=np.random.default_rng(), permutation=np.random.default_rng())
    >>> drawn.rows.shape, drawn.batch_size
    ((2, 2), 5)
    """

    sampler: Sampler
    grouper: Grouper
    yields_incomplete: ClassVar[bool] = False

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        sample = self.sampler.sample(num_records, sampling)
        return DrawnGroups.all_complete(self.grouper.group(sample, permutation), batch_size=len(sample))
