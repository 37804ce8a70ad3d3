"""Axes: where values stand, which stand apart, and which are labelled."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from dashboards.compose.axes import Axis, ticks_of


def ticks(scale, values, **options):
    axis = Axis(column="c", label="C", symbol="c", scale=scale, **options)
    return ticks_of(axis, pd.Series(values, dtype=object))


@pytest.mark.parametrize(
    ("scale", "values", "wanted"),
    [
        ("log2", [16, 64, 1024], [4.0, 6.0, 10.0]),
        ("log", [0.01, 1, 10], [-2.0, 0.0, 1.0]),
        ("linear", [0, 1, 4], [0.0, 1.0, 4.0]),
    ],
)
def test_axis_places_values_on_its_scale(scale, values, wanted):
    assert list(ticks(scale, values).positions.values()) == pytest.approx(wanted)


@pytest.mark.parametrize(("apart", "name"), [("batch", "batch"), (math.inf, "∞"), (None, "none")])
def test_axis_puts_what_is_no_number_last_behind_a_gap(apart, name):
    found = ticks("log2", [apart, 2, 4, 8])
    assert found.ticks[-1][1] == name
    assert found.ticks[-1][0] - 3.0 > 0.5
    assert 3.0 < found.gaps[0] < found.ticks[-1][0]


def test_axis_puts_zero_before_a_logarithm():
    found = ticks("log", [0.0, 1, 2])
    assert found.ticks[0][1] == "0"
    assert found.positions[0.0] < found.gaps[0] < 0.0


def test_axis_of_one_detached_value_has_no_gap():
    assert ticks("log2", ["batch"]).gaps == []


def test_axis_takes_numbers_that_differ_by_rounding_for_one():
    assert list(ticks("log2", [512.0, 511.9999999]).names.values()) == ["512"]


def test_axis_of_categories_keeps_the_given_order_and_sorts_the_rest_naturally():
    found = ticks("categorical", ["b10", "b9", "z", "a"], order=("z",))
    assert list(found.names.values()) == ["z", "a", "b9", "b10"]


def test_axis_labels_every_value_that_has_room():
    labels = [name for _, name in ticks("log2", [2, 4, 8, 16, 32, 64, 128, 256]).ticks]
    assert labels == ["2", "4", "8", "16", "32", "64", "128", "256"]


def test_axis_leaves_out_labels_that_would_touch():
    labels = [name for _, name in ticks("log", [1.0, 1.01, 100.0]).ticks]
    assert labels == ["1", "100"]


def test_axis_without_a_grid_has_round_ticks():
    labels = [name for _, name in ticks("linear", list(range(0, 590, 7)), dense=True).ticks]
    assert labels == ["0", "100", "200", "300", "400", "500"]
