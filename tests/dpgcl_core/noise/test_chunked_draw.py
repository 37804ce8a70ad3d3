"""Noise in parts: every coordinate has its own, the sum is rounded as a whole would be, memory is reused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dpgcl_core.noise import chunked_draw
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.noise.chunked_draw import (
    add_in_parts,
    in_float32,
    part_noise,
    parts_of,
    purpose_of,
    start_part_noise,
)
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws, SeededNonPrivateRandomness

PART = 1000
LENGTHS = (1, PART - 1, PART, PART + 1, 3 * PART, 7 * PART + 3)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_draw, "PART", PART)


ON_GRID = GaussianNoise.on_grid(noise_multiplier=2.0, sensitivity=1.0, num_coordinates=8 * PART)


def _generator_of(purpose: str) -> Draws:
    return SeededNonPrivateRandomness(5).generator(3, purpose)


def _secure_generator_of(purpose: str) -> Draws:
    return SecureGenerator(fixed_key_for_tests=purpose.encode().ljust(32))


SOURCES = [(GaussianNoise(std=2.0), _generator_of), (ON_GRID, _secure_generator_of)]


def _clean(length: int) -> torch.Tensor:
    return torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [0, *LENGTHS])
def test_parts_hold_every_coordinate_once_and_have_purposes_of_their_own(length: int) -> None:
    found = parts_of(length)
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(length))
    assert len({purpose_of(part) for part in found}) == len(found)


@pytest.mark.parametrize("length", [0, *LENGTHS])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shares_of_workers_hold_every_part_once(length: int, count: int) -> None:
    """Also where the length is no multiple of the number of workers, and where some have nothing."""
    shares = [parts_of(length, rank=rank, count=count) for rank in range(count)]
    assert sorted(part.start for share in shares for part in share) == [p.start for p in parts_of(length)]
    assert all(part in parts_of(length) for share in shares for part in share)
    assert len(shares[0]) - len(shares[-1]) in (0, 1)


@pytest.mark.parametrize(("law", "generator_of"), SOURCES)
def test_noise_of_a_share_leaves_other_coordinates_as_they_are(
    law: GaussianNoise, generator_of: Callable[[str], Draws]
) -> None:
    length, noise_of = 7 * PART + 3, part_noise(law, generator_of)
    expected, actual = _clean(length), _clean(length)
    add_in_parts(expected, law, noise_of, parts_of(length))
    clean = actual.clone()
    second = parts_of(length, rank=1, count=2)
    norm = add_in_parts(actual, law, noise_of, second)
    assert all(torch.equal(actual[part], expected[part]) for part in second)
    assert all(torch.equal(actual[part], clean[part]) for part in parts_of(length) if part not in second)
    assert norm == pytest.approx(float(torch.cat([noise_of(part) for part in second]).norm()))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("law", "generator_of"), SOURCES)
@pytest.mark.parametrize("threads", [0, 3])
def test_sum_is_that_of_the_whole_noise_vector_rounded_once(
    length: int, law: GaussianNoise, generator_of: Callable[[str], Draws], threads: int
) -> None:
    total, noise_of = _clean(length), part_noise(law, generator_of)
    noise = torch.cat([noise_of(part) for part in parts_of(length)])
    expected = total.clone()
    law.add_rounded_once(expected, noise)
    beside = ThreadPoolExecutor(threads) if threads else None
    norm = add_in_parts(total, law, noise_of, parts_of(length), executor=beside)
    assert torch.equal(total, expected)
    assert norm == pytest.approx(float(noise.norm()), rel=1e-12)


@pytest.mark.parametrize(("law", "generator_of"), SOURCES)
def test_no_two_coordinates_share_noise(law: GaussianNoise, generator_of: Callable[[str], Draws]) -> None:
    length = 8 * PART
    total = torch.zeros(length, dtype=torch.float64)
    add_in_parts(total, law, part_noise(law, generator_of), parts_of(length))
    by_part = total.view(8, PART).numpy()
    apart = np.corrcoef(by_part) - np.eye(8)
    assert np.abs(apart).max() < 5 / PART**0.5  # that of parts with one generator is 1
    assert abs(float(total.std()) / law.std - 1) < 5 / (2 * length) ** 0.5


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_draw_the_noise_of_a_share_each_part_once(length: int, num_threads: int) -> None:
    """Also of a share that begins after the first part, or has no part."""
    drawn: list[int] = []

    def noise_of(part: slice) -> torch.Tensor:
        drawn.append(part.start)
        return torch.tensor([part.start])

    for rank in range(2):
        parts = parts_of(length, rank=rank, count=2)
        wait_for = start_part_noise(noise_of, parts, ThreadPoolExecutor(3), num_threads)
        assert [int(wait_for(part)) for part in parts] == [part.start for part in parts]
    assert sorted(drawn) == [part.start for part in parts_of(length)]


def test_noise_of_another_length_than_its_part_is_refused() -> None:
    noise = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="one number per coordinate"):
        add_in_parts(_clean(5), GaussianNoise(std=1.0), lambda part: noise, parts_of(5))


def test_without_noise_the_sum_stays() -> None:
    total, law = _clean(2 * PART).float().double(), GaussianNoise(std=0.0)
    kept = total.clone()
    assert add_in_parts(total, law, part_noise(law, _generator_of), parts_of(2 * PART)) == 0
    assert torch.equal(total, kept)


@pytest.mark.parametrize("length", [0, 1, 2, 2**17 - 1, 2**17, 2**17 + 1, 2**19 + 7])
def test_float32_numbers_take_the_memory_of_the_float64_ones(length: int) -> None:
    total = _clean(length)
    expected = total.float()
    narrow = in_float32(total)
    assert torch.equal(narrow, expected)
    assert narrow.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()


def test_noise_that_a_device_draws_itself_has_a_seed_for_each_part() -> None:
    seeds = iter(range(10))
    asked: list[str] = []

    def generator_of(purpose: str) -> torch.Generator:
        asked.append(purpose)
        return torch.Generator().manual_seed(next(seeds))

    law, length = GaussianNoise(std=2.0), 8 * PART
    noise_of = part_noise(law, generator_of, "cpu")
    total = torch.zeros(length, dtype=torch.float64)
    norm = add_in_parts(total, law, noise_of, parts_of(length))
    assert asked == [purpose_of(part) for part in parts_of(length)]
    assert norm == pytest.approx(float(total.norm()), rel=1e-5)
    apart = np.corrcoef(total.view(8, PART).numpy()) - np.eye(8)
    assert np.abs(apart).max() < 5 / PART**0.5
    assert abs(float(total.std()) / law.std - 1) < 5 / (2 * length) ** 0.5
