"""Both ways of the clipping engine, and its choice between them, each asked by itself."""

from __future__ import annotations

from torch import Tensor, nn

from dpgcl_core.clipping import clipper
from dpgcl_core.clipping.clipper import ClippingLaw, _Network
from dpgcl_core.clipping.parts import Owners
from dpgcl_core.clipping.types import (
    GroupBatch,
    GroupInputs,
    GroupReport,
    Objective,
    trainable_parameters,
)


def one_pass(
    total: Tensor,
    model: nn.Module,
    parameters: list[nn.Parameter],
    objective: Objective,
    inputs: GroupInputs,
    l2_clip_norm: float,
    gamma: float | None = None,
    owners: Owners | None = None,
    complete: Tensor | None = None,
) -> GroupReport:
    """Add the clipped sum to `total` by one pass for all groups."""
    network, law = _Network(model, parameters, objective), ClippingLaw(l2_clip_norm, gamma, owners)
    return clipper._one_pass(total, network, GroupBatch(inputs, complete), law)


def loop(
    total: Tensor,
    parameters: list[nn.Parameter],
    objective: Objective,
    inputs: GroupInputs,
    l2_clip_norm: float,
    gamma: float | None = None,
    owners: Owners | None = None,
    complete: Tensor | None = None,
) -> GroupReport:
    """Add the clipped sum to `total` by a pass for each group."""
    network, law = _Network(nn.Module(), parameters, objective), ClippingLaw(l2_clip_norm, gamma, owners)
    return clipper._loop(total, network, GroupBatch(inputs, complete), law)


def goes_in_one_pass(
    model: nn.Module, objective: Objective, inputs: GroupInputs, owners: Owners | None = None
) -> bool:
    """Whether the engine takes groups like these in one pass."""
    network = _Network(model, trainable_parameters(model), objective)
    return clipper._goes_in_one_pass(network, GroupBatch(inputs), owners)
