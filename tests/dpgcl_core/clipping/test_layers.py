"""Layer rules against torch's own gradients: those that work in pieces, and those made from another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import layers, one_pass
from dpgcl_core.clipping.clipper import ONE_BY_ONE, GroupClipper
from dpgcl_core.clipping.direct_uses import NotSeparableError
from dpgcl_core.clipping.layers import Conv2dRule, GroupNormRule, LayerNormRule, LayerRule, rule_of
from dpgcl_core.clipping.types import no_sum, num_trainable, trainable_parameters
from dpgcl_core.clipping.verification import unsupported_layer
from dpgcl_core.losses.info_nce import two_view_group_loss
from tests import oracles
from tests.dpgcl_core.clipping import engines
from tests.dpgcl_core.models import group_losses_of

LAYOUTS = [torch.channels_last, torch.contiguous_format]


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layout_of_gradient", LAYOUTS)
# Torch's own forward pass, and the one in pieces, of few channels line by line.
@pytest.mark.parametrize(("channels", "num_channel_groups"), [(16, 1), (16, 4), (8, 2)])
@pytest.mark.parametrize("piece", [1, 500, 2**18])
def test_group_norm_and_its_gradients_are_those_in_float64(
    layout: torch.memory_format,
    layout_of_gradient: torch.memory_format,
    channels: int,
    num_channel_groups: int,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "CACHED_NUMBERS", piece)
    layer = nn.GroupNorm(num_channel_groups, channels)
    layer.weight.data, layer.bias.data = _normal(channels, seed=1), _normal(channels, seed=2)
    layer.requires_grad_(False)
    x = (_normal(6, channels, 5, 3) + 5).contiguous(memory_format=layout).requires_grad_()
    grad = _normal(6, channels, 5, 3, seed=3).contiguous(memory_format=layout_of_gradient)

    exact, exact_x = nn.GroupNorm(num_channel_groups, channels).double(), x.detach().double().contiguous()
    exact.load_state_dict(layer.state_dict())
    exact_x.requires_grad_()
    expected = exact(exact_x)
    ran = GroupNormRule().runs(layer, x)
    assert ran is not None
    output, saved = ran
    found = dict(GroupNormRule().vectors(layer, x.detach(), grad, 3, saved))
    (of_input,) = torch.autograd.grad(output, x, grad)
    (of_exact_input,) = torch.autograd.grad(expected, exact_x, grad.double(), retain_graph=True)
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=2e-5)
    assert torch.allclose(of_input.double(), of_exact_input, rtol=1e-4, atol=2e-5)
    for parameter, of_exact in ((layer.weight, exact.weight), (layer.bias, exact.bias)):
        for group in range(3):
            mask = torch.zeros(6, 1, 1, 1).double()
            mask[2 * group : 2 * group + 2] = 1
            (wanted,) = torch.autograd.grad(expected, of_exact, grad * mask, retain_graph=True)
            assert torch.allclose(found[parameter][group].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "side", "num_channel_groups"), [(8, 14, 2), (16, 14, 4), (64, 4, 16), (64, 12, 32)]
)
def test_group_norm_computes_a_row_alike_wherever_it_stands(
    channels: int, side: int, num_channel_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "CACHED_NUMBERS", 2**14)
    shape = (40, channels, side, side)
    x, grad = (_normal(*shape, seed=seed).contiguous(memory_format=torch.channels_last) for seed in (0, 1))
    layer = nn.GroupNorm(num_channel_groups, channels).requires_grad_(False)

    def run(rows: slice) -> list[Tensor]:
        values = x[rows].detach().requires_grad_()
        ran = GroupNormRule().runs(layer, values)
        assert ran is not None
        output, saved = ran
        slope, shift = GroupNormRule().vectors(layer, values.detach(), grad[rows], len(values), saved)
        return [output.detach(), slope[1], shift[1], *torch.autograd.grad(output, values, grad[rows])]

    together = run(slice(None))
    for rows in (slice(0, 1), slice(7, 9), slice(20, 37)):
        for each, alone in zip(together, run(rows), strict=True):
            assert torch.equal(each[rows], alone)


def test_group_norm_in_pieces_keeps_the_digits_that_a_large_mean_takes() -> None:
    x = (1000 + _normal(4, 16, 8, 8)).contiguous(memory_format=torch.channels_last)
    exact = nn.functional.group_norm(x.double(), 4)
    output, _, _ = layers._normalised(x, torch.ones(16), torch.zeros(16), 4, 1e-5)
    assert (output - exact).abs().max() < 1e-3


@pytest.mark.parametrize("in_channels", [1, 3, 16])  # tap by tap, and by runs of memory
@pytest.mark.parametrize("piece", [1, 3000, 2**18])
def test_a_convolution_in_pieces_gives_each_groups_own_gradient(
    in_channels: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "CACHED_NUMBERS", piece)
    layer = nn.Conv2d(in_channels, 4, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2))
    x = _normal(10, in_channels, 9, 7).contiguous(memory_format=torch.channels_last)
    grad = _normal(*layer(x).shape, seed=1)
    found = Conv2dRule().per_group(layer, x, grad, 5)
    for group, inputs, outputs in zip(found, x.chunk(5), grad.chunk(5), strict=True):
        (expected,) = torch.autograd.grad(layer(inputs), layer.weight, outputs)
        assert torch.allclose(group, expected, rtol=1e-4, atol=1e-4)


LINE, IMAGE = (6, 4, 11), (6, 4, 5, 7)
LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3), LINE),
    (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), LINE),
    (nn.Conv1d(4, 4, 5, padding="same", groups=4, bias=False), LINE),
    (nn.Conv1d(4, 6, 4, padding="same", dilation=2), LINE),
    (nn.Conv1d(4, 6, 2, padding="valid"), LINE),
    (nn.Conv1d(4, 6, 1, stride=3), LINE),
    *((nn.Conv1d(4, 6, 3, stride=2, padding=2, padding_mode=mode), LINE) for mode in ("reflect", "circular")),
    (nn.Conv1d(4, 6, 4, padding="same", padding_mode="replicate"), LINE),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), LINE),
    (nn.ConvTranspose1d(4, 6, 4, dilation=2, groups=2, bias=False), LINE),
    (nn.ConvTranspose2d(4, 6, 3), IMAGE),
    (nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, dilation=(1, 2)), IMAGE),
    (nn.RMSNorm(7), (6, 7)),
    (nn.RMSNorm(7, eps=0.1), IMAGE),
    (nn.RMSNorm((5, 7)), IMAGE),
    (nn.RMSNorm(7, elementwise_affine=False), IMAGE),
]


# In pieces, and by one call of the convolution per group.
@pytest.mark.parametrize(("piece", "many_numbers"), [(1, 2**21), (200, 2**21), (2**18, 2**21), (2**18, 0)])
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_a_layer_gives_each_groups_own_gradient_and_norm(
    layer: nn.Module, shape: tuple[int, ...], piece: int, many_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "CACHED_NUMBERS", piece)
    monkeypatch.setattr(layers, "MANY_NUMBERS", many_numbers)
    monkeypatch.setattr(layers, "MANY_PATCHES", 0)
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = _normal(*parameter.shape, seed=2 + index)
    x = _normal(*shape)
    grad = _normal(*layer(x).shape, seed=1)
    rule = rule_of(layer)
    assert rule is not None
    assert not rule.unsupported_reason(layer)
    matrix, found = rule.matrix(layer), dict(rule.vectors(layer, x, grad, 3))
    if matrix is not None:
        found[matrix] = rule.per_group(layer, x, grad, 3)
        squares, magnitude_bound = rule.ghost_norms(layer, x, grad, 3)
        exact = found[matrix].double().flatten(1).square().sum(1)
        assert torch.allclose(squares, exact, rtol=1e-5)
        assert (magnitude_bound * (1 + 1e-6) >= squares.sqrt()).all()
        assert torch.allclose(rule.total(layer, x, grad).float(), found[matrix].sum(0), rtol=1e-4, atol=1e-4)
    assert found.keys() == set(layer.parameters())
    for parameter, per_group in found.items():
        for group, inputs, outputs in zip(per_group, x.chunk(3), grad.chunk(3), strict=True):
            (expected,) = torch.autograd.grad(layer(inputs), parameter, outputs)
            assert torch.allclose(group, expected, rtol=1e-4, atol=1e-4)


def test_a_root_mean_square_of_tiny_numbers_has_the_epsilon_of_float32() -> None:
    layer, x, grad = nn.RMSNorm(7), 1e-4 * _normal(4, 7), _normal(4, 7, seed=1)
    rule = rule_of(layer)
    assert rule is not None
    for dtype in (torch.float32, torch.bfloat16):
        exact = layer.to(dtype)(x.to(dtype)).detach().float() * grad.to(dtype).float()
        ((_, found),) = rule.vectors(layer, x.to(dtype), grad.to(dtype), 4)
        assert found.dtype == torch.float32
        assert torch.allclose(found, exact, rtol=1e-5 if dtype == torch.float32 else 5e-3)


class _Lines(nn.Module):
    """Images as lines of pixels, through convolutions along them and back up, and root mean squares."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(3, 6, 5, stride=2, padding=2, padding_mode="reflect")
        self.mixing = nn.Conv1d(6, 6, 3, padding="same", groups=2)
        self.norm = nn.RMSNorm(32)
        self.up = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)
        self.head, self.last = nn.Linear(64, 6), nn.RMSNorm(6, eps=1e-3)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.down(images.flatten(2)))
        x = self.norm(x + self.mixing(torch.tanh(self.mixing(x))))  # one layer, used twice
        return nn.functional.normalize(self.last(self.head(torch.tanh(self.up(x)).mean(1))), dim=-1)


class _UpAndDown(nn.Module):
    """Images up by a transposed convolution and down again; root mean squares over whole images."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1)
        self.norm, self.down = nn.RMSNorm((16, 16)), nn.Conv2d(4, 6, 4, 4)
        self.head = nn.Linear(96, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.down(self.norm(torch.tanh(self.up(images))))
        return nn.functional.normalize(self.head(torch.tanh(x).flatten(1)), dim=-1)


class _ByKeyword(nn.Module):
    """Calls every layer with its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 6, 3, 2, 1), nn.GroupNorm(2, 6)
        self.lines, self.rms, self.layer_norm = nn.Conv1d(6, 6, 3), nn.RMSNorm(14), nn.LayerNorm(14)
        self.head = nn.Linear(14, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.norm(input=self.convolution(input=images))).flatten(2)
        x = self.layer_norm(input=torch.tanh(self.rms(x=self.lines(input=x))))
        return nn.functional.normalize(self.head(input=x.mean(1)), dim=-1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "lines": _Lines,
    "transposed": _UpAndDown,
    "by keyword": _ByKeyword,
}
BY_GHOST_NORM, BY_GRADIENT = 1e12, 0.0


def _built(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return NETWORKS[name]()


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_go_in_one_pass_with_the_sum_of_a_loop(
    name: str, frozen: str, flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the self-check, for a layer used twice, and with all weights or all biases frozen."""
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model, views = _built(name), 3 * _normal(5, 3, 2, 3, 8, 8)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not parameter_name.endswith(frozen))
    losses_of = group_losses_of(model)
    assert engines.goes_in_one_pass(model, losses_of, views)
    total = no_sum(model)
    report = GroupClipper(l2_clip_norm=0.3, groups_at_once=3).add_clipped_sum(total, model, losses_of, views)
    expected = oracles.clipped_sum(model, losses_of, views, 0.3 * (1 - 1e-4))
    assert (total - expected).norm() < 1e-5 * expected.norm()
    assert ONE_BY_ONE not in report.paths.values()
    if frozen != "weight":
        assert report.paths


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_bit_of_a_groups_gradient_follows_its_companions(
    name: str, flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model, views = _built(name), 3 * _normal(4, 3, 2, 3, 8, 8)
    losses_of, law = group_losses_of(model), (0.3, None, None)
    found = []
    for companions in (views, 50 * _normal(*views.shape, seed=1), torch.full_like(views, torch.nan)):
        inputs = torch.cat([companions[:1], views[1:2], companions[2:]])
        total, complete = no_sum(model), torch.tensor([False, True, False, False])
        rest = (trainable_parameters(model), losses_of, inputs)
        report = engines.one_pass(total, model, *rest, *law, complete)
        found.append(torch.cat([report.norms[1:2].double(), total]))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    assert found[0][1:].norm() > 0


@pytest.mark.parametrize("flops_per_number", [BY_GRADIENT, BY_GHOST_NORM])
@pytest.mark.parametrize("name", NETWORKS)
def test_contributions_in_bfloat16_stay_within_the_clip_norm_near_those_in_float32(
    name: str, flops_per_number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_pass, "_FLOPS_PER_NUMBER", flops_per_number)
    model, views = _built(name), 3 * _normal(1, 3, 2, 3, 8, 8)
    sums = []
    for is_low in (False, True):

        def losses(views: Tensor, is_low: bool = is_low) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
                embeddings = model(views.flatten(0, 2))
            return two_view_group_loss(embeddings.float().unflatten(0, views.shape[:3]), temperature=0.1)

        total = torch.zeros(num_trainable(model))
        engines.one_pass(total, model, trainable_parameters(model), losses, views, 0.1)
        sums.append(total.double())
        assert 0.0999 * 0.99 < float(sums[-1].norm()) <= 0.1
    assert (sums[1] - sums[0]).norm() < 0.2 * sums[0].norm()


@pytest.mark.parametrize("rule", [GroupNormRule, LayerNormRule])
def test_normalisations_called_by_keyword_keep_their_statistics(
    rule: type[LayerRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, views, found, right = _built("by keyword"), _normal(3, 2, 2, 3, 8, 8), [], rule.vectors

    def noting(self, module, x, grad, num_groups, statistics=()):  # type: ignore[no-untyped-def]
        found.append((type(module), len(statistics)))
        return right(self, module, x, grad, num_groups, statistics)

    monkeypatch.setattr(rule, "vectors", noting)
    engines.one_pass(no_sum(model), model, trainable_parameters(model), group_losses_of(model), views, 0.3)
    assert (nn.GroupNorm, 4) in found or (nn.LayerNorm, 2) in found


def test_an_output_padding_that_one_pass_does_not_support_is_named() -> None:
    layer = nn.ConvTranspose1d(3, 3, 3, dilation=2, output_padding=1)
    assert "output_padding" in unsupported_layer(nn.Sequential(layer))


def test_a_layer_called_with_anything_else_is_refused() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose1d(3, 4, 3, stride=2)

        def forward(self, images: Tensor) -> Tensor:
            return nn.functional.normalize(self.up(images.flatten(2), output_size=[130]).mean(2), dim=-1)

    model, views = Sized(), _normal(3, 2, 2, 3, 8, 8)
    losses_of, total = group_losses_of(model), no_sum(model)
    with pytest.raises(NotSeparableError, match="'up'"):
        engines.one_pass(no_sum(model), model, trainable_parameters(model), losses_of, views, 0.3)
    GroupClipper(l2_clip_norm=0.3).add_clipped_sum(total, model, losses_of, views)
    expected = oracles.clipped_sum(model, losses_of, views, 0.3 * (1 - 1e-4))
    assert (total - expected).norm() < 1e-5 * expected.norm()
