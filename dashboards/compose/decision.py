"""The one decision rule: which differences of a sweep are distinguishable from chance.

A score has two sources of chance. *Repeats* differ in initial values, sampling and noise. *Test records* are
a finite sample of the population that the score describes. Let y[s, i, r] be the outcome of record r under
setting i in repeat s, and D = y[·, i, ·] − y[·, j, ·] the difference of two settings over R repeats and n
records. All settings have the same repeats and records. With the mean squares (MS) of D by repeat, by record
and of their interaction,

    Var(mean of D) = (MS_repeat + MS_record − MS_repeat×record) / (R n),

but at least each of its first two terms. `MS_repeat / n` is twice the residual of the two-way layout
setting × repeat, pooled over settings, and at least the known noise of a noised score. `MS_record` is
computed for the pair. Scores whose records may not be kept use only repeats, scores of one repeat use only
records, and a search uses the repeats within its settings.

*Critical values* for a variance in several parts are a mean of the critical values at each part's degrees of
freedom, weighted by the parts (Cochran and Cox, 1957). Satterthwaite's degrees of freedom are themselves
estimates: with two repeats, they gave a verdict in 7 of 100 sweeps of equal settings.

*The best setting* is decided by Hsu's multiple comparisons with the best (1984): a setting is
distinguishable from the best setting if their difference exceeds Dunnett's one-sided critical value for
k − 1 comparisons at `LEVEL`. A winner is distinguishable from all others. Among a few equal settings, one
could win too often, so the critical value is raised until that happens in half of `LEVEL`.

*A gain over the start* (the network before training) is judged by Dunnett's critical value for k
comparisons at the other half. The start's spread may differ from that of trained networks, and a public start
does not spread at all. So the variance of the gain has two independent parts: the variance of the mean over
settings against its start, from only the repeats, and the variance of the setting against that mean.

*Guarantee*: among sweeps whose settings and start are all equal, at most a share `LEVEL` has a winner or a
gain that is called distinguishable; docs/results.md has the simulation (`python benchmarks/decision.py`).
Comparisons at several ε divide `LEVEL` among them. All settings are assumed to spread equally over repeats;
the page describes the effect if they do not. The k-NN index and the probes' training records are taken as
given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

Array = NDArray[np.float64]
Part = tuple[float, int]
"""One summand of a variance, and the degrees of freedom of its estimate."""

LEVEL = 0.05
LEVEL_SHARE = 0.5
"""The share of `LEVEL` for wrongly declared winners, and that for wrongly declared gains."""
HIGHER, LOWER, WITHIN_NOISE = "higher", "lower", "within noise"
MAX_COST_SHARE = 2 / 3
"""A setting may replace a better one if it costs at most this share of the other's ε or compute."""
MOST_REPEATS = 100
"""The largest number of repeats that `Layout.repeats_to_show` tries."""
_CORRELATION = 0.5
_NODES, _QUANTILES = 48, 1000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A difference of two mean scores (fractions, not per cent), and whether it is beyond chance.

    Attributes:
      minus: name of the subtracted score, for readers.
      mean: the mean difference.
      standard_error: its standard error from all known sources of chance; None if none is known.
      verdict: "higher", "lower" or "within noise", corrected for the number of comparisons.
      smallest: the smallest difference that would be distinguishable from zero; None if none would be.
    """

    minus: str
    mean: float
    standard_error: float | None
    verdict: str
    smallest: float | None

    @property
    def is_distinguishable(self) -> bool:
        """Whether the difference is distinguishable from zero."""
        return self.verdict != WITHIN_NOISE

    def text(self) -> str:
        """Return the difference in percentage points, with its standard error and verdict.

        >>> Comparison(
        ...     minus="S = 16", mean=0.003, standard_error=0.002, verdict="within noise", smallest=0.01
        ... ).text()
        '+0.30 ± 0.20 points over S = 16 (within noise)'
        """
        if self.standard_error is None:
            return f"{100 * self.mean:+.2f} points over {self.minus}"
        verdict = "distinguishable" if self.is_distinguishable else WITHIN_NOISE
        number = f"{100 * self.mean:+.2f} ± {100 * self.standard_error:.2f}"
        return f"{number} points over {self.minus} ({verdict})"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one training of a setting.

    Attributes:
      epsilon: the target ε; an infinite ε is None in files, because JSON has no infinity.
      num_views: number of views that pass the network over the training; zero if views of different networks
        or methods cannot be compared.
    """

    epsilon: Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]
    num_views: float = 0.0

    def saves_over(self, reference: Cost) -> bool:
        """Return whether this cost saves a third of the reference's ε or views, and exceeds neither of them.

        >>> Cost(epsilon=1.0, num_views=60).saves_over(Cost(epsilon=1.0, num_views=100))
        True
        """
        dearer = self.epsilon > reference.epsilon or self.num_views > reference.num_views
        return not dearer and bool(self.saving_text(reference))

    def saving_text(self, reference: Cost) -> str:
        """Return a saving of a third or more over a reference, such as "40 % of the compute"; else empty."""
        savings = []
        for cost, reference_cost, name in (
            (self.num_views, reference.num_views, "compute"),
            (self.epsilon, reference.epsilon, "ε"),
        ):
            if reference_cost and math.isfinite(reference_cost) and cost <= MAX_COST_SHARE * reference_cost:
                savings.append(f"{100 * (1 - cost / reference_cost):.0f} % of {'the ' * (name != 'ε')}{name}")
        return " and ".join(savings)


@dataclass(frozen=True)
class RecordSpread:
    """The covariances of outcomes over test records.

    An outcome is a record's contribution to a score. The columns are the settings, followed by the starts if
    these were scored by record.

    Attributes:
      num_records: number n of test records.
      between: covariance over records of the outcomes' means over repeats, `[columns, columns]`.
      interaction: covariance of the part that neither record nor repeat explains, `[columns, columns]`; zero
        for one repeat.
    """

    num_records: int
    between: Array
    interaction: Array

    @classmethod
    def of(cls, outcomes: Array) -> RecordSpread:
        """Return the spread of `outcomes`, shaped `[repeats, columns, records]`."""
        num_repeats, num_columns, num_records = outcomes.shape
        between = np.atleast_2d(np.cov(outcomes.mean(axis=0)))
        interaction = np.zeros((num_columns, num_columns))
        if num_repeats > 1:
            errors = outcomes - outcomes.mean(axis=0) - outcomes.mean(axis=2, keepdims=True)
            errors += outcomes.mean(axis=(0, 2))[:, None]
            interaction = np.einsum("sir,sjr->ij", errors, errors) / ((num_repeats - 1) * (num_records - 1))
        return cls(num_records, between, interaction)


@dataclass(frozen=True)
class Layout:
    """Scores of k settings over the repeats that all settings have, with what is known about their chance.

    Attributes:
      scores: `[repeats, settings]`.
      starts: scores of the network before each setting's training, `[repeats, settings]`; None if not scored.
      records: the spread over records of public evaluation sets; None if no outcomes were kept.
      noise_variance: known variance of the noise that was added to one score.
      level: the allowed probability of a wrong verdict if all settings are equal; `LEVEL` or a part of it.
      within: only for settings that do not share repeats: variance of one score within settings, and its
        degrees of freedom; `scores` then has one row of means.
      counts: number of repeats of each setting; only with `within`.
      within_gains: like `within`, for one score minus its start, with the degrees of freedom of one setting;
        `starts` then has one row of means.
    """

    scores: Array
    starts: Array | None = None
    records: RecordSpread | None = None
    noise_variance: float = 0.0
    level: float = LEVEL
    within: tuple[float, int] | None = None
    counts: Sequence[int] = ()
    within_gains: tuple[float, int] | None = None

    @property
    def means(self) -> Array:
        """Mean score of each setting, `[settings]`."""
        means: Array = self.scores.mean(axis=0)
        return means

    @property
    def sources(self) -> str:
        """Sources of the chance estimate: "repeats and test records", either of them, or "nothing"."""
        repeats = self.within[1] > 0 if self.within else len(self.scores) > 1
        sources = ["repeats"] * repeats + ["test records"] * (self.records is not None)
        return " and ".join(sources) or "nothing"

    def between(self, setting: int, control: int, name: str) -> Comparison:
        """Return the mean score of a setting minus that of another setting, the control, named `name`."""
        parts = self._parts(self._repeat_part(setting, control), *self._record_variances(setting, control))
        mean = float(self.means[setting] - self.means[control])
        return _compare(mean, name, parts, self._critical_value_of_pairs)

    def recommend(self, costs: Sequence[Cost]) -> int:
        """Return the index of the setting to take: the highest mean, or a cheaper setting near it.

        The cheaper setting is the cheapest of those whose mean is at most one standard error of the
        difference below the highest, and which save a third of its ε or compute. The setting with the lowest
        mean is never taken in its place. `costs` has the cost of each setting.
        """
        means = self.means
        best = int(means.argmax())
        savers = []
        for setting in range(self._num_settings):
            error = self.between(best, setting, "").standard_error if setting != best else None
            if error is not None and means[best] - means[setting] <= error and means[setting] > means.min():
                savers += [setting] if costs[setting].saves_over(costs[best]) else []
        return min(savers, key=lambda i: (costs[i].epsilon, costs[i].num_views, -means[i]), default=best)

    def over_start(self, setting: int, name: str) -> Comparison | None:
        """Return a setting's mean minus that of its start, which is named `name`; None if none was scored."""
        if self.starts is None:
            return None
        start = self.starts[:, setting]
        mean = float(self.means[setting] - start.mean())
        if self.within_gains is not None:
            return self._unpaired_gain(setting, mean, name)
        num_repeats, shared, repeat_parts = len(start), 0.0, list[Part]()
        if num_repeats > 1:
            shared = float((self.scores.mean(axis=1) - start).var(ddof=1)) / num_repeats
            residual = max(self._residual, self.noise_variance) * (1 - 1 / self._num_settings) / num_repeats
            repeat_parts = [(shared, num_repeats - 1), (residual, self._residual_degrees)]
        parts = self._parts(repeat_parts, *self._record_variances(setting, self._num_settings + setting))
        total = sum(variance for variance, _ in parts)
        # All gains share a part of their variance, which may correlate them more than 0.5, Dunnett's value.
        correlation = max(_CORRELATION, math.floor(20 * shared / total) / 20 if total else 0.0)
        k, level = self._num_settings, LEVEL_SHARE * self.level
        return _compare(
            mean, name, parts, lambda degrees: critical_value(k, degrees, level, min(correlation, 0.95))
        )

    def _unpaired_gain(self, setting: int, mean: float, name: str) -> Comparison:
        """Return a setting's gain over its start if settings are not known to share their repeats."""
        assert self.within_gains is not None
        variance, degrees = self.within_gains
        if not degrees:
            return _compare(mean, name, [], lambda _: math.inf)
        part = max(variance, self.noise_variance) / self.counts[setting], degrees
        value = critical_value_of_any_share(self._num_settings, degrees, LEVEL_SHARE * self.level)
        return _compare(mean, name, [part], lambda _: value)

    def repeats_to_show(self, setting: int, control: int) -> int | None:
        """Return how many repeats would distinguish the present difference; None if too many or unknown."""
        difference, num_repeats = abs(float(self.means[setting] - self.means[control])), len(self.scores)
        repeat_parts = self._repeat_part(setting, control)
        records, interaction = self._record_variances(setting, control)
        if not repeat_parts or self.within is not None or not difference:
            return None
        ((variance, degrees),) = repeat_parts
        for number in range(num_repeats + 1, MOST_REPEATS + 1):
            share = num_repeats / number
            part = variance * share, degrees * (number - 1) // (num_repeats - 1)
            records_part = None if records is None else max(records - interaction, 0.0) + interaction * share
            parts = self._parts([part], records_part, interaction * share)
            if _compare(difference, "", parts, self._critical_value_of_pairs).is_distinguishable:
                return number
        return None

    @property
    def _num_settings(self) -> int:
        return int(self.scores.shape[1])

    def _critical_value_of_pairs(self, degrees: int) -> float:
        num_others = max(1, self._num_settings - 1)
        dunnett = critical_value(num_others, degrees, self.level)
        return max(dunnett, critical_value_of_winners(num_others, degrees, LEVEL_SHARE * self.level))

    @property
    def _residual_degrees(self) -> int:
        return (len(self.scores) - 1) * (self._num_settings - 1)

    @cached_property
    def _residual(self) -> float:
        """The variance of one score that neither its setting nor its repeat explains."""
        if not self._residual_degrees:
            return 0.0
        residuals = self.scores - self.means - self.scores.mean(axis=1, keepdims=True) + self.scores.mean()
        return float((residuals**2).sum() / self._residual_degrees)

    def _repeat_part(self, setting: int, control: int) -> list[Part]:
        """Return the repeats' part of a difference's variance; empty without degrees of freedom."""
        if self.within is not None:
            variance, degrees = self.within
            share = 1 / self.counts[setting] + 1 / self.counts[control]
            return [(max(variance, self.noise_variance) * share, degrees)] if degrees else []
        num_repeats = len(self.scores)
        if num_repeats < 2:
            return []
        variance = 2 * max(self._residual, self.noise_variance)
        return [(variance / num_repeats, self._residual_degrees)]

    def _record_variances(self, setting: int, control: int) -> tuple[float | None, float]:
        """Return the records' part of a difference's variance, and the summand that repeats contain, too.

        A start without outcomes by record counts as independent of the setting, with the variance of a 0/1
        outcome, which gives an upper bound.
        """
        if self.records is None:
            return None, 0.0
        spread, n = self.records, self.records.num_records
        if control >= len(spread.between):
            assert self.starts is not None
            start = float(self.starts[:, control - self._num_settings].mean())
            return (spread.between[setting, setting] + start * (1 - start)) / n, 0.0
        weights = np.zeros(len(spread.between))
        weights[setting], weights[control] = 1.0, -1.0
        between, interaction = (
            float(weights @ covariance @ weights) for covariance in (spread.between, spread.interaction)
        )
        return between / n, interaction / (len(self.scores) * n)

    def _parts(self, repeats: list[Part], records: float | None, interaction: float) -> list[Part]:
        """Return the summands of a difference's variance, which is at least the repeats' or records' part."""
        if records is None:
            return repeats
        assert self.records is not None
        by_repeats = sum(variance for variance, _ in repeats)
        remainder = max(records - interaction, 0.0, records - by_repeats) if repeats else records
        return [*repeats, (remainder, self.records.num_records - 1)]


def _compare(
    mean: float, name: str, parts: Sequence[Part], critical_value_at: Callable[[int], float]
) -> Comparison:
    """Return a difference with its verdict; within noise if its variance is unknown.

    Args:
      mean: the difference.
      name: name of the subtracted score.
      parts: independently estimated summands of the difference's variance.
      critical_value_at: function from degrees of freedom to the critical value of t.
    """
    if not parts:
        return Comparison(minus=name, mean=mean, standard_error=None, verdict=WITHIN_NOISE, smallest=None)
    variance = sum(part for part, _ in parts)
    error = math.sqrt(variance)
    weighted = sum(part * critical_value_at(degrees) for part, degrees in parts if part)
    smallest = weighted / error if error else 0.0
    verdict = WITHIN_NOISE if abs(mean) <= smallest else (HIGHER if mean > 0 else LOWER)
    return Comparison(minus=name, mean=mean, standard_error=error, verdict=verdict, smallest=smallest)


@lru_cache(maxsize=4096)
def critical_value(num_comparisons: int, degrees: float, level: float, correlation: float = 0.5) -> float:
    """Return Dunnett's one-sided critical value, for comparisons with equal correlations.

    It is the value that the largest of `num_comparisons` t statistics, with this many `degrees` of freedom
    and this pairwise `correlation`, exceeds with probability `level` if all differences are zero (Dunnett,
    1955).

    >>> round(critical_value(1, 10, 0.05), 2), round(critical_value(4, 20, 0.05), 2)
    (1.81, 2.3)
    """
    from scipy.special import ndtr  # scipy takes a second to import, which `--help` should not pay

    return _solve_t(
        lambda t: 1 - ndtr(t / math.sqrt(1 - correlation)) ** num_comparisons, degrees, level, correlation
    )


@lru_cache(maxsize=512)
def critical_value_of_any_share(num_comparisons: int, degrees: int, level: float) -> float:
    """Return the critical value for comparisons that share an unknown part of their variance.

    It is the largest of Dunnett's critical values over all possible shared parts: from none, where every
    comparison adds its degrees of freedom, to all, where the comparisons are identical.

    Args:
      num_comparisons: number of comparisons with one pooled variance.
      degrees: degrees of freedom of each single comparison.
      level: the probability that some comparison exceeds the critical value if all differences are zero.

    >>> [round(critical_value_of_any_share(number, 2, 0.02), 1) for number in (1, 6)]
    [4.8, 5.4]
    """
    values = [critical_value(1, degrees, level)]
    for share in np.arange(20) / 20:
        pooled = degrees / (share**2 + (1 - share) ** 2 / num_comparisons)
        correlation = max(float(share), _CORRELATION)
        values.append(critical_value(num_comparisons, math.floor(10 * pooled) / 10, level, correlation))
    return max(values)


@lru_cache(maxsize=4096)
def critical_value_of_winners(num_others: int, degrees: int, level: float) -> float:
    """Return the t by which one of several equal settings leads all others with probability `level`.

    >>> round(critical_value_of_winners(1, 10, 0.05), 2), round(critical_value_of_winners(4, 20, 0.05), 2)
    (2.23, 1.33)
    """
    from scipy.special import ndtr

    def winning_share(t: Array) -> Array:
        probability: Array = (num_others + 1) * ndtr(-t / math.sqrt(1 - _CORRELATION)) ** num_others
        return probability

    return _solve_t(winning_share, degrees, level, _CORRELATION)


def _solve_t(share: Callable[[Array], Array], degrees: float, level: float, correlation: float) -> float:
    """Return the t ≥ 0 at which an event has probability `level`; zero if it has no more at t = 0.

    Args:
      share: function from t (times the estimated scale) plus the comparisons' common normal summand,
        `[scales, nodes]`, to the probability of the event given these.
      degrees: degrees of freedom of the variance.
      level: the required probability.
      correlation: correlation of the comparisons, which is the variance of their common summand.
    """
    from scipy.optimize import brentq
    from scipy.special import gammaincinv

    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    probabilities = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    scales = np.sqrt(2 * gammaincinv(degrees / 2, probabilities) / degrees)[:, None]

    def excess(value: float) -> float:
        shares = share(value * scales + math.sqrt(correlation) * nodes)
        return float((shares @ weights).mean() / weights.sum()) - level

    return float(brentq(excess, 0.0, 1e4, xtol=1e-4)) if excess(0.0) > 0 else 0.0
