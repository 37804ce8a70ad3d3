"""Methods whose every term depends on the whole batch, so that a public cap on the batch enters the noise.

They draw truncated Poisson batches; how each accounts for the truncation stands beside its sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from dpgcl_core.clipping.types import GroupReport, Objective
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import embedding_of
from dpgcl_core.mechanism.method import Method
from dpgcl_core.mechanism.numbers import PublicNumbers
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.groups import Grouper, WholeBatch
from dpgcl_core.sampling.truncated import TruncatedPoissonSampler


class WholeBatchClipper(Protocol):
    """Clips what one whole batch adds to a sum."""

    @property
    def add_clipped_sum(self) -> Callable[..., GroupReport]:
        """Takes total, model, embedding and inputs, and as `generator` its draws where it needs some."""


@dataclass(frozen=True, kw_only=True)
class OfOneBatch:
    """A rule of the library that takes all of a step's records."""

    inner: WholeBatchClipper
    needs_draws: bool = False
    whole_batch: ClassVar[bool] = True

    def add_clipped_sum(
        self,
        total: Tensor,
        model: nn.Module,
        objective: Objective,
        inputs: Any,
        *,
        complete: Tensor | None = None,
        draws: Draws | None = None,
    ) -> GroupReport:
        own = {"generator": draws} if self.needs_draws else {}
        return self.inner.add_clipped_sum(total, model, embedding_of(objective), inputs, **own)


@dataclass(frozen=True, kw_only=True)
class Capped(Method):
    """A method with a public cap on the batch."""

    def check(self, numbers: PublicNumbers) -> None:
        cap = numbers.batch_cap
        if cap is None:
            raise ConfigError(
                f"{self.name} needs a public cap on the batch, for its sensitivity depends on it: give "
                f"batch_cap, for example {default_cap(numbers.expected_batch_size)}"
            )
        if cap < numbers.expected_batch_size:
            raise ConfigError(
                "batch_cap must be at least the expected batch size, or most batches are cut; got "
                f"{cap} with {numbers.expected_batch_size:g} records expected; from "
                f"{default_cap(numbers.expected_batch_size)} on it is out of reach"
            )

    @property
    def sampling(self) -> str:
        return "Poisson, truncated to a uniformly random subset at the cap"

    def sampler(self, numbers: PublicNumbers) -> TruncatedPoissonSampler:
        return TruncatedPoissonSampler(sampling_prob=numbers.sampling_prob, batch_cap=cap_of(numbers))

    def grouper(self, numbers: PublicNumbers) -> Grouper:
        return WholeBatch()

    def divisor(self, numbers: PublicNumbers) -> float:
        return numbers.expected_batch_size


def default_cap(expected_batch_size: float) -> int:
    """Return a cap that samples hardly ever reach: 1.25 times what is expected, and eight deviations.

    >>> default_cap(1024)
    1281
    """
    return int(max(1.25 * expected_batch_size, expected_batch_size + 8 * expected_batch_size**0.5)) + 1


def cap_of(numbers: PublicNumbers) -> int:
    """Return the cap of a checked numbers."""
    assert numbers.batch_cap is not None
    return numbers.batch_cap
