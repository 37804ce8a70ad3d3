"""The noise keeps its law, and what floating point shows of a clean sum is taken away."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise import gaussian as noise_module
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.noise.gaussian import NUM_SUMMED, GaussianNoise
from dpgcl_core.release.noised_counts import noised_count, noised_norm

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


def _sums_and_noise(length: int, std: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(length, generator=generator)
    return total, std * torch.randn(length, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2**17, 2**18 + 3])
def test_noise_is_added_in_float64_and_rounded_once(length: int) -> None:
    total, noise = _sums_and_noise(length, 1.0)
    expected = (total.double() + noise).float()
    GaussianNoise(std=1.0).add_rounded_once(total, noise)
    assert torch.equal(total, expected)


def test_sum_in_float64_is_rounded_after_the_noise_and_not_before() -> None:
    total = torch.tensor([2.0**24 + 1], dtype=torch.float64)
    GaussianNoise(std=1.0).add_rounded_once(total, torch.tensor([1.0], dtype=torch.float64))
    assert total.item() == 2.0**24 + 2
    GaussianNoise(std=1.0).add_rounded_once(total, torch.tensor([0.5], dtype=torch.float64))
    assert total.item() == 2.0**24 + 2


@pytest.mark.parametrize("std", [0.02, 1.0, 1.9])
@pytest.mark.parametrize("length", [1, 2**17, 2**18 + 3])
def test_noisy_sum_with_the_defence_goes_to_the_grid_before_it_is_rounded(length: int, std: float) -> None:
    total, noise = _sums_and_noise(length, std)
    law = GaussianNoise(std=std, num_summed=NUM_SUMMED)
    on_grid = ((total.double() + noise) / law.grid).round() * law.grid
    law.add_rounded_once(total, noise)
    assert torch.equal(total, on_grid.float())
    assert torch.equal(total.double() / law.grid, (total.double() / law.grid).round())


@pytest.mark.parametrize("std", [0.02, 1.0, 1.9])
def test_float32_holds_every_multiple_of_the_grid_up_to_eight_standard_deviations(std: float) -> None:
    grid = GaussianNoise(std=std).grid
    largest = math.floor(8 * std / grid)
    multiples = grid * torch.tensor([1, 3, largest - 2, largest - 1, largest], dtype=torch.float64)
    assert torch.equal(multiples.float().double(), multiples)


def test_noise_of_another_length_is_refused() -> None:
    total, _ = _sums_and_noise(5, 1.0)
    with pytest.raises(ConfigError, match="one number per coordinate; got 1 for 5"):
        GaussianNoise(std=1.0).add_rounded_once(total, torch.ones(1, dtype=torch.float64))


def test_sum_without_noise_is_left_as_it_is_with_the_defence() -> None:
    total, _ = _sums_and_noise(5, 1.0)
    kept = total.clone()
    law = GaussianNoise(std=0.0, num_summed=NUM_SUMMED)
    law.add_rounded_once(total, law.draw(5, _generator()))
    assert torch.equal(total, kept)


@pytest.mark.parametrize(("sampling", "std"), [("groups", 1.5), ("records", 3.0)])
def test_mechanisms_noise_sums_as_many_as_its_source_asks_for(sampling: str, std: float) -> None:
    mechanism = Mechanism(
        num_records_public=60,
        sampling_prob=0.5,
        group_size=4,
        l2_clip_norm=1.0,
        noise_multiplier=1.5,
        num_steps=1,
        target_delta=1e-3,
        sampling=sampling,
    )
    assert mechanism.noise(num_summed=4) == GaussianNoise(std=std, num_summed=4)
    assert mechanism.noise() == GaussianNoise(std=std)


def test_noised_count_and_norm_sum_as_many_as_asked_for() -> None:
    source = _Counted()
    assert noised_count(10, 3.0, source, num_summed=4) == 10 + 15  # type: ignore[arg-type]
    assert noised_norm(10.0, 2.0, 3.0, source, num_summed=4) == 10 + 6 * (5 + 6 + 7 + 8) / 2  # type: ignore[arg-type]
    assert source.sizes == [1] * 8


def test_noised_norm_is_on_its_grid() -> None:
    grid = GaussianNoise(std=6.0).grid
    for key in range(20):
        released = noised_norm(math.pi, 2.0, 3.0, _generator(key)) / grid
        assert released == round(released)


def test_piece_size_changes_nothing_in_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_PIECE", 7)
    drawn = GaussianNoise(std=1.0, num_summed=2).draw(5000, _generator(17)).numpy()
    assert stats.kstest(drawn, "norm").pvalue > SIGNIFICANCE
