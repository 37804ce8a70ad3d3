"""A unit column: all rows of one person are one record, added, removed, split and sampled as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.sampling.record_ids import ids_from_names
from tests.trainers.conftest import make_slots
from tests.trainers.data.test_data import encoded
from trainers.data.loading import load_dataset, split_held_out
from trainers.data.records import Records

PERSONS = np.array(["ann", "bob", "ann", "cid", "bob", "ann"])
SCHEMES = pytest.mark.parametrize("scheme", ["npz", "parquet"])


def _write(scheme: str, folder: Path, persons: np.ndarray, rows: np.ndarray) -> str:
    """Row i is an image of brightness 10·i with the label i."""
    folder.mkdir(exist_ok=True)
    images = np.broadcast_to((10 * rows)[:, None, None], (len(rows), 8, 8)).astype(np.uint8)
    path = folder / f"own.{scheme}"
    if scheme == "npz":
        np.savez(path, images=images, labels=rows, person=persons)
    else:
        table = {"image": [encoded(image) for image in images], "label": rows, "person": persons.tolist()}
        pq.write_table(pa.table(table), path)
    return f"{scheme}:{path}"


def _rows_by_id(name: str) -> dict[int, list[int]]:
    records = load_dataset(name, unit_column="person").train
    assert records.row_starts is not None
    return {
        int(unit): (records.images[first:end, 0, 0, 0] // 10).tolist()
        for unit, first, end in zip(records.ids, records.row_starts, records.row_starts[1:], strict=False)
    }


@SCHEMES
def test_rows_of_one_unit_are_one_record(scheme: str, tmp_path: Path) -> None:
    units = _rows_by_id(_write(scheme, tmp_path, PERSONS, np.arange(6)))
    assert sorted(units.values()) == [[0, 2, 5], [1, 4], [3]]


def test_units_that_differ_by_a_nul_at_the_end_are_two_records(tmp_path: Path) -> None:
    persons = np.array(["a", "a\0", "a", "a\0\0"], dtype=object)
    units = _rows_by_id(_write("parquet", tmp_path, persons, np.arange(4)))
    assert sorted(units.values()) == [[0, 2], [1], [3]]


@SCHEMES
def test_removing_a_unit_leaves_the_others_as_they_are(scheme: str, tmp_path: Path) -> None:
    whole = _rows_by_id(_write(scheme, tmp_path / "whole", PERSONS, np.arange(6)))
    for person in np.unique(PERSONS):
        kept = person != PERSONS
        rest = _rows_by_id(_write(scheme, tmp_path / person, PERSONS[kept], np.arange(6)[kept]))
        assert rest.items() < whole.items()


@SCHEMES
def test_labels_stay_with_their_rows(scheme: str, tmp_path: Path) -> None:
    records = load_dataset(_write(scheme, tmp_path, PERSONS, np.arange(6)), unit_column="person").train
    assert records.labels is not None
    assert (records.images[:, 0, 0, 0] // 10).tolist() == records.labels.tolist()


def _many_units(num_units: int = 40) -> Records:
    """Unit i has 1 + i % 4 rows; row j of all is an image of brightness j."""
    starts = np.cumsum([0, *(1 + i % 4 for i in range(num_units))])
    images = np.broadcast_to(
        np.arange(starts[-1], dtype=np.uint8)[:, None, None, None], (starts[-1], 1, 8, 8)
    )
    ids = ids_from_names(f"unit {i}" for i in range(num_units))
    return Records(images=images.copy(), ids=ids, row_starts=starts)


def _row_at(records: Records, step: int) -> dict[int, int]:
    images = records.images_at(np.arange(len(records)), seed=7, step=step)
    return dict(zip(records.ids.tolist(), images[:, 0, 0, 0].tolist(), strict=True))


def test_the_row_that_stands_for_a_unit_is_its_own_whatever_the_others_are() -> None:
    whole = _many_units()
    for step in (0, 5):
        for left_out in range(len(whole)):
            rest = whole.take(np.arange(len(whole)) != left_out)
            assert _row_at(rest, step).items() < _row_at(whole, step).items()


def test_units_choose_their_rows_apart_and_every_row_in_its_turn() -> None:
    units = _many_units()
    assert units.row_starts is not None
    places = np.array([[*_row_at(units, step).values()] for step in range(60)]) - units.row_starts[:-1]
    for rows in range(2, 5):
        of_size = places[:, np.diff(units.row_starts) == rows]
        assert set(of_size.flat) == set(range(rows))
        assert (of_size != of_size[:, :1]).any()


@SCHEMES
def test_split_cuts_no_unit(scheme: str, tmp_path: Path) -> None:
    persons = np.repeat([f"p{i}" for i in range(20)], 2)
    name = _write(scheme, tmp_path, persons, np.arange(40) % 25)
    units = load_dataset(name, unit_column="person").train
    train, scored = split_held_out(units, 0.5, make_slots(units))
    assert scored is not None
    assert (len(train), len(scored), len(train.images)) == (10, 10, 20)


@SCHEMES
def test_missing_unit_column_is_refused(scheme: str, tmp_path: Path) -> None:
    name = _write(scheme, tmp_path, PERSONS, np.arange(6))
    with pytest.raises(DataError, match="unit_column must name"):
        load_dataset(name, unit_column="patient")


@pytest.mark.parametrize(
    ("name", "column"), [("digits", "person"), ("folder:x", "person"), ("npz:x", "label")]
)
def test_unit_column_of_data_without_such_is_refused(name: str, column: str) -> None:
    with pytest.raises(ConfigError, match="unit_column must name a column of npz:PATH, parquet:PATH"):
        load_dataset(name, unit_column=column)
