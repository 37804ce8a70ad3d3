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
    """Return a row for every trial and every data set it was scored on, named in `probe_dataset`.

    `transfer_knn_accuracy/digits` becomes `knn_accuracy` in the row of digits; references are treated
    likewise. The trial's own scores stay in a separate row, named by their data set. Scores of pairs that no
    other data set has are dropped: the recalls, and zero-shot accuracy without class names.

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
    other_kinds = scores_of(Family.PAIRS, Family.CLASS_NAMES, Family.CAPTIONS)
    kinds = {*other_kinds} - {match["score"] for match in matches.values()}
    of_pairs = [name for name in own_scores if without_prefix(str(name)).removesuffix(DURING) in kinds]
    parts = []
    if len(own_scores) > len(of_pairs) and "scored_on" in trials:
        scored_trials = trials[trials["scored_on"].notna()].drop(columns=[*matches, *of_pairs])
        parts.append(scored_trials.assign(**{PROBE: scored_trials["scored_on"].map(_short)}))
    for dataset in dict.fromkeys(match["dataset"] for match in matches.values()):
        renamed = {
            match["reference"] + match["score"]: trials[name]
            for name, match in matches.items()
            if match["dataset"] == dataset
        }
        scored_trials = settings.assign(**renamed, **{PROBE: dataset})
        parts.append(scored_trials[scored_trials[list(renamed)].notna().any(axis=1)])
    return pd.concat([part for part in parts if len(part)], ignore_index=True)


def _short(dataset: str) -> str:
    """Return the last part of a path.

    >>> _short("npz:/data/faces.npz"), _short("digits")
    ('faces.npz', 'digits')
    """
    return re.split(r"[\\/]", dataset.rstrip("/\\"))[-1]
