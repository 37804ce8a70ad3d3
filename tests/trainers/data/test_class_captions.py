"""Captions made of classes: each of its own record's label, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from sweeps.service.options.data import DataOptions
from sweeps.service.planning.sweep_data import load_training_data
from trainers.data.class_captions import with_class_captions
from trainers.data.loading import load_dataset, modality_of_name
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import ImageTextRecords
from trainers.data.records import Records

TEMPLATE = "a photo of a {}."
NAMES = ("cat", "dog", "eel")


def labelled(num_rows: int = 6) -> Records:
    random = np.random.default_rng(0)
    return Records(
        images=random.integers(0, 256, (num_rows, 1, 8, 8), dtype=np.uint8),
        ids=np.arange(num_rows, dtype=np.uint64),
        labels=np.arange(num_rows) % 3,
    )


def test_each_record_has_the_caption_of_its_own_class() -> None:
    found = with_class_captions(labelled(), NAMES, TEMPLATE)
    assert [captions for (captions,) in found.captions] == [f"a photo of a {n}." for n in NAMES] * 2
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_record_less_moves_no_other_pair() -> None:
    whole, others = labelled(), np.array([0, 2, 3, 4, 5])
    kept = with_class_captions(whole, NAMES, TEMPLATE).take(others)
    alone = with_class_captions(whole.take(others), NAMES, TEMPLATE)
    assert kept.captions == alone.captions
    np.testing.assert_array_equal(kept.images[np.arange(5)], alone.images[np.arange(5)])
    for step in range(3):
        _, texts = kept.pairs_at(np.arange(5), seed=1, step=step)
        assert texts == alone.pairs_at(np.arange(5), seed=1, step=step)[1]


def test_grey_images_come_in_the_colour_that_towers_take() -> None:
    records = labelled()
    found = with_class_captions(records, NAMES, TEMPLATE)
    assert found.images.shape == (6, 3, 8, 8)
    np.testing.assert_array_equal(found.images[np.arange(6)], np.repeat(records.images, 3, axis=1))


def test_images_without_named_classes_are_refused() -> None:
    records = labelled()
    unlabelled = Records(images=records.images, ids=records.ids)
    for given, names in ((unlabelled, NAMES), (records, ())):
        with pytest.raises(ConfigError, match="class_captions need class names"):
            with_class_captions(given, names, TEMPLATE)


def test_template_without_a_place_for_the_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must contain \{\} where.*got \'a photo\'"):
        PairOptions(class_captions="a photo")


def test_built_in_images_become_pairs() -> None:
    pairs = PairOptions(class_captions=TEMPLATE)
    assert modality_of_name("digits", pairs) == "image-text"
    found = load_dataset("digits", pairs=pairs)
    assert isinstance(found.train, ImageTextRecords)
    assert found.modality == "image-text"
    assert "a photo of a handwritten digit nine." in {text for (text,) in found.train.captions}


def test_folders_of_classes_become_pairs(tmp_path: Path) -> None:
    for number, kind in enumerate(("cat", "dog")):
        (tmp_path / kind).mkdir()
        for image in range(2):
            pixels = np.full((8, 8), 100 * number + image, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / kind / f"{image}.png")
    found = load_dataset(f"folder:{tmp_path}", pairs=PairOptions(class_captions="my {}"))
    assert isinstance(found.train, ImageTextRecords)
    assert sorted(text for (text,) in found.train.captions) == ["my cat", "my cat", "my dog", "my dog"]


def test_data_with_captions_of_their_own_keep_them(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "0.png")
    path = tmp_path / "pairs.parquet"
    pandas.DataFrame({"filepath": ["0.png"], "title": ["a black square"]}).to_parquet(path)
    for name in (f"parquet:{path}", "shapes:10"):
        with pytest.raises(ConfigError, match="captions"):
            load_dataset(name, pairs=PairOptions(class_captions=TEMPLATE))


def test_empty_name_of_a_private_class_tells_no_count(tmp_path: Path) -> None:
    labels = np.array(["" if row < 7 else "cat" for row in range(90)])
    images = np.random.default_rng(0).integers(0, 256, (90, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=labels)
    options = DataOptions(dataset=f"npz:{tmp_path / 'own.npz'}", data_is="private", class_captions="{}")
    with pytest.raises(DataError, match="none may be empty") as caught:
        load_training_data(options)
    assert "7" not in str(caught.value)


def test_public_pairs_keep_their_captions_beside_captioned_images() -> None:
    options = DataOptions(dataset="digits", evaluate_on="shapes:10", class_captions=TEMPLATE)
    assert options.pairs_of("digits").class_captions == TEMPLATE
    assert options.pairs_of("shapes:10").class_captions is None
