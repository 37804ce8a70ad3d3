"""The optimizers: one entry each, which training, estimates of memory and disk, and tables read.

Entries are light: torch is imported when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpgcl_core.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from trainers.config.nodes import OptimizerConfig

    Build = Callable[[Iterable[nn.Parameter], OptimizerConfig], Optimizer]

TRUST_COEFFICIENT = 0.001
"""η of LARS, as published (You et al. 2017)."""


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


def _lars(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """LARS (You, Gitman and Ginsburg 2017), by timm: a learning rate for each layer.

    For weights w with gradient g, weight decay β, momentum m, learning rate γ and trust coefficient η:

        λ = η ‖w‖ / (‖g‖ + β ‖w‖);   v ← m v + λ (g + β w);   w ← w − γ v

    λ is 1 where it is undefined (w or g zero). Parameters with fewer than two axes (biases, norm
    scales) take λ = 1 and no weight decay. The paper's v holds γ as well: the same steps while γ stays, and
    where a schedule changes it, this is what `sgd` does.
    """
    from trainers.torchvision_import import ensure_torchvision_import

    ensure_torchvision_import()
    from timm.optim.lars import Lars

    listed = list(parameters)
    adapted: dict[str, Any] = {
        "params": [p for p in listed if p.ndim > 1],
        "weight_decay": config.weight_decay,
        "always_adapt": True,
    }
    plain = {"params": [p for p in listed if p.ndim <= 1]}
    rate, momentum = config.learning_rate, config.momentum
    optimizer: Optimizer = Lars(
        [adapted, plain], lr=rate, momentum=momentum, trust_coeff=TRUST_COEFFICIENT, eps=0.0
    )
    return optimizer


_ENTRIES = (
    OptimizerEntry(name="adam", build=_adam, states_per_weight=2),
    OptimizerEntry(name="adamw", build=_adamw, states_per_weight=2),
    OptimizerEntry(name="lars", build=_lars, states_per_weight=1, has_momentum=True),
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
