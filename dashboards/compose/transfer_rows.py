"""Trials → one row for each trial and each data set on which its features were scored."""

from __future__ import annotations

import re

import pandas as pd

from dashboards.compose.display_names import score_title, without_prefix
from dashboards.dashboard_error import DashboardError
from dpgcl_core.release.metrics import DURING, REFERENCE_PREFIXES, Family, scores_of

PROBE = "probe_dataset"
_TRANSFER = re.compile(
    rf"(?P<reference>{'|'.join(REFERENCE_PREFIXES)}|)transfer_(?P<score>\w+)/(?P<dataset>.+)"
)


def by_probe(trials: pd.DataFrame) -> pd.DataFrame:
    """Return a row for every trial and every data set that it was scored on, named in column `probe_dataset`.

    `transfer_knn_accuracy/digits` becomes `knn_accuracy` in the row of digits; references are treated
    likewise. The scores on the sweep's own data set have a separate row. Its scores of image-caption pairs
    (recalls, zero-shot accuracy) are dropped if no other data set has them.

    Args:
      trials: trials from `dashboards.query.trial_frames.load_trials`.

    Raises:
      DashboardError: no trial was scored on another data set.
    """
    matches = {str(name): match for name in trials if (match := _TRANSFER.fullmatch(str(name)))}
    if not matches:
        raise DashboardError(
            "no trial was scored on another data set; run a sweep with --probe-datasets, or draw another "
            "question"
        )
    own_scores = [name for name in trials if score_title(without_prefix(str(name)))]
    settings = trials.drop(columns=[*matches, *own_scores])
    pair_scores = scores_of(Family.PAIRS, Family.CLASS_NAMES, Family.CAPTIONS)
    unshared = {*pair_scores} - {match["score"] for match in matches.values()}
    own_only = [name for name in own_scores if without_prefix(str(name)).removesuffix(DURING) in unshared]
    parts = []
    if len(own_scores) > len(own_only) and "scored_on" in trials:
        scored_trials = trials[trials["scored_on"].notna()].drop(columns=[*matches, *own_only])
        parts.append(scored_trials.assign(**{PROBE: scored_trials["scored_on"].map(_last_path_part)}))
    for dataset in dict.fromkeys(match["dataset"] for match in matches.values()):
        renamed = {
            match["reference"] + match["score"]: trials[name]
            for name, match in matches.items()
            if match["dataset"] == dataset
        }
        scored_trials = settings.assign(**renamed, **{PROBE: dataset})
        parts.append(scored_trials[scored_trials[list(renamed)].notna().any(axis=1)])
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _last_path_part(dataset: str) -> str:
    """Return the last part of a path.

    >>> _last_path_part("npz:/data/faces.npz"), _last_path_part("digits")
    ('faces.npz', 'digits')
    """
    return re.split(r"[\\/]", dataset.rstrip("/\\"))[-1]
