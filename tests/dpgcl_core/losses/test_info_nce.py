"""Stage 6 against the slow oracle of Eq. 12 and Eq. 15."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpgcl_core.losses.info_nce import group_info_nce, symmetric_group_info_nce, two_view_group_loss
from tests import oracles


def _unit(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1
    )


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 3),
    size=st.integers(1, 5),
    copies=st.integers(0, 3),
    temperature=st.floats(0.05, 2.0),
    seed=st.integers(0, 2**16),
)
def test_group_loss_equals_oracle_of_eq_12(
    groups: int, size: int, copies: int, temperature: float, seed: int
) -> None:
    queries, keys = _unit(groups, size, 6, seed=seed), _unit(groups, size, 6, seed=seed + 1)
    augmented = _unit(groups, size, copies, 6, seed=seed + 2)
    actual = group_info_nce(queries, keys, augmented, temperature=temperature)
    for g in range(groups):
        expected = oracles.group_info_nce(queries[g], keys[g], augmented[g], temperature)
        assert actual[g].item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)


def test_symmetric_loss_equals_oracle_of_eq_15() -> None:
    first, second = _unit(2, 4, 6, seed=1), _unit(2, 4, 6, seed=2)
    more_first, more_second = _unit(2, 4, 2, 6, seed=3), _unit(2, 4, 2, 6, seed=4)
    actual = symmetric_group_info_nce(first, second, more_first, more_second, temperature=0.3)
    for g in range(2):
        there = oracles.group_info_nce(first[g], second[g], more_second[g], 0.3)
        back = oracles.group_info_nce(second[g], first[g], more_first[g], 0.3)
        assert actual[g].item() == pytest.approx((there + back).item(), rel=1e-5)


def test_two_view_loss_takes_query_key_and_copies_in_order() -> None:
    embeddings = _unit(2, 3, 4, 6)
    expected = group_info_nce(embeddings[:, :, 0], embeddings[:, :, 1], embeddings[:, :, 2:], temperature=0.5)
    assert torch.equal(two_view_group_loss(embeddings, temperature=0.5), expected)


def test_group_loss_of_one_group_ignores_the_others() -> None:
    z = _unit(3, 4, 3, 6).requires_grad_()
    two_view_group_loss(z, temperature=0.2)[1].backward()
    assert float(z.grad[[0, 2]].abs().max()) == 0.0
    assert float(z.grad[1].abs().max()) > 0.0


def test_single_record_without_copies_has_zero_loss() -> None:
    z = _unit(2, 1, 2, 6)
    assert torch.allclose(two_view_group_loss(z, temperature=0.2), torch.zeros(2, dtype=torch.float64))


def test_augmented_copies_of_a_records_own_key_are_negatives_too() -> None:
    z = _unit(1, 1, 3, 6)
    assert float(two_view_group_loss(z, temperature=0.2)) > 0


def test_temperature_may_be_learned() -> None:
    temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    two_view_group_loss(_unit(1, 3, 3, 6), temperature=temperature).sum().backward()
    assert temperature.grad is not None
    assert float(temperature.grad) != 0
