"""`shapes`: generated pairs of pictures and sentences, so that private image-text training works offline.

A picture shows one or two *groups* on a plain ground. A group is one to three equal things in one row (or
one column) of a 3 × 3 grid; the groups of a picture lie in different rows (columns). The grammar, all public:

    caption := [ground clause] group sentence(s)         in one of four wordings
    group   := count size colour shape place
    count   := a | two | three                            size   := small | large
    colour  := red | green | blue | yellow | white | orange | purple | cyan
    shape   := circle | square | triangle | diamond | cross | ring
    place   := one of nine cells, or "in the top / middle / bottom row", "in the left / middle / right column"
    ground  := black | brown | grey | navy

The vocabulary `common` has only the first half of the colours, shapes and grounds: a public start trained on
such pairs has seen neither the words nor the appearance of the rest.

*Short* pairs show one group each, in one wording, "two small red rings in the top row on grey.": a third of
the tokens, for a network that trains in seconds.

Pair i is a function of only (vocabulary, seed, i): every choice is a keyed hash of i. So a set of a thousand
pairs equals the first thousand of a set of sixty thousand, and the data are the same on every machine. The
positions of things in their cells, their brightness and the tint of the ground vary without being captioned,
so hardly any two pictures in a million are identical.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.sampling.record_ids import Ids, ids_from_names, keyed_uniform
from trainers.data.pairs import ImageTextRecords, LoadedData
from trainers.data.request import Request

VERSION = 1
"""Version of the pairs; incremented whenever the same numbers give different pairs."""

MAX_SHAPE_PAIRS = 60_000
"""Largest number of pairs in one data set."""

NUM_TRAIN_SHAPES, NUM_TEST_SHAPES = 30_000, 2_000
"""Pairs of the built-in data set `shapes`."""

FIRST_UNUSED_SHAPE = 2**20
"""No data set of shapes holds a pair with this number or a higher one, whatever its seed."""

MAX_SHAPE_CAPTIONS = 4
"""Number of wordings, and so the largest number of captions per picture."""

SHAPE_IMAGE_SIZES = (32, 256)
"""The smallest and the largest side of a picture, in pixels."""

SHAPE_COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (60, 100, 240),
    "yellow": (240, 220, 50),
    "white": (250, 250, 250),
    "orange": (250, 140, 30),
    "purple": (160, 60, 190),
    "cyan": (60, 210, 220),
}
SHAPE_NAMES = ("circle", "square", "triangle", "diamond", "cross", "ring")
SHAPE_GROUNDS = {"black": (0, 0, 0), "brown": (90, 60, 30), "grey": (110, 110, 110), "navy": (15, 20, 80)}
SHAPE_SIZES = ("small", "large")
SHAPE_VOCABULARIES = ("all", "common")

_COUNTS = ("a", "two", "three")
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
_CELLS = tuple(
    "in the centre" if (row, column) == ("middle", "middle") else f"at the {row} {column}"
    for row in _ROWS
    for column in _COLUMNS
)
# The places of a group's things along its row or column: one thing in one of three places, or two, or three.
_ARRANGEMENTS = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]], dtype=bool)
_NAME = re.compile(r"shapes(?::([0-9]{1,9})(?::([0-9]{1,9})(?::(common|short))?)?)?")
_NUM_TINTS = 13  # for each channel: invisible, but enough to make pictures distinct
_GRID, _SHIFTS, _OVERSAMPLING, _PICTURES_AT_ONCE = 3, 3, 4, 2048

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ShapeScenes:
    """The contents of pictures, as indices in the lists of names; the second axis is the group, 0 or 1.

    Attributes:
      ground: `[n]`.
      has_columns: bool `[n]`, whether groups are columns rather than rows.
      num_groups: `[n]`, 1 or 2.
      line: `[n, 2]`, the group's row or column, 0 to 2.
      arrangement: `[n, 2]`, the places of the things along the line, as an index in a public list of five.
      colour, shape, size: `[n, 2]`.
    """

    ground: Numbers
    has_columns: NDArray[np.bool_]
    num_groups: Numbers
    line: Numbers
    arrangement: Numbers
    colour: Numbers
    shape: Numbers
    size: Numbers


class ShapesName(NamedTuple):
    """The parts of the name of a set of shapes."""

    num_records: int
    seed: int
    vocabulary: str
    is_short: bool


def make_shape_pairs(
    num_records: int,
    *,
    seed: int,
    image_size: int = 32,
    captions_per_image: int = 1,
    first: int = 0,
    vocabulary: str = "all",
    is_short: bool = False,
) -> ImageTextRecords:
    """Return the generated pairs from number `first` on, images uint8 `[n, 3, image_size, image_size]`.

    Args:
      num_records: 1 to `MAX_SHAPE_PAIRS`.
      seed: public seed; another seed gives other pictures with other ids.
      image_size: 32 to 256, in pixels.
      captions_per_image: 1 to `MAX_SHAPE_CAPTIONS`, each in its own wording.
      first: number of the first pair, so that test pairs can differ from the training pairs.
      vocabulary: one of `SHAPE_VOCABULARIES`.
      is_short: one group and one caption per picture, whatever `captions_per_image` is, and no labels.

    Labels are the shape of the first thing in reading order, for k-NN and the probe.

    Raises:
      ConfigError: a number lies outside its range.

    >>> pairs = make_shape_pairs(100, seed=0)
    >>> pairs.captions[7]
    ('The background is grey. I see two small blue circles in the right column.',)
    >>> pairs.captions[7] == make_shape_pairs(1, seed=0, first=7).captions[0]
    True
    """
    for name, value, low, high in (
        ("num_records", num_records, 1, MAX_SHAPE_PAIRS),
        ("image_size", image_size, *SHAPE_IMAGE_SIZES),
        ("captions_per_image", captions_per_image, 1, MAX_SHAPE_CAPTIONS),
        ("first", first, 0, 2**40),
    ):
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{name} of the shapes must be an integer from {low} to {high}; got {value!r}")
    if vocabulary not in SHAPE_VOCABULARIES:
        raise ConfigError(unknown_choice("vocabulary", vocabulary, SHAPE_VOCABULARIES))
    numbers = np.arange(first, first + num_records, dtype=np.uint64)
    scenes = draw_scenes(numbers, seed=seed, vocabulary=vocabulary)
    kind = "shapes" if vocabulary == "all" else f"shapes of {vocabulary} words"
    captions: list[tuple[str, ...]]
    if is_short:
        scenes = dataclasses.replace(scenes, num_groups=np.ones_like(scenes.num_groups))
        grounds = [tuple(SHAPE_GROUNDS)[ground] for ground in scenes.ground.tolist()]
        captions = [(f"{_describe_group(scenes, row, 0)} on {name}.",) for row, name in enumerate(grounds)]
        kind, labels = f"short {kind}", None
    else:
        labels = _first_shape(scenes)
        captions = [
            tuple(describe_scene(scenes, row, (start + k) % 4) for k in range(captions_per_image))
            for row, start in enumerate(_draw(numbers, seed, "wording", MAX_SHAPE_CAPTIONS).tolist())
        ]
    return ImageTextRecords(
        images=_render(scenes, numbers, seed, image_size),
        captions=tuple(captions),
        ids=ids_from_names(f"{kind}/{seed}/{number}" for number in numbers.tolist()),
        labels=labels,
    )


def load_shapes(request: Request) -> LoadedData:
    """Return the training and the test pairs of `shapes`, `shapes:NUM[:SEED]` or `shapes:NUM:SEED:KIND`.

    The test pairs have numbers that no training set can have, so they differ from the training pairs for any
    `NUM`. There are NUM training pairs (30,000 by default) from the public SEED (0 by default), 32 pixels
    square by default. KIND `common` uses half of the vocabulary; `short` shows one group in one wording.

    Raises:
      ConfigError: a number lies outside its range.
    """
    parts = shapes_name(request.name)
    pairs = partial(
        make_shape_pairs,
        seed=parts.seed,
        image_size=32 if request.image_size is None else request.image_size,
        vocabulary=parts.vocabulary,
        is_short=parts.is_short,
    )
    return LoadedData(
        train=pairs(parts.num_records),
        test=pairs(NUM_TEST_SHAPES, first=MAX_SHAPE_PAIRS),
        class_names=() if parts.is_short else SHAPE_NAMES,
    )


def shapes_name(name: str) -> ShapesName:
    """Return the parts of the name of a data set of shapes.

    Raises:
      ConfigError: `name` is not the name of a data set of shapes.

    >>> shapes_name("shapes")
    ShapesName(num_records=30000, seed=0, vocabulary='all', is_short=False)
    >>> shapes_name("shapes:500:7:common")
    ShapesName(num_records=500, seed=7, vocabulary='common', is_short=False)
    """
    match = _NAME.fullmatch(name)
    num_records = int(match[1] or NUM_TRAIN_SHAPES) if match else 0
    if match is None or not 1 <= num_records <= MAX_SHAPE_PAIRS:
        raise ConfigError(
            f"shapes:NUM:SEED must have 1 to {MAX_SHAPE_PAIRS} training pairs and a seed of at most 9 "
            f"digits, and may end in :common or :short; got {name!r}"
        )
    vocabulary = "common" if match[3] == "common" else "all"
    return ShapesName(num_records, int(match[2] or 0), vocabulary, match[3] == "short")


def _draw(numbers: Ids, seed: int, name: str, num_choices: int) -> Numbers:
    uniform = keyed_uniform(numbers, "shapes", int(seed), name)
    return np.minimum((uniform * num_choices).astype(np.int64), num_choices - 1)


def draw_scenes(numbers: Ids, *, seed: int, vocabulary: str = "all") -> ShapeScenes:
    """Return the scene of each number, a function of only that number, the seed and the vocabulary."""
    divisor = 1 if vocabulary == "all" else 2

    def per_group(name: str, num_choices: int) -> Numbers:
        return np.stack([_draw(numbers, seed, f"{name} {g}", num_choices) for g in range(2)], axis=1)

    line = _draw(numbers, seed, "line", _GRID)
    other_line = (line + 1 + _draw(numbers, seed, "other line", _GRID - 1)) % _GRID
    return ShapeScenes(
        ground=_draw(numbers, seed, "ground", len(SHAPE_GROUNDS) // divisor),
        has_columns=_draw(numbers, seed, "columns", 2) == 1,
        num_groups=1 + _draw(numbers, seed, "groups", 2),
        line=np.stack([line, other_line], axis=1),
        arrangement=per_group("arrangement", len(_ARRANGEMENTS)),
        colour=per_group("colour", len(SHAPE_COLOURS) // divisor),
        shape=per_group("shape", len(SHAPE_NAMES) // divisor),
        size=per_group("size", len(SHAPE_SIZES)),
    )


def describe_scene(scenes: ShapeScenes, row: int, wording: int) -> str:
    """Return one caption of scene `row`; `wording` is 0 to 3, and all four have the same meaning."""
    groups = [_describe_group(scenes, row, g) for g in range(int(scenes.num_groups[row]))]
    ground = tuple(SHAPE_GROUNDS)[int(scenes.ground[row])]
    if wording == 0:
        return f"A picture of {' and '.join(groups)}, on {ground}."
    if wording == 1:
        return f"{' and '.join(reversed(groups))} on a {ground} background.".capitalize()
    if wording == 2:
        verbs = ["are" if not group.startswith("a ") else "is" for group in groups]
        sentences = [f"There {verb} {group}." for verb, group in zip(verbs, groups, strict=True)]
        return " ".join([*sentences, f"The background is {ground}."])
    return " ".join([f"The background is {ground}.", *(f"I see {group}." for group in reversed(groups))])


def _describe_group(scenes: ShapeScenes, row: int, group: int) -> str:
    """Return a phrase such as `two small red rings in the top row`."""
    along = np.flatnonzero(_ARRANGEMENTS[scenes.arrangement[row, group]])
    line, has_columns = int(scenes.line[row, group]), bool(scenes.has_columns[row])
    if len(along) == 1:
        place = int(along[0])
        position = _CELLS[_GRID * place + line if has_columns else _GRID * line + place]
    else:
        position = f"in the {_COLUMNS[line]} column" if has_columns else f"in the {_ROWS[line]} row"
    shape = SHAPE_NAMES[scenes.shape[row, group]]
    if len(along) > 1:
        shape += "es" if shape == "cross" else "s"
    size, colour = SHAPE_SIZES[scenes.size[row, group]], tuple(SHAPE_COLOURS)[scenes.colour[row, group]]
    return f"{_COUNTS[len(along) - 1]} {size} {colour} {shape} {position}"


def _cells(scenes: ShapeScenes) -> Numbers:
    """Return the group (0 or 1) in each cell, `[n, 3, 3]` by row and column; −1 for an empty cell."""
    cells = np.full((len(scenes.ground), _GRID, _GRID), -1, dtype=np.int64)
    rows = np.arange(len(cells))
    for group in range(2):
        is_there = _ARRANGEMENTS[scenes.arrangement[:, group]] & (scenes.num_groups > group)[:, None]
        line = cells[rows, scenes.line[:, group]]
        cells[rows, scenes.line[:, group]] = np.where(is_there, group, line)
    return np.where(scenes.has_columns[:, None, None], cells.transpose(0, 2, 1), cells)


def _first_shape(scenes: ShapeScenes) -> Numbers:
    """Return the shape of each scene's first thing in reading order, `[n]`."""
    cells = _cells(scenes).reshape(-1, _GRID * _GRID)
    rows = np.arange(len(cells))
    group = cells[rows, (cells >= 0).argmax(axis=1)]
    first: Numbers = scenes.shape[rows, group]
    return first


def _render(scenes: ShapeScenes, numbers: Ids, seed: int, image_size: int) -> NDArray[np.uint8]:
    """Draw the pictures cell by cell: blend the group's colour into the ground by a mask of its shape."""
    side = image_size // _GRID
    margin = (image_size - _GRID * side) // 2
    atlas, cells = _atlas(side), _cells(scenes).reshape(-1, _GRID * _GRID)
    colours = np.array(list(SHAPE_COLOURS.values()), dtype=np.float32)
    grounds = np.array(list(SHAPE_GROUNDS.values()), dtype=np.int64)
    images = np.empty((len(numbers), 3, image_size, image_size), dtype=np.uint8)
    tints = np.stack([_draw(numbers, seed, f"tint {channel}", _NUM_TINTS) for channel in range(3)], axis=1)
    ground_of = grounds[scenes.ground] + tints
    images[:] = ground_of.astype(np.uint8)[:, :, None, None]
    for cell in range(_GRID * _GRID):
        y, x = (margin + side * place for place in divmod(cell, _GRID))
        rows_of_cell = np.flatnonzero(cells[:, cell] >= 0)
        for rows in np.split(rows_of_cell, range(_PICTURES_AT_ONCE, len(rows_of_cell), _PICTURES_AT_ONCE)):
            group = cells[rows, cell]
            shift = _draw(numbers[rows], seed, f"shift {cell}", _SHIFTS * _SHIFTS)
            shade = 0.8 + 0.2 * keyed_uniform(numbers[rows], "shapes", int(seed), f"shade {cell}")
            ground = ground_of[rows]
            difference = shade[:, None] * colours[scenes.colour[rows, group]] - ground
            mask = atlas[scenes.shape[rows, group], scenes.size[rows, group], shift]
            blended = ground[:, :, None, None] + mask[:, None] * difference[:, :, None, None]
            images[rows, :, y : y + side, x : x + side] = np.rint(blended).astype(np.uint8)
    return images


def _atlas(side: int) -> NDArray[np.float32]:
    """Return smooth masks of all shapes in a cell, in [0, 1], `[shapes, sizes, shifts, side, side]`."""
    coordinates = (np.arange(side * _OVERSAMPLING) + 0.5) / (side * _OVERSAMPLING) * 2 - 1
    masks = np.empty((len(SHAPE_NAMES), 2, _SHIFTS**2, side, side), dtype=np.float32)
    for size, radius in enumerate((0.48, 0.82)):
        for shift in range(_SHIFTS**2):
            down, right = (np.array(divmod(shift, _SHIFTS)) - 1) * 0.15
            y, x = (coordinates[:, None] - down) / radius, (coordinates[None, :] - right) / radius
            for shape, inside in enumerate(_inside(x, y)):
                blocks = inside.reshape(side, _OVERSAMPLING, side, _OVERSAMPLING)
                masks[shape, size, shift] = blocks.mean(axis=(1, 3))
    return masks


def _inside(x: NDArray[np.float64], y: NDArray[np.float64]) -> list[NDArray[np.bool_]]:
    """Return, for each shape of `SHAPE_NAMES`, whether points lie in it; all have about radius 1."""
    distance = np.hypot(x, y)
    across, down = np.abs(x), np.abs(y)
    return [
        distance < 1,
        np.maximum(across, down) < 0.85,
        (down < 0.9) & (across < (y + 0.9) / 1.8),
        across + down < 1,
        (np.minimum(across, down) < 0.3) & (np.maximum(across, down) < 1),
        (distance < 1) & (distance > 0.55),
    ]
