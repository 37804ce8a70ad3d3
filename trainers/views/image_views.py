"""Stage 4, views: a record becomes its augmented views, each a function of only that record.

Every random parameter of a view is a keyed hash of the record's id. So the views of a record do not
depend on which other records were sampled, on the order of the batch or on the number of workers.
Adding or removing one record leaves every other record's views unchanged, and therefore one record
affects only one group. Hash outputs are public randomness; secrecy is not needed here.

The transformations are those of SimCLR (Chen et al. 2020, appendix A) in one pass over the tensor.
Crop and flip are one bilinear resampling, all colour changes are one affine map of the colour vector,
and blur is one product with a banded matrix per axis.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.record_ids import Ids, keyed_uniform
from trainers.config.networks import ViewConfig

PIXEL_MEAN = 0.5
"""Subtracted from pixels in [0, 1]; a constant, because using the data's own mean would disclose it."""

PIXEL_STD = 0.5
"""Divides the centred pixels; a constant for the same reason."""

MAX_LOG_ASPECT = math.log(4 / 3)
"""Crops of random area have a log aspect ratio in ± this (Szegedy et al. 2015)."""

# Rows: luma Y and the two chroma axes I and Q of NTSC. Grey has zero chroma, so a rotation or a scaling
# of (I, Q) keeps luma exactly and does not change grey pixels.
_YIQ_FROM_RGB = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_RGB_FROM_YIQ = np.linalg.inv(_YIQ_FROM_RGB)

Parameter = NDArray[np.float64]


def normalise(images: Tensor) -> Tensor:
    """Return float32 images in [−1, 1], scaled by public constants.

    Args:
      images: uint8 `[n, channels, height, width]`.

    >>> normalise(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).tolist()
    [[[[-1.0, 1.0]]]]
    """
    return images.to(torch.float32).div_(255).sub_(PIXEL_MEAN).div_(PIXEL_STD)


def make_views(
    images: Tensor, ids: Ids, *, config: ViewConfig, seed: int, step: int, num_views: int
) -> Tensor:
    """Return the augmented, normalised views of each record, float32 `[n, num_views, C, H, W]`.

    A view is a function of (record, id, public seed, step, view index) and nothing else, because every
    random parameter is `keyed_uniform(ids, "view", seed, step, view_index, name)`. Hence views never
    couple records: removing or permuting other rows does not change a row's views. With a crop area of 1
    and every other strength 0 the result is exactly `normalise(images)`.

    Args:
      images: uint8 `[n, C, H, W]`, on any device; n may be 0.
      ids: uint64 `[n]`, the records' stable ids.
      config: the strengths; saturation and hue act only on three-channel images.
      seed: public seed.
      step: training step, so that a record sampled again gets fresh views.
      num_views: views per record; view k does not depend on how many there are.

    Raises:
      ConfigError: images and ids do not belong together.

    >>> ids = np.arange(3, dtype=np.uint64)
    >>> images = torch.arange(3 * 64).reshape(3, 1, 8, 8).to(torch.uint8)
    >>> views = make_views(images, ids, config=ViewConfig(), seed=0, step=5, num_views=2)
    >>> alone = make_views(images[2:], ids[2:], config=ViewConfig(), seed=0, step=5, num_views=2)
    >>> tuple(views.shape), torch.equal(views[2:], alone)
    ((3, 2, 1, 8, 8), True)
    """
    if images.ndim != 4 or images.dtype != torch.uint8 or len(images) != len(ids):
        raise ConfigError(
            "images must be uint8 [n, channels, height, width] with one id each; "
            f"got {images.dtype} {list(images.shape)} and {len(ids)} ids"
        )
    draw = Draw(ids, int(seed), int(step), num_views)
    # Everything below works on normalised pixels: bilinear weights and blur weights sum to one, so they
    # commute with the normalisation, which then runs once per record and not once per view.
    views = _crop_and_flip(normalise(images), draw, config)
    views = _jitter(views, draw, config)
    return _blur(views, draw, config) if config.blur_prob > 0 else views


class Draw:
    """The random numbers of one call of `make_views` or `make_text_views`, hashed per record and view."""

    def __init__(self, ids: Ids, seed: int, step: int, num_views: int) -> None:
        self.ids, self.seed, self.step, self.num_views = ids, seed, step, num_views

    def unit(self, name: str) -> Parameter:
        """Return uniform numbers in [0, 1), `[n, num_views]`."""
        columns = [
            keyed_uniform(self.ids, "view", self.seed, self.step, view, name)
            for view in range(self.num_views)
        ]
        return np.stack(columns, axis=1) if columns else np.empty((len(self.ids), 0))

    def between(self, name: str, low: float | Parameter, high: float | Parameter) -> Parameter:
        """Return uniform numbers in [low, high), `[n, num_views]`."""
        return low + (high - low) * self.unit(name)


def _tensor(values: Parameter, like: Tensor) -> Tensor:
    # Parameters are computed in float64 on the host and rounded once: a vectorised float32 sin or exp
    # may round a row differently depending on its place in the batch.
    return torch.from_numpy(values.astype(np.float32)).to(like.device)


def _crop_and_flip(images: Tensor, draw: Draw, config: ViewConfig) -> Tensor:
    """Crop, resize and flip at random, `[n, C, H, W]` to `[n, num_views, C, H, W]`."""
    n, channels, height, width = images.shape
    num_views = draw.num_views
    if images.numel() == 0 or num_views == 0:
        return images.new_zeros(n, num_views, channels, height, width)
    is_flipped = draw.unit("flip") < config.flip_prob
    if config.min_crop_area == 1:
        # No resampling, so pixels stay exact: position k of a row comes from k or from its mirror image.
        views = images[:, None].expand(-1, num_views, -1, -1, -1)
        if not is_flipped.any():
            return views.contiguous()
        flip = torch.from_numpy(is_flipped).to(images.device)[:, :, None, None, None]
        return torch.where(flip, views.flip(-1), views)
    left, top, crop_width, crop_height = crop_boxes(draw, config)
    columns = _sample_points(left, crop_width, width, images, mirror=is_flipped)
    rows = _sample_points(top, crop_height, height, images)
    grid = images.new_empty(n, num_views, height, width, 2)
    grid[..., 0] = columns[:, :, None, :]
    grid[..., 1] = rows[:, :, :, None]
    # The views of a record are stacked along the height of the output: one call, no copied input.
    views = F.grid_sample(
        images,
        grid.view(n, num_views * height, width, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return views.view(n, channels, num_views, height, width).transpose(1, 2).contiguous()


def crop_boxes(draw: Draw, config: ViewConfig) -> tuple[Parameter, Parameter, Parameter, Parameter]:
    """Return (left, top, width, height) of each crop as shares of the image, each `[n, num_views]`.

    The area is uniform in the configured range. The aspect ratio (relative to the image's own) is 1 if the
    area is fixed; otherwise it is log-uniform in the part of [3/4, 4/3] for which the box fits into the
    image, so no draw is rejected and every box has exactly its area. The position is uniform.
    """
    area = draw.between("crop_area", config.min_crop_area, config.max_crop_area)
    log_aspect: Parameter = np.zeros_like(area)
    if config.min_crop_area < config.max_crop_area:
        limit = np.minimum(MAX_LOG_ASPECT, -np.log(area))
        log_aspect = draw.between("crop_aspect", -limit, limit)
    width = np.minimum(np.sqrt(area * np.exp(log_aspect)), 1.0)
    height = np.minimum(np.sqrt(area * np.exp(-log_aspect)), 1.0)
    left = draw.unit("crop_left") * (1 - width)
    top = draw.unit("crop_top") * (1 - height)
    return left, top, width, height


def _sample_points(
    start: Parameter, extent: Parameter, side: int, like: Tensor, mirror: NDArray[np.bool_] | None = None
) -> Tensor:
    """Return the coordinates at which output pixels are read, `[n, num_views, side]`, for `grid_sample`."""
    centre = 2 * start + extent - 1
    scale = extent if mirror is None else np.where(mirror, -extent, extent)
    pixel_centres = (2 * np.arange(side) + 1) / side - 1
    return _tensor(centre[..., None] + scale[..., None] * pixel_centres, like)


def jitter_factors(draw: Draw, config: ViewConfig) -> tuple[Parameter, Parameter, Parameter, Parameter]:
    """Return brightness, contrast and saturation factors and the hue in turns, each `[n, num_views]`."""
    brightness, contrast, saturation = (
        draw.between(name, 1 - getattr(config, name), 1 + getattr(config, name))
        for name in ("brightness", "contrast", "saturation")
    )
    return brightness, contrast, saturation, draw.between("hue", -config.hue, config.hue)


def _jitter(views: Tensor, draw: Draw, config: ViewConfig) -> Tensor:
    """Change brightness b, contrast c (about the view's own mean luma), saturation and hue; clamp once.

    With x in [0, 1] and colour matrix A (which keeps grey), x ↦ c·b·A·x + (1 − c)·b·mean. In normalised
    pixels y = 2x − 1 that is y ↦ c·b·A·y + (1 − c)·b·mean(y) + b − 1.
    """
    channels = views.shape[2]
    is_coloured = channels == 3 and (config.saturation > 0 or config.hue > 0)
    if views.numel() == 0 or not (config.brightness or config.contrast or is_coloured):
        return views
    brightness, contrast, saturation, hue = jitter_factors(draw, config)
    shift = _tensor(brightness - 1, views)
    if config.contrast:
        shift = shift + _tensor((1 - contrast) * brightness, views) * _mean_luma(views)
    shift = shift[:, :, None, None, None]
    if is_coloured:
        matrices = _tensor((contrast * brightness)[..., None, None] * colour_matrices(saturation, hue), views)
        flat = views.flatten(3).flatten(0, 1)
        views = torch.bmm(matrices.flatten(0, 1), flat).view(views.shape)
    else:
        views.mul_(_tensor(contrast * brightness, views)[:, :, None, None, None])
    return views.add_(shift).clamp_(-1, 1)


def _mean_luma(views: Tensor) -> Tensor:
    """Return the mean luma of each view, `[n, num_views]`; the plain mean unless there are three channels."""
    means = views.mean(dim=(3, 4))
    if views.shape[2] != 3:
        return means.mean(dim=2)
    return (means * _tensor(_YIQ_FROM_RGB[0], views)).sum(dim=2)


def colour_matrices(saturation: Parameter, hue: Parameter) -> NDArray[np.float64]:
    """Return the RGB matrices `[..., 3, 3]` that scale chroma and rotate it by `hue` turns, luma kept.

    >>> bool(np.allclose(colour_matrices(np.array(1.0), np.array(0.0)), np.eye(3)))
    True
    """
    cosine, sine = saturation * np.cos(2 * np.pi * hue), saturation * np.sin(2 * np.pi * hue)
    in_yiq = np.zeros((*saturation.shape, 3, 3))
    in_yiq[..., 0, 0] = 1
    in_yiq[..., 1, 1], in_yiq[..., 1, 2] = cosine, -sine
    in_yiq[..., 2, 1], in_yiq[..., 2, 2] = sine, cosine
    matrices: NDArray[np.float64] = _RGB_FROM_YIQ @ in_yiq @ _YIQ_FROM_RGB
    return matrices


def _blur(views: Tensor, draw: Draw, config: ViewConfig) -> Tensor:
    """Blur randomly chosen views by a Gaussian, one matrix product per axis; other views stay exact."""
    if views.numel() == 0:
        return views
    n, num_views, channels, height, width = views.shape
    sigma = draw.between("blur_sigma", config.min_blur_sigma, config.max_blur_sigma).ravel()
    is_blurred = (draw.unit("blur") < config.blur_prob).ravel()
    radius = math.ceil(3 * config.max_blur_sigma)
    flat = views.view(n * num_views, channels * height, width)
    by_columns = _tensor(_blur_matrices(sigma, is_blurred, width, radius), views)
    flat = torch.bmm(flat, by_columns.transpose(1, 2))
    by_rows = by_columns
    if height != width:
        by_rows = _tensor(_blur_matrices(sigma, is_blurred, height, radius), views)
    by_rows = by_rows[:, None].expand(-1, channels, -1, -1)
    flat = torch.matmul(by_rows, flat.view(n * num_views, channels, height, width))
    return flat.view(views.shape)


def _blur_matrices(
    sigma: Parameter, is_blurred: NDArray[np.bool_], side: int, radius: int
) -> NDArray[np.float64]:
    """Return the matrices that blur along one axis, `[views, side, side]`; the identity if not blurred."""
    radius = min(radius, side - 1)
    taps = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (taps / sigma[:, None]) ** 2)
    weights = np.where(is_blurred[:, None], weights / weights.sum(axis=1, keepdims=True), taps == 0)
    source = np.abs(np.arange(side)[:, None] + taps)
    source = np.where(source >= side, 2 * (side - 1) - source, source)
    spread = np.zeros((len(taps), side, side))
    np.add.at(spread, (np.arange(len(taps))[None, :], np.arange(side)[:, None], source), 1.0)
    matrices: NDArray[np.float64] = (weights @ spread.reshape(len(taps), -1)).reshape(-1, side, side)
    return matrices
