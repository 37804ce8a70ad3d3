"""Slot tables on disk: where they lie, who may read them, and that all sweeps on the data have the same."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.sampling.record_ids import ids_from_names
from sweeps.service.options.data import DataOptions
from sweeps.service.storage.slot_files import SlotFiles

IDS = ids_from_names([f"record {i}" for i in range(20)])


@pytest.fixture
def data(tmp_path: Path) -> DataOptions:
    """A data set of one's own."""
    path = tmp_path / "data" / "own.npz"
    path.parent.mkdir()
    path.write_bytes(b"")
    return DataOptions(dataset=f"npz:{path}")


def _files(data: DataOptions, tmp_path: Path, *, has_ledger: bool = False) -> SlotFiles:
    return SlotFiles.of(data, tmp_path / "storage", has_ledger=has_ledger)


@pytest.mark.parametrize(("has_ledger", "folder"), [(True, "data"), (False, "storage/slot-tables")])
def test_table_lies_beside_the_ledgers_mark_or_in_the_storage_folder(
    data: DataOptions, tmp_path: Path, has_ledger: bool, folder: str
) -> None:
    files = _files(data, tmp_path, has_ledger=has_ledger)
    files.keep(files.holding(25, IDS))
    (written,) = (tmp_path / folder).glob("*.npz" if not has_ledger else "*-25.npz")
    assert written == files.path(25)
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert not has_ledger or written.name == "own.npz.dpgcl-slots-25.npz"


def test_later_sweeps_find_the_slots_of_the_first(data: DataOptions, tmp_path: Path) -> None:
    first = _files(data, tmp_path)
    table = first.holding(25, IDS[:18])
    first.keep(table)
    later = _files(data, tmp_path).holding(25, IDS)
    assert (later.slots_of(IDS[:18]) == table.slots_of(IDS[:18])).all()


def test_another_unit_or_capacity_has_a_table_of_its_own(data: DataOptions, tmp_path: Path) -> None:
    other = DataOptions(dataset=data.dataset, unit_column="person")
    paths = {_files(each, tmp_path).path(n) for each in (data, other) for n in (20, 25)}
    assert len(paths) == 4


def test_nothing_is_written_before_it_is_kept(data: DataOptions, tmp_path: Path) -> None:
    _files(data, tmp_path).holding(25, IDS)
    assert not (tmp_path / "storage").exists()


def test_second_of_two_sweeps_that_begin_together_is_refused(data: DataOptions, tmp_path: Path) -> None:
    first, second = _files(data, tmp_path), _files(data, tmp_path)
    tables = [files.holding(25, IDS) for files in (first, second)]
    first.keep(tables[0])
    with pytest.raises(StorageError, match="Start this sweep again"):
        second.keep(tables[1])
    kept = _files(data, tmp_path).holding(25, IDS)
    assert np.array_equal(kept.slots_of(IDS), tables[0].slots_of(IDS))


def test_more_records_than_the_capacity_are_refused(data: DataOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more records than num_records_public = 19"):
        _files(data, tmp_path).holding(19, IDS)


def test_damaged_table_is_refused_and_not_replaced(data: DataOptions, tmp_path: Path) -> None:
    files = _files(data, tmp_path)
    files.keep(files.holding(25, IDS))
    files.path(25).write_bytes(b"damaged")
    with pytest.raises(StorageError, match="Restore it"):
        _files(data, tmp_path).holding(25, IDS)
    assert files.path(25).read_bytes() == b"damaged"


def test_table_of_another_capacity_is_refused(data: DataOptions, tmp_path: Path) -> None:
    files = _files(data, tmp_path)
    files.keep(files.holding(25, IDS))
    files.path(25).rename(files.path(30))
    with pytest.raises(StorageError, match=r"must have 30 slots; got 25\. Restore"):
        files.holding(30, IDS)
