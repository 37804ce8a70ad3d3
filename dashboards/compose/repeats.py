"""Statistics over repeats: mean, standard error, and number of trials."""

from __future__ import annotations

import math

import pandas as pd


def mean_and_error(trials: pd.DataFrame, metric: str) -> tuple[float, float, int]:
    """Return the mean over repeats, its standard error (NaN for one repeat) and the number of repeats.

    Trials of the same repeat are averaged first: they share the network's initial values, so they are not
    independent evidence.

    >>> mean_and_error(pd.DataFrame({"repeat": [0, 1, 1], "score": [1.0, 2.0, 4.0]}), "score")
    (2.0, 1.0, 2)
    """
    values = trials[metric].dropna()
    if "repeat" in trials:
        values = values.groupby(trials.loc[values.index, "repeat"]).mean()
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    return mean, float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan, n


def means_and_errors(trials: pd.DataFrame, by: list[str], metric: str) -> pd.DataFrame:
    """Return `mean_and_error` of each group of trials that has a value: columns `mean`, `error` and `n`."""
    values = trials.dropna(subset=[metric])
    if "repeat" in trials:
        values = values.groupby([*by, "repeat"])[metric].mean().reset_index()
    statistics = values.groupby(by)[metric].agg(["mean", "std", "count"])
    errors = statistics["std"] / statistics["count"] ** 0.5
    return pd.DataFrame({"mean": statistics["mean"], "error": errors, "n": statistics["count"]})


def num_trials(rows: pd.DataFrame) -> int:
    """Count trials; a series, or scores on several data sets, give one trial several rows."""
    return int(rows["run_id"].nunique()) if "run_id" in rows else len(rows)
