"""Which trials may be shown, which of them are private, and which settings must agree among repeats."""

from __future__ import annotations

import math

import pandas as pd

from dashboards.compose.display_names import value_text
from dashboards.compose.questions import Question
from dashboards.dashboard_error import DashboardError
from dpgcl_core.release.metrics import DURING, Release, declared_name, find_metric

PROVEN, AS_PUBLISHED, NO_GUARANTEE = "proven", "as-published", "none"
ORDER = "axis_order"
SAMPLED = "sampled"
# Settings that must not differ among the trials that are averaged as repeats.
_FIXED_IN_CELL = (
    *("dataset", "num_records_public", "sampling_prob", "num_steps", "target_delta", "l2_clip_norm"),
    *("temperature", "network_name", "embedding_dim", "optimizer_name", "learning_rate", "weight_decay"),
    *("group_size", "num_augmentations", "method", "target_epsilon", "lora_layers", "probe_dataset"),
    *("lora_rank", "lora_alpha", "pretrained", "augmentation", "trained_layers"),
)
# By the axis's column: columns that depend on it, and so need not agree among repeats.
_DEPENDENT_COLUMNS = {"noise_multiplier": ("target_epsilon",)}


def shown_trials(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the trials that may be drawn, with new columns `guarantee` and `axis_order` (order on the axis).

    For private data these are only the trials with a proven guarantee, without the columns of `is_withheld`.
    The training itself withholds these numbers; this is the second safeguard. Data count as private unless
    every trial is tagged `data_is: public`.

    Raises:
      DashboardError: a needed column is absent, repeats differ in a setting, or nothing is left.
    """
    columns = dict.fromkeys((question.axis.column, "target_epsilon"))
    missing = [name for name in columns if name not in trials]
    if missing:
        raise DashboardError(
            f"a figure of {question.heading} needs {', '.join(missing)} in every trial. Draw another "
            "question, or set the axis to the column in which the trials differ"
        )
    trials = released_trials(trials)
    for name in question.curve_columns:
        if name in trials and trials[name].isna().any():  # pandas would leave these trials out of every group
            trials[name] = trials[name].fillna(0 if name == "num_augmentations" else "not recorded")
        if name in trials and trials[name].map(type).nunique() > 1:  # 8 and "batch" cannot be sorted
            trials[name] = trials[name].map(str)
    if trials.empty:
        raise DashboardError(
            "no trial can be shown: the data are private and no trial has a finite target_epsilon with a "
            "proven guarantee"
        )
    trials[ORDER] = question.axis.orders(trials[question.axis.column])
    if question.kind != "search":
        _check_repeats(trials, question)
    return trials.sort_values(cell_columns(trials, question), ignore_index=True)


def released_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that may be shown, with a column `guarantee`, without the columns of `is_withheld`.

    For public data, all trials and columns remain. For private data, only trials with a proven guarantee do.
    A trial without a recorded ε or guarantee has no guarantee.
    """
    aims = trials["target_epsilon"] if "target_epsilon" in trials else pd.Series(math.inf, trials.index)
    frame = trials.assign(target_epsilon=pd.to_numeric(aims, errors="coerce").fillna(math.inf).astype(float))
    frame["guarantee"] = guarantees(frame)
    if not data_are_private(trials):
        return frame
    frame = frame[frame["guarantee"] == PROVEN]
    return frame.drop(columns=[name for name in frame if is_withheld(str(name))])


def guarantees(trials: pd.DataFrame) -> pd.Series:
    """Return the guarantee of each trial: "proven", "as-published" or "none"; "none" for ε = ∞."""
    if "guarantee_label" not in trials:
        return pd.Series(NO_GUARANTEE, index=trials.index)
    label = trials["guarantee_label"].where(trials["guarantee_label"].isin([PROVEN, AS_PUBLISHED]))
    return label.where(trials["target_epsilon"] < math.inf).fillna(NO_GUARANTEE)


def data_are_private(trials: pd.DataFrame) -> bool:
    """Return whether the data count as private: some trial lacks the tag `data_is: public`."""
    return "data_is" not in trials or bool((trials["data_is"] != "public").any())


def cell_columns(trials: pd.DataFrame, question: Question) -> list[str]:
    """Return the columns that distinguish the points of a figure, the axis first."""
    return [ORDER, *(name for name in question.curve_columns if name in trials), "guarantee"]


def is_withheld(name: str) -> bool:
    """Return whether a number depends on private records outside any mechanism.

    >>> [is_withheld(name) for name in ("snr_first_step", "relative_loss", "knn_accuracy_during", "epsilon")]
    [True, True, False, False]
    >>> is_withheld("training.num_restarts")  # the name in MLflow
    True
    """
    name = declared_name(name)
    metric = find_metric(name) or find_metric(name.removesuffix(DURING))
    return metric.release is Release.PRIVATE_ONLY if metric else name.endswith(("loss", DURING))


def _check_repeats(trials: pd.DataFrame, question: Question) -> None:
    """Raise DashboardError if trials of one point of the figure differ in another setting."""
    column = question.axis.column
    distinct_columns = {column, *question.splits, *_DEPENDENT_COLUMNS.get(column, ())}
    columns = [name for name in _FIXED_IN_CELL if name in trials and name not in distinct_columns]
    axes = ", ".join(dict.fromkeys((column, *question.curve_columns)))
    cells = cell_columns(trials, question)
    counts = trials.groupby(cells)[columns].nunique()
    for name in columns:
        if (counts[name] > 1).any():
            cell_key = dict(zip(cells, counts.index[int((counts[name] > 1).argmax())], strict=True))
            rows = trials[(trials[list(cell_key)] == pd.Series(cell_key)).all(axis=1)]
            values = ", ".join(value_text(value) for value in sorted(rows[name].dropna().unique(), key=str))
            raise DashboardError(
                f"trials with the same {axes} must be repeats of one another; at {column} "
                f"{value_text(rows[column].iloc[0])} they differ in {name} ({values}). Select the trials "
                f"first, or draw them against {name}"
            )
