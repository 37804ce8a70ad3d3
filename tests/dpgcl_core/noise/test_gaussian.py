"""The noise keeps its law, and a released sum is a function of a Gaussian mechanism's output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.noise.gaussian import GaussianNoise, noised
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.release.noised_counts import noised_count, noised_norm

SIGNIFICANCE = 1e-3


def _generator(key: int = 0) -> SecureGenerator:
    return SecureGenerator(fixed_key_for_tests=key.to_bytes(32, "big"))


def _on_grid(std: float, num_coordinates: int = 1) -> GaussianNoise:
    return GaussianNoise.on_grid(noise_multiplier=std, sensitivity=1.0, num_coordinates=num_coordinates)


LAWS = [(GaussianNoise(std=2.5), np.random.default_rng), (_on_grid(2.5), _generator)]
Source = Callable[[int], Draws]


@pytest.mark.parametrize(("law", "source"), LAWS, ids=("float64", "grid"))
def test_noise_has_the_law_of_a_normal(law: GaussianNoise, source: Source) -> None:
    drawn = law.draw(100_000, source(1)).numpy()
    assert drawn.dtype == np.float64
    assert stats.kstest(drawn / 2.5, "norm").pvalue > SIGNIFICANCE
    assert stats.kstest(1.04 * drawn / 2.5, "norm").pvalue < SIGNIFICANCE / 100


@pytest.mark.parametrize(("law", "source"), LAWS, ids=("float64", "grid"))
def test_noise_is_uncorrelated_across_tensors_and_steps(law: GaussianNoise, source: Source) -> None:
    length = 100_000
    steps = [law.draw(2 * length, source(key)).numpy() for key in (11, 12, 13)]
    tensors = np.stack([half for step in steps for half in (step[:length], step[length:])])
    for values in (tensors, tensors**2):
        assert np.abs(np.corrcoef(values) - np.eye(len(values))).max() < 4 / math.sqrt(length)


@pytest.mark.parametrize("num_coordinates", [0, 1, 7, 2**15, 2**15 + 1, 3 * 2**15 + 2])
def test_every_coordinate_gets_noise_of_its_own(num_coordinates: int) -> None:
    drawn = _on_grid(1.0).draw(num_coordinates, _generator())
    assert len(drawn) == num_coordinates
    assert len(drawn.unique()) >= 0.999 * num_coordinates
    assert (drawn / _on_grid(1.0).grid).frac().eq(0).all()


def test_noise_without_std_is_zero_and_draws_nothing() -> None:
    law = _on_grid(0.0)
    assert law == GaussianNoise(std=0.0)
    assert not law.draw(3, None).any()  # type: ignore[arg-type]


def test_grid_and_cryptographic_generator_need_each_other() -> None:
    with pytest.raises(ConfigError, match=r"got the grid 5\.96046e-08 and a Generator"):
        _on_grid(1.0).draw(3, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="got the grid 0 and a SecureGenerator"):
        GaussianNoise(std=1.0).draw(3, _generator())


@pytest.mark.parametrize(
    ("noise_multiplier", "sensitivity"),
    [(1e-320, 1.0), (5e-324, 0.1), (1e-310, 1.0), (1e13, 1.0), (1e300, 1e10)],
)
def test_noise_that_no_grid_can_hold_is_refused(noise_multiplier: float, sensitivity: float) -> None:
    with pytest.raises(ConfigError, match=r"can be rounded to a grid; got .* in 1000 coordinates"):
        GaussianNoise.on_grid(
            noise_multiplier=noise_multiplier, sensitivity=sensitivity, num_coordinates=1000
        )


@pytest.mark.parametrize("sensitivity", [1e-30, 1e-6, 1e30])
def test_any_sensitivity_has_a_grid(sensitivity: float) -> None:
    law = GaussianNoise.on_grid(noise_multiplier=1.0, sensitivity=sensitivity, num_coordinates=1000)
    released = _release(law, torch.full((1000,), sensitivity, dtype=torch.float64), 6)
    assert abs(float(released.std()) / sensitivity - 1) < 0.1


@pytest.mark.parametrize("std", [1e-8, 0.3, 1.0, 1.999, 512.0])
def test_grid_is_a_power_of_two_below_the_noise(std: float) -> None:
    grid = _on_grid(std).grid
    assert math.frexp(grid)[0] == 0.5
    assert std * 2**-25 < grid <= std * 2**-24


def _release(law: GaussianNoise, sums: torch.Tensor, key: int) -> torch.Tensor:
    total = sums.clone()
    law.add_rounded_once(total, law.draw(len(total), _generator(key)))
    return total


def test_noise_covers_the_sum_after_it_is_rounded() -> None:
    """The worst neighbours: each coordinate's difference grows by almost a whole spacing."""
    num_coordinates, sensitivity, sigma = 10_000, 1e-6, 2.0
    law = GaussianNoise.on_grid(
        noise_multiplier=sigma, sensitivity=sensitivity, num_coordinates=num_coordinates
    )
    just_below = torch.full((num_coordinates,), 0.4999 * law.grid, dtype=torch.float64)
    neighbour = just_below + sensitivity / math.sqrt(num_coordinates)
    still = replace(law, std=0.0)  # rounds, and adds nothing
    moved = (_release(still, neighbour, 1) - _release(still, just_below, 1)).norm()
    assert float(moved) > sensitivity
    assert law.std >= sigma * float(moved)
    largest = sensitivity + law.grid * math.sqrt(num_coordinates)
    assert law.std == pytest.approx(sigma * largest, rel=1e-12)


def test_released_sum_shows_the_rounded_sum_alone() -> None:
    """Two sums in one cell give the same release bit for bit, signs of zeros and low bits included."""
    law = _on_grid(1.0, 50_000)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randint(-3, 4, (50_000,), generator=generator).double() * law.grid
    offsets = (torch.rand(2, 50_000, generator=generator, dtype=torch.float64) - 0.5) * 0.99 * law.grid
    small = replace(law, std=2 * law.grid)  # so that many noisy sums are zero
    for scale in (law, small):
        released = [_release(scale, centres + offset, 3) for offset in offsets]
        assert torch.equal(released[0].view(torch.int64), released[1].view(torch.int64))
    assert (released[0] == 0).sum() > 1000


def test_release_moves_with_the_rounded_sum_exactly() -> None:
    """The noise does not depend on the sum: under one key the releases differ by whole spacings."""
    law = _on_grid(1.0, 1000)
    sums = torch.randn(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, second = (_noisy_in_float64(law, row) for row in sums)
    multiples = sums.div(law.grid).round()
    assert torch.equal((first - second) / law.grid, multiples[0] - multiples[1])


def _noisy_in_float64(law: GaussianNoise, sums: torch.Tensor) -> torch.Tensor:
    return law._rounded(sums) + law.draw(len(sums), _generator(4))


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


@pytest.mark.parametrize("length", [1, 2**15, 2**17 + 3])
def test_sum_goes_to_the_grid_before_the_noise_and_to_float32_after_it(length: int) -> None:
    law = _on_grid(1.9, length)
    total = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = law.draw(length, _generator(5))
    expected = (total.div(law.grid).round().mul(law.grid) + noise).float()
    law.add_rounded_once(total, noise)
    assert torch.equal(total, expected.double())


def test_noise_of_another_length_is_refused() -> None:
    total, _ = _sums_and_noise(5, 1.0)
    with pytest.raises(ConfigError, match="one number per coordinate; got 1 for 5"):
        GaussianNoise(std=1.0).add_rounded_once(total, torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize(("sampling", "sensitivity"), [("groups", 1.0), ("records", 2.0)])
def test_mechanism_charges_the_grid_of_the_whole_sum(sampling: str, sensitivity: float) -> None:
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
    assert mechanism.noise() == GaussianNoise(std=1.5 * sensitivity)
    assert mechanism.noise(num_grid_coordinates=10**6) == GaussianNoise.on_grid(
        noise_multiplier=1.5, sensitivity=sensitivity, num_coordinates=10**6
    )


def test_noised_values_take_the_grid_from_a_cryptographic_generator_alone() -> None:
    values = torch.tensor([[0.1, -7.3]])
    law = GaussianNoise.on_grid(noise_multiplier=3.0, sensitivity=2.0, num_coordinates=2)
    exact = noised(values, 3.0, 2.0, _generator())
    assert exact.shape == values.shape
    assert (exact / law.grid).frac().eq(0).all()
    plain = noised(values, 3.0, 2.0, np.random.default_rng(0))
    normals = np.random.default_rng(0).standard_normal(2)
    assert torch.equal(plain, values.double() + 6.0 * torch.from_numpy(normals))
    assert torch.equal(noised(values, 0.0, 2.0, _generator()), values.double())
    assert noised(torch.zeros(0), 3.0, 2.0, _generator()).shape == (0,)


def test_noised_counts_and_norms_have_their_deviation() -> None:
    counts = [noised_count(10, 3.0, _generator(key)) for key in range(400)]
    norms = [noised_norm(10.0, 2.0, 3.0, _generator(key)) for key in range(400)]
    for released, std in ((counts, 3.0), (norms, 6.0)):
        assert abs(np.mean(released) - 10) < 4 * std / 20
        assert abs(np.std(released) / std - 1) < 4 / math.sqrt(800)
