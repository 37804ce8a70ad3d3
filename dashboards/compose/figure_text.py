"""Trials → the words of a figure: title, settings and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from dashboards.compose.content import Reference
from dashboards.compose.display_names import (
    SWEEP,
    UNTRAINED,
    dataset_title,
    dataset_titles,
    has_values,
    joined,
    natural_key,
    panel_scores,
    score_names,
    score_title,
    value_text,
)
from dashboards.compose.gains import GAIN, with_gains
from dashboards.compose.method_table import without_guarantee
from dashboards.compose.questions import Question
from dashboards.compose.references import start_of, start_text
from dashboards.compose.repeats import num_trials
from dashboards.compose.selection import AS_PUBLISHED, PROVEN
from dashboards.compose.transfer_rows import PROBE
from dpgcl_core.release.metrics import DURING, Family, scores_of
from trainers.tracking.runs import NO_TUNING_COST, TUNING_COST_TAG

_BEYOND_TARGET = 1.001
FRONT_NOTES = (
    "Every dot is one training; only those with a proven guarantee can be on a front.",
    "Left: ε of that training alone, as if its settings had been known. Right: ε of its whole sweep, "
    "which holds for a model chosen by looking at all of them.",
)
"""What the panels of scores against ε show."""


def _values(trials: pd.DataFrame, name: str, form: str = ".4g") -> str:
    """Return the distinct values of a column, for example "3, 10"; empty without such a column."""
    if not has_values(trials, name):
        return ""
    found = sorted(trials[name].dropna().unique(), key=lambda value: natural_key(str(value)))
    if trials[name].dtype.kind in "if":
        found = sorted(found)
    shown = list(
        dict.fromkeys(value_text(value) if isinstance(value, str) else format(value, form) for value in found)
    )
    return joined(shown) if len(shown) <= 3 else f"{shown[0]} to {shown[-1]}"


def title(shown: pd.DataFrame, question: Question) -> str:
    """Return data set, method, ε, δ and the neighbouring relation, or that there is no guarantee.

    ε, δ and the relation are those of trials with a proven guarantee alone.
    """
    name = _trained_on(shown)
    methods = "DP-GCL"
    if has_values(shown, "method"):
        many = shown["method"].nunique() > 1
        methods = f"{question.heading} compared" if many else value_text(shown["method"].iloc[0])
        if many and question.axis.column != "method":
            methods = f"{question.heading}, {shown['method'].nunique()} methods"
        elif question.axis.scale == "categorical" and question.axis.column != "method":
            methods = f"{question.heading}, {methods}"  # the axis has names of values and none of its own
    head = f"{name}: {methods}" if name else methods
    private = shown[shown["guarantee"] == PROVEN]
    aimed = shown[(shown["guarantee"] != PROVEN) & (shown["target_epsilon"] < math.inf)]
    if private.empty:
        if aimed.empty:
            return f"{head}, ε = ∞ (non-private: no guarantee)"
        why = "as published" if set(aimed["guarantee"]) == {AS_PUBLISHED} else "seeded, non-private"
        return f"{head}, NO GUARANTEE: {why} trials, aimed at ε = {_values(aimed, 'target_epsilon')}"
    delta = _values(private, "target_delta", ".2g") or "not recorded"
    relation = _values(private, "neighboring_relation") or "add or remove one record"
    epsilon = _values(private, "target_epsilon")
    # No sign for "one of": fonts without it would show an empty box.
    epsilon = f"ε from {epsilon}" if " to " in epsilon else f"ε = {' and '.join(epsilon.rsplit(', ', 1))}"
    return f"{head}, {epsilon}, δ = {delta} ({relation})"


def _trained_on(shown: pd.DataFrame) -> str:
    """Return the name of the data set, told apart from a scored one of the same folder's name."""
    if not has_values(shown, "dataset") or shown["dataset"].nunique() > 1:
        return dataset_title(_values(shown, "dataset"))
    names = [str(shown["dataset"].dropna().iloc[0])]
    if has_values(shown, "scored_on"):
        names += map(str, shown["scored_on"].dropna().unique())
    return dataset_titles(names)[0]


def subtitle(shown: pd.DataFrame, question: Question) -> str:
    """Return σ, expected batch size, steps, temperature and network, without what is on the axis."""
    private = shown[shown["guarantee"] == PROVEN]
    parts = []
    if has_values(private, "noise_multiplier") and question.axis.column != "noise_multiplier":
        noise = [
            (f"{_values(rows, 'noise_multiplier', '.3g')}", value_text(epsilon))
            for epsilon, rows in private.groupby("target_epsilon")
        ]
        if 1 < len(noise) <= 3:
            parts.append("σ = " + "; ".join(f"{s} at ε = {e}" for s, e in noise))
        else:
            parts.append("σ = " + _values(private, "noise_multiplier", ".3g"))
    if {"sampling_prob", "num_records_public"} <= set(
        shown
    ) and question.axis.column != "expected_batch_size":
        batch = shown.assign(batch=(shown["sampling_prob"] * shown["num_records_public"]).round(1))
        parts.append(f"B = {_values(batch, 'batch')} expected")
    settings = (
        *(("num_steps", "T"), ("group_size", "S"), ("temperature", "τ"), ("l2_clip_norm", "C")),
        ("network_name", "network"),
    )
    for name, sign in settings:
        if has_values(shown, name) and name != question.axis.column:
            rows = private if name == "l2_clip_norm" and len(private) else shown
            parts.append(f"{sign} = {_values(rows, name)}")
    if has_values(shown, "lora_rank") and shown["lora_rank"].min() > 0:
        parts.append(f"LoRA rank = {_values(shown, 'lora_rank')}")
    return ", ".join(parts)


def notes(
    shown: pd.DataFrame,
    question: Question,
    *,
    num_repeats: list[int],
    references: Sequence[Reference],
    private: bool,
    has_scores: bool,
) -> list[str]:
    """Return the notes under a figure, one sentence each, the tuning cost last.

    Args:
      shown: the trials.
      question: of the figure.
      num_repeats: the distinct numbers of repeats of the points, ascending.
      references: lines across the panels.
      private: whether the training data are private.
      has_scores: whether any panel is shown.
    """
    found = [_repeats(num_repeats, question)] if num_repeats and question.kind != "search" else []
    if question.kind == "search" and has_scores:
        found += FRONT_NOTES
    found += _lines_across(references)
    found += _private_gain(shown)
    if has_values(shown, "num_augmentations") and shown["num_augmentations"].nunique() == 1:
        count = value_text(shown["num_augmentations"].iloc[0])
        found.append(f"Extra augmented copies of every key: Nₐ = {count}.")
    found += _scored_on(shown) if has_scores else []
    found += _recalls(shown)
    found += _not_private(shown, question)
    if private:
        found.append(
            "The training data are private: trials with ε = ∞, scores on private records and the SNR "
            "without noise are not shown."
        )
    if not has_scores:
        cause = "they would be computed from private records" if private else "none was recorded"
        found.append(f"No scores: {cause}.")
    found.append(_overspent(shown))
    found += tuning_costs(shown)
    return [note for note in found if note]


def _lines_across(references: Sequence[Reference]) -> list[str]:
    """Name the lines across the panels, and how many networks stand behind their bands."""
    if not references:
        return []
    names = joined(list(dict.fromkeys(each.label for each in references)))
    most = max(each.num_repeats for each in references)
    band = f"; band: ± standard error over {most} initialisations" if most > 1 else ""
    return [f"Lines across: {names}{band}."]


def _private_gain(shown: pd.DataFrame) -> list[str]:
    """Define the private gain, where a table has one."""
    scores, gained = panel_scores(score_names(shown)), with_gains(shown)
    if not any(has_values(gained, f"{score}{GAIN}") for score in scores):
        return []
    starts = [start_of(shown, score) for score in scores]
    before = start_text({each[0] if each else UNTRAINED for each in starts})
    return [
        f"Private gain: difference to {before}, paired over repeats, ± its standard error over these alone. "
        "It says what the private data add."
    ]


def _repeats(num_repeats: list[int], question: Question) -> str:
    fewest, most = num_repeats[0], num_repeats[-1]
    if most == 1:
        return "One repeat: no error bars."
    span = f"{most}" if fewest == most else f"{fewest} to {most}"
    missing = "" if fewest == most else " (some trials are missing)"
    what = "Lines and bands" if question.axis.dense else "Points and error bars"
    return f"{what}: mean ± standard error over {span} repeats{missing}."


def _scored_on(shown: pd.DataFrame) -> list[str]:
    """Name the data set that was scored, where the title names another; older runs do not record it."""
    if PROBE in shown or not has_values(shown, "scored_on"):  # an axis of data sets names them itself
        return []
    scored = shown["scored_on"].dropna()
    if "dataset" in shown:
        scored = scored[scored != shown.loc[scored.index, "dataset"]]
    if scored.empty:
        return []
    trained = list(map(str, shown["dataset"].dropna().unique())) if "dataset" in shown else []
    names = joined(dataset_titles(dict.fromkeys([*trained, *map(str, scored)]))[len(trained) :])
    noised = " Noised scores: on private records held out." * any(
        has_values(shown, score) for score in scores_of(Family.NOISED)
    )
    return [f"Scored on {names}.{noised}"]


def _recalls(shown: pd.DataFrame) -> list[str]:
    """Define recall at k, and point to the scores that have no panel."""
    names = {str(name).removesuffix(DURING) for name in shown if has_values(shown, str(name))}
    if names.isdisjoint(scores_of(Family.PAIRS)):
        return []
    scores = [name for name in names if score_title(name)]
    counted = "share of images (captions) with a right caption (image) among the k nearest"
    elsewhere = " Other scores: see the table." if len(panel_scores(scores)) < len(scores) else ""
    return [f"Recall at k: {counted}.{elsewhere}"]


def _not_private(shown: pd.DataFrame, question: Question) -> list[str]:
    """Name what has no guarantee, where it is drawn beside what has one."""
    column = question.axis.column if question.kind == "methods" else "method"
    named = without_guarantee(shown, column) if column in shown and shown[column].nunique() > 1 else []
    aimed = shown[(shown["guarantee"] != PROVEN) & (shown["target_epsilon"] < math.inf)]
    if named or aimed.empty or (shown["guarantee"] != PROVEN).all():
        return named
    return [f"{num_trials(aimed)} of {num_trials(shown)} trials aimed at a finite ε but have NO GUARANTEE."]


def tuning_costs(trials: pd.DataFrame) -> list[str]:
    """Return the tuning cost, of each sweep where there are several."""
    if SWEEP not in trials or trials[SWEEP].nunique() < 2:
        return [_tuning_cost(trials)]
    each = [f"{name}: {_tuning_cost(rows)}" for name, rows in trials.groupby(SWEEP, sort=False)]
    return [*each, "Sweeps of the same records add up: what all of them cost together, their ledger tells."]


def _tuning_cost(trials: pd.DataFrame) -> str:
    """Return the privacy cost of choosing among the trials, as the sweep recorded it."""
    if not has_values(trials, TUNING_COST_TAG):
        return NO_TUNING_COST
    told = list(dict.fromkeys(str(line) for line in trials[TUNING_COST_TAG].dropna()))
    return told[0] if len(told) == 1 else NO_TUNING_COST


def _why_over(over: pd.DataFrame) -> str:
    restarted = has_values(over, "num_restarts") and (over["num_restarts"] > 0).any()
    if has_values(over, "num_steps_charged") and has_values(over, "num_steps"):  # of private data, too
        restarted = restarted or (over["num_steps_charged"] > over["num_steps"]).any()
    return ": steps repeated after restarts are charged" if restarted else ""


def _overspent(shown: pd.DataFrame) -> str:
    """Return a note where trials spent more than their target ε, for example after restarts."""
    if not has_values(shown, "epsilon"):
        return ""
    private = shown[shown["guarantee"] == PROVEN]
    over = private[private["epsilon"] > _BEYOND_TARGET * private["target_epsilon"]]
    if over.empty:
        return ""
    return (
        f"{num_trials(over)} of {num_trials(private)} private trials spent more than their target ε, up to "
        f"{over['epsilon'].max():.3g}{_why_over(over)}."
    )
