"""Procedural images: functions of seed and index alone, of every kind, size and number of channels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from trainers.data import procedural
from trainers.data.procedural import KINDS, LEAF_RADII, procedural_images

SHAPE = (1, 28, 28)


def _images(
    count: int = 96, shape: tuple[int, int, int] = SHAPE, *, seed: int = 0, start: int = 0
) -> NDArray[np.uint8]:
    return procedural_images(np.arange(start, start + count, dtype=np.uint64), shape, seed=seed)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All images are of one kind."""
    name: str = request.param
    only: Mapping[str, object] = {name: (1.0, KINDS[name][1])}
    monkeypatch.setattr(procedural, "KINDS", only)
    return name


def test_shares_of_the_kinds_are_those_of_the_table() -> None:
    assert sum(share for share, _ in KINDS.values()) == pytest.approx(1)
    assert min(share for share, _ in KINDS.values()) > 0


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 24, 40), (2, 17, 9)])
def test_images_of_every_shape_do_not_depend_on_those_beside_them(
    kind: str, shape: tuple[int, int, int]
) -> None:
    together = _images(70, shape)
    assert together.shape == (70, *shape)
    assert together.dtype == np.uint8
    for row in (0, 33, 69):
        assert np.array_equal(_images(1, shape, start=row)[0], together[row])
    backwards = procedural_images(np.arange(70, dtype=np.uint64)[::-1], shape, seed=0)
    assert np.array_equal(backwards[::-1], together)


def test_another_seed_and_another_index_give_another_image(kind: str) -> None:
    images = _images()
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) > 0.9 * len(images)
    assert np.mean(images == _images(seed=1)) < 0.5


def test_images_are_not_blank(kind: str) -> None:
    spread = _images().reshape(96, -1).std(axis=1)
    assert np.median(spread) > 8
    assert np.mean(spread > 2) > 0.9


def test_colours_differ_between_the_channels(kind: str) -> None:
    red, green, _ = _images(shape=(3, 28, 28)).astype(float).transpose(1, 0, 2, 3)
    assert np.abs(red - green).mean() > 10


def test_all_kinds_are_among_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    for name, (share, make) in KINDS.items():

        def counted(draw, shape, name=name, make=make):  # type: ignore[no-untyped-def]
            seen[name] = seen.get(name, 0) + len(draw.indices)
            return make(draw, shape)

        monkeypatch.setitem(KINDS, name, (share, counted))  # type: ignore[arg-type]
    _images(1000, (1, 8, 8))
    for name, (share, _) in KINDS.items():
        assert seen[name] == pytest.approx(1000 * share, abs=4 * (1000 * share * (1 - share)) ** 0.5)


def test_the_images_are_those_of_their_version() -> None:
    """Weights that were kept stand for these images: other ones need another `VERSION`."""
    found = hashlib.sha256(_images(256).tobytes() + _images(64, (3, 16, 24)).tobytes()).hexdigest()
    expected = "2b0c2c675de76e8658100cb07121fffb4157d28926dfe64afdd4201c91ec2fe6"
    assert (procedural.VERSION, found) == (1, expected)


def test_radii_of_leaves_follow_the_scale_free_law() -> None:
    unit = np.random.default_rng(0).random(20_000)
    radii = procedural._scale_free_radii(unit, LEAF_RADII)
    low, high = LEAF_RADII
    assert low <= radii.min()
    assert radii.max() <= high
    # P[radius > r] = (r⁻² − high⁻²) / (low⁻² − high⁻²)
    for radius in (1.2 * low, 2 * low, 4 * low):
        expected = (radius**-2 - high**-2) / (low**-2 - high**-2)
        assert np.mean(radii > radius) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("shape", [(1, 7, 28), (1, 28, 7), (0, 28, 28)])
def test_images_that_hold_no_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="Use larger images"):
        _images(2, shape)


def test_no_images_have_their_shape() -> None:
    assert _images(0).shape == (0, *SHAPE)
