"""The optimizers: one entry each, which training, estimates of memory and disk, and tables read.

Entries are light: torch is imported when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpgcl_core.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from trainers.config.nodes import OptimizerConfig

    Build = Callable[[Iterable[nn.Parameter], OptimizerConfig], Optimizer]


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """One optimizer.

    Attributes:
      name: on the command line.
      build: makes it over parameters by a configuration.
      states_per_weight: float32 numbers that it keeps for each trained weight.
      has_momentum: whether it reads `momentum`, and keeps nothing where that is 0.
    """

    name: str
    build: Build
    states_per_weight: int
    has_momentum: bool = False

    def num_states(self, momentum: float) -> int:
        """Return how many numbers it keeps for each trained weight."""
        return 0 if self.has_momentum and momentum == 0 else self.states_per_weight


def _adam(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    from torch.optim import Adam

    return Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


def _adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    from torch.optim import AdamW

    return AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)


def _sgd(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    from torch.optim import SGD

    rate, momentum, decay = config.learning_rate, config.momentum, config.weight_decay
    return SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, fused=True)


_ENTRIES = (
    OptimizerEntry(name="adam", build=_adam, states_per_weight=2),
    OptimizerEntry(name="adamw", build=_adamw, states_per_weight=2),
    OptimizerEntry(name="sgd", build=_sgd, states_per_weight=1, has_momentum=True),
)
OPTIMIZERS: dict[str, OptimizerEntry] = {entry.name: entry for entry in _ENTRIES}
"""Adam and AdamW keep their usual β = (0.9, 0.999). Fused: one pass over the weights."""


def optimizer_named(name: str) -> OptimizerEntry:
    """Return the optimizer of this name.

    Raises:
      ConfigError: there is none; lists them.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(unknown_choice("optimizer", name, OPTIMIZERS))
    return OPTIMIZERS[name]
