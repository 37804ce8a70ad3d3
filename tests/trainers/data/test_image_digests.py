"""Digests of images: what counts as a copy, what as similar, and what as neither."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from trainers.data.channels import with_channels
from trainers.data.image_digests import DIGESTS, find_copies, find_similar, image_digests


def pictures(num: int, *, size: int = 96, seed: int = 0) -> list[Image.Image]:
    """Smooth colour pictures, each of its own composition, as photographs are."""
    pixels = np.random.default_rng(seed).integers(40, 216, (num, 12, 12, 3), dtype=np.uint8)
    return [Image.fromarray(each).resize((size, size), Image.Resampling.BICUBIC) for each in pixels]


def digests(images: list[Image.Image], side: int = 32) -> np.ndarray:
    """Digests after resizing, as a data set is loaded with an image size."""
    resized = [np.asarray(image.resize((side, side), Image.Resampling.BOX)) for image in images]
    return image_digests(np.stack(resized).transpose(0, 3, 1, 2))


def jpeg(image: Image.Image) -> Image.Image:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=75)
    return Image.open(out)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": jpeg,
    "smaller": lambda image: image.resize((64, 64), Image.Resampling.BILINEAR),
    "larger": lambda image: image.resize((200, 150), Image.Resampling.BICUBIC),
    "brighter": lambda image: image.point(lambda value: value + 20),
    "darker": lambda image: image.point(lambda value: value * 0.8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_pictures_are_similar_and_no_copies(change: str) -> None:
    images = pictures(60)
    changed = digests([CHANGES[change](image) for image in images])
    found = find_similar(changed, digests(images))
    assert (found >= 0).mean() > 0.9
    assert (found[found >= 0] == np.flatnonzero(found >= 0)).all()
    assert (find_copies(changed, digests(images)) == -1).all()


def test_different_pictures_are_not_similar() -> None:
    assert (find_similar(digests(pictures(300)), digests(pictures(300, seed=1))) == -1).all()


def test_copies_are_found_at_their_places() -> None:
    images = digests(pictures(20))
    for find in (find_copies, find_similar):
        assert find(images[[4, 17]], images).tolist() == [4, 17]
        assert find(images, images[[4, 17]]).tolist() == [{4: 0, 17: 1}.get(row, -1) for row in range(20)]


def test_grey_copies_of_grey_pictures_in_colour_are_copies() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (5, 1, 20, 24), dtype=np.uint8)
    assert (image_digests(grey) == image_digests(with_channels(grey, 3))).all()


@pytest.mark.parametrize("side", [8, 32])
def test_flat_and_tiny_images_are_similar_to_copies_alone(side: int) -> None:
    flat = np.full((256, 3, side, side), np.arange(256, dtype=np.uint8)[:, None, None, None], dtype=np.uint8)
    noisy = flat[100:104] + (np.random.default_rng(0).random((4, 3, side, side)) < 0.02).astype(np.uint8)
    sharp = np.random.default_rng(1).integers(0, 256, (5, 3, side, side), dtype=np.uint8)
    assert (image_digests(sharp)["look"] > 0).all() == (side == 32)
    found = find_similar(image_digests(np.concatenate([flat[:50], noisy])), image_digests(flat[40:]))
    assert found.tolist() == [*[-1] * 40, *range(10), *[-1] * 4]


def test_digests_do_not_depend_on_the_images_beside() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 3, 30, 20), dtype=np.uint8)
    one_by_one = np.concatenate([image_digests(image[None]) for image in pixels])
    assert (image_digests(pixels) == one_by_one).all()


@pytest.mark.parametrize("num_bits", range(7))
def test_hashes_are_similar_up_to_four_bits_anywhere(num_bits: int) -> None:
    """Against a comparison with every hash, among hashes that have bands in common."""
    generator = np.random.default_rng(num_bits)
    others = np.zeros(50, DIGESTS)
    others["pixels"], others["look"] = np.arange(50), generator.integers(1, 2**63, 50)
    others["look"][25:] = others["look"][:25] ^ np.uint64(0b11111 << 40)
    images = others[generator.integers(0, 50, 200)]
    images["pixels"] = np.arange(100, 300)
    for row in range(200):
        for bit in generator.choice(64, num_bits, replace=False):
            images["look"][row] ^= np.uint64(1) << np.uint64(bit)
    distances = np.bitwise_count(images["look"][:, None] ^ others["look"])
    found = find_similar(images, others)
    assert ((found >= 0) == (distances.min(axis=1) <= 4)).all()
    rows = np.flatnonzero(found >= 0)
    assert (distances[rows, found[rows]] <= 4).all()
