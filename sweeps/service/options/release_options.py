"""Release modes: the results that a sweep releases, and its permitted options in each mode.

*Open* is the default, because a tracking page that shows trials is a release of them. *Sealed* and
*sealed-threshold* publish one trial. Each trial is a random draw from the grid's settings, and the number of
trials stays secret (`sweeps.service.running.sealed`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from dpgcl_core.accounting.tuning.laws import TrialCountLaw, TruncatedNegativeBinomial, TruncatedTrials
from dpgcl_core.accounting.tuning.modes import OPEN, SEALED, SEALED_THRESHOLD, THEOREMS
from dpgcl_core.errors import ConfigError, require_choice
from sweeps.service.options.score_options import NOISED_SCORES, final_scores
from trainers.config.tree import option

MODES = (OPEN, SEALED, SEALED_THRESHOLD)


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """Results that a sweep releases, and the selection in a sealed sweep."""

    mode: Literal["open", "sealed", "sealed-threshold"] = field(default=OPEN, metadata=option("release"))
    """Results to release: every trial (open), or one trial of a secret number (sealed, sealed-threshold)."""
    mean_trials: float = 10.0
    """Sealed: mean of the secret number of trials."""
    eta: float = 1.0
    """Sealed: shape of the secret number's distribution; 1 is geometric, 0 logarithmic."""
    bound: str = "profile"
    """Sealed: the theorem that bounds the cost: profile, pointwise or ps22."""
    halting_prob: float = 0.1
    """Sealed-threshold: probability p of stopping after a trial below --min-score; the mean is 1/p trials."""
    min_score: float | None = None
    """Sealed-threshold: the public score that a trial must reach."""
    publish_after_seconds: float | None = field(default=None, metadata=option("publish_after"))
    """Sealed: seconds from start to publication; by default enough for most draws of the trial number."""
    select_by: str = "auto"
    """Sealed: the public score that selects the released trial; auto: k-NN accuracy, or recall for pairs."""

    @property
    def is_open(self) -> bool:
        """Whether every trial is released."""
        return self.mode == OPEN


def check_release(options: ReleaseOptions, *, scores_held_out: bool, seeded_non_private: bool) -> None:
    """Raise ConfigError for options that contradict the release mode.

    Args:
      options: the release options; `select_by` names a score.
      scores_held_out: whether private records are held out and scored with noise.
      seeded_non_private: whether the trainings have no guarantee.

    Raises:
      ConfigError: the mode is unknown, or the selection's law, bound or score breaks a rule.
    """
    require_choice("release mode", options.mode, MODES)
    threshold = options.mode == SEALED_THRESHOLD
    if threshold != (options.min_score is not None):
        raise ConfigError(
            f"min_score must be set with --release {SEALED_THRESHOLD}, and left out otherwise; got "
            f"{options.min_score} with --release {options.mode}"
        )
    if options.mode == OPEN:
        if options.publish_after_seconds is not None:
            raise ConfigError(
                "--publish-after applies only to sealed sweeps, because an open sweep shows every trial as "
                "it ends; got --release open. Leave it out, or set --release sealed."
            )
        return
    if not 0 < (options.publish_after_seconds or 1.0) < math.inf:
        raise ConfigError(f"--publish-after must be positive and finite; got {options.publish_after_seconds}")
    require_choice("bound", options.bound, THEOREMS)
    trial_law(options)
    require_choice("score to select by", options.select_by, final_scores())
    if options.select_by in NOISED_SCORES and not scores_held_out:
        raise ConfigError(
            f"{options.select_by} is a noised score of held-out private records. Also set "
            "--score-on-held-out and --score-noise-multiplier, or select by a score on public data."
        )
    if seeded_non_private:
        raise ConfigError(
            f"--release {options.mode} needs trainings with a guarantee. Leave seeded_non_private out."
        )


def trial_law(options: ReleaseOptions, max_trials: int | None = None) -> TrialCountLaw:
    """Return the public law of the secret number of trials, given that it is at most `max_trials`.

    With a threshold, halting with probability `halting_prob` after each trial below it is the same as drawing
    a geometric number of trials and releasing the first trial that reaches it. So the number can be drawn
    first.

    Raises:
      ConfigError: a parameter is out of range.
    """
    if options.mode == SEALED_THRESHOLD:
        if not 0 < options.halting_prob < 1:
            raise ConfigError(f"halting_prob must be in (0, 1); got {options.halting_prob}")
        law = TruncatedNegativeBinomial(eta=1.0, gamma=options.halting_prob)
    else:
        law = TruncatedNegativeBinomial.from_mean(options.mean_trials, eta=options.eta)
    return law if max_trials is None else TruncatedTrials(law=law, max_trials=max_trials)
