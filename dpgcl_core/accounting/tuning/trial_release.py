"""One trial of a sweep for the accountants: its steps, and its other noised releases.

*Noised norm.* A step that also releases its noised norm belongs to its own class, with the joint noise
multiplier. It dominates a step without a noised norm: dropping the norm is post-processing.

*Noised counts.* They are computed on records that no trial of the sweep trains on, split by record id in the
same way in all trials. So every trial trains on a record, or every trial scores it. In the first case the
counts are post-processing of the steps' releases. In the second case the steps have the same distribution on
both data sets, and the event of only its counts dominates each trial. The sweep costs the larger ε of the two
cases; for a sealed sweep that is the larger *tuned* ε. docs/theory/scores.md has the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import ConfigError, require_whole


@dataclass(frozen=True, kw_only=True)
class TrialClass:
    """Trials of the same cost, planned in advance.

    Attributes:
      sampling_prob: q.
      noise_multiplier: σ = noise std / sensitivity.
      num_steps: T, the cap on one trial's steps.
      count: number of such trials; 1 for a candidate of a sealed sweep.
      joint_noise_multiplier: noise multiplier of the steps that also release their noised norm
        (`noised_counts.joint_noise_multiplier`); None without such steps.
      num_joint_steps: the number of such steps among the `num_steps`.
      score_noise_multiplier: s, the noise multiplier of each noised count on held-out records; None without
        noised counts.
      num_scores: number of noised counts of one trial.

    Raises:
      ConfigError: a field is out of range.
    """

    sampling_prob: float
    noise_multiplier: float
    num_steps: int
    count: int = 1
    joint_noise_multiplier: float | None = None
    num_joint_steps: int = 0
    score_noise_multiplier: float | None = None
    num_scores: int = 0

    def __post_init__(self) -> None:
        _ = self.step_class, self.joint_class, self.score_class  # each raises for numbers out of range
        limits = {"num_steps": 1, "count": 1, "num_joint_steps": 0, "num_scores": 0}
        for name, least in limits.items():
            require_whole(name, getattr(self, name), least=least)
        for noise, number in (
            ("joint_noise_multiplier", "num_joint_steps"),
            ("score_noise_multiplier", "num_scores"),
        ):
            if (getattr(self, noise) is None) != (getattr(self, number) == 0):
                raise ConfigError(
                    f"{noise} and {number} must be set together or both left out; "
                    f"got {getattr(self, noise)} and {getattr(self, number)}"
                )
        if self.joint_noise_multiplier is not None and self.joint_noise_multiplier > self.noise_multiplier:
            raise ConfigError(
                "joint_noise_multiplier must be at most noise_multiplier (a joint step releases more); "
                f"got {self.joint_noise_multiplier} and {self.noise_multiplier}"
            )
        if self.num_joint_steps > self.num_steps:
            raise ConfigError(
                f"num_joint_steps must be at most num_steps = {self.num_steps}; got {self.num_joint_steps}"
            )

    @property
    def step_class(self) -> StepClass:
        """The class of a step that releases only its noisy sum."""
        return StepClass(self.sampling_prob, self.noise_multiplier)

    @property
    def joint_class(self) -> StepClass | None:
        """The class of a step that also releases its noised norm."""
        noise = self.joint_noise_multiplier
        return None if noise is None else StepClass(self.sampling_prob, noise)

    @property
    def score_class(self) -> StepClass | None:
        """The class of one noised count, as a step on all held-out records: a Gaussian without sampling."""
        noise = self.score_noise_multiplier
        return None if noise is None else StepClass(1.0, noise)

    @property
    def steps_of_one(self) -> dict[StepClass, int]:
        """The steps of one trial, by class."""
        steps = Counter({self.step_class: self.num_steps - self.num_joint_steps})
        if self.joint_class is not None:
            steps[self.joint_class] += self.num_joint_steps
        return dict(+steps)

    @property
    def scores_of_one(self) -> dict[StepClass, int]:
        """The noised counts of one trial, by class; empty without noised counts."""
        return {} if self.score_class is None else {self.score_class: self.num_scores}


def total_steps(trials: Sequence[TrialClass]) -> list[dict[StepClass, int]]:
    """Return the charged steps of all trials together by class, for each case of `cases_of`."""
    totals = []
    for case in cases_of(trials):
        total = Counter[StepClass]()
        for trial, steps in zip(trials, case, strict=True):
            total.update({step_class: num * trial.count for step_class, num in steps.items()})
        totals.append(dict(total))
    return totals


def cases_of(trials: Sequence[TrialClass]) -> list[list[dict[StepClass, int]]]:
    """Return, for each case, every trial's charged steps by class.

    In the first case the differing record is trained on. In the second case it is scored; this case is
    omitted if no trial has noised counts.
    """
    scored = [trial.scores_of_one for trial in trials]
    return [[trial.steps_of_one for trial in trials], *([scored] if any(scored) else [])]
