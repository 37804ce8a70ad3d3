"""The law of K: the distribution of the number of trials that a sealed sweep runs, drawn in secret.

A sealed sweep draws K **first**, runs K independent trials and releases only the best trial. Its cost depends
on the law of K through the derivative of the generating function f(x) = E[x^K]. The law and its parameters
are public. K never is: run names, counts, run time and bills must not reveal it.

Sampling. K is drawn by inverse CDF: a uniform number of 256 bits from the operating system's cryptographic
source is compared with the masses, summed in decimals of 100 digits. The drawn law differs from the stated
law by less than 10^-60 in total variation, which changes no δ that a float can represent
(docs/theory/tuning.md). With sums in float64 the difference would be visible in δ at ε = 15.

Papernot and Steinke (2022), Definition 1, define the truncated negative binomial.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, require_whole

Array = NDArray[np.float64]

MAX_MEAN_TRIALS = 1e6
MAX_TRUNCATED_TRIALS = 10_000
_BITS = 256
_DECIMALS = Context(prec=100)
_NEGLIGIBLE = Decimal("1e-80")


class TrialCountLaw(ABC):
    """Law of the number of trials K: frozen, public and independent of the data."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """E[K]."""

    @abstractmethod
    def derivative(self, x: Array) -> Array:
        """Return f'(x) = E[K x^(K−1)], where f(x) = E[x^K], for x in [0, 1], any shape; f'(1) = E[K]."""

    @abstractmethod
    def parameters(self) -> dict[str, str | float]:
        """Return the law's name and parameters for the report, but never a drawn K."""

    @abstractmethod
    def _masses(self) -> Iterator[tuple[int, Decimal]]:
        """Yield (k, P(K = k)) for ascending k; the caller iterates in the decimal context `_DECIMALS`."""

    def pmf(self, num_trials: int) -> float:
        """Return P(K = num_trials)."""
        with localcontext(_DECIMALS):
            for k, mass in self._masses():
                if k >= num_trials:
                    return float(mass) if k == num_trials else 0.0
        return 0.0

    def draw(self) -> int:
        """Return one secret K from the operating system's entropy; 0 means that nothing is released."""
        return self._quantile(secrets.randbits(_BITS))

    def quantile(self, share: float) -> int:
        """Return the smallest k with P(K ≤ k) > `share`, which is in [0, 1)."""
        return self._quantile(int(share * 2**_BITS))

    def _quantile(self, uniform_bits: int) -> int:
        """Return the smallest k with P(K ≤ k) > (uniform_bits + ½) / 2^256."""
        with localcontext(_DECIMALS):
            remaining_mass = (Decimal(uniform_bits) + Decimal("0.5")) / Decimal(2) ** _BITS
            k = 0
            for k, mass in self._masses():
                remaining_mass -= mass
                # The second condition ends the search if rounding keeps the sum just below one.
                if remaining_mass < 0 or (mass < _NEGLIGIBLE and k > self.mean):
                    break
            return k

    def _check_mean(self) -> None:
        if not 1 - 1e-9 <= self.mean <= MAX_MEAN_TRIALS * (1 + 1e-9):  # allow for rounding of the parameters
            raise ConfigError(
                f"the mean number of trials must be in [1, {MAX_MEAN_TRIALS:g}]; got {self.mean:.6g} from "
                f"{self.parameters()}"
            )


@dataclass(frozen=True, kw_only=True)
class TruncatedNegativeBinomial(TrialCountLaw):
    """P(K = k) ∝ (1 − γ)^k ∏_{l<k} (l + η)/(l + 1) for k ≥ 1.

    η = 1 is the geometric law, and η = 0 is the logarithmic law; with γ = 1, K is 1.

    Attributes:
      eta: η, the shape, above −1.
      gamma: γ in (0, 1]; a smaller value gives more trials.

    Raises:
      ConfigError: a parameter is out of range, or E[K] above 10^6.

    >>> law = TruncatedNegativeBinomial.from_mean(10, eta=1)
    >>> law.gamma, round(law.pmf(2), 6)
    (0.1, 0.09)
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not -1 < self.eta < math.inf or 0 < abs(self.eta) < 1e-12:
            raise ConfigError(
                "eta must be finite, above -1, and either 0 or at least 1e-12 in absolute value; got "
                f"{self.eta} (1: geometric, 0: logarithmic)"
            )
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"gamma must be in (0, 1]; got {self.gamma}")
        self._check_mean()

    @classmethod
    def from_mean(cls, mean: float, *, eta: float) -> TruncatedNegativeBinomial:
        """Return the law of shape `eta` with E[K] = `mean`.

        Raises:
          ConfigError: `mean` is below 1 or above 10^6, or `eta` out of range.

        >>> round(TruncatedNegativeBinomial.from_mean(10, eta=0).gamma, 10)
        0.0269182596
        """
        _check_given_mean(mean)
        cls(eta=eta, gamma=1.0)
        if mean == 1 or eta == 1:
            return cls(eta=eta, gamma=1 / mean)
        low, high = math.log(1e-300), 0.0  # of ln γ; E[K] falls as γ grows
        while high - low > 1e-15 * max(1.0, -high):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if _mean(eta, math.exp(middle)) > mean else (low, middle)
        return cls(eta=eta, gamma=math.exp((low + high) / 2))

    @property
    def mean(self) -> float:
        """E[K] = η(1 − γ)/(γ(1 − γ^η)), and (1/γ − 1)/ln(1/γ) for η = 0."""
        return _mean(self.eta, self.gamma)

    def derivative(self, x: Array) -> Array:
        """Return f'(x) = E[K]·(γ/(1 − (1 − γ)x))^(1 + η)."""
        base = self.gamma + (1 - self.gamma) * (1 - np.asarray(x))
        return np.asarray(self.mean * (self.gamma / base) ** (1 + self.eta))

    def parameters(self) -> dict[str, str | float]:
        """Return name, η, γ and E[K]."""
        return {"name": "tnb", "eta": self.eta, "gamma": self.gamma, "mean": self.mean}

    def _masses(self) -> Iterator[tuple[int, Decimal]]:
        eta, gamma = Decimal(self.eta), Decimal(self.gamma)
        if gamma == 1:
            mass = Decimal(1)
        elif eta == 0:
            mass = (1 - gamma) / -gamma.ln()
        else:
            mass = (1 - gamma) * eta / (gamma**-eta - 1)
        k = 1
        while True:
            yield k, mass
            mass *= (1 - gamma) * (k + eta) / (k + 1)
            k += 1


@dataclass(frozen=True, kw_only=True)
class PoissonTrials(TrialCountLaw):
    """K ~ Poisson(mean); K = 0, with probability e^−mean, releases "no run".

    Raises:
      ConfigError: the mean is below 1 or above 10^6.
    """

    mean_trials: float

    def __post_init__(self) -> None:
        _check_given_mean(self.mean_trials)

    @property
    def mean(self) -> float:
        """E[K]."""
        return self.mean_trials

    def derivative(self, x: Array) -> Array:
        """Return f'(x) = μ e^(μ(x − 1)), with μ = E[K]."""
        return self.mean * np.asarray(np.exp(self.mean * (np.asarray(x) - 1)))

    def parameters(self) -> dict[str, str | float]:
        """Return name and mean."""
        return {"name": "poisson", "mean": self.mean}

    def _masses(self) -> Iterator[tuple[int, Decimal]]:
        mean, k = Decimal(self.mean), 0
        mass = (-mean).exp()
        while True:
            yield k, mass
            k += 1
            mass *= mean / k


@dataclass(frozen=True, kw_only=True)
class BinomialTrials(TrialCountLaw):
    """K ~ Binomial(max_trials, prob); K = 0 releases "no run".

    Raises:
      ConfigError: `max_trials` is not a whole number of at least 1, `prob` is outside (0, 1), or E[K] is
        out of range. A fixed K (`prob` = 1) has no discount over releasing every trial.
    """

    max_trials: int
    prob: float

    def __post_init__(self) -> None:
        require_whole("max_trials", self.max_trials, least=1)
        if not 0 < self.prob < 1:
            raise ConfigError(f"prob must be in (0, 1): a fixed K has no discount; got {self.prob}")
        self._check_mean()

    @property
    def mean(self) -> float:
        """E[K]."""
        return self.max_trials * self.prob

    def derivative(self, x: Array) -> Array:
        """Return f'(x) = np(1 − p + px)^(n − 1), with n = `max_trials` and p = `prob`."""
        return np.asarray(self.mean * (1 - self.prob * (1 - np.asarray(x))) ** (self.max_trials - 1))

    def parameters(self) -> dict[str, str | float]:
        """Return name, `max_trials`, `prob` and E[K]."""
        return {"name": "binomial", "max_trials": self.max_trials, "prob": self.prob, "mean": self.mean}

    def _masses(self) -> Iterator[tuple[int, Decimal]]:
        n, prob = self.max_trials, Decimal(self.prob)
        mass = (1 - prob) ** n
        for k in range(n + 1):
            yield k, mass
            mass *= (n - k) * prob / ((k + 1) * (1 - prob))


@dataclass(frozen=True, kw_only=True)
class TruncatedTrials(TrialCountLaw):
    """`law` conditioned on K ≤ `max_trials`: a cap on the compute, which the bounds account for.

    Capping K without using this law invalidates the bounds of the uncapped law.

    Raises:
      ConfigError: `max_trials` is not a whole number in [1, 10^4], P(K ≤ `max_trials`) is 0 under `law`,
        or E[K] < 1.
    """

    law: TrialCountLaw
    max_trials: int

    def __post_init__(self) -> None:
        require_whole("max_trials", self.max_trials, least=1)
        if self.max_trials > MAX_TRUNCATED_TRIALS:
            raise ConfigError(f"max_trials must be at most {MAX_TRUNCATED_TRIALS}; got {self.max_trials}")
        if not np.sum(self._float_masses) > 0:
            raise ConfigError(f"max_trials = {self.max_trials} is too small for {self.law.parameters()}")
        self._check_mean()

    @cached_property
    def _float_masses(self) -> Array:
        """P(K = k) for k = 0 … max_trials, as floats."""
        masses = np.zeros(self.max_trials + 1)
        with localcontext(_DECIMALS):
            for k, mass in self._masses():
                masses[k] = float(mass)
        return masses

    @property
    def mean(self) -> float:
        """E[K]."""
        return float(np.arange(self.max_trials + 1) @ self._float_masses)

    def derivative(self, x: Array) -> Array:
        """Return f'(x) = Σ k P(K = k) x^(k − 1)."""
        slopes = np.arange(1, self.max_trials + 1) * self._float_masses[1:]
        return np.asarray(np.polynomial.polynomial.polyval(np.asarray(x), slopes))

    def parameters(self) -> dict[str, str | float]:
        """Return the parameters of the uncapped law, the cap, and E[K] under it."""
        inner = self.law.parameters()
        uncapped: dict[str, str | float] = {f"uncapped_{key}": inner[key] for key in inner if key != "name"}
        return {
            "name": f"truncated {inner['name']}",
            **uncapped,
            "max_trials": self.max_trials,
            "mean": self.mean,
        }

    def _masses(self) -> Iterator[tuple[int, Decimal]]:
        masses = []
        for k, mass in self.law._masses():
            if k > self.max_trials:
                break
            masses.append((k, mass))
        total = sum((mass for _, mass in masses), Decimal(0))
        yield from ((k, mass / total) for k, mass in masses)


def _mean(eta: float, gamma: float) -> float:
    if gamma == 1:
        return 1.0
    log = math.log(gamma)
    odds = math.exp(-log) * -math.expm1(log)  # (1 − γ)/γ without cancellation
    return odds / -log if eta == 0 else odds * eta / -math.expm1(eta * log)


def _check_given_mean(mean: float) -> None:
    if not 1 <= mean <= MAX_MEAN_TRIALS:
        raise ConfigError(f"the mean number of trials must be in [1, {MAX_MEAN_TRIALS:g}]; got {mean}")
