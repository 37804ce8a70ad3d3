"""Stage 8, noise: one Gaussian draw per step, once across all workers.

Guarantee: noise of standard deviation σ·Δ on a sum of sensitivity Δ makes a step a Gaussian mechanism with
noise multiplier σ, for the neighbouring relation of Δ.

Floating point. The theorem is about real numbers, but a drawn normal is one of finitely many numbers. Two
attacks exploit this, and this module defends against each (docs/theory/noise.md explains both attacks, and
the remaining risk):

- *Which draws exist* (Mironov 2012; Jin, McMurtry, Rubinstein and Ohrimenko 2022): an attacker searches for
  uniform words that give the noise required by one or the other data set. Defence (Holohan and Braghin 2021):
  each coordinate is the sum of `num_summed` independent normals, divided by √num_summed. It is N(0, 1) again,
  but there are too many words to search. Opacus's secure mode sums four, too.
- *Which bits remain* (Haney, Desfontaines, Hartman, Shrestha and Hay 2022): the low-order bits of a noisy
  sum near zero reveal how large the clean sum was. Defence: round the noisy sum to a public grid (`on_grid`),
  which is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError, require_least
from dpgcl_core.noise.randomness import NUM_SUMMED as NUM_SUMMED
from dpgcl_core.noise.randomness import Draws

_PIECE = 2**15
"""The number of coordinates summed at a time: they fit into the cache."""

_ADDED_PIECE = 2**15
"""The number of coordinates added at a time on a CPU: they fit into the cache, and one thread adds them."""

_GRID_BITS = 20


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """N(0, std²) on every coordinate of the clipped **sum** (never of a mean).

    Attributes:
      std: noise_multiplier × sensitivity of the clipped sum; 0 adds nothing (non-private runs).
      num_summed: the number of independent normals summed for one coordinate. The sum is divided by
        √num_summed, so the distribution stays the same. `NUM_SUMMED` defends against floating-point attacks,
        see the module.

    Raises:
      ConfigError: `num_summed` is below 1.
    """

    std: float
    num_summed: int = 1

    def __post_init__(self) -> None:
        require_least(self, 1, "num_summed")

    def draw(self, num_coordinates: int, generator: Draws) -> Tensor:
        """Return one draw for the whole flat parameter vector, float64 `[num_coordinates]`, on the CPU.

        One call covers every tensor, so no two tensors can share noise. Add the draw to a sum in float64, and
        round the noisy sum once. With a float32 draw some noisy sums would be impossible, and the data set
        would decide which.
        """
        if self.std == 0:
            return torch.zeros(num_coordinates, dtype=torch.float64)
        if self.num_summed == 1:
            return torch.from_numpy(generator.standard_normal(num_coordinates)).mul_(self.std)
        noise = np.zeros(num_coordinates)
        for start in range(0, num_coordinates, _PIECE):
            part = noise[start : start + _PIECE]
            for _ in range(self.num_summed):
                part += generator.standard_normal(len(part))
        return torch.from_numpy(noise).mul_(self.std / math.sqrt(self.num_summed))

    def draw_on_gpu(self, num_coordinates: int, seed: int, device: torch.device | str) -> Tensor:
        """Return a draw with the law of `draw`, made by the device's own generator; for public data only.

        Args:
          num_coordinates: the number of coordinates of the part.
          seed: a fresh seed of 63 bits.
          device: a GPU; on a CPU, PyTorch keeps only 32 bits of a seed.
        """
        generator = torch.Generator(device).manual_seed(seed)
        noise = torch.zeros(num_coordinates, dtype=torch.float64, device=device)
        for _ in range(self.num_summed):
            noise += torch.randn(num_coordinates, dtype=torch.float64, device=device, generator=generator)
        return noise.mul_(self.std / math.sqrt(self.num_summed))

    @property
    def grid(self) -> float:
        """The public spacing of the grid: the largest power of two of at most 2^-20 `std`; 0 without noise.

        >>> GaussianNoise(std=1.5).grid == 2**-20
        True
        """
        return 2.0 ** (math.frexp(self.std)[1] - 1 - _GRID_BITS) if self.std else 0.0

    def on_grid(self, noisy: Tensor) -> Tensor:
        """Round noisy sums, float64, to multiples of `grid` in place, and return them.

        The standard deviation grows by less than one part in 10^13. Without noise nothing is rounded.
        """
        if self.std == 0:
            return noisy
        return noisy.div_(self.grid).round_().mul_(self.grid)

    def add_rounded_once(self, total: Tensor, noise: Tensor) -> None:
        """Add a draw of noise to a clipped sum in place, both float64, and round the result to float32 once.

        With the floating-point defence (`num_summed` above 1) the noisy sum is rounded to the public grid
        first. Rounding to float32 then reveals nothing more. Up to eight standard deviations float32
        represents every multiple of the grid. Beyond them it rounds a multiple, which is post-processing.
        Rounding only to float32 would be no defence: its numbers are denser near zero, so a noisy sum near
        zero would keep its low-order bits.

        Args:
          total: the sum before noise, `[num_coordinates]`, on any device.
          noise: a draw of `draw` or `draw_on_gpu`, `[num_coordinates]`, on the device of `total`.

        Raises:
          ConfigError: the lengths of `total` and `noise` differ.
        """
        if len(total) != len(noise):
            raise ConfigError(f"noise must have one number per coordinate; got {len(noise)} for {len(total)}")
        at_once = _ADDED_PIECE if total.device.type == "cpu" else max(1, len(total))
        for start in range(0, len(total), at_once):
            sums = total[start : start + at_once]
            noisy = sums.double().add_(noise[start : start + at_once])
            sums.copy_((self.on_grid(noisy) if self.num_summed > 1 else noisy).float())
