"""What the private data add: the paired difference to the public start, and how much of it privacy leaves.

A network that is as good as its public start has learned nothing of the private records, however high its
score. So the tables show the difference of each trial's score to the score of the same network before
training (at its public start; at random weights where it has none), with its standard error over repeats,
each with its own public seed. Its share is of what the same compute gains without privacy. Whether a gain is
distinguishable from chance is said by the answer alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pandas as pd

from dashboards.compose.questions import Question
from dashboards.compose.references import NETWORK, start_of
from dashboards.compose.repeats import mean_and_error
from dashboards.compose.selection import ORDER, PROVEN, SAMPLED

NON_PRIVATE = "non_private"
# Where ε = ∞ is a place on the axis, or a row of its own: it is held against every other one.
_NON_PRIVATE_APART = ("target_epsilon", "noise_multiplier", "method")


class Gain(NamedTuple):
    """The paired difference of a score to its start, a fraction.

    Attributes:
      mean, standard_error, num_repeats: over repeats; the error of one is NaN.
      share: of the gain without privacy; NaN where either is not positive, or where this one is not private.
    """

    mean: float
    standard_error: float
    num_repeats: int
    share: float = math.nan

    def text(self, *, is_private: bool) -> str:
        """Return it in percentage points, for a table.

        >>> Gain(mean=0.021, standard_error=0.002, num_repeats=3, share=0.5).text(is_private=True)
        '2.10 ± 0.20 (50 %)'
        """
        if not self.num_repeats:
            return "–"
        number = f"{100 * self.mean:.2f}"
        number += "" if math.isnan(self.standard_error) else f" ± {100 * self.standard_error:.2f}"
        if not is_private:
            return f"{number}, not private"
        return number + ("" if math.isnan(self.share) else f" ({100 * self.share:.0f} %)")


def gain_of(rows: pd.DataFrame, score: str, shown: pd.DataFrame, question: Question) -> Gain | None:
    """Return the gain of the trials of one point; None where nothing was trained, or scored before.

    Args:
      rows: of one point, from `dashboards.compose.selection.shown_trials`.
      score: that is asked for.
      shown: all trials, for those without privacy.
      question: of the figure.
    """
    if "num_steps" in rows and (rows["num_steps"] == 0).all():  # it is the start
        return None
    own = _paired_gain(rows, score)
    if own is None or not own[2]:
        return None
    peers = _without_privacy(rows, shown, question)
    best = None if peers is None else _paired_gain(peers, score)
    private = bool((rows["guarantee"] == PROVEN).all())
    positive = private and best is not None and min(own[0], best[0]) > 0
    return Gain(*own, share=own[0] / best[0] if best is not None and positive else math.nan)


def has_gains(shown: pd.DataFrame, score: str) -> bool:
    """Return whether repeats of a score are there with what they started from."""
    return "repeat" in shown and "step" not in shown and start_of(shown, score) is not None


def _paired_gain(rows: pd.DataFrame, score: str) -> tuple[float, float, int] | None:
    start = start_of(rows, score)
    if start is None or score not in rows:
        return None
    return mean_and_error(rows.assign(gain=rows[score] - start[1]), "gain")


def _without_privacy(rows: pd.DataFrame, shown: pd.DataFrame, question: Question) -> pd.DataFrame | None:
    """Return the trials without privacy at the same point, or those that stand apart from the axis."""
    free = shown[shown["target_epsilon"] == math.inf]
    first = rows.iloc[0]
    if "num_steps" in free:
        free = free[free["num_steps"] > 0]
    if "method" in shown:
        own = free["method"] == first["method"]
        free = free[own if own.any() else free["method"] == NON_PRIVATE]
    if NETWORK in shown:  # another network's start is another one
        free = free[free[NETWORK] == first[NETWORK]]
    same = [name for name in question.curve_columns if name in shown]
    same = [name for name in same if name not in ("method", "target_epsilon", SAMPLED)]
    if question.axis.column not in _NON_PRIVATE_APART:
        same.append(ORDER)
    for name in same:
        free = free[free[name] == first[name]]
    return free if len(free) else None
