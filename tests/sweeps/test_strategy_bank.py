"""The bank of trainings, and the replay of each strategy on it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError
from sweeps import tuning
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.tuning_options import Strategy
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Point, Trial
from sweeps.service.running.strategy_bank import Replay, Scores, Stage, StrategyBank
from tests.sweeps.support import without_ray

RATES = (1.0, 2.0, 4.0)
SETTINGS = tuple(Point(label=f"lr{rate:g}", changes={"learning_rate": rate}) for rate in RATES)
TOTAL, MODEL, SMALL = 3.0, 1.0, (0.1, 0.2)


def bank_options(*arguments: str) -> tuning.BankOptions:
    return parse_options(tuning.BankOptions, description="", arguments=arguments)


def scores_of(by_epsilon: Mapping[float, Sequence[float]]) -> Scores:
    """Scores of each setting at each ε, which all three repeats share."""
    return {
        (point.label, epsilon): [values[number]] * 3
        for epsilon, values in by_epsilon.items()
        for number, point in enumerate(SETTINGS)
    }


def replay(strategy: Strategy, scores: Scores, proxy: Scores | None = None) -> Replay:
    model = {"none": TOTAL, "public": TOTAL}.get(strategy, MODEL)
    stage = Stage(
        strategy=strategy,
        total_epsilon=TOTAL,
        model_epsilon=model,
        small_epsilons=SMALL if strategy == "scaling" else (),
        settings=SETTINGS,
    )
    bank = StrategyBank(bank_options(), SETTINGS, (TOTAL,))
    return Replay(bank, [stage], scores, proxy or {}, 400)


AT_TOTAL, AT_MODEL = (0.5, 0.7, 0.9), (0.2, 0.6, 0.4)


@pytest.mark.parametrize(("strategy", "score"), [("none", 0.5), ("open", 0.6)])
def test_replay_takes_the_setting_of_the_strategy(strategy: Strategy, score: float) -> None:
    of_strategy = replay(strategy, scores_of({TOTAL: AT_TOTAL, MODEL: AT_MODEL}))
    assert of_strategy.mean_score(of_strategy.stages[0], 0) == pytest.approx(score)


def test_public_tunes_by_the_proxys_scores_alone() -> None:
    of_strategy = replay("public", scores_of({TOTAL: AT_TOTAL}), scores_of({TOTAL: (0.1, 0.3, 0.2)}))
    assert of_strategy.mean_score(of_strategy.stages[0], 0) == pytest.approx(0.7)


def test_scaling_reads_no_score_at_the_models_epsilon() -> None:
    """The best rates 1 and 2 at the small ε lead to a rate of 10, whatever the scores at ε = 1 are."""
    small = {SMALL[0]: (0.9, 0.1, 0.1), SMALL[1]: (0.1, 0.9, 0.1)}
    for at_model in (AT_MODEL, (0.9, 0.1, 0.4)):
        of_strategy = replay("scaling", scores_of(small | {MODEL: at_model}))
        assert of_strategy.mean_score(of_strategy.stages[0], 0) == pytest.approx(0.4)


def test_sealed_finds_the_best_as_often_as_its_law_draws_it() -> None:
    """With K geometric of mean 10, the best of three settings is drawn with probability 10/12."""
    of_strategy = replay("sealed", scores_of({MODEL: (0.0, 1.0, 0.0)}))
    share = of_strategy.mean_score(of_strategy.stages[0], 0)
    draws = 1 - 1 / 3
    expected = 1 - 0.1 * draws / (1 - 0.9 * draws)
    assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 400))


def test_reported_score_is_of_a_repeat_that_chose_nothing() -> None:
    """Scores of pure chance: a score that is both chosen by and reported would be far above the mean."""
    random = np.random.default_rng(0)
    settings = tuple(Point(label=f"p{number}", changes={"learning_rate": 1.0}) for number in range(200))
    scores = {(point.label, MODEL): list(random.standard_normal(3)) for point in settings}
    stage = Stage(strategy="open", total_epsilon=TOTAL, model_epsilon=MODEL, settings=settings)
    chance = Replay(StrategyBank(bank_options(), settings, (TOTAL,)), [stage], scores, {}, 50)
    assert np.mean([chance.mean_score(stage, repeat) for repeat in range(3)]) < 1.0


class Ray:
    """Stands in for Ray: scores fall with the learning rate and rise with ε."""

    def __init__(self) -> None:
        self.trained: list[Trial] = []

    def run_trials(
        self, session: Any, plan: SweepPlan, folder: Any, trials: Sequence[Trial], on_result: Any, *_: Any
    ) -> dict[str, str]:
        for trial in trials:
            self.trained.append(trial)
            noise = trial.config.mechanism.noise_multiplier
            score = 0.9 - trial.config.optimizer.learning_rate - 0.1 * noise
            metrics = {"knn_accuracy": score, "num_steps_charged": 10, "epsilon": 1.0}
            on_result(trial.name, {"metrics": metrics, "series": {}})
        return {}


@pytest.mark.ci
def test_bank_trains_each_setting_once_and_writes_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_database: Path
) -> None:
    stand_in = Ray()
    without_ray(monkeypatch, stand_in.run_trials)
    shutil.copy(empty_database, tmp_path)
    chosen = bank_options("--tiny", "--storage", str(tmp_path), "--name", "bank")
    bank = StrategyBank(chosen, tuning.settings(chosen), chosen.totals)
    assert bank.run(chosen.num_draws) == 0
    folder = tmp_path / "sweeps" / "bank"
    names = [trial.name for trial in stand_in.trained]
    assert len(names) == len(set(names)) + 4  # the proxy's four trainings have names of the bank
    lines = (folder / "tuning.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} >= {"none", "open", "sealed", "public", "scaling"}
    assert "How to tune within one total" in (folder / "tuning.md").read_text()
    num_trained = len(stand_in.trained)
    resumed = bank_options("--tiny", "--storage", str(tmp_path), "--name", "bank", "--resume")
    assert StrategyBank(resumed, tuning.settings(resumed), resumed.totals).run(resumed.num_draws) == 0
    assert len(stand_in.trained) == num_trained


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--repeats", "1"), "need different repeats"),
        (("--data-is", "private"), "got private data"),
        (("--tuning", "open"), "got --tuning"),
        (("--tiny", "--epsilon", "3"), "not both"),
    ],
)
def test_bank_of_bad_options_is_refused(arguments: Sequence[str], rule: str, tmp_path: Path) -> None:
    chosen = bank_options("--storage", str(tmp_path), *arguments)
    with pytest.raises(ConfigError, match=rule):
        StrategyBank(chosen, tuning.settings(chosen), chosen.totals).run(1)
