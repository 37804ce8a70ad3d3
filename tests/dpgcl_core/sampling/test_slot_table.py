"""The slot table: an injection whose law does not depend on who else is there, kept over time."""

from __future__ import annotations

import io
import itertools
from collections import Counter

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.sampling.record_ids import ids_from_names
from dpgcl_core.sampling.slot_table import SlotTable

IDS = ids_from_names([f"record {i}" for i in range(9)])


def _table(num_records: int, capacity: int = 9, seed: int = 3) -> SlotTable:
    return SlotTable.empty(capacity).holding(IDS[:num_records], np.random.default_rng(seed))


def test_every_record_has_one_slot_in_whatever_order_it_is_asked_for() -> None:
    table = _table(7)
    slots = table.slots_of(IDS[:7])
    assert len(set(slots)) == 7
    assert set(slots) < set(range(9))
    backwards = np.arange(7)[::-1]
    assert (table.slots_of(IDS[backwards]) == slots[backwards]).all()


def test_records_keep_their_slots_whoever_comes_and_goes() -> None:
    table = _table(7)
    fewer = table.holding(np.delete(IDS[:7], 3), None)
    more = fewer.holding(np.concatenate([np.delete(IDS[:7], 3), IDS[7:]]), np.random.default_rng(1))
    left = np.delete(IDS[:7], 3)
    for other in (fewer, more):
        assert (other.slots_of(left) == table.slots_of(left)).all()
    assert set(more.slots_of(IDS[7:])) <= set(range(9)) - set(table.slots_of(left))


def test_removed_record_leaves_a_hole_and_moves_no_other() -> None:
    table = _table(9)
    fewer = table.holding(IDS[:8], None)
    assert set(fewer.slots) == set(range(9)) - set(table.slots_of(IDS[8:]))
    with pytest.raises(DataError, match="a record has no slot"):
        fewer.slots_of(IDS[8:])


@pytest.mark.ci
@pytest.mark.parametrize("history", ["all at once", "one after the other", "after another one left"])
def test_placement_is_a_uniformly_random_injection_whatever_the_history(history: str) -> None:
    generator, counts, num_draws = np.random.default_rng(12), Counter[tuple[int, ...]](), 6_000
    for _ in range(num_draws):
        table = SlotTable.empty(4)
        if history == "one after the other":
            table = table.holding(IDS[:1], generator)
        if history == "after another one left":
            table = table.holding(IDS[[2, 0]], generator).holding(IDS[:1], None)
        counts[tuple(table.holding(IDS[:2], generator).slots_of(IDS[:2]).tolist())] += 1
    injections = list(itertools.permutations(range(4), 2))
    assert set(counts) == set(injections)
    expected = num_draws / len(injections)
    assert (
        sum((counts[each] - expected) ** 2 / expected for each in injections) < 31.3
    )  # 11 degrees, p = .001


def test_law_of_the_others_is_that_without_the_record() -> None:
    """Where a record stands, given that another one is there or not: the coupling of the proof needs it."""
    generator, found = np.random.default_rng(4), {}
    for num_records in (1, 3):
        slots = [
            int(SlotTable.empty(3).holding(IDS[:num_records], generator).slots_of(IDS[:1])[0])
            for _ in range(3_000)
        ]
        found[num_records] = np.bincount(slots, minlength=3)
    assert all(np.abs(counts - 1_000).max() < 130 for counts in found.values())  # five deviations


def test_more_records_than_slots_are_refused_without_their_number() -> None:
    with pytest.raises(ConfigError, match="more records than num_records_public = 8") as raised:
        SlotTable.empty(8).holding(IDS, np.random.default_rng())
    assert "9" not in str(raised.value)


def test_table_is_the_same_after_writing_and_reading() -> None:
    table = _table(7)
    again = SlotTable.from_bytes(table.to_bytes())
    assert again.capacity == table.capacity
    assert (again.slots_of(IDS[:7]) == table.slots_of(IDS[:7])).all()


def _changed(**columns: object) -> bytes:
    file, table = io.BytesIO(), _table(3)
    np.savez(file, **({"capacity": 9, "ids": table.ids, "slots": table.slots} | columns))  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no archive", id="other file"),
        pytest.param(_table(3).to_bytes()[:-30], id="cut off"),
        pytest.param(_changed(slots=np.array([0, 0, 1])), id="one slot twice"),
        pytest.param(_changed(slots=np.array([0, 9, 1])), id="beyond the capacity"),
        pytest.param(_changed(slots=np.array([0, -1, 1])), id="negative"),
        pytest.param(_changed(ids=IDS[[0, 0, 1]]), id="one record twice"),
        pytest.param(_changed(ids=np.array([object()] * 3)), id="objects"),
        pytest.param(_changed(slots=np.array([0.0, 1.0, 2.0])), id="floats"),
        pytest.param(_changed(slots=np.array([0, 1])), id="another length"),
    ],
)
def test_damaged_table_is_refused(content: bytes) -> None:
    with pytest.raises(DataError):
        SlotTable.from_bytes(content)
