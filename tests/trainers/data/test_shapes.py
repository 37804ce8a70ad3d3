"""Generated pairs: a function of (seed, number) alone, and every caption true of its picture."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError
from trainers.data import shapes
from trainers.data.loading import load_dataset
from trainers.data.shapes import draw_scenes, make_shape_pairs
from trainers.models.clip.published_models import CLIP_NANO, ClipConfig, find_clip
from trainers.models.clip.tokens import ClipTokenizer

COUNTS = {"a": 1, "two": 2, "three": 3}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
GROUP = re.compile(
    r"(?P<count>a|two|three) (?P<size>small|large) (?P<colour>\w+) (?P<shape>\w+) "
    r"(?:in the (?P<line>\w+) (?P<axis>row|column)|at the (?P<row>\w+) (?P<column>\w+)|"
    r"in the (?P<centre>centre))"
)


def described_cells(caption: str) -> dict[tuple[int, int], str]:
    """Colour by (row, column) as a reader of the caption expects it."""
    cells = {}
    for group in GROUP.finditer(caption.lower()):
        along = (0, 2) if group["count"] == "two" else (0, 1, 2)
        if group["axis"] == "row":
            places = [(ROWS.index(group["line"]), k) for k in along]
        elif group["axis"] == "column":
            places = [(k, COLUMNS.index(group["line"])) for k in along]
        elif group["centre"]:
            places = [(1, 1)]
        else:
            places = [(ROWS.index(group["row"]), COLUMNS.index(group["column"]))]
        assert len(places) == COUNTS[group["count"]]
        cells |= dict.fromkeys(places, group["colour"])
    return cells


def painted_cells(image: np.ndarray) -> set[tuple[int, int]]:
    ground = image[:, :1, :1]
    parts = (image != ground).any(axis=0).reshape(3, image.shape[1] // 3, 3, image.shape[2] // 3)
    return {(int(r), int(c)) for r, c in np.argwhere(parts.any(axis=(1, 3)))}


@pytest.fixture(scope="module")
def pairs():
    return make_shape_pairs(300, seed=3, image_size=48, captions_per_image=4)


@pytest.fixture(scope="module", params=[False, True], ids=["long", "short"])
def either(request):
    return make_shape_pairs(300, seed=3, image_size=48, captions_per_image=4, is_short=request.param)


def test_every_caption_names_the_cells_that_are_painted(either):
    for image, captions in zip(either.images, either.captions, strict=True):
        for caption in captions:
            assert set(described_cells(caption)) == painted_cells(image), caption


def test_every_caption_names_the_colours_that_are_painted(either):
    side = either.images.shape[2] // 3
    for image, captions in zip(either.images, either.captions, strict=True):
        for (row, column), colour in described_cells(captions[0]).items():
            cell = image[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
            # The pixels that differ most from the ground are of the thing's full colour, up to its shade.
            full = np.array(shapes.SHAPE_COLOURS[colour])
            ratios = cell.reshape(3, -1).T / full
            is_full = (
                (np.ptp(ratios, axis=1) < 0.06) & (ratios.min(axis=1) > 0.77) & (ratios.max(axis=1) < 1.03)
            )
            assert is_full.sum() >= 6, (colour, captions[0])


def test_every_caption_names_the_ground(either):
    for image, captions in zip(either.images, either.captions, strict=True):
        seen = image[:, 0, 0].astype(int)
        ground = min(shapes.SHAPE_GROUNDS, key=lambda n: np.abs(seen - shapes.SHAPE_GROUNDS[n]).sum())
        assert all(ground in caption for caption in captions)


def test_captions_of_a_picture_are_different_wordings_of_the_same(pairs):
    for captions in pairs.captions:
        assert len(set(captions)) == 4
        assert len({tuple(sorted(described_cells(caption).items())) for caption in captions}) == 1


def test_a_pair_is_a_function_of_its_number_alone():
    whole = make_shape_pairs(50, seed=1, captions_per_image=2)
    part = make_shape_pairs(20, seed=1, captions_per_image=2, first=30)
    assert (part.images == whole.images[30:]).all()
    assert (part.captions, part.ids.tolist()) == (whole.captions[30:], whole.ids[30:].tolist())
    assert part.labels.tolist() == whole.labels[30:].tolist()


def test_a_pair_is_the_same_in_whatever_portion_it_is_painted(monkeypatch):
    whole = make_shape_pairs(50, seed=1).images
    monkeypatch.setattr(shapes, "_PICTURES_AT_ONCE", 7)
    assert (make_shape_pairs(50, seed=1).images == whole).all()


def test_another_seed_gives_other_pairs_and_ids():
    one, other = (make_shape_pairs(50, seed=seed) for seed in (1, 2))
    assert not set(one.ids.tolist()) & set(other.ids.tolist())
    assert sum(a == b for a, b in zip(one.captions, other.captions, strict=True)) < 5


def test_scenes_use_every_value_about_equally_often():
    scenes = draw_scenes(np.arange(20_000, dtype=np.uint64), seed=0)
    for name, num_values in (("colour", 8), ("shape", 6), ("size", 2), ("line", 3), ("arrangement", 5)):
        counts = np.bincount(getattr(scenes, name)[:, 0], minlength=num_values)
        expected = 20_000 / num_values
        assert len(counts) == num_values
        assert np.abs(counts - expected).max() < 5 * expected**0.5, name


def test_common_vocabulary_is_the_first_half_of_colours_shapes_and_grounds():
    scenes = draw_scenes(np.arange(2_000, dtype=np.uint64), seed=0, vocabulary="common")
    for name, num_values in (("colour", 4), ("shape", 3), ("ground", 2), ("size", 2), ("line", 3)):
        assert set(getattr(scenes, name).ravel().tolist()) == set(range(num_values)), name
    captions = " ".join(c for (c,) in make_shape_pairs(500, seed=0, vocabulary="common").captions).lower()
    rest = (*list(shapes.SHAPE_COLOURS)[4:], *shapes.SHAPE_NAMES[3:], *list(shapes.SHAPE_GROUNDS)[2:])
    assert "triangle" in captions
    assert not [word for word in rest if word in captions]


def test_pairs_of_another_vocabulary_have_other_ids():
    every, common = (make_shape_pairs(50, seed=0, vocabulary=each) for each in shapes.SHAPE_VOCABULARIES)
    assert not set(every.ids.tolist()) & set(common.ids.tolist())


def test_unknown_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="unknown vocabulary 'comon'; did you mean 'common'"):
        make_shape_pairs(3, seed=0, vocabulary="comon")


def test_groups_of_a_picture_lie_in_different_lines():
    line = draw_scenes(np.arange(5000, dtype=np.uint64), seed=0).line
    assert (line[:, 0] != line[:, 1]).all()


def test_pictures_of_one_description_differ():
    pairs = make_shape_pairs(6000, seed=0)
    pictures, descriptions = {}, 0
    for image, (caption,) in zip(pairs.images, pairs.captions, strict=True):
        pictures.setdefault(caption, set()).add(image.tobytes())
        descriptions += 1
    assert len(pictures) < descriptions
    assert sum(map(len, pictures.values())) == descriptions


def test_labels_are_the_shape_of_the_first_thing_in_reading_order(pairs):
    for label, (caption, *_) in zip(pairs.labels.tolist(), pairs.captions, strict=True):
        found = {}
        for group in GROUP.finditer(caption.lower()):
            for cell in described_cells(group.group()):
                found[cell] = group["shape"]
        assert found[min(found)].startswith(shapes.SHAPE_NAMES[label])


@pytest.mark.parametrize(
    "bad",
    [
        {"num_records": 0},
        {"num_records": 60_001},
        {"image_size": 31},
        {"captions_per_image": 5},
        {"captions_per_image": True},
        {"first": -1},
    ],
)
def test_numbers_outside_their_range_are_refused(bad):
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} of the shapes must be an integer from"):
        make_shape_pairs(**({"num_records": 3, "seed": 0} | bad))


# --- short pairs ---


def test_short_pairs_have_no_labels_and_ids_of_their_own():
    short, long = (make_shape_pairs(200, seed=3, is_short=each) for each in (True, False))
    assert short.labels is None
    assert not set(short.ids.tolist()) & set(long.ids.tolist())


def test_short_captions_fit_the_smallest_model_whole_and_use_all_words():
    pairs = make_shape_pairs(5_000, seed=7, is_short=True)
    captions = [caption for (caption,) in pairs.captions]
    tokens = ClipTokenizer(find_clip(ClipConfig(model=CLIP_NANO)))(captions)
    assert tokens.num_truncated == 0
    words = {word.strip(".") for caption in captions for word in caption.split()}
    assert words >= {*shapes.SHAPE_COLOURS, *shapes.SHAPE_NAMES, *shapes.SHAPE_GROUNDS}


def test_short_data_set_has_other_test_pairs_and_no_classes():
    found = load_dataset("shapes:300:7:short")
    assert found.test is not None
    assert not set(found.train.ids.tolist()) & set(found.test.ids.tolist())
    assert (len(found.train), found.class_names, found.test.labels) == (300, (), None)
