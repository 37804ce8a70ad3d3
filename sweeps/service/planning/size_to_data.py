"""Batches and groups for a data set that is too small for the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpgcl_core.errors import ConfigError
from dpgcl_core.release.noised_counts import split_public
from sweeps.service.options.sweep_options import SweepOptions, varied_by
from sweeps.service.planning.trials import Point
from trainers.config.tree import replace_options

_BATCH, _GROUP = "expected_batch_size", "group_size"
_SizedSweep = tuple[SweepOptions, Sequence[Point], list[str]]


def fitted_to_size(options: SweepOptions, points: Sequence[Point], num_records: int) -> _SizedSweep:
    """Return options and points whose batches and groups fit the number of records, and notes on the changes.

    Only options that the user did not set are lowered. The limit is the public N: the declared or registered
    number, or the number in the data if none is declared (`sweeps.service.planning.plan`). One error lists
    all options that the user set and that do not fit. Nothing changes if it is unknown what the user set, or
    if `sampling_prob` sets the batch.

    Args:
      options: the sweep's options.
      points: the settings to compare.
      num_records: the number of records in the data; used only if no number is declared.

    Raises:
      ConfigError: options that the user set do not fit.
    """
    overrides = options.overrides
    if overrides is None or options.mechanism.sampling_prob is not None:
        return options, points, []
    declared = options.mechanism.num_records_public
    n, _ = split_public(declared or num_records, options.evaluation.score_on_held_out)
    _check_user_sizes(options, points, n, overrides)
    options, notes = _with_smaller_batch(options, n, overrides)
    max_group_size = min(n, options.mechanism.expected_batch_size) if notes else n
    fitting_points = [point for point in points if _fits(point, n, max_group_size)]
    if fitting_points and len(fitting_points) < len(points):
        unfit_labels = ", ".join(point.label for point in points if point not in fitting_points)
        notes.append(f"points whose batches or groups do not fit {n} records are left out: {unfit_labels}")
        points = fitting_points
    size = options.mechanism.group_size
    if isinstance(size, int) and size > max_group_size and _GROUP not in overrides:
        smaller = max(2, int(max_group_size) // 4)
        options = replace_options(options, group_size=smaller)
        notes.append(f"--group-size is lowered from {size} to {smaller}")
    return options, points, [f"{note[0].upper()}{note[1:]}." for note in notes]


def _with_smaller_batch(
    options: SweepOptions, n: int, overrides: frozenset[str]
) -> tuple[SweepOptions, list[str]]:
    """Return the options with a batch of at most n, and a note if it was lowered."""
    batch = options.mechanism.expected_batch_size
    if batch <= n or {_BATCH, "sampling_prob"} & overrides or _BATCH in varied_by(type(options)):
        return options, []
    smaller = _power_of_two_below(n / 4)
    note = f"--expected-batch-size is lowered from {batch:g} to {smaller}, at most a quarter of {n} records"
    return replace(options, mechanism=replace(options.mechanism, expected_batch_size=smaller)), [note]


def _power_of_two_below(value: float) -> int:
    """Return the largest power of two at or below a value, at least 1.

    >>> _power_of_two_below(15.5), _power_of_two_below(0.5)
    (8, 1)
    """
    return 1 << max(0, int(value).bit_length() - 1)


def _fits(point: Point, n: int, max_group_size: float) -> bool:
    size, batch = point.changes.get(_GROUP), point.changes.get(_BATCH)
    is_too_large = isinstance(size, int) and size > max_group_size
    return not is_too_large and (batch is None or batch <= n)


def _check_user_sizes(options: SweepOptions, points: Sequence[Point], n: int, names: frozenset[str]) -> None:
    """Raise ConfigError if batches or groups that the user set do not fit; one message names all of them."""
    faults, axes = [], varied_by(type(options))
    for option in (_BATCH, _GROUP):
        axis = axes.get(option, option)
        if axis not in names:
            continue
        base_values = () if option in axes else (getattr(options.mechanism, option),)
        values = dict.fromkeys([*base_values, *(p.changes[option] for p in points if option in p.changes)])
        large = [f"{value:g}" for value in values if isinstance(value, (int, float)) and value > n]
        if large:
            faults.append(f"--{axis.replace('_', '-')} must not exceed n; got {' '.join(large)}")
    if faults:
        raise ConfigError(f"a step trains on at most n = {n} records: {'; '.join(faults)}")
