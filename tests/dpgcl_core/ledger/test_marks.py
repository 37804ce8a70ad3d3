"""Marks beside the data: second ids, second ledgers, and old copies of the ledger itself."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.marks import (
    check_unmarked,
    check_unmarked_above,
    expand_ranges,
    mark_path,
    read_mark,
    read_mark_above,
)

STEPS = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
CAP = Cap(epsilon=4.0, delta=1e-5, order=4.0)
PLAN = [PlannedTraining(label="trial", step_class=STEPS, num_steps=10)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    created = Ledger.create(str(tmp_path / "ledger" / "ledger.db"))
    created.register("scans", CAP, num_records_public=10_000)
    return created


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "scans.npz"
    path.write_bytes(b"records")
    return path


def test_second_ledger_for_marked_data_is_refused(ledger: Ledger, data: Path, tmp_path: Path) -> None:
    ledger.bind("scans", data)
    second = Ledger.create(str(tmp_path / "second.db"))
    second.register("scans", CAP, num_records_public=10_000)
    with pytest.raises(LedgerError, match="names ledger"):
        second.bind("scans", data)


def test_second_id_for_marked_data_is_refused(ledger: Ledger, data: Path) -> None:
    ledger.bind("scans", data)
    ledger.register("others", CAP, num_records_public=10_000)
    with pytest.raises(LedgerError, match="charged as data set 'scans', not as 'others'"):
        ledger.bind("others", data)


def test_mark_follows_the_ledger(ledger: Ledger, data: Path) -> None:
    ledger.bind("scans", data)
    ledger.reserve("scans", PLAN)
    ledger.bind("scans", data)


def test_copy_of_a_ledger_that_went_its_own_way_is_refused(data: Path, tmp_path: Path) -> None:
    ledger = Ledger.create(str(tmp_path / "ledger.db"))
    ledger.register("scans", CAP, num_records_public=10_000)
    shutil.copy(tmp_path / "ledger.db", tmp_path / "copy.db")
    ledger.reserve("scans", PLAN)
    ledger.bind("scans", data)
    copy = Ledger.open(str(tmp_path / "copy.db"))
    with pytest.raises(LedgerError, match="old copy"):
        copy.bind("scans", data)
    copy.reserve("scans", PLAN)
    with pytest.raises(LedgerError, match="diverged from a copy"):
        copy.bind("scans", data)


def test_mark_of_a_folder_lies_in_it(tmp_path: Path) -> None:
    assert mark_path(tmp_path).parent == tmp_path


def test_damaged_mark_is_refused(ledger: Ledger, data: Path) -> None:
    mark_path(data).write_text("{}")
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger.bind("scans", data)


@pytest.fixture
def folder(ledger: Ledger, tmp_path: Path) -> Path:
    """A marked folder with a file and a sub-folder; the ledger has a second data set, `others`."""
    path = tmp_path / "marked"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "one.parquet").write_bytes(b"records")
    ledger.bind("scans", path)
    ledger.register("others", CAP, num_records_public=10_000)
    return path


def ways_to(kind: str, folder: Path) -> Path:
    """A path that leads to marked data, or to data of which some are marked."""
    beside = folder.parent / "beside"
    beside.mkdir()
    link = beside / "link"
    if kind == "link":
        link.symlink_to(folder)
    elif kind == "link to a link":
        (beside / "first").symlink_to(folder)
        link.symlink_to(beside / "first")
    elif kind == "link to a file":
        link.symlink_to(folder / "inner" / "one.parquet")
    elif kind == "folder with a link":
        link.symlink_to(folder / "inner" / "one.parquet")
        return beside
    elif kind == "link in the folder":
        (beside / "other.parquet").write_bytes(b"others")
        (folder / "inside").symlink_to(beside / "other.parquet")
        return folder / "inside"
    else:
        return {"sub-folder": folder / "inner", "file": folder / "inner/one.parquet", "above": folder.parent}[
            kind
        ]
    return link


WAYS = pytest.mark.parametrize(
    "kind",
    [
        "link",
        "link to a link",
        "link to a file",
        "folder with a link",
        "link in the folder",
        "sub-folder",
        "file",
        "above",
    ],
)


@WAYS
def test_mark_is_found_on_every_way_to_the_data(folder: Path, kind: str) -> None:
    mark = read_mark(ways_to(kind, folder))
    assert mark is not None
    assert mark[0] == "scans"


@WAYS
def test_second_id_is_refused_on_every_way_to_marked_data(ledger: Ledger, folder: Path, kind: str) -> None:
    with pytest.raises(LedgerError, match="charged as data set 'scans', not as 'others'"):
        ledger.bind("others", ways_to(kind, folder))


@WAYS
def test_marked_data_are_not_taken_for_public_on_any_way(folder: Path, kind: str) -> None:
    with pytest.raises(LedgerError, match="private, charged as data set 'scans'"):
        check_unmarked(ways_to(kind, folder))


def test_ranges_stand_for_all_their_files() -> None:
    names = [path.name for path in expand_ranges(Path("a-{8..10}-{00..01}.tar"))]
    assert names == [f"a-{i}-{k}.tar" for i in (8, 9, 10) for k in ("00", "01")]


def test_file_named_like_ranges_stands_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "a-{0..1}.tar"
    path.write_bytes(b"records")
    assert expand_ranges(path) == [path]


def test_every_file_of_a_range_is_marked_and_no_other(ledger: Ledger, tmp_path: Path) -> None:
    files = [tmp_path / f"s-{i}.tar" for i in range(3)]
    for file in files:
        file.write_bytes(b"records")
    ledger.bind("scans", tmp_path / "s-{0..1}.tar")
    assert [read_mark(file) is not None for file in files] == [True, True, False]


def test_range_with_a_file_of_another_id_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    ledger.register("others", CAP, num_records_public=10_000)
    for i in range(3):
        (tmp_path / f"s-{i}.tar").write_bytes(b"records")
    ledger.bind("others", tmp_path / "s-2.tar")
    with pytest.raises(LedgerError, match="charged as data set 'others', not as 'scans'"):
        ledger.bind("scans", tmp_path / "s-{0..2}.tar")


def test_mark_above_is_found_and_a_mark_within_is_not(folder: Path) -> None:
    assert read_mark_above(folder / "inner") == read_mark_above(folder) == read_mark(folder)
    assert read_mark_above(folder.parent) is None
    with pytest.raises(LedgerError, match="private, charged as data set 'scans'"):
        check_unmarked_above(folder / "inner", named_in=Path("list.csv"))
    check_unmarked_above(folder.parent, named_in=Path("list.csv"))


def test_message_of_a_mark_above_names_the_list_alone(folder: Path) -> None:
    with pytest.raises(LedgerError, match=r"the data in list.csv are private") as caught:
        check_unmarked_above(folder / "inner", named_in=Path("list.csv"))
    assert str(folder) not in str(caught.value)


@pytest.mark.parametrize("name", ["gone", "x" * 300, "x" * 300 + "/" + "y" * 5000])
def test_folder_that_cannot_be_has_the_marks_above_it_alone(name: str, folder: Path) -> None:
    assert read_mark_above(folder / name) == read_mark(folder)
    assert read_mark_above(folder.parent / name) is None


@pytest.mark.parametrize(
    ("number", "is_refused"), [(errno.EACCES, False), (errno.ELOOP, False), (errno.EIO, True)]
)
def test_folder_that_may_not_be_looked_at_has_no_mark(
    number: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may read images in it either; a disk that fails is another matter."""
    look = os.lstat

    def lstat(path: os.PathLike[str] | str, **more: object) -> os.stat_result:
        if "secret" in str(path):
            raise OSError(number, "no", str(path))
        return look(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "lstat", lstat)
    if not is_refused:
        assert read_mark_above(tmp_path / "secret") is None
        return
    with pytest.raises(LedgerError, match="cannot be read") as caught:
        read_mark_above(tmp_path / "secret")
    assert "secret" not in str(caught.value)


def test_damaged_mark_above_is_refused_without_its_place(folder: Path) -> None:
    mark_path(folder).write_text("no mark")
    with pytest.raises(LedgerError, match="cannot be read") as caught:
        read_mark_above(folder / "inner")
    assert folder.name not in str(caught.value)
    assert caught.value.__context__ is None


def test_folder_in_a_circle_has_no_mark(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_mark_above(tmp_path / "a") is None


def test_mark_above_is_found_through_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder / "inner")
    assert read_mark_above(link) == read_mark(folder)


def test_file_beside_a_marked_one_has_no_mark(ledger: Ledger, data: Path) -> None:
    ledger.bind("scans", data)
    other = data.with_name("other.npz")
    other.write_bytes(b"others")
    assert read_mark(other) is None
    check_unmarked(other)


def test_marked_file_is_found_through_a_link(ledger: Ledger, data: Path) -> None:
    ledger.bind("scans", data)
    link = data.with_name("link.npz")
    link.symlink_to(data)
    assert mark_path(link) == mark_path(data)
    assert read_mark(link) == read_mark(data)


def test_every_mark_in_a_folder_must_be_the_ledgers(ledger: Ledger, tmp_path: Path) -> None:
    folder, second = tmp_path / "folder", Ledger.create(str(tmp_path / "second.db"))
    second.register("scans", CAP, num_records_public=10_000)
    for name, owner in (("a", ledger), ("b", second)):
        (folder / name).mkdir(parents=True)
        owner.bind("scans", folder / name)
    with pytest.raises(LedgerError, match="names ledger"):
        ledger.bind("scans", folder)


def test_same_id_is_bound_again_on_the_way_up(ledger: Ledger, folder: Path) -> None:
    ledger.bind("scans", folder / "inner")
    ledger.bind("scans", folder.parent)
    assert mark_path(folder.parent).exists()


def test_path_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(LedgerError, match="has a broken link"):
        read_mark(tmp_path / "a")
