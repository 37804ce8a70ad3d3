"""The comparison of tuning strategies at one total ε: a bank of trainings, and replays of strategies on it.

The bank has every setting at every ε that a strategy needs, once per repeat, and every setting on the proxy.
A replay takes the trainings that a strategy would have run, in its own order of choices: the seeds of tuning
are drawn at random from the repeats other than r, and the chosen setting's score is that of repeat r at the ε
of its model. So no score both chooses and is reported. An open or sealed sweep releases the very model that
scored highest; its reported score is that of another repeat of the setting, without the luck of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from dashboards.compose.answer import answer_of
from dashboards.figures import write_all
from dpgcl_core.errors import ConfigError
from sweeps.service.console.terminal import print_line
from sweeps.service.options.release_options import trial_law
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.options.tuning_options import Strategy
from sweeps.service.planning.inputs import PlanInputs
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.scaling_rule import scale_rate
from sweeps.service.planning.trials import Point
from sweeps.service.running.answer_file import answer_text, write_answer
from sweeps.service.running.strategies import (
    at_epsilon,
    preview,
    run_on_proxy,
    scaling_stages,
    score_name,
)
from sweeps.service.running.sweep import execute
from sweeps.service.running.total_epsilon import Limits
from sweeps.service.running.trial_policy import ALL_POINTS, TrialPolicy
from sweeps.service.running.two_stage_policy import second_name, with_name
from sweeps.service.storage.sweep_folder import SweepFolder
from trainers.config.tree import replace_options

QUESTION = "tuning"
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
KNOWN, WITHOUT_PRIVACY = "best setting known", "without privacy"
"""References: the setting that is best at the whole ε, and the best setting without noise and clipping."""

_OF_ONE_EPSILON = ("noise_multiplier", "target_epsilon", "num_trials")
Scores = Mapping[tuple[str, float], Sequence[float]]
"""The scores of each repeat, by label of the setting and ε."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The ε of a strategy's trainings at one total.

    Attributes:
      strategy: the strategy's name.
      total_epsilon: the total.
      model_epsilon: ε of the model's training.
      small_epsilons: ε of the trainings that scaling tunes with.
      settings: the settings that it chooses among.
    """

    strategy: Strategy
    total_epsilon: float
    model_epsilon: float
    small_epsilons: tuple[float, ...] = ()
    settings: tuple[Point, ...]

    @property
    def points(self) -> list[Point]:
        """Every training that a replay may take from the bank, without repeats."""
        epsilons = (self.model_epsilon, *self.small_epsilons)
        return [at_epsilon(point, epsilon) for epsilon in epsilons for point in self.settings]


def stage_of(strategy: Strategy, inputs: PlanInputs, total: float, settings: Sequence[Point]) -> Stage:
    """Return the ε of a strategy's trainings, fitted to a total as in a sweep with `--tuning`.

    Scaling chooses among the settings with the most steps, since its choice must not change the number.

    Raises:
      ConfigError: nothing fits.
    """
    options = replace_options(inputs.options, tuning=strategy, total_epsilon=total, epsilon=None, repeats=1)
    points, policy, small = list(settings), TrialPolicy(), list[Point]()
    if strategy == "scaling":
        most_steps = max(_num_steps(point, options) for point in settings)
        settings = [point for point in settings if _num_steps(point, options) == most_steps]
        points, policy = scaling_stages(QUESTION, options, settings)
        small = points
    elif strategy in ("none", "public"):
        points = points[:1]
    limits = Limits(
        options=options,
        points=points,
        trials_of=lambda changes: policy.trials(replace(inputs, options=changes, points=points)),
        total_epsilon=total,
    )
    epsilon = limits.fit(has_fixed_noise=False).epsilon
    assert epsilon is not None
    return Stage(
        strategy=strategy,
        total_epsilon=total,
        model_epsilon=epsilon,
        small_epsilons=tuple(dict.fromkeys(point.changes["epsilon"] for point in small)),
        settings=tuple(settings),
    )


def _num_steps(point: Point, options: SweepOptions) -> int:
    return int(point.changes.get("num_steps", options.mechanism.num_steps))


@dataclass(frozen=True)
class StrategyBank:
    """A bank of trainings for the comparison of strategies.

    Attributes:
      options: the sweep's options; the data are public.
      settings: the settings to choose among; the first is the one that is not tuned.
      totals: the values of the total ε.
    """

    options: SweepOptions
    settings: Sequence[Point]
    totals: Sequence[float]

    def run(self, num_draws: int) -> int:
        """Train what the bank lacks, replay the strategies, and write and print the comparison.

        Returns:
          The exit code, as of `execute`.

        Raises:
          ConfigError: the data are private, or the options set the noise or have fewer than two repeats.
        """
        options = self.options
        if options.data.are_private:
            raise ConfigError(
                "a comparison of strategies trains everything; got private data. Use public data"
            )
        if options.tuning.strategy is not None or options.service.total_epsilon is not None:
            raise ConfigError(
                "--totals sets the total ε, and all strategies run; got --tuning or --total-epsilon"
            )
        if options.service.repeats < 2:
            raise ConfigError("tuning and report need different repeats; got --repeats 1. Set at least 2")
        options = replace_options(options, name=second_name(QUESTION, options))
        at_most = replace_options(options, epsilon=max(self.totals))
        plan, inputs = preview(QUESTION, at_most, self.settings, ALL_POINTS)
        stages = [
            stage_of(name, inputs, total, self.settings) for total in self.totals for name in STRATEGIES
        ]
        for stage in stages:
            print_line(
                f"{stage.strategy} at a total of ε = {stage.total_epsilon:g}: the model's training has "
                f"ε = {stage.model_epsilon:g}"
            )
        at_totals = [at_epsilon(point, total) for total in self.totals for point in self.settings]
        proxy = run_on_proxy(QUESTION, options, plan, inputs, at_totals)
        if proxy.code:
            return proxy.code
        name = score_name(plan)

        def publish(uri: str, sweep: str, folder: Path) -> Sequence[Path]:
            results = SweepFolder(folder).read_results()
            replay = Replay(self, stages, _scores(results, name), _scores(proxy.results, name), num_draws)
            frame = replay.frame(name, plan)
            answer = answer_of(frame, QUESTION)
            assert answer is not None
            print_line(answer_text(answer))
            return [write_answer(answer, folder), *write_all(frame, folder, QUESTION, answer)]

        free = [at_epsilon(point, math.inf) for point in self.settings]
        needed = [point for stage in stages for point in stage.points]
        points = {point.label: point for point in (*at_totals, *needed, *free)}
        assert options.storage.name is not None
        return execute(
            QUESTION,
            with_name(options, options.storage.name),
            list(points.values()),
            publish,
            policy=TrialPolicy(has_answer=False),
            repeat_options=options,
        ).code


@dataclass(frozen=True)
class Replay:
    """The replay of strategies on a bank.

    Attributes:
      bank: the bank.
      stages: the strategies at each total.
      scores: the bank's scores.
      proxy_scores: the scores on the proxy, at each total.
      num_draws: number of replays for each reported repeat.
    """

    bank: StrategyBank
    stages: Sequence[Stage]
    scores: Scores
    proxy_scores: Scores
    num_draws: int

    def frame(self, score: str, plan: SweepPlan) -> pd.DataFrame:
        """Return one row for each strategy, total and repeat, as `dashboards.figures.write_all` takes it."""
        shared = {
            **{name: value for name, value in plan.params().items() if name not in _OF_ONE_EPSILON},
            "dataset": plan.source.dataset,
            "data_is": "public",
            "tuning_cost": "Tuning cost: in the target ε; the largest ε spent is the model's.",
        }
        rows = list[dict[str, Any]]()
        for repeat in range(self.num_repeats):
            for stage in self.stages:
                row: dict[str, Any] = {"tuning": stage.strategy, "target_epsilon": stage.total_epsilon}
                row["epsilon"] = stage.model_epsilon
                rows.append(row | {"repeat": repeat, score: self.mean_score(stage, repeat)})
            for total in self.bank.totals:
                row = {"tuning": KNOWN, "target_epsilon": total, "guarantee_label": "none"}
                rows.append(row | {"repeat": repeat, score: self._of_best(total, repeat)})
            row = {"tuning": WITHOUT_PRIVACY, "target_epsilon": math.inf, "guarantee_label": "none"}
            rows.append(row | {"repeat": repeat, score: self._of_best(math.inf, repeat)})
        frame = pd.DataFrame([{"guarantee_label": "proven", **shared, **row} for row in rows])
        epsilon = frame["epsilon"].fillna(frame["target_epsilon"])
        return frame.assign(epsilon=epsilon, trial=[f"replay-{number}" for number in range(len(frame))])

    @property
    def num_repeats(self) -> int:
        """The number of repeats of each training."""
        return min(map(len, self.scores.values()))

    def mean_score(self, stage: Stage, repeat: int) -> float:
        """Return the mean score in this repeat of the settings that a strategy chooses from the others."""
        random = np.random.default_rng([repeat, self.stages.index(stage)])
        chosen = [self._choose(stage, repeat, random) for _ in range(self.num_draws)]
        return float(np.mean([self.scores[label, stage.model_epsilon][repeat] for label in chosen]))

    def _choose(self, stage: Stage, repeat: int, random: np.random.Generator) -> str:
        """Return the label of the setting that a strategy chooses in one replay."""
        labels, others = [point.label for point in stage.settings], self._other_repeats(repeat)

        def draw_score(scores: Scores, label: str, epsilon: float) -> float:
            return float(scores[label, epsilon][random.choice(others)])

        match stage.strategy:
            case "none":
                return labels[0]
            case "public":
                return max(
                    labels, key=lambda label: draw_score(self.proxy_scores, label, stage.total_epsilon)
                )
            case "open":
                return max(labels, key=lambda label: draw_score(self.scores, label, stage.model_epsilon))
            case "sealed":
                law = trial_law(self.bank.options.release)
                draws = random.choice(labels, size=law.quantile(random.random()))
                values = [
                    (draw_score(self.scores, label, stage.model_epsilon), label) for label in map(str, draws)
                ]
                return max(values)[1]
            case "scaling":
                small = {
                    (label, epsilon): draw_score(self.scores, label, epsilon)
                    for label in labels
                    for epsilon in stage.small_epsilons
                }
                return scale_rate(stage.settings, small, stage.model_epsilon).point.label

    def _other_repeats(self, repeat: int) -> list[int]:
        """Return the repeats whose scores may choose a setting that is reported in this repeat."""
        return [other for other in range(self.num_repeats) if other != repeat]

    def _of_best(self, epsilon: float, repeat: int) -> float:
        """Return the score in this repeat of the setting that is best in the others at an ε."""
        others, labels = self._other_repeats(repeat), [point.label for point in self.bank.settings]
        best = max(labels, key=lambda label: np.mean([self.scores[label, epsilon][r] for r in others]))
        return self.scores[best, epsilon][repeat]


def _scores(results: Mapping[str, Mapping[str, Any]], name: str) -> Scores:
    """Return the scores of a bank's trainings, by label of the setting and ε."""
    scores = dict[tuple[str, float], dict[int, float]]()
    for trial, result in results.items():
        label, _, repeat = trial.rpartition("-r")
        setting, _, epsilon = label.rpartition("-eps")
        scores.setdefault((setting, float(epsilon)), {})[int(repeat)] = result["metrics"][name]
    return {key: [values[repeat] for repeat in sorted(values)] for key, values in scores.items()}
