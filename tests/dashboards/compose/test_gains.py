"""What private data add: paired with the public start of the same repeat."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from dashboards.compose.figure import content_of, numbers_of
from dashboards.compose.gains import with_gains
from dashboards.compose.questions import find_question
from dashboards.compose.references import reference_rows
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.selection import shown_trials

STARTS = (0.50, 0.60, 0.70)  # of the repeats: a difference that is not paired would be buried
GAINS = (0.030, 0.031, 0.029)
FREE_GAINS = (0.060, 0.062, 0.058)
METHODS = ("dp_gcl", "dp_clip", "non_private", "base")


def _row(method: str, repeat: int, epsilon: float, gain: float) -> dict[str, object]:
    private = epsilon < math.inf
    return {
        **{"method": method, "repeat": repeat, "target_epsilon": epsilon, "num_augmentations": 0},
        **{
            "dataset": "fashion_mnist",
            "data_is": "public",
            "target_delta": 1e-6,
            "run_id": f"{method}{repeat}",
        },
        **{"guarantee_label": "proven" if private else "none", "num_steps": 0 if method == "base" else 50},
        **{"epsilon": epsilon, "noise_multiplier": float(private), "tuning_cost": "none"},
        "knn_accuracy": STARTS[repeat] + gain,
        "untrained_knn_accuracy": 0.3 + 0.01 * repeat,
        "public_start_knn_accuracy": STARTS[repeat],
        "raw_pixels_knn_accuracy": 0.85,
        "hog_knn_accuracy": 0.89,
    }


@pytest.fixture
def trials() -> pd.DataFrame:
    rows = []
    for repeat in range(3):
        rows.append(_row("dp_gcl", repeat, 1.0, GAINS[repeat]))
        rows.append(_row("dp_clip", repeat, 1.0, (0.01, -0.02, 0.015)[repeat]))
        rows.append(_row("non_private", repeat, math.inf, FREE_GAINS[repeat]))
        rows.append(_row("base", repeat, math.inf, 0.0))
    return pd.DataFrame(rows)


def _gain(trials: pd.DataFrame, method: str) -> tuple[float, float, int]:
    gained = with_gains(shown_trials(trials, find_question("methods")))
    return mean_and_error(gained[gained["method"] == method], "knn_accuracy_private_gain")


def _table(trials: pd.DataFrame, heading: str):
    return next(table for name, table in content_of(trials, "methods").tables if name.startswith(heading))


def _cell(table, row: str, column: str) -> str:
    return next(each for each in table.rows if each[0] == row)[list(table.heading).index(column)]


def test_private_gain_is_paired_with_the_public_start_of_its_repeat(trials: pd.DataFrame) -> None:
    gain = _gain(trials, "dp_gcl")
    assert gain == pytest.approx((np.mean(GAINS), np.std(GAINS, ddof=1) / math.sqrt(3), 3))


def test_private_gain_stands_in_the_tables(trials: pd.DataFrame) -> None:
    cell = _cell(_table(trials, "Private gain"), "DP-GCL", "Private gain, ε = 1: k-NN accuracy (points)")
    assert cell == "3.00 ± 0.06"


def test_tables_of_gains_give_no_verdict(trials: pd.DataFrame) -> None:
    cell = _cell(_table(trials, "Private gain"), "DP-CLIP", "Private gain, ε = 1: k-NN accuracy (points)")
    assert cell.startswith("0.17 ± ")


def test_private_gain_is_claimed_of_no_trial_without_a_guarantee(trials: pd.DataFrame) -> None:
    table = _table(trials, "Private gain")
    column = "Private gain, no noise: k-NN accuracy (points)"
    assert _cell(table, "Non-private", column) == "6.00 ± 0.12, not private"
    assert _cell(table, "Base, not trained", column) == "–"


def test_private_gain_is_over_the_untrained_network_where_there_is_no_public_start(
    trials: pd.DataFrame,
) -> None:
    fresh = trials.drop(columns="public_start_knn_accuracy")
    differences = fresh["knn_accuracy"] - fresh["untrained_knn_accuracy"]
    expected = differences[fresh["method"] == "dp_gcl"].mean()
    assert _gain(fresh, "dp_gcl")[0] == pytest.approx(expected)
    assert any("untrained network, paired" in note for note in content_of(fresh, "methods").notes)
    assert any("public start, paired" in note for note in content_of(trials, "methods").notes)


def test_private_gain_over_a_private_start_is_not_called_one_over_a_public_start(
    trials: pd.DataFrame,
) -> None:
    private = trials.rename(columns={"public_start_knn_accuracy": "private_start_knn_accuracy"})
    assert _gain(private, "dp_gcl") == _gain(trials, "dp_gcl")
    content = content_of(private, "methods")
    assert any("the private start, paired" in note for note in content.notes)
    labels = {row[0] for _, table in content.tables for row in table.rows}
    assert "private start alone" in labels
    assert "public start alone" not in labels


def test_references_are_rows_below_every_table_and_never_bold(trials: pd.DataFrame) -> None:
    table = content_of(trials, "methods").tables[0][1]
    assert [row[:2] for row in table.rows[4:]] == [
        [name, "reference"] for name in ("raw pixels", "HOG", "untrained network", "public start alone")
    ]
    assert _cell(table, "HOG", "ε = 1: k-NN accuracy (%)") == "89.00"
    assert _cell(table, "public start alone", "ε = 1: k-NN accuracy (%)") == "60.00 ± 5.77"
    assert not table.bold  # one private method is the best of nothing
    written = numbers_of(trials, "methods").set_index("method")
    assert written.loc["raw pixels", "knn_accuracy_mean"] == 0.85


def test_references_are_lines_across_the_figure_and_named_in_its_legend(trials: pd.DataFrame) -> None:
    content = content_of(trials, "methods")
    (panel,) = content.panels
    lines = {each.label: each.mean for each in panel.references}
    expected = {"raw pixels": 85, "HOG": 89, "untrained network": 31, "public start alone": 60}
    assert lines == pytest.approx(expected)
    listed = {each.label: each for each in content.legends()["Scores"]}
    assert set(expected) <= set(listed)
    assert len({(listed[name].colour, listed[name].dash) for name in expected}) == 4


def test_references_that_were_not_scored_have_no_row(make_trials) -> None:
    shown = shown_trials(make_trials(), find_question("group-size"))
    rows = reference_rows(shown, find_question("group-size"))
    assert [row.label for row in rows] == ["untrained network"]


def test_places_with_the_same_reference_share_a_row(make_trials) -> None:
    """Most options of an ablation begin with the same random weights."""
    trials = make_trials().drop(columns=["linear_probe_accuracy", "untrained_linear_probe_accuracy"])
    first, second, third, *_ = sizes = sorted(trials["group_size"].unique(), key=str)
    names = dict(zip(sizes, ("plain", "ema", "warm-start"), strict=False))
    trials = trials[trials["group_size"].isin([first, second, third])].assign(
        option=lambda rows: rows["group_size"].map(names),
        untrained_knn_accuracy=lambda rows: 0.5 + 0.01 * rows["repeat"].astype(int),
    )
    question = find_question("ablation")

    def labels(**changes) -> list[str]:
        return [
            row.label for row in reference_rows(shown_trials(trials.assign(**changes), question), question)
        ]

    assert labels() == ["untrained network"]
    other = trials["untrained_knn_accuracy"].where(trials["option"] != "warm-start", 0.7)
    assert labels(untrained_knn_accuracy=other) == [
        "untrained network, plain and averaged weights",
        "untrained network, warm start",
    ]


def of_networks(trials: pd.DataFrame) -> pd.DataFrame:
    """The same beside an auto-encoder, with and without noise, whose start is another one."""
    rows = []
    for repeat in range(3):
        for epsilon, gain in ((1.0, 0.01), (math.inf, 0.04)):
            row = _row("dp_mae", repeat, epsilon, gain + 0.001 * repeat)
            rows.append(row | {"public_start_knn_accuracy": 0.4, "knn_accuracy": 0.4 + gain + 0.001 * repeat})
    mine = pd.DataFrame(rows).assign(network_name="mae-toy")
    return pd.concat([trials.assign(network_name="tiny_cnn", zero_shot_accuracy=0.5), mine])


def test_each_network_has_its_own_start_in_the_table(trials: pd.DataFrame) -> None:
    table = _table(of_networks(trials), "Scores")
    column = "ε = 1: k-NN accuracy (%)"
    assert _cell(table, "public start alone, mae-toy", column) == "40.00 ± 0.00"
    assert _cell(table, "public start alone, tiny_cnn", column).startswith("60.00")
    assert _cell(_table(trials, "Scores"), "public start alone", column).startswith("60.00")


def test_methods_are_shown_by_the_scores_that_all_of_them_have(trials: pd.DataFrame) -> None:
    found = of_networks(trials)
    content = content_of(found, "methods")
    assert [panel.y_label for panel in content.panels] == ["k-NN accuracy (%)"]
    assert not any("Zero-shot" in title for title in _table(found, "Scores").heading)
    others = _table(found, "Some methods only. Scores")
    assert _cell(others, "DP-GCL", "ε = 1: Zero-shot accuracy (%)").startswith("50.00")
    assert _cell(others, "Masked auto-encoder", "ε = 1: Zero-shot accuracy (%)") == "–"
