"""Every method of the registry: the sum of its rule is that of a slow oracle, term by term."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.mechanism.registry import METHODS
from tests.dpgcl_core.dpcl_oracle import Normals
from tests.dpgcl_core.method_oracles import (
    CASES,
    TRAINING,
    Step,
    clipped_sum,
    mechanism_of,
    rule_sum,
    target_of,
)
from tests.dpgcl_core.models import TinyEncoder

DIM = 4  # of TinyEncoder's embeddings


@cache
def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return TinyEncoder().to(dtype)


def _views(name: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*CASES[name].shape, 3, 8, 8, generator=generator)


def _normals(name: str) -> list[Normals]:
    groups, size, _ = CASES[name].shape
    generator = np.random.default_rng(5)
    return [generator.standard_normal(count) for count in CASES[name].normals(groups * size, DIM)]


def _both(name: str, **changes: object) -> tuple[Tensor, Tensor]:
    """The rule's sum and the oracle's."""
    groups, size, _ = CASES[name].shape
    mechanism = mechanism_of(name, records=groups * size, **changes)
    views, normals, model, slow = _views(name), _normals(name), _model(), _model(torch.float64)
    step = Step(
        mechanism=mechanism,
        model=slow,
        views=views.double(),
        target=target_of(slow),
        normals=normals,
    )
    actual = rule_sum(mechanism, model, views, normals, target_of(model))
    return actual, clipped_sum(step, CASES[name].terms)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_every_method_that_trains_has_an_oracle() -> None:
    assert set(CASES) == set(TRAINING)
    assert set(METHODS) - set(TRAINING) == {"base"}


@pytest.mark.parametrize("name", TRAINING)
def test_sum_of_clipped_terms_equals_oracle(name: str) -> None:
    actual, expected = _both(name, l2_clip_norm=0.02)
    assert _relative_error(actual, expected) < 2e-4


@pytest.mark.parametrize("name", TRAINING)
def test_sum_of_terms_within_the_bound_equals_oracle(name: str) -> None:
    actual, expected = _both(name, l2_clip_norm=1e4)
    assert _relative_error(actual, expected) < 2e-4


@pytest.mark.parametrize("name", TRAINING)
def test_sum_under_automatic_clipping_equals_oracle(name: str) -> None:
    actual, expected = _both(name, clipping="automatic")
    assert _relative_error(actual, expected) < 2e-4


@pytest.mark.parametrize("name", [name for name in TRAINING if METHODS[name].label != "none"])
def test_clip_norm_changes_the_sum(name: str) -> None:
    """Else the comparisons above could not tell clipping from none."""
    groups, size, _ = CASES[name].shape
    clipped, plain = (
        rule_sum(
            mechanism_of(name, records=groups * size, l2_clip_norm=clip),
            _model(),
            _views(name),
            _normals(name),
            target_of(_model()),
        )
        for clip in (0.02, 1e4)
    )
    assert 0 < float(clipped.norm()) < 0.5 * float(plain.norm())
