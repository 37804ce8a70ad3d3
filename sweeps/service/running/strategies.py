"""The strategies of `--tuning`: find and train one model, so that everything together costs at most one ε.

| strategy | first | then | what the total covers |
|---|---|---|---|
| none | – | one setting | that training |
| open | – | every setting; the best is the model | all trainings |
| sealed | – | a secret number of draws; the best is the model | the selection (`sealed_cost`) |
| public | every setting, on public data | the best setting | that training |
| scaling | every setting at small ε | the setting for the remaining ε | all trainings |

Guarantee: the released trainings on the private records are (`total_epsilon`, δ)-differentially private under
the neighbouring relation of their method, as planned. Steps that restarts repeat come on top unless R of them
are charged in advance (docs/theory/restarts.md), and so does a private model that trainings start from. No
strategy has accounting of its own. Each is a policy of the one driver, and `Limits` finds the largest ε of
the model's training by the functions that state and charge a sweep.

*Scaling*: all (q, σ, T) are fixed before the first training: those at small ε by these ε, and those of the
final training by the rest of the total. Results choose only among candidates that are charged equally, which
`SmallTrainings` checks before anything is trained, and `SecondOfTwo` before the final training. So the sweep
is an adaptive composition of mechanisms whose privacy loss distributions are fixed. The line is fitted to
scores on public records, or to noised scores, whose counts are part of each training's charge.

*Public*: the proxy's trainings have the batch, steps and noise of the private one. They touch no private
record. They depend on the private data only by N, declared or registered, and the shape of images, which are
public.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpgcl_core.accounting.tuning.modes import OPEN, SEALED
from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.planning.tuning_strategies import SMALL_SHARES
from sweeps.service.console.terminal import count, print_line, warn
from sweeps.service.options.data import DataOptions
from sweeps.service.options.score_options import scores_to_compare, visible_scores
from sweeps.service.options.service import LedgerOptions
from sweeps.service.options.sweep_options import SweepOptions, varied_by
from sweeps.service.options.tuning_options import TuningOptions
from sweeps.service.planning.inputs import PlanInputs
from sweeps.service.planning.plan import SweepPlan, planned_trials
from sweeps.service.planning.scaling_rule import Scores, agrees_with, num_rates, scale_rate
from sweeps.service.planning.sweep_data import same_source
from sweeps.service.planning.trials import Point, Trial, trial_class
from sweeps.service.running.conclude import Figure
from sweeps.service.running.prepare import prepare_sweep
from sweeps.service.running.search_policy import SearchPolicy
from sweeps.service.running.sweep import Outcome, execute
from sweeps.service.running.trial_policy import ALL_POINTS, TrialPolicy
from sweeps.service.running.two_stage_policy import (
    PROXY_SUFFIX,
    TUNING_SUFFIX,
    FirstOfTwo,
    check_scored,
    run_two_sweeps,
    second_name,
    with_name,
)
from sweeps.service.storage.sweep_folder import SweepFolder, named_folder, write_json
from trainers.config.tree import replace_options
from trainers.data.dataset import image_shape_of, modality_of
from trainers.data.pair_options import PairOptions
from trainers.files.storage import storage_root

_PROXY_RECORDS = 5_000
_CHARGED = ("epsilon", "noise_multiplier")
_CHOICE = "choice.json"
"""The file in the proxy's sweep with the label of the chosen setting, which a resume repeats."""


@dataclass(frozen=True, kw_only=True)
class SmallTrainings(FirstOfTwo):
    """The policy of the trainings at small ε; the second sweep is the final training.

    Attributes:
      candidates: the settings; any of them may be the final training's.
    """

    candidates: Sequence[Point]

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan. Raises ConfigError if candidates are charged differently at one ε."""
        at_one_epsilon = replace(inputs, options=replace_options(inputs.options, epsilon=1.0))
        trials = planned_trials(replace(at_one_epsilon, points=self.candidates))
        if len({trial_class(trial) for trial in trials}) > 1:
            raise ConfigError(
                "the candidates of --tuning scaling must have one sampling probability and number of steps, "
                "because results choose among them; got candidates that differ. Vary the learning rate, C "
                "or S, not B or T"
            )
        plan = super().plan(inputs)
        score_name(plan)
        return plan


@dataclass(frozen=True, kw_only=True)
class FirstPoint(TrialPolicy):
    """The policy of a sweep of one training, planned with the first of several settings."""

    def trials(self, inputs: PlanInputs) -> Sequence[Trial]:
        """Return the trials of the first setting."""
        return super().trials(replace(inputs, points=inputs.points[:1]))

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan of the first setting. Raises as in `build_plan`."""
        return super().plan(replace(inputs, points=inputs.points[:1]))


@dataclass(frozen=True, kw_only=True)
class OnProxy(TrialPolicy):
    """The policy of a sweep on public data that stands in for the private records.

    Attributes:
      private: the plan of the sweep on the private records.
    """

    private: SweepPlan

    def plan(self, inputs: PlanInputs) -> SweepPlan:
        """Return the plan. Raises ConfigError if the proxy's records have another kind or shape."""
        shapes = [(modality_of(d.train), image_shape_of(d.train)) for d in (self.private.data, inputs.data)]
        if shapes[0] != shapes[1]:
            (own_kind, own_shape), (kind, shape) = shapes
            raise ConfigError(
                f"the proxy must have {own_kind} records with images of shape {own_shape}, as the training "
                f"data have; got {kind} records of shape {shape} in {inputs.options.data.dataset}. Set "
                "--proxy or --image-size"
            )
        plan = super().plan(inputs)
        score_name(plan)
        return plan

    def resumed_name(self, name: str) -> str:
        """Return the name of the sweep on the private records."""
        return name.removesuffix(PROXY_SUFFIX)


def run_with_strategy(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    figure: Figure | None,
    policy: TrialPolicy = ALL_POINTS,
) -> Outcome:
    """Run a sweep; with `--tuning`, find and train one model within `--total-epsilon`.

    Args:
      question, options, points, figure, policy: as for `execute`.

    Returns:
      The outcome of the sweep that trained the model, or of an earlier one that did not finish.

    Raises:
      ConfigError: options or points do not allow the strategy.
      DpgclError: as in `execute`.
    """
    strategy = options.tuning.strategy
    if options.data.proxy is not None and strategy not in ("public", "scaling"):
        got = f"--tuning {strategy}" if strategy else "no --tuning"
        raise ConfigError(f"--proxy applies only to --tuning public and scaling; got {got}. Leave it out")
    if strategy is not None:
        options, points = check_strategy(options, points, policy)
    if strategy == "public":
        return _tune_on_proxy(question, options, points, figure)
    if strategy == "scaling":
        return _tune_at_small_epsilons(question, options, points, figure)
    return execute(question, options, points, figure, policy=policy)


def check_strategy(
    options: SweepOptions, points: Sequence[Point], policy: TrialPolicy = ALL_POINTS
) -> tuple[SweepOptions, list[Point]]:
    """Return the strategy's options and candidates: each point with each learning rate.

    Points without noise are left out.

    Raises:
      ConfigError: options or points do not allow the strategy.
    """
    strategy, total = options.tuning.strategy, options.service.total_epsilon
    assert strategy is not None
    if total is None:
        raise ConfigError(f"--tuning {strategy} divides one ε; also set --total-epsilon")
    if isinstance(policy, SearchPolicy) and strategy != "open":
        raise ConfigError(
            f"a search learns from every trial, so its --tuning must be open; got {strategy}. Use a sweep "
            "with points, such as sweeps/group_size.py"
        )
    if options.release.mode != (SEALED if strategy == SEALED else OPEN):
        raise ConfigError(
            f"--tuning {strategy} decides what is released; got --release {options.release.mode}, too. Leave "
            "it out, or use --tuning sealed"
        )
    repeats_set = options.overrides is not None and "repeats" in options.overrides
    if repeats_set and options.service.repeats > 1 and strategy != "public":
        raise ConfigError(
            f"--tuning {strategy} trains each setting once; got --repeats {options.service.repeats}. Leave "
            "it out"
        )
    points = [point for point in points if point.changes.get("epsilon") != math.inf]
    points = _without_default_epsilons(points, options)
    _check_noise_is_free(points, options)
    own_method = options.mechanism.method
    methods = dict.fromkeys([point.changes.get("method", own_method) for point in points] or [own_method])
    unproven = [name for name in methods if method_named(name).label != "proven"]
    if unproven:
        raise ConfigError(f"--tuning needs methods with a proven guarantee; got {', '.join(unproven)}")
    candidates = _with_rates(points, options)
    labels = [point.label for point in candidates]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"the settings must differ in six digits; got {', '.join(labels)}")
    if strategy == "none" and len(candidates) > 1:
        raise ConfigError(
            f"--tuning none trains one setting; got {len(candidates)} settings. Set one value on each axis, "
            "or use another strategy"
        )
    if strategy == "scaling" and num_rates(candidates) < 2:
        raise ConfigError(
            f"--tuning scaling needs at least two --tuning-rates to choose among; got {num_rates(candidates)}"
        )
    if options.tuning.small_epsilons and max(options.tuning.small_epsilons) >= total:
        raise ConfigError(
            f"--small-epsilons must be below --total-epsilon {total:g}; got "
            f"{max(options.tuning.small_epsilons):g}"
        )
    if strategy in ("open", "scaling"):
        check_scored(options.data, f"--tuning {strategy}")
    return options if strategy == "public" else replace_options(options, repeats=1), candidates


def _check_noise_is_free(points: Sequence[Point], options: SweepOptions) -> None:
    noises = [(name, getattr(options.mechanism, name)) for name in _CHARGED]
    noises += [(name, point.changes.get(name)) for point in points for name in _CHARGED]
    for name, value in noises:
        if value is not None:
            raise ConfigError(
                f"--total-epsilon and --tuning decide the noise; got {name} = {value:g}, too. Leave it out, "
                "or sweep another axis"
            )


def _without_default_epsilons(points: Sequence[Point], options: SweepOptions) -> list[Point]:
    """Return the points without an ε that is only the default of the sweep's axis; the total replaces it."""
    axis = varied_by(type(options)).get("epsilon")
    if axis is None or options.overrides is None or axis in options.overrides:
        return list(points)
    settings: dict[str, Point] = {}
    for point in points:
        changes = {name: value for name, value in point.changes.items() if name != "epsilon"}
        label = re.sub(r"-?eps[^-]*", "", point.label) or "setting"
        settings.setdefault(label, replace(point, label=label, changes=changes))
    return list(settings.values())


def _with_rates(points: Sequence[Point], options: SweepOptions) -> list[Point]:
    """Return each point with each learning rate; a point that sets its rate stays one point."""
    rates = dict.fromkeys(options.tuning.tuning_rates)
    if not rates:
        default = {"learning_rate": options.optimizer.learning_rate}
        return [replace(point, changes={**default, **point.changes}) for point in points]
    candidates = []
    for point in points:
        for rate in [point.changes["learning_rate"]] if "learning_rate" in point.changes else rates:
            label = point.label if "learning_rate" in point.changes else f"{point.label}-lr{rate:g}"
            changes = {**point.changes, "learning_rate": rate}
            candidates.append(replace(point, label=label, changes=changes))
    return candidates


def scaling_stages(
    question: str, options: SweepOptions, candidates: Sequence[Point]
) -> tuple[list[Point], SmallTrainings]:
    """Return the points at small ε, and the policy that plans them with the final training."""
    total = options.service.total_epsilon
    assert total is not None
    epsilons = options.tuning.small_epsilons or tuple(float(f"{share * total:g}") for share in SMALL_SHARES)
    small = [at_epsilon(point, epsilon) for epsilon in epsilons for point in candidates]
    final = replace_options(options, seed=options.service.seed + 1)
    policy = SmallTrainings(question=question, options=final, points=candidates[:1], candidates=candidates)
    return small, policy


def at_epsilon(point: Point, epsilon: float) -> Point:
    """Return a point with its own ε, which its label names."""
    return replace(
        point, label=f"{point.label}-eps{epsilon:g}", changes={**point.changes, "epsilon": epsilon}
    )


def _tune_at_small_epsilons(
    question: str, options: SweepOptions, candidates: Sequence[Point], figure: Figure | None
) -> Outcome:
    """Train every candidate at small ε, and the candidate of the scaling rule with the rest of the total."""
    options = replace_options(options, name=second_name(question, options))
    small, policy = scaling_stages(question, options, candidates)
    has_begun = with_name(options, f"{options.storage.name}{TUNING_SUFFIX}").storage.resume
    if options.data.proxy is not None and not has_begun:
        checked = _check_rule_on_proxy(options, small, policy)
        if checked.code:
            return checked

    def choose(tuning: Outcome) -> list[Point]:
        fit = tuning.plan.fit
        assert fit is not None
        assert fit.epsilon is not None
        scores = _scores_of(tuning, candidates, small)
        choice = scale_rate(candidates, scores, fit.epsilon)
        line = ", ".join(f"{rate:g} at ε = {epsilon:g}" for epsilon, rate in choice.best_rates.items())
        print_line(
            f"scaling: the best learning rate is {line}; {choice.rate:.3g} at ε = {fit.epsilon:g}, and the "
            f"nearest candidate is {choice.point.label}"
        )
        if not choice.holds:
            warn("warning: the best learning rate falls as ε rises, which the scaling rule does not expect")
        return [choice.point]

    return run_two_sweeps(
        options,
        small,
        policy,
        choose,
        figure,
        choice="The setting and its learning rate are chosen by the scaling rule from results at small ε.",
    )


def _scores_of(tuning: Outcome, candidates: Sequence[Point], small: Sequence[Point]) -> Scores:
    """Return the releasable score of each training at small ε, by candidate and ε."""
    name = score_name(tuning.plan)
    values = {}
    for number, point in enumerate(small):
        score = tuning.score(f"{point.label}-r0", name)
        values[candidates[number % len(candidates)].label, point.changes["epsilon"]] = score
    return values


def score_name(plan: SweepPlan) -> str:
    """Return the score to choose by: the user's choice, or the first of the scores that all trials have.

    Raises:
      ConfigError: the trials do not have it, or have no score in common.
    """
    methods = [trial.config.mechanism.method for trial in plan.trials]
    names = set(scores_to_compare(plan.data, methods).values())
    if (name := plan.release.select_by) != "auto":
        names = {name} if all(name in visible_scores(plan.data, method) for method in methods) else set()
    if len(names) != 1:
        raise ConfigError(
            "the candidates need a score that all of them have, on public data or noised; got "
            f"{', '.join(sorted(names)) or 'none'} with --select-by {name}. Set --evaluate-on, or compare "
            "methods with the same scores"
        )
    return names.pop()


def preview(
    question: str, options: SweepOptions, points: Sequence[Point], policy: TrialPolicy
) -> tuple[SweepPlan, PlanInputs]:
    """Plan, check and print a sweep on the private records that has not begun; return plan and inputs."""
    options = replace_options(options, name=None, resume=False)
    with prepare_sweep(question, options, points, policy, repeat_options=None) as sweep:
        if options.service.dry_run:
            return sweep.plan, replace(sweep.inputs, calibration_folder=None)
        sweep.calibrations.keep()
        return sweep.plan, replace(sweep.inputs, calibration_folder=sweep.calibrations.permanent_folder)


def _tune_on_proxy(
    question: str, options: SweepOptions, candidates: Sequence[Point], figure: Figure | None
) -> Outcome:
    """Train every candidate on the proxy, and the best one on the private records with the whole total."""
    options = replace_options(options, name=second_name(question, options))
    assert options.storage.name is not None
    final = with_name(replace_options(options, repeats=1), options.storage.name)
    proxy_folder = named_folder(storage_root(options.storage.folder), f"{options.storage.name}{PROXY_SUFFIX}")
    if final.storage.resume:
        best = _stored_choice(proxy_folder, candidates)
        return execute(question, final, [best], figure, repeat_options=options)
    plan, inputs = preview(question, final, candidates, FirstPoint())
    candidates = list(inputs.points)
    tuning = run_on_proxy(question, options, plan, inputs, candidates)
    if tuning.code or options.service.dry_run:
        return tuning
    name, repeats = score_name(tuning.plan), options.service.repeats

    def mean_score(point: Point) -> float:
        values = [tuning.score(f"{point.label}-r{repeat}", name) for repeat in range(repeats)]
        return sum(values) / repeats if all(map(math.isfinite, values)) else -math.inf

    best = max(candidates, key=mean_score)
    write_json(proxy_folder.path / _CHOICE, best.label)
    print_line(f"tuned on {tuning.plan.source.dataset}, which is public: {best.label} is the best")
    return execute(question, final, [best], figure, repeat_options=options)


def _stored_choice(proxy_folder: SweepFolder, candidates: Sequence[Point]) -> Point:
    """Return the setting that an earlier process chose. Raises StorageError if its file is lost."""
    path = proxy_folder.path / _CHOICE
    try:
        label = json.loads(path.read_text())
        return next(point for point in candidates if point.label == label)
    except (OSError, ValueError, StopIteration) as error:
        raise StorageError(f"{path} is lost or damaged; restore it, or choose another --name") from error


def _check_rule_on_proxy(options: SweepOptions, small: Sequence[Point], policy: SmallTrainings) -> Outcome:
    """Try the scaling rule on public data, where the best candidate at the final ε can be seen.

    Raises:
      ConfigError: the rule misses the best learning rate by more than one candidate.
    """
    question, candidates = policy.question, policy.candidates
    plan, inputs = preview(f"{question}-tuning", options, small, policy)
    assert plan.fit is not None
    epsilon = plan.fit.epsilon
    assert epsilon is not None
    final = [at_epsilon(point, epsilon) for point in candidates]
    tuning = run_on_proxy(question, replace_options(options, repeats=1), plan, inputs, [*small, *final])
    if tuning.code or options.service.dry_run:
        return tuning
    scores = _scores_of(tuning, candidates, [*small, *final])
    earlier = {key: value for key, value in scores.items() if key[1] != epsilon}
    choice = scale_rate(candidates, earlier, epsilon)
    best = max(candidates, key=lambda point: scores[point.label, epsilon])
    if not agrees_with(choice, candidates, best):
        raise ConfigError(
            f"on {tuning.plan.source.dataset} the scaling rule fails: at ε = {epsilon:g} it takes "
            f"{choice.point.label}, and the best is {best.label}. Use another --tuning, or a proxy that is "
            "more like the training data"
        )
    print_line(f"the scaling rule holds on {tuning.plan.source.dataset}: {choice.point.label}, {best.label}")
    return tuning


def run_on_proxy(
    question: str,
    options: SweepOptions,
    plan: SweepPlan,
    inputs: PlanInputs,
    points: Sequence[Point],
) -> Outcome:
    """Train points on the proxy, with the batch, steps and noise that they have on the private records.

    Args:
      question: the name of the sweep's question.
      options: the user's options, with the sweep's name.
      plan: the plan of the sweep on the private records.
      inputs: its inputs, with the ε of points that set none.
      points: the points.
    """
    trials = planned_trials(
        replace(inputs, points=points, options=replace_options(inputs.options, repeats=1))
    )
    mechanisms, data = [trial.config.mechanism for trial in trials], options.data
    noisy_points = []
    for point, mechanism in zip(points, mechanisms, strict=True):
        changes = {name: value for name, value in point.changes.items() if name != "epsilon"}
        changes["noise_multiplier"] = mechanism.noise_multiplier
        noisy_points.append(replace(point, changes=changes))
    evaluation = replace(
        options.evaluation, score_on_held_out=0.0, score_noise_multiplier=None, snr_noise_multiplier=None
    )
    name, image_size = data.proxy or default_proxy(plan), data.image_size
    if data.are_private and same_source(name, data.dataset):
        raise ConfigError(f"proxy must be other data than the private training data; got {name} for both")
    if data.proxy is None and data.modality == "image-text":
        image_size = image_shape_of(plan.data.train)[1]
    proxy_options = replace(
        with_name(options, f"{options.storage.name}{PROXY_SUFFIX}"),
        data=DataOptions(
            dataset=name,
            data_is="public",
            evaluate_on=data.evaluate_on,
            pairs=_pairs_of_both(data, name),
            class_captions=data.pairs_of(name).class_captions,
            image_size=image_size,
        ),
        evaluation=evaluation,
        ledger=LedgerOptions(),
        tuning=TuningOptions(),
    )
    values: dict[str, Any] = {
        "num_records_public": None,
        "sampling_prob": None,
        "tan_factor": 1.0,
        "expected_batch_size": mechanisms[0].expected_batch_size,
        "total_epsilon": None,
    }
    print_line(f"{count(len(points), 'setting')} on public data, {proxy_options.data.dataset}:")
    return execute(
        f"{question}-proxy",
        replace_options(proxy_options, **values),
        noisy_points,
        None,
        policy=OnProxy(has_answer=False, private=plan),
        repeat_options=options,
    )


def _pairs_of_both(data: DataOptions, proxy: str) -> PairOptions:
    """Return the options of pairs that apply to the proxy or to the scored data."""
    parts = [data.pairs.fitting(name) for name in (proxy, data.evaluate_on or "")]
    return PairOptions(**{name: getattr(part, name) for part in parts for name in part.changed_fields})


def default_proxy(plan: SweepPlan) -> str:
    """Return the name of generated data with the kind and shape of a plan's records."""
    number = max(_PROXY_RECORDS, round(4 * plan.trials[0].config.mechanism.expected_batch_size))
    if modality_of(plan.data.train) == "image-text":
        return f"shapes:{number}"
    channels, height, width = image_shape_of(plan.data.train)
    return f"procedural:{number}:{channels}x{height}x{width}"
