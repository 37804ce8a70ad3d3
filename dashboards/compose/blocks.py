"""Which settings differ, with the best one picked after looking: Tukey's test in randomised blocks.

The best of k settings is picked because it is the best, so its lead has to be larger than that of a setting
which was named beforehand. A repeat is a block: its trainings share initial values and scored records. So
with scores y[j, i] of repeat j and setting i, the two-way layout y = setting + repeat + rest is fitted, and
the studentised range (Tukey 1949) of all settings and the network before training, k + 1 treatments in all,
covers every difference that is looked at: on settings that are all alike, some difference is called
resolved in at most a share `LEVEL` of the sweeps.

*The network before training* may spread otherwise than trained ones do. So the variance of a difference to it
is put together of two independent parts, with degrees of freedom by Welch and Satterthwaite: of the mean over
settings against it, from that difference in each repeat alone, and of the setting against that mean, from the
rest of the two-way layout.

*Settings that spread unequally*: where a difference spreads more over repeats than the layout says, its own
variance is taken. And what is called resolved is also above twice the standard error of its own paired
differences, the bar of the tables (`dashboards.compose.differences`), so the tables never resolve less.

One repeat has no rest, and resolves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dashboards.compose.differences import is_resolved

LEVEL = 0.05
HIGHER, LOWER, NOT_RESOLVED = "higher", "lower", "not resolved"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference of two mean scores over the same repeats, a fraction.

    Attributes:
      minus: what is subtracted, for readers.
      mean: of the difference.
      verdict: "higher", "lower" or "not resolved", corrected for all that was compared.
    """

    minus: str
    mean: float
    verdict: str

    @property
    def is_resolved(self) -> bool:
        """Whether it is told from zero."""
        return self.verdict != NOT_RESOLVED

    def text(self) -> str:
        """Return it in percentage points.

        >>> Difference(minus="S = 16", mean=0.003, verdict="not resolved").text()
        '+0.30 points over S = 16 (not resolved)'
        """
        return (
            f"{100 * self.mean:+.2f} points over {self.minus} ({'' if self.is_resolved else 'not '}resolved)"
        )


@dataclass(frozen=True)
class Blocks:
    """Scores of settings over complete repeats.

    Attributes:
      scores: [repeats, settings].
      starts: the network before each setting's training, [repeats, settings]; None where it was not scored.
    """

    scores: NDArray[np.float64]
    starts: NDArray[np.float64] | None = None

    def between(self, one: int, other: int, name: str) -> Difference:
        """Return the difference of two settings; `name` is that of the second one."""
        difference = self.scores[:, one] - self.scores[:, other]
        return self._judged(difference, name, 2 * self._rest, self._degrees)

    def over_start(self, setting: int, name: str) -> Difference | None:
        """Return the difference of a setting to the network before it; None where that was not scored."""
        if self.starts is None:
            return None
        start = self.starts[:, setting]
        shared = _variance(self.scores.mean(axis=1) - start)
        own = self._rest * (1 - 1 / self._num_settings)
        parts = [part**2 / n for part, n in ((shared, len(start) - 1), (own, self._degrees)) if part and n]
        degrees = (shared + own) ** 2 / sum(parts) if parts else 0.0
        return self._judged(self.scores[:, setting] - start, name, shared + own, degrees)

    @property
    def _num_settings(self) -> int:
        return int(self.scores.shape[1])

    @property
    def _degrees(self) -> int:
        return (len(self.scores) - 1) * (self._num_settings - 1)

    @cached_property
    def _rest(self) -> float:
        """The variance of one score that neither setting nor repeat explains."""
        if not self._degrees:
            return 0.0
        of_settings, of_repeats = self.scores.mean(axis=0), self.scores.mean(axis=1, keepdims=True)
        rest = self.scores - of_settings - of_repeats + self.scores.mean()
        return float((rest**2).sum() / self._degrees)

    def _judged(
        self, difference: NDArray[np.float64], name: str, variance: float, degrees: float
    ) -> Difference:
        mean, n, own = float(difference.mean()), len(difference), _variance(difference)
        clear = n > 1 and is_resolved(mean, math.sqrt(own / n))
        if clear and (largest := max(variance, own)):
            ratio = abs(mean) / math.sqrt(largest / 2 / n)
            clear = _chance(ratio, self._num_settings + (self.starts is not None), degrees) < LEVEL
        verdict = (HIGHER if mean > 0 else LOWER) if clear else NOT_RESOLVED
        return Difference(minus=name, mean=mean, verdict=verdict)


def _variance(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def _chance(ratio: float, num_treatments: int, degrees: float) -> float:
    """Return how often the range of so many equal treatments, over its own error, is at least `ratio`."""
    from scipy.stats import studentized_range  # a second to import, which `--help` should not pay

    return float(studentized_range.sf(ratio, num_treatments, degrees))
