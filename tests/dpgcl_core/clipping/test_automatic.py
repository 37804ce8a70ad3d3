"""Automatic clipping, C/(‖g‖ + γ): every engine's terms stay below C, the law is the stated one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import GAMMA, GroupClipper, clip_factor, gamma_of
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import EmbeddingObjective
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.methods.baselines.dpcl.statistics import DpSimClr
from dpgcl_core.methods.baselines.logit_dp.similarity_clipper import LogitClipper
from dpgcl_core.methods.baselines.path_clipping import FullBatchGroupClipping, PathClipping
from tests.dpgcl_core import logit_oracle
from tests.dpgcl_core.adversary import embed_of
from tests.dpgcl_core.clipping import engines
from tests.dpgcl_core.models import DirectUse, SharedLayer, TinyEncoder, group_losses_of

MARGIN = 1 - 1e-4


def _model(kind: type[nn.Module] = TinyEncoder) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def _images(*leading: int, seed: int = 0) -> Tensor:
    return torch.randn(*leading, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _gradients(model: nn.Module, views: Tensor, temperature: float = 0.5) -> Tensor:
    """Each group's gradient, float64 `[groups, num_trainable]`."""
    losses = group_losses_of(model, temperature)
    rows = []
    for group in views:
        found = torch.autograd.grad(losses(group[None]).sum(), trainable_parameters(model))
        rows.append(torch.cat([g.flatten().double() for g in found]))
    return torch.stack(rows)


def _automatic(gradients: Tensor, l2_clip_norm: float) -> Tensor:
    """Σ C·g/(‖g‖ + γ)."""
    return (l2_clip_norm * MARGIN * gradients / (gradients.norm(dim=1, keepdim=True) + GAMMA)).sum(0)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("l2_clip_norm", [1.1e-7, 1e-2, 1.0, 1e4])
def test_automatic_factor_keeps_every_finite_norm_below_c(dtype: torch.dtype, l2_clip_norm: float) -> None:
    largest = torch.finfo(dtype).max
    norms = torch.tensor([0.0, 1e-30, 1e-8, 1e-3, GAMMA, 1.0, 1e10, 1.5e38, largest], dtype=dtype)
    factor, counts = clip_factor(norms, l2_clip_norm, GAMMA)
    assert bool(torch.isfinite(factor).all())
    assert float((norms * factor).max()) < l2_clip_norm
    assert float(factor[0]) == pytest.approx(l2_clip_norm * MARGIN / GAMMA, rel=1e-6)
    assert bool(counts[:7].all())


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_automatic_factor_of_a_norm_that_is_not_finite_is_zero(norm: float) -> None:
    factor, counts = clip_factor(torch.tensor([norm]), 1.0, GAMMA)
    assert (float(factor), bool(counts)) == (0.0, False)


@pytest.mark.parametrize("kind", [TinyEncoder, SharedLayer, DirectUse])
@pytest.mark.parametrize("path", ["one pass", "loop"])
def test_automatic_sum_equals_oracle_in_both_engines(kind: type[nn.Module], path: str) -> None:
    model, views, total = _model(kind), _images(5, 2, 3), torch.zeros(num_trainable(_model(kind)))
    rest = (trainable_parameters(model), group_losses_of(model), views, 0.3, GAMMA)
    if path == "one pass":
        engines.one_pass(total, model, *rest)
    else:
        engines.loop(total, *rest)
    assert _relative_error(total, _automatic(_gradients(model, views), 0.3)) < 1e-5


def test_automatic_clipper_passes_its_law_to_the_engine_that_it_chooses() -> None:
    model = _model()
    for views in (_images(5, 2, 3), _images(1, 2, 3)):  # in one pass, and alone
        total = torch.zeros(num_trainable(model))
        GroupClipper(l2_clip_norm=0.3, gamma=GAMMA).add_clipped_sum(
            total, model, group_losses_of(model), views
        )
        assert _relative_error(total, _automatic(_gradients(model, views), 0.3)) < 1e-5


@pytest.mark.parametrize("scale", [1e-4, 1.0, 50.0])
def test_every_automatic_contribution_is_below_the_clip_norm(scale: float) -> None:
    model = _model()
    for path in ("one pass", "loop"):
        for group in (scale * _images(4, 2, 3)).split(1):
            total = torch.zeros(num_trainable(model))
            rest = (trainable_parameters(model), group_losses_of(model, 0.01), group, 0.1, GAMMA)
            if path == "one pass":
                engines.one_pass(total, model, *rest)
            else:
                engines.loop(total, *rest)
            assert float(total.double().norm()) < 0.1


CRAFTED = nn.Linear(3, 1, bias=False)


def _crafted_sum(gradients: Tensor, clipper: GroupClipper) -> Tensor:
    """The clipped sum of groups whose gradients are given, `[groups, 3]`."""
    total = torch.zeros(3)
    clipper.add_clipped_sum(total, CRAFTED, lambda x: CRAFTED(x).flatten(1).sum(1), gradients[:, None, None])
    return total


def test_automatic_clipping_lengthens_short_gradients() -> None:
    clipper = GroupClipper(l2_clip_norm=1.0, gamma=GAMMA)
    assert float(_crafted_sum(torch.tensor([[0.03, 0.0, 0.04]]), clipper).norm()) == pytest.approx(
        MARGIN * 0.05 / 0.06, rel=1e-5
    )


def test_automatic_clipping_of_zero_gradients_gives_zero() -> None:
    assert not _crafted_sum(torch.zeros(2, 3), GroupClipper(l2_clip_norm=1.0, gamma=GAMMA)).any()


def test_one_group_moves_the_automatic_sum_by_less_than_c_and_an_exchange_by_less_than_2c() -> None:
    clipper = GroupClipper(l2_clip_norm=0.5, gamma=GAMMA)
    generator, shifts = torch.Generator().manual_seed(0), []
    for _ in range(50):
        gradients = torch.randn(4, 3, generator=generator) * 10 ** (
            8 * torch.rand(4, 1, generator=generator) - 4
        )
        gradients[3] = -gradients[2] * 3  # the exchanged one points the other way
        one, other, without = (
            _crafted_sum(gradients[rows], clipper).double() for rows in ([0, 1, 2], [0, 1, 3], [0, 1])
        )
        assert float((one - without).norm()) < 0.5
        shifts.append(float((one - other).norm()))
    assert 0.99 < max(shifts) < 1.0  # 2C is nearly attained, so a law that lets more through is seen


def _path_gradients(model: nn.Module, records: Tensor) -> Tensor:
    """Each record's own-path gradient, by autograd through one record at a time."""
    with torch.no_grad():
        constant = embed_of(model)(records[None])[0]
    rows = []
    for own in range(len(records)):
        mine = embed_of(model)(records[own][None, None])[0]
        z = torch.cat([constant[:own], mine, constant[own + 1 :]])
        logits = z[:, 0] @ z[:, 1:].transpose(0, 1).flatten(0, 1).T / 0.3
        loss = nn.functional.cross_entropy(logits, torch.arange(len(records)), reduction="sum")
        found = torch.autograd.grad(loss, trainable_parameters(model))
        rows.append(torch.cat([g.flatten().double() for g in found]))
    return torch.stack(rows)


def test_automatic_path_sum_equals_oracle() -> None:
    model, records, total = _model(), _images(5, 3), torch.zeros(num_trainable(_model()))
    rule = PathClipping(l2_clip_norm=0.3, batch_cap=5, temperature=0.3, gamma=GAMMA)
    rule.add_clipped_sum(total, model, embed_of(model), records[None])
    assert _relative_error(total, _automatic(_path_gradients(model, records), 0.3)) < 1e-4


def test_automatic_whole_batch_group_is_the_plain_gradient_at_its_length() -> None:
    model, records, total = _model(), _images(1, 5, 2), torch.zeros(num_trainable(_model()))
    rule = FullBatchGroupClipping(l2_clip_norm=0.3, num_groups_cap=1, temperature=0.5, gamma=GAMMA)
    rule.add_clipped_sum(total, model, embed_of(model), records)
    assert _relative_error(total, _automatic(_gradients(model, records), 0.3)) < 1e-4


@pytest.mark.parametrize("clip", [0.05, 3.0])
def test_automatic_logit_sum_equals_oracle(clip: float) -> None:
    model, inputs, total = _model(), _images(1, 5, 2), torch.zeros(num_trainable(_model()))
    clipper = LogitClipper(logit_clip_norm=clip, temperature=0.2, gamma=GAMMA)
    report = clipper.add_clipped_sum(total, model, embed_of(model), inputs)
    z = embed_of(model)(inputs)[0]
    pairs = logit_oracle.pairs_of(trainable_parameters(model), z[:, 0], z[:, 1])
    factor = clip * MARGIN / (pairs.bounds + GAMMA)
    expected = torch.einsum(
        "ij,ijp->p", logit_oracle.coefficients(pairs.z, clipper) * factor, pairs.gradients
    )
    assert _relative_error(total, expected) < 1e-4
    assert float((report.norms * clip_factor(report.norms, clip, GAMMA)[0]).max()) < clip


def test_automatic_dpcl_views_are_each_below_the_clip_norm() -> None:
    model = _model()
    sums = []
    for gamma in (None, GAMMA):
        rule = DpSimClr(
            l2_clip_norm=0.3,
            batch_size=3,
            guarantee_label="proven",
            temperature=0.3,
            similarity_noise_multiplier=0.0,
            gamma=gamma,
        )
        sums.append(torch.zeros(num_trainable(model)))
        report = rule.add_clipped_sum(sums[-1], model, embed_of(model), _images(1, 3, 2), generator=None)  # type: ignore[arg-type]
        norms = report.norms
    assert float(sums[1].norm()) <= 6 * 0.3
    assert float((norms * clip_factor(norms, 0.3, GAMMA)[0]).max()) < 0.3
    assert not torch.allclose(sums[0], sums[1], rtol=1e-3)  # the law reaches the views


def test_infinite_clip_norm_is_the_plain_gradient_under_either_law() -> None:
    model, views = _model(), _images(4, 2, 3)
    sums = [torch.zeros(num_trainable(model)) for _ in range(2)]
    for total, gamma in zip(sums, (None, GAMMA), strict=True):
        GroupClipper(l2_clip_norm=math.inf, gamma=gamma).add_clipped_sum(
            total, model, group_losses_of(model), views
        )
    assert torch.equal(*sums)


def test_scaled_clipper_gives_the_scaled_sum() -> None:
    gradients = torch.tensor([[0.003, 0.0, 0.004], [3.0, 4.0, 0.0]])
    for gamma in (None, GAMMA):
        clipper = GroupClipper(l2_clip_norm=1.0, gamma=gamma)
        scaled = _crafted_sum(1024 * gradients, replace(clipper, gradient_scale=1024.0))
        assert torch.equal(scaled, _crafted_sum(gradients, clipper))


def _mechanism(**changes: object) -> Mechanism:
    values: dict[str, object] = {
        "num_records_public": 1000,
        "sampling_prob": 0.1,
        "group_size": 4,
        "l2_clip_norm": 0.5,
        "noise_multiplier": 1.5,
        "num_steps": 20,
        "target_delta": 1e-4,
    }
    return Mechanism(**(values | changes))  # type: ignore[arg-type]


def test_mechanism_hands_its_law_to_rule_and_clipper() -> None:
    model, views = _model(), _images(5, 4, 2)
    mechanism = _mechanism(clipping="automatic")
    expected = _automatic(_gradients(model, views), 0.5)
    settings, total = LossSettings(temperature=0.5), torch.zeros(num_trainable(model))
    objective = EmbeddingObjective(embed=embed_of(model), loss=mechanism.loss(settings))
    mechanism.rule(settings).add_clipped_sum(total, model, objective, views)
    assert _relative_error(total, expected) < 1e-5
    assert mechanism.rule(settings) == GroupClipper(l2_clip_norm=0.5, gamma=GAMMA)


def test_law_of_clipping_changes_no_sensitivity() -> None:
    assert _mechanism(clipping="automatic").sensitivity == _mechanism().sensitivity


def test_mechanism_without_noise_keeps_its_law_and_clips_nothing() -> None:
    mechanism = _mechanism(clipping="automatic").calibrated(math.inf)
    assert math.isinf(mechanism.l2_clip_norm)
    assert mechanism.clipping == "automatic"


def test_unknown_law_of_clipping_lists_the_known() -> None:
    for build in (gamma_of, lambda name: _mechanism(clipping=name)):
        with pytest.raises(ConfigError, match=r"unknown clipping 'auto'.* Valid: automatic, flat"):
            build("auto")


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "build",
    [
        partial(GroupClipper, l2_clip_norm=1.0),
        partial(PathClipping, l2_clip_norm=1.0, batch_cap=2, temperature=1.0),
        partial(FullBatchGroupClipping, l2_clip_norm=1.0, num_groups_cap=2, temperature=1.0),
        partial(LogitClipper, logit_clip_norm=1.0, temperature=1.0),
    ],
)
def test_gamma_must_be_positive_and_finite(build: Callable[..., object], gamma: float) -> None:
    with pytest.raises(ConfigError, match="gamma must be positive"):
        build(gamma=gamma)
