"""The privacy profile of one trial: δ(ε) for every ε, from its privacy loss distribution (PLD).

For a pair of distributions (P, Q), the loss is L = ln(dP/dQ) under P and δ(ε) = E[(1 − e^(ε−L))₊]. A trial
has two such pairs, one for removing a record and one for adding it; its profile is the larger of the two
profiles. dp_accounting gives both as pessimistic discretisations: pairs that dominate the true pairs. So
every quantity that increases with the profile is an upper bound if it is computed from these pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from numpy.typing import NDArray

from dpgcl_core.accounting.composition import GRID, memory_errors
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import ConfigError

Array = NDArray[np.float64]
_LARGEST_EXPONENT = 700.0  # e^700 is near the largest float; losses beyond ±700 round to the safe side


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivacyLoss:
    """The distribution under P of the privacy loss L = ln(dP/dQ) of one pair (P, Q).

    Attributes:
      losses: finite values of L, ascending `[n]`.
      masses: probabilities of the losses under P `[n]`; together with `infinity_mass` they sum to one.
      infinity_mass: P(L = ∞).
    """

    losses: Array
    masses: Array
    infinity_mass: float

    @classmethod
    def build(cls, losses: Array, masses: Array, infinity_mass: float) -> PrivacyLoss:
        """Return the loss, sorted; values below −700 become −700, and missing mass is put at infinity."""
        order = np.argsort(losses, kind="stable")
        masses = np.maximum(np.asarray(masses, dtype=np.float64)[order], 0.0)
        missing = max(0.0, 1.0 - infinity_mass - float(np.sum(masses)))
        losses = np.maximum(np.asarray(losses, dtype=np.float64)[order], -_LARGEST_EXPONENT)
        return cls(losses=losses, masses=masses, infinity_mass=infinity_mass + missing)

    @cached_property
    def _tails(self) -> tuple[Array, Array]:
        """P(L ≥ losses[i]) and Q(L ≥ losses[i]) for i = 0 … n; P includes the mass at infinity."""
        p = np.concatenate((np.cumsum(self.masses[::-1])[::-1], [0.0])) + self.infinity_mass
        q = np.concatenate((np.cumsum((self.masses * np.exp(-self.losses))[::-1])[::-1], [0.0]))
        return p, q

    def delta(self, epsilon: Array) -> Array:
        """Return δ(ε) = P(L > ε) − e^ε Q(L > ε) for any real ε, any shape."""
        epsilon = np.asarray(epsilon, dtype=np.float64)
        p, q = self._tails
        first = np.searchsorted(self.losses, epsilon, side="right")
        return np.clip(p[first] - np.exp(np.minimum(epsilon, _LARGEST_EXPONENT)) * q[first], 0.0, 1.0)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 with δ(ε) ≤ `delta`; `inf` if there is none."""
        if float(self.delta(np.array(0.0))) <= delta:
            return 0.0
        if self.infinity_mass > delta:
            return math.inf
        p, q = self._tails
        met = self.delta(self.losses) <= delta  # False, then True: δ decreases
        if not met.any():
            return math.inf
        first = int(met.argmax())
        return (
            max(0.0, math.log((p[first] - delta) / q[first])) if q[first] > 0 else float(self.losses[first])
        )

    def minimiser(self, t: Array) -> Array:
        """Return the ε that minimises e^ε t + δ(ε), where Q(L > ε) crosses t; same shape as `t`."""
        q = self._tails[1]
        index = np.searchsorted(-q[1:], -np.asarray(t), side="left")  # the first ε with Q(L > ε) ≤ t
        return np.asarray(self.losses[np.minimum(index, len(self.losses) - 1)])


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivacyProfile:
    """δ(ε) of one trial for **adding or removing one record**: the larger δ of the two directions.

    Attributes:
      remove: loss of (with the record, without it).
      add: loss of (without the record, with it).

    >>> trial = PrivacyProfile.from_steps({StepClass(0.01, 1.0): 1000})
    >>> round(trial.epsilon(1e-5), 3), round(trial.total_variation, 3)
    (1.828, 0.161)
    """

    remove: PrivacyLoss
    add: PrivacyLoss

    @classmethod
    def from_steps(cls, steps: Mapping[StepClass, int], *, grid: float = GRID) -> PrivacyProfile:
        """Return the profile of `steps`, a number per class, composed by PLD with losses on `grid`."""
        composed = pld.identity(value_discretization_interval=grid)
        with memory_errors():
            for step_class, num_steps in steps.items():
                step_loss = pld.from_gaussian_mechanism(
                    step_class.noise_multiplier,
                    sampling_prob=step_class.sampling_prob,
                    value_discretization_interval=grid,
                )
                composed = composed.compose(step_loss.self_compose(num_steps))
        return cls(remove=_loss_of(composed._pmf_remove), add=_loss_of(composed._pmf_add))

    @classmethod
    def mixture(cls, profiles: Sequence[PrivacyProfile], probabilities: Sequence[float]) -> PrivacyProfile:
        """Return the profile of a trial that draws candidate i with probability π_i = `probabilities[i]`.

        The drawn candidate is part of the output, so the loss is a mixture and δ(ε) = Σ π_i δ_i(ε):
        tighter than the largest δ_i. π must be fixed without the data.

        Raises:
          ConfigError: the lengths differ, or the probabilities do not sum to one.
        """
        check_probabilities(probabilities, len(profiles))
        return cls(
            remove=_mixed([each.remove for each in profiles], probabilities),
            add=_mixed([each.add for each in profiles], probabilities),
        )

    def delta(self, epsilon: float) -> float:
        """Return the larger δ(ε) of the two directions, for any real ε."""
        at = np.array(epsilon)
        return max(float(self.remove.delta(at)), float(self.add.delta(at)))

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 whose δ is at most `delta` in both directions; `inf` if there is none."""
        return max(self.remove.epsilon(delta), self.add.epsilon(delta))

    def largest_image(self, t: Array) -> Array:
        """Return β(t) = inf_ε (e^ε t + δ(ε)), clipped at 1; any shape.

        No event of probability t on one data set is more likely than β(t) on a neighbouring one. Any ε
        gives a valid bound; the code tries the minimiser of each direction, and ε = 0, where the direction
        with the larger δ changes.
        """
        images = [np.ones_like(t)]
        for epsilon in (self.remove.minimiser(t), self.add.minimiser(t), np.zeros_like(t)):
            delta = np.maximum(self.remove.delta(epsilon), self.add.delta(epsilon))
            images.append(np.exp(np.minimum(epsilon, _LARGEST_EXPONENT)) * t + delta)
        return np.asarray(np.min(images, axis=0))

    @property
    def total_variation(self) -> float:
        """δ(0): the most that one record can change the probability of any event."""
        return self.delta(0.0)


def check_probabilities(probabilities: Sequence[float], length: int) -> None:
    """Raise ConfigError unless there are `length` positive probabilities that sum to one."""
    if len(probabilities) != length:
        raise ConfigError(f"expected {length} probabilities, one per candidate; got {len(probabilities)}")
    total = math.fsum(probabilities)
    if not all(0 < each <= 1 for each in probabilities) or not abs(total - 1) <= 1e-9:
        raise ConfigError(f"probabilities must be positive and sum to 1; got {list(probabilities)}")


def _loss_of(pmf: object) -> PrivacyLoss:
    """Convert a PLD of dp_accounting, by private attributes: its public API has only δ and ε."""
    dense = pmf.to_dense_pmf()  # type: ignore[attr-defined]
    losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
    return PrivacyLoss.build(losses, dense._probs, float(dense._infinity_mass))


def _mixed(losses: Sequence[PrivacyLoss], probabilities: Sequence[float]) -> PrivacyLoss:
    return PrivacyLoss.build(
        np.concatenate([loss.losses for loss in losses]),
        np.concatenate([weight * loss.masses for loss, weight in zip(losses, probabilities, strict=True)]),
        math.fsum(weight * loss.infinity_mass for loss, weight in zip(losses, probabilities, strict=True)),
    )
