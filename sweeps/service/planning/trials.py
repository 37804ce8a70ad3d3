"""The points of a sweep, its trials, and the draws that each trial may make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpgcl_core.accounting.tuning.trial_release import TrialClass
    from trainers.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep: the options that differ from the sweep's own options.

    Attributes:
      label: short name of the point, valid as a file name.
      changes: option values by name; `epsilon = inf` is a trial without noise and clipping.
      params: values that MLflow shows in addition to its settings, for example the compared item's name.
    """

    label: str
    changes: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep.

    Attributes:
      name: the trial's name, unique in the sweep and valid as a file name.
      config: the training's configuration.
      params: the params that MLflow shows for the trial.
    """

    name: str
    config: TrainingConfig
    params: dict[str, Any]


def is_proven(trial: Trial) -> bool:
    """Return whether a trial's guarantee has a valid proof."""
    return trial.config.guarantee_label == "proven"


@dataclass(frozen=True, kw_only=True)
class ChargedSteps:
    """Upper bounds on the draws of one training of an open sweep, including repeats after restarts.

    If R steps for restarts are charged in advance, the planned steps and R are charged, whatever was drawn.

    Attributes:
      num_steps: the number of steps.
      num_first_steps: how many of them are first steps, whose noised SNR is released if the training does so.
      num_scorings: the number of times that its noised scores were drawn.
    """

    num_steps: int
    num_first_steps: int = 1
    num_scorings: int = 1


def trial_class(trial: Trial, counts: ChargedSteps | None = None) -> TrialClass:
    """Return one training's releases for the accountants, as planned or, if larger, as in `counts`."""
    from dpgcl_core.accounting.tuning.trial_release import TrialClass  # imported late: points do not need it
    from dpgcl_core.release import noised_counts

    mechanism, evaluation = trial.config.mechanism, trial.config.evaluation
    in_advance = mechanism.num_steps_charged
    counts = counts or ChargedSteps(num_steps=in_advance)
    num_steps, joint_noise = max(in_advance, counts.num_steps), None
    num_first_steps = max(1 + (mechanism.num_restart_steps or 0), counts.num_first_steps)
    if evaluation.snr_noise_multiplier is not None:
        joint_noise = noised_counts.joint_noise_multiplier(
            mechanism.noise_multiplier, evaluation.snr_noise_multiplier
        )
    return TrialClass(
        sampling_prob=mechanism.sampling_prob,
        noise_multiplier=mechanism.noise_multiplier,
        num_steps=num_steps,
        joint_noise_multiplier=joint_noise,
        num_joint_steps=0 if joint_noise is None else min(num_steps, num_first_steps),
        score_noise_multiplier=evaluation.score_noise_multiplier,
        num_scores=evaluation.num_noised_scores * max(1, counts.num_scorings),
    )
