"""The noise keeps its law, and what floating point shows of a clean sum is taken away."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core import noise as noise_module
from dpgcl_core.errors import ConfigError
from dpgcl_core.noise import NUM_SUMMED, GaussianNoise
from dpgcl_core.secure_randomness import SecureGenerator

SIGNIFICANCE = 1e-3


def _generator(key: int = 0) -> SecureGenerator:
    return SecureGenerator(fixed_key_for_tests=key.to_bytes(32, "big"))


class _Counted:
    """Gives k in its k-th call, and remembers the sizes asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def standard_normal(self, size: int, /) -> NDArray[np.float64]:
        self.sizes.append(size)
        return np.full(size, float(len(self.sizes)))

    random = permutation = None  # type: ignore[assignment]


@pytest.mark.parametrize("num_summed", [1, 2, 3, NUM_SUMMED])
def test_noise_has_the_same_law_however_many_are_summed(num_summed: int) -> None:
    drawn = GaussianNoise(std=2.5, num_summed=num_summed).draw(100_000, _generator(num_summed)).numpy()
    assert stats.kstest(drawn / 2.5, "norm").pvalue > SIGNIFICANCE
    assert stats.kstest(1.04 * drawn / 2.5, "norm").pvalue < SIGNIFICANCE / 100


def test_noise_is_drawn_and_kept_in_float64() -> None:
    drawn = GaussianNoise(std=0.7, num_summed=NUM_SUMMED).draw(1000, _generator())
    assert drawn.dtype == torch.float64
    assert not torch.equal(drawn, drawn.float().double())


def test_summed_noise_is_the_sum_over_the_root_of_the_count() -> None:
    source = _Counted()
    drawn = GaussianNoise(std=3.0, num_summed=4).draw(2, source)  # type: ignore[arg-type]
    assert drawn.tolist() == [3.0 * (1 + 2 + 3 + 4) / 2] * 2
    assert source.sizes == [2] * 4


def test_plain_noise_is_one_draw() -> None:
    source = _Counted()
    assert GaussianNoise(std=3.0).draw(5, source).tolist() == [3.0] * 5  # type: ignore[arg-type]
    assert source.sizes == [5]


@pytest.mark.parametrize("num_coordinates", [0, 1, 7, 2**15, 2**15 + 1, 3 * 2**15 + 2])
def test_every_coordinate_gets_its_own_summed_noise(num_coordinates: int) -> None:
    drawn = GaussianNoise(std=1.0, num_summed=NUM_SUMMED).draw(num_coordinates, _generator())
    assert len(drawn) == len(drawn.unique()) == num_coordinates
    assert (drawn != 0).all()


def test_summed_noise_is_uncorrelated_across_tensors_and_steps() -> None:
    noise, length = GaussianNoise(std=1.0, num_summed=NUM_SUMMED), 100_000
    steps = [noise.draw(2 * length, _generator(key)).numpy() for key in (11, 12, 13)]
    tensors = np.stack([half for step in steps for half in (step[:length], step[length:])])
    for values in (tensors, tensors**2):
        assert np.abs(np.corrcoef(values) - np.eye(len(values))).max() < 4 / math.sqrt(length)


def test_two_normals_of_one_pair_never_meet_in_a_sum() -> None:
    """Their sum is a single normal; here each of the four comes from words of its own."""
    length = 2 * 2**14
    parts = _generator(14)
    summed = sum(parts.standard_normal(length) for _ in range(NUM_SUMMED))
    drawn = GaussianNoise(std=1.0, num_summed=NUM_SUMMED).draw(length, _generator(14))
    assert np.array_equal(drawn.numpy(), 0.5 * summed)


def test_noise_without_std_is_zero_and_draws_nothing() -> None:
    source = _Counted()
    assert not GaussianNoise(std=0.0, num_summed=4).draw(3, source).any()  # type: ignore[arg-type]
    assert not source.sizes


def test_sum_of_no_normals_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_summed must be at least 1; got 0"):
        GaussianNoise(std=1.0, num_summed=0)


@pytest.mark.parametrize("std", [1e-8, 0.3, 1.0, 1.999, 512.0])
def test_grid_is_a_power_of_two_below_the_noise(std: float) -> None:
    grid = GaussianNoise(std=std).grid
    assert math.frexp(grid)[0] == 0.5
    assert std * 2**-21 < grid <= std * 2**-20


def _shown_by_low_bits(noisy: torch.Tensor) -> float:
    """The share of noisy sums that are multiples of 2^-53, as all are whose clean sum or noise is near 1."""
    return float((noisy * 2.0**53 == (noisy * 2.0**53).round()).double().mean())


def test_grid_hides_how_large_the_clean_sum_was() -> None:
    """Low-order bits of noisy sums near zero tell a clean sum of 0 from one of 1; on the grid they do not."""
    small = GaussianNoise(std=1e-9).draw(10_000, _generator(15))
    from_zero, from_one = 0.0 + small, 1.0 + (small - 1.0)
    assert _shown_by_low_bits(from_zero) < 0.1
    assert _shown_by_low_bits(from_one) == 1.0
    noise = GaussianNoise(std=1.0)
    for noisy in (noise.on_grid(from_zero), noise.on_grid(from_one)):
        assert _shown_by_low_bits(noisy) == 1.0


def test_grid_moves_a_noisy_sum_by_half_its_spacing_at_most() -> None:
    noise = GaussianNoise(std=3.0)
    noisy = noise.draw(10_000, _generator(16))
    rounded = noise.on_grid(noisy.clone())
    moved = (rounded - noisy).abs()
    assert 0.4 * noise.grid < float(moved.max()) <= 0.5 * noise.grid
    assert torch.equal(rounded / noise.grid, (rounded / noise.grid).round())


def test_grid_without_noise_rounds_nothing() -> None:
    values = torch.tensor([0.1, 1e-30], dtype=torch.float64)
    assert torch.equal(GaussianNoise(std=0.0).on_grid(values.clone()), values)


def test_piece_size_changes_nothing_in_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_PIECE", 7)
    drawn = GaussianNoise(std=1.0, num_summed=2).draw(5000, _generator(17)).numpy()
    assert stats.kstest(drawn, "norm").pvalue > SIGNIFICANCE
