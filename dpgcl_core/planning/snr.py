"""The expected signal-to-noise ratio (SNR) of a training, from public numbers, and when it is too small.

*One step.* The noise on d trained weights has norm σ·Δ·√d, with Δ = C if groups are sampled and Δ = 2C if
records are sampled. The clean sum of K groups' clipped gradients has norm at most K·C, so the SNR of a step
is at most K·C/(σΔ√d). Its value depends on how far the groups agree. Let all K gradients have norm C and
every two of them have the cosine ρ. Their sum has the squared norm K + K(K − 1)ρ times C², so

    SNR = a · K·C/(σΔ√d),    a² = (1 + (K − 1)ρ)/K,

which is exact at K = 1 and for ρ = 1. A group's gradient is a sum over its S records. If each record has a
common part and an independent remainder, as in a gradient estimated from S samples, the cosine is

    ρ = S/(S + S₀),

where S₀ is the group size at which the common part is half of the squared norm: `ALIGNMENT_SIZE`. This value
is measured on data sets and networks that are not the user's; `alignment_size_of` computes S₀ from the user's
own first step.

*A training.* Only the common part of the groups' gradients, √ρ of each, adds up from step to step: over T
aligned steps to T times one step's part, while independent noise adds up to √T times. So the SNR over the
training is √T·√ρ·K·C/(σΔ√d). This is a model, too: a gradient that turns, as near an optimum, adds up to
less.

The numbers of this module describe the first steps, when groups agree most. They are computed from committed
tables by `tests/dpgcl_core/planning/alignment.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpgcl_core.accounting.composition import MIN_NOISE_MULTIPLIER, epsilon_of_steps
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.registry import METHODS, method_named
from dpgcl_core.planning.root_finding import solve
from dpgcl_core.sampling.groups import BATCH

ALIGNMENT_SIZE = 138.0
"""S₀: the geometric mean over three committed tables of `benchmarks/results/calibration` (65 to 594).

With it, the expected SNR differs from the rows' measured SNR by a factor of 0.66 to 2."""
LEAST_TRAINING_SNR = 0.3
"""Expected SNR over the training below which no gain is to be expected.

Consider the private rows of `benchmarks/results` with a row of the whole batch next to them. No row with an
SNR of up to 0.10 has a distinguishable gain, and the smallest SNR of a row with such a gain is 0.99. This
constant is the middle on a logarithmic scale. Five of the six rows up to 0.10 are distinguishably below the
highest row at their ε, and on Fashion-MNIST no row from 0.42 on is.
"""
ENOUGH_TRAINING_SNR = 2.2
"""The SNR from which noise need not decide S: the geometric mean of two tables' smallest SNR that is within
noise of the highest, 0.99 on Fashion-MNIST and 5.1 where private data matter."""
_CELLS_PER_EPSILON = 300
_LARGE_SHARE, _MANY_STEPS = 0.125, 400
_MOST_GRID, _LEAST_SCALE = 0.003, 0.01


@dataclass(frozen=True, kw_only=True)
class ExpectedSnr:
    """The expected SNR of a training.

    Attributes:
      bound: SNR of one step if all groups agree fully.
      per_step: SNR of one step.
      over_training: SNR of the groups' common part, over all T steps.
    """

    bound: float
    per_step: float
    over_training: float

    @property
    def is_too_small(self) -> bool:
        """Whether the SNR is so small that no gain is to be expected."""
        return self.over_training < LEAST_TRAINING_SNR


def common_share(group_size: float, alignment_size: float = ALIGNMENT_SIZE) -> float:
    """Return ρ = S/(S + S₀), the cosine of two groups' gradients, with S₀ = `alignment_size`.

    >>> common_share(138), round(common_share(16), 2)
    (0.5, 0.1)
    """
    return group_size / (group_size + alignment_size)


def group_alignment(num_groups: float, group_size: float, alignment_size: float = ALIGNMENT_SIZE) -> float:
    """Return a = ‖mean of the groups' clipped gradients‖/C, in [0, 1], if all have norm C.

    >>> group_alignment(1, 1024)
    1.0
    >>> round(group_alignment(64, 16), 2), round(group_alignment(1e9, 16), 2)
    (0.34, 0.32)
    """
    cosine = common_share(group_size, alignment_size)
    groups = max(num_groups, 1.0)
    return math.sqrt((1 + (groups - 1) * cosine) / groups)


def alignment_size_of(alignment: float, num_groups: float, group_size: float) -> float:
    """Return S₀ from a measured alignment of K groups of size S: the inverse of `group_alignment`.

    >>> round(alignment_size_of(group_alignment(64, 16, 100.0), 64, 16), 6)
    100.0

    Raises:
      ConfigError: K is 1 (the alignment is then always 1), or no cosine in (0, 1] explains it.
    """
    if not num_groups > 1:
        raise ConfigError(
            f"num_groups must be above 1, because the alignment of one group is always 1; got {num_groups:g}"
        )
    cosine = (num_groups * alignment**2 - 1) / (num_groups - 1)
    if not 0 < cosine <= 1:
        raise ConfigError(
            f"the alignment of {num_groups:g} groups must be at most 1 and above "
            f"{math.sqrt(1 / num_groups):.3g}, the alignment of unrelated groups; got {alignment:.3g}"
        )
    return group_size * (1 - cosine) / cosine


def is_modelled(mechanism: Mechanism) -> bool:
    """Return whether the SNR model covers it: one clipped gradient per disjoint group, with noise."""
    return mechanism.is_private and clips_groups(mechanism.method)


def clips_groups(method: str) -> bool:
    """Return whether a method clips one gradient per disjoint group of contrasted records, as S₀ requires.

    >>> clips_groups("dp_gcl"), clips_groups("logit_dp"), clips_groups("dp_mae")
    (True, False, False)
    """
    rules = method_named(method)
    return rules.clips_groups and not rules.task


def names_of_modelled() -> str:
    """Return the names of the proven methods that the SNR model covers.

    >>> names_of_modelled()
    'dp_gcl, dp_clip, siglip_groups, byol_groups'
    """
    return ", ".join(
        name for name, method in METHODS.items() if method.label == "proven" and clips_groups(name)
    )


def expected_snr(
    mechanism: Mechanism, num_weights: int, alignment_size: float = ALIGNMENT_SIZE
) -> ExpectedSnr:
    """Return the expected SNR of a training.

    Args:
      mechanism: the mechanism of a method that clips disjoint groups.
      num_weights: d, the number of trained weights.
      alignment_size: S₀.

    Raises:
      ConfigError: the method does not clip disjoint groups, the training has no noise, or a number is not
        positive.

    >>> mechanism = Mechanism(num_records_public=60_000, sampling_prob=2048 / 60_000, group_size=16,
    ...     l2_clip_norm=1.0, noise_multiplier=1.39, num_steps=40, target_delta=1.5e-6)
    >>> found = expected_snr(mechanism, 9216)
    >>> round(found.bound, 2), round(found.per_step, 2), round(found.over_training, 1)
    (0.96, 0.32, 2.0)
    """
    if not is_modelled(mechanism):
        raise ConfigError(
            "the expected SNR exists only for private methods that clip one gradient per disjoint group "
            f"({names_of_modelled()}); got {mechanism.method} with noise_multiplier = "
            f"{mechanism.noise_multiplier:g}"
        )
    if num_weights < 1:
        raise ConfigError(f"num_weights must be at least 1; got {num_weights}")
    if not (alignment_size > 0 and math.isfinite(alignment_size)):
        raise ConfigError(f"alignment_size must be positive and finite; got {alignment_size}")
    groups = mechanism.divisor
    size = mechanism.expected_batch_size if mechanism.group_size == BATCH else int(mechanism.group_size)
    noise = mechanism.noise_multiplier * mechanism.sensitivity * math.sqrt(num_weights)
    bound = groups * mechanism.l2_clip_norm / noise
    per_step = group_alignment(groups, size, alignment_size) * bound
    common = math.sqrt(mechanism.num_steps * common_share(size, alignment_size)) * bound
    return ExpectedSnr(bound=bound, per_step=per_step, over_training=common)


def enough_epsilon(mechanism: Mechanism, snr: ExpectedSnr) -> float | None:
    """Return the ε at which the SNR over the training would be `LEAST_TRAINING_SNR`, by PLD.

    Return None if that needs a smaller σ than `MIN_NOISE_MULTIPLIER`.
    """
    noise = mechanism.noise_multiplier * snr.over_training / LEAST_TRAINING_SNR
    if noise < MIN_NOISE_MULTIPLIER:
        return None
    rough = coarse_epsilon(mechanism, noise, 10.0)
    return coarse_epsilon(mechanism, noise, rough)


def coarse_epsilon(mechanism: Mechanism, noise_multiplier: float, scale: float) -> float:
    """Return an upper bound on ε with another σ, by PLD on a grid that is a small fraction of `scale`.

    For an ε near `scale`, the bound is about two per cent above the ε that a training reports, and is
    computed in a fraction of the time.
    """
    return epsilon_of_steps(
        sampling_prob=mechanism.sampling_prob,
        noise_multiplier=noise_multiplier,
        num_steps=mechanism.num_steps_charged,
        delta=mechanism.target_delta,
        grid=min(_MOST_GRID, max(scale, _LEAST_SCALE) / _CELLS_PER_EPSILON),
    )


def with_larger_steps(mechanism: Mechanism) -> Mechanism | None:
    """Return the training with a batch and a number of steps that hardly limit the SNR, at the same ε.

    It has at least an eighth of the records in a step, and at least 400 steps. The SNR over the training
    grows little with a larger batch or more steps, since noise grows with both. Return None if the training
    already has both, or no σ gives ε.
    """
    prob = max(mechanism.sampling_prob, _LARGE_SHARE)
    steps = max(mechanism.num_steps, _MANY_STEPS)
    if (prob, steps) == (mechanism.sampling_prob, mechanism.num_steps):
        return None
    target = mechanism.epsilon()
    larger = replace(mechanism, sampling_prob=prob, num_steps=steps)
    try:
        noise = solve(
            lambda noise: coarse_epsilon(larger, noise, target),
            high=target,
            share=0.01,
            start=mechanism.noise_multiplier,
            slope=-1.2,
            lower=MIN_NOISE_MULTIPLIER,
            upper=1e4,
        )
    except ConfigError:
        return None
    return replace(larger, noise_multiplier=noise)


def too_small(mechanism: Mechanism, num_weights: int, alignment_size: float = ALIGNMENT_SIZE) -> str | None:
    """Return the warning that no gain is to be expected, with a remedy; None if a gain is to be expected.

    The warning names n and ε, or only this training's B and T, as too small. It depends only on public
    numbers; methods that the SNR model does not cover get no warning.
    """
    if not is_modelled(mechanism):
        return None
    snr = expected_snr(mechanism, num_weights, alignment_size)
    if not snr.is_too_small:
        return None
    snr_text = (
        f"the SNR of T = {mechanism.num_steps} steps of {mechanism.expected_batch_size:g} records in "
        f"groups of {mechanism.group_size} on {num_weights} weights is {snr.over_training:.2g}. Below "
        f"{LEAST_TRAINING_SNR:g}, no measured training from random weights showed a distinguishable gain"
    )
    numbers_text = f"n = {mechanism.num_records_public} and ε = {mechanism.epsilon():.2g}"
    plan = with_larger_steps(mechanism)
    if plan is not None and not (plan_snr := expected_snr(plan, num_weights, alignment_size)).is_too_small:
        return (
            f"B and T are too small to expect a gain with {numbers_text}: {snr_text}. At the same ε, "
            f"B = {plan.expected_batch_size:.0f} and T = {plan.num_steps} have {plan_snr.over_training:.2g}."
        )
    epsilon = enough_epsilon(mechanism, snr)
    with_more = (
        "no ε with protective noise would suffice"
        if epsilon is None
        else f"ε = {epsilon:.3g} (or an n·ε larger by the same factor) would also suffice"
    )
    fewer = num_weights * (snr.over_training / LEAST_TRAINING_SNR) ** 2
    return (
        f"n and ε are too small to expect a gain: with {numbers_text}, {snr_text}. Use at most "
        f"{fewer:.0f} weights; {with_more}."
    )
