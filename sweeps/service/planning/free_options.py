"""Options that cost no ε, each with the value that an ablation switches it on with."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from dpgcl_core.errors import ConfigError, unknown_choice
from sweeps.service.options.sweep import SweepOptions
from trainers.config.nodes import NOISE_SGD

ALL, NOISE = "all", "noise-sgd"

_NEEDS = {
    NOISE: "noise: give a finite --epsilon",
    "warm-start": "public weights: give --warm-start",
    "public-negatives": "public records: give --public-records and --num-public-negatives",
    "public-subspace": "public records: give --public-records and --subspace-dim",
}
_PLAIN: dict[str, Any] = {
    **{"ema_decay": 0.0, "num_view_draws": 1, "warmup_steps": 0, "learning_rate_decay": "none"},
    **{"clipping": "flat", "warm_start": None, "num_public_negatives": 0},
    **{"subspace_dim": 0, "subspace_groups": None, "subspace_every_steps": 1},
}


def free_options(
    options: SweepOptions, names: Sequence[str] = (), learning_rates: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return what each option changes; "plain" has none of them, "all" has all.

    An option takes the value that the sweep was given for it, else one that suits most data.

    Args:
      options: of the sweep.
      names: the options to return; all of them unless given, without those that need something that is
        missing: noise, public weights or public records.
      learning_rates: `OPTION=RATE`, where an option has another learning rate than the sweep's; "all" has
        that of "noise-sgd" unless it is given one.

    Raises:
      ConfigError: a name is unknown or needs something that is missing; a learning rate is not of that form,
        of no option that is tried, or given twice; the sweep's own optimizer is one of the options.
    """
    optimizer = options.optimizer
    if optimizer.in_units_of_noise:
        raise ConfigError(
            f"{NOISE_SGD} is tried as the option {NOISE}: give --optimizer another one, for all other options"
        )
    found = _each(options)
    found[ALL] = {name: value for changes in found.values() for name, value in changes.items()}
    for name in names:
        _check(name, found)
    chosen = tuple(dict.fromkeys(names or found))
    rates = _rates(learning_rates, chosen)
    rates.setdefault(ALL, rates.get(NOISE, optimizer.learning_rate))
    plain = _PLAIN | {"optimizer": optimizer.name}
    return {
        name: plain | found[name] | {"learning_rate": rates.get(name, optimizer.learning_rate)}
        for name in chosen
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
    }
    if options.mechanism.epsilon != math.inf:
        found[NOISE] = {"optimizer": NOISE_SGD}
    if start is not None:
        found["warm-start"] = {"warm_start": start}
    if public.num_public_negatives:
        found["public-negatives"] = {"num_public_negatives": public.num_public_negatives}
    if public.subspace_dim:
        names = ("subspace_dim", "subspace_groups", "subspace_every_steps")
        found["public-subspace"] = {name: getattr(public, name) for name in names}
    return found


def _check(name: str, names: Collection[str]) -> None:
    if name in names:
        return
    if name in _NEEDS:
        raise ConfigError(f"the option {name} needs {_NEEDS[name]}")
    raise ConfigError(unknown_choice("option", name, names))


def _rates(given: Sequence[str], names: Collection[str]) -> dict[str, float]:
    """Return the learning rates of `OPTION=RATE` by option."""
    found: dict[str, float] = {}
    for each in given:
        name, _, rate = each.partition("=")
        _check(name, names)
        if name in found:
            raise ConfigError(f"each option has one learning rate; got two of {name}")
        try:
            found[name] = float(rate)
        except ValueError:
            raise ConfigError(
                f"a learning rate is given as OPTION=RATE, such as {NOISE}=0.03; got {each!r}"
            ) from None
    return found
