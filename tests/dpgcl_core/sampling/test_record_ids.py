"""Stage 1: ids, and what depends on them, ignore position and company."""

from __future__ import annotations

import numpy as np
from scipy import stats

from dpgcl_core.sampling.record_ids import (
    held_out,
    ids_from_contents,
    ids_from_names,
    keyed_uniform,
)


def test_content_ids_of_others_survive_removal_of_any_copy() -> None:
    contents = [b"a", b"b", b"a", b"c", b"a"]
    whole = set(ids_from_contents(contents).tolist())
    for removed in range(5):
        rest = ids_from_contents([c for i, c in enumerate(contents) if i != removed])
        assert len(set(rest.tolist())) == 4
        assert set(rest.tolist()) < whole


def test_content_ids_ignore_the_order() -> None:
    contents = [b"a", b"b", b"a", b"c"]
    assert set(ids_from_contents(contents).tolist()) == set(ids_from_contents(contents[::-1]).tolist())


def test_name_ids_are_distinct() -> None:
    assert len(set(ids_from_names(f"record {i}" for i in range(10_000)).tolist())) == 10_000


def test_keyed_uniform_depends_on_its_own_id_alone() -> None:
    ids = ids_from_names(f"record {i}" for i in range(50))
    whole = keyed_uniform(ids, "view", 3)
    assert np.array_equal(keyed_uniform(ids[::-1], "view", 3)[::-1], whole)
    assert np.array_equal(keyed_uniform(ids[7:8], "view", 3), whole[7:8])


def test_keyed_uniform_is_uniform_and_independent_across_keys() -> None:
    ids = np.arange(20_000, dtype=np.uint64)  # the worst ids: consecutive
    first, second = keyed_uniform(ids, "view", 0, "x"), keyed_uniform(ids, "view", 1, "x")
    assert stats.kstest(first, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 5 / np.sqrt(20_000)


def test_held_out_share_is_the_fraction() -> None:
    ids = ids_from_names(f"record {i}" for i in range(20_000))
    assert abs(held_out(ids, 0.2).mean() - 0.2) < 5 * np.sqrt(0.16 / 20_000)
