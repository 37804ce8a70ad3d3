"""The answer of a sweep: what to take, what is within noise, and what is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dashboards.compose.answer import OWN, Answer, PrivacyNumbers, answer_of
from dashboards.compose.answer_table import settings_table
from dashboards.compose.decision import LOWER
from trainers.files.outcome_file import Outcomes

NOISE = 0.002
PRIVACY = PrivacyNumbers(
    training_epsilon=1.0, tuned_epsilon=4.2, delta=1e-5, epsilon_remaining=2.5, trainings_remaining=3
)


def sweep(
    means: Mapping[Any, float],
    *,
    column: str = "group_size",
    epsilon: float = 1.0,
    start: float = 0.5,
    num_repeats: int = 3,
    seed: int = 1,
    **more: Any,
) -> pd.DataFrame:
    """Trials of one setting per mean, with noise of `NOISE` and repeats that differ by ten times as much."""
    generator = np.random.default_rng(seed)
    shared, base = generator.normal(0, 10 * NOISE, num_repeats), start
    untrained = generator.normal(base, NOISE, num_repeats) + shared
    rows = [
        {
            "group_size": 8,
            "method": "dp_gcl",
            "target_epsilon": epsilon,
            "num_augmentations": 1,
            "num_steps": 100,
            "sampling_prob": 0.02,
            "num_records_public": 60000,
            "guarantee_label": "proven" if epsilon < math.inf else "none",
            "data_is": "public",
            "knn_accuracy": mean + shared[repeat] + generator.normal(0, NOISE),
            "untrained_knn_accuracy": untrained[repeat],
            "repeat": repeat,
            "trial": f"{value}-r{repeat}",
            **more,
            column: value,
        }
        for value, mean in means.items()
        for repeat in range(num_repeats)
    ]
    trials = pd.DataFrame(rows)
    return trials.astype({"group_size": object})


def answered(trials: pd.DataFrame, question: str = "group-size") -> Answer:
    found = answer_of(trials, question, PRIVACY)
    assert found is not None
    return found


FLAT = {2: 0.6, 4: 0.6, 8: 0.6, 16: 0.6, 64: 0.55}


def test_highest_mean_is_taken_where_nothing_saves() -> None:
    found = answered(sweep(FLAT)).choices[0]
    assert found.take == found.best
    assert found.contenders == ["S = 2", "S = 4", "S = 8", "S = 16"]
    assert answered(sweep(FLAT)).headline().endswith("S = 2 to 16 are within noise of each other.")


def test_clear_best_is_named_with_its_lead() -> None:
    found = answered(sweep({2: 0.6, 4: 0.7, 16: 0.6}))
    choice = found.choices[0]
    assert (choice.best, choice.take, choice.contenders) == ("S = 4", "S = 4", ["S = 4"])
    assert choice.runner_up is not None
    assert choice.runner_up.over_best is not None
    assert choice.runner_up.over_best.verdict == LOWER
    assert choice.recommendation.over_start is not None
    assert choice.recommendation.over_start.mean == pytest.approx(0.2, abs=5 * NOISE)
    assert found.headline().endswith("distinguishable from all others.")


def test_every_private_row_is_a_candidate_and_what_is_left_out_is_named() -> None:
    private = sweep({2: 0.6, 16: 0.6, "batch": 0.9})
    free = sweep({2: 0.95, 16: 0.95}, epsilon=math.inf)
    found = answered(pd.concat([private, free], ignore_index=True))
    assert [setting.name for setting in found.settings] == ["S = 2", "S = 16", "S = batch"]
    assert found.take == ["S = batch"]
    assert found.left_out == ("Left out, no proven guarantee: 6 trainings without noise.",)
    only_free = answered(free)  # of a sweep without privacy all may be best
    assert {setting.name for setting in only_free.settings} == {"S = 2", "S = 16"}


def test_methods_that_publish_no_guarantee_are_left_out_by_name() -> None:
    trials = pd.concat(
        [
            sweep({"dp_gcl": 0.6, "dp_clip": 0.61}, column="method", group_size="batch"),
            sweep({"dpcl_simclr": 0.9}, column="method", guarantee_label="as-published"),
        ],
        ignore_index=True,
    )
    found = answered(trials, "methods")
    assert [each.name for each in found.settings] == ["DP-GCL", "DP-CLIP"]
    assert found.left_out == ("Left out, no proven guarantee: DPCL, SimCLR.",)


def test_same_epsilon_is_compared_with_the_same_epsilon() -> None:
    low, high = sweep({4: 0.7, 16: 0.6}, epsilon=1.0), sweep({4: 0.8, 16: 0.9}, epsilon=10.0, seed=2)
    found = answered(pd.concat([low, high], ignore_index=True))
    assert [choice.at for choice in found.choices] == ["ε = 1", "ε = 10"]
    assert found.take == ["S = 4", "S = 16"]
    assert found.headline().startswith("Which group size? At ε = 1 take S = 4: ")


@pytest.mark.parametrize(
    ("column", "question", "values", "taken"),
    [
        ("num_augmentations", "num-augmentations", (3, 0, 1), "Nₐ = 0"),
        ("expected_batch_size", "batch-size", (1024, 256, 512), "B = 256"),
        ("target_epsilon", "privacy-budget", (10.0, 1.0, 3.0), "ε = 1"),
    ],
)
def test_setting_that_saves_epsilon_or_views_is_taken_beside_the_highest(
    column: str, question: str, values: Sequence[float], taken: str
) -> None:
    trials = sweep(dict(zip(values, (0.6001, 0.6, 0.55), strict=True)), column=column)
    found = answered(trials, question).choices[0]
    assert found.take == taken
    if found.take != found.best:
        assert found.recommendation.cost.saves_over(found.best_setting.cost)
        assert "saves" in found.advice("accuracy")


@pytest.mark.parametrize("column", ["group_size", "temperature"])
def test_highest_is_taken_along_an_axis_without_costs(column: str) -> None:
    trials = sweep({16: 0.6001, 4: 0.6, 2: 0.55}, column=column)
    found = answered(trials, column.replace("_", "-")).choices[0]
    assert found.take == found.best


def test_references_that_cost_nothing_are_compared_and_come_first_where_they_win() -> None:
    trials = sweep({2: 0.6, 16: 0.7}).assign(raw_pixels_knn_accuracy=0.9, hog_knn_accuracy=0.65)
    found = answered(trials)
    assert found.lines()[0] == "Raw pixels (90.00 %) score above every setting in k-NN accuracy."
    assert "raw pixels 90.00 %, HOG 65.00 %, untrained network" in found.beside()
    below = answered(trials.assign(raw_pixels_knn_accuracy=0.1))
    assert below.beaten() is None
    free = sweep({2: 0.95}, epsilon=math.inf)
    beside = answered(pd.concat([trials, free], ignore_index=True))
    assert beside.references["the best without privacy"] == pytest.approx(0.95, abs=0.1)


def test_sweep_that_learns_nothing_warns() -> None:
    found = answered(sweep({2: 0.5, 16: 0.5}))
    assert found.gains is False
    assert "no gain over the untrained network is distinguishable" in found.first_lines()[1]
    assert answered(sweep({2: 0.6, 16: 0.6})).warning() is None
    assert answered(sweep({2: 0.4, 16: 0.3})).warning() == "S = 2 scores below the untrained network"


def test_finite_test_set_is_counted_as_chance() -> None:
    trials, records = sweep({2: 0.60, 16: 0.61}, seed=4), 200
    generator = np.random.default_rng(0)
    common = generator.permutation(records)
    scored = {}
    for row in trials.to_dict("records"):
        num_right = round(row["knn_accuracy"] * records)
        hits = np.zeros(records, dtype=np.float32)
        hits[common[:num_right]] = 1
        swapped = generator.permutation(records)[:20]
        hits[swapped] = hits[np.roll(swapped, 1)]
        scored[row["trial"]] = Outcomes(
            record_ids=np.arange(records, dtype=np.uint64), scores={"knn_accuracy": hits}
        )
    trials = trials.assign(num_scored_records=records, scored_majority_share=0.5)
    without, found = answered(trials), answer_of(trials, "group-size", PRIVACY, scored)
    assert found is not None
    assert found.choices[0].sources == "repeats and test records"
    assert "200 test records, 50 % of one class" in found.basis()
    assert "chance from repeats only" in without.basis()
    pairs = [
        each.settings[0].over_best or each.settings[1].over_best
        for each in (found.choices[0], without.choices[0])
    ]
    assert pairs[0] is not None
    assert pairs[1] is not None
    assert (pairs[0].standard_error or 0) > (pairs[1].standard_error or 0)
    other = Outcomes(record_ids=np.arange(1, records + 1, dtype=np.uint64), scores=scored["2-r0"].scores)
    apart = answer_of(trials, "group-size", PRIVACY, {**scored, "2-r1": other})
    assert apart is not None
    assert apart.choices[0].sources == "repeats"  # not all were scored on the same records


def test_gain_is_over_the_public_start_where_there_is_one() -> None:
    trials = sweep({2: 0.6, 16: 0.6})
    trials["public_start_knn_accuracy"] = trials["untrained_knn_accuracy"] + 0.1
    found = answered(trials)
    assert found.gains is False
    assert found.settings[0].over_start is not None
    assert found.settings[0].over_start.minus == "the public start"


def test_one_repeat_takes_the_highest_and_says_that_it_cannot_tell() -> None:
    found = answered(sweep({2: 0.9, 16: 0.6}, num_repeats=1))
    assert found.take == ["S = 2"]
    assert found.choices[0].contenders == ["S = 2", "S = 16"]
    assert "too few trainings to distinguish it from chance" in found.headline()
    assert found.gains is False


def test_repeats_that_a_setting_lacks_are_left_out_and_told() -> None:
    trials = sweep({2: 0.6, 16: 0.7}, num_repeats=4)
    found = answered(trials.drop(index=0))
    assert (found.num_repeats, found.num_repeats_left_out) == (3, 1)
    assert "Based on 3 repeats (1 left out" in found.basis()
    apart = trials[(trials["repeat"] % 2 == 0) == (trials["group_size"] == 2)]
    assert answered(apart).choices[0].sources == "nothing"  # no repeat is whole


def test_trials_without_a_score_have_no_answer() -> None:
    trials = sweep(FLAT).drop(columns=["knn_accuracy", "untrained_knn_accuracy"])
    assert answer_of(trials, "group-size") is None


def test_network_without_scores_before_training_claims_no_gain() -> None:
    found = answered(sweep({2: 0.6, 16: 0.6}).drop(columns="untrained_knn_accuracy"))
    assert (found.gains, found.warning()) == (None, None)


def test_base_method_is_no_setting() -> None:
    trials = pd.concat(
        [
            sweep({"dp_gcl": 0.6, "dp_sgd": 0.5}, column="method"),
            sweep({"base": 0.9}, column="method", num_steps=0, epsilon=math.inf),
        ],
        ignore_index=True,
    )
    found = answered(trials, "methods")
    assert found.take == ["DP-GCL"]
    assert "Left out, not trained: Base, not trained." in found.left_out


def test_search_names_trials_and_what_they_are() -> None:
    trials = sweep({0.1: 0.6, 0.5: 0.7}, column="temperature", num_repeats=1)
    found = answered(trials, "search")
    assert found.take == ["trial-2"]
    assert found.metrics()["best_temperature"] == 0.5


def test_trials_of_one_setting_of_a_search_are_its_repeats() -> None:
    trials = sweep({0.1: 0.6, 0.5: 0.7}, column="temperature", num_repeats=3).assign(repeat=0)
    found = answered(trials.assign(searched="temperature"), "search").choices[0]
    assert [each.name for each in found.settings] == [
        "trial-1 (3 trainings)",
        "trial-4 (3 trainings)",
    ]
    assert found.sources == "repeats"


@pytest.mark.parametrize("question", ["convergence", "transfer"])
def test_steps_and_probing_data_sets_are_no_settings(question: str) -> None:
    trials = sweep({"dp_gcl": 0.6, "dp_sgd": 0.5}, column="method")
    assert answered(trials, question).take == ["DP-GCL"]


def test_own_points_are_settings_by_their_labels() -> None:
    found = answer_of(sweep({"a": 0.6, "b": 0.5}, column="whatever"), OWN)
    assert found is not None
    assert (found.take, found.choices[0].contenders) == (["a"], ["a"])


def test_private_data_answer_by_proven_trials_alone() -> None:
    trials = pd.concat([sweep({2: 0.6, 16: 0.6}), sweep({2: 0.9}, epsilon=math.inf)], ignore_index=True)
    found = answered(trials.assign(data_is="private"))
    assert max(each.mean for each in found.settings) < 0.7


def test_metrics_are_the_best_score_the_best_value_and_both_epsilons() -> None:
    found = answered(sweep({2: 0.6, 4: 0.7}))
    assert found.metrics() == {
        "best_knn_accuracy": pytest.approx(0.7, abs=0.1),
        "best_group_size": 4.0,
        "tuned_epsilon": 4.2,
        "epsilon_remaining": 2.5,
    }


def test_answer_is_plain_values() -> None:
    found = answered(sweep(FLAT))
    values = json.loads(json.dumps(found.as_dict()))
    assert values["lines"] == found.lines()
    assert values["choices"][0]["settings"][0]["trials"] == ["2-r0", "2-r1", "2-r2"]
    assert Answer.read(values) == found
    free = answered(sweep(FLAT, epsilon=math.inf))
    text = json.dumps(free.as_dict(), allow_nan=False)  # other readers know no Infinity
    assert Answer.read(json.loads(text)) == free


def test_privacy_is_told_in_one_sentence() -> None:
    assert answered(sweep(FLAT)).lines()[-1] == PRIVACY.text()


def test_warning_names_where_no_gain_is_distinguishable() -> None:
    low, high = sweep({4: 0.5, 16: 0.5}, epsilon=1.0), sweep({4: 0.8, 16: 0.7}, epsilon=10.0, seed=2)
    found = answered(pd.concat([low, high], ignore_index=True))
    assert found.warning() == "no gain over the untrained network is distinguishable at ε = 1"


def test_settings_of_several_choices_are_told_apart_in_the_table() -> None:
    low, high = sweep({4: 0.7, 16: 0.6}, epsilon=1.0), sweep({4: 0.8, 16: 0.9}, epsilon=10.0, seed=2)
    table = settings_table(answered(pd.concat([low, high], ignore_index=True)))
    assert [row[0] for row in table.rows] == [
        "ε = 1: S = 4",
        "ε = 1: S = 16",
        "ε = 10: S = 4",
        "ε = 10: S = 16",
    ]


def test_repeats_that_settings_do_not_share_are_compared_within_settings() -> None:
    """Repeats differ by ten times as much as the noise, which only paired differences are rid of."""
    trials = sweep({2: 0.60, 16: 0.62, 64: 0.60}, start=0.6, seed=3)
    paired, apart = answered(trials), answer_of(trials, "group-size", paired=False)
    assert apart is not None
    assert paired.choices[0].contenders == ["S = 16"]
    assert apart.choices[0].contenders == ["S = 2", "S = 16", "S = 64"]
    assert apart.choices[0].sources == "repeats"
    cells = [cell["knn_accuracy"] for _, cell in trials.groupby("group_size")]
    gains = [
        cell["knn_accuracy"] - cell["untrained_knn_accuracy"] for _, cell in trials.groupby("group_size")
    ]
    first = apart.settings[0]
    assert first.over_best is not None
    assert first.over_start is not None
    assert first.over_best.standard_error == pytest.approx(
        math.sqrt(2 / 3 * np.mean([each.var(ddof=1) for each in cells]))
    )
    assert first.over_start.standard_error == pytest.approx(
        math.sqrt(np.mean([each.var(ddof=1) for each in gains]) / 3)
    )
    without = answer_of(trials.drop(columns="untrained_knn_accuracy"), "group-size", paired=False)
    assert without is not None
    assert without.settings[0].over_start is None


def test_without_privacy_the_highest_is_taken() -> None:
    """No share of an infinite ε is saved."""
    found = answered(sweep({2: 0.6, 8: 0.6001, 32: 0.6002}, epsilon=math.inf)).choices[0]
    assert found.take == found.best


def test_search_over_epsilon_is_one_choice() -> None:
    trials = sweep({1.5: 0.6, 4.0: 0.7}, column="target_epsilon", num_repeats=1)
    found = answered(trials.assign(searched="target_epsilon"), "search")
    assert len(found.choices) == 1
    assert found.take == ["trial-2"]


def test_answer_over_infinite_epsilons_is_json() -> None:
    found = answered(sweep({math.inf: 0.6}, column="target_epsilon", epsilon=math.inf), "privacy-budget")
    Answer.read(json.loads(json.dumps(found.as_dict(), allow_nan=False)))


def test_setting_without_a_score_is_named() -> None:
    trials = sweep({2: 0.6, 4: 0.6, 8: 0.6})
    trials.loc[trials["group_size"] == 8, "knn_accuracy"] = math.nan
    assert any(each.startswith("Left out, no score") for each in answered(trials).left_out)


def test_warning_names_the_epsilon() -> None:
    low, high = sweep({8: 0.3}, epsilon=1.0), sweep({8: 0.9}, epsilon=10.0, seed=2)
    warned = answered(pd.concat([low, high], ignore_index=True)).warning()
    assert warned is not None
    assert warned.startswith("S = 8 at ε = 1 scores below the untrained network")
