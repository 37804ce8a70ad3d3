"""Types of a clipper's inputs and outputs: inputs, losses, embeddings and by-products, by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

GroupInputs = Tensor | tuple[Tensor, ...]
"""The inputs of groups: one tensor or several, `[groups, group_size, views, ...]` each."""


def map_inputs(change: Callable[[Tensor], Tensor], inputs: GroupInputs) -> GroupInputs:
    """Return inputs of the same form with `change` applied to each tensor."""
    return change(inputs) if isinstance(inputs, Tensor) else tuple(map(change, inputs))


@dataclass(frozen=True, eq=False, repr=False)
class GroupBatch:
    """Groups that a clipper processes together, with their mask.

    Attributes:
      inputs: `[groups, group_size, views, ...]`, or a tuple of such tensors.
      complete: bool `[groups]`, which groups contribute, on the device of the sum; None for all.
    """

    inputs: GroupInputs
    complete: Tensor | None = None

    def __len__(self) -> int:
        return len(self.leaves[0])

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors of the inputs."""
        return (self.inputs,) if isinstance(self.inputs, Tensor) else self.inputs

    @property
    def num_views(self) -> int:
        """The number of views of one group, over all its records, in the first tensor."""
        return self.leaves[0].shape[1:3].numel()

    @property
    def group_shape(self) -> tuple[torch.Size, ...]:
        """The shape of one group, tensor by tensor."""
        return tuple(leaf.shape[1:] for leaf in self.leaves)

    def part(self, start: int, stop: int) -> GroupBatch:
        """Return the groups from `start` up to `stop`, with their mask."""
        complete = None if self.complete is None else self.complete[start:stop]
        return GroupBatch(map_inputs(lambda leaf: leaf[start:stop], self.inputs), complete)

    def filled_up(self, num_groups: int, device: torch.device) -> GroupBatch:
        """Return these groups followed by groups of zeros, not complete, up to `num_groups` in total."""

        def with_zeros(leaf: Tensor) -> Tensor:
            return torch.cat([leaf, leaf.new_zeros(num_groups - len(leaf), *leaf.shape[1:])])

        complete = torch.zeros(num_groups, dtype=torch.bool, device=device)
        complete[: len(self)] = True if self.complete is None else self.complete
        return GroupBatch(map_inputs(with_zeros, self.inputs), complete)


def as_inputs(leaves: Sequence[Tensor]) -> GroupInputs:
    """Return tensors as inputs; a single tensor is returned without a tuple."""
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


class Objective(Protocol):
    """A function that gives one loss per clip unit, whose gradient is clipped."""

    def __call__(self, inputs: Any, /) -> Tensor:
        """Return losses `[groups]` of `GroupInputs`; each loss depends only on its own group's inputs."""


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """What a gradient rule reports besides the sum, all **private-only** except `paths`.

    Attributes:
      norms: `[groups]` norms of whole gradients before clipping; nan if they were not needed (C = inf).
      losses: `[groups]` losses.
      non_finite: `[groups]`, which groups were masked to zero, in all their parts.
      paths: the way in which each layer's norm was computed, by layer name; "" is the whole network.
      part_ratios: `[groups, parts]`, the norm of each part divided by its own bound C/√m, above 1 if that
        part must be shortened; None if the gradient is clipped as a whole.
      complete: `[groups]`, which groups may contribute; norm and loss of the others are 0. None for all.
    """

    norms: Tensor
    losses: Tensor
    non_finite: Tensor
    paths: Mapping[str, str] = field(default_factory=dict)
    part_ratios: Tensor | None = None
    complete: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor], complete: Tensor | None) -> GroupReport:
        """Return the report with `change` applied to all values by group, and with another mask."""
        return replace(
            self,
            norms=change(self.norms),
            losses=change(self.losses),
            non_finite=change(self.non_finite),
            part_ratios=None if self.part_ratios is None else change(self.part_ratios),
            complete=complete,
        )


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters in the order of every flat vector of this package."""
    return [p for p in model.parameters() if p.requires_grad]


def num_trainable(model: nn.Module) -> int:
    """Return the length of the flat parameter vector."""
    return sum(p.numel() for p in trainable_parameters(model))


def zeros_where_incomplete(leaf: Tensor, complete: Tensor) -> Tensor:
    """Return inputs `[groups, ...]` with zeros for the incomplete groups, which then all take one path.

    Whether there are incomplete groups is secret, so this work is never skipped.

    Args:
      leaf: one tensor of the inputs.
      complete: bool `[groups]`.
    """
    mask = complete.to(leaf.device).reshape(-1, *[1] * (leaf.ndim - 1))
    return torch.where(mask, leaf, torch.zeros_like(leaf))


def no_sum(model: nn.Module) -> Tensor:
    """Return the clipped sum of no groups: float64 zeros `[num_trainable(model)]` on the model's device.

    A float32 sum would round after every group, by up to half a unit in the last place of the sum so far. One
    record would then change the rounding of all later groups' contributions, and these errors add up. The
    noise is added in float64, too, and the noisy sum is rounded to float32 once.
    """
    device = next(model.parameters()).device
    return torch.zeros(num_trainable(model), dtype=torch.float64, device=device)


def add_to_sum(total: Tensor, values: Tensor) -> None:
    """Add values to float64 sums of the same shape, in place.

    On a CPU it adds piece by piece, because torch would first copy all float32 values as float64.

    Args:
      total: float64, contiguous.
      values: float32 or float64.
    """
    if total.device.type != "cpu" or values.numel() <= _ADDED_PIECE or not values.is_contiguous():
        total += values
        return
    sums, values = total.view(-1), values.view(-1)
    for start in range(0, len(values), _ADDED_PIECE):
        sums[start : start + _ADDED_PIECE] += values[start : start + _ADDED_PIECE]


_ADDED_PIECE = 2**17
"""The count of numbers of a clipped sum added at a time: their float64 copies fit into the cache."""

Embed = Callable[[Tensor], Tensor]
"""Maps inputs `[groups, group_size, views, ...]` to unit embeddings `[groups, group_size, views, dim]`."""


def set_gradients(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Set every parameter's `grad` to its part of a flat gradient, `[num_parameters]`, in their order.

    A part shares the memory of `flat`, unless the parameter has another dtype or memory format.
    """
    offset = 0
    for parameter in parameters:
        part = flat[offset : offset + parameter.numel()].view_as(parameter)
        same = part.dtype == parameter.dtype and part.stride() == parameter.stride()
        parameter.grad = part if same else torch.empty_like(parameter).copy_(part)
        offset += parameter.numel()
