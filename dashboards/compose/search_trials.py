"""Trials of a search → the searched settings, the maximised score, and the trials on the front."""

from __future__ import annotations

import pandas as pd

from dashboards.compose.display_names import has_values, natural_key, panel_scores, score_names, score_title
from dashboards.compose.selection import PROVEN
from dpgcl_core.release.metrics import find_metric

# Params and tags that are not settings, or depend on a setting.
NOT_SEARCHED = (
    *("repeat", "public_seed", "sensitivity", "sampling_prob", "randomness", "neighboring_relation"),
    *("num_records_public_source", "guarantee_label", "guarantee", "data_is", "notes", "research", "sweep"),
    *("trial", "role", "release_mode", "tuning_cost", "tuned_epsilon", "tuned_delta", "tuning_theorem"),
    *("run_id", "run_name", "axis_order", "trial_number", "group_size_order", "searched", "objective"),
    "sweep_run_id",
)


def number_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials in the order they were proposed, with the column `trial_number`.

    If the sweep recorded no numbers, the trials are numbered from 1 in the order of their names.
    """
    if "trial_number" in trials and trials["trial_number"].notna().all():
        return trials.sort_values("trial_number", ignore_index=True)
    if "trial" in trials:
        positions = sorted(range(len(trials)), key=lambda i: natural_key(str(trials["trial"].iloc[i])))
        trials = trials.iloc[positions].reset_index(drop=True)
    return trials.assign(trial_number=range(1, len(trials) + 1))


def searched_columns(trials: pd.DataFrame) -> list[str]:
    """Return the columns of the searched settings: as recorded in `searched`, else the settings that vary."""
    if has_values(trials, "searched"):
        columns = [name.strip() for name in str(trials["searched"].iloc[0]).split(",")]
        return [name for name in columns if has_values(trials, name)]
    trials = trials[is_private(trials)] if is_private(trials).any() else trials
    names = [name for name in map(str, trials) if is_setting(name) and trials[name].map(str).nunique() > 1]
    # σ is calibrated to the target, so it is not a separate setting.
    return [name for name in names if name != "noise_multiplier" or "target_epsilon" not in names]


def is_setting(name: str) -> bool:
    """Return whether a column may be a setting: no metric or score, and not in `NOT_SEARCHED`."""
    if name in NOT_SEARCHED or find_metric(name) is not None or score_title(name):
        return False
    return not name.startswith("epsilon_")


def objective(trials: pd.DataFrame) -> str | None:
    """Return the maximised score: by the param `objective`, else the first score with a panel, if any."""
    if has_values(trials, "objective") and has_values(trials, str(trials["objective"].iloc[0])):
        return str(trials["objective"].iloc[0])
    return next(iter(panel_scores(score_names(trials))), None)


def on_the_front(epsilons: list[float], scores: list[float]) -> list[bool]:
    """Return for each point whether no other has at most its ε and at least its score, and differs in one.

    >>> on_the_front([1.0, 2.0, 2.0, 4.0], [0.5, 0.7, 0.6, 0.7])
    [True, True, False, False]
    """
    points = list(zip(epsilons, scores, strict=True))
    return [
        not any(e <= epsilon and s >= score and (e, s) != (epsilon, score) for e, s in points)
        for epsilon, score in points
    ]


def is_private(trials: pd.DataFrame) -> pd.Series:
    """Return which trials have a proven guarantee."""
    return trials["guarantee"] == PROVEN


def epsilon_spent(trials: pd.DataFrame) -> pd.Series:
    """Return each trial's spent ε, or its target ε where none was recorded."""
    targets = trials["target_epsilon"]
    return trials["epsilon"].fillna(targets) if "epsilon" in trials else targets
