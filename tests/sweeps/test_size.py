"""Batches and groups of small data sets, and complaints about all of a command line at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError
from sweeps import group_size
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.size_to_data import fitted_to_size
from sweeps.service.planning.trials import Point
from tests.sweeps import support
from trainers.config.tree import replace_options


def fitted(*arguments: str, num_records: int) -> tuple[SweepOptions, Sequence[Point], list[str]]:
    options = support.options("--dataset", "digits", *arguments)
    return fitted_to_size(options, group_size.points(options), num_records)


def test_small_data_set_gets_a_smaller_batch_and_groups_with_a_note() -> None:
    options, points, notes = fitted("--no-non-private", num_records=62)
    assert options.mechanism.expected_batch_size == 8
    assert [point.changes["group_size"] for point in points] == [2, 4, 8]
    assert notes[0] == "--expected-batch-size is lowered from 512 to 8, at most a quarter of 62 records."
    assert "do not fit 62 records are left out: S16-Na1-private, S32-Na1-private" in notes[1]


def test_large_data_set_is_left_alone() -> None:
    options, points, notes = fitted(num_records=1445)
    assert (options.mechanism.expected_batch_size, len(points), notes) == (512, 10, [])


def test_declared_number_decides_and_not_that_of_the_records() -> None:
    """Two private data sets of one declared number have one plan."""
    declared = ("--num-records-public", "62")
    few, many = (fitted(*declared, num_records=num_records) for num_records in (50, 62))
    assert few == many
    assert few[0].mechanism.expected_batch_size == 8
    large = fitted("--num-records-public", "1445", num_records=50)
    assert (large[0].mechanism.expected_batch_size, large[2]) == (512, [])


def test_what_was_given_is_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"batch-size must not exceed n; got 100; --group-sizes .* got 64"):
        fitted("--expected-batch-size", "100", "--group-sizes", "4", "64", num_records=62)


def test_options_of_python_are_taken_as_they_are() -> None:
    options = group_size.GroupSizeOptions()
    assert fitted_to_size(options, (), 62) == (options, (), [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--epsilon", "1O"), "--epsilon must be a number; got '1O'"),
        (("--repeats", "x"), "--repeats must be a whole number; got 'x'"),
        (("--test-fraction", "2"), "--test-fraction must be in (0, 1); got 2.0"),
        (
            ("--sampling-prob", "0.1", "--expected-batch-size", "32"),
            "set --sampling-prob or --expected-batch-size, not both",
        ),
        (
            ("--epsilon=1", "--noise-multiplier=2"),
            "set either a target epsilon or a --noise-multiplier, not both; got epsilon = 1.0 and "
            "--noise-multiplier = 2.0",
        ),
        (
            ("--score-on-held-out", "1", "--score-noise-multiplier", "5"),
            "--score-on-held-out must be a share in [0, 1); got 1.0",
        ),
    ],
)
def test_what_is_wrong_with_a_command_is_told_in_its_flags(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        support.options(*arguments)
    assert str(caught.value) == told


def test_scored_data_need_classes_and_images_of_each(tmp_path: Path) -> None:
    own = support.write_npz(tmp_path / "own.npz", 40)
    pixels = np.random.default_rng(5).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "unlabelled.npz", images=pixels)
    split = {"train_images": pixels[:20], "test_images": pixels[20:]}
    labels = {"train_labels": np.arange(20) % 2, "test_labels": np.arange(20) % 4}
    np.savez(tmp_path / "public.npz", **split, **labels)
    chosen = support.given(dataset=own, no_ledger=True, evaluate_on=f"npz:{tmp_path}/unlabelled.npz")
    with pytest.raises(ConfigError, match=r"evaluate_on must have labels to score by; .* has none"):
        support.loaded(chosen)
    _, notes = support.loaded(replace_options(chosen, evaluate_on=f"npz:{tmp_path}/public.npz"))
    assert any("20 scored public records, 10 belong to 2 classes without an image" in n for n in notes)
