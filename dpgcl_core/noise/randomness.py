"""Sources of secret randomness, seeded afresh by the operating system for every step.

Sampling, permutation and noise must be secret and independent across steps, trials and resumes. Ten
trials that share one sampler seed really spend ε = 59, although composition charges 6.2, and a resume that
re-seeds the noise repeats it. So no generator state is ever stored, and no draw depends on the user's seed,
except in `SeededNonPrivateRandomness`, which a run must request and which is part of the run's label.

`torch.Generator` on the CPU is not used: its Mersenne Twister keeps only the low 32 bits of a seed, so the
whole run's noise could be found by trying 2^32 seeds. numpy's PCG64DXSM is seeded here with 256 bits.
It is a statistical generator, not a cryptographic one, and is the default for public data only. Private data
use the stream of `dpgcl_core.noise.chacha20`, where `choose_randomness` selects the source.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Draws(Protocol):
    """The kinds of draws that sampling, grouping and noise need; `np.random.Generator` has them."""

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Return independent uniform numbers in [0, 1), `[size]`."""

    def permutation(self, x: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return the entries of `x` in uniformly random order."""

    def integers(self, low: int, high: int, size: int, /) -> NDArray[np.int64]:
        """Return independent uniform integers in [low, high), `[size]`."""

    def standard_normal(self, size: int, /) -> NDArray[np.float64]:
        """Return independent draws from N(0, 1), `[size]`."""


class DrawSource(Protocol):
    """A source of fresh draws for one step and purpose."""

    @property
    def is_exact(self) -> bool:
        """Whether noise from this source must be drawn exactly on a grid (`GaussianNoise.on_grid`)."""

    @property
    def description(self) -> str:
        """The source in words, for tracked parameters and the privacy statement."""

    def generator(self, step: int, purpose: str) -> Draws:
        """Return the draws of `purpose` ("sampling", "permutation", "noise" and the like) at `step`."""

    def gpu_generators(self, device: torch.device) -> Callable[[str], Draws | torch.Generator] | None:
        """Return a function from purposes to fresh generators of a GPU's noise; None if the CPU draws all."""


class SecretRandomness:
    """A source of generators that the operating system seeds at every call; its arguments have no effect.

    A GPU may draw the noise itself, with PyTorch's counter-based generator (Philox 4×32 with ten rounds;
    Salmon et al. 2011), seeded afresh for every draw. Neither generator is cryptographic, so this source is
    for public data only.

    Two calls with the same arguments return independent generators, so a step that is repeated after a
    crash is an independent draw and must be charged once more.

    >>> source = SecretRandomness()
    >>> a, b = source.generator(0, "noise"), source.generator(0, "noise")
    >>> bool(a.random() == b.random())
    False
    """

    is_exact = False
    description = (
        "PCG64DXSM, seeded afresh by the operating system for every step; noise on a GPU by Philox 4×32-10"
    )

    def generator(self, step: int, purpose: str) -> np.random.Generator:
        entropy = np.random.SeedSequence(secrets.randbits(256), pool_size=8)
        return np.random.Generator(np.random.PCG64DXSM(entropy))

    def gpu_generators(self, device: torch.device) -> Callable[[str], torch.Generator]:
        import torch  # imported here, because options are checked without loading torch

        return lambda purpose: torch.Generator(device).manual_seed(secrets.randbits(63))


class SeededNonPrivateRandomness:
    """A source of reproducible generators from a seed, for tests and runs labelled as non-private.

    It has **no privacy guarantee**: anyone who knows the seed can repeat every draw.

    >>> a, b = (SeededNonPrivateRandomness(1).generator(5, "noise").random() for _ in range(2))
    >>> bool(a == b)
    True
    """

    is_exact = False
    description = "PCG64DXSM, seeded by the public seed: NO GUARANTEE"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def generator(self, step: int, purpose: str) -> np.random.Generator:
        words = [self._seed, step, *purpose.encode()]
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(words)))

    def gpu_generators(self, device: torch.device) -> None:
        return None  # so that the run is the same on any device
