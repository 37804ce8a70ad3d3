"""The effect of N, B and σ on ε and on the epochs: the curves of DP-Cap's Figures 5 and 6, for any plan.

Figure 5 shows ε against N, for fixed B, σ and T. Figure 6 shows the epochs that a target ε allows against B,
with one curve per σ. Both use PLD on a coarse grid and err on the safe side: the true ε is at most the drawn
ε, and the true number of allowed epochs is at least the drawn number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.planning.feasible import PlanRequest, smallest_group
from dpgcl_core.planning.root_finding import solve
from dpgcl_core.planning.snr import coarse_epsilon

RECORDS_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
NOISE_FACTORS = (0.66, 1.0, 1.11)
"""The σ of Figure 6 relative to the σ of DP-Cap's training: 0.48 and 0.81 over 0.728."""
BATCH_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_MOST_STEPS = 1e7


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a curve.

    Attributes:
      figure: "epsilon" (Figure 5) or "epochs" (Figure 6).
      num_records, expected_batch_size, noise_multiplier, num_steps, epsilon: the training's values.
    """

    figure: str
    num_records: int
    expected_batch_size: float
    noise_multiplier: float
    num_steps: int
    epsilon: float

    @property
    def num_epochs(self) -> float:
        """T·B/N."""
        return self.num_steps * self.expected_batch_size / self.num_records


def epsilon_by_records(
    request: PlanRequest, plan: Mechanism, factors: Sequence[float] = RECORDS_FACTORS
) -> list[Point]:
    """Return ε at multiples of N for the plan's B, σ and T, at the requested δ, or else at 1/(N ln N).

    N below B, or with a requested δ above 1/N, are omitted."""
    batch, steps, noise = plan.expected_batch_size, plan.num_steps, plan.noise_multiplier
    points = []
    for factor in factors:
        number = round(factor * request.num_records_public)
        if number < max(batch, 3) or (request.target_delta or 0.0) > 1 / number:
            continue
        scaled_request = replace(request, num_records_public=number)
        mechanism = scaled_request.mechanism(batch, steps, noise, smallest_group(request.method))
        epsilon = coarse_epsilon(mechanism, noise, request.target_epsilon / max(1.0, factor))
        points.append(_point("epsilon", mechanism, noise, steps, epsilon))
    return points


def epochs_by_batch(
    request: PlanRequest,
    plan: Mechanism,
    factors: Sequence[float] = BATCH_FACTORS,
    noise_factors: Sequence[float] = NOISE_FACTORS,
) -> list[Point]:
    """Return the largest T within ε at multiples of the plan's B and σ; omit points without such a T."""
    points = []
    for noise in (factor * plan.noise_multiplier for factor in noise_factors):
        start = float(plan.num_steps)
        for batch in (factor * plan.expected_batch_size for factor in factors):
            if batch > request.num_records_public:
                continue
            mechanism = request.mechanism(batch, 1, noise, smallest_group(request.method))
            largest = most_steps(mechanism, noise, request.target_epsilon, start)
            if largest is None:
                continue
            steps, epsilon = largest
            start = float(steps)
            points.append(_point("epochs", mechanism, noise, steps, epsilon))
    return points


def most_steps(
    mechanism: Mechanism, noise: float, target_epsilon: float, start: float = 1000.0
) -> tuple[int, float] | None:
    """Return the largest T within ε, to 2 %, and its ε by PLD; None if T is 0 or above 10 million.

    >>> mechanism = Mechanism(num_records_public=60_000, sampling_prob=2048 / 60_000, group_size=16,
    ...     l2_clip_norm=1.0, noise_multiplier=0.97, num_steps=1, target_delta=1.5e-6)
    >>> 1200 < most_steps(mechanism, 0.97, 10.0)[0] < 1600  # of the 1,200 that RDP allows
    True
    """

    def epsilon(steps: float) -> float:
        taken = replace(mechanism, num_steps=max(1, math.floor(steps)))
        return coarse_epsilon(taken, noise, target_epsilon)

    try:
        steps = solve(
            epsilon, high=target_epsilon, share=0.02, start=start, slope=0.6, lower=1.0, upper=_MOST_STEPS
        )
    except ConfigError:
        return None
    return math.floor(steps), epsilon(steps)


def _point(figure: str, mechanism: Mechanism, noise: float, steps: int, epsilon: float) -> Point:
    return Point(
        figure=figure,
        num_records=mechanism.num_records_public,
        expected_batch_size=mechanism.expected_batch_size,
        noise_multiplier=noise,
        num_steps=steps,
        epsilon=epsilon,
    )
