"""Stage 8, noise: one Gaussian draw per step, once across all workers.

Guarantee: noise of standard deviation σ·Δ on a sum of sensitivity Δ makes a step a Gaussian mechanism with
noise multiplier σ, for the neighbouring relation of Δ.

Floating point. The theorem is about real numbers, but a computed normal is one of finitely many numbers. Two
attacks exploit this (docs/theory/noise.md): the attacker searches for the words that give the noise required
by one or the other data set (Mironov 2012; Jin, McMurtry, Rubinstein and Ohrimenko 2022), or reads from
the low-order bits of a noisy sum how large the clean sum was (Haney, Desfontaines, Hartman, Shrestha and Hay
2022). With a public grid neither has anything to exploit, and ε and δ hold as stated:

**Proposition.** With `grid` = g the released sum is a function of one draw from a Gaussian mechanism with
noise multiplier σ. *Proof.* Write [x] for x rounded to a multiple of g. The clean sum s is rounded first. For
neighbouring data sets ‖[s] − [s′]‖ ≤ ‖s − s′‖ + g√d ≤ Δ + g√d in d coordinates, since rounding moves each
coordinate's difference by at most g. `on_grid` therefore takes the standard deviation σ(Δ + g√d). So [s] + Z
with Z ~ N(0, std² I) is a Gaussian mechanism with noise multiplier σ. Then the noise is rounded: the sum of
[s] and [Z] is [[s] + Z], because [s] is on the grid: post-processing. The generator draws [Z] with
exactly this law (`dpgcl_core.noise.rounded_normal`). Both are multiples of g, so float64 adds them without
error up to 2^53·g, and beyond rounds correctly: a function of the exact sum, as is the last rounding, to
float32. No drawn zero is negative, so no released zero has a sign that the sum could have given it. ∎ The
cost is g√d/Δ ≤ 2^-24·σ√d of the noise: 0.02 % at 11 million coordinates and σ = 1, and 0.2 % at σ = 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.noise.rounded_normal import LARGEST_SCALE

_ADDED_PIECE = 2**15
"""The number of coordinates added at a time on a CPU: they fit into the cache, and one thread adds them."""

_GRID_BITS = 24


@dataclass(frozen=True, kw_only=True)
class GaussianNoise:
    """N(0, std²) on every coordinate of the clipped **sum** (never of a mean).

    Attributes:
      std: the standard deviation; 0 adds nothing (non-private runs).
      grid: the public spacing g to whose multiples the sum and the noise are rounded (see the module), a
        power of two; 0 for noise in float64, which has no defence against floating-point attacks.
    """

    std: float
    grid: float = 0.0

    @classmethod
    def of(
        cls, noise_multiplier: float, sensitivity: float, num_grid_coordinates: int | None
    ) -> GaussianNoise:
        """Return the noise of σ and Δ: `on_grid` for so many coordinates, or without a grid for None."""
        if num_grid_coordinates is None:
            return cls(std=noise_multiplier * sensitivity)
        return cls.on_grid(
            noise_multiplier=noise_multiplier, sensitivity=sensitivity, num_coordinates=num_grid_coordinates
        )

    @classmethod
    def on_grid(cls, *, noise_multiplier: float, sensitivity: float, num_coordinates: int) -> GaussianNoise:
        """Return the noise of a sum that is rounded to a grid, with the charge for its rounding.

        Args:
          noise_multiplier: σ; 0 for no noise.
          sensitivity: Δ of the sum before it is rounded.
          num_coordinates: d, the length of the **whole** sum, however many draws cover it.

        Raises:
          ConfigError: the noise is too small or too large for float64, or too large for its grid.

        >>> GaussianNoise.on_grid(noise_multiplier=1.5, sensitivity=1.0, num_coordinates=2**20)
        GaussianNoise(std=1.500091552734375, grid=5.960464477539063e-08)
        """
        if noise_multiplier == 0:
            return cls(std=0.0)
        std = noise_multiplier * sensitivity
        grid = 2.0 ** (math.frexp(std)[1] - 1 - _GRID_BITS)
        charged_std = std + noise_multiplier * grid * math.sqrt(num_coordinates)
        if not (2.0**-900 <= std <= 2.0**900 and charged_std <= LARGEST_SCALE * grid):
            raise ConfigError(
                "noise_multiplier times sensitivity must give noise that can be rounded to a grid; got "
                f"{noise_multiplier:g} × {sensitivity:g} in {num_coordinates} coordinates. Use another "
                "noise_multiplier"
            )
        return cls(std=charged_std, grid=grid)

    def draw(
        self, num_coordinates: int, generator: Draws | torch.Generator, gpu: torch.device | str | None = None
    ) -> Tensor:
        """Return one draw for the whole flat parameter vector, float64 `[num_coordinates]`.

        One call covers every tensor, so no two tensors can share noise. Add the draw to a sum in float64, and
        round the noisy sum once. With a float32 draw some noisy sums would be impossible, and the data set
        would decide which.

        Args:
          num_coordinates: the length of the vector.
          generator: a secret generator of this draw alone; a GPU's own generator, which is not
            cryptographic, is for public data without a grid.
          gpu: the GPU that computes and holds the draw, from a source's `gpu_generators`; None for the CPU.

        Raises:
          ConfigError: noise on a grid is not drawn by a `SecureGenerator`, or noise without one is.
        """
        if self.std == 0:
            return torch.zeros(num_coordinates, dtype=torch.float64, device=gpu)
        if bool(self.grid) != isinstance(generator, SecureGenerator):
            raise ConfigError(
                "noise must be on a grid exactly if a SecureGenerator draws it; got the grid "
                f"{self.grid:g} and a {type(generator).__name__}. Use GaussianNoise.on_grid for it"
            )
        if isinstance(generator, torch.Generator):
            normals = torch.randn(num_coordinates, dtype=torch.float64, device=gpu, generator=generator)
            return normals.mul_(self.std)
        if not isinstance(generator, SecureGenerator):
            return torch.from_numpy(generator.standard_normal(num_coordinates)).mul_(self.std)
        scale = self.std / self.grid
        if gpu is not None:
            return generator.rounded_normal_on(gpu, num_coordinates, scale).mul_(self.grid)
        return torch.from_numpy(generator.rounded_normal(num_coordinates, scale)).mul_(self.grid)

    def add_rounded_once(self, total: Tensor, noise: Tensor) -> None:
        """Add a draw of noise to a clipped sum in place, both float64, and round the result to float32 once.

        With a grid the sum is rounded to it first.

        Args:
          total: the sum before noise, `[num_coordinates]`, on any device.
          noise: a draw of `draw`, `[num_coordinates]`, on the device of `total`.

        Raises:
          ConfigError: the lengths of `total` and `noise` differ.
        """
        if len(total) != len(noise):
            raise ConfigError(f"noise must have one number per coordinate; got {len(noise)} for {len(total)}")
        at_once = _ADDED_PIECE if total.device.type == "cpu" else max(1, len(total))
        for start in range(0, len(total), at_once):
            sums = total[start : start + at_once]
            sums.copy_((self._rounded(sums) + noise[start : start + at_once]).float())

    def _rounded(self, sums: Tensor) -> Tensor:
        return sums.double().div(self.grid).round_().mul_(self.grid) if self.grid else sums.double()


def noised(values: Tensor, noise_multiplier: float, sensitivity: float, generator: Draws) -> Tensor:
    """Return float64 `values` plus one draw of noise; on a grid if the generator is cryptographic.

    Guarantee: a Gaussian mechanism with `noise_multiplier`, if the values as computed have this sensitivity
    (see the module).

    Args:
      values: the values that are released together, of any shape, on any device.
      noise_multiplier: σ = noise std / sensitivity; 0 returns the values.
      sensitivity: the largest L2 distance of the values of two neighbouring data sets.
      generator: a secret generator of these draws alone.

    >>> generator = SecureGenerator(fixed_key_for_tests=bytes(32))
    >>> noised(torch.tensor([10.0]), 1.0, 1.0, generator) * 2**24 % 1
    tensor([0.], dtype=torch.float64)
    """
    num_grid_coordinates = values.numel() if isinstance(generator, SecureGenerator) else None
    law = GaussianNoise.of(noise_multiplier, sensitivity, num_grid_coordinates)
    drawn = law.draw(values.numel(), generator).to(values.device)
    return law._rounded(values) + drawn.view(values.shape)
