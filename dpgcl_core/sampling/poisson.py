"""Stage 2, the Poisson sampler: every record joins every step independently with `sampling_prob`.

Only one worker draws the sample, in secret. An empty draw is a step like any other: noise is still added and
the step is still charged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.randomness import Draws


@dataclass(frozen=True, kw_only=True)
class PoissonSampler:
    """Poisson sampling with inclusion probability `sampling_prob`.

    Guarantee: if the generator's draws are independent and uniform, record r is in the sample independently
    of every other record. So for neighbouring data sets D' = D ∪ {r} and q = `sampling_prob`, the law of the
    sample of D' is (1 − q)·law(D) + q·(law(D) with r added), as the event `PoissonSampled` assumes.

    Raises:
      ConfigError: `sampling_prob` is outside (0, 1].
    """

    sampling_prob: float

    def __post_init__(self) -> None:
        if not 0 < self.sampling_prob <= 1:
            raise ConfigError(f"sampling_prob must be in (0, 1]; got {self.sampling_prob}")

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Return the rows of the sampled records, `[realised_batch_size]`, ascending.

        >>> PoissonSampler(sampling_prob=1.0).sample(3, np.random.default_rng())
        array([0, 1, 2])
        """
        return np.flatnonzero(generator.random(num_records) < self.sampling_prob).astype(np.int64)
