"""How a sweep finds and trains one model within one total ε: the options of `--tuning`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from dpgcl_core.errors import ConfigError, require_each
from trainers.config.tree import option

Strategy = Literal["none", "open", "sealed", "public", "scaling"]


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """Tuning and training of one model within --total-epsilon."""

    strategy: Strategy | None = field(default=None, metadata=option("tuning"))
    """Find one model within --total-epsilon: none trains one setting; open trains every setting; sealed
    draws them in secret; public tunes on --proxy; scaling tunes at small ε and scales the learning rate."""
    tuning_rates: tuple[float, ...] = ()
    """With --tuning: learning rates to try with every setting; the value of --learning-rate by default."""
    small_epsilons: tuple[float, ...] = ()
    """With --tuning scaling: two or three ε to tune at; by default a 20th and a 10th of --total-epsilon."""

    def __post_init__(self) -> None:
        require_each(self, ("tuning_rates", "small_epsilons"), "be positive and finite", _are_positive)
        if self.strategy is None and (self.tuning_rates or self.small_epsilons):
            raise ConfigError("tuning_rates and small_epsilons apply only with --tuning. Also set it")
        if self.small_epsilons and self.strategy != "scaling":
            raise ConfigError(f"small_epsilons applies to --tuning scaling; got {self.strategy}")
        if self.small_epsilons and not 2 <= len(set(self.small_epsilons)) <= 3:
            raise ConfigError(
                "scaling fits a line, so --small-epsilons must be two or three different values; got "
                f"{' '.join(f'{epsilon:g}' for epsilon in self.small_epsilons)}"
            )


def _are_positive(values: tuple[float, ...]) -> bool:
    return all(0 < value < math.inf for value in values)
