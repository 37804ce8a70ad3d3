"""Measure error rate, power and regret of the decision rule on simulated sweeps.

    python benchmarks/decision.py --num-sweeps 2000

Scores are drawn in closed form, as the sum of a setting's own mean, an effect of the repeat that all settings
share, an effect of setting and repeat, and effects of the test records, whose sample covariances are Wishart.
The error rate is for sweeps in which all settings and the start are equal. Power is for one setting that is 3
or 5 standard errors above all others. Regret is for settings that differ by about one standard error, in
standard errors.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from scipy.stats import studentized_range, wishart

from dashboards.compose.decision import LEVEL, Array, Cost, Layout, RecordSpread

SETTING_BY_RECORD, SHARED_BY_RECORD, REST = 0.02, 0.09, 0.05
"""Variances of a record's outcome: the part of one setting, the part of all settings, and chance."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind of sweep.

    Attributes:
      num_repeats, num_settings: numbers of repeats and settings.
      num_records: number of test records; 0 if their outcomes are not kept.
      spread: standard deviation of the effect of setting and repeat; three times as much is shared.
      has_public_start: whether the start is the same in all repeats.
      ratio: ratio of the first setting's spread to the other settings' spread, in flat sweeps.
    """

    num_repeats: int
    num_settings: int
    num_records: int
    spread: float
    has_public_start: bool
    ratio: float = 1.0

    @property
    def error(self) -> float:
        """The standard error of a difference of two settings."""
        records = (
            (SETTING_BY_RECORD + REST / self.num_repeats) / self.num_records if self.num_records else 0.0
        )
        return math.sqrt(2 * (self.spread**2 / self.num_repeats + records))

    @property
    def error_over_start(self) -> float:
        """The standard error of a difference to the start."""
        if not self.has_public_start:
            return self.error
        repeats = 10 * self.spread**2 / self.num_repeats
        records = (
            (2 * SETTING_BY_RECORD + REST / self.num_repeats) / self.num_records if self.num_records else 0.0
        )
        return math.sqrt(repeats + records)


def cells() -> Iterator[Cell]:
    """Yield all kinds of sweeps."""
    axes = ((2, 3, 4, 5), (3, 6, 12), (0, 100, 1000, 10000), (0.003, 0.01), (False, True))
    for repeats, settings, records, spread, public in itertools.product(*axes):
        yield Cell(
            num_repeats=repeats,
            num_settings=settings,
            num_records=records,
            spread=spread,
            has_public_start=public,
        )


def draw_layout(cell: Cell, means: Array, start: float, generator: np.random.Generator) -> Layout:
    """Return the layout of one simulated sweep.

    Args:
      cell: the kind of sweep.
      means: true means, `[settings]`.
      start: the true mean of the start.
      generator: source of all draws.
    """
    repeats, settings, n = cell.num_repeats, cell.num_settings, cell.num_records
    shared = generator.normal(0, 3 * cell.spread, (repeats, 1))
    own = generator.normal(0, cell.spread, (repeats, settings + 1))
    own[:, 0] *= cell.ratio
    scores = np.append(means, start) + shared + own
    if cell.has_public_start:
        scores[:, -1] = start
    spread = None
    if n:
        of_record = np.full((settings + 1, settings + 1), SHARED_BY_RECORD)
        of_record[np.diag_indices(settings + 1)] += SETTING_BY_RECORD
        of_rest = np.full(settings + 1, REST)
        of_rest[-1] *= not cell.has_public_start
        scores += generator.multivariate_normal(np.zeros(settings + 1), of_record / n)
        scores += generator.normal(0, np.sqrt(of_rest / n), (repeats, settings + 1))
        rest = np.diag(np.maximum(of_rest, 1e-12))
        between = wishart.rvs(n - 1, (of_record + rest / repeats) / (n - 1), random_state=generator)
        degrees = max((repeats - 1) * (n - 1), settings + 1)
        interaction = wishart.rvs(degrees, rest / degrees, random_state=generator)
        order = [*range(settings), *[settings] * settings]  # every setting has the same start
        spread = RecordSpread(n, between[np.ix_(order, order)], interaction[np.ix_(order, order)])
    starts = np.repeat(scores[:, -1:], settings, axis=1)
    return Layout(scores[:, :-1], starts, spread)


def has_winner(layout: Layout) -> bool:
    """Return whether the highest setting is distinguishable from all others."""
    best = int(layout.means.argmax())
    others = (each for each in range(len(layout.means)) if each != best)
    return all(layout.between(best, other, "").is_distinguishable for other in others)


def has_gain(layout: Layout) -> bool:
    """Return whether any setting is distinguishable above the start."""
    found = (layout.over_start(each, "") for each in range(len(layout.means)))
    return any(each is not None and each.verdict == "higher" for each in found)


def tukey_has_winner(layout: Layout) -> bool:
    """Return the same by Tukey's test of settings and start over repeats, the rule used previously."""
    scores = layout.scores
    (repeats, settings), best = scores.shape, int(scores.mean(axis=0).argmax())
    rest = scores - scores.mean(axis=0) - scores.mean(axis=1, keepdims=True) + scores.mean()
    degrees = (repeats - 1) * (settings - 1)
    variance = (rest**2).sum() / degrees
    critical = _tukey(settings + 1, degrees)
    for other in range(settings):
        if other == best:
            continue
        difference = scores[:, best] - scores[:, other]
        mean, own = difference.mean(), difference.var(ddof=1)
        clear = mean > 2 * math.sqrt(own / repeats)
        if not clear or mean <= critical * math.sqrt(max(2 * variance, own) / 2 / repeats):
            return False
    return True


@cache
def _tukey(num_treatments: int, degrees: int) -> float:
    return float(studentized_range.isf(LEVEL, num_treatments, degrees))


def row_of(cell: Cell, num_sweeps: int, seed: int) -> dict[str, float]:
    """Return the rates and the mean regret for one kind of sweep."""
    generator = np.random.default_rng([seed, cell.num_repeats, cell.num_settings, cell.num_records])
    k = cell.num_settings
    counts = dict.fromkeys(("error", "tukey", "winner_3", "tukey_3", "winner_5", "gain_5", "regret"), 0.0)
    flat = np.zeros(k)
    for _ in range(num_sweeps):
        layout = draw_layout(cell, flat, 0.0, generator)
        counts["error"] += has_winner(layout) or has_gain(layout)
        counts["tukey"] += tukey_has_winner(layout)
        for distance in (3, 5):
            lead = np.append(distance * cell.error, np.zeros(k - 1))
            layout = draw_layout(cell, lead, 0.0, generator)
            counts[f"winner_{distance}"] += has_winner(layout) and layout.means.argmax() == 0
            if distance == 3:
                counts["tukey_3"] += tukey_has_winner(layout) and layout.means.argmax() == 0
        layout = draw_layout(cell, flat + 5 * cell.error_over_start, 0.0, generator)
        found = layout.over_start(0, "")
        counts["gain_5"] += found is not None and found.verdict == "higher"
        means = generator.normal(0, cell.error, k)
        layout = draw_layout(cell, means, means.min(), generator)
        costs = [Cost(epsilon=1.0, num_views=each) for each in generator.choice([1.0, 2.0], k)]
        taken = layout.recommend(costs)
        counts["regret"] += (means[int(layout.means.argmax())] - means[taken]) / cell.error
    return {name: value / num_sweeps for name, value in counts.items()}


def main() -> None:
    """Print one line for each kind of sweep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-sweeps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ratio", type=float, default=1.0, help="first setting's spread over the others'")
    parser.add_argument("--share", default="0/1", help="i/n runs every n-th cell, starting at i")
    options = parser.parse_args()
    first, step = map(int, options.share.split("/"))
    for cell in itertools.islice(cells(), first, None, step):
        row = row_of(replace(cell, ratio=options.ratio), options.num_sweeps, options.seed)
        print(
            cell.num_repeats,
            cell.num_settings,
            cell.num_records,
            cell.spread,
            int(cell.has_public_start),
            *(f"{name}={value:.3f}" for name, value in row.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
