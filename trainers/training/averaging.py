"""Moving averages of the released iterates: they are scored and returned, and BYOL regresses onto them.

    θ̄ ← d_t·θ̄ + (1 − d_t)·θ,   d_t = min(decay, (1 + t)/(10 + t)),   after the optimizer's step t = 0, 1, …

θ is the iterate after that step, θ̄ the average. The rise of d_t prevents the average of a short training
from being mostly its initial weights. A target network has d_t = decay throughout: if it followed the first
steps closely, both networks could collapse to a constant.

Privacy. Every iterate θ, up to the last one, comes from the private step and is covered by the training's ε.
An average of the iterates is a function of released values, so it is post-processing at no cost. For the same
reason a later step may use it as a fixed function, as a target network.

Every data-parallel worker applies the same released gradient to the same weights, so all workers hold the
same average without communication. A checkpoint keeps the average, so that a resume continues it exactly.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from dpgcl_core.errors import StorageError
from dpgcl_core.losses.byol import update_target
from trainers.config.training import TARGET_DECAY, TrainingConfig
from trainers.models.task_networks import AnyEncoder


class WeightAverage:
    """The moving average of one network's weights over the steps of its training.

    Attributes:
      network: the network with the averaged weights; it shares untrained weights with the original.

    Args:
      encoder: the network at its initial weights, in its final memory layout.
      decay: the decay, in (0, 1).
      rising: whether the decay starts at 0.1 and rises to `decay`, as (1 + t)/(10 + t) at step t.
    """

    def __init__(self, encoder: AnyEncoder, decay: float, *, rising: bool = True) -> None:
        self._decay, self._rising = decay, rising
        self.network = _copy_trained(encoder)

    def update(self, encoder: AnyEncoder, step: int) -> None:
        """Update the average with the weights after (0-based) `step`."""
        decay = min(self._decay, (1 + step) / (10 + step)) if self._rising else self._decay
        update_target(self.network, encoder, decay=decay)

    def state(self) -> dict[str, Tensor]:
        """Return the averaged weights by name."""
        return {name: p.detach() for name, p in self.network.named_parameters() if p.requires_grad}

    def load(self, state: dict[str, Tensor] | None) -> None:
        """Load the averaged weights that `state` returned.

        Raises:
          StorageError: `state` is None, or of another network.
        """
        averages = self.state()
        if state is None or state.keys() != averages.keys():
            problem = "none" if state is None else "the average of another network"
            raise StorageError(
                "the checkpoint must hold the average of the weights that ema_decay or the method requires; "
                f"got {problem}. Restore the training's own ema_decay, or delete checkpoint.pt to start "
                "over. The ε spent so far stays charged."
            )
        with torch.no_grad():
            for name, weights in averages.items():
                weights.copy_(state[name])


def average_of(config: TrainingConfig, encoder: AnyEncoder) -> WeightAverage | None:
    """Return the average that a training keeps, at its initial weights; None if it keeps no average."""
    needs_target = config.mechanism.rules.needs_target
    decay = config.optimizer.ema_decay or (TARGET_DECAY if needs_target else 0.0)
    return WeightAverage(encoder, decay, rising=not needs_target) if decay else None


def target_of(config: TrainingConfig, encoder: AnyEncoder) -> AnyEncoder | None:
    """Return a target network at the weights of `encoder`; None for methods without a target."""
    return _copy_trained(encoder) if config.mechanism.rules.needs_target else None


def _copy_trained(encoder: AnyEncoder) -> AnyEncoder:
    """Return a copy that shares the frozen weights, which are often most of a network."""
    frozen = {id(p): p for p in encoder.parameters() if not p.requires_grad}
    return copy.deepcopy(encoder, frozen)
