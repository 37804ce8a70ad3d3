"""The strategies of tuning at one total ε: what each leaves for the model, and what it is expected to gain.

What a strategy leaves is exact: the largest ε of the model's training at which everything together stays
within the total, by the accounting that states and charges a sweep. What it gains is an estimate. Let G be
the score that tuning could gain at the whole total if it were free, and let a score change by b for each
factor e of ε. A strategy that finds the share κ of G and leaves ε_s of the total E is expected to gain

    κ·G − b·ln(E/ε_s)

over training one setting that nobody tuned. G, b and κ are means over the committed tables
(`benchmarks/results/tuning_*.csv`, with 12 settings; `tests/dpgcl_core/planning/strategy_gains.py` computes
them). They come from other data than the user's. Test it on public data: `python sweeps/tuning.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from dpgcl_core.accounting.composition import calibrate_noise_multiplier, epsilon_of_steps
from dpgcl_core.accounting.tuning.cost import TrialClass, open_cost, sealed_cost
from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial
from dpgcl_core.errors import ConfigError
from dpgcl_core.planning.root_finding import solve

SMALL_SHARES = (1 / 20, 1 / 10)
"""The ε that scaling tunes at by default, as shares of the total."""
_TOLERANCE = 0.01
_LARGEST_NOISE = 1e3


@dataclass(frozen=True, kw_only=True)
class StrategyGains:
    """Constants of the expected gain, in points of a score.

    Attributes:
      tuning: G, the gain of the best of 12 settings over one that is not tuned.
      per_log_epsilon: b, the gain for each factor e of ε.
      shares: κ of each strategy.
    """

    tuning: float
    per_log_epsilon: float
    shares: Mapping[str, float]

    def of(self, strategy: str, epsilon_share: float) -> float:
        """Return the expected gain of a strategy that leaves this share of the total for the model."""
        return self.shares[strategy] * self.tuning + self.per_log_epsilon * math.log(epsilon_share)


@dataclass(frozen=True, kw_only=True)
class StrategyOutlook:
    """What a strategy leaves and gains.

    Attributes:
      strategy: its name, a value of `--tuning`.
      model_epsilon: ε of the model's training.
      gain: the expected gain over a setting that is not tuned, in points.
    """

    strategy: str
    model_epsilon: float
    gain: float


def strategy_outlooks(
    trial: TrialClass,
    *,
    total_epsilon: float,
    delta: float,
    num_settings: int,
    gains: StrategyGains,
    eta: float = 1.0,
    bound: str = "profile",
) -> list[StrategyOutlook]:
    """Return the outlook of every strategy that fits, the best first.

    Args:
      trial: one training; its noise is not used.
      total_epsilon, delta: the total.
      num_settings: the number of settings to choose among; the mean number of trials of a sealed sweep.
      gains: constants of the expected gain.
      eta, bound: law and theorem of a sealed sweep.
    """
    outlooks = []
    for name in gains.shares:
        try:
            epsilon = _model_epsilon(name, trial, total_epsilon, delta, num_settings, eta, bound)
        except ConfigError:  # no noise fits
            continue
        gain = gains.of(name, epsilon / total_epsilon)
        outlooks.append(StrategyOutlook(strategy=name, model_epsilon=epsilon, gain=gain))
    return sorted(outlooks, key=lambda outlook: -outlook.gain)


def _model_epsilon(
    strategy: str,
    trial: TrialClass,
    total_epsilon: float,
    delta: float,
    num_settings: int,
    eta: float,
    bound: str,
) -> float:
    """Return ε of the model's training. Raises ConfigError if no noise fits."""
    if strategy in ("none", "public"):
        return total_epsilon
    calibrate = partial(
        calibrate_noise_multiplier,
        sampling_prob=trial.sampling_prob,
        num_steps=trial.num_steps,
        target_delta=delta,
    )
    law = TruncatedNegativeBinomial.from_mean(float(max(num_settings, 2)), eta=eta)
    small = [
        replace(
            trial,
            noise_multiplier=calibrate(target_epsilon=share * total_epsilon).noise_multiplier,
            count=num_settings,
        )
        for share in (SMALL_SHARES if strategy == "scaling" else ())
    ]

    def total_at(noise: float) -> float:
        candidate = replace(trial, noise_multiplier=noise)
        if strategy == "sealed":
            total = sealed_cost([candidate], law=law, delta=delta, bound=bound).tuned_epsilon
        else:
            count = num_settings if strategy == "open" else 1
            total = open_cost([replace(candidate, count=count), *small], delta=delta).tuned_epsilon
        return math.inf if total is None else total

    start = calibrate(target_epsilon=total_epsilon).noise_multiplier
    noise = solve(
        total_at,
        high=total_epsilon,
        share=_TOLERANCE,
        start=start,
        slope=-1.0,
        lower=start,
        upper=_LARGEST_NOISE,
    )
    return epsilon_of_steps(
        sampling_prob=trial.sampling_prob, noise_multiplier=noise, num_steps=trial.num_steps, delta=delta
    )


GAINS = StrategyGains(
    tuning=2.644,
    per_log_epsilon=0.461,
    shares=MappingProxyType({"none": 0.0, "open": 0.878, "sealed": 0.538, "public": 0.540, "scaling": 0.840}),
)
"""The constants of the committed tables."""
