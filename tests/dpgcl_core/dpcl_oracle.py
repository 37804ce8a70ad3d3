"""DPCL's losses term by term, its noise given in advance, and the counterexamples to its published 4C."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Normals = NDArray[np.float64]


class GivenNormals:
    """Draws whose normals are given in advance, in the order they are asked for."""

    def __init__(self, *normals: Normals) -> None:
        self._normals = list(normals)

    def random(self, size: int, /) -> NDArray[np.float64]:
        raise AssertionError("these methods sample nothing themselves")

    def permutation(self, x: NDArray[np.int64], /) -> NDArray[np.int64]:
        raise AssertionError("these methods permute nothing")

    def standard_normal(self, size: int, /) -> NDArray[np.float64]:
        normals = self._normals.pop(0)
        assert normals.size == size
        return normals.reshape(-1).copy()  # what draws may be changed in place


def slow_nt_xent(similarities: Tensor, temperature: float) -> Tensor:
    """Eq. 3 and 4 of DPCL, term by term."""
    num_views, loss = len(similarities), torch.zeros((), dtype=similarities.dtype)
    for i in range(num_views):
        partner = i + 1 if i % 2 == 0 else i - 1
        denominator = sum(torch.exp(similarities[i, k] / temperature) for k in range(num_views) if k != i)
        loss = loss - torch.log(torch.exp(similarities[i, partner] / temperature) / denominator)
    return loss / num_views


def slow_barlow(
    z: Tensor,
    mean_noise: Tensor,
    square_noise: Tensor,
    *,
    variance_floor: float,
    off_diagonal_weight: float,
) -> Tensor:
    """Eq. 5 of DPCL for `z` `[records, 2, dim]` at statistics with the given noise `[2, dim]` added."""
    num_records, _, dim = z.shape
    normalised = []
    for side in range(2):
        exact = z[:, side].detach()
        mean = exact.mean(0) + mean_noise[side]
        squares = (exact**2).sum(0) - num_records * exact.mean(0) ** 2 + square_noise[side]
        variance = torch.maximum(squares / (num_records - 1), torch.tensor(variance_floor))
        normalised.append((z[:, side] - mean) / variance.sqrt())
    loss = torch.zeros((), dtype=z.dtype)
    for i, j in itertools.product(range(dim), repeat=2):
        c_ij = sum(normalised[0][b, i] * normalised[1][b, j] for b in range(num_records)) / (num_records - 1)
        loss = loss + ((1 - c_ij) ** 2 if i == j else off_diagonal_weight * c_ij**2)
    return loss


def simclr_counterexample(
    batch_size: int, sign: float, *, temperature: float, noise_std: float
) -> tuple[Tensor, Normals]:
    """Inputs and normals for z = Wx at W = 1: record 0 has both views at sign·e₂, all others stand at e₁.

    The released similarities are the same for either sign: every other view has found its partner, and
    record 0 prefers the others.
    """
    inputs = torch.zeros(1, batch_size, 2, 2)
    inputs[:, 1:, :, 0], inputs[:, :1, :, 1] = 1.0, sign
    released = torch.zeros(2 * batch_size, 2 * batch_size, dtype=torch.float64)
    for view in range(2, 2 * batch_size):
        released[view, view ^ 1] = 200 * temperature
    released[0, 1] = released[1, 0] = -200 * temperature
    views = inputs.flatten(0, 2).double()
    return inputs, ((released - views @ views.T) / noise_std).numpy()


def barlow_counterexample(
    batch_size: int, sign: float, *, mean_std: float, square_std: float
) -> tuple[Tensor, Normals, Normals]:
    """Inputs and normals for z = Wx at W = 1: all views at e₁ but record 0's second, at sign·e₁.

    Means 0 and variances 1 are released for either sign.
    """
    inputs = torch.zeros(1, batch_size, 2, 2)
    inputs[..., 0] = 1.0
    inputs[0, 0, 1, 0] = sign
    means = inputs[0].double().mean(0)
    squares = (inputs[0].double() - means).square().sum(0)
    return inputs, (-means / mean_std).numpy(), ((batch_size - 1 - squares) / square_std).numpy()
