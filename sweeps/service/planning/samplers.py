"""The samplers that propose the settings of a search; Optuna is imported when a sampler is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

_MOST_RANDOM_STARTS = 10


def _tpe(num_trials: int, seed: int) -> BaseSampler:
    """Return a sampler that learns from the scores of earlier trials."""
    import optuna

    starts = min(_MOST_RANDOM_STARTS, max(2, num_trials // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=starts, multivariate=True, constant_liar=True
        )


def _random(num_trials: int, seed: int) -> BaseSampler:
    """Return a sampler that uses no scores."""
    import optuna

    return optuna.samplers.RandomSampler(seed=seed)


SAMPLERS: dict[str, Callable[[int, int], BaseSampler]] = {"tpe": _tpe, "random": _random}
"""Functions that make a new sampler for each trial, from the number of trials and the trial's public seed."""
