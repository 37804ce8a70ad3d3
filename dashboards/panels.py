"""Table → what the group-size figure says: curves, errors, words. It is drawn elsewhere.

Both drawings (`figures.py` for print, `interactive.py` for the browser) and the written table take
their numbers from here, so they agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dashboards import captions
from dashboards.captions import has_values
from dashboards.runs import DashboardError, group_size_order

LABEL_SCORES = {"knn_accuracy": "k-NN accuracy", "linear_probe_accuracy": "Linear probe accuracy"}
VIEW_SCORES = {
    "view_retrieval_top1": "View retrieval, top 1",
    "view_retrieval_top10": "View retrieval, top 10",
}
SNR = "snr_first_step"
SNR_PLAIN = "snr_first_step_no_augmentation"

# Okabe and Ito (2008), told apart by colour-blind readers; blue is non-private, as in the paper.
NON_PRIVATE_COLOUR = "#0072B2"
PRIVATE_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
REFERENCE_COLOUR = "#6B6B6B"
PRIVATE_MARKERS = ("square", "diamond", "triangle", "pentagon", "cross")
DASHES = ("solid", "dashed", "dotted", "dashdot")

_CELL = ["group_size_order", "target_epsilon", "num_augmentations"]
_REQUIRED = ("group_size", "target_epsilon", "num_augmentations")
# Settings that must not differ among the trials that are averaged as repeats.
_FIXED_IN_CELL = (
    *("dataset", "num_records_public", "sampling_prob", "num_steps", "target_delta", "l2_clip_norm"),
    *("temperature", "network_name", "embedding_dim", "optimizer_name", "learning_rate", "weight_decay"),
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel; entries with one repeat have a NaN standard error."""

    label: str
    group_sizes: list[str]
    x: list[float]
    mean: list[float]
    standard_error: list[float]
    num_repeats: list[int]
    colour: str
    dash: str = "solid"
    marker: str = "circle"
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A horizontal line with a band of one standard error."""

    label: str
    mean: float
    standard_error: float
    num_repeats: int


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    y_label: str
    curves: list[Curve]
    reference: Reference | None = None
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupSizeContent:
    """Everything the group-size figure shows.

    Attributes:
      title: data set, ε, δ and the neighbouring relation.
      subtitle: σ, B, T and the network.
      scores: up to two panels, in per cent.
      snr: the panel of the gradient's signal-to-noise ratio, or None.
      tick_positions, tick_labels: of the group-size axis, "batch" last.
      facts: rows shown in place of the accuracy when there is none; the first row is the heading.
      notes: what the reader must know, one sentence each.
    """

    title: str
    subtitle: str
    scores: list[Panel]
    snr: Panel | None
    tick_positions: list[float]
    tick_labels: list[str]
    facts: list[list[str]]
    notes: list[str]


def shown_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Returns what may be drawn: with private data, no trial without noise and no SNR.

    The training withholds these numbers itself; this is the second lock. Data count as private unless
    every trial is tagged `data_is: public`.

    Raises:
      DashboardError: a needed column is absent, repeats differ in a setting, or nothing is left.
    """
    missing = [name for name in _REQUIRED if name not in trials]
    if missing:
        raise DashboardError(f"a group-size figure needs the params {', '.join(missing)} in every trial")
    shown = trials.assign(group_size_order=trials["group_size"].map(group_size_order).astype(float))
    if data_are_private(trials):
        shown = shown[shown["target_epsilon"] < math.inf]
        shown = shown.drop(columns=[name for name in (SNR, SNR_PLAIN) if name in shown])
    if shown.empty:
        raise DashboardError(
            "no trial can be shown: the data are private and no trial has a finite target_epsilon"
        )
    for cell, rows in shown.groupby(_CELL):
        for name in _FIXED_IN_CELL:
            if name in rows and rows[name].nunique() > 1:
                values = ", ".join(str(value) for value in sorted(rows[name].unique(), key=str))
                raise DashboardError(
                    "trials with the same group size, ε and num_augmentations must be repeats of one "
                    f"another; at {cell} they differ in {name} ({values}). Select the trials first"
                )
    return shown.sort_values(_CELL, ignore_index=True)


def data_are_private(trials: pd.DataFrame) -> bool:
    """Whether any trial lacks the tag `data_is: public`."""
    return "data_is" not in trials or bool((trials["data_is"] != "public").any())


def score_names(trials: pd.DataFrame) -> dict[str, str]:
    """Returns the scores to draw and their names: those from labels, else those of view retrieval."""
    for family in (LABEL_SCORES, VIEW_SCORES):
        found = {name: title for name, title in family.items() if has_values(trials, name)}
        if found:
            return found
    return {}


def mean_and_error(trials: pd.DataFrame, metric: str) -> tuple[float, float, int]:
    """Returns the mean over repeats, its standard error (NaN for one repeat) and the number of repeats.

    Trials of the same repeat are averaged first: they share the network's initial values, so they are
    no independent evidence.

    >>> mean_and_error(pd.DataFrame({"repeat": [0, 1, 1], "score": [1.0, 2.0, 4.0]}), "score")
    (2.0, 1.0, 2)
    """
    values = trials[metric].dropna()
    if "repeat" in trials:
        values = values.groupby(trials.loc[values.index, "repeat"]).mean()
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    return mean, float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan, n


def summary_table(trials: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per group size, ε and num_augmentations: the mean, standard error and n of each number.

    Scores are fractions, not per cent. Raises as `shown_trials`.
    """
    shown = shown_trials(trials)
    metrics = [*LABEL_SCORES, *VIEW_SCORES, SNR, SNR_PLAIN]
    present = [name for name in metrics if has_values(shown, name)]
    rows = []
    for _, cell in shown.groupby(_CELL):
        first = cell.iloc[0]
        row: dict[str, Any] = {name: first[name] for name in _REQUIRED}
        row["num_trials"] = len(cell)
        if has_values(cell, "epsilon"):
            row["epsilon_max"] = float(cell["epsilon"].max())  # what was spent, restarts included
        for name in present:
            row[f"{name}_mean"], row[f"{name}_standard_error"], row[f"{name}_n"] = mean_and_error(cell, name)
        rows.append(row)
    return pd.DataFrame(rows)


def group_size_content(trials: pd.DataFrame) -> GroupSizeContent:
    """Returns what the paper's Figure 4 says for these trials. Raises as `shown_trials`."""
    shown = shown_trials(trials)
    positions = _positions(shown)
    scores = [_score_panel(shown, name, title, positions) for name, title in score_names(shown).items()]
    snr = _snr_panel(shown, positions)
    panels = [*scores, *([snr] if snr else [])]
    return GroupSizeContent(
        title=captions.title(shown),
        subtitle=captions.subtitle(shown),
        scores=scores,
        snr=snr,
        tick_positions=list(positions.values()),
        tick_labels=["batch" if math.isinf(order) else f"{order:g}" for order in positions],
        facts=captions.facts(shown),
        notes=captions.notes(
            shown,
            num_repeats=sorted({n for panel in panels for curve in panel.curves for n in curve.num_repeats}),
            num_untrained=max(
                (panel.reference.num_repeats for panel in scores if panel.reference), default=0
            ),
            private=data_are_private(trials),
            has_scores=bool(scores),
        ),
    )


def _positions(trials: pd.DataFrame) -> dict[float, float]:
    """Where each group size stands on the axis: log2 S, and the batch after a gap."""
    orders = sorted(trials["group_size_order"].unique())
    positions = {order: math.log2(order) for order in orders if order < math.inf}
    if math.inf in orders:
        positions[math.inf] = max(positions.values(), default=0.0) + 1.5
    return positions


def _curve(
    rows: pd.DataFrame, metric: str, positions: dict[float, float], scale: float, **style: Any
) -> Curve:
    cells = [(order, *mean_and_error(cell, metric)) for order, cell in rows.groupby("group_size_order")]
    cells = [cell for cell in cells if cell[3]]
    return Curve(
        group_sizes=["batch" if math.isinf(order) else f"{order:g}" for order, *_ in cells],
        x=[positions[order] for order, *_ in cells],
        mean=[scale * mean for _, mean, _, _ in cells],
        standard_error=[scale * error for _, _, error, _ in cells],
        num_repeats=[n for *_, n in cells],
        **style,
    )


def _epsilon_styles(trials: pd.DataFrame) -> dict[float, tuple[str, str]]:
    """Colour and marker of each ε, the largest finite ε first."""
    finite = sorted((e for e in trials["target_epsilon"].unique() if e < math.inf), reverse=True)
    styles = {
        epsilon: (PRIVATE_COLOURS[i % len(PRIVATE_COLOURS)], PRIVATE_MARKERS[i % len(PRIVATE_MARKERS)])
        for i, epsilon in enumerate(finite)
    }
    return {math.inf: (NON_PRIVATE_COLOUR, "circle"), **styles}


def _score_panel(trials: pd.DataFrame, metric: str, title: str, positions: dict[float, float]) -> Panel:
    styles = _epsilon_styles(trials)
    augmentations = sorted(trials["num_augmentations"].unique(), reverse=True)
    curves = []
    for epsilon, (colour, marker) in styles.items():
        for dash, count in zip(_cycle(DASHES, len(augmentations)), augmentations, strict=True):
            rows = trials[(trials["target_epsilon"] == epsilon) & (trials["num_augmentations"] == count)]
            label = "ε = ∞ (non-private)" if math.isinf(epsilon) else f"ε = {epsilon:g}"
            if len(augmentations) > 1:
                label += f", Nₐ = {count}"
            curve = _curve(rows, metric, positions, 100, label=label, colour=colour, marker=marker, dash=dash)
            if curve.x:
                curves.append(curve)
    return Panel(y_label=f"{title} (%)", curves=curves, reference=_untrained(trials, f"untrained_{metric}"))


def _untrained(trials: pd.DataFrame, metric: str) -> Reference | None:
    if not has_values(trials, metric):
        return None
    mean, error, n = mean_and_error(trials, metric)
    return Reference(label="untrained network", mean=100 * mean, standard_error=100 * error, num_repeats=n)


def _snr_panel(trials: pd.DataFrame, positions: dict[float, float]) -> Panel | None:
    private = trials[trials["target_epsilon"] < math.inf]
    styles = _epsilon_styles(trials)
    counts = sorted((c for c in private["num_augmentations"].unique() if c > 0), reverse=True)
    finite = [epsilon for epsilon in styles if epsilon < math.inf]
    curves = []
    for epsilon in finite:
        colour, marker = styles[epsilon]
        rows = private[private["target_epsilon"] == epsilon]
        prefix = f"ε = {epsilon:g}, " if len(finite) > 1 else ""
        for dash, count in zip(_cycle(DASHES, len(counts)), counts, strict=True):
            part = rows[rows["num_augmentations"] == count]
            if has_values(part, SNR):
                label = f"{prefix}with augmentation, Nₐ = {count}"
                curves.append(
                    _curve(part, SNR, positions, 1, label=label, colour=colour, marker=marker, dash=dash)
                )
        plain = _without_augmentation(rows)
        if has_values(plain, SNR_PLAIN):
            style = {"colour": colour, "marker": marker, "dash": "dotted", "hollow": True}
            label = f"{prefix}without augmentation"
            curves.append(_curve(plain, SNR_PLAIN, positions, 1, label=label, **style))
    return Panel(y_label="Gradient SNR, first step", curves=curves, log_y=True) if curves else None


def _without_augmentation(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` with the SNR of trials that had no augmentation at all standing in for the column."""
    if SNR not in rows:
        return rows
    plain = rows[SNR_PLAIN] if SNR_PLAIN in rows else pd.Series(math.nan, index=rows.index)
    own = rows[SNR].where(rows["num_augmentations"] == 0)
    return rows.assign(**{SNR_PLAIN: plain.fillna(own)})


def _cycle(items: tuple[str, ...], length: int) -> list[str]:
    return [items[i % len(items)] for i in range(length)]
