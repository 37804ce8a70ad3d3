"""ε in words: the most that an attack can gain, from the same privacy loss distribution as ε.

An attack decides from everything released whether one record took part. Its true positive rate (TPR) is the
probability of "took part" with the record, its false positive rate (FPR) the same without it.

Proposition. Let δ(ε) be the larger privacy profile of the two directions. Every attack has TPR ≤ e^ε·FPR +
δ(ε) for every real ε. So its advantage TPR − FPR is at most δ(0), and its TPR at FPR = t is at most β(t) =
inf_ε (e^ε·t + δ(ε)).

Proof. "Took part" is an event, and δ(ε) bounds P(event) − e^ε·Q(event) for neighbouring data sets. ∎

If only (ε, δ) is known, as for a sealed sweep or a batch cap, the same holds for the pair that dominates
every (ε, δ)-DP mechanism (Kairouz, Oh and Viswanath 2015, section 3): losses ε, −ε and ∞ with the
probabilities (1 − δ)e^ε/(1 + e^ε), (1 − δ)/(1 + e^ε) and δ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.accounting.tuning.cost import COMPOSITION, TuningCost
from dpgcl_core.accounting.tuning.profile import PrivacyLoss, PrivacyProfile
from dpgcl_core.accounting.tuning.trial_release import TrialClass, total_steps

FALSE_POSITIVE_RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class AttackBounds:
    """The most that any attack on one record's participation can gain.

    Attributes:
      attack_advantage: largest TPR − FPR.
      attack_true_positive_rate: largest TPR at FPR = `FALSE_POSITIVE_RATE`.
      gaussian_mu: μ, if the releases together are exactly a Gaussian mechanism of sensitivity/std = μ, as
        without sampling (Dong, Roth and Su 2022); else None.

    >>> bounds = AttackBounds.from_steps([{StepClass(1.0, 1.0): 1}])
    >>> round(bounds.attack_advantage, 3), round(bounds.attack_true_positive_rate, 3), bounds.gaussian_mu
    (0.383, 0.092, 1.0)
    """

    attack_advantage: float
    attack_true_positive_rate: float
    gaussian_mu: float | None = None

    @classmethod
    def from_steps(cls, cases: Sequence[Mapping[StepClass, int]]) -> AttackBounds:
        """Return the bounds for the steps of each case, of which the worst case counts."""
        profiles = [PrivacyProfile.from_steps(steps) for steps in cases]
        is_gaussian = len(cases) == 1 and all(step.sampling_prob == 1 for step in cases[0])
        squares = (num / step.noise_multiplier**2 for step, num in cases[0].items())
        return cls(
            attack_advantage=max(profile.total_variation for profile in profiles),
            attack_true_positive_rate=max(map(_true_positive_rate, profiles)),
            gaussian_mu=math.sqrt(math.fsum(squares)) if is_gaussian else None,
        )

    @classmethod
    def from_epsilon(cls, epsilon: float, delta: float) -> AttackBounds:
        """Return the bounds that hold for every (epsilon, delta)-DP mechanism.

        >>> round(AttackBounds.from_epsilon(1.0, 0.0).attack_advantage, 4)  # (e − 1)/(e + 1)
        0.4621
        """
        small = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
        loss = PrivacyLoss.build(np.array([-epsilon, epsilon]), np.array([small, 1 - delta - small]), delta)
        profile = PrivacyProfile(remove=loss, add=loss)
        return cls(
            attack_advantage=profile.total_variation, attack_true_positive_rate=_true_positive_rate(profile)
        )

    @classmethod
    def from_cost(cls, cost: TuningCost) -> AttackBounds | None:
        """Return the bounds for everything that a sweep releases; None if its cost is not accounted."""
        if cost.tuned_epsilon is None:
            return None
        if cost.theorem not in COMPOSITION:
            return cls.from_epsilon(cost.tuned_epsilon, cost.delta)
        return cls.from_steps(total_steps([TrialClass(**trial) for trial in cost.planned]))

    def text(self) -> str:
        """Return the bounds as a phrase, rounded up."""
        gaussian = (
            "" if self.gaussian_mu is None else f"; a Gaussian mechanism with μ = {self.gaussian_mu:.4g}"
        )
        advantage, rate = _percent(self.attack_advantage), _percent(self.attack_true_positive_rate)
        return (
            f"true positives exceed false positives by at most {advantage}; at "
            f"{_percent(FALSE_POSITIVE_RATE)} false positives at most {rate} true positives{gaussian}"
        )


def _true_positive_rate(profile: PrivacyProfile) -> float:
    return min(1.0, float(profile.largest_image(np.array(FALSE_POSITIVE_RATE))))


def _percent(share: float) -> str:
    return f"{math.ceil(round(share * 1000, 6)) / 10:g} %"
