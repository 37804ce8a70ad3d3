"""Sweeps from Python: one's own space and score, and the table, best setting and both ε in return."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import sweeps
from dpgcl_core.errors import ConfigError
from sweeps import Between, Point, SweepOptions, run, search
from sweeps.service.planning.space import SearchOptions, space_of
from sweeps.service.running import from_python
from sweeps.service.running.from_python import _name_of, _result
from sweeps.service.running.search_policy import OwnScore, SearchPolicy, SearchTrials
from sweeps.service.running.sweep import Outcome
from sweeps.service.running.sweep_trials import SweepTrials
from trainers.config.tree import replace_options


def careful(metrics: Mapping[str, float]) -> float:
    return min(metrics["knn_accuracy"], metrics["linear_probe_accuracy"])


def test_search_stays_the_function_where_the_script_of_that_name_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "sweeps.search", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = importlib.import_module("sweeps.search")
    assert isinstance(script, ModuleType)
    assert sweeps.search is search


def test_space_holds_lists_in_their_order_and_ranges() -> None:
    space = space_of({"group_size": [4, 2, 4], "momentum": [0.9, 0.0], "learning_rate": Between(1e-3, 1e-1)})
    assert space.text == "group_size: 4, 2; momentum: 0.9, 0.0; learning_rate: 0.001 to 0.1"
    assert space.extra_params({"group_size": 4, "momentum": 0.9, "learning_rate": 0.01}) == {"momentum": 0.9}


def test_space_of_one_value_fixes_the_option() -> None:
    assert space_of({"group_size": [4], "momentum": [0.9, 0.0]}).constants == {"group_size": 4}


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({"num_steps": [10, 20]}, "unknown option to search 'num_steps'"),
        ({"expected_batch_size": [10, 20]}, "unknown option to search"),
        ({"delta": [1e-5, 1e-6]}, "unknown option to search"),
        ({"score_noise_multiplier": [1.0, 2.0]}, "unknown option to search"),
        ({"method": ["dp_gcl", "dp_clip"]}, "unknown option to search"),
        ({"learning_rat": [0.1, 0.2]}, "did you mean 'learning_rate'"),
        ({"momentum": []}, "list of plain values"),
        ({"clipping": "flat"}, "list of plain values"),
        ({"lora_targets": [("q",), ("v",)]}, "list of plain values"),
        ({"epsilon": [1.0, 2.0]}, "epsilon must be searched over a range"),
        ({"epsilon": Between(1, 2), "noise_multiplier": Between(1, 2)}, "not both"),
        ({"momentum": [0.5]}, "must vary at least one"),
    ],
)
def test_space_refuses_what_no_search_may_vary(space: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        space_of(space)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_range_must_be_one(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="smallest and a largest value"):
        Between(low, high)


def test_score_has_a_name_of_its_own() -> None:
    def knn_accuracy(metrics: Mapping[str, float]) -> float:
        return 1 - metrics["knn_accuracy"]

    assert _name_of(careful) == "careful"
    for taken in (knn_accuracy, lambda metrics: 1.0):
        with pytest.raises(ConfigError, match="must be a named function"):
            _name_of(taken)


def test_own_score_is_kept_with_the_metrics_and_a_failing_one_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SweepTrials, "keep", lambda self, name, result: result)
    trials: Any = object.__new__(SearchTrials)
    trials._own_score = OwnScore("careful", careful)
    both = {"metrics": {"knn_accuracy": 0.5, "linear_probe_accuracy": 0.4}, "series": {}}
    assert trials.keep("trial-1", both)["metrics"]["careful"] == 0.4
    assert trials.keep("trial-2", {"metrics": {"knn_accuracy": 0.5}})["metrics"] == {"knn_accuracy": 0.5}
    assert "trial-2 has no score: KeyError" in capsys.readouterr().out


def _outcome(scores: Mapping[str, float], *, costs: bool = True) -> Outcome:
    results = {name: {"params": {"repeat": 0}, "metrics": {"knn_accuracy": s}} for name, s in scores.items()}
    cost = SimpleNamespace(training_epsilon=2.0, tuned_epsilon=5.0, delta=1e-5)
    plan: Any = None
    statement: Any = SimpleNamespace(cost=cost if costs else None)
    folder: Any = SimpleNamespace(path=Path("/results/one"))
    return Outcome(code=0, plan=plan, folder=folder, results=results, statement=statement)


def test_best_setting_is_that_of_the_highest_mean_over_repeats() -> None:
    scores = {"a-r0": 0.9, "a-r1": 0.1, "b-r0": 0.6, "b-r1": 0.6, "c-r0": math.nan, "c-r1": 1.0}
    settings = {name: (name[0], {"group_size": ord(name[0])}) for name in scores}
    found = _result(_outcome(scores), "knn_accuracy", settings)
    assert (found.best, found.best_score) == ({"group_size": ord("b")}, 0.6)
    assert (found.epsilon, found.tuned_epsilon, found.delta, found.code) == (2.0, 5.0, 1e-5, 0)
    assert list(found.trials["trial"]) == list(scores)
    assert list(found.trials["score"].dropna()) == [0.9, 0.1, 0.6, 0.6, 1.0]


def test_result_without_scores_or_guarantee_has_no_best_and_no_epsilon() -> None:
    found = _result(_outcome({"a-r0": math.nan}, costs=False), "knn_accuracy", {"a-r0": ("a", {})})
    assert (found.best, found.epsilon, found.tuned_epsilon) == (None, None, None)
    assert math.isnan(found.best_score)


def test_search_and_run_go_the_way_of_every_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def run_sweep(question: str, options: Any, points: Any, figure: Any, *more: Any) -> Outcome:
        given.append((question, options, list(points), more))
        plan: Any = None
        return Outcome(code=0, plan=plan)

    monkeypatch.setattr(from_python, "run_with_strategy", run_sweep)
    options = replace_options(SweepOptions(), num_steps=7)
    found = search(options, {"momentum": [0.0, 0.9]}, careful, num_trials=5, earlier=("first",))
    assert (len(found.trials), found.best, found.folder) == (0, None, None)
    question, searched, points, more = given[0]
    assert isinstance(searched, SearchOptions)
    assert (searched.num_trials, searched.objectives, searched.earlier) == (5, ("careful",), ("first",))
    assert (searched.mechanism.num_steps, searched.service.repeats) == (7, 1)
    assert (question, points) == ("search", [])
    assert [type(each) for each in more] == [SearchPolicy]
    point = Point(label="S4", changes={"group_size": 4})
    run(options, [point], question="mine")
    assert given[1] == ("mine", options, [point], ())


def test_sealed_sweep_has_no_table_of_trials() -> None:
    options = replace_options(SweepOptions(), release="sealed", mean_trials=5)
    with pytest.raises(ConfigError, match="publishes only one model"):
        run(options, [Point(label="a", changes={})])
