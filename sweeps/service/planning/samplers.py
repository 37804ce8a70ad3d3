"""The samplers that propose the settings of a search; Optuna is imported when a sampler is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler


def _tpe(num_trials: int, seed: int) -> BaseSampler:
    """Return the TPE sampler, which learns from the scores of earlier trials."""
    import optuna

    num_random_starts = min(10, max(2, num_trials // 4))
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=num_random_starts, multivariate=True, constant_liar=True
        )


def _random(num_trials: int, seed: int) -> BaseSampler:
    """Return the sampler that draws settings at random."""
    import optuna

    return optuna.samplers.RandomSampler(seed=seed)


SAMPLERS: dict[str, Callable[[int, int], BaseSampler]] = {"tpe": _tpe, "random": _random}
"""Functions that make a new sampler for each trial, from the number of trials and the trial's public seed."""
