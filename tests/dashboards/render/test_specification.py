"""The specification: what is drawn, on which scale, where words stand, what hovering shows."""

from __future__ import annotations

import math

import altair
import jsonschema
import numpy as np
import pytest

from dashboards.compose.figure import content_of
from dashboards.compose.questions import QUESTIONS
from dashboards.query.trial_frames import load_trials
from dashboards.render.specification import page_specification, print_specification
from tests.dashboards.conftest import by_hand
from tests.dashboards.render.drawn import (
    axis,
    axis_titles,
    check_words_stay_apart,
    panels_of,
    points,
    said,
    words_of,
)

pytestmark = pytest.mark.ci


def group_size_content(trials):
    return content_of(trials, "group-size")


def values_domain(content, panel=0):
    return axis(panels_of(content)[panel], "y")["scale"]["domain"]


def layers(panel, kind):
    return [layer for layer in panel["layer"] if layer["mark"]["type"] == kind]


@pytest.mark.ci
def test_figure_from_mlflow_alone_has_the_means_and_errors_computed_by_hand(tracking):
    uri, trials = tracking
    panel = panels_of(group_size_content(load_trials(uri, "new")))[0]
    drawn = points(panel, "ε = 10")
    wanted = [by_hand(trials, "knn_accuracy", size, 10.0) for size in (2, 8, 64, "batch")]
    np.testing.assert_allclose([row["value"] for row in drawn], [100 * mean for mean, _ in wanted])
    ends = [(row["low"], row["high"]) for row in drawn]
    np.testing.assert_allclose(ends, [(100 * (m - e), 100 * (m + e)) for m, e in wanted])


def test_markers_lines_and_error_bars_stand_at_the_numbers(make_trials):
    panel = panels_of(group_size_content(make_trials()))[0]
    fields = {
        kind: [
            {
                channel: where.get("field")
                for channel, where in layer["encoding"].items()
                if channel in ("x", "y", "y2")
            }
            for layer in layers(panel, kind)
            if "data" not in layer
        ]
        for kind in ("point", "line", "rule", "tick")
    }
    assert fields["point"] == fields["line"] == [{"x": "place", "y": "value"}]
    assert fields["rule"] == [{"x": "place", "y": "low", "y2": "high"}]
    assert fields["tick"] == [{"x": "place", "y": "low"}, {"x": "place", "y": "high"}]


def test_categories_stand_on_the_side_with_their_error_bars_across(make_sweep):
    panel = panels_of(content_of(make_sweep("lora_layers", ("Q", "Q+V")), "lora-layers"))[0]
    assert not layers(panel, "line")
    (bar,) = [layer for layer in layers(panel, "rule") if "data" not in layer]
    assert {name: bar["encoding"][name]["field"] for name in ("x", "x2", "y")} == {
        "x": "low",
        "x2": "high",
        "y": "place",
    }
    assert axis(panel, "y")["scale"]["reverse"]


def test_snr_with_and_without_augmentation_is_on_a_log_scale(make_trials):
    snr = panels_of(group_size_content(make_trials()))[-1]
    labels = list(dict.fromkeys(row["curve"] for row in snr["data"]["values"]))
    assert labels == ["with augmentation, Nₐ = 1", "without augmentation"]
    assert axis(snr, "y")["scale"]["type"] == "log"


def test_hollow_markers_tell_what_is_without_augmentation(make_trials):
    snr = panels_of(group_size_content(make_trials()))[-1]
    fills = {row["curve"]: row["fill"] == row["colour"] for row in snr["data"]["values"]}
    assert fills == {"with augmentation, Nₐ = 1": True, "without augmentation": False}


def test_batch_is_the_last_tick_behind_a_gap(make_trials):
    content = group_size_content(make_trials(sizes=("batch", 64, 2, 8)))
    words = [
        w for w in words_of(content)[0] if w.role == "axis-label" and w.text in ("2", "8", "64", "batch")
    ]
    names = [word.text for word in sorted(words[:4], key=lambda word: word.left)]
    assert names == ["2", "8", "64", "batch"]
    panel = panels_of(content)[0]
    (gap,) = next(layer["data"]["values"] for layer in layers(panel, "rule") if "x" in layer["encoding"])
    places = axis(panel, "x")["axis"]["values"]
    assert places == sorted(places)
    assert places[2] < gap["place"] < places[3]


def test_figure_has_a_panel_for_each_score(make_trials):
    titles = axis_titles(group_size_content(make_trials()))
    assert titles == ["k-NN accuracy (%)", "Linear probe accuracy (%)", "Gradient SNR, first step"]


def test_figure_without_labels_shows_view_retrieval(make_trials):
    trials = make_trials(scores=("view_retrieval_top1", "view_retrieval_top10"))
    titles = axis_titles(group_size_content(trials))
    assert titles[:2] == ["View retrieval, top 1 (%)", "View retrieval, top 10 (%)"]


def test_legend_lists_every_curve_once(make_trials):
    content = group_size_content(make_trials())
    legend = [word.text for word in words_of(content)[0] if word.role == "mark"]
    assert legend == [entry.label for entries in content.legends().values() for entry in entries]


def test_figure_of_one_repeat_has_no_error_bars_and_says_so(make_trials):
    content = group_size_content(make_trials(num_repeats=1))
    panel = panels_of(content)[0]
    assert not layers(panel, "tick")
    assert not [row for row in panel["data"]["values"] if "low" in row]
    assert "One repeat: no error bars" in said(content)


@pytest.mark.ci
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"augmentations": (0, 1, 4), "epsilons": (1.0, 3.0, 10.0, math.inf)},
        {"scores": ("knn_accuracy",)},
        {"scores": ()},
        {"data_is": "private"},
        {"num_repeats": 1, "sizes": ("batch",)},
    ],
)
def test_words_of_group_sizes_stay_on_the_page_and_off_each_other(make_trials, shape):
    check_words_stay_apart(group_size_content(make_trials(**shape)))


@pytest.mark.parametrize(
    ("question", "column", "values", "options"),
    [
        ("lora-layers", "lora_layers", ("Q", "Q+K+V"), {}),
        ("architectures", "network_name", ("a_package.with.a_long_name:factory", "cnn"), {}),
        ("temperature", "temperature", (0.05, 0.1, 0.7071), {"augmentations": (0, 1, 4)}),
        ("clip-norm", "l2_clip_norm", (0.01,), {"num_repeats": 1}),
        ("num-augmentations", "num_augmentations", (0, 1, 2), {"scores": ("knn_accuracy",)}),
    ],
)
def test_words_stay_on_the_page_and_off_each_other(make_sweep, question, column, values, options):
    check_words_stay_apart(content_of(make_sweep(column, values, **options), question))


def test_hovering_tells_mean_error_and_repeats(make_trials):
    trials = make_trials()
    mean, error = by_hand(trials, "knn_accuracy", 8, 10.0)
    panel = panels_of(group_size_content(trials))[0]
    row = points(panel, "ε = 10")[1]
    tooltip = layers(panel, "point")[0]["encoding"]["tooltip"]
    assert [(one["title"], row[one["field"]]) for one in tooltip] == [
        ("title", "ε = 10"),
        ("S", "8"),
        ("mean", f"{100 * mean:.4g}"),
        ("standard error", f"{100 * error:.2g}"),
        ("n", 3),
    ]


def test_a_click_in_the_legend_fades_the_other_curves(make_trials):
    specification = page_specification(group_size_content(make_trials()))
    legends = specification["concat"][-1]["vconcat"]
    params = [
        layer["params"][0]["name"] for legend in legends for layer in legend["layer"] if "params" in layer
    ]
    faded = [
        layers(panel, "point")[0]["encoding"]["opacity"]["condition"]["param"]
        for panel in specification["concat"][:-1]
    ]
    assert faded == [params[0], params[0], params[1]]


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_values_have_room_around_an_extreme_untrained_line(make_trials, level):
    content = group_size_content(make_trials(untrained_knn_accuracy=level))
    low, high = values_domain(content)
    panel = panels_of(content)[0]
    (line,) = [
        layer["data"]["values"][0]
        for layer in layers(panel, "rule")
        if "data" in layer and "value" in layer["data"]["values"][0]
    ]
    assert line["value"] == 100 * level
    drawn = [line["value"], *(row["value"] for row in panel["data"]["values"])]
    room = 0.02 * (high - low)
    assert low + room < min(drawn)
    assert max(drawn) < high - room


def test_values_have_room_around_an_extreme_error_bar(make_trials):
    content = group_size_content(make_trials(untrained_knn_accuracy=0.7))
    rows = panels_of(content)[0]["data"]["values"]
    low, high = values_domain(content)
    assert low < min(row["low"] for row in rows)
    assert max(row["high"] for row in rows) < high


def test_values_that_are_all_one_have_a_range(make_trials):
    trials = make_trials(
        num_repeats=1, scores=("knn_accuracy",), knn_accuracy=0.0, untrained_knn_accuracy=0.0
    )
    low, high = values_domain(group_size_content(trials))
    assert low < 0 < high


def test_every_snr_is_in_its_logarithmic_range_with_at_least_two_ticks(make_trials):
    content = group_size_content(make_trials())
    snr = panels_of(content)[-1]
    low, high = values_domain(content, panel=-1)
    means = [row["value"] for row in snr["data"]["values"]]
    assert 0 < low < min(means)
    assert max(means) < high < 1e5 * low
    assert sum(low <= tick <= high for tick in axis(snr, "y")["axis"]["values"]) >= 2


def test_error_bars_that_a_logarithm_does_not_hold_end_at_the_axis(make_trials):
    trials = make_trials()
    trials.loc[trials["repeat"] > 0, "snr_first_step"] = 0.0  # the error is as large as the mean
    content = group_size_content(trials)
    rows = panels_of(content)[-1]["data"]["values"]
    assert min(2 * row["value"] - row["high"] for row in rows) == pytest.approx(0)
    assert min(row["low"] for row in rows) == values_domain(content, panel=-1)[0]


@pytest.mark.parametrize(
    "question",
    [
        "group-size",
        *(pytest.param(q, marks=pytest.mark.ci) for q in ("lora-layers", "convergence", "search")),
    ],
)
def test_specification_follows_the_schema_of_vega_lite(make_sweep, make_trials, question):
    """A misspelt property is ignored in silence by what draws."""
    asked = QUESTIONS[question]
    values = ("a", "b") if asked.axis.scale == "categorical" else (1, 2)
    trials = make_trials() if question == "group-size" else make_sweep(asked.axis.column, values)
    if question == "convergence":
        trials = trials.assign(train_loss=2.0, knn_accuracy_during=0.5)
    if question == "search":
        trials = trials.assign(sweep="a search")
    altair.Chart.from_dict(print_specification(content_of(trials, asked)))


def test_the_schema_refuses_a_misspelt_property(make_trials):
    specification = print_specification(group_size_content(make_trials()))
    specification["vconcat"][0]["concat"][0]["layer"][0]["mark"]["strokDash"] = [1, 2]
    with pytest.raises(jsonschema.ValidationError):
        altair.Chart.from_dict(specification)


def line_parts(panel):
    """The points that each drawn line joins."""
    (line,) = layers(panel, "line")
    detail = [each["field"] for each in line["encoding"]["detail"]]
    found = {}
    for row in panel["data"]["values"]:
        if row["dash"]:
            found.setdefault(tuple(row[name] for name in detail), []).append(row["name"])
    return found


def test_no_line_joins_a_number_to_the_batch(make_trials):
    joined = line_parts(panels_of(group_size_content(make_trials()))[0]).values()
    assert ["2", "8", "64"] in joined
    assert all("batch" not in names or len(names) == 1 for names in joined)


def test_one_repeat_draws_markers_and_no_line(make_trials):
    panel = panels_of(group_size_content(make_trials(num_repeats=1)))[0]
    assert layers(panel, "line") == []
    assert len(points(panel, "ε = 10")) == 4
    assert layers(panels_of(group_size_content(make_trials(num_repeats=2)))[0], "line")


@pytest.mark.parametrize("num_repeats", [1, 3])
def test_a_quarter_of_a_point_is_a_small_part_of_the_axis(make_trials, num_repeats):
    trials = make_trials(sizes=(2, 8), epsilons=(10.0,), num_repeats=num_repeats, scores=("knn_accuracy",))
    trials["knn_accuracy"] = [0.8 if size == 2 else 0.8025 for size in trials["group_size"]]
    trials = trials.drop(columns="untrained_knn_accuracy")
    low, high = values_domain(group_size_content(trials))
    assert high - low > 16 * 0.25
    assert low < 80 < 80.25 < high


def test_axis_shows_the_error_of_a_difference(make_trials):
    trials = make_trials(sizes=(2, 8), epsilons=(10.0,), scores=("knn_accuracy",))
    trials["knn_accuracy"] = [0.7, 0.8, 0.9, 0.9, 0.8, 0.7]
    trials = trials.drop(columns="untrained_knn_accuracy")
    low, high = values_domain(group_size_content(trials))
    error = by_hand(trials, "knn_accuracy", 2, 10.0)[1]
    assert high - low >= 100 * 4 * math.sqrt(2) * error


def test_widened_axis_of_per_cents_stays_between_0_and_100_but_for_its_margin(make_trials):
    trials = make_trials(sizes=(2, 8), epsilons=(10.0,), scores=("knn_accuracy",), num_repeats=1)
    for value in (0.999, 0.001):
        trials["knn_accuracy"] = value
        low, high = values_domain(group_size_content(trials.drop(columns="untrained_knn_accuracy")))
        assert low > -1
        assert high < 101
        assert high - low >= 4
