"""Stage 2 of methods that replace one record: batches of a fixed size without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, require_least
from dpgcl_core.noise.randomness import Draws


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler:
    """Draws a uniformly random set of exactly `batch_size` records, independently for every step.

    Raises:
      ConfigError: `batch_size` is below 1, or above the number of records.
    """

    batch_size: int

    def __post_init__(self) -> None:
        require_least(self, 1, "batch_size")

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Return the rows of the sampled records, `[batch_size]`, ascending.

        >>> FixedSizeSampler(batch_size=3).sample(3, np.random.default_rng())
        array([0, 1, 2])
        """
        if self.batch_size > num_records:
            raise ConfigError(
                f"batch_size must be at most the number of records; got {self.batch_size}. Lower it"
            )
        return np.sort(generator.permutation(np.arange(num_records))[: self.batch_size])
