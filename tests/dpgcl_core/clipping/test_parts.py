"""Clipping by parts: each part of a group's gradient within C/√m, so that the whole stays within C."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping import one_pass
from dpgcl_core.clipping.clipper import GAMMA, ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.layers import LinearRule
from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from tests import oracles
from tests.dpgcl_core.clipping import engines
from tests.dpgcl_core.models import (
    DirectUse,
    ImageTransformer,
    Routed,
    SharedLayer,
    TextEncoder,
    TinyEncoder,
    TwoTowers,
    group_losses_of,
)

MARGIN = 1 - 1e-4
BY_GHOST_NORM, BY_GRADIENT = 1e12, 0.0
Inputs = Tensor | tuple[Tensor, ...]


class LowRank(nn.Module):
    """A frozen layer with two trained factors beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


class AdaptedTowers(nn.Module):
    """Two towers of which only low-rank factors and the temperature train; the names interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.text_in = LowRank(5, 8)
        self.visual = nn.Sequential(nn.Flatten(), LowRank(192, 8), nn.Tanh(), LowRank(8, 4))
        self.text_out = LowRank(8, 4)

    def group_losses(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        images, tokens = inputs
        first = self.visual(images.flatten(0, 2))
        second = self.text_out(torch.tanh(self.text_in(tokens.flatten(0, 2).float())))
        both = [nn.functional.normalize(z, dim=-1).view(*images.shape[:2], -1) for z in (first, second)]
        logits = torch.einsum("gid,gjd->gij", *both) * self.logit_scale.exp()
        return (torch.logsumexp(logits, 2) - torch.diagonal(logits, dim1=1, dim2=2)).sum(1)


CASES: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "two towers": (TwoTowers, ("image.",)),
    "three parts": (TwoTowers, ("image.", "text.")),
    "temperature alone": (TwoTowers, ("logit_scale",)),
    "low rank": (AdaptedTowers, ("visual.",)),
    "direct use": (DirectUse, ("scale",)),
    "direct uses": (ImageTransformer, ("token", "positions", "attention.")),
    "shared layer": (SharedLayer, ("layer.",)),
    "every layer": (TinyEncoder, ("layers.0.", "layers.4.")),
    "not separable": (Routed, ("experts.",)),
}


def _built(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return kind()


def _inputs(model: nn.Module, groups: int = 5, *, seed: int = 0, scale: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    views = 1 if hasattr(model, "group_losses") else 3
    images = scale * torch.randn(groups, 2, views, 3, 8, 8, generator=generator)
    return (images, torch.randint(11, (groups, 2, 1, 5), generator=generator)) if views == 1 else images


def _losses(model: nn.Module) -> Callable[[Inputs], Tensor]:
    return model.group_losses if hasattr(model, "group_losses") else group_losses_of(model)


def _each_group(inputs: Inputs) -> list[Inputs]:
    if isinstance(inputs, Tensor):
        return list(inputs.split(1))
    return list(zip(*(each.split(1) for each in inputs), strict=True))


def _oracle(
    model: nn.Module, inputs: Inputs, prefixes: tuple[str, ...], clip: float, gamma: float | None
) -> Tensor:
    def part_of(name: str) -> int:
        for part, prefix in enumerate(prefixes):
            if name[: len(prefix)] == prefix:
                return part
        return len(prefixes)

    return oracles.clipped_sum_by_parts(
        model, _losses(model), _each_group(inputs), part_of, clip * MARGIN, gamma
    )


def _one_way(way: str, model: nn.Module, inputs: Inputs, prefixes: tuple[str, ...], clip: float):  # type: ignore[no-untyped-def]
    total, owners = torch.zeros(num_trainable(model)), ClippingParts(prefixes=prefixes).owners(model)
    rest = (trainable_parameters(model), _losses(model), inputs, clip, None, owners)
    report = engines.one_pass(total, model, *rest) if way == "one pass" else engines.loop(total, *rest)
    return total, report


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# --- the sum ---


@pytest.mark.parametrize("gamma", [None, GAMMA])
@pytest.mark.parametrize("clip", [0.05, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_sum_clipped_by_parts_equals_oracle(name: str, clip: float, gamma: float | None) -> None:
    kind, prefixes = CASES[name]
    model = _built(kind)
    inputs, total = _inputs(model), torch.zeros(num_trainable(model))
    clipper = GroupClipper(l2_clip_norm=clip, gamma=gamma, parts=ClippingParts(prefixes=prefixes))
    report = clipper.add_clipped_sum(total, model, _losses(model), inputs)
    assert _relative_error(total, _oracle(model, inputs, prefixes, clip, gamma)) < 2e-5
    assert (report.paths == {"": ONE_BY_ONE}) == (name == "not separable")


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("name", [name for name in CASES if name != "not separable"])
def test_one_pass_by_parts_equals_loop_on_both_ways_to_a_norm(
    name: str, flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    kind, prefixes = CASES[name]
    model = _built(kind)
    (at_once, fast), (looped, slow) = (
        _one_way(way, model, _inputs(model), prefixes, 0.3) for way in ("one pass", "loop")
    )
    assert _relative_error(at_once, looped.double()) < 2e-5
    assert torch.allclose(fast.part_ratios, slow.part_ratios, rtol=1e-4)


def test_microbatches_change_nothing_of_a_sum_by_parts() -> None:
    kind, prefixes = CASES["three parts"]
    model = _built(kind)
    inputs, sums = _inputs(model, 6), []
    clipper = GroupClipper(l2_clip_norm=0.1, parts=ClippingParts(prefixes=prefixes))
    for size in (6, 1, 4):
        sums.append(torch.zeros(num_trainable(model)))
        for some in zip(*(each.split(size) for each in inputs), strict=True):
            clipper.add_clipped_sum(sums[-1], model, _losses(model), some)
    assert all(_relative_error(total, sums[0].double()) < 1e-6 for total in sums)


def test_infinite_clip_norm_gives_the_plain_gradient_whatever_the_parts() -> None:
    model = _built(TinyEncoder)
    views, sums = _inputs(model), []
    for parts in (None, ClippingParts(prefixes=("layers.0.",))):
        sums.append(torch.zeros(num_trainable(model)))
        clipper = GroupClipper(l2_clip_norm=math.inf, parts=parts)
        clipper.add_clipped_sum(sums[-1], model, _losses(model), views)
    assert torch.equal(*sums)


# --- the bound ---


class Crafted(nn.Module):
    """Three layers whose gradients are the inputs themselves, three numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 1, bias=False) for _ in range(3))

    def group_losses(self, x: Tensor) -> Tensor:
        terms = (layer(some) for layer, some in zip((self.a, self.b, self.c), x.split(3, -1), strict=True))
        return sum(terms).flatten(1).sum(1)  # type: ignore[union-attr]


PARTS = {2: ClippingParts(prefixes=("b.",)), 3: ClippingParts(prefixes=("a.", "b."))}
COLUMNS = {2: [[3, 4, 5], [0, 1, 2, 6, 7, 8]], 3: [[0, 1, 2], [3, 4, 5], [6, 7, 8]]}


def _crafted_sum(gradients: Tensor, clipper: GroupClipper, way: str = "one pass") -> Tensor:
    """The clipped sum of groups whose gradients are given, `[groups, 9]`."""
    assert clipper.parts is not None
    model, total = Crafted(), torch.zeros(9)
    law = (clipper.l2_clip_norm, clipper.gamma, clipper.parts.owners(model))
    rest = (trainable_parameters(model), model.group_losses, gradients[:, None, None], *law)
    if way == "one pass":
        engines.one_pass(total, model, *rest)
    else:
        engines.loop(total, *rest)
    return total.double()


ADVERSARIAL = [
    (1e30, 1e-30, 1.0),
    (1e-30, 1e30, 1e-30),
    (1e18, 1e18, 1e18),
    (1e-8, 1e-8, 1e4),
    (0.0, 1e9, 0.0),
]


@pytest.mark.parametrize("way", ["one pass", "loop"])
@pytest.mark.parametrize("gamma", [None, GAMMA])
@pytest.mark.parametrize("scales", ADVERSARIAL)
@pytest.mark.parametrize("num_parts", PARTS)
def test_every_part_is_within_its_share_of_c(
    num_parts: int, scales: tuple[float, ...], gamma: float | None, way: str
) -> None:
    clipper = GroupClipper(l2_clip_norm=0.5, gamma=gamma, parts=PARTS[num_parts])
    directions = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    total = _crafted_sum(directions * torch.tensor(scales).repeat_interleave(3), clipper, way)
    norms = [float(total[columns].norm()) for columns in COLUMNS[num_parts]]
    assert max(norms) <= 0.5 / math.sqrt(num_parts)
    assert max(norms) > 0.99 * 0.5 / math.sqrt(num_parts)  # the largest part is long enough to fill it
    assert float(total.norm()) <= 0.5


@pytest.mark.parametrize("num_parts", PARTS)
def test_long_parts_fill_c_and_no_more(num_parts: int) -> None:
    total = _crafted_sum(torch.full((1, 9), 1e6), GroupClipper(l2_clip_norm=0.5, parts=PARTS[num_parts]))
    assert 0.999 * 0.5 < float(total.norm()) <= 0.5


def test_short_part_is_left_alone_beside_a_huge_one() -> None:
    gradient = torch.tensor([[1e-3, 0, 0, 1e9, 0, 0, 0, 0, 2e-3]])
    total = _crafted_sum(gradient, GroupClipper(l2_clip_norm=0.5, parts=PARTS[3]))
    assert total[[0, 8]].tolist() == pytest.approx([1e-3, 2e-3])


@pytest.mark.parametrize("way", ["one pass", "loop"])
@pytest.mark.parametrize("name", ["two towers", "three parts", "every layer", "direct uses"])
def test_every_contribution_by_parts_of_a_network_is_within_c(name: str, way: str) -> None:
    kind, prefixes = CASES[name]
    model = _built(kind)
    owners = torch.tensor(ClippingParts(prefixes=prefixes).owners(model))
    part_of = owners.repeat_interleave(torch.tensor([p.numel() for p in trainable_parameters(model)]))
    for group in _each_group(_inputs(model, 3, scale=20.0)):
        total = _one_way(way, model, group, prefixes, 1e-3)[0].double()
        for part in range(len(prefixes) + 1):
            assert float(total[part_of == part].norm()) <= 1e-3 / math.sqrt(len(prefixes) + 1)
        assert float(total.norm()) <= 1e-3


@pytest.mark.parametrize("seed", range(8))  # the squared norm of part of them rounds to less than zero
def test_rounding_of_terms_that_cancel_stays_within_their_own_part(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other part's magnitude_bound is small, and must not be what the cancelling part is measured by."""
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GHOST_NORM)
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    generator = torch.Generator().manual_seed(seed)
    weights = 1e7 * torch.randn(16, 64, generator=generator)
    weights = torch.cat([weights[:8], -weights[:8]])

    def losses(inputs: Tensor) -> Tensor:
        flat = inputs.flatten(0, 2)
        return ((model["a"](flat) * weights).sum() + 1e-6 * model["b"](flat).sum())[None]

    inputs = torch.randn(1, 1, 64, generator=generator).expand(1, 16, 64).contiguous()[:, :, None]
    total = torch.zeros(num_trainable(model))
    owners = ClippingParts(prefixes=("a.",)).owners(model)
    engines.one_pass(total, model, trainable_parameters(model), losses, inputs, 1.0, None, owners)
    assert float(total[: 64 * 64].double().norm()) <= 1 / math.sqrt(2)
    assert torch.allclose(total[64 * 64 :], 1e-6 * inputs.sum((0, 1, 2)).repeat(64), rtol=1e-4)


@pytest.mark.parametrize("gamma", [None, GAMMA])
@pytest.mark.parametrize("num_parts", PARTS)
def test_neighbouring_sums_by_parts_are_within_the_sensitivity(num_parts: int, gamma: float | None) -> None:
    """One group more moves the sum by at most C, an exchanged one by at most 2C; both nearly attained."""
    clipper = GroupClipper(l2_clip_norm=0.5, gamma=gamma, parts=PARTS[num_parts])
    generator, more, exchanged = torch.Generator().manual_seed(0), [], []
    for _ in range(40):
        sizes = 10 ** (8 * torch.rand(4, 3, generator=generator) - 3)
        gradients = torch.randn(4, 9, generator=generator) * sizes.repeat_interleave(3, 1)
        gradients[3] = -3 * gradients[2]  # the exchanged one points the other way in every part
        one, other, without = (
            _crafted_sum(gradients[rows], clipper) for rows in ([0, 1, 2], [0, 1, 3], [0, 1])
        )
        more.append(float((one - without).norm()))
        exchanged.append(float((one - other).norm()))
    assert 0.99 * 0.5 < max(more) <= 0.5
    assert 0.99 * 1.0 < max(exchanged) <= 1.0


# --- a part that is not finite ---


@pytest.mark.parametrize("way", ["one pass", "loop"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("column", [0, 4, 8])
def test_group_with_one_part_not_finite_is_left_out_as_a_whole(column: int, bad: float, way: str) -> None:
    clipper = GroupClipper(l2_clip_norm=0.5, parts=PARTS[3])
    gradients = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    silent = gradients.clone()
    silent[1] = 0
    gradients[1, [column, column - 1]] = bad  # two of 3e38 overflow together, in one part or as a whole
    assert torch.equal(_crafted_sum(gradients, clipper, way), _crafted_sum(silent, clipper, way))


@pytest.mark.parametrize("way", ["one pass", "loop"])
@pytest.mark.parametrize("tower", [0, 1])
def test_report_says_which_groups_were_left_out(tower: int, way: str) -> None:
    model = _built(AdaptedTowers)
    images, tokens = _inputs(model, 4)
    poisoned = [images, tokens.float()]
    poisoned[tower] = poisoned[tower].clone()
    poisoned[tower][2] = math.nan
    total, report = _one_way(way, model, tuple(poisoned), ("visual.",), 0.3)
    assert report.non_finite.tolist() == [False, False, True, False]
    assert torch.isfinite(total).all()
    assert torch.isfinite(report.norms[~report.non_finite]).all()


@pytest.mark.parametrize("way", ["one pass", "loop"])
def test_factor_that_lost_its_digits_in_one_part_leaves_out_the_group_and_says_so(way: str) -> None:
    model, total = Crafted(), torch.zeros(9)
    gradients = torch.ones(2, 1, 1, 9)
    gradients[0, ..., 4] = 1.5e38
    rest = (trainable_parameters(model), model.group_losses, gradients, 1.1e-7, None, (0, 1, 2))
    report = engines.one_pass(total, model, *rest) if way == "one pass" else engines.loop(total, *rest)
    assert report.non_finite.tolist() == [True, False]
    assert float(total.norm()) <= 1.1e-7


@pytest.mark.parametrize("way", ["one pass", "loop"])
def test_norm_that_overflows_only_as_a_whole_leaves_out_the_group(way: str) -> None:
    """Every group that counts has a finite norm in the report."""
    gradients = torch.ones(2, 9)
    gradients[1, [0, 3]] = 3e38
    clipper = GroupClipper(l2_clip_norm=1e3, parts=PARTS[3])
    assert torch.equal(_crafted_sum(gradients, clipper, way), torch.ones(9).double())


# --- the report and the scale ---


def test_report_has_norms_of_whole_gradients_and_ratios_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Crafted()
    gradients = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GRADIENT)
    monkeypatch.setattr(clipping, "_MAX_GRADIENT_NUMBERS", 18)  # two groups in a pass
    monkeypatch.setattr(clipping, "_MAX_GRADIENT_NUMBERS_PER_WEIGHT", 0)
    report = GroupClipper(l2_clip_norm=2.0, parts=PARTS[3]).add_clipped_sum(
        torch.zeros(9), model, model.group_losses, gradients[:, None, None]
    )
    assert ONE_BY_ONE not in report.paths.values()
    assert torch.allclose(report.norms, gradients.norm(dim=1))
    assert report.part_ratios is not None
    assert torch.allclose(report.part_ratios, gradients.view(5, 3, 3).norm(dim=2) * math.sqrt(3) / 2.0)


def test_report_without_parts_has_no_ratios() -> None:
    model = Crafted()
    for groups in (1, 3):
        report = GroupClipper(l2_clip_norm=2.0).add_clipped_sum(
            torch.zeros(9), model, model.group_losses, torch.ones(groups, 1, 1, 9)
        )
        assert report.part_ratios is None


@pytest.mark.parametrize("gamma", [None, GAMMA])
def test_scaled_clipper_by_parts_gives_the_scaled_sum(gamma: float | None) -> None:
    clipper = GroupClipper(l2_clip_norm=1.0, gamma=gamma, parts=PARTS[3])
    gradients = torch.tensor([[3.0, 4, 0, 3e-3, 0, 4e-3, 0, 0, 0], [1e-3, 0, 0, 7, 0, 0, 5, 12, 0]])
    scaled = replace(clipper, gradient_scale=1024.0)
    sums = [torch.zeros(9, dtype=torch.float64) for _ in range(2)]
    for total, engine, times in zip(sums, (scaled, clipper), (1024, 1), strict=True):
        engine.add_clipped_sum(total, Crafted(), Crafted().group_losses, times * gradients[:, None, None])
    assert torch.equal(*sums)


# --- the self-check ---


class Faint(nn.Module):
    """A tower that hardly counts in the whole gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.faint = nn.Linear(192, 4), nn.Linear(192, 4)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        return nn.functional.normalize(self.main(flat) + 0.01 * self.faint(flat), dim=-1)


def test_self_check_with_parts_sees_a_norm_that_the_whole_gradient_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, right = _built(Faint), LinearRule.ghost_norms

    def wrong(self, module, *args):  # type: ignore[no-untyped-def]
        squares, magnitude_bound = right(self, module, *args)
        return (0.25 * squares if module is model.faint else squares), magnitude_bound

    monkeypatch.setattr(LinearRule, "ghost_norms", wrong)
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", BY_GHOST_NORM)
    views, total, taken = _inputs(model, 3), torch.zeros(num_trainable(model)), []
    for parts in (None, ClippingParts(prefixes=("faint.",))):
        clipper = GroupClipper(l2_clip_norm=1.0, parts=parts)
        taken.append(clipper.add_clipped_sum(total, model, group_losses_of(model), views).paths)
    assert ONE_BY_ONE not in taken[0].values()
    assert taken[1] == {"": ONE_BY_ONE}


@pytest.mark.parametrize("name", [name for name in CASES if name != "not separable"])
def test_self_check_with_parts_passes_what_goes_in_one_pass(name: str) -> None:
    kind, prefixes = CASES[name]
    model = _built(kind)
    owners = ClippingParts(prefixes=prefixes).owners(model)
    assert engines.goes_in_one_pass(model, _losses(model), _inputs(model, 3), owners)


# --- the parts of a model ---


def test_parameter_belongs_to_the_first_prefix_that_fits() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert ClippingParts(prefixes=("0.1.", "0.")).owners(model) == (1, 1, 0, 0, 2, 2)


def test_frozen_parameters_have_no_part() -> None:
    model = _built(AdaptedTowers)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    owners = ClippingParts(prefixes=("visual.",)).owners(model)
    assert owners == tuple(0 if name.startswith("visual.") else 1 for name in names)
    assert len(owners) == len(trainable_parameters(model)) < len(list(model.parameters()))


def test_tied_parameter_has_one_part() -> None:
    model = TextEncoder(tied=True)
    owners = ClippingParts(prefixes=("table.",)).owners(model)
    assert len(owners) == len(trainable_parameters(model))
    assert owners.count(0) == 1


@pytest.mark.parametrize(
    ("prefixes", "reason"),
    [
        (("c.", "d."), r"no name outside the earlier parts begins with 'd\.'"),
        (("a", "a."), r"no name outside the earlier parts begins with 'a\.'"),
        (("a.", "b.", "c."), r"every name begins with one of the prefixes a\., b\., c\.\. Leave out one"),
        (("frozen.",), r"begins with 'frozen\.'\. Trainable names .*: a\.weight, b\.weight, c\.weight$"),
    ],
)
@pytest.mark.parametrize("clip", [1.0, math.inf])
def test_part_without_a_trainable_parameter_is_refused(
    prefixes: tuple[str, ...], reason: str, clip: float
) -> None:
    model = Crafted()
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    clipper = GroupClipper(l2_clip_norm=clip, parts=ClippingParts(prefixes=prefixes))
    with pytest.raises(ConfigError, match=reason):
        clipper.add_clipped_sum(torch.zeros(9), model, model.group_losses, torch.ones(2, 1, 1, 9))


@pytest.mark.parametrize("prefixes", [(), ("",), ("a.", ""), ("a.", "a.")])
def test_prefixes_must_be_different_names(prefixes: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="one or more different names that are not empty"):
        ClippingParts(prefixes=prefixes)
