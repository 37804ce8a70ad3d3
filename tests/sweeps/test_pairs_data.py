"""Image-text data of a sweep: loaded, split and refused as images are, and what is told of them."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.options.data import data_path
from sweeps.service.options.score_options import visible_scores
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning import sweep_data as service_data
from tests.sweeps.support import check_ledger, loaded, write_npz
from trainers.config.tree import replace_options
from trainers.data.faults import RecordsError
from trainers.data.loading import load_dataset
from trainers.data.pairs import ImageTextRecords
from trainers.data.stored_images import StoredImages

SECRET = "secret-words"


def random_images(num_images: int, seed: int = 0, size: int = 32) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (num_images, size, size, 3), dtype=np.uint8))


def encoded(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def write_csv(folder: Path, images: Sequence[np.ndarray], *, num_corrupt: int = 0, name: str = "own") -> str:
    """A csv file in `folder` with its images in a sub-folder; the last rows have no image."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = ["filepath\ttitle"]
    for row, image in enumerate(images):
        (folder / "images" / f"{row}.png").write_bytes(encoded(image))
        lines.append(f"images/{row}.png\tcaption {row}")
    lines += [f"images/{SECRET}-{row}.png\t{SECRET}" for row in range(num_corrupt)]
    (folder / f"{name}.csv").write_text("\n".join(lines))
    return f"csv:{folder / f'{name}.csv'}"


def write_shard(path: Path, images: Sequence[np.ndarray]) -> str:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for row, image in enumerate(images):
            for kind, value in (("png", encoded(image)), ("txt", f"caption {row}".encode())):
                member = tarfile.TarInfo(f"{row:03d}.{kind}")
                member.size = len(value)
                shard.addfile(member, io.BytesIO(value))
    return f"webdataset:{path}"


def load(dataset: str, **options: object):
    return loaded(replace_options(SweepOptions(), dataset=dataset, no_ledger=True, **options))


def refused(dataset: str, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(dataset, **options)
    return str(caught.value)


# Loading and splitting


def test_public_pairs_are_scored_on_their_own_test_pairs() -> None:
    data, _ = load("shapes:40")
    assert data.train_is_public
    assert data.index is data.train
    assert (len(data.train), len(data.queries)) == (40, 2000)


def test_public_pairs_without_a_split_are_split_by_their_ids(tmp_path: Path) -> None:
    data, _ = load(write_csv(tmp_path, random_images(40)), data_is="public", test_fraction=0.3)
    assert isinstance(data.queries, ImageTextRecords)
    assert len(data.train) + len(data.queries) == 40
    assert not set(data.train.ids.tolist()) & set(data.queries.ids.tolist())


def test_private_pairs_are_trained_on_whole_and_scored_on_other_pairs(tmp_path: Path) -> None:
    data, notes = load(write_csv(tmp_path, random_images(20)), evaluate_on="shapes:30")
    assert not data.train_is_public
    assert (len(data.train), len(data.index), len(data.queries)) == (20, 30, 2000)
    assert any("Scores are on the public data set shapes:30" in note for note in notes)


def test_pairs_of_which_nothing_is_fitted_are_all_scored(tmp_path: Path) -> None:
    """Without labels there is neither k-NN nor a probe, and so no use for an index."""
    public = write_csv(tmp_path / "public", random_images(40, seed=1))
    data, _ = load(write_csv(tmp_path, random_images(20)), evaluate_on=public)
    assert data.index is None
    assert len(data.queries) == 40
    for method, score in (("dp_gcl", "image_to_text_recall_at_10"), ("dp_mae", "view_retrieval_top1")):
        assert score in visible_scores(data, method)


def test_labelled_pairs_without_a_split_are_split_into_index_and_queries(tmp_path: Path) -> None:
    other = dataclasses.replace(load_dataset("shapes:60"), test=None)
    index, queries = service_data._split_to_score(other, 0.2)
    assert index is not None
    assert len(queries) < len(index)
    assert len(index) + len(queries) == 60


def test_private_pairs_without_other_pairs_have_no_scores(tmp_path: Path) -> None:
    data, notes = load(write_csv(tmp_path, random_images(20)))
    assert (data.index, data.queries) == (None, None)
    assert any("no scores to compare trials by" in note for note in notes)


@pytest.mark.parametrize(
    ("dataset", "evaluate_on", "message"),
    [
        (
            "shapes:20",
            "digits",
            "must hold images with captions, like the training data; digits holds images",
        ),
        (
            "digits",
            "shapes:20",
            "must hold images, like the training data; shapes:20 holds images with capt",
        ),
    ],
)
def test_data_scored_on_must_be_of_the_modality_of_the_training_data(
    dataset: str, evaluate_on: str, message: str
) -> None:
    assert message in refused(dataset, evaluate_on=evaluate_on)


def test_pairs_scored_on_must_have_the_shape_of_the_training_data(tmp_path: Path) -> None:
    message = refused(write_csv(tmp_path, random_images(20, size=24)), evaluate_on="shapes:20")
    assert "training data's shape (3, 24, 24); got (3, 32, 32)" in message


def test_options_of_reading_hold_for_all_data_sets_that_have_such(tmp_path: Path) -> None:
    own = write_csv(tmp_path / "a", random_images(20), num_corrupt=1)
    other = write_shard(tmp_path / "b" / "other.tar", random_images(20, seed=1))
    data, _ = load(own, evaluate_on=other, skip_corrupt=True, csv_caption_key="title")
    assert (len(data.train), len(data.queries)) == (20, 20)


def write_labelled_csv(folder: Path, images: Sequence[np.ndarray]) -> str:
    name = write_csv(folder, images)
    path = folder / "own.csv"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{head}\tkind", *(f"{line}\tkind {i % 3}" for i, line in enumerate(lines))]))
    return name


def test_labels_are_read_of_public_pairs_that_are_scored(tmp_path: Path) -> None:
    data, _ = load(write_labelled_csv(tmp_path, random_images(40)), data_is="public", csv_label_key="kind")
    assert data.class_names == ("kind 0", "kind 1", "kind 2")
    assert set(data.queries.labels.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("write", [write_csv, write_labelled_csv])
def test_labels_of_private_pairs_are_not_read(write: Callable[..., str], tmp_path: Path) -> None:
    public = write_labelled_csv(tmp_path / "public", random_images(40, seed=1))
    data, _ = load(write(tmp_path, random_images(40)), evaluate_on=public, csv_label_key="kind")
    assert data.train.labels is None
    assert (data.index.labels is None, data.class_names) == (False, ("kind 0", "kind 1", "kind 2"))


def test_a_label_column_of_private_pairs_alone_is_refused(tmp_path: Path) -> None:
    own = write_labelled_csv(tmp_path, random_images(10))
    message = refused(own, csv_label_key="kind")
    assert "got --evaluate-on none. Labels of training data are not read. Leave it out." in message


def test_pairs_are_probed_with_labelled_images_in_their_own_shape() -> None:
    data, _ = load("shapes:20", probe_datasets=("digits",))
    (probe,) = data.probes
    assert probe.index.images.shape[1:] == data.train.images.shape[1:] == (3, 32, 32)


def test_noised_scores_of_pairs_are_refused_before_they_are_read() -> None:
    message = refused(
        "csv:/nowhere/own.csv", evaluate_on="shapes:20", score_on_held_out=0.2, score_noise_multiplier=5.0
    )
    assert "one record is a candidate for every query and can change all answers" in message


# What is public must not be private, too


@pytest.mark.parametrize("kind", ["csv", "webdataset"])
def test_private_pictures_among_public_ones_are_refused(kind: str, tmp_path: Path) -> None:
    shared = load_dataset("shapes:30").train.images[17].transpose(1, 2, 0)
    images = [*random_images(10), shared]
    if kind == "csv":
        own = write_csv(tmp_path / "own", images)
    else:
        own = write_shard(tmp_path / "own" / "own.tar", images)
    message = refused(own, evaluate_on="shapes:30")
    assert message == (
        "evaluate_on must be public; it holds images of the private training data. Remove them from either, "
        "or pass --drop-overlap copies"
    )
    assert len(load(own, evaluate_on="shapes:10")[0].train) == 11


def test_private_pictures_among_probes_are_refused(tmp_path: Path) -> None:
    shared = load_dataset("shapes:30").train.images[17].transpose(1, 2, 0)
    message = refused(write_csv(tmp_path, [*random_images(10), shared]), probe_datasets=("shapes:30",))
    assert message.startswith("probe_datasets must be public; it holds images of the private training data.")


def test_stored_pictures_are_compared_by_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_shard(tmp_path / "own" / "own.tar", random_images(10))
    other = write_csv(tmp_path / "other", random_images(12, seed=1)[:11] + random_images(10)[3:4])
    monkeypatch.setattr(StoredImages, "__getitem__", lambda *_: pytest.fail("images were read"))
    load(own, evaluate_on="shapes:10", in_memory=False)
    with pytest.raises(ConfigError, match="it holds images of the private training data") as caught:
        load(own, evaluate_on=other, in_memory=False)
    assert caught.value.details == {
        "private images in evaluate_on": [11],
        "their copies in the training data": [3],
    }


@pytest.mark.parametrize("evaluate_on", ["shapes", "shapes:7", "shapes:20:0"])
def test_shapes_of_one_seed_are_one_source(evaluate_on: str) -> None:
    message = refused("shapes:20", data_is="private", evaluate_on=evaluate_on)
    assert "other than the private training data" in message


def test_shapes_of_another_seed_are_another_source() -> None:
    data, _ = load("shapes:2000", data_is="private", evaluate_on="shapes:2000:1")
    assert not data.train_is_public


# What is told


def test_number_of_corrupt_rows_is_told_of_public_data_alone(tmp_path: Path) -> None:
    own = write_csv(tmp_path, random_images(30), num_corrupt=3)
    told = {}
    for kind in ("public", "private"):
        _, notes = load(own, data_is=kind, skip_corrupt=True)
        told[kind] = [note for note in notes if "corrupt" in note or " 3 " in note]
    assert told == {"public": [f"In {own}: 3 corrupt rows, skipped (--skip-corrupt)."], "private": []}


def test_corrupt_rows_of_public_pairs_scored_on_are_told(tmp_path: Path) -> None:
    own, other = write_csv(tmp_path / "a", random_images(20)), tmp_path / "b"
    scored = write_csv(other, random_images(20, seed=1), num_corrupt=2)
    _, notes = load(own, evaluate_on=scored, skip_corrupt=True)
    assert f"In {scored}: 2 corrupt rows, skipped (--skip-corrupt)." in notes


def test_refusal_of_corrupt_rows_tells_no_path_caption_position_or_number(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    own = write_csv(tmp_path, random_images(20), num_corrupt=2)
    message = refusal("--tiny", "--dataset", own, "--no-ledger")
    assert message == (
        "every row must have a readable image of at most 50000000 pixels (--max-image-pixels), a caption of "
        "at most 100000 characters and (if used) unit, split and label; some of the training data break this "
        "rule. Repair or remove them, or pass --skip-corrupt"
    )


def test_refusal_of_corrupt_public_rows_beside_private_data_tells_how_many(tmp_path: Path) -> None:
    own, other = write_csv(tmp_path / "a", random_images(20)), tmp_path / "b"
    scored = write_csv(other, random_images(20, seed=1), num_corrupt=2)
    with pytest.raises(RecordsError, match="among 22 rows: 2 missing image"):
        load(own, evaluate_on=scored)


def test_numbers_of_corrupt_private_rows_are_details_of_the_refusal(tmp_path: Path) -> None:
    own = write_csv(tmp_path, random_images(20), num_corrupt=2)
    with pytest.raises(RecordsError) as caught:
        load(own)
    assert "among 22 rows: 2 missing image" in caught.value.details["in full"]
    assert caught.value.details["missing image"] == [20, 21]


def test_refusal_of_corrupt_public_rows_tells_how_many(tmp_path: Path) -> None:
    own = write_csv(tmp_path, random_images(20), num_corrupt=2)
    with pytest.raises(RecordsError, match="among 22 rows: 2 missing image"):
        load(own, data_is="public")


def test_data_of_corrupt_rows_alone_are_refused_with_their_faults(tmp_path: Path) -> None:
    own = write_csv(tmp_path, [], num_corrupt=3)
    with pytest.raises(RecordsError, match="0 of 3 rows are valid") as caught:
        load(own, data_is="public", skip_corrupt=True)
    assert caught.value.details == {"missing image": [0, 1, 2]}


# Marks


def checked(dataset: str, **options: object) -> str:
    with pytest.raises(LedgerError) as caught:
        check_ledger(replace_options(SweepOptions(), dataset=dataset, **options))
    return str(caught.value)


@pytest.mark.parametrize("name", ["digits", "shapes", "shapes:500", "shapes:500:7"])
def test_generated_data_have_no_place(name: str) -> None:
    assert data_path(name) is None


@pytest.mark.parametrize("scheme", ["csv", "webdataset", "parquet"])
def test_own_pairs_lie_where_their_name_says(scheme: str) -> None:
    assert data_path(f"{scheme}:/data/own") == Path("/data/own")


def test_marked_csv_file_is_not_trained_on_without_its_ledger(ledger: Ledger, tmp_path: Path) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    ledger.bind("scans", data_path(own))
    assert "charged as data set 'scans'" in checked(own, no_ledger=True)
    assert "so they are private" in checked(own, data_is="public")
    assert "private, charged as data set 'scans'" in checked("digits", evaluate_on=own)


def test_second_list_of_marked_images_is_charged_to_their_ledger(ledger: Ledger, tmp_path: Path) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    ledger.bind("scans", tmp_path / "own" / "images")
    assert "charged as data set 'scans'" in checked(own, no_ledger=True)
    assert "so they are private" in checked(own, data_is="public")
    assert "private, charged as data set 'scans'" in checked("digits", probe_datasets=(own,))
    address = str(tmp_path / "ledger.db")
    assert "not as 'others'" in checked(own, ledger=address, dataset_id="others")
    check_ledger(replace_options(SweepOptions(), dataset=own, ledger=address, dataset_id="scans"))


def test_list_beside_a_marked_one_has_no_mark(ledger: Ledger, tmp_path: Path) -> None:
    for folder in ("one", "other"):
        write_csv(tmp_path / folder, random_images(5))
    ledger.bind("scans", tmp_path / "one" / "own.csv")
    check_ledger(
        replace_options(SweepOptions(), dataset=f"csv:{tmp_path / 'other' / 'own.csv'}", no_ledger=True)
    )


@pytest.mark.parametrize("again", ["s-{0..1}.tar", "s-{1..2}.tar", "s-1.tar", "."])
def test_marked_shards_are_found_under_every_name(again: str, ledger: Ledger, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    for number in range(3):
        write_shard(folder / f"s-{number}.tar", random_images(2, seed=number))
    ledger.bind("scans", data_path(f"webdataset:{folder / 's-{0..1}.tar'}"))
    assert "charged as data set 'scans'" in checked(f"webdataset:{folder / again}", no_ledger=True)
    check_ledger(replace_options(SweepOptions(), dataset=f"webdataset:{folder / 's-2.tar'}", no_ledger=True))


def test_images_are_marked_as_before(ledger: Ledger, tmp_path: Path) -> None:
    own = write_npz(tmp_path / "own.npz", 10)
    ledger.bind("scans", data_path(own))
    assert "charged as data set 'scans'" in checked(own, no_ledger=True)
