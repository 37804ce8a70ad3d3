"""Trials → the panels of a figure: scores against the axis, and the gradient's SNR."""

from __future__ import annotations

import dataclasses
import math

import pandas as pd

from dashboards.compose.axes import Ticks, ticks_of
from dashboards.compose.content import Curve, Panel
from dashboards.compose.curves import MARKERS, curve, split
from dashboards.compose.display_names import (
    SNR,
    SNR_PLAIN,
    common_scores,
    has_values,
    panel_scores,
    score_title,
    value_text,
)
from dashboards.compose.questions import Question
from dashboards.compose.references import lines_across, points_along
from dpgcl_core.release.metrics import DURING

SCORES, GRADIENT_SNR = "Scores", "Gradient SNR"
RELATIVE_LOSS = "relative_loss"
_PANELS_IN_A_ROW = 2
_LEAST_SPAN = 4.0
"""The smallest span of a score axis, in points, however small the errors: 0.25 points are no trend."""
_FEW_CURVES = 3
"""Up to this number of groups, SNRs are drawn with and without augmentation; more would overlap."""


def axis_rows(trials: pd.DataFrame, question: Question) -> list[list[Panel]]:
    """Return the panels of scores against the axis, then the SNR panel if requested."""
    ticks = ticks_of(question.axis, trials[question.axis.column])
    panels = [_score_panel(trials, name, question, ticks) for name in panel_scores(common_scores(trials))]
    rows = _in_rows(panels)
    if question.snr and (snr := _snr_panel(trials, question, ticks)):
        rows.append([snr])
    return rows


def series_rows(trials: pd.DataFrame, question: Question) -> list[list[Panel]]:
    """Return the panels of the scores and the loss recorded during training, against the step."""
    ticks = ticks_of(question.axis, trials[question.axis.column])
    names = [name for name in question.series if name.endswith(DURING) and has_values(trials, name)]
    panels = [_score_panel(trials, name, question, ticks) for name in panel_scores(names)]
    if has_values(trials, RELATIVE_LOSS):
        curves = [
            curve(rows, RELATIVE_LOSS, ticks, style, scale=1, dense=True)
            for style, rows in split(trials, question)
            if has_values(rows, RELATIVE_LOSS)
        ]
        label = "Loss / loss at the first step"
        panels.append(Panel(legend=SCORES, y_label=label, axis=ticks, curves=curves))
    return _in_rows([dataclasses.replace(panel, legend="Curves") for panel in panels])


def _side_by_side(panel: Panel) -> Panel:
    """Return a panel in which different curves' points of one category are shifted apart."""
    if not panel.axis.categorical:
        return panel
    curves_by_position: dict[float, list[int]] = {}
    for index, line in enumerate(panel.curves):
        for x in dict.fromkeys(line.x):
            curves_by_position.setdefault(x, []).append(index)

    def shift(x: float, index: int) -> float:
        indices = curves_by_position[x]
        return x + (indices.index(index) - (len(indices) - 1) / 2) * min(0.2, 0.7 / len(indices))

    curves = [
        dataclasses.replace(line, x=[shift(x, index) for x in line.x])
        for index, line in enumerate(panel.curves)
    ]
    return dataclasses.replace(panel, curves=curves)


def _in_rows(panels: list[Panel]) -> list[list[Panel]]:
    """Return the panels in rows of `_PANELS_IN_A_ROW`."""
    starts = range(0, len(panels), _PANELS_IN_A_ROW)
    return [panels[start : start + _PANELS_IN_A_ROW] for start in starts]


def with_relative_loss(series: pd.DataFrame) -> pd.DataFrame:
    """Return a series with `relative_loss`: each loss divided by that at its trial's first recorded step."""
    if "train_loss" not in series:
        return series
    series = series.reset_index(drop=True)
    values = series.dropna(subset=["train_loss"]).sort_values("step")
    first = values.groupby("run_id")["train_loss"].transform("first")
    return series.assign(**{RELATIVE_LOSS: values["train_loss"] / first.where(first != 0)})


def _score_panel(trials: pd.DataFrame, metric: str, question: Question, ticks: Ticks) -> Panel:
    """Return the panel of one score against the axis, with its baselines."""
    curves = [
        curve(rows, metric, ticks, style, scale=100, dense=question.axis.dense)
        for style, rows in split(trials, question)
    ]
    curves += [
        curve(rows, column, ticks, style, scale=100, dense=False)
        for style, column, rows in points_along(trials, metric, question)
    ]
    panel = Panel(
        legend=SCORES,
        y_label=f"{score_title(metric)} (%)",
        axis=ticks,
        curves=[line for line in curves if line.x],
        references=lines_across(trials, metric, question),
        least_span=least_span(curves),
    )
    return _side_by_side(panel)


def least_span(curves: list[Curve]) -> float:
    """Return the smallest span of a score axis, in points: ± 2 standard errors of a difference.

    The difference is treated as unpaired. The span is at least `_LEAST_SPAN` points, because the error is
    unknown for one repeat, and unreliable for few repeats.
    """
    errors = [error for line in curves for error in line.standard_error if math.isfinite(error)]
    return max(4 * math.sqrt(2) * max(errors, default=0.0), _LEAST_SPAN)


def _snr_panel(trials: pd.DataFrame, question: Question, ticks: Ticks) -> Panel | None:
    """Return the panel of the gradient's SNR at the first step; None if no trial with noise recorded it."""
    noised_trials = trials[trials["target_epsilon"] < math.inf]
    splits = [name for name in question.splits if name != "num_augmentations"]
    unsplit_question = dataclasses.replace(question, splits=splits)
    groups = split(noised_trials, unsplit_question) if len(noised_trials) else []
    # Properties that dashes distinguish in the scores, for example sampling, have different markers here.
    dashes = list(dict.fromkeys(style.dash for style, _ in groups))
    curves = []
    for style, rows in groups:
        prefix = f"{style.label}, " if len(groups) > 1 else ""
        marker = MARKERS[dashes.index(style.dash) % len(MARKERS)] if len(dashes) > 1 else style.marker
        parts = _snr_parts(rows)
        if len(groups) > _FEW_CURVES:  # the table has the values without augmentation
            parts = [row for row in parts if row[1] == SNR] or parts
        alone_in_group = len(groups) > _FEW_CURVES and len(parts) == 1
        for label, metric, dash, part in parts:
            curve_style = dataclasses.replace(
                style,
                label=style.label if alone_in_group else prefix + label,
                dash=dash if len(parts) > 1 else style.dash,
                marker=marker,
                hollow=metric == SNR_PLAIN or style.hollow,
            )
            curves.append(curve(part, metric, ticks, curve_style, scale=1, dense=False))
    if not curves:
        return None
    return Panel(
        legend=GRADIENT_SNR,
        y_label="Gradient SNR, first step",
        axis=ticks,
        curves=curves,
        log_y=True,
    )


def _snr_parts(rows: pd.DataFrame) -> list[tuple[str, str, str, pd.DataFrame]]:
    """Return label, metric, dash and trials of each SNR curve: with augmentation per N_a, and without."""
    parts = []
    if "num_augmentations" in rows:
        counts = sorted((count for count in rows["num_augmentations"].unique() if count > 0), reverse=True)
        for index, count in enumerate(counts):
            part = rows[rows["num_augmentations"] == count]
            if has_values(part, SNR):
                dash = ("solid", "dashed", "dashdot")[index % 3]
                parts.append((f"with augmentation, Nₐ = {value_text(count)}", SNR, dash, part))
    plain = _fill_plain_snr(rows)
    if has_values(plain, SNR_PLAIN):
        parts.append(("without augmentation", SNR_PLAIN, "dotted", plain))
    return parts


def _fill_plain_snr(rows: pd.DataFrame) -> pd.DataFrame:
    """Fill the column of SNRs without augmentation from trials that were trained without any."""
    if SNR not in rows or "num_augmentations" not in rows:
        return rows
    plain = rows[SNR_PLAIN] if SNR_PLAIN in rows else pd.Series(math.nan, index=rows.index)
    values = rows[SNR].where(rows["num_augmentations"] == 0)
    return rows.assign(**{SNR_PLAIN: plain.fillna(values)})
