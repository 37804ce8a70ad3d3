"""Stages 2 and 3 in one: what a step draws in secret, the groups that are computed and those that count.

A group that is not complete is computed like any other, so that shapes and work tell nothing of the records,
and contributes exactly zero (`dpgcl_core.clipping.clipper`). The loop passes rows and mask on and knows no
more of how they came about.

`SampledRecords` draws records and cuts them into groups: all of its groups are complete. A stage that draws
*groups* of slots, some of which may be empty, needs of its implementation:

- the slots are those of a public capacity, the same for both neighbours, and `num_records` of them are
  filled; more records than slots are refused before the first step;
- the placement of the records is an injection into the slots whose law does not depend on which of them are
  filled, never a numbering of the records that are there;
- whole groups are kept, each independently with fresh secret bits, and **all** of them are returned: one
  with an empty slot is marked as not complete, and the slot stands for any row that exists, whose values
  nobody sees;
- the rows' number and shape depend on secret draws alone, never on which slots are filled;
- `yields_incomplete` is True, so that rules whose terms compare all groups of a step refuse the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
    """One step's groups, **private-only** like all that is drawn.

    Attributes:
      rows: int64 `[groups, group_size]`, rows of the records, each of them below their number.
      complete: bool `[groups]`; a group that is not complete contributes zero.
      batch_size: records, or slots, that the step drew; 0 on workers that drew nothing.
    """

    rows: NDArray[np.int64]
    complete: NDArray[np.bool_]
    batch_size: int

    @classmethod
    def all_complete(cls, rows: NDArray[np.int64], *, batch_size: int | None = None) -> DrawnGroups:
        """Return groups that all contribute; their records are the batch unless its size is given.

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
        """Records in groups that contribute."""
        return int(np.count_nonzero(self.complete)) * int(self.rows.shape[1])

    def take(self, part: slice) -> DrawnGroups:
        """Return some of the groups, with their mask."""
        return DrawnGroups(rows=self.rows[part], complete=self.complete[part], batch_size=self.batch_size)

    def filled_up(self, multiple: int) -> DrawnGroups:
        """Return the groups, and behind them incomplete ones up to a multiple of a number of groups.

        Their slots stand for the first row until their inputs are made; the step passes zeros in their place,
        lest a record decide how a pass goes. Cut into parts of `multiple` groups, every part is of one shape.

        >>> groups = DrawnGroups.all_complete(np.arange(6).reshape(3, 2)).filled_up(2)
        >>> groups.rows.tolist(), groups.complete.tolist()
        ([[0, 1], [2, 3], [4, 5], [0, 0]], [True, True, True, False])
        """
        lacking = -len(self) % multiple
        return DrawnGroups(
            rows=np.concatenate([self.rows, np.zeros((lacking, self.rows.shape[1]), dtype=np.int64)]),
            complete=np.concatenate([self.complete, np.zeros(lacking, dtype=np.bool_)]),
            batch_size=self.batch_size,
        )


class GroupStage(Protocol):
    """Draws one step's groups."""

    @property
    def yields_incomplete(self) -> bool:
        """Whether a group may be incomplete: public, and the same for both neighbours."""

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        """Return the groups of one step.

        Args:
          num_records: of the data set.
          sampling: secret draws that decide who takes part.
          permutation: secret draws that decide who stands with whom.
        """


@dataclass(frozen=True, kw_only=True)
class SampledRecords:
    """Records are sampled, then cut into groups.

    Guarantee: that of sampler and grouper together; see `dpgcl_core.sampling.groups`.

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

    @property
    def yields_incomplete(self) -> bool:
        return False

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        sample = self.sampler.sample(num_records, sampling)
        return DrawnGroups.all_complete(self.grouper.group(sample, permutation), batch_size=len(sample))
