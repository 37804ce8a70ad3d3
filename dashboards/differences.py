"""Which differences between group sizes are resolved: paired over repeats, against twice their error.

Two trials of one repeat start from the same network and are scored on the same records, so their
difference has far less spread than either score. A difference below two standard errors is reported as
"not resolved", whatever the means look like.
"""

from __future__ import annotations

import math

import pandas as pd

from dashboards.captions import has_values
from dashboards.panels import LABEL_SCORES, VIEW_SCORES, shown_trials
from dpgcl_core.grouping import BATCH

UNTRAINED = "untrained"
RESOLVED_AT = 2.0
_COLUMNS = ["score", "target_epsilon", "num_augmentations", "group_size", "minus"]


def differences_table(trials: pd.DataFrame) -> pd.DataFrame:
    """Returns the paired difference of every point to the untrained network, to `batch` and to the best S.

    Columns: the score, ε, N_a and S of the point, what is subtracted (`minus`), the mean difference, its
    standard error, the number of repeats, and `verdict`: "higher", "lower" or "not resolved". The best S
    is the numeric one with the highest mean.

    Raises:
      DashboardError: as `dashboards.panels.shown_trials`.
    """
    shown = shown_trials(trials)
    rows = []
    for score in [name for name in (*LABEL_SCORES, *VIEW_SCORES) if has_values(shown, name)]:
        for (epsilon, count), cell in shown.groupby(["target_epsilon", "num_augmentations"]):
            wide = cell.pivot_table(index="repeat", columns="group_size", values=score, sort=False)
            references = {}
            if has_values(cell, f"{UNTRAINED}_{score}"):
                references[UNTRAINED] = cell.groupby("repeat")[f"{UNTRAINED}_{score}"].mean()
            if BATCH in wide:
                references[BATCH] = wide[BATCH]
            numeric = [size for size in wide if size != BATCH]
            if len(numeric) > 1:
                best = max(numeric, key=lambda size: wide[size].mean())
                references[f"best, S = {best}"] = wide[best]
            for size in wide:
                for name, reference in references.items():
                    if name not in (str(size), f"best, S = {size}"):
                        point = (score, epsilon, count, size, name)
                        difference = (wide[size] - reference).dropna()
                        rows.append(dict(zip(_COLUMNS, point, strict=True)) | _verdict(difference))
    return pd.DataFrame(rows)


def _verdict(difference: pd.Series) -> dict[str, float | int | str]:
    """The mean, its standard error, n and the verdict.

    >>> _verdict(pd.Series([0.02, 0.03, 0.04]))["verdict"], _verdict(pd.Series([0.02, -0.03]))["verdict"]
    ('higher', 'not resolved')
    """
    n, mean = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    resolved = n > 1 and abs(mean) > RESOLVED_AT * error
    verdict = ("higher" if mean > 0 else "lower") if resolved else "not resolved"
    return {"difference": mean, "standard_error": error, "num_repeats": n, "verdict": verdict}
