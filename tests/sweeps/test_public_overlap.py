"""Private images that are also in public data: refused with details, or dropped by a rule on each record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError
from sweeps.service.options.data import Overlap
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning import public_overlap
from sweeps.service.planning.public_overlap import without_overlap
from tests.sweeps import support
from tests.trainers.data.test_image_digests import jpeg, pictures
from trainers.config.tree import replace_options
from trainers.data.dataset import Dataset
from trainers.data.records import Records

COUNT = "training records dropped (--drop-overlap)"
HELD_OUT = {"score_on_held_out": 0.5, "score_noise_multiplier": 5.0}


def write_images(folder: Path, images: list[Image.Image]) -> str:
    for row, image in enumerate(images):
        file = folder / f"class{row % 2}" / f"{row:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    return f"folder:{folder}"


def load(own: str, public: str, **options: object):
    chosen = {"dataset": own, "evaluate_on": public, "no_ledger": True, "image_size": 32, **options}
    return support.loaded(replace_options(SweepOptions(), **chosen))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a terminal shows."""
    lines: dict[str, object] = {}
    monkeypatch.setattr(public_overlap, "show_on_a_terminal", lines.update)
    return lines


@pytest.fixture
def names(tmp_path: Path) -> tuple[str, str]:
    """Twelve private images; the public data have a copy of 3 and of 5, and 7 compressed once more."""
    own, other = pictures(12), pictures(20, seed=1)
    other[8], other[2], other[11] = own[3], own[5], jpeg(own[7])
    return write_images(tmp_path / "own", own), write_images(tmp_path / "other", other)


@pytest.mark.parametrize("in_memory", [True, False])
def test_copies_are_refused_with_their_number_and_names_in_details_alone(
    in_memory: bool, names: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError, match=r"must be public; it holds.*--drop-overlap") as caught:
        load(*names, in_memory=in_memory)
    assert not any(character.isdigit() for character in str(caught.value))
    files = sorted(f"class{row % 2}/{row:03d}.png" for row in range(20))
    places = sorted(files.index(file) for file in ("class0/008.png", "class0/002.png"))
    assert caught.value.details == {
        "private images in evaluate_on": places,
        "their copies in the training data": ["class1/003.png", "class1/005.png"],
    }


def test_similar_images_are_shown_in_a_terminal_and_not_refused(
    tmp_path: Path, names: tuple[str, str], shown: dict[str, object]
) -> None:
    public = write_images(tmp_path / "other photos", [*pictures(19, seed=2), jpeg(pictures(12)[7])])
    data, notes = load(names[0], public)
    assert len(data.train) == 12
    assert shown["training images like those in evaluate_on"] == ["class1/007.png"]
    assert len(shown["images in evaluate_on like private ones"]) == 1
    assert not any("like those" in note for note in notes)


@pytest.mark.parametrize(("overlap", "dropped"), [("copies", {3, 5}), ("similar", {3, 5, 7})])
@pytest.mark.parametrize("in_memory", [True, False])
def test_records_of_shared_images_are_dropped_and_counted_in_a_terminal_alone(
    overlap: str, dropped: set[int], in_memory: bool, names: tuple[str, str], shown: dict[str, object]
) -> None:
    whole, _ = load(names[0], "cifar10-none", evaluate_on=None)
    data, notes = load(*names, drop_overlap=overlap, num_records_public=12, in_memory=in_memory)
    files = sorted(range(12), key=lambda row: (row % 2, row))
    kept = [number for number, row in enumerate(files) if row not in dropped]
    assert data.train.ids.tolist() == whole.train.ids[kept].tolist()
    assert shown[COUNT] == len(dropped)
    (note,) = [note for note in notes if "--drop-overlap" in note]
    assert not any(character.isdigit() for character in note)


def test_held_out_records_are_chosen_among_those_that_stay(names: tuple[str, str]) -> None:
    data, _ = load(*names, drop_overlap="copies", num_records_public=14, **HELD_OUT)
    assert data.slots.capacity == 14
    assert sorted([*data.train.ids, *data.held_out_records.ids]) == sorted(data.slots.ids)
    assert len(data.slots.ids) == 10


def test_probes_are_public_data_too(names: tuple[str, str]) -> None:
    options = {"evaluate_on": None, "probe_datasets": (names[1],)}
    with pytest.raises(ConfigError, match="probe_datasets must be public"):
        load(names[0], "", **options)
    data, _ = load(names[0], "", drop_overlap="copies", num_records_public=12, **options)
    assert len(data.train) == 10


# The rule of a record


def data_set(rows: list[np.ndarray], units: list[int]) -> Dataset:
    """Records of units 0, 1, … in order, whose ids are the units' names."""
    order = np.argsort(units, kind="stable")
    ids, counts = np.unique(units, return_counts=True)
    starts = np.concatenate([[0], np.cumsum(counts)])
    train = Records(images=np.stack(rows)[order], ids=ids.astype(np.uint64), row_starts=starts)
    return Dataset(train=train, name="own", is_builtin=False)


@pytest.mark.parametrize("overlap", ["copies", "similar"])
def test_dropping_commutes_with_adding_a_record(overlap: Overlap) -> None:
    """For every record r, f(D) is f(D without r), and r exactly if f of r alone keeps it."""
    images = [np.asarray(image.resize((32, 32))).transpose(2, 0, 1) for image in pictures(14)]
    public = {"evaluate_on": [Records(images=np.stack([images[2], images[7]]), ids=np.arange(2, dtype="u8"))]}
    images[9] = np.clip(images[7].astype(int) + 9, 0, 255).astype(np.uint8)  # similar, of the unit 4
    units = [row // 2 for row in range(14)]

    def kept(chosen: set[int]) -> dict[int, bytes]:
        rows = [row for row in range(14) if units[row] in chosen]
        own = data_set([images[row] for row in rows], [units[row] for row in rows])
        train = without_overlap(own, public, overlap)
        return {
            int(name): train.take(np.array([n])).images.tobytes() for n, name in enumerate(train.ids.tolist())
        }

    everyone = set(range(7))
    whole = kept(everyone)
    assert set(whole) == everyone - ({1, 3} if overlap == "copies" else {1, 3, 4})
    for record in everyone:
        assert whole == kept(everyone - {record}) | kept({record})


def test_a_data_set_can_be_dropped_as_a_whole() -> None:
    """Planning then refuses it as data with too few records, without their number."""
    images = np.stack([np.asarray(image).transpose(2, 0, 1) for image in pictures(3, size=32)])
    own = Records(images=images, ids=np.arange(3, dtype=np.uint64))
    dataset = Dataset(train=own, name="own", is_builtin=False)
    assert len(without_overlap(dataset, {"evaluate_on": [own]}, "copies")) == 0


# What is refused


def test_number_of_records_must_be_declared(names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"needs a declared number.*got copies.*--num-records-public"):
        load(*names, drop_overlap="copies")


@pytest.mark.parametrize(
    ("options", "fix"),
    [({"data_is": "public"}, "--data-is private"), ({"evaluate_on": None}, "--evaluate-on")],
)
def test_dropping_is_for_private_beside_public_data(options: dict, fix: str, names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"drop_overlap applies only to private.* or set {fix}$"):
        load(*names, drop_overlap="copies", num_records_public=12, **options)
