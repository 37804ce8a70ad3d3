"""Stage 2 with a public cap on the batch: truncated Poisson sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import require_least
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.poisson import PoissonSampler


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampler:
    """Poisson sampling, truncated to a uniformly random subset of `batch_cap` records if it draws more.

    Raises:
      ConfigError: `sampling_prob` is outside (0, 1], or `batch_cap` below 1.
    """

    sampling_prob: float
    batch_cap: int

    def __post_init__(self) -> None:
        PoissonSampler(sampling_prob=self.sampling_prob)
        require_least(self, 1, "batch_cap")

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Return the rows of the sampled records, `[≤ batch_cap]`, ascending.

        >>> sampler = TruncatedPoissonSampler(sampling_prob=1.0, batch_cap=3)
        >>> len(sampler.sample(10, np.random.default_rng()))
        3
        """
        drawn = PoissonSampler(sampling_prob=self.sampling_prob).sample(num_records, generator)
        if len(drawn) <= self.batch_cap:
            return drawn
        return np.sort(generator.permutation(drawn)[: self.batch_cap])
