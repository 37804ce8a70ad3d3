"""The planner: from options to a table of feasible plans, one recommended, and what its tuning costs."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
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
from dpgcl_core.release.statement import delta_text, rounded_up
from sweeps.service.console.terminal import count, say
from sweeps.service.options.planner_options import PlannerOptions
from sweeps.service.options.sweep_command_line import words_of_options
from sweeps.service.planning.resources import wanted_of
from trainers.config.settings import DEFAULT_EPSILON

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What was asked for, and what was found.

    Attributes:
      options: of the command.
      wanted: the same in the words of the library.
      answer: the feasible plans.
      chosen: the recommended one, its σ calibrated on the grid of record.
      costs: of tuning, by release mode.
    """

    options: PlannerOptions
    wanted: PlanRequest
    answer: Answer
    chosen: Plan
    costs: Mapping[str, TuningCost]


def run_plan(options: PlannerOptions) -> int:
    """Print what is feasible within the options, and write its curves where asked for; spend nothing.

    Returns:
      0.

    Raises:
      ConfigError: bad input, or no plan is feasible: then what to relax and by how much.
    """
    wanted = wanted_of(options)
    answer = feasible(wanted)
    if answer.recommended is None:
        raise ConfigError(f"no plan is feasible. {'. '.join(answer.relax)}")
    chosen = verified(wanted, answer.recommended)
    planned = Planned(
        options=options,
        wanted=wanted,
        answer=answer,
        chosen=chosen,
        costs=tuning_costs(options, chosen),
    )
    if options.json:
        say(json.dumps(_as_dict(planned), allow_nan=False))
    else:
        _show(planned)
    if options.output is not None:
        points = [*epsilon_by_records(wanted, chosen.mechanism), *epochs_by_batch(wanted, chosen.mechanism)]
        title = f"What N, B and σ allow: {wanted.method}, N = {wanted.num_records_public}"
        subtitle = (
            f"ε = {wanted.target_epsilon:g}, δ = {wanted.delta:.3g}; the plan has {_point_text(chosen)}"
        )
        paths = write_curves(points, options.output, title=title, subtitle=subtitle)
        if not options.json:
            for path in paths:
                say(f"written: {path}")
    return 0


def tuning_costs(options: PlannerOptions, plan: Plan) -> dict[str, TuningCost]:
    """Return what choosing among m trainings of a plan costs in each release mode.

    Sealed: m is the mean of the secret number of trials, by the law and the bound of the options; with a
    threshold it is its mean where no trial reaches it. One training has no secret number.
    """
    mechanism, number = plan.mechanism, options.num_trials
    trial = TrialClass(
        sampling_prob=mechanism.sampling_prob,
        noise_multiplier=mechanism.noise_multiplier,
        num_steps=mechanism.num_steps_charged,
    )
    delta = mechanism.target_delta
    found = {OPEN: open_cost([dataclasses.replace(trial, count=number)], delta=delta)}
    if number > 1:
        law = TruncatedNegativeBinomial.from_mean(float(number), eta=options.release.eta)
        found[SEALED] = sealed_cost([trial], law=law, delta=delta, bound=options.release.bound)
        found[SEALED_THRESHOLD] = sealed_threshold_cost([trial], halting_prob=1 / number, delta=delta)
    return found


def _shown(answer: Answer, chosen: Plan) -> list[Plan]:
    """The recommended plan, others of its S, and the best of every other S."""
    first = chosen.mechanism.group_size
    own = [plan for plan in answer.plans if plan.mechanism.group_size == first]
    found = [chosen, *[plan for plan in own if plan != answer.recommended][: _SHOWN - 1]]
    for size in dict.fromkeys(plan.mechanism.group_size for plan in answer.plans):
        if size != first:
            found.append(next(plan for plan in answer.plans if plan.mechanism.group_size == size))
    return found


def _show(planned: Planned) -> None:
    options, wanted = planned.options, planned.wanted
    answer, chosen = planned.answer, planned.chosen
    how = "as stated" if options.records_per_second else "measured here on synthetic images"
    network = "as stated" if options.num_weights is not None else options.network.name
    _say_filled(
        f"N = {wanted.num_records_public}, ε = {wanted.target_epsilon:g}, δ = {delta_text(wanted.delta)}, "
        f"{wanted.method} on {wanted.num_weights} weights ({network}), "
        f"{wanted.records_per_second:.4g} records a second ({how})"
    )
    for reason, number in answer.refusals.items():
        say(f"left out: {count(number, 'point')}, {reason}")
    say(
        f"{count(len(answer.plans), 'feasible plan')}; * is recommended, then others of its S, then other S, "
        "each by SNR:"
    )
    say(
        f"  {'B':>9} {'T':>6} {'S':>6} {'σ':>8} {'epochs':>8} {options.unit:>11} {'GiB':>6} "
        f"{'SNR a step':>11} {'at most':>8} {'over all':>9}"
    )
    for plan in _shown(answer, chosen):
        say(f"{'*' if plan is chosen else ' '} {_row(plan)}")
    _say_filled(
        f"recommended: {_point_text(chosen)}, ε = {rounded_up(chosen.mechanism.epsilon(), 4)} by PLD; its "
        "σ is calibrated on the grid of record, that of the others is up to some two per cent too large"
    )
    _say_filled(
        "expected SNR: groups agree as in the committed tables, half of the squared norm in common at "
        f"S = {wanted.alignment_size:.3g}; at most: if they agreed fully"
    )
    if (warning := _warning(wanted, chosen)) is not None:
        _say_filled(f"note: {warning}")
    say(f"the sweep: {shlex.join(sweep_command(options, chosen))}")
    hours = options.num_trials * chosen.hours if chosen.hours is not None else math.nan
    say(f"tuning among {count(options.num_trials, 'training')}, {hours:.3g} {options.unit}:")
    for mode, cost in planned.costs.items():
        assert cost.tuned_epsilon is not None
        say(f"  {mode:<17} ε = {rounded_up(cost.tuned_epsilon, 4):<9} {cost.theorem}")


def _say_filled(text: str) -> None:
    """Print a sentence in as many lines as the terminal's columns need; of 100 where there is none."""
    say(textwrap.fill(text, table_width()))


def sweep_command(options: PlannerOptions, plan: Plan) -> list[str]:
    """Return the words of the command that trains a plan, in the options of the sweep that it starts."""
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


def _warning(wanted: PlanRequest, plan: Plan) -> str | None:
    found = too_small(plan.mechanism, wanted.num_weights, wanted.alignment_size)
    if found is None:
        return None
    number = enough_records(wanted, plan) if found.startswith("n and ε") else None
    return found if number is None else f"{found} At this B, T and S, n = {number} would do at the same ε."


def _row(plan: Plan) -> str:
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


def _as_dict(planned: Planned) -> dict[str, Any]:
    wanted, chosen = planned.wanted, planned.chosen
    return {
        "num_records_public": wanted.num_records_public,
        "target_epsilon": wanted.target_epsilon,
        "target_delta": wanted.delta,
        "method": wanted.method,
        "num_weights": wanted.num_weights,
        "records_per_second": wanted.records_per_second,
        "records_per_second_is_measured": planned.options.records_per_second is None,
        "alignment_size": wanted.alignment_size,
        "hours_are": planned.options.unit,
        "network": planned.options.network.name,
        "recommended": plan_dict(chosen),
        "command": sweep_command(planned.options, chosen),
        "plans": [plan_dict(plan) for plan in planned.answer.plans],
        "refused": dict(planned.answer.refusals),
        "warning": _warning(wanted, chosen),
        "tuning": {mode: cost.as_dict() for mode, cost in planned.costs.items()},
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values."""
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
