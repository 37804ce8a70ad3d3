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
        """Returns one draw for the whole flat parameter vector, float32 `[num_coordinates]`, on the CPU.

        One call covers every tensor, so no two tensors can share noise.
        """
        if self.std == 0:
            return torch.zeros(num_coordinates)
        noise = generator.standard_normal(num_coordinates, dtype=np.float32)
        return torch.from_numpy(noise).mul_(self.std)
