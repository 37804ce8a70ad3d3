"""One trial of a sweep as the accountants see it: its steps, and what it releases beside them.

*Noised norm.* A step that also releases its noised norm belongs to a class of its own, with the joint noise
multiplier. It dominates a step without: dropping the norm is post-processing.

*Noised counts.* They are computed on records that no trial of the sweep trains on, split by record id in the
same way in all trials. So a record is trained on by every trial, or scored by every trial. In the first case
the counts are post-processing of what the steps release; in the second the steps have the same distribution
on both data sets, and each trial is dominated by its counts alone. The sweep costs the larger ε of the two
cases; for a sealed sweep that is the larger *tuned* ε. The proof: docs/theory/scores.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrialClass:
    """Trials that cost the same, planned in advance.

    Attributes:
      sampling_prob: q.
      noise_multiplier: σ = noise std / sensitivity.
      num_steps: T, the cap on one trial's steps.
      count: number of such trials; 1 for a candidate of a sealed sweep.
      joint_noise_multiplier: of the steps that also release their noised norm
        (`noised_counts.joint_noise_multiplier`); None without any.
      num_joint_steps: how many of the `num_steps` these are.
      score_noise_multiplier: s of each noised count on held-out records; None without any.
      num_scores: noised counts of one trial.

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
        _ = self.step_class, self.joint_class, self.score_class  # each refuses numbers out of range
        limits = {"num_steps": 1, "count": 1, "num_joint_steps": 0, "num_scores": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}; got {value!r}")
        for noise, number in (
            ("joint_noise_multiplier", "num_joint_steps"),
            ("score_noise_multiplier", "num_scores"),
        ):
            if (getattr(self, noise) is None) != (getattr(self, number) == 0):
                raise ConfigError(
                    f"{noise} and {number} belong together: give both or neither; "
                    f"got {getattr(self, noise)} and {getattr(self, number)}"
                )
        if self.joint_noise_multiplier is not None and self.joint_noise_multiplier > self.noise_multiplier:
            raise ConfigError(
                "joint_noise_multiplier must be at most noise_multiplier, for such a step releases more; "
                f"got {self.joint_noise_multiplier} and {self.noise_multiplier}"
            )
        if self.num_joint_steps > self.num_steps:
            raise ConfigError(
                f"num_joint_steps are some of the num_steps = {self.num_steps}; got {self.num_joint_steps}"
            )

    @property
    def step_class(self) -> StepClass:
        """The class of a step that releases its noisy sum alone."""
        return StepClass(self.sampling_prob, self.noise_multiplier)

    @property
    def joint_class(self) -> StepClass | None:
        """The class of a step that also releases its noised norm."""
        noise = self.joint_noise_multiplier
        return None if noise is None else StepClass(self.sampling_prob, noise)

    @property
    def score_class(self) -> StepClass | None:
        """One noised count as a step on all held-out records: a Gaussian without sampling."""
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
        """The noised counts of one trial, by class; empty without any."""
        return {} if self.score_class is None else {self.score_class: self.num_scores}


def cases_of(trials: Sequence[TrialClass]) -> list[list[dict[StepClass, int]]]:
    """Return the steps of each trial for a record that is trained on, and for one that is scored, if any."""
    scored = [trial.scores_of_one for trial in trials]
    return [[trial.steps_of_one for trial in trials], *([scored] if any(scored) else [])]
