"""The gain from the private data: a score's difference to the network before training, paired by repeat.

A network that is as good as its public start has learned nothing from the private records, however high its
score. So the tables show the difference of each trial's score to the score of the same network before
training (at its public start; at random weights if it has none), with its standard error over repeats, each
with its own public seed. Only the answer decides whether a gain is distinguishable from chance.
"""

from __future__ import annotations

import pandas as pd

from dashboards.compose.display_names import score_names
from dashboards.compose.references import start_of

GAIN = "_private_gain"
"""Ending of the column of a score's gain."""


def with_gains(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials with a column for the gain (a fraction) of each score whose start was scored.

    A trial that was not trained has no gain, because it is the start. A series over steps has none either.
    """
    if "repeat" not in trials or "step" in trials:
        return trials
    is_trained = trials["num_steps"] > 0 if "num_steps" in trials else pd.Series(True, trials.index)
    starts = {score: start[1] for score in score_names(trials) if (start := start_of(trials, score))}
    gains = {f"{score}{GAIN}": (trials[score] - start).where(is_trained) for score, start in starts.items()}
    return trials.assign(**gains)
