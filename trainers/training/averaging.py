"""Moving averages of the released iterates: what is scored and returned, and what BYOL regresses onto.

    θ̄ ← d_t·θ̄ + (1 − d_t)·θ,   d_t = min(decay, (1 + t)/(10 + t)),   after the optimizer's step t = 0, 1, …

The rise of d_t keeps a short training from an average that is mostly its initial weights. A target network
has d_t = decay throughout: one that follows the first steps closely lets both collapse to a constant.

Privacy. Every iterate θ comes out of the private step and is covered by the training's ε up to the last one;
an average of them is a function of what was released: post-processing, free of cost. That is also why a later
step may use it as a fixed function, as a target network.

Every data-parallel worker applies the same released gradient to the same weights, so each holds the same
average without a word between them. A checkpoint keeps it, for a resume to continue the very same one.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from dpgcl_core.errors import StorageError
from dpgcl_core.losses.byol import update_target
from trainers.config.training import TrainingConfig
from trainers.models.task_networks import AnyEncoder

_Network = TypeVar("_Network", bound=nn.Module)


class WeightAverage:
    """The average of one network's iterates.

    Attributes:
      network: the network with the averaged weights; those that are not trained it shares with the original.

    Args:
      encoder: the network at its initial weights, in its final memory layout.
      decay: in (0, 1).
      rising: whether the decay rises to its value.
    """

    def __init__(self, encoder: AnyEncoder, decay: float, *, rising: bool = True) -> None:
        self._decay, self._rising = decay, rising
        self.network = _copy(encoder)

    def update(self, encoder: AnyEncoder, step: int) -> None:
        """Update the average with the weights after (0-based) `step`."""
        decay = min(self._decay, (1 + step) / (10 + step)) if self._rising else self._decay
        update_target(self.network, encoder, decay=decay)

    def state(self) -> dict[str, Tensor]:
        """Return the averaged weights by name."""
        return {name: p.detach() for name, p in self.network.named_parameters() if p.requires_grad}

    def load(self, state: dict[str, Tensor] | None) -> None:
        """Continue from what `state` returned.

        Raises:
          StorageError: there is none, or it is of another network.
        """
        averages = self.state()
        if state is None or state.keys() != averages.keys():
            problem = "none" if state is None else "that of another network"
            raise StorageError(
                "the checkpoint must hold the average of the weights that ema_decay or the method asks for; "
                f"got {problem}: give the training's own ema_decay, or delete checkpoint.pt to start it "
                "over; what was spent stays charged"
            )
        with torch.no_grad():
            for name, weights in averages.items():
                weights.copy_(state[name])


def average_of(config: TrainingConfig, encoder: AnyEncoder) -> WeightAverage | None:
    """Return the average that a training keeps, at its initial weights; None where it keeps none."""
    if not config.average_decay:
        return None
    return WeightAverage(encoder, config.average_decay, rising=not config.mechanism.rules.needs_target)


def target_of(config: TrainingConfig, encoder: AnyEncoder) -> AnyEncoder | None:
    """Return a target network at the weights of `encoder`, for methods that regress onto one."""
    return _copy(encoder) if config.mechanism.rules.needs_target else None


def _copy(encoder: _Network) -> _Network:
    """A copy that shares the weights that are never trained, often most of a network."""
    frozen = {id(p): p for p in encoder.parameters() if not p.requires_grad}
    return copy.deepcopy(encoder, frozen)
