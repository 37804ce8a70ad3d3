"""Procedural images: generated from numbers only, so that learning from them costs no privacy.

Every image is a function of only (seed, index, image shape). It depends on no file, record or state, and not
on the other images generated with it. Random parameters are keyed hashes. Shapes are drawn with additions,
products and comparisons, which round identically everywhere. Sines, roots and sums of products are computed
in float64 and the result is rounded to 8 bits, so that differences in a platform's last bits vanish.

The kinds of images are listed here. Baradad et al. (2021, "Learning to see by looking at noise") compare what
networks learn from most of them:

- *Dead leaves* (Lee, Mumford and Huang 2001): shapes at uniform places, each in front of the earlier ones.
  Radii r have density ∝ r⁻³, the law under which the picture looks alike at every scale. The shapes are
  ellipses, rectangles and triangles, turned and stretched, plain or textured.
- *Objects*: a few large shapes about the centre of a plain ground, mirrored in half of the images.
- *Octaves*: value noise, lattices of doubled fineness added up with falling weights (Perlin 1985).
- *Stripes*: gratings of any direction, smooth or sharp, straight or bent by octaves.
- *Fractals*: the attractor of two to four random contractions (Barnsley 1988; as pre-training: Kataoka et al.
  2020, "Pre-training without natural images").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.record_ids import Ids, keyed_uniform
from trainers.data.pairs import LoadedData
from trainers.data.records import Records
from trainers.data.request import Request

VERSION = 1
"""Version of the images; incremented whenever one of them changes."""

SMALLEST_SIDE = 8
"""Smallest height or width in pixels; shapes are not recognisable in smaller images."""

NUM_LEAVES = 60
MAX_OBJECTS = 8
LEAF_RADII = (0.06, 0.5)
"""Smallest and largest radius of a leaf, as shares of the image's smaller side."""
OBJECT_RADII = (0.08, 0.35)
NUM_OCTAVES = 4
NUM_MAPS = 4
NUM_ORBITS, ORBIT_LENGTH, ORBIT_SKIPPED = 24, 40, 8

MAX_NUM_IMAGES, NUM_TEST_IMAGES = 1_000_000, 2_000
"""The largest data set, and the number of test images, whose indices follow."""
_SEED = 1  # of data sets; the seed of public starts is the sweep's
_NAME = re.compile(r"procedural(?::([0-9]{1,9})(?::([1-9]x[0-9]{1,4}x[0-9]{1,4}))?)?")
_IMAGES_AT_ONCE = 64  # their planes fit into the second-level cache

Plane = NDArray[np.float32]
"""Values `[n, height, width]`."""
Numbers = NDArray[np.float64]


def procedural_images(indices: Ids, image_shape: tuple[int, int, int], *, seed: int) -> NDArray[np.uint8]:
    """Return images of the seed's endless sequence, at `indices`, uint8 `[n, channels, height, width]`.

    Args:
      indices: uint64 `[n]`, in any order.
      image_shape: (channels, height, width); one channel is grey, more are colours.
      seed: the sequence's seed.

    Raises:
      ConfigError: a side is below `SMALLEST_SIDE`, or there is no channel.

    >>> both = procedural_images(np.array([7, 3], dtype=np.uint64), (3, 20, 16), seed=0)
    >>> alone = procedural_images(np.array([3], dtype=np.uint64), (3, 20, 16), seed=0)
    >>> both.shape, bool((both[1] == alone[0]).all())
    ((2, 3, 20, 16), True)
    """
    channels, height, width = image_shape
    if channels < 1 or min(height, width) < SMALLEST_SIDE:
        raise ConfigError(
            f"procedural images must have at least one channel and sides of at least {SMALLEST_SIDE} pixels; "
            f"got {image_shape} (channels, height, width). Use larger images"
        )
    images = np.empty((len(indices), *image_shape), dtype=np.uint8)
    for start in range(0, len(indices), _IMAGES_AT_ONCE):
        rows = slice(start, start + _IMAGES_AT_ONCE)
        images[rows] = _some_images(indices[rows], image_shape, seed)
    return images


def kinds_of(indices: Ids, seed: int) -> NDArray[np.int64]:
    """Return the kind of each image, int64 `[n]`, as an index in `KINDS`."""
    bounds = np.cumsum([share for share, _ in KINDS.values()])
    draws = keyed_uniform(indices, "procedural", VERSION, seed, "kind")
    return np.searchsorted(bounds, draws, side="right")


def procedural_name(name: str) -> tuple[int, tuple[int, int, int]]:
    """Return the number of images in a name, and their (channels, height, width).

    Raises:
      ConfigError: `name` is not the name of a data set of procedural images.

    >>> procedural_name("procedural"), procedural_name("procedural:500:1x28x28")
    ((20000, (3, 32, 32)), (500, (1, 28, 28)))
    """
    match = _NAME.fullmatch(name)
    if match is None or not 1 <= int(match[1] or 1) <= MAX_NUM_IMAGES:
        raise ConfigError(
            f"procedural:NUM:CxHxW must have 1 to {MAX_NUM_IMAGES} images, and may end in their channels, "
            f"height and width, as in procedural:500:1x28x28; got {name!r}"
        )
    channels, height, width = (int(size) for size in (match[2] or "3x32x32").split("x"))
    return int(match[1] or 20_000), (channels, height, width)


def load_procedural(request: Request) -> LoadedData:
    """Return procedural images with their kinds as labels."""
    number, (channels, height, width) = procedural_name(request.name)
    size = request.image_size
    shape = (channels, height, width) if size is None else (channels, size, size)
    return LoadedData(
        train=_labelled(np.arange(number), shape),
        test=_labelled(np.arange(NUM_TEST_IMAGES) + MAX_NUM_IMAGES, shape),
    )


def _labelled(indices: NDArray[np.int64], shape: tuple[int, int, int]) -> Records:
    ids = indices.astype(np.uint64)
    return Records(images=procedural_images(ids, shape, seed=_SEED), labels=kinds_of(ids, _SEED), ids=ids)


def _some_images(indices: Ids, image_shape: tuple[int, int, int], seed: int) -> NDArray[np.uint8]:
    """Return the images at `indices`, each of a kind that is drawn by the shares in `KINDS`."""
    images = np.empty((len(indices), *image_shape), dtype=np.float32)
    kinds = kinds_of(indices, seed)
    for number, (name, (_, make)) in enumerate(KINDS.items()):
        rows = np.flatnonzero(kinds == number)
        if rows.size:
            images[rows] = make(_Draw(indices[rows], (VERSION, seed, name)), image_shape)
    return np.rint(255 * np.clip(images, 0, 1)).astype(np.uint8)


class _Draw:
    """Random numbers of some images, hashed from the image's index and a key."""

    def __init__(self, indices: Ids, key: tuple[int | str, ...]) -> None:
        self.indices, self.key = indices, key

    def unit(self, name: str, count: int = 1) -> Numbers:
        """Return uniform numbers in [0, 1), `[n, count]`; an image's numbers depend on no other image."""
        counters = self.indices[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)
        return keyed_uniform(counters.astype(np.uint64), "procedural", *self.key, name, count)

    def between(self, name: str, low: float, high: float, count: int = 1) -> Numbers:
        """Return uniform numbers in [low, high), `[n, count]`."""
        return low + (high - low) * self.unit(name, count)

    def within(self, name: str) -> _Draw:
        """Return the source of further, independent numbers of the same images."""
        return _Draw(self.indices, (*self.key, name))

    def colours(self, count: int, channels: int) -> Plane:
        """Return colours in [0, 1], `[n, count, channels]`: a grey level plus a tint for each channel."""
        n = len(self.indices)
        grey = self.unit("grey", count)[:, :, None] if count > 2 else self._two_greys()
        if channels == 1:
            return grey.astype(np.float32)
        tint = self.between("tint", -0.4, 0.4, count * channels).reshape(n, count, channels)
        return np.clip(grey + tint, 0, 1).astype(np.float32)

    def _two_greys(self) -> Numbers:
        """Two grey levels that differ by at least 0.3, `[n, 2, 1]`."""
        first = self.unit("first grey")
        return np.stack([first, (first + self.between("second grey", 0.3, 0.7)) % 1], axis=1)


def _pixel_centres(side: int, smaller: int) -> Numbers:
    """Return the pixel centres along an axis, relative to its middle, in units of `smaller` pixels."""
    return (np.arange(side) + 0.5 - side / 2) / smaller


def _dead_leaves(draw: _Draw, image_shape: tuple[int, int, int]) -> Plane:
    """Return images of shapes at uniform places, each shape in front of the earlier ones."""
    _, height, width = image_shape
    smaller = min(height, width)
    half = np.array([width, height]) / (2 * smaller)
    centres = (2 * draw.unit("centre", 2 * NUM_LEAVES).reshape(-1, NUM_LEAVES, 2) - 1) * half
    front = _front(draw, image_shape, centres, _scale_free_radii(draw.unit("radius", NUM_LEAVES), LEAF_RADII))
    return _coloured(draw, front, draw.colours(NUM_LEAVES + 1, image_shape[0]), image_shape)


def _scale_free_radii(unit: Numbers, bounds: tuple[float, float]) -> Numbers:
    """Return radii r of density ∝ r⁻³ between two bounds, from uniform numbers in [0, 1)."""
    low, high = (bound**-2 for bound in bounds)
    return 1 / np.sqrt(low - unit * (low - high))


def _objects(draw: _Draw, image_shape: tuple[int, int, int]) -> Plane:
    """Return images of a few shapes about the centre, mirrored in half of the images."""
    centres = draw.between("centre", -0.35, 0.35, 2 * MAX_OBJECTS).reshape(-1, MAX_OBJECTS, 2)
    radii = draw.between("radius", *OBJECT_RADII, MAX_OBJECTS)
    is_shown = np.arange(MAX_OBJECTS) < draw.between("number", 1, MAX_OBJECTS + 1).astype(int)
    front = _front(draw, image_shape, centres, np.where(is_shown, radii, 0))
    is_mirrored = draw.unit("mirrored")[:, :, None] < 0.5
    front = np.where(is_mirrored, np.maximum(front, front[:, :, ::-1]), front)
    colours = draw.colours(MAX_OBJECTS + 1, image_shape[0])
    colours[:, 0] *= draw.unit("lit ground") < 0.5
    return _coloured(draw, front, colours, image_shape)


def _front(
    draw: _Draw, image_shape: tuple[int, int, int], centres: Numbers, radii: Numbers
) -> NDArray[np.uint8]:
    """Return the number of the front shape at each pixel, from 1 on, `[n, height, width]`; 0 is the ground.

    Args:
      draw: random numbers for the shapes' kinds, turns and stretches.
      image_shape: (channels, height, width).
      centres: `[n, shapes, 2]`, x and y.
      radii: `[n, shapes]`; a shape of radius 0 is invisible.
    """
    _, height, width = image_shape
    count = radii.shape[1]
    turn = 2 * np.pi * draw.unit("turn", count)
    stretch = np.sqrt(draw.between("stretch", 0.25, 1, count))
    kind = draw.unit("shape", count)[:, :, None, None]
    radii = np.maximum(radii, 1e-6)
    inverse_long, inverse_short = stretch / radii, 1 / (radii * stretch)  # the stretch keeps the area
    x = _pixel_centres(width, min(height, width)) - centres[:, :, :1]
    y = _pixel_centres(height, min(height, width)) - centres[:, :, 1:]
    cosine, sine = np.cos(turn), np.sin(turn)
    parts = [
        (scale * factor)[:, :, None] * centres_on_axis
        for scale, factors in ((inverse_long, (cosine, sine)), (inverse_short, (-sine, cosine)))
        for factor, centres_on_axis in zip(factors, (x, y), strict=True)
    ]
    front = np.zeros((len(radii), height, width), dtype=np.uint8)
    for k in range(count):
        along_x, along_y, across_x, across_y = (part[:, k].astype(np.float32) for part in parts)
        along = along_x[:, None, :] + along_y[:, :, None]
        across = across_x[:, None, :] + across_y[:, :, None]
        inside = _distance(along, across, kind[:, k]) < 1
        np.copyto(front, np.uint8(k + 1), where=inside)
    return front


def _distance(along: Plane, across: Plane, kind: Numbers) -> Plane:
    """Return a distance below 1 inside an ellipse (`kind` < 1/2), rectangle (< 5/6) or triangle (else)."""
    along_squared, across_squared = along * along, across * across
    rectangle = np.maximum(along_squared, across_squared)
    triangle = np.maximum(-2 * across, across + np.float32(1.75) * np.abs(along))
    return np.where(kind < 1 / 2, along_squared + across_squared, np.where(kind < 5 / 6, rectangle, triangle))


def _coloured(
    draw: _Draw, front: NDArray[np.uint8], colours: Plane, image_shape: tuple[int, int, int]
) -> Plane:
    """Return images with each shape in its colour and, in half of the images, textured."""
    n, count, channels = colours.shape
    pixels = front.reshape(n, -1).astype(np.intp)
    planes = [np.take_along_axis(colours[:, :, c], pixels, axis=1) for c in range(channels)]
    images = np.stack(planes, axis=1).reshape(n, *image_shape)
    strength = draw.between("strength", -0.6, 0.6, count) * (draw.unit("textured") < 0.5)
    texture = np.where(
        (draw.unit("texture") < 0.5)[:, :, None],
        _octaves(draw.within("texture"), image_shape),
        _stripes(draw.within("texture"), image_shape),
    )
    amount = np.take_along_axis(strength.astype(np.float32), pixels, axis=1).reshape(front.shape)
    textured = images + (amount * (texture - np.float32(0.5)))[:, None]
    return textured.astype(np.float32)


def _octaves(draw: _Draw, image_shape: tuple[int, int, int]) -> Plane:
    """Return value noise, scaled to [0, 1] in each image, `[n, height, width]`."""
    _, height, width = image_shape
    n, weight = len(draw.indices), draw.between("persistence", 0.35, 0.95)[:, :, None]
    total = np.zeros((n, height, width))
    for octave in range(NUM_OCTAVES):
        cells = 2 ** (octave + 1)
        lattice = draw.unit(f"lattice {octave}", (cells + 2) ** 2).reshape(n, cells + 2, cells + 2)
        shift = draw.unit(f"shift {octave}", 2)
        rows = _tents(shift[:, :1] + cells * (_pixel_centres(height, height) + 0.5), cells + 2)
        columns = _tents(shift[:, 1:] + cells * (_pixel_centres(width, width) + 0.5), cells + 2)
        total += weight**octave * (rows @ lattice @ columns.transpose(0, 2, 1))
    low, high = total.min(axis=(1, 2), keepdims=True), total.max(axis=(1, 2), keepdims=True)
    noise: Plane = ((total - low) / np.maximum(high - low, 1e-9)).astype(np.float32)
    return noise


def _tents(places: Numbers, count: int) -> Numbers:
    """Return the linear interpolation weights of lattice points 0 to count − 1, `[n, places, count]`."""
    weights: Numbers = np.maximum(0, 1 - np.abs(places[:, :, None] - np.arange(count)))
    return weights


def _stripes(draw: _Draw, image_shape: tuple[int, int, int]) -> Plane:
    """Return gratings from 0 to 1, `[n, height, width]`."""
    _, height, width = image_shape
    smaller = min(height, width)
    turn, number = np.pi * draw.unit("turn"), 2 * 6 ** draw.unit("number")
    x = number * np.cos(turn) * _pixel_centres(width, smaller)
    y = number * np.sin(turn) * _pixel_centres(height, smaller)
    phase = x[:, None, :] + y[:, :, None] + draw.unit("phase")[:, :, None]
    bend = draw.between("bend", -1, 1.5)[:, :, None].clip(0, None)
    phase = phase + bend * _octaves(draw.within("bend"), image_shape)
    wave = np.abs(2 * (phase - np.floor(phase)) - 1)
    sharpness, level = 1 + 4 * draw.unit("sharpness")[:, :, None], draw.between("level", 0.3, 0.7)[:, :, None]
    return np.clip((wave - level) * sharpness + 0.5, 0, 1).astype(np.float32)


def _fractals(draw: _Draw, image_shape: tuple[int, int, int]) -> Plane:
    """Return how often orbits of random contractions visit each pixel, from 0 to 1, `[n, height, width]`."""
    _, height, width = image_shape
    n, rows = len(draw.indices), np.arange(len(draw.indices))[:, None]
    first, second = (2 * np.pi * draw.unit(name, NUM_MAPS) for name in ("turn", "second turn"))
    scales = draw.between("scale", 0.25, 0.85, 2 * NUM_MAPS).reshape(n, NUM_MAPS, 2)
    shifts = draw.between("shift", -1, 1, 2 * NUM_MAPS).reshape(n, NUM_MAPS, 2)
    matrices = _rotations(first) @ (scales[..., None] * _rotations(second))
    num_maps = draw.between("maps", 2, NUM_MAPS + 1)
    choices = draw.unit("choice", NUM_ORBITS * ORBIT_LENGTH).reshape(n, ORBIT_LENGTH, NUM_ORBITS)
    points, visited = np.zeros((n, NUM_ORBITS, 2)), []
    for step in range(ORBIT_LENGTH):
        chosen = (choices[:, step] * np.floor(num_maps)).astype(int)
        points = (matrices[rows, chosen] @ points[..., None])[..., 0] + shifts[rows, chosen]
        if step >= ORBIT_SKIPPED:
            visited.append(points)
    places = np.concatenate(visited, axis=1)
    low, high = places.min(axis=1, keepdims=True), places.max(axis=1, keepdims=True)
    places = (places - low) / np.maximum(high - low, 1e-9)
    pixels = np.minimum((places * (width, height)).astype(int), (width - 1, height - 1))
    flat = (rows * height + pixels[..., 1]) * width + pixels[..., 0]
    counts = np.bincount(flat.ravel(), minlength=n * height * width).reshape(n, height, width)
    return np.minimum(1, counts / 2).astype(np.float32)


def _rotations(angles: Numbers) -> Numbers:
    """Return rotation matrices `[..., 2, 2]`."""
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)


def _between_two_colours(make: Callable[[_Draw, tuple[int, int, int]], Plane]) -> _Kind:
    """Return a function that colours the plane of `make`, from one random colour at 0 to another at 1."""

    def images(draw: _Draw, image_shape: tuple[int, int, int]) -> Plane:
        colours = draw.colours(2, image_shape[0])[:, :, :, None, None]
        return colours[:, 0] + (colours[:, 1] - colours[:, 0]) * make(draw, image_shape)[:, None]

    return images


_Kind = Callable[[_Draw, tuple[int, int, int]], Plane]

KINDS: Mapping[str, tuple[float, _Kind]] = {
    "dead leaves": (0.2, _dead_leaves),
    "objects": (0.5, _objects),
    "octaves": (0.1, _between_two_colours(_octaves)),
    "stripes": (0.1, _between_two_colours(_stripes)),
    "fractals": (0.1, _between_two_colours(_fractals)),
}
"""Kinds of images by name, with the share of each; the shares sum to 1."""
