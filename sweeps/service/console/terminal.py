"""The text that a sweep prints: its plan, an estimate, and each trial's scores."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from dpgcl_core.addresses import masked_text
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.release.statement import delta_text, epsilon_text, rounded_up
from sweeps.service.console.display import put
from sweeps.service.options.release_options import ReleaseOptions
from sweeps.service.options.score_options import shown_scores
from sweeps.service.planning.duration import estimate_seconds
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.sweep_cost import cost_line, cost_of, open_trials
from sweeps.service.planning.trials import Trial
from sweeps.service.storage.sweep_names import fit_for_name
from trainers.tracking.runs import trial_run_name

_RESTARTS = " steps for restarts (charged even if unused; --restart-steps 0 turns them off)"


def print_line(text: str) -> None:
    """Print a line, with passwords in addresses masked; with `--quiet` print nothing."""
    put(masked_text(text))


def warn(text: str) -> None:
    """Print a line even with `--quiet`: an answer, a warning or an error."""
    put(masked_text(text), always=True)


def print_link(text: str, link: str) -> None:
    """Print a line that ends in a link, which contains no secrets and which masking would truncate."""
    put(masked_text(text) + link)


def print_notes(plan: SweepPlan, *, in_full: bool) -> None:
    """Print a plan's notes; the notes that every sweep has are printed only if `in_full`."""
    for note in (*plan.notes, *plan.advice):
        if in_full or note not in plan.usual_notes:
            print_line(f"note: {note}")


def print_plan(plan: SweepPlan, *, in_full: bool) -> None:
    """Print a plan's notes, numbers and cost, and every point, or one line per guarantee label."""
    print_notes(plan, in_full=in_full)
    mechanism = plan.trials[0].config.mechanism
    relations = sorted({trial.config.mechanism.neighboring_relation for trial in plan.trials})
    print_line(
        f"n = {plan.num_records_public}, q = {mechanism.sampling_prob:.5g}, {steps_text(mechanism)}, "
        f"δ = {delta_text(mechanism.target_delta)}, neighbours: {' or '.join(relations)}"
    )
    points = {trial.name.rsplit("-r", 1)[0]: trial for trial in plan.trials}
    hint = "" if in_full else "; --dry-run lists them"
    if plan.release.is_open:
        grid_text = f"{count(len(points), 'point')} × {count(plan.repeats, 'repeat')}"
        print_line(f"{count(len(plan.trials), 'trial')} = {grid_text}{hint}")
    else:
        settings_text = count(len(points), "setting")
        print_line(f"every trial draws one of {settings_text}; the number of trials is secret")
    for line in _lines_of(points) if in_full else _lines_of_labels(points):
        print_line(f"  {line}")
    print_line(plan.tags()["tuning_cost"])
    if plan.later:
        trials, later_text = (*plan.trials, *plan.later), count(len(plan.later), "trial")
        print_line(
            f"then {later_text} with settings that these results choose; cost of both sweeps together:"
        )
        print_line(cost_line(plan.release.mode, cost_of(plan.release, trials), open_trials(trials)))


def _lines_of(points: Mapping[str, Trial]) -> Iterator[str]:
    """Yield a line for each point."""
    for name, trial in points.items():
        noise, label = trial.params["noise_multiplier"], trial.config.guarantee_label
        yield f"{name:<24} σ = {noise:<10.5g} ε of one trial = {_epsilon_of_one([trial]):<9} {label}"


def _lines_of_labels(points: Mapping[str, Trial]) -> Iterator[str]:
    """Yield a line for the points of each guarantee label."""
    labels: dict[str, dict[str, Trial]] = {}
    for name, trial in points.items():
        labels.setdefault(trial.config.guarantee_label, {})[name] = trial
    for label, trials in labels.items():
        names, noises = list(trials), sorted({trial.params["noise_multiplier"] for trial in trials.values()})
        names_text = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        span = " to ".join(f"{noise:.5g}" for noise in dict.fromkeys((noises[0], noises[-1])))
        sign, epsilon = "up to" if len(trials) > 1 else "=", _epsilon_of_one(list(trials.values()))
        cost = "no ε" if label == "none" else f"ε of one trial {sign} {epsilon}"
        yield f"{label}: {count(len(trials), 'point')}, {names_text}, σ = {span}, {cost}"


def _epsilon_of_one(trials: Sequence[Trial]) -> str:
    """Return the largest ε of trials with one guarantee label; in brackets if it is not proven."""
    label = trials[0].config.guarantee_label
    if label == "none":
        return "none"
    epsilon = epsilon_text(max(trial.config.epsilon() for trial in trials))
    return f"({epsilon})" if label == "as-published" else epsilon


def estimate_text(plan: SweepPlan) -> str:
    """Return a sentence on a plan's estimated duration."""
    seconds = estimate_seconds(plan)
    threads = count(plan.trials[0].config.performance.threads_per_worker, "thread")
    scope = "" if plan.release.is_open else "for one trial of every setting, "
    return (
        f"estimate: {scope}{duration(seconds)} of training and embedding in total, one worker at a time "
        f"with {threads}, measured on this machine with synthetic images. Divide by the number of trials "
        "that run at once, and add start-up and probes"
    )


def headline(metrics: Mapping[str, float]) -> list[str]:
    """Return the most important scores of a trial, each as text.

    >>> headline({"knn_accuracy": 0.50004, "epsilon": 0.99843})
    ['knn_accuracy 0.5', 'epsilon 0.9985']
    """
    names = (*shown_scores(metrics), "snr_first_step", "noised_snr_first_step", "epsilon")
    scores = {name: metrics[name] for name in names if name in metrics}
    return [f"{name} {_score_text(name, value)}" for name, value in scores.items()] or ["done"]


def _score_text(name: str, value: float) -> str:
    return rounded_up(value, 4) if name == "epsilon" else f"{value:.4g}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    >>> count(1, "trial"), count(2, "trial")
    ('1 trial', '2 trials')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def steps_text(mechanism: Mechanism) -> str:
    """Return a text with T, the number of steps, and R, the restart steps charged in advance, if any."""
    restarts = mechanism.num_restart_steps
    return f"T = {mechanism.num_steps}" + (f", R = {restarts}{_RESTARTS}" if restarts else "")


def duration(seconds: float) -> str:
    """Return a duration in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def run_name(trial: Trial) -> str:
    """Return the name of a trial's run in MLflow: the trial's name and its settings."""
    name = trial_run_name(trial.name, trial.params)
    return f"{name}, seeded: no guarantee" if trial.config.seeded_non_private else name


def name_suffix(release: ReleaseOptions) -> str:
    """Return the end of a new sweep's name: a timestamp; for a sealed sweep random, to hide its time."""
    if release.is_open:
        return f"{datetime.now():%Y%m%d-%H%M%S}"
    return f"{release.mode}-{secrets.token_hex(3)}"


def short_name(dataset: str) -> str:
    """Return a data set's name in a form that is valid in file names."""
    scheme, _, path = dataset.partition(":")
    return fit_for_name(f"{scheme}-{Path(path).stem}") if path else dataset
