"""What a method is: how records are drawn, what is clipped, how far one record moves the sum, the cost.

A `Mechanism` holds the public numbers of one training and asks its method for everything that depends on the
method: sampler, groups, the rule that makes the clipped sum, sensitivity, neighbouring relation, accounting
event and guarantee label. They come from one object, so none can be changed without the others.

The guarantee of every `proven` method that samples by Poisson is that of `dpgcl_core.mechanism.mechanism`:
given the sample without the record, and the coupling its own docstring names, the sum moves by at most
`sensitivity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.accounting import composition
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.clipping.types import Embed, GroupReport
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.numbers import ADD_OR_REMOVE_ONE, PublicNumbers
from dpgcl_core.noise.sources import Draws
from dpgcl_core.sampling.groups import Grouper, build_grouper, expected_num_groups
from dpgcl_core.sampling.poisson import PoissonSampler

GuaranteeLabel = Literal["proven", "as-published", "none"]
GroupLoss = Callable[[Tensor], Tensor]
"""Maps unit embeddings `[groups, group_size, views, dim]` to losses `[groups]`."""


class Sampler(Protocol):
    """Draws one step's records."""

    def sample(self, num_records: int, generator: Draws) -> NDArray[np.int64]:
        """Returns the rows of the sampled records, ascending."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What a loss needs besides the mechanism's numbers: public, and without influence on the guarantee.

    Attributes:
      temperature: τ > 0; 1 where it is learned, for the embeddings then carry it.
      bias: of the sigmoid loss.
      pairs: whether a record is a pair of an image and a text, whose views come as
        `dpgcl_core.losses.image_text.interleaved` orders them.
      parts: of the weights, clipped apart within C; None for one norm. For methods that clip groups.
    """

    temperature: float
    bias: float = -10.0
    pairs: bool = False
    parts: ClippingParts | None = None


class GradientRule(Protocol):
    """Makes the clipped sum of one step."""

    @property
    def whole_batch(self) -> bool:
        """Whether it must see all groups of a step in one call; otherwise any partition will do."""

    @property
    def needs_draws(self) -> bool:
        """Whether it releases something besides the sum, with noise of its own."""

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor, generator: Draws | None
    ) -> GroupReport:
        """Adds the method's clipped sum to the flat float32 `total`, in place.

        Args:
          total: `[num_trainable(model)]`.
          model: the network that `embed` calls.
          embed: views `[groups, group_size, views, ...]` to unit embeddings.
          inputs: views `[groups, group_size, views, ...]`.
          generator: secret draws, where it needs them.
        """


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """One loss per group, each group's gradient clipped: any loss of a group's embeddings alone."""

    clipper: GroupClipper
    loss: GroupLoss
    whole_batch: bool = False
    needs_draws: bool = False

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, embed: Embed, inputs: Tensor, generator: Draws | None
    ) -> GroupReport:
        return self.clipper.add_clipped_sum(total, model, lambda views: self.loss(embed(views)), inputs)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method, as the registry holds it; subclasses differ in what they override.

    Attributes:
      name: in options, params and tables.
      title: for people.
      source: the paper and equation.
      clip_unit: what is clipped to C: "group", "batch", "record's own path", "pair", …
      sensitivity_formula: for the statement.
      label: of the guarantee.
      takes_augmented_keys: whether N_a > 0 has a place in the loss.
      needs_cap: whether the sensitivity needs a public cap on the batch.
      takes_group_size: whether S has a meaning; otherwise the batch is one group.
      plain_event: whether a step is the Poisson-subsampled Gaussian of (q, σ) for adding or removing one
        record and nothing more, as ledger, sealed sweeps and noised releases take for granted.
      trains: whether there are steps at all.
      small_batches: whether a step's time and noise grow so with the batch that a comparison takes a smaller.
      min_group_size: the smallest S that gives a gradient.
      needs_target: whether embeddings are `[groups, group_size, views, 2·dim]`, those of a target network
        beside the trained one's.
      takes_pairs: whether it has a loss for pairs of an image and a text.
      proof: where the sensitivity is proven, or shown to fail.
    """

    name: str
    title: str
    source: str
    clip_unit: str
    sensitivity_formula: str
    label: GuaranteeLabel = "proven"
    takes_augmented_keys: bool = True
    needs_cap: bool = False
    takes_group_size: bool = True
    plain_event: bool = True
    trains: bool = True
    small_batches: bool = False
    min_group_size: int = 2
    needs_target: bool = False
    takes_pairs: bool = True
    proof: str = "dpgcl_core/sampling/groups.py"

    @property
    def neighboring_relation(self) -> str:
        """The relation that sensitivity and accounting share."""
        return ADD_OR_REMOVE_ONE

    @property
    def sampling(self) -> str:
        """How records are drawn, for the statement."""
        return "Poisson"

    @property
    def grouping(self) -> str:
        """How the sample becomes groups, for the statement."""
        if self.takes_group_size:
            return "the sample is permuted in secret and cut into groups of exactly S; the rest is dropped"
        return "the whole sample is one group"

    def check(self, numbers: PublicNumbers) -> None:
        """Raises ConfigError for numbers that the method cannot use."""
        if numbers.batch_cap is not None:
            raise ConfigError(
                f"batch_cap is for methods whose sensitivity needs one; {self.name} needs none: leave it out"
            )

    def condition(self, numbers: PublicNumbers) -> str:
        """Returns what the guarantee asks of both neighbours besides the relation; empty for nothing."""
        return ""

    def check_records(self, numbers: PublicNumbers, num_records: int) -> None:
        """Raises ConfigError for a number of records that the accounting does not cover."""

    def sensitivity(self, numbers: PublicNumbers) -> float:
        """Returns the largest change of the clipped sum between neighbouring data sets."""
        raise NotImplementedError

    def sampler(self, numbers: PublicNumbers) -> Sampler:
        """Returns station 2."""
        return PoissonSampler(sampling_prob=numbers.sampling_prob)

    def grouper(self, numbers: PublicNumbers) -> Grouper:
        """Returns station 3."""
        return build_grouper(numbers.group_size)

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> GradientRule:
        """Returns stations 6 and 7."""
        raise NotImplementedError

    def divisor(self, numbers: PublicNumbers) -> float:
        """Returns the public constant that divides the noisy sum."""
        return expected_num_groups(numbers.num_records_public, numbers.sampling_prob, numbers.group_size)

    def dp_event(self, numbers: PublicNumbers, num_steps: int) -> dp_event.DpEvent:
        """Returns the event of `num_steps` steps."""
        return composition.poisson_gaussian_event(
            sampling_prob=numbers.sampling_prob,
            noise_multiplier=numbers.noise_multiplier,
            num_steps=num_steps,
        )

    def epsilon(self, numbers: PublicNumbers, num_steps: int) -> float:
        """Returns ε at the mechanism's δ."""
        return composition.epsilon_of_steps(
            sampling_prob=numbers.sampling_prob,
            noise_multiplier=numbers.noise_multiplier,
            num_steps=num_steps,
            delta=numbers.target_delta - self.added_delta(numbers, num_steps),
            grid=composition.GRID,
        )

    def calibrated(
        self, numbers: PublicNumbers, target_epsilon: float, cache_folder: Path | None = None
    ) -> float:
        """Returns the smallest noise multiplier found that meets a finite `target_epsilon`.

        Raises:
          ConfigError: none does.
        """
        return composition.calibrate_noise_multiplier(
            sampling_prob=numbers.sampling_prob,
            num_steps=numbers.num_steps,
            target_epsilon=target_epsilon,
            target_delta=numbers.target_delta - self.added_delta(numbers, numbers.num_steps),
            cache_folder=cache_folder,
        ).noise_multiplier

    def added_delta(self, numbers: PublicNumbers, num_steps: int) -> float:
        """Returns the part of δ that the event leaves out; 0 unless a cap can exchange records."""
        return 0.0
