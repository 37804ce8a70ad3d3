"""Find the positive number at which a function reaches a value, by secants of the logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable

from dpgcl_core.errors import ConfigError

_MOST_TRIES = 60
_NARROWEST_BRACKET = 1e-6
_END_MARGIN = 0.1
_LONGEST_STEP = 0.7  # in ln x: a longer step may try far too little noise, for which accounting is slow


def solve(
    function: Callable[[float], float],
    *,
    high: float,
    share: float,
    start: float,
    slope: float,
    lower: float,
    upper: float,
) -> float:
    """Return x with `(1 - share)·high ≤ function(x) ≤ high`, for a monotone function.

    If the function jumps over this range, return the x at the jump, on the side below `high`.

    Args:
      function: a positive function of x > 0.
      high: the value that the function must not exceed.
      share: the allowed shortfall below `high`, as a fraction of `high`.
      start: the first x.
      slope: a guess of d ln function/d ln x; its sign states whether the function rises.
      lower, upper: the ends of the search.

    Raises:
      ConfigError: `function` stays above or below the range on all of [lower, upper].

    >>> x = solve(lambda x: 8 / x, high=2.0, share=0.01, start=1.0, slope=-1.0, lower=0.1, upper=100.0)
    >>> 4.0 <= x <= 8 / (0.99 * 2)
    True
    """
    target, below, above = math.log(high) + math.log1p(-share) / 2, None, None
    x = min(max(start, lower), upper)
    for _ in range(_MOST_TRIES):
        value = function(x)
        if (1 - share) * high <= value <= high:
            return x
        point = math.log(x), math.log(max(value, 1e-12))
        if value > high:
            above = point
        else:
            below = point
        if below is not None and above is not None:
            if abs(below[0] - above[0]) < _NARROWEST_BRACKET:
                break
            guess = below[0] + (target - below[1]) * (above[0] - below[0]) / (above[1] - below[1])
            margin = _END_MARGIN * abs(above[0] - below[0])
            low_end, high_end = sorted((below[0], above[0]))
            x = math.exp(min(max(guess, low_end + margin), high_end - margin))
            continue
        if (x <= lower or x >= upper) and _leads_out(x, value > high, slope, lower):
            raise ConfigError(
                f"no value from {lower:g} to {upper:g} reaches the target {high:g}; at {x:g} the result is "
                f"{value:.4g}"
            )
        log_x = point[0] + (target - point[1]) / slope
        x = min(
            max(math.exp(min(max(log_x, point[0] - _LONGEST_STEP), point[0] + _LONGEST_STEP)), lower), upper
        )
    assert below is not None
    return math.exp(below[0])


def _leads_out(x: float, too_high: bool, slope: float, least: float) -> bool:
    """Return whether the next step would leave the range at the end where x is."""
    rises = (slope > 0) != too_high  # whether the next x is larger
    return rises != (x <= least)
