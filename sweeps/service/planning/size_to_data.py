"""Batches and groups of a data set that is smaller than the defaults are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpgcl_core.errors import ConfigError
from dpgcl_core.release.noised_counts import split_public
from sweeps.service.options.sweep_options import SweepOptions, varied_by
from sweeps.service.planning.trials import Point
from trainers.config.tree import replace_options

_BATCH, _GROUP = "expected_batch_size", "group_size"
_Fitted = tuple[SweepOptions, Sequence[Point], list[str]]


def fitted_to_size(options: SweepOptions, points: Sequence[Point], num_records: int) -> _Fitted:
    """Return options and points whose batches and groups fit the number of records, and what was lowered.

    Only what nobody gave is lowered, and by the number N that is public: the one declared or registered, or
    that of the data where it is not declared and so public (`sweeps.service.planning.plan`). All that was
    given and does not fit is refused together.

    Args:
      options: of the sweep.
      points: what is compared.
      num_records: of the data; looked at only where no number is declared.

    Raises:
      ConfigError: what was given does not fit.
    """
    given = options.given
    if given is None or options.mechanism.sampling_prob is not None:
        return options, points, []
    declared = options.mechanism.num_records_public
    n, _ = split_public(declared or num_records, options.evaluation.score_on_held_out)
    _refuse_given(options, points, n, given)
    options, lowered = _with_smaller_batch(options, n, given)
    most = min(n, options.mechanism.expected_batch_size) if lowered else n
    kept = [point for point in points if _fits(point, n, most)]
    if kept and len(kept) < len(points):
        left = ", ".join(point.label for point in points if point not in kept)
        lowered.append(f"left out, for their batches or groups do not fit {n} records: {left}")
        points = kept
    size = options.mechanism.group_size
    if isinstance(size, int) and size > most and _GROUP not in given:
        smaller = max(2, int(most) // 4)
        options = replace_options(options, group_size=smaller)
        lowered.append(f"--group-size is {smaller} in place of {size}")
    return options, points, [f"{each[0].upper()}{each[1:]}." for each in lowered]


def _with_smaller_batch(
    options: SweepOptions, n: int, given: frozenset[str]
) -> tuple[SweepOptions, list[str]]:
    batch = options.mechanism.expected_batch_size
    if batch <= n or {_BATCH, "sampling_prob"} & given or _BATCH in varied_by(type(options)):
        return options, []
    smaller = _power_of_two_below(n / 4)
    told = f"--expected-batch-size is {smaller} in place of {batch:g}, a quarter of the {n} records at most"
    return replace(options, mechanism=replace(options.mechanism, expected_batch_size=smaller)), [told]


def _power_of_two_below(value: float) -> int:
    """The largest power of two at or below a value, 1 at least.

    >>> _power_of_two_below(15.5), _power_of_two_below(0.5)
    (8, 1)
    """
    return 1 << max(0, int(value).bit_length() - 1)


def _fits(point: Point, n: int, most: float) -> bool:
    size, batch = point.changes.get(_GROUP), point.changes.get(_BATCH)
    too_large = isinstance(size, int) and size > most
    return not too_large and (batch is None or batch <= n)


def _refuse_given(options: SweepOptions, points: Sequence[Point], n: int, given: frozenset[str]) -> None:
    """Refuse batches and groups that were given and do not fit, all of them in one message."""
    faults, axes = [], varied_by(type(options))
    for name in (_BATCH, _GROUP):
        axis = axes.get(name, name)
        if axis not in given:
            continue
        own = () if name in axes else (getattr(options.mechanism, name),)
        values = dict.fromkeys([*own, *(p.changes[name] for p in points if name in p.changes)])
        large = [f"{value:g}" for value in values if isinstance(value, (int, float)) and value > n]
        if large:
            faults.append(f"--{axis.replace('_', '-')} must not exceed that; got {' '.join(large)}")
    if faults:
        raise ConfigError(f"n = {n} records are trained on at most: {'; '.join(faults)}")
