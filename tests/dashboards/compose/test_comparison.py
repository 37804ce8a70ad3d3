"""Sweeps overlaid: what is refused, what is paired, and names that hold anything."""

from __future__ import annotations

import math

import pytest

from dashboards.compose.comparison import (
    comparison_of,
    differences_between,
    overlay_sweeps,
    question_of,
    settings_that_differ,
)
from dashboards.dashboard_error import DashboardError
from dashboards.figures import write_drawing

NAMES = ("one, two; 'three'", 'quo"te <b>&amp;</b> |ε=∞ 猫 $x$ \\input{a}')


@pytest.fixture
def two(make_trials):
    """Two sweeps of three repeats; a function of what the second one changes."""

    def made(*, names=NAMES, first_seed=0, **changes):
        sweeps = []
        for number, name in enumerate(names):
            trials = make_trials(
                sizes=(2, 8), sweep=name, sweep_run_id=f"{number}" * 32, question="group-size",
                scored_on="fashion_mnist", network_name="tiny_cnn", sampled="groups",
            )  # fmt: skip
            trials["public_seed"] = trials["repeat"] + (first_seed if number else 0)
            trials["knn_accuracy"] = 0.7 + 0.01 * trials["repeat"] + 0.02 * number
            sweeps.append(trials.assign(**(changes if number else {})))
        return sweeps

    return made


def compared(sweeps):
    question = question_of(sweeps, None)
    return overlay_sweeps(sweeps), question


def test_each_sweep_has_curves_of_its_own_name(two):
    content, numbers = comparison_of(*compared(two()))
    labels = [curve.style.label for curve in content.panels[0].curves]
    assert all(sum(label.startswith(name) for label in labels) == 2 for name in NAMES)
    assert set(numbers["sweep"].dropna()) == set(NAMES)


def test_differences_are_paired_over_the_seeds_that_both_have(two):
    rows = differences_between(*compared(two()))
    private = rows[(rows["score"] == "knn_accuracy") & (rows["target_epsilon"] == 10)]
    assert private["num_repeats"].tolist() == [3, 3]
    assert private["difference"].tolist() == pytest.approx([0.02, 0.02])
    assert private["standard_error"].max() < 1e-9  # the repeats' own spread cancels


def test_differences_pair_seeds_and_not_places_in_the_sweep(two):
    rows = differences_between(*compared(two(first_seed=1)))
    private = rows[(rows["score"] == "knn_accuracy") & (rows["target_epsilon"] == 10)]
    assert private["num_repeats"].tolist() == [2, 2]
    assert private["difference"].tolist() == pytest.approx([0.01, 0.01])


def test_differences_without_a_seed_in_common_add_both_errors(two):
    trials, question = compared(two(first_seed=7))
    rows = differences_between(trials, question)
    private = rows[(rows["score"] == "knn_accuracy") & (rows["target_epsilon"] == 10)]
    assert private["num_repeats"].tolist() == [0, 0]
    assert private["standard_error"].tolist() == pytest.approx([math.sqrt(2) * 0.01 / math.sqrt(3)] * 2)
    table = dict(comparison_of(trials, question)[0].tables)[f"Differences to {NAMES[0]}"]
    assert any("not paired" in cell for row in table.rows for cell in row)


@pytest.mark.parametrize(
    "changes",
    [{"dataset": "cifar10"}, {"scored_on": "digits"}, {"max_query_records": 100}, {"readout": "grid4"}],
)
def test_sweeps_that_scored_something_else_are_refused(two, changes):
    with pytest.raises(DashboardError, match=next(iter(changes))):
        overlay_sweeps(two(**changes))


def test_sweep_beside_itself_and_one_alone_are_refused(two):
    first, _ = two()
    with pytest.raises(DashboardError, match="once"):
        overlay_sweeps([first, first])
    with pytest.raises(DashboardError, match="two sweeps"):
        overlay_sweeps([first])


def test_sweeps_of_different_questions_need_the_question_named(two):
    sweeps = two(question="methods")
    with pytest.raises(DashboardError, match="--question"):
        question_of(sweeps, None)
    assert question_of(sweeps, "group-size").name == "group-size"
    with pytest.raises(DashboardError, match="pareto"):
        question_of(sweeps, "search")


def test_sweeps_of_one_name_are_told_apart_by_their_runs(two):
    trials = overlay_sweeps(two(names=("same", "same")))
    assert trials["sweep"].nunique() == 2
    assert all(name.startswith("same (") for name in trials["sweep"])


def test_starts_of_different_networks_stand_apart(two):
    content, _ = comparison_of(*compared(two(network_name="small_cnn")))
    labels = [curve.style.label for curve in content.panels[0].curves]
    assert [label for label in labels if "untrained" in label] == [f"untrained network, {n}" for n in NAMES]
    assert [row[0] for row in settings_that_differ(overlay_sweeps(two(network_name="b"))).rows] == ["Network"]


@pytest.mark.ci
def test_hostile_names_become_no_markup_in_any_file(two, tmp_path):
    paths = write_drawing(*comparison_of(*compared(two())), tmp_path, "comparison")
    texts = {path.suffix: path.read_text("utf-8") for path in paths if path.suffix not in (".png", ".pdf")}
    assert "<b>" not in texts[".md"]
    assert "<b>" not in texts[".svg"]
    assert r"\input" not in texts[".tex"]
    rows = [line for line in texts[".md"].splitlines() if line.startswith("| 2 |")]
    assert len({line.count("|") for line in rows}) == 1
