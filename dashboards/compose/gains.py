"""What the private data add: the difference of a score to the network before training, paired by repeat.

A network that is as good as its public start has learned nothing of the private records, however high its
score. So the tables show the difference of each trial's score to the score of the same network before
training (at its public start; at random weights where it has none), with its standard error over repeats,
each with its own public seed. Whether a gain is distinguishable from chance is said by the answer alone.
"""

from __future__ import annotations

import pandas as pd

from dashboards.compose.display_names import score_names
from dashboards.compose.references import start_of

GAIN = "_private_gain"
"""What the column of a score's gain ends with."""


def with_gains(shown: pd.DataFrame) -> pd.DataFrame:
    """Return the trials with a column for the gain of each score whose start is known, a fraction.

    A trial that was not trained has no gain: it is the start. A series has none either.
    """
    if "repeat" not in shown or "step" in shown:
        return shown
    trained = shown["num_steps"] > 0 if "num_steps" in shown else pd.Series(True, shown.index)
    starts = {score: start_of(shown, score) for score in score_names(shown)}
    gains = {f"{name}{GAIN}": (shown[name] - each[1]).where(trained) for name, each in starts.items() if each}
    return shown.assign(**gains)
