"""The mechanism: one frozen object that builds group drawing, clipping, noise and the accounting event.

All four come from the same fields, so a run cannot train with one sampler and be charged for another.

Guarantee. One step releases the sum of per-group gradients clipped to C, plus N(0, (σΔ)² I), where Δ is the
sensitivity of the groups. If groups are sampled by Poisson(q), Δ = C (`dpgcl_core.sampling.slots`). If
records are sampled, Δ = 2C for groups of at least two and for the whole batch, and Δ = C for groups of one
(`dpgcl_core.sampling.groups`). For neighbouring data sets D' = D ∪ {r}, the step on D' is an average, over
everything drawn without r (the other keep bits or records, the coupling of the groups, views), of the pair
((1 − q)·N(μ) + q·N(μ'), N(μ)) with ‖μ − μ'‖ ≤ Δ. The hockey-stick divergence is jointly convex, so each
pair is dominated by the Poisson-subsampled Gaussian of noise multiplier σ, and dominating pairs compose
adaptively over the steps. Everything after the noise (division by a public constant, the optimizer, the
schedule) is post-processing. Every iterate up to the last is covered.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from dp_accounting import dp_event

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import GradientRule, GroupLoss, GuaranteeLabel, LossSettings, Method, Sampler
from dpgcl_core.mechanism.numbers import (
    ADD_OR_REMOVE_ONE,
    GROUPS,
    RECORDS,
    ZERO_OUT_ONE,
    PublicNumbers,
    real_number,
)
from dpgcl_core.mechanism.registry import METHODS, method_named
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.sampling.groups import BATCH, Grouper
from dpgcl_core.sampling.slots import ShardedGroups
from dpgcl_core.sampling.stage import GroupStage


@dataclass(frozen=True, kw_only=True)
class Mechanism(PublicNumbers):
    """The private mechanism of one training: its public numbers, and the parts its method builds from them.

    Raises:
      ConfigError: a field is outside its range, δ exceeds 1/n, or the method cannot use the numbers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling is None:
            default_sampling = method_named(self.method).samplings[0]
            object.__setattr__(self, "sampling", RECORDS if self.group_size == BATCH else default_sampling)
        if self.sampling == GROUPS and self.group_size == BATCH:
            raise ConfigError(
                'sampling = "groups" needs a fixed group_size; got "batch". To clip the whole batch, set '
                "group_size to the expected batch size"
            )
        if self.rules.trains and self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {self.num_steps}")
        if not self.rules.trains and self.num_steps != 0:
            raise ConfigError(f"{self.method} trains nothing: num_steps must be 0; got {self.num_steps}")
        self.rules.check(self)
        if self.num_shards > 1 and not isinstance(self.group_stage(), ShardedGroups):
            raise ConfigError(
                f"shards must be 1 unless groups are sampled; got {self.num_shards} and {self.method} with "
                f'sampling = "{self.sampling}" and group_size = {self.group_size}. Leave it out, or set '
                'sampling = "groups" with a fixed group_size and one of '
                f"{', '.join(each.name for each in METHODS.values() if GROUPS in each.samplings)}"
            )
        if self.divisor < 0.1:
            raise ConfigError(
                "the expected number of groups in a step must be at least 0.1; got "
                f"{self.divisor:.3g}. Raise sampling_prob or lower group_size"
            )

    @property
    def rules(self) -> Method:
        """The method, restricted to this mechanism's sampling."""
        assert self.sampling is not None
        return method_named(self.method).with_sampling(self.sampling)

    @property
    def guarantee_label(self) -> GuaranteeLabel:
        """The method's guarantee label; `none` for a run without noise."""
        return self.rules.label if self.is_private else "none"

    @property
    def neighboring_relation(self) -> str:
        """The neighbouring relation for which both sensitivity and ε are stated."""
        relation = self.rules.neighboring_relation
        return ZERO_OUT_ONE if self.num_records_from_data and relation == ADD_OR_REMOVE_ONE else relation

    @property
    def sensitivity(self) -> float:
        """The largest change of the clipped sum between neighbouring data sets (proof: see the method)."""
        return self.rules.sensitivity(self)

    @property
    def divisor(self) -> float:
        """The public constant that divides the noisy sum, such as the expected number of groups."""
        return self.rules.divisor(self)

    def group_stage(self) -> GroupStage | ShardedGroups:
        """Return the object that draws a step's groups (stages 2 and 3)."""
        return self.rules.group_stage(self)

    def sampler(self) -> Sampler:
        """Return the sampler of records (stage 2) that `group_stage` uses if records are sampled."""
        return self.rules.sampler(self)

    def grouper(self) -> Grouper:
        """Return the grouper (stage 3) that `group_stage` uses if records are sampled."""
        return self.rules.grouper(self)

    def loss(self, settings: LossSettings) -> GroupLoss | None:
        """Return the loss of each group's embeddings (stage 6); None if the rule has its own loss."""
        return self.rules.loss(settings)

    def rule(self, loss: LossSettings) -> GradientRule:
        """Return the rule that clips gradients and sums them (stage 7)."""
        return self.rules.rule(self, loss)

    def noise(self, *, num_grid_coordinates: int | None = None) -> GaussianNoise:
        """Return a step's noise (stage 8).

        Args:
          num_grid_coordinates: the length of the whole sum, if the draw source `is_exact`. The noise is then
            on a grid, and its standard deviation includes the charge for rounding the sum. None for no grid.
        """
        if not self.is_private:
            return GaussianNoise(std=0.0)
        return GaussianNoise.of(self.noise_multiplier, self.sensitivity, num_grid_coordinates)

    def dp_event(self, num_steps: int | None = None) -> dp_event.DpEvent:
        """Return the accounting event (stage 10) of `num_steps` steps; None is `num_steps_charged`."""
        return self.rules.dp_event(self, self.num_steps_charged if num_steps is None else num_steps)

    def epsilon(self, num_steps: int | None = None) -> float:
        """Return ε at `target_delta` after `num_steps` steps; None is `num_steps_charged`.

        >>> from dpgcl_core.mechanism.numbers import default_delta
        >>> round(Mechanism(num_records_public=60_000, sampling_prob=2048 / 60_000, group_size=16,
        ...     l2_clip_norm=1.0, noise_multiplier=0.97, num_steps=1200,
        ...     target_delta=default_delta(60_000)).epsilon(), 2)
        9.14
        """
        return self.rules.epsilon(self, self.num_steps_charged if num_steps is None else num_steps)

    def calibrated(self, target_epsilon: float, *, cache_folder: Path | None = None) -> Mechanism:
        """Return this mechanism with the noise that meets `target_epsilon`; inf is no noise and no clipping.

        Raises:
          ConfigError: no noise multiplier meets the target.
        """
        if math.isinf(target_epsilon := real_number("target_epsilon", target_epsilon)):
            return dataclasses.replace(self, noise_multiplier=0.0, l2_clip_norm=math.inf)
        noise = self.rules.calibrated(self, target_epsilon, cache_folder)
        return dataclasses.replace(self, noise_multiplier=noise)
