"""Stage 4: a view is a function of its own record, id, seed, step and view index."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.record_ids import keyed_uniform
from trainers.config.training import ViewConfig
from trainers.views.image_views import (
    Draw,
    colour_matrices,
    crop_boxes,
    jitter_factors,
    make_views,
    normalise,
)

OFF = ViewConfig(min_crop_area=1.0, max_crop_area=1.0, flip_prob=0.0, brightness=0.0, contrast=0.0)
CROP = ViewConfig(min_crop_area=0.4, max_crop_area=0.9, flip_prob=0.0, brightness=0.0, contrast=0.0)
EVERYTHING = ViewConfig(
    min_crop_area=0.3,
    max_crop_area=1.0,
    flip_prob=0.5,
    brightness=0.4,
    contrast=0.4,
    saturation=0.4,
    hue=0.1,
    blur_prob=0.5,
)
SHAPES = [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 9, 12), (2, 8, 8)]


def _records(n: int, shape: tuple[int, int, int] = (3, 16, 16)) -> tuple[Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(n)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    return images, np.random.default_rng(n).integers(0, 2**63, n).astype(np.uint64)


def _views(
    images: Tensor,
    ids: np.ndarray,
    config: ViewConfig = EVERYTHING,
    *,
    seed: int = 3,
    step: int = 7,
    num_views: int = 2,
) -> Tensor:
    return make_views(images, ids, config=config, seed=seed, step=step, num_views=num_views)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [[5], [0, 2, 3, 8, 11], list(range(12))[::-1]], ids=["one", "some", "all"])
def test_views_do_not_depend_on_other_records(shape: tuple[int, int, int], rows: list[int]) -> None:
    images, ids = _records(12, shape)
    assert torch.equal(_views(images[rows], ids[rows]), _views(images, ids)[rows])


def test_views_do_not_depend_on_other_records_content() -> None:
    images, ids = _records(4)
    changed = images.clone()
    changed[0] = 255 - changed[0]
    assert torch.equal(_views(changed, ids)[1:], _views(images, ids)[1:])


def test_views_do_not_depend_on_number_of_views() -> None:
    images, ids = _records(4)
    assert torch.equal(_views(images, ids, num_views=4)[:, :2], _views(images, ids, num_views=2))


@pytest.mark.parametrize("changed", [{"step": 8}, {"seed": 4}])
def test_views_differ_with_step_and_seed(changed: dict[str, int]) -> None:
    images, ids = _records(4)
    moved = (_views(images, ids, **changed) - _views(images, ids)).abs().amax(dim=(2, 3, 4))
    assert (moved > 0.01).all()


def test_views_differ_with_id() -> None:
    images, ids = _records(4)
    moved = (_views(images, ids + np.uint64(1)) - _views(images, ids)).abs().amax(dim=(2, 3, 4))
    assert (moved > 0.01).all()


def test_views_differ_with_view_index() -> None:
    images, ids = _records(4)
    views = _views(images, ids)
    assert ((views[:, 0] - views[:, 1]).abs().amax(dim=(1, 2, 3)) > 0.01).all()


def test_views_accept_numpy_integers_as_the_same_key() -> None:
    images, ids = _records(4)
    assert torch.equal(_views(images, ids, step=np.int64(7), seed=np.int64(3)), _views(images, ids))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_views_without_augmentation_are_normalised_images(shape: tuple[int, int, int]) -> None:
    images, ids = _records(5, shape)
    assert torch.equal(_views(images, ids, OFF), normalise(images)[:, None].expand(-1, 2, -1, -1, -1))


def test_views_leave_their_images_alone() -> None:
    images, ids = _records(5, (1, 8, 8))
    before = images.clone()
    _views(images, ids)
    assert torch.equal(images, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_views_stay_in_range(shape: tuple[int, int, int]) -> None:
    images, ids = _records(50, shape)
    assert _views(images, ids).abs().max() <= 1 + 1e-5


def test_views_of_no_record_are_empty() -> None:
    images, ids = _records(3)
    assert _views(images[:0], ids[:0]).shape == (0, 2, 3, 16, 16)


def test_views_refuse_ids_of_other_records() -> None:
    images, ids = _records(3)
    with pytest.raises(ConfigError, match=r"3, 16, 16.* and 2 ids"):
        _views(images, ids[:2])


def test_normalise_maps_pixels_to_unit_range() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    assert torch.allclose(normalise(pixels).flatten(), torch.tensor([-1.0, -0.6, 1.0]))


def _bilinear(image: np.ndarray, row: float, column: float) -> float:
    """One pixel read at fractional coordinates; outside the image, its nearest border pixel."""
    height, width = image.shape
    row, column = min(max(row, 0.0), height - 1), min(max(column, 0.0), width - 1)
    r, c = min(int(row), height - 2), min(int(column), width - 2)
    a, b = row - r, column - c
    return float(
        (1 - a) * ((1 - b) * image[r, c] + b * image[r, c + 1])
        + a * ((1 - b) * image[r + 1, c] + b * image[r + 1, c + 1])
    )


@pytest.mark.parametrize("flip_prob", [0.0, 1.0])
def test_crop_and_flip_equal_slow_oracle(flip_prob: float) -> None:
    config = dataclasses.replace(CROP, flip_prob=flip_prob)
    images, ids = _records(3, (2, 8, 10))
    left, top, width, height = (
        box[1, 1] for box in crop_boxes(Draw(ids, seed=3, step=7, num_views=2), config)
    )
    expected = np.zeros((2, 8, 10))
    for channel, image in enumerate(normalise(images)[1].numpy()):
        for i in range(8):
            for j in range(10):
                row = (top + height * (i + 0.5) / 8) * 8 - 0.5
                column = (left + width * (j + 0.5) / 10) * 10 - 0.5
                expected[channel, i, 9 - j if flip_prob else j] = _bilinear(image, row, column)
    np.testing.assert_allclose(_views(images, ids, config)[1, 1].numpy(), expected, atol=1e-4)


def test_crop_keeps_constant_image() -> None:
    images, ids = torch.full((500, 1, 8, 8), 200, dtype=torch.uint8), np.arange(500, dtype=np.uint64)
    assert torch.allclose(_views(images, ids, CROP), normalise(images)[:, None], atol=1e-5)


def test_flip_without_crop_is_exact_mirror() -> None:
    images, ids = _records(4)
    config = dataclasses.replace(OFF, flip_prob=1.0)
    assert torch.equal(_views(images, ids, config)[:, 0], normalise(images).flip(-1))


@pytest.mark.parametrize("config", [OFF, CROP], ids=["exact", "resampled"])
def test_flip_happens_at_its_rate(config: ViewConfig) -> None:
    ramp = torch.arange(0, 160, 10, dtype=torch.uint8).expand(4000, 1, 16, 16)
    ids = np.arange(4000, dtype=np.uint64)
    views = _views(ramp, ids, dataclasses.replace(config, flip_prob=0.3), num_views=1)
    flipped = (views[..., 0, 0] > views[..., 0, -1]).float().mean().item()
    assert abs(flipped - 0.3) < 0.04


def test_crop_area_is_uniform_in_range() -> None:
    draw = Draw(np.arange(20_000, dtype=np.uint64), seed=0, step=0, num_views=1)
    _, _, width, height = crop_boxes(draw, CROP)
    deciles = np.quantile(width * height, np.linspace(0, 1, 11))
    np.testing.assert_allclose(deciles, np.linspace(0.4, 0.9, 11), atol=0.015)


def test_crop_boxes_lie_inside_image() -> None:
    draw = Draw(np.arange(20_000, dtype=np.uint64), seed=0, step=0, num_views=1)
    left, top, width, height = crop_boxes(draw, dataclasses.replace(CROP, max_crop_area=1.0))
    corners = np.stack([left, top, 1 - left - width, 1 - top - height])
    assert corners.min() >= -1e-12


def test_crop_aspect_covers_its_range() -> None:
    draw = Draw(np.arange(20_000, dtype=np.uint64), seed=0, step=0, num_views=1)
    _, _, width, height = crop_boxes(draw, dataclasses.replace(CROP, max_crop_area=0.5))
    aspects = np.log(width / height) / np.log(4 / 3)
    np.testing.assert_allclose([aspects.min(), np.median(aspects), aspects.max()], [-1, 0, 1], atol=0.03)


def test_crop_of_fixed_area_keeps_aspect() -> None:
    draw = Draw(np.arange(100, dtype=np.uint64), seed=0, step=0, num_views=1)
    _, _, width, height = crop_boxes(draw, ViewConfig(min_crop_area=0.64, max_crop_area=0.64))
    np.testing.assert_allclose([width, height], np.full((2, 100, 1), 0.8))


@pytest.mark.parametrize(("index", "name"), enumerate(["brightness", "contrast", "saturation"]))
def test_jitter_factor_is_uniform_in_range(index: int, name: str) -> None:
    draw = Draw(np.arange(20_000, dtype=np.uint64), seed=0, step=0, num_views=1)
    factors = jitter_factors(draw, dataclasses.replace(OFF, **{name: 0.4}))[index]
    quartiles = np.quantile(factors, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(quartiles, [0.6, 0.8, 1, 1.2, 1.4], atol=0.015)


def test_parameters_of_a_record_are_independent() -> None:
    draw = Draw(np.arange(20_000, dtype=np.uint64), seed=0, step=0, num_views=2)
    names = ["crop_area", "crop_left", "flip", "brightness", "hue"]
    columns = np.concatenate([draw.unit(name) for name in names], axis=1)
    correlations = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlations).max() < 0.04


def test_draw_is_the_documented_hash() -> None:
    ids = np.arange(5, dtype=np.uint64)
    expected = keyed_uniform(ids, "view", 3, 7, 1, "flip")
    np.testing.assert_array_equal(Draw(ids, seed=3, step=7, num_views=2).unit("flip")[:, 1], expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_and_contrast_equal_slow_oracle(channels: int) -> None:
    config = dataclasses.replace(OFF, brightness=0.3, contrast=0.8)
    images, ids = _records(3, (channels, 8, 8))
    brightness, contrast, _, _ = (
        factor[2, 1] for factor in jitter_factors(Draw(ids, seed=3, step=7, num_views=2), config)
    )
    bright = images[2].double().numpy() / 255 * brightness
    luma = bright[0] if channels == 1 else 0.299 * bright[0] + 0.587 * bright[1] + 0.114 * bright[2]
    expected = 2 * np.clip((bright - luma.mean()) * contrast + luma.mean(), 0, 1) - 1
    np.testing.assert_allclose(_views(images, ids, config)[2, 1].numpy(), expected, atol=1e-5)


def test_hue_keeps_luma() -> None:
    # Pale colours, so that no channel is clamped.
    images, ids = _records(6)
    images = images // 8 + 110
    views = _views(images, ids, dataclasses.replace(OFF, hue=0.5))
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    luma = (normalise(images) * weights).sum(1)
    assert torch.allclose((views * weights).sum(2)[:, 0], luma, atol=1e-5)


def test_hue_moves_colours() -> None:
    images, ids = _records(6)
    views = _views(images, ids, dataclasses.replace(OFF, hue=0.5))
    assert ((views[:, 0] - normalise(images)).abs().amax(dim=(1, 2, 3)) > 0.05).all()


def test_hue_turns_once_around() -> None:
    turns = np.array([1 / 3, 1 / 3, 1 / 3])
    first, second, third = colour_matrices(np.ones(3), turns)
    np.testing.assert_allclose(first @ second @ third, np.eye(3), atol=1e-12)


def test_zero_saturation_is_grey() -> None:
    colour = np.array([0.9, 0.2, 0.4])
    grey = colour_matrices(np.array(0.0), np.array(0.2)) @ colour
    np.testing.assert_allclose(grey, np.full(3, 0.299 * 0.9 + 0.587 * 0.2 + 0.114 * 0.4), atol=1e-3)


@pytest.mark.parametrize("channels", [1, 2])
def test_hue_and_saturation_leave_colourless_images_alone(channels: int) -> None:
    images, ids = _records(4, (channels, 8, 8))
    views = _views(images, ids, dataclasses.replace(OFF, hue=0.5, saturation=1.0))
    assert torch.equal(views[:, 0], normalise(images))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 20, 9)])
def test_blur_keeps_constant_image(shape: tuple[int, int, int]) -> None:
    images, ids = torch.full((4, *shape), 200, dtype=torch.uint8), np.arange(4, dtype=np.uint64)
    views = _views(images, ids, dataclasses.replace(OFF, blur_prob=1.0, max_blur_sigma=3.0))
    assert torch.allclose(views, normalise(images)[:, None], atol=1e-5)


def test_blur_equals_slow_oracle() -> None:
    config = dataclasses.replace(OFF, blur_prob=1.0, min_blur_sigma=0.5, max_blur_sigma=1.5)
    images, ids = _records(3, (2, 8, 11))
    sigma = Draw(ids, seed=3, step=7, num_views=2).between("blur_sigma", 0.5, 1.5)[1, 1]
    taps = np.arange(-5, 6)
    kernel = np.exp(-0.5 * (taps / sigma) ** 2)
    kernel /= kernel.sum()
    expected = np.zeros((2, 8, 11))
    for channel, image in enumerate(normalise(images)[1].numpy()):
        padded = np.pad(image, 5, mode="reflect")
        for i in range(8):
            for j in range(11):
                expected[channel, i, j] = kernel @ padded[i : i + 11, j : j + 11] @ kernel
    np.testing.assert_allclose(_views(images, ids, config)[1, 1].numpy(), expected, atol=1e-5)


def test_blur_happens_at_its_rate_and_leaves_the_rest_exact() -> None:
    images, _ = _records(1, (1, 8, 8))
    views = _views(
        images.expand(2000, -1, -1, -1),
        np.arange(2000, dtype=np.uint64),
        dataclasses.replace(OFF, blur_prob=0.3, min_blur_sigma=1.0),
    )
    is_exact = (views == normalise(images)).all(dim=4).all(dim=3).all(dim=2)
    assert abs(1 - is_exact.float().mean().item() - 0.3) < 0.04
