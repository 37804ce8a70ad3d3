"""One frozen object that builds sampler, grouping, clipping, noise and the accounting event.

All five come from the same fields, so a run cannot train with one sampler and be charged for another.

Guarantee. One step releases S(B) + N(0, (σΔ)² I), where B is a Poisson(q) sample, S the sum of per-group
gradients clipped to C, and Δ the sensitivity of `grouping` (2C for groups of at least two records and
for the whole batch, C for groups of one). For neighbouring data sets D' = D ∪ {r}, the step on D' is an
average over (sample without r, coupling of the groups, views) of the pair
((1 − q)·N(μ) + q·N(μ'), N(μ)) with ‖μ − μ'‖ ≤ Δ. The hockey-stick divergence is jointly convex, so each
pair is dominated by the Poisson-subsampled Gaussian of noise multiplier σ, and dominating pairs compose
adaptively over the steps. Everything after the noise (division by a public constant, the optimizer, the
schedule) is post-processing; every iterate up to the last is covered.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from dp_accounting import dp_event

from dpgcl_core.accounting import composition as accounting
from dpgcl_core.clipping.clipper import FLAT, GroupClipper, gamma_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import ADD_OR_REMOVE_ONE as ADD_OR_REMOVE_ONE
from dpgcl_core.mechanism.method import GuaranteeLabel, Sampler
from dpgcl_core.methods import GradientRule, LossSettings, Method, method_named
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.sampling.groups import BATCH, Grouper, GroupSize
from dpgcl_core.sampling.poisson import PoissonSampler


def default_delta(num_records_public: int) -> float:
    """Returns δ = 1/(n ln n), as the paper.

    >>> round(default_delta(60_000), 9)
    1.515e-06
    """
    if num_records_public < 3:
        raise ConfigError(f"num_records_public must be at least 3; got {num_records_public}")
    return 1.0 / (num_records_public * math.log(num_records_public))


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The private mechanism of one training.

    Attributes:
      num_records_public: declared public number of records n, from which q, δ and the divisor come.
      sampling_prob: q, each record's probability to join a step.
      group_size: S, or "batch" for the whole realised batch as one group.
      l2_clip_norm: C, bound on one group's gradient; inf for non-private runs.
      noise_multiplier: σ = noise std / sensitivity; 0 for non-private runs.
      num_steps: T; 0 for a method that trains nothing.
      target_delta: δ at which ε is stated.
      method: name in `dpgcl_core.methods.METHODS`.
      batch_cap: public cap on the records of a step, for methods whose sensitivity needs one.
      temperature: τ, for methods whose sensitivity depends on it.
      clipping: "flat", or "automatic" for C/(norm + γ) (see `dpgcl_core.clipping.clipper`).

    Raises:
      ConfigError: a field is outside its range, δ exceeds 1/n, or the method cannot use the numbers.
    """

    num_records_public: int
    sampling_prob: float
    group_size: GroupSize
    l2_clip_norm: float
    noise_multiplier: float
    num_steps: int
    target_delta: float
    method: str = "dp_gcl"
    batch_cap: int | None = None
    temperature: float | None = None
    clipping: str = FLAT

    def __post_init__(self) -> None:
        gamma_of(self.clipping)
        n = self.num_records_public
        if n < 3:
            raise ConfigError(f"num_records_public must be at least 3; got {n}")
        PoissonSampler(sampling_prob=self.sampling_prob)
        if self.group_size != BATCH and not (isinstance(self.group_size, int) and self.group_size >= 1):
            raise ConfigError(f'group_size must be a positive integer or "batch"; got {self.group_size!r}')
        if not self.l2_clip_norm > 0:
            raise ConfigError(f"l2_clip_norm must be positive; got {self.l2_clip_norm}")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ConfigError(
                f"noise_multiplier must be finite and not negative; got {self.noise_multiplier}"
            )
        if 0 < self.noise_multiplier < accounting.MIN_NOISE_MULTIPLIER:
            raise ConfigError(
                f"noise_multiplier must be at least {accounting.MIN_NOISE_MULTIPLIER}, for less protects "
                f"nothing; got {self.noise_multiplier}"
            )
        if self.noise_multiplier > 0 and math.isinf(self.l2_clip_norm):
            raise ConfigError("noise without clipping protects nothing: give a finite l2_clip_norm; got inf")
        if self.rules.trains and self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1; got {self.num_steps}")
        if not self.rules.trains and self.num_steps != 0:
            raise ConfigError(f"{self.method} trains nothing: give num_steps = 0; got {self.num_steps}")
        check_delta(self.target_delta, n)
        self.rules.check(self)
        if self.divisor < 0.1:
            raise ConfigError(
                "the expected number of groups in a step must be at least 0.1; got "
                f"{self.divisor:.3g} (raise sampling_prob or lower group_size)"
            )

    @property
    def rules(self) -> Method:
        """The method."""
        return method_named(self.method)

    @property
    def is_private(self) -> bool:
        """Whether noise protects the records at all."""
        return self.noise_multiplier > 0

    @property
    def guarantee_label(self) -> GuaranteeLabel:
        """That of the method; `none` for a run without noise."""
        return self.rules.label if self.is_private else "none"

    @property
    def neighboring_relation(self) -> str:
        """The relation that the sensitivity and the accounting share."""
        return self.rules.neighboring_relation

    @property
    def sensitivity(self) -> float:
        """Largest change of the clipped sum between neighbouring data sets (proof: see the method)."""
        return self.rules.sensitivity(self)

    @property
    def expected_batch_size(self) -> float:
        """q·n: public."""
        return self.sampling_prob * self.num_records_public

    @property
    def divisor(self) -> float:
        """The public constant that divides the noisy sum, for groups their expected number."""
        return self.rules.divisor(self)

    def sampler(self) -> Sampler:
        """Returns station 2."""
        return self.rules.sampler(self)

    def grouper(self) -> Grouper:
        """Returns station 3."""
        return self.rules.grouper(self)

    def rule(self, loss: LossSettings) -> GradientRule:
        """Returns stations 6 and 7."""
        return self.rules.rule(self, loss)

    def clipper(self) -> GroupClipper:
        """Returns the clipper of the methods that clip disjoint groups."""
        return GroupClipper(l2_clip_norm=self.l2_clip_norm, gamma=gamma_of(self.clipping))

    def noise(self, *, num_summed: int = 1) -> GaussianNoise:
        """Returns station 8; `num_summed` is that of the source it is drawn from, see `GaussianNoise`."""
        std = self.noise_multiplier * self.sensitivity if self.is_private else 0.0
        return GaussianNoise(std=std, num_summed=num_summed)

    def dp_event(self, num_steps: int | None = None) -> dp_event.DpEvent:
        """Returns the event of station 10, of all steps or of `num_steps` charged ones."""
        return self.rules.dp_event(self, self.num_steps if num_steps is None else num_steps)

    def epsilon(self, num_steps: int | None = None) -> float:
        """Returns ε at `target_delta` by the method's accountant, of all or of `num_steps` charged steps.

        >>> round(Mechanism(num_records_public=60_000, sampling_prob=2048 / 60_000, group_size=16,
        ...     l2_clip_norm=1.0, noise_multiplier=0.97, num_steps=1200,
        ...     target_delta=default_delta(60_000)).epsilon(), 2)
        9.14
        """
        return self.rules.epsilon(self, self.num_steps if num_steps is None else num_steps)

    def calibrated(self, target_epsilon: float, *, cache_folder: Path | None = None) -> Mechanism:
        """Returns this mechanism with the noise multiplier that meets `target_epsilon` (inf: none).

        Raises:
          ConfigError: no noise multiplier meets the target.
        """
        if math.isinf(target_epsilon):
            return dataclasses.replace(self, noise_multiplier=0.0, l2_clip_norm=math.inf)
        noise = self.rules.calibrated(self, target_epsilon, cache_folder)
        return dataclasses.replace(self, noise_multiplier=noise)


def check_delta(delta: float, num_records_public: int) -> None:
    """Raises ConfigError unless 0 < δ < 1 and δ ≤ 1/n: above that, publishing one record at random passes."""
    if not 0 < delta < 1:
        raise ConfigError(f"target_delta must be in (0, 1); got {delta}")
    if delta > 1 / num_records_public:
        raise ConfigError(
            f"target_delta must be at most 1/num_records_public = {1 / num_records_public:.3g} "
            f"(above it, publishing a random record would pass); got {delta:g}"
        )
