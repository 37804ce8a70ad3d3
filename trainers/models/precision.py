"""The precision of a network's passes: low inside the network, float32 for all its outputs.

Autocast covers only the network's forward pass, and thereby its backward pass. With float16 the gradient is
multiplied by a public constant where it enters the network; `dpgcl_core.clipping.clipper` explains why the
clipped sum may be divided by this constant afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dpgcl_core.clipping.full_precision import is_low_precision_off
from trainers.config.networks import AnyNetworkConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def pass_in(network: AnyNetworkConfig, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return `forward(inputs)` in float32, computed in the precision of `network`."""
    with _autocast(network, inputs.device):
        found = forward(inputs)
    return found.float()


def scale_gradient(network: AnyNetworkConfig, outputs: Tensor) -> Tensor:
    """Return `outputs`, whose gradient is multiplied by `network.gradient_scale` as it enters the network."""
    scale = network.gradient_scale
    if scale == 1:
        return outputs
    scaled: Tensor = _ScaleGradient.apply(outputs, scale)  # type: ignore[no-untyped-call]
    return scaled


def _autocast(network: AnyNetworkConfig, device: torch.device) -> AbstractContextManager[Any]:
    if network.precision == "float32" or is_low_precision_off():
        return nullcontext()
    # Without the cache of cast weights: it would keep one pass's graph for the next.
    return torch.autocast(device.type, dtype=_DTYPES[network.precision], cache_enabled=False)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None
