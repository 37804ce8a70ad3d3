"""What the tests make quickly is what dp_accounting makes."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld import privacy_loss_mechanism as losses

from dpgcl_core.accounting.composition import epsilon_pld, poisson_gaussian_event
from tests.distributions import _slowly

_made_anew = distributions.from_gaussian_mechanism


@pytest.mark.parametrize("relation", [losses.AdjacencyType.ADD, losses.AdjacencyType.REMOVE])
@pytest.mark.parametrize(("noise", "prob"), [(0.3, 1e-4), (0.7, 0.01), (1.0, 0.5), (5.0, 0.99), (2.0, 1.0)])
def test_divergences_are_the_librarys(noise: float, prob: float, relation: losses.AdjacencyType) -> None:
    loss = losses.GaussianPrivacyLoss(noise, sampling_prob=prob, adjacency_type=relation)
    bounds = loss.connect_dots_bounds()
    epsilons = np.linspace(bounds.epsilon_lower, bounds.epsilon_upper, 2000)
    epsilons = np.append(epsilons, [0.0, 1e-4, -1e-4])
    assert loss.get_delta_for_epsilon is not _slowly
    found, expected = loss.get_delta_for_epsilon(epsilons), _slowly(loss, epsilons)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-15)


def test_epsilon_is_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    event = poisson_gaussian_event(sampling_prob=0.0234, noise_multiplier=1.1, num_steps=70)
    quick = epsilon_pld(event, 1e-5, grid=1e-3)
    monkeypatch.setattr(losses.GaussianPrivacyLoss, "get_delta_for_epsilon", _slowly)
    monkeypatch.setattr(distributions, "from_gaussian_mechanism", _made_anew)
    assert quick == pytest.approx(epsilon_pld(event, 1e-5, grid=1e-3), rel=1e-12)
