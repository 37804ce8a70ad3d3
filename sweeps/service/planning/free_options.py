"""Options that cost no ε, each with its value for an ablation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dpgcl_core.errors import ConfigError, unknown_choice
from sweeps.service.options.sweep_options import SweepOptions

ALL, WARM_START = "all", "warm-start"

_PLAIN: dict[str, Any] = {
    **{"ema_decay": 0.0, "warmup_steps": 0, "learning_rate_decay": "none"},
    **{"clipping": "flat", "warm_start": None},
}


def free_options(
    options: SweepOptions, names: Sequence[str] = (), learning_rates: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the option changes to try, by name; "plain" has no option on, "all" has all of them on.

    An option has its value in the sweep's options, or a value that suits most data if it is off there.

    Args:
      options: the sweep's options.
      names: the names to return; by default all, with a warm start only if there are public weights.
      learning_rates: `NAME=RATE`, for a name with another learning rate than the sweep's.

    Raises:
      ConfigError: a name is unknown, a warm start is named without public weights, or a learning rate has
        another form, is for an option that is not tried, or is repeated.
    """
    changes = _option_changes(options)
    changes[ALL] = {name: value for values in changes.values() for name, value in values.items()}
    for name in names:
        _check_option_name(name, changes)
    option_names = tuple(dict.fromkeys(names or changes))
    rates = _rates(learning_rates, option_names)
    return {
        name: _PLAIN | changes[name] | {"learning_rate": rates.get(name, options.optimizer.learning_rate)}
        for name in option_names
    }


def _option_changes(options: SweepOptions) -> dict[str, dict[str, Any]]:
    """Return the changes that switch on each option, by its name."""
    optimizer, start = options.optimizer, options.network.warm_start
    decay = optimizer.learning_rate_decay
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "ema": {"ema_decay": optimizer.ema_decay or 0.95},
        "schedule": {
            "warmup_steps": optimizer.warmup_steps or options.mechanism.num_steps // 10,
            "learning_rate_decay": "cosine" if decay == "none" else decay,
        },
        "automatic-clipping": {"clipping": "automatic"},
    }
    if start is not None:
        changes[WARM_START] = {"warm_start": start}
    return changes


def _check_option_name(name: str, names: Collection[str]) -> None:
    if name in names:
        return
    if name == WARM_START:
        raise ConfigError(f"the option {name} needs public weights. Set --warm-start.")
    raise ConfigError(unknown_choice("option", name, names))


def _rates(assignments: Sequence[str], names: Collection[str]) -> dict[str, float]:
    """Return the learning rates in `OPTION=RATE` assignments, by option."""
    rates: dict[str, float] = {}
    for assignment in assignments:
        name, _, rate = assignment.partition("=")
        _check_option_name(name, names)
        if name in rates:
            raise ConfigError(f"each option has one learning rate; got two for {name}")
        try:
            rates[name] = float(rate)
        except ValueError:
            raise ConfigError(
                f"a learning rate must have the form OPTION=RATE, such as ema=0.03; got {assignment!r}"
            ) from None
    return rates
