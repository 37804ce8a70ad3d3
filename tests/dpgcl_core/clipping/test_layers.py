"""Layer rules that work in pieces, against torch's own gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.clipping import layers
from dpgcl_core.clipping.layers import Conv2dRule


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
