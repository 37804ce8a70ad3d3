"""Options that cost no ε, each with the value that an ablation switches it on with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dpgcl_core.errors import ConfigError, unknown_choice
from sweeps.service.options.sweep import SweepOptions
from trainers.config.training import NOISE_SGD

ALL = "all"
NUM_PUBLIC_NEGATIVES, SUBSPACE_DIM = 64, 64
"""Tried where the options give none."""

_NEEDS = {
    "warm-start": "public weights: give --warm-start",
    "public-negatives": "public records: give --public-records",
    "public-subspace": "public records: give --public-records",
}
_PLAIN: dict[str, Any] = {
    **{"ema_decay": 0.0, "num_view_draws": 1, "warmup_steps": 0, "learning_rate_decay": "none"},
    **{"clipping": "flat", "warm_start": None, "num_public_negatives": 0},
    **{"subspace_dim": 0, "subspace_groups": None, "subspace_every_steps": 1},
}


def free_options(
    options: SweepOptions, names: Sequence[str] = (), learning_rates: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the changes of each option, of none as "plain" and of all together as "all".

    An option takes the value that the sweep was given for it, else one that suits most data.

    Args:
      options: of the sweep.
      names: the options to return; all of them unless given, without those that need public weights or
        records where there are none.
      learning_rates: `OPTION=RATE`, where an option has another learning rate than the sweep's.

    Raises:
      ConfigError: a name is unknown or needs what there is not; a learning rate is not of that form.
    """
    found = _each(options)
    found[ALL] = {name: value for changes in found.values() for name, value in changes.items()}
    for name in names:
        if name not in found and name in _NEEDS:
            raise ConfigError(f"the option {name} needs {_NEEDS[name]}")
        if name not in found:
            raise ConfigError(unknown_choice("option", name, found))
    rates = dict(_rate(given, found) for given in learning_rates)
    optimizer = options.optimizer
    plain = _PLAIN | {"optimizer": "adam" if optimizer.in_units_of_noise else optimizer.name}
    return {
        name: plain | found[name] | {"learning_rate": rates.get(name, optimizer.learning_rate)}
        for name in dict.fromkeys(names or found)
    }


def _each(options: SweepOptions) -> dict[str, dict[str, Any]]:
    optimizer, public, start = options.optimizer, options.public, options.network.warm_start
    decay = optimizer.learning_rate_decay
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "ema": {"ema_decay": optimizer.ema_decay or 0.95},
        "view-draws": {"num_view_draws": max(2, options.objective.num_view_draws)},
        "schedule": {
            "warmup_steps": optimizer.warmup_steps or options.mechanism.num_steps // 10,
            "learning_rate_decay": "cosine" if decay == "none" else decay,
        },
        "automatic-clipping": {"clipping": "automatic"},
        "noise-sgd": {"optimizer": NOISE_SGD},
    }
    if start is not None:
        found["warm-start"] = {"warm_start": start}
    if options.data.public_records is not None:
        number = public.num_public_negatives or NUM_PUBLIC_NEGATIVES
        found["public-negatives"] = {"num_public_negatives": number}
        found["public-subspace"] = {
            "subspace_dim": public.subspace_dim or SUBSPACE_DIM,
            "subspace_groups": public.subspace_groups,
            "subspace_every_steps": public.subspace_every_steps,
        }
    return found


def _rate(given: str, names: Collection[str]) -> tuple[str, float]:
    """Return name and learning rate of `OPTION=RATE`."""
    name, _, rate = given.partition("=")
    if name not in names:
        raise ConfigError(unknown_choice("option", name, names))
    try:
        return name, float(rate)
    except ValueError:
        raise ConfigError(
            f"a learning rate is given as OPTION=RATE, such as noise-sgd=0.03; got {given!r}"
        ) from None
