"""The optimizers: one entry per optimizer, read by training, by estimates of memory and disk, and by tables.

Entries are light: torch is imported only when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpgcl_core.errors import require_choice

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from trainers.config.nodes import OptimizerConfig

    Build = Callable[[Iterable[nn.Parameter], OptimizerConfig], Optimizer]


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """One optimizer.

    Attributes:
      name: the optimizer's name on the command line.
      build: function of parameters and a configuration that makes the optimizer.
      states_per_weight: number of float32 values that the optimizer keeps for each trained weight.
      has_momentum: whether it reads `momentum`, and keeps nothing if `momentum` is 0.
    """

    name: str
    build: Build
    states_per_weight: int
    has_momentum: bool = False

    def num_states(self, momentum: float) -> int:
        """Return the number of float32 values that the optimizer keeps for each trained weight."""
        return 0 if self.has_momentum and momentum == 0 else self.states_per_weight


def _torch_builder(name: str, *settings: str) -> Build:
    """Return a builder of class `name` of `torch.optim` that also passes these configuration fields."""

    def build(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
        import torch

        values = {setting: getattr(config, setting) for setting in ("weight_decay", *settings)}
        optimizer: Optimizer = getattr(torch.optim, name)(
            parameters, lr=config.learning_rate, fused=True, **values
        )
        return optimizer

    return build


_ENTRIES = (
    OptimizerEntry(name="adam", build=_torch_builder("Adam"), states_per_weight=2),
    OptimizerEntry(name="adamw", build=_torch_builder("AdamW"), states_per_weight=2),
    OptimizerEntry(
        name="sgd", build=_torch_builder("SGD", "momentum"), states_per_weight=1, has_momentum=True
    ),
)
OPTIMIZERS: dict[str, OptimizerEntry] = {entry.name: entry for entry in _ENTRIES}
"""The optimizers by name. Adam and AdamW have β = (0.9, 0.999). All are fused: one pass over the weights."""


def optimizer_named(name: str) -> OptimizerEntry:
    """Return the optimizer of this name.

    Raises:
      ConfigError: there is no such optimizer; lists the known ones.
    """
    require_choice("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
