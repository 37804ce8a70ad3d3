"""The planner: from options to a table of feasible plans, a recommended plan, and the cost of its tuning."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from dataclasses import asdict, replace
from typing import Any

from dashboards.figures import write_curves
from dpgcl_core.accounting.tuning.cost import (
    TrialClass,
    TuningCost,
    open_cost,
    sealed_cost,
    sealed_threshold_cost,
)
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.accounting.tuning.modes import OPEN, SEALED, SEALED_THRESHOLD
from dpgcl_core.command_line import table_width
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.planning.feasible import Answer, Plan, PlanRequest, enough_records, feasible, verified
from dpgcl_core.planning.snr import too_small
from dpgcl_core.planning.tradeoff_curves import epochs_by_batch, epsilon_by_records
from dpgcl_core.planning.tuning_strategies import GAINS, StrategyOutlook, strategy_outlooks
from dpgcl_core.release.statement import delta_text, rounded_up
from sweeps.service.console.terminal import count, print_line
from sweeps.service.options.planner_options import PlannerOptions
from sweeps.service.options.sweep_command_line import words_of_options
from sweeps.service.planning.resources import request_of
from trainers.config.settings import DEFAULT_EPSILON

_MAX_SAME_SIZE = 8


def run_plan(options: PlannerOptions) -> int:
    """Print the feasible plans, and draw trade-off curves into `options.output`; spend no privacy budget.

    Returns:
      The exit code, 0.

    Raises:
      ConfigError: bad input, or no plan is feasible; the message names limits to relax, and by how much.
    """
    request = request_of(options)
    answer = feasible(request)
    if answer.recommended is None:
        raise ConfigError(f"no plan is feasible. {'. '.join(answer.relax)}")
    choice = verified(request, answer.recommended)
    if options.json:
        print_line(json.dumps(_as_dict(options, request, answer, choice), allow_nan=False))
    else:
        _print_result(options, request, answer, choice)
    if options.output is not None:
        points = [*epsilon_by_records(request, choice.mechanism), *epochs_by_batch(request, choice.mechanism)]
        title = f"Trade-offs of N, B and σ: {request.method}, N = {request.num_records_public}"
        subtitle = (
            f"ε = {request.target_epsilon:g}, δ = {request.delta:.3g}; the plan has {_point_text(choice)}"
        )
        paths = write_curves(points, options.output, title=title, subtitle=subtitle)
        if not options.json:
            for path in paths:
                print_line(f"written: {path}")
    return 0


def tuning_costs(options: PlannerOptions, plan: Plan) -> dict[str, TuningCost]:
    """Return the privacy cost of choosing among m = `num_trials` trainings of a plan, by release mode.

    In a sealed mode m is the mean of the secret number of trials, by the options' law and bound. With a
    threshold m is that mean if no trial reaches the threshold. For m = 1 there is only the open mode.
    """
    trial, number, delta = _trial_of(plan), options.num_trials, plan.mechanism.target_delta
    costs = {OPEN: open_cost([replace(trial, count=number)], delta=delta)}
    if number > 1:
        law = TruncatedNegativeBinomial.from_mean(float(number), eta=options.release.eta)
        costs[SEALED] = sealed_cost([trial], law=law, delta=delta, bound=options.release.bound)
        costs[SEALED_THRESHOLD] = sealed_threshold_cost([trial], halting_prob=1 / number, delta=delta)
    return costs


def tuning_outlooks(options: PlannerOptions, plan: Plan) -> list[StrategyOutlook]:
    """Return what each strategy of `--tuning` leaves and gains within the total, the best first.

    The total is `--total-epsilon`, or the ε of the plan. For m = `num_trials` = 1 there is nothing to choose.
    """
    if options.num_trials == 1:
        return []
    return strategy_outlooks(
        _trial_of(plan),
        total_epsilon=options.service.total_epsilon or plan.mechanism.epsilon(),
        delta=plan.mechanism.target_delta,
        num_settings=options.num_trials,
        gains=GAINS,
        eta=options.release.eta,
        bound=options.release.bound,
    )


def _trial_of(plan: Plan) -> TrialClass:
    mechanism = plan.mechanism
    return TrialClass(
        sampling_prob=mechanism.sampling_prob,
        noise_multiplier=mechanism.noise_multiplier,
        num_steps=mechanism.num_steps_charged,
    )


def _plans_to_show(answer: Answer, choice: Plan) -> list[Plan]:
    """Return the recommended plan, more plans with its group size, and the best plan of every other size."""
    first = choice.mechanism.group_size
    same_size = [plan for plan in answer.plans if plan.mechanism.group_size == first]
    plans = [choice, *[plan for plan in same_size if plan != answer.recommended][: _MAX_SAME_SIZE - 1]]
    for size in dict.fromkeys(plan.mechanism.group_size for plan in answer.plans):
        if size != first:
            plans.append(next(plan for plan in answer.plans if plan.mechanism.group_size == size))
    return plans


def _print_result(options: PlannerOptions, request: PlanRequest, answer: Answer, choice: Plan) -> None:
    costs, outlooks = tuning_costs(options, choice), tuning_outlooks(options, choice)
    rate_source = "as set" if options.records_per_second else "measured here on synthetic images"
    weights_source = "as set" if options.num_weights is not None else options.network.name
    _print_wrapped(
        f"N = {request.num_records_public}, ε = {request.target_epsilon:g}, δ = {delta_text(request.delta)}, "
        f"{request.method} on {request.num_weights} weights ({weights_source}), "
        f"{request.records_per_second:.4g} records a second ({rate_source})"
    )
    for reason, number in answer.refusals.items():
        print_line(f"left out: {count(number, 'point')}, {reason}")
    print_line(
        f"{count(len(answer.plans), 'feasible plan')}: * is recommended, then plans with the same S, then "
        "the best plan of every other S:"
    )
    print_line(
        f"  {'B':>9} {'T':>6} {'S':>6} {'σ':>8} {'epochs':>8} {options.unit:>11} {'GiB':>6} "
        f"{'SNR a step':>11} {'at most':>8} {'over all':>9}"
    )
    for plan in _plans_to_show(answer, choice):
        print_line(f"{'*' if plan is choice else ' '} {_table_row(plan)}")
    _print_wrapped(
        f"recommended: {_point_text(choice)}, ε = {rounded_up(choice.mechanism.epsilon(), 4)} by PLD; its "
        "σ is calibrated precisely, the σ of the other plans is up to about two per cent too large"
    )
    _print_wrapped(
        "SNR a step: expected from the committed tables, where groups have half of the squared norm in "
        f"common at S = {request.alignment_size:.3g}; at most: if they agreed fully; over all: over T steps"
    )
    if (warning := _size_warning(request, choice)) is not None:
        _print_wrapped(f"note: {warning}")
    print_line(f"the sweep: {shlex.join(sweep_command(options, choice))}")
    hours = options.num_trials * choice.hours if choice.hours is not None else math.nan
    print_line(f"tuning with {count(options.num_trials, 'training')}, {hours:.3g} {options.unit}, costs:")
    for mode, cost in costs.items():
        assert cost.tuned_epsilon is not None
        print_line(f"  {mode:<17} ε = {rounded_up(cost.tuned_epsilon, 4):<9} {cost.theorem}")
    if outlooks:
        total = options.service.total_epsilon or choice.mechanism.epsilon()
        _print_wrapped(
            f"one model within ε = {rounded_up(total, 4)} in all, tuning included, and its expected gain "
            "over a setting that is not tuned (from the committed tables, on other data):"
        )
        for outlook in outlooks:
            mark = "*" if outlook is outlooks[0] else " "
            print_line(
                f"{mark} --tuning {outlook.strategy:<8} the model's training has ε = "
                f"{outlook.model_epsilon:<7.3g} {outlook.gain:+.1f} points"
            )


def _print_wrapped(text: str) -> None:
    """Print a sentence, wrapped to the terminal's width, or to 100 columns without a terminal."""
    print_line(textwrap.fill(text, table_width()))


def sweep_command(options: PlannerOptions, plan: Plan) -> list[str]:
    """Return the command line, as words, of the sweep that trains a plan."""
    mechanism, epsilon = plan.mechanism, options.mechanism.target_epsilon() or DEFAULT_EPSILON
    values: dict[str, Any] = {
        "num_records_public": options.mechanism.num_records_public,
        "expected_batch_size": mechanism.expected_batch_size,
        "num_steps": mechanism.num_steps,
    }
    if method_named(options.mechanism.method).takes_group_size:
        script, axes = "group_size", {"epsilon": epsilon, "group_sizes": mechanism.group_size}
    else:
        script, axes = "privacy_budget", {"epsilons": epsilon}
    return ["python", f"sweeps/{script}.py", *words_of_options(options, values | axes)]


def _size_warning(request: PlanRequest, plan: Plan) -> str | None:
    note = too_small(plan.mechanism, request.num_weights, request.alignment_size)
    if note is None:
        return None
    number = enough_records(request, plan) if note.startswith("n and ε") else None
    return note if number is None else f"{note} At this B, T and S, n = {number} is enough at the same ε."


def _table_row(plan: Plan) -> str:
    mechanism, snr = plan.mechanism, plan.snr
    hours = "-" if plan.hours is None else f"{plan.hours:.3g}"
    memory = "-" if plan.memory_bytes is None else f"{plan.memory_bytes / 2**30:.2g}"
    return (
        f"{mechanism.expected_batch_size:>9g} {mechanism.num_steps:>6} {mechanism.group_size!s:>6} "
        f"{mechanism.noise_multiplier:>8.4g} {plan.num_epochs:>8.3g} {hours:>11} {memory:>6} "
        f"{snr.per_step:>11.3g} {snr.bound:>8.3g} {snr.over_training:>9.3g}"
    )


def _point_text(plan: Plan) -> str:
    mechanism = plan.mechanism
    return (
        f"B = {mechanism.expected_batch_size:g}, T = {mechanism.num_steps}, S = {mechanism.group_size}, "
        f"σ = {mechanism.noise_multiplier:.4g}"
    )


def _as_dict(options: PlannerOptions, request: PlanRequest, answer: Answer, choice: Plan) -> dict[str, Any]:
    return {
        "num_records_public": request.num_records_public,
        "target_epsilon": request.target_epsilon,
        "target_delta": request.delta,
        "method": request.method,
        "num_weights": request.num_weights,
        "records_per_second": request.records_per_second,
        "records_per_second_is_measured": options.records_per_second is None,
        "alignment_size": request.alignment_size,
        "hours_are": options.unit,
        "network": options.network.name,
        "recommended": plan_dict(choice),
        "command": sweep_command(options, choice),
        "plans": [plan_dict(plan) for plan in answer.plans],
        "refused": dict(answer.refusals),
        "warning": _size_warning(request, choice),
        "strategies": [asdict(outlook) for outlook in tuning_outlooks(options, choice)],
        "tuning": {mode: cost.as_dict() for mode, cost in tuning_costs(options, choice).items()},
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as values for JSON."""
    mechanism = plan.mechanism
    return {
        "expected_batch_size": mechanism.expected_batch_size,
        "sampling_prob": mechanism.sampling_prob,
        "num_steps": mechanism.num_steps,
        "group_size": mechanism.group_size,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_multiplier_is_verified": plan.is_verified,
        "num_epochs": plan.num_epochs,
        "hours": plan.hours,
        "memory_bytes": plan.memory_bytes,
        "snr_bound": plan.snr.bound,
        "snr_per_step": plan.snr.per_step,
        "snr_over_training": plan.snr.over_training,
    }
