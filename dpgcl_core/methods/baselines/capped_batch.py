"""Methods in which every term depends on the whole batch, so the noise depends on a public cap on the batch.

They draw truncated Poisson batches. Each method accounts for the truncation where it states its sensitivity.
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
    """Clips the contribution of one whole batch to a sum."""

    @property
    def add_clipped_sum(self) -> Callable[..., GroupReport]:
        """A function of (total, model, embed, inputs), and of `generator` if the rule needs draws."""


@dataclass(frozen=True, kw_only=True)
class OfOneBatch:
    """A gradient rule that passes all records of a step, and the objective's embedding, to `inner`."""

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
        options = {"generator": draws} if self.needs_draws else {}
        return self.inner.add_clipped_sum(total, model, embedding_of(objective), inputs, **options)


@dataclass(frozen=True, kw_only=True)
class Capped(Method):
    """A method that draws Poisson batches truncated to a public cap on their size."""

    needs_cap: bool = True
    sampling: ClassVar[str] = "Poisson, truncated to a uniformly random subset at the cap"

    def check(self, numbers: PublicNumbers) -> None:
        cap = numbers.batch_cap
        if cap is None:
            raise ConfigError(
                f"{self.name} needs a public cap on the batch size, because its sensitivity depends on the "
                f"cap. Set batch_cap, for example {default_cap(numbers.expected_batch_size)}"
            )
        if cap < numbers.expected_batch_size:
            raise ConfigError(
                "batch_cap must be at least the expected batch size; got "
                f"{cap} with {numbers.expected_batch_size:g} records expected. Smaller caps truncate most "
                f"batches. Batches rarely reach a cap of {default_cap(numbers.expected_batch_size)}"
            )

    def sampler(self, numbers: PublicNumbers) -> TruncatedPoissonSampler:
        return TruncatedPoissonSampler(sampling_prob=numbers.sampling_prob, batch_cap=cap_of(numbers))

    def grouper(self, numbers: PublicNumbers) -> Grouper:
        return WholeBatch()

    def divisor(self, numbers: PublicNumbers) -> float:
        return numbers.expected_batch_size


def default_cap(expected_batch_size: float) -> int:
    """Return a rarely reached cap: 1.25 times the expected size, and at least 8 standard deviations above.

    >>> default_cap(1024)
    1281
    """
    return int(max(1.25 * expected_batch_size, expected_batch_size + 8 * expected_batch_size**0.5)) + 1


def cap_of(numbers: PublicNumbers) -> int:
    """Return `batch_cap`, which `Capped.check` has required."""
    assert numbers.batch_cap is not None
    return numbers.batch_cap
