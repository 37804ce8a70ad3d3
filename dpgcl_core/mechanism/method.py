"""The interface of a method: how it draws records, its clipping, its sensitivity and its accounting.

A `Mechanism` holds the public numbers of one training. It gets everything that depends on the method from
its method: how groups are drawn, the loss, the rule that makes the clipped sum, sensitivity, neighbouring
relation, accounting event and guarantee label. All of these come from one object, so none can be changed
without the others.

Every `proven` method that samples by Poisson has the guarantee stated in `dpgcl_core.mechanism.mechanism`:
given the sample without the record, and the coupling named in the method's docstring, the sum moves by at
most `sensitivity`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, Self

from dp_accounting import dp_event
from torch import Tensor, nn

from dpgcl_core.accounting import composition
from dpgcl_core.clipping.parts import ClippingParts
from dpgcl_core.clipping.types import GroupInputs, GroupReport, Objective
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.losses.objective import GroupLoss
from dpgcl_core.mechanism.numbers import (
    ADD_OR_REMOVE_ONE,
    GROUPS,
    RECORDS,
    PublicNumbers,
    RecordRange,
    Sampled,
)
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.groups import Grouper, build_grouper, expected_num_groups
from dpgcl_core.sampling.poisson import PoissonSampler
from dpgcl_core.sampling.slots import SampledGroups, ShardedGroups, more_records_than_slots, num_blocks
from dpgcl_core.sampling.stage import GroupStage, SampledRecords, Sampler

__all__ = ["GradientRule", "GroupLoss", "GuaranteeLabel", "LossSettings", "Method", "Sampler"]

GuaranteeLabel = Literal["proven", "as-published", "none"]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a loss besides the mechanism's numbers: public, without influence on the guarantee.

    Attributes:
      temperature: τ > 0; 1 if τ is learned, because the embeddings are then already scaled by 1/√τ.
      bias: the bias of the sigmoid loss.
      pairs: whether a record is a pair of an image and a text, whose views are in the order of
        `dpgcl_core.losses.image_text.interleaved`.
      parts: parts of the weights, clipped separately within C; None for one norm. Only for methods that
        clip groups.
      groups_at_once, isolated, gradient_scale: see `GroupClipper`. Only for methods that clip groups.
    """

    temperature: float
    bias: float = -10.0
    pairs: bool = False
    parts: ClippingParts | None = None
    groups_at_once: int | None = None
    isolated: bool = False
    gradient_scale: float = 1.0


class GradientRule(Protocol):
    """Makes the clipped sum of one step. All methods that clip groups use `GroupClipper`."""

    @property
    def whole_batch(self) -> bool:
        """Whether the rule needs all groups of a step in one call; otherwise any partition is allowed."""

    @property
    def needs_draws(self) -> bool:
        """Whether the rule itself draws noise, for something that it releases besides the sum."""

    def add_clipped_sum(
        self,
        total: Tensor,
        model: nn.Module,
        objective: Objective,
        inputs: GroupInputs,
        *,
        complete: Tensor | None = None,
        draws: Draws | None = None,
    ) -> GroupReport:
        """Add the method's clipped sum to the flat float64 `total`, in place.

        Args:
          total: `[num_trainable(model)]`.
          model: the network that `objective` calls.
          objective: maps inputs to one loss per group; an `EmbeddingObjective` for rules for whole batches,
            which use its embedding and their own loss.
          inputs: `[groups, group_size, views, ...]`, or a tuple of such tensors.
          complete: bool `[groups]`, which groups contribute; None for all. Rules for whole batches ignore it:
            they are never combined with a stage that yields incomplete groups.
          draws: secret draws, if the rule needs them.

        Raises:
          ConfigError: the rule needs an embedding, and the objective has none.
        """


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of private training; subclasses override what differs from the defaults.

    Attributes:
      name: the name in options, params and tables.
      title: the name shown to readers.
      source: the paper and equation.
      clip_unit: the unit that is clipped to C: "group", "batch", "record's own path", "pair", …
      sensitivity_formula: the formula printed in the statement.
      label: the label of the guarantee.
      takes_augmented_keys: whether the loss can use `num_augmentations` > 0.
      takes_temperature: whether the loss reads τ.
      needs_cap: whether the sensitivity needs a public cap on the batch size.
      takes_group_size: whether `group_size` is a choice; otherwise the whole batch is one group, or each
        record is a group.
      clips_groups: whether each disjoint group has its own loss, and only that loss's gradient is clipped.
      one_record_groups: whether each record is its own group, so that S = 1 whatever size is requested.
      task: the only task whose objective the method accepts (`trainers.tasks`); empty for any suitable task.
      plain_event: whether a step is the Poisson-subsampled Gaussian of (q, σ) for adding or removing one
        record and nothing more, as ledger, sealed sweeps and noised releases assume.
      trains: whether the method has training steps.
      small_batches: whether a step's time and noise grow so fast with the batch that a comparison uses a
        smaller batch.
      min_group_size: the smallest `group_size` whose loss has a gradient.
      needs_target: whether the loss also takes a target network's embeddings. Embeddings are then
        `[groups, group_size, views, 2·dim]`, the trained network's followed by the target's.
      takes_pairs: whether the method has a loss for pairs of an image and a text.
      takes_images: whether the method has a loss for images without texts.
      takes_labels: whether its objective uses a record's own label: a record is then an image and its label.
      needs_embeddings: whether its loss, or its rule, works on unit embeddings; otherwise it takes the
        objective of any task.
      samplings: what a step can sample, "records" or "groups", the default first. `with_sampling` keeps one.
      proof: the file that proves the sensitivity, or shows that it fails.
    """

    name: str
    title: str
    source: str
    clip_unit: str
    sensitivity_formula: str
    label: GuaranteeLabel = "proven"
    takes_augmented_keys: bool = True
    takes_temperature: bool = True
    needs_cap: bool = False
    takes_group_size: bool = True
    clips_groups: bool = False
    one_record_groups: bool = False
    task: str = ""
    plain_event: bool = True
    trains: bool = True
    small_batches: bool = False
    min_group_size: int = 2
    needs_target: bool = False
    takes_pairs: bool = True
    takes_images: bool = True
    takes_labels: bool = False
    needs_embeddings: bool = True
    samplings: tuple[Sampled, ...] = (RECORDS,)
    proof: str = "dpgcl_core/sampling/groups.py"

    def with_sampling(self, sampling: str) -> Self:
        """Return the method restricted to sampling "records" or "groups", with its texts for that case.

        Raises:
          ConfigError: the method does not support this sampling.
        """
        if sampling not in (RECORDS, GROUPS):
            raise ConfigError(unknown_choice("sampling", sampling, (RECORDS, GROUPS)))
        matching = tuple(name for name in self.samplings if name == sampling)
        if not matching:
            raise ConfigError(
                f"{self.name} samples {self.samplings[0]}, because its terms use more than one group; "
                f'got sampling = "{sampling}"'
            )
        return self if self.samplings == matching else replace(self, samplings=matching)

    @property
    def neighboring_relation(self) -> str:
        """The neighbouring relation for which both sensitivity and ε are stated."""
        return ADD_OR_REMOVE_ONE

    @property
    def sampling(self) -> str:
        """How records are drawn, in words for the privacy statement."""
        return "Poisson, of groups" if self.samplings[0] == GROUPS else "Poisson"

    @property
    def grouping(self) -> str:
        """How the sample becomes groups, in words for the privacy statement."""
        if self.one_record_groups:
            return "each record is a group of its own"
        if self.samplings[0] == GROUPS:
            return (
                "records are placed at random in N slots, which are cut into blocks of S; each sampled block "
                "is a group, and a group with an empty slot contributes zero"
            )
        if self.takes_group_size:
            return "the sample is permuted in secret and cut into groups of exactly S; the rest is dropped"
        return "the whole sample is one group"

    def check(self, numbers: PublicNumbers) -> None:
        """Raise ConfigError for numbers that the method cannot use."""
        if numbers.batch_cap is not None:
            raise ConfigError(
                f"batch_cap applies only to methods that need a cap; {self.name} needs none. Leave it out"
            )

    def num_records_covered(self, numbers: PublicNumbers) -> RecordRange | None:
        """Return the numbers of records for which the guarantee holds; None if it holds for any number."""
        return None if numbers.num_records_from_data else RecordRange(high=numbers.num_records_public)

    def condition(self, numbers: PublicNumbers) -> str:
        """Return the condition that both neighbouring data sets must meet, in words; empty for none."""
        covered = self.num_records_covered(numbers)
        return "" if covered is None else covered.text

    def check_records(self, numbers: PublicNumbers, num_records: int) -> None:
        """Raise ConfigError if the number of records is not covered; the message does not contain it."""
        if num_records > numbers.num_records_public:
            raise ConfigError(more_records_than_slots(numbers.num_records_public))

    def sensitivity(self, numbers: PublicNumbers) -> float:
        """Return the largest change of the clipped sum between neighbouring data sets."""
        raise NotImplementedError

    def sampler(self, numbers: PublicNumbers) -> Sampler:
        """Return the sampler of records (stage 2), used if records are sampled."""
        return PoissonSampler(sampling_prob=numbers.sampling_prob)

    def grouper(self, numbers: PublicNumbers) -> Grouper:
        """Return the grouper (stage 3), used if records are sampled."""
        return build_grouper(numbers.group_size)

    def group_stage(self, numbers: PublicNumbers) -> GroupStage | ShardedGroups:
        """Return the object that draws a step's groups (stages 2 and 3)."""
        if numbers.sampling == GROUPS:
            n, size, prob = numbers.num_records_public, int(numbers.group_size), numbers.sampling_prob
            if numbers.num_shards == 1:
                return SampledGroups(capacity=n, group_size=size, sampling_prob=prob)
            return ShardedGroups(
                capacity=n, group_size=size, sampling_prob=prob, num_shards=numbers.num_shards
            )
        return SampledRecords(sampler=self.sampler(numbers), grouper=self.grouper(numbers))

    def loss(self, settings: LossSettings) -> GroupLoss | None:
        """Return the loss of each group's embeddings (stage 6); None if the rule has its own loss."""
        return None

    def rule(self, numbers: PublicNumbers, loss: LossSettings) -> GradientRule:
        """Return the rule that clips gradients and sums them (stage 7)."""
        raise NotImplementedError

    def divisor(self, numbers: PublicNumbers) -> float:
        """Return the public constant that divides the noisy sum."""
        if numbers.sampling == GROUPS:
            size, num_shards = int(numbers.group_size), numbers.num_shards
            return numbers.sampling_prob * num_blocks(numbers.num_records_public, size, num_shards)
        return expected_num_groups(numbers.num_records_public, numbers.sampling_prob, numbers.group_size)

    def dp_event(self, numbers: PublicNumbers, num_steps: int) -> dp_event.DpEvent:
        """Return the accounting event of `num_steps` steps."""
        return composition.poisson_gaussian_event(
            sampling_prob=numbers.sampling_prob,
            noise_multiplier=numbers.noise_multiplier,
            num_steps=num_steps,
        )

    def epsilon(self, numbers: PublicNumbers, num_steps: int) -> float:
        """Return ε after `num_steps` steps, at `numbers.target_delta`."""
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
        """Search for the smallest noise multiplier that meets a finite `target_epsilon`.

        Raises:
          ConfigError: no noise multiplier meets the target.
        """
        return composition.calibrate_noise_multiplier(
            sampling_prob=numbers.sampling_prob,
            num_steps=numbers.num_steps_charged,
            target_epsilon=target_epsilon,
            target_delta=numbers.target_delta - self.added_delta(numbers, numbers.num_steps_charged),
            cache_folder=cache_folder,
        ).noise_multiplier

    def added_delta(self, numbers: PublicNumbers, num_steps: int) -> float:
        """Return the part of δ that the event does not cover; 0 unless a cap can exchange records."""
        return 0.0
