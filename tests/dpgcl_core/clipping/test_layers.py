"""Layer rules that work in pieces, against torch's own gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import layers
from dpgcl_core.clipping.layers import Conv2dRule, GroupNormRule

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
