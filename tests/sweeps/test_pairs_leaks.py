"""Image-text data of a sweep: nothing of a record in a message, and no private image taken for public."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError, DataError, LedgerError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.marks import mark_path, read_mark, read_mark_above
from sweeps.service.options.data import data_path
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning import sweep_data as service_data
from sweeps.service.privacy.budget import SweepBudget
from sweeps.service.privacy.ledger_choice import bind_images
from sweeps.service.privacy.reservations import TrialReservations
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import check_ledger, loaded
from tests.sweeps.test_pairs_data import encoded, random_images, write_csv, write_shard
from trainers.config.tree import replace_options
from trainers.data.loading import load_dataset

SECRET = "secret-words"


def options(dataset: str, **more: object) -> SweepOptions:
    return replace_options(SweepOptions(), dataset=dataset, no_ledger=True, **more)  # type: ignore[arg-type]


# Paths of records


@pytest.mark.parametrize("folder", ["x" * 300, "{tmp}/" + "x" * 300])
def test_image_below_a_name_that_is_too_long_is_one_corrupt_row(folder: str, tmp_path: Path) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    with data_path(own).open("a") as opened:  # type: ignore[union-attr]
        opened.write(f"\n{folder.format(tmp=tmp_path)}/{SECRET}.png\tx")
    for role in ({"dataset": own}, {"dataset": "digits", "evaluate_on": own}):
        check_ledger(replace_options(SweepOptions(), **role, skip_corrupt=True, no_ledger=True))
    data, _ = loaded(options(own, skip_corrupt=True))
    assert len(data.train) == 5
    with pytest.raises(DataError, match="some of the training data break this rule") as caught:
        loaded(options(own))
    assert caught.value.details["missing image"] == [5]
    assert "xxx" not in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize(
    "role", [{"no_ledger": True}, {"data_is": "public"}, {"ledger": "x", "dataset_id": "others"}]
)
def test_message_of_marked_images_names_the_list_alone(
    role: dict[str, object], ledger: Ledger, tmp_path: Path
) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    ledger.bind("scans", tmp_path / "own" / "images")
    with pytest.raises(LedgerError, match=r"own\.csv .*charged .*as data set 'scans'") as caught:
        check_ledger(replace_options(SweepOptions(), dataset=own, **role))  # type: ignore[arg-type]
    assert "/images" not in str(caught.value)
    with pytest.raises(LedgerError, match=r"own\.csv are private") as caught:
        check_ledger(replace_options(SweepOptions(), dataset="digits", evaluate_on=own))
    assert "/images" not in str(caught.value)


# What loading may say


@pytest.mark.parametrize("error", [KeyError(SECRET), OSError(5, "no", SECRET), MemoryError(SECRET)])
def test_error_while_private_data_are_loaded_is_told_by_its_type(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(service_data, "load_dataset", failing)
    with pytest.raises(DataError, match=f"{type(error).__name__} .its message is withheld") as caught:
        loaded(options("csv:own.csv"))
    assert SECRET not in str(caught.value)
    assert (caught.value.__context__, caught.value.__cause__) == (None, None), "a traceback would print it"
    with pytest.raises(type(error), match=SECRET):
        loaded(options("csv:own.csv", data_is="public"))


def test_error_of_a_rule_is_told_while_private_data_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be an existing file"):
        loaded(options(f"csv:{tmp_path / 'gone.csv'}"))


# Private test records


def test_private_test_pictures_among_public_ones_are_refused(tmp_path: Path) -> None:
    shared = load_dataset("shapes:30").train.images[np.array([17])][0].transpose(1, 2, 0)
    write_csv(tmp_path, [*random_images(10), shared])
    header, *lines = (tmp_path / "own.csv").read_text().split("\n")
    parts = ["train"] * 10 + ["test"]
    lines = [f"{line}\t{part}" for line, part in zip(lines, parts, strict=True)]
    (tmp_path / "own.csv").write_text("\n".join([f"{header}\tpart", *lines]))
    own = {"dataset": f"csv:{tmp_path / 'own.csv'}", "csv_split_key": "part"}
    with pytest.raises(ConfigError, match="evaluate_on must be public; it holds images of the private"):
        loaded(options(**own, evaluate_on="shapes:30"))
    data, _ = loaded(options(**own, evaluate_on="shapes:10"))
    assert len(data.train) == 10


# Marks on the images of a list


def begun(ledger: Ledger, dataset: str, tmp_path: Path) -> None:
    """As at the start of a sweep without trials."""
    folder = SweepFolder(tmp_path / "results" / "one")
    if folder.read_plan() is None:
        folder.create({"sweep_id": "a"})
    reservations = TrialReservations(ledger=ledger, dataset_id="scans", sweep_id="a", folder=folder)
    budget = SweepBudget(reservations=reservations, trials=[], source=options(dataset).data)
    budget.begin([], data_path(dataset))


def second_list(own: str, folder: Path) -> str:
    """Another list of the same images, by their absolute paths."""
    images = sorted((data_path(own).parent / "images").glob("*.png"))  # type: ignore[union-attr]
    folder.mkdir()
    (folder / "own.csv").write_text("\n".join(["filepath\ttitle", *(f"{image}\tnew" for image in images)]))
    return f"csv:{folder / 'own.csv'}"


def test_second_list_of_charged_images_is_refused(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    again = second_list(own, tmp_path / "again")
    check_ledger(options(again))
    for _ in range(2):  # and once more on a resume
        begun(ledger, own, tmp_path)
    assert caplog.text == ""
    with pytest.raises(LedgerError, match="charged as data set 'scans'"):
        check_ledger(options(again))
    check_ledger(
        replace_options(SweepOptions(), dataset=own, ledger=str(tmp_path / "ledger.db"), dataset_id="scans")
    )


LABELS = {"csv_label_key": "kind"}  # a column of the public pairs alone


@pytest.mark.parametrize(
    "role", [{"data_is": "public"}, {"no_ledger": True}, {"dataset_id": "others", "ledger": "{ledger}"}]
)
def test_labels_of_what_is_scored_hide_no_mark_of_images(
    role: dict[str, object], ledger: Ledger, tmp_path: Path
) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    again = second_list(own, tmp_path / "again")
    begun(ledger, own, tmp_path)
    role = {name: str(tmp_path / "ledger.db") if name == "ledger" else value for name, value in role.items()}
    with pytest.raises(LedgerError, match="as data set 'scans'"):
        check_ledger(
            replace_options(SweepOptions(), dataset=again, evaluate_on="csv:public.csv", **LABELS, **role)
        )


def test_images_are_marked_beside_labels_of_what_is_scored(ledger: Ledger, tmp_path: Path) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    assert bind_images(ledger, "scans", options(own, evaluate_on="csv:public.csv", **LABELS).data)
    assert read_mark_above(tmp_path / "own" / "images") is not None


def test_images_beside_their_list_are_marked_with_it(ledger: Ledger, tmp_path: Path) -> None:
    for row, image in enumerate(random_images(3)):
        (tmp_path / "own" / f"{row}.png").parent.mkdir(exist_ok=True)
        (tmp_path / "own" / f"{row}.png").write_bytes(encoded(image))
    (tmp_path / "own" / "own.csv").write_text("filepath\ttitle\n0.png\ta\n./1.png\tb\n2.png\tc\n")
    for _ in range(2):  # the list's own mark is no other file
        begun(ledger, f"csv:{tmp_path / 'own' / 'own.csv'}", tmp_path)
        assert mark_path(tmp_path / "own").exists()


@pytest.mark.parametrize("place", ["images/other.png", "images/deeper/other.png"])
def test_images_among_others_are_not_marked(
    place: str, ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A public list of the others must stay usable."""
    own = write_csv(tmp_path / "own", random_images(5))
    (tmp_path / "own" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "own" / place).write_bytes(encoded(random_images(1, seed=1)[0]))
    with caplog.at_level(logging.WARNING):
        begun(ledger, own, tmp_path)
    assert read_mark_above(tmp_path / "own" / "images") is None
    assert read_mark(tmp_path / "own" / "own.csv") is not None
    assert "not all images have the ledger's mark" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_images_in_a_folder_that_cannot_be_written_are_told_of(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not bind_images(ledger, "scans", options(own).data)
    assert read_mark_above(tmp_path / "own" / "images") is None


def test_images_of_a_full_disk_are_told_of(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise LedgerError("no space")

    monkeypatch.setattr(Ledger, "bind", full)
    assert not bind_images(ledger, "scans", options(write_csv(tmp_path / "own", random_images(5))).data)


def test_images_that_another_data_set_is_charged_for_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    own = write_csv(tmp_path / "own", random_images(5))
    ledger.bind("others", tmp_path / "own" / "images")
    with pytest.raises(LedgerError, match=r"images of .*own\.csv carry a mark of another data set") as caught:
        bind_images(ledger, "scans", options(own).data)
    assert str(tmp_path / "own" / "images") not in str(caught.value)
    assert caught.value.__context__ is None


def test_images_marked_by_another_ledger_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    own, other = write_csv(tmp_path / "own", random_images(5)), Ledger.create(str(tmp_path / "other.db"))
    other.register("scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=10_000)
    other.bind("scans", tmp_path / "own" / "images")
    with pytest.raises(LedgerError, match="names ledger"):
        bind_images(ledger, "scans", options(own).data)


def test_data_that_name_no_images_are_protected_by_their_own_mark(ledger: Ledger, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "own" / "own.tar", random_images(2))
    assert bind_images(ledger, "scans", options(shard).data)
    assert not mark_path(tmp_path / "own").exists()
