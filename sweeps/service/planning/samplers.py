"""What proposes the settings of a search: one entry each; Optuna is imported when one is built."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

SamplerName = Literal["tpe", "random", "qmc"]
"""The names of `SAMPLERS`, for command lines and type checkers."""

_MOST_RANDOM_STARTS = 10


@dataclass(frozen=True, kw_only=True)
class SearchSetup:
    """What a sampler is built for.

    Attributes:
      distributions: of the options that are searched, by name.
      num_trials: of the search.
      public_seed: of the search; `trial_seed` follows from it and the trial's number.
    """

    distributions: Mapping[str, Any]
    num_trials: int
    public_seed: int
    trial_seed: int


@dataclass(frozen=True, kw_only=True)
class SamplerEntry:
    """One sampler.

    Attributes:
      name: on the command line.
      is_adaptive: whether it learns from the scores of earlier trials, which no sealed sweep may.
      build: makes it anew for each trial.
      lasts: whether it is built once instead, for it counts its points itself.
    """

    name: SamplerName
    is_adaptive: bool
    build: Callable[[SearchSetup], BaseSampler]
    lasts: bool = False


def _tpe(setup: SearchSetup) -> BaseSampler:
    import optuna

    starts = min(_MOST_RANDOM_STARTS, max(2, setup.num_trials // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=setup.trial_seed, n_startup_trials=starts, multivariate=True, constant_liar=True
        )


def _random(setup: SearchSetup) -> BaseSampler:
    import optuna

    return optuna.samplers.RandomSampler(seed=setup.trial_seed)


def _qmc(setup: SearchSetup) -> BaseSampler:
    from sweeps.service.planning.sobol import SobolSampler

    return SobolSampler(dict(setup.distributions), setup.public_seed)


_ENTRIES = (
    SamplerEntry(name="tpe", is_adaptive=True, build=_tpe),
    SamplerEntry(name="random", is_adaptive=False, build=_random),
    SamplerEntry(name="qmc", is_adaptive=False, build=_qmc, lasts=True),
)
SAMPLERS: dict[str, SamplerEntry] = {entry.name: entry for entry in _ENTRIES}
