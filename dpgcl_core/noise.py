"""Station 8, noise: one Gaussian draw per step, once across all workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """N(0, std²) on every coordinate of the clipped **sum** (never of a mean).

    Attributes:
      std: noise_multiplier × sensitivity of the clipped sum; 0 adds nothing (non-private runs).
    """

    std: float

    def draw(self, num_coordinates: int, generator: np.random.Generator) -> Tensor:
        """Returns one draw for the whole flat parameter vector, float64 `[num_coordinates]`, on the CPU.

        One call covers every tensor, so no two tensors can share noise. It is to be added in float64 and
        rounded once: a float32 draw would leave gaps that tell the sum from its neighbours.
        """
        if self.std == 0:
            return torch.zeros(num_coordinates, dtype=torch.float64)
        return torch.from_numpy(generator.standard_normal(num_coordinates)).mul_(self.std)
