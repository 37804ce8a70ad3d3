"""Trials → the text of a figure: title, settings and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from dashboards.compose.content import Panel, Reference
from dashboards.compose.display_names import (
    SWEEP,
    UNTRAINED,
    dataset_title,
    dataset_titles,
    has_values,
    join_names,
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

_EPSILON_TOLERANCE = 1.001  # factor on the target ε, beyond which a trial counts as overspent
FRONT_NOTES = (
    "Every dot is one training; only trainings with a proven guarantee can be on a front.",
    "Left: ε of that training alone, as if its settings had been known in advance. Right: ε of its whole "
    "sweep, which holds for a model chosen from all trainings.",
)
"""What the panels of scores against ε show."""


def _range(trials: pd.DataFrame, name: str, form: str = ".4g") -> str:
    """Return a column's distinct values, "3, 10" or, if many, "1 to 64"; empty without values."""
    if not has_values(trials, name):
        return ""
    values = sorted(trials[name].dropna().unique(), key=lambda value: natural_key(str(value)))
    if trials[name].dtype.kind in "if":
        values = sorted(values)
    texts = list(dict.fromkeys(value_text(v) if isinstance(v, str) else format(v, form) for v in values))
    return join_names(texts) if len(texts) <= 3 else f"{texts[0]} to {texts[-1]}"


def title(trials: pd.DataFrame, question: Question) -> str:
    """Return the title: data set, method, ε, δ and the neighbouring relation, or that there is no guarantee.

    ε, δ and the relation are taken only from trials with a proven guarantee.
    """
    name = _dataset_name(trials)
    methods = "DP-GCL"
    if has_values(trials, "method"):
        has_many_methods = trials["method"].nunique() > 1
        methods = f"{question.heading} compared" if has_many_methods else value_text(trials["method"].iloc[0])
        if has_many_methods and question.axis.column != "method":
            methods = f"{question.heading}, {trials['method'].nunique()} methods"
        elif question.axis.scale == "categorical" and question.axis.column != "method":
            methods = f"{question.heading}, {methods}"  # a categorical axis shows no label
    head = f"{name}: {methods}" if name else methods
    private = trials[trials["guarantee"] == PROVEN]
    unproven = trials[(trials["guarantee"] != PROVEN) & (trials["target_epsilon"] < math.inf)]
    if private.empty:
        if unproven.empty:
            return f"{head}, ε = ∞ (non-private: no guarantee)"
        reason = "as published" if set(unproven["guarantee"]) == {AS_PUBLISHED} else "seeded, non-private"
        return f"{head}, NO GUARANTEE: {reason} trials with target ε = {_range(unproven, 'target_epsilon')}"
    delta = _range(private, "target_delta", ".2g") or "not recorded"
    relation = _range(private, "neighboring_relation") or "add or remove one record"
    epsilon = _range(private, "target_epsilon")
    # No symbol for "one of": fonts without it would show an empty box.
    epsilon = f"ε from {epsilon}" if " to " in epsilon else f"ε = {' and '.join(epsilon.rsplit(', ', 1))}"
    return f"{head}, {epsilon}, δ = {delta} ({relation})"


def _dataset_name(trials: pd.DataFrame) -> str:
    """Return the training data set's title, distinct from that of a scored one of the same file name."""
    if not has_values(trials, "dataset") or trials["dataset"].nunique() > 1:
        return dataset_title(_range(trials, "dataset"))
    names = [str(trials["dataset"].dropna().iloc[0])]
    if has_values(trials, "scored_on"):
        names += map(str, trials["scored_on"].dropna().unique())
    return dataset_titles(names)[0]


def subtitle(trials: pd.DataFrame, question: Question) -> str:
    """Return the settings σ, B, T, S, τ, C, network and LoRA rank, without the one on the axis."""
    private, column = trials[trials["guarantee"] == PROVEN], question.axis.column
    parts = []
    if has_values(private, "noise_multiplier") and column != "noise_multiplier":
        noise = [
            f"{_range(rows, 'noise_multiplier', '.3g')} at ε = {value_text(epsilon)}"
            for epsilon, rows in private.groupby("target_epsilon")
        ]
        has_few = 1 < len(noise) <= 3
        parts.append(f"σ = {'; '.join(noise) if has_few else _range(private, 'noise_multiplier', '.3g')}")
    if {"sampling_prob", "num_records_public"} <= set(trials) and column != "expected_batch_size":
        batch = trials.assign(batch=(trials["sampling_prob"] * trials["num_records_public"]).round(1))
        parts.append(f"B = {_range(batch, 'batch')} expected")
    settings = (
        *(("num_steps", "T"), ("group_size", "S"), ("temperature", "τ"), ("l2_clip_norm", "C")),
        ("network_name", "network"),
    )
    for name, sign in settings:
        if has_values(trials, name) and name != column:
            rows = private if name == "l2_clip_norm" and len(private) else trials
            parts.append(f"{sign} = {_range(rows, name)}")
    if has_values(trials, "lora_rank") and trials["lora_rank"].min() > 0:
        parts.append(f"LoRA rank = {_range(trials, 'lora_rank')}")
    return ", ".join(parts)


def notes(
    trials: pd.DataFrame, question: Question, rows: Sequence[Sequence[Panel]], *, private: bool
) -> list[str]:
    """Return the notes under a figure, one sentence each, the tuning cost last.

    Args:
      trials: the trials that may be shown.
      question: the figure's question.
      rows: the figure's panels, row by row.
      private: whether the training data are private.
    """
    panels = [panel for row in rows for panel in row]
    num_repeats = sorted({n for panel in panels for curve in panel.curves for n in curve.num_repeats})
    has_scores = any(panel.y_label.endswith("(%)") for panel in panels)
    sentences = [_repeats_note(num_repeats, question)] if num_repeats and question.kind != "search" else []
    if question.kind == "search" and has_scores:
        sentences += FRONT_NOTES
    sentences += _reference_note([reference for panel in panels for reference in panel.references])
    sentences += _gain_note(trials)
    if has_values(trials, "num_augmentations") and trials["num_augmentations"].nunique() == 1:
        count = value_text(trials["num_augmentations"].iloc[0])
        sentences.append(f"Extra augmented copies of every key: Nₐ = {count}.")
    sentences += _scored_on_note(trials) if has_scores else []
    sentences += _recall_note(trials)
    sentences += _no_guarantee_notes(trials, question)
    if private:
        sentences.append(
            "The training data are private: trials with ε = ∞, scores on private records and the SNR "
            "without noise are not shown."
        )
    if not has_scores:
        cause = "they would be computed from private records" if private else "none was recorded"
        sentences.append(f"No scores: {cause}.")
    sentences.append(_overspent_note(trials))
    sentences += tuning_costs(trials)
    return [note for note in sentences if note]


def _reference_note(references: Sequence[Reference]) -> list[str]:
    """Name the reference lines, and the number of initialisations over which their bands are computed."""
    if not references:
        return []
    names = join_names(list(dict.fromkeys(reference.label for reference in references)))
    num_repeats = max(reference.num_repeats for reference in references)
    band = f"; band: ± standard error over {num_repeats} initialisations" if num_repeats > 1 else ""
    return [f"Reference lines: {names}{band}."]


def _gain_note(trials: pd.DataFrame) -> list[str]:
    """Define the private gain, if a table shows it."""
    scores, frame = panel_scores(score_names(trials)), with_gains(trials)
    if not any(has_values(frame, f"{score}{GAIN}") for score in scores):
        return []
    starts = [start_of(trials, score) for score in scores]
    before = start_text({start[0] if start else UNTRAINED for start in starts})
    return [
        f"Private gain: the difference from {before}, paired over repeats, ± its standard error over repeats "
        "only. It shows what the private data add."
    ]


def _repeats_note(num_repeats: list[int], question: Question) -> str:
    low, high = num_repeats[0], num_repeats[-1]
    if high == 1:
        return "One repeat: no error bars."
    span = f"{high}" if low == high else f"{low} to {high}"
    missing = "" if low == high else " (some trials are missing)"
    subject = "Lines and bands" if question.axis.dense else "Points and error bars"
    return f"{subject}: mean ± standard error over {span} repeats{missing}."


def _scored_on_note(trials: pd.DataFrame) -> list[str]:
    """Name the scored data set if the title names another; older runs do not record it."""
    if PROBE in trials or not has_values(trials, "scored_on"):  # an axis of data sets shows their names
        return []
    targets = trials["scored_on"].dropna()
    if "dataset" in trials:
        targets = targets[targets != trials.loc[targets.index, "dataset"]]
    if targets.empty:
        return []
    sources = list(map(str, trials["dataset"].dropna().unique())) if "dataset" in trials else []
    names = join_names(dataset_titles(dict.fromkeys([*sources, *map(str, targets)]))[len(sources) :])
    noise_note = " Noised scores: on held-out private records." * any(
        has_values(trials, score) for score in scores_of(Family.NOISED)
    )
    return [f"Scored on {names}.{noise_note}"]


def _recall_note(trials: pd.DataFrame) -> list[str]:
    """Define recall at k, and point to the scores that have no panel."""
    names = {str(name).removesuffix(DURING) for name in trials if has_values(trials, str(name))}
    if names.isdisjoint(scores_of(Family.PAIRS)):
        return []
    scores = [name for name in names if score_title(name)]
    definition = "share of images (captions) with a matching caption (image) among the k nearest"
    elsewhere = " Other scores: see the table." if len(panel_scores(scores)) < len(scores) else ""
    return [f"Recall at k: {definition}.{elsewhere}"]


def _no_guarantee_notes(trials: pd.DataFrame, question: Question) -> list[str]:
    """Name or count the trials without a proven guarantee, if they are drawn next to trials with one."""
    column = question.axis.column if question.kind == "methods" else "method"
    sentences = without_guarantee(trials, column) if column in trials and trials[column].nunique() > 1 else []
    unproven = trials[(trials["guarantee"] != PROVEN) & (trials["target_epsilon"] < math.inf)]
    if sentences or unproven.empty or (trials["guarantee"] != PROVEN).all():
        return sentences
    return [f"{num_trials(unproven)} of {num_trials(trials)} trials have a finite target ε but NO GUARANTEE."]


def tuning_costs(trials: pd.DataFrame) -> list[str]:
    """Return sentences on the tuning cost, one for each sweep."""
    if SWEEP not in trials or trials[SWEEP].nunique() < 2:
        return [_tuning_cost(trials)]
    lines = [f"{name}: {_tuning_cost(rows)}" for name, rows in trials.groupby(SWEEP, sort=False)]
    return [*lines, "The costs of sweeps on the same records add up; their ledger has the total cost."]


def _tuning_cost(trials: pd.DataFrame) -> str:
    """Return the privacy cost of choosing among the trials, as the sweep recorded it."""
    if not has_values(trials, TUNING_COST_TAG):
        return NO_TUNING_COST
    lines = list(dict.fromkeys(str(line) for line in trials[TUNING_COST_TAG].dropna()))
    return lines[0] if len(lines) == 1 else NO_TUNING_COST


def _restart_text(trials: pd.DataFrame) -> str:
    has_restarts = has_values(trials, "num_restarts") and (trials["num_restarts"] > 0).any()
    if has_values(trials, "num_steps_charged") and has_values(trials, "num_steps"):  # a public count
        has_restarts = has_restarts or (trials["num_steps_charged"] > trials["num_steps"]).any()
    return ": steps repeated after restarts are charged" if has_restarts else ""


def _overspent_note(trials: pd.DataFrame) -> str:
    """Return a note where trials spent more than their target ε, for example after restarts."""
    if not has_values(trials, "epsilon"):
        return ""
    private = trials[trials["guarantee"] == PROVEN]
    excess = private[private["epsilon"] > _EPSILON_TOLERANCE * private["target_epsilon"]]
    if excess.empty:
        return ""
    return (
        f"{num_trials(excess)} of {num_trials(private)} private trials spent more than their target ε, up to "
        f"{excess['epsilon'].max():.3g}{_restart_text(excess)}."
    )
