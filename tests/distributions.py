"""The privacy loss distribution of a Gaussian step in milliseconds, as dp_accounting makes it in seconds.

Plans and statements ask for the ε of many σ and q. Most of their time goes into one list comprehension of the
library, which inverts the privacy loss for one of some hundred thousand losses after the other; here the same
formula is taken for all of them at once. `test_distributions` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld import privacy_loss_mechanism as losses
from numpy.typing import NDArray

_MADE_BEFORE = 100
_slowly = losses.GaussianPrivacyLoss.get_delta_for_epsilon


@contextmanager
def made_quickly() -> Iterator[None]:
    """Let the library make distributions of Gaussian steps at once, and each of them once.

    Composing two of them makes a third and changes neither.
    """
    make = lru_cache(maxsize=_MADE_BEFORE)(distributions.from_gaussian_mechanism)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses.GaussianPrivacyLoss, "get_delta_for_epsilon", _at_once)
        patch.setattr(distributions, "from_gaussian_mechanism", make)
        yield


def _at_once(loss: Any, epsilon: Any) -> Any:
    if np.ndim(epsilon) == 0 or loss.adjacency_type == losses.AdjacencyType.REPLACE:
        return _slowly(loss, epsilon)
    epsilons = np.asarray(epsilon, dtype=float)
    below = loss.adjacency_type == losses.AdjacencyType.ADD
    end = np.log1p(-loss.sampling_prob) if loss.sampling_prob < 1 else -np.inf
    inverted = epsilons < -end if below else epsilons > end
    deltas = np.zeros_like(epsilons) if below else -np.expm1(epsilons)  # where there is nothing to invert
    x = _inverse(loss, epsilons[inverted], end, below=below)
    deltas[inverted] = loss.mu_upper_cdf(x) - np.exp(epsilons[inverted] + loss.mu_lower_log_cdf(x))
    return np.clip(deltas, 0, 1)


def _inverse(loss: Any, epsilons: NDArray[np.float64], end: float, *, below: bool) -> NDArray[np.float64]:
    """The largest x whose privacy loss is at least ε: that of the whole batch's, at ln(1 + (e^±ε − 1)/q)."""
    signed = -epsilons if below else epsilons
    whole = signed
    if loss.sampling_prob < 1:
        odds = 1 / loss.sampling_prob - 1
        raised = signed - np.log(loss.sampling_prob)
        with np.errstate(divide="ignore", invalid="ignore"):  # beside what is put right below
            whole = raised + np.log1p(-np.exp(np.log(odds) - raised))
        whole = np.where(signed == 0, 0.0, whole)
        whole = np.where(np.isclose(signed, end, rtol=1e-9, atol=0), -np.inf, whole)
    without_sampling = -whole if below else whole
    variance = loss._standard_deviation**2
    found: NDArray[np.float64] = -loss.sensitivity / 2 - without_sampling * variance / loss.sensitivity
    return found + loss.sensitivity if below else found
