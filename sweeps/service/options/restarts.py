"""The number of a training's steps that restarts may repeat, and whether ε includes them in advance.

Charging repeated steps as they occur gives no (ε, δ) statement once somebody restarts a training because of
its results: the number of steps then depends on the results. So private data are charged R more steps in
advance (docs/theory/restarts.md), except

- with a budget ledger, whose filter is valid for adaptive steps and allows no steps beyond its cap;
- in a sealed sweep, which resumes no training: R = 0.
"""

from __future__ import annotations

from dpgcl_core.errors import ConfigError
from sweeps.service.options.service import ledger_url
from sweeps.service.options.sweep_options import SweepOptions


def num_restart_steps(options: SweepOptions) -> int | None:
    """Return R, the steps charged in advance for a training's restarts; None if charged as they occur.

    Without a ledger R defaults to one checkpoint interval for private data, and to None for public data,
    whose restarts spend nothing.

    Raises:
      ConfigError: the requested R is negative, or does not apply.
    """
    requested_steps = options.mechanism.restart_steps
    if requested_steps is not None and requested_steps < 0:
        raise ConfigError(f"--restart-steps must not be negative; got {requested_steps}")
    if not options.release.is_open:
        if requested_steps:
            raise ConfigError(
                f"--restart-steps must be 0 with --release {options.release.mode}, where a stopped training "
                f"gets the worst score and is not resumed; got {requested_steps}. Leave it out."
            )
        return 0
    if ledger_url(options.data, options.ledger) is not None:
        if requested_steps is not None:
            raise ConfigError(
                "--restart-steps applies only without a budget ledger, which is charged for repeated steps "
                f"as they occur; got {requested_steps}. Leave it out."
            )
        return None
    if requested_steps is None and options.data.are_private:
        return min(options.performance.checkpoint_every_steps, options.mechanism.num_steps)
    return requested_steps
