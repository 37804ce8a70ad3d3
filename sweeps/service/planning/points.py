"""Points along one axis and points of several methods, private and, on request, without privacy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.sampling.groups import BATCH, GroupSize
from sweeps.service.options.sweep_options import SYMBOL, VARIES, SweepOptions
from sweeps.service.planning.trials import Point
from sweeps.service.storage.sweep_names import fit_for_name
from trainers.config.networks import NetworkOptions
from trainers.config.presets import OWN_NETWORKS

if TYPE_CHECKING:
    from dpgcl_core.mechanism.method import Method


_NO_NOISE = "epsinf"


def along(options: SweepOptions) -> list[Point]:
    """Return the points of each distinct value of the axis that has a symbol (`varies`).

    The sweep's option `non_private`, if it has one, adds points without noise and clipping.

    >>> from dataclasses import dataclass, field
    >>> from sweeps.service.options.sweep_options import SweepOptions, varies
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Temperatures(SweepOptions):
    ...     values: tuple[float, ...] = field(default=(0.1, 0.5, 0.1), metadata=varies("temperature", "tau"))
    >>> [point.label for point in along(Temperatures())]
    ['tau0.1-private', 'tau0.5-private']
    """
    (axis,) = (axis_field for axis_field in dataclasses.fields(options) if axis_field.metadata.get(SYMBOL))
    option, symbol = axis.metadata[VARIES], axis.metadata[SYMBOL]
    values = dict.fromkeys(getattr(options, axis.name))
    return [point for value in values for point in at(options, f"{symbol}{value:g}", {option: value})]


def at(
    options: SweepOptions,
    label: str,
    changes: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    *,
    epsilons: Sequence[float] = (),
) -> list[Point]:
    """Return the points of one setting: private, and on request without noise and clipping.

    Args:
      options: the sweep's options. Its option `non_private`, if it has one, adds a point without noise and
        clipping. ε = ∞ gives such a point, too, but no private one.
      label: short name of the setting, changed to fit in a file name.
      changes: option values of the setting.
      params: additional values that MLflow shows for the setting.
      epsilons: the target ε of each private point, in place of the sweep's own ε.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class NetworkOptions(SweepOptions):
    ...     non_private: bool = True
    >>> [point.label for point in at(NetworkOptions(), "ViT/B", {"network": "ViT/B"})]
    ['ViT-B-private', 'ViT-B-eps-inf']
    >>> [point.label for point in at(SweepOptions(), "S4", {"group_size": 4}, epsilons=(1, 3))]
    ['S4-eps1', 'S4-eps3']
    """
    label, points = fit_for_name(label), list[Point]()
    for name, noise in _noise_changes(options, epsilons).items():
        end = "eps-inf" if name == _NO_NOISE else name
        points.append(Point(label=f"{label}-{end}", changes={**changes, **noise}, params=params or {}))
    return points


def of_samplings(points: Sequence[Point], samplings: Sequence[str]) -> list[Point]:
    """Return each point once for each way of sampling; unchanged if `samplings` is empty.

    A point whose group is the whole Poisson batch always samples records, so it stays one point. A point
    without noise stays one point, with the first way: without noise the ways differ little.

    Args:
      points: the points of a sweep.
      samplings: values of --sampling.

    >>> points = [Point(label=f"S{size}", changes={"group_size": size}) for size in (2, "batch")]
    >>> [point.label for point in of_samplings(points, ("groups", "records"))]
    ['S2-groups', 'S2-records', 'Sbatch-records']
    """
    sampled_points = []
    for point in points:
        point_samplings = dict.fromkeys(samplings)
        if samplings and point.changes.get("group_size") == BATCH:
            from dpgcl_core.mechanism.numbers import RECORDS  # imported late: it loads the mechanisms

            point_samplings = {RECORDS: None}
        elif point.changes.get("epsilon") == math.inf:
            point_samplings = dict.fromkeys(samplings[:1])
        for sampling in point_samplings:
            changes, params = {**point.changes, "sampling": sampling}, {**point.params, "sampled": sampling}
            sampled_points.append(Point(label=f"{point.label}-{sampling}", changes=changes, params=params))
    return sampled_points or list(points)


def changes_for(method: Method) -> dict[str, Any]:
    """Return the option changes to train a method in a comparison with others.

    The method has no augmented keys if it cannot use them, groups of one record if it permits them, and a
    network for its task.
    """
    changes: dict[str, Any] = {"method": method.name}
    if not method.takes_augmented_keys:
        changes["num_augmentations"] = 0
    if method.min_group_size == 1:
        changes["group_size"] = 1
    if method.task in OWN_NETWORKS:
        changes["network"] = OWN_NETWORKS[method.task]
        if method.takes_pairs:  # the named setting's weights are another network's
            changes["pretrained"] = NetworkOptions().pretrained
    return changes


def of_methods(
    options: SweepOptions,
    methods: Sequence[str],
    *,
    epsilons: Sequence[float] = (),
    group_sizes: Sequence[GroupSize] = (),
) -> list[Point]:
    """Return one point per method, ε and, if the method takes one, group size.

    A method that cannot use augmented keys has none. A method whose groups may be single records has groups
    of one. A method without noise is trained only at ε = ∞.

    Args:
      options: the sweep's options; `non_private` as in `at`.
      methods: names of methods, see `dpgcl_core.methods`.
      epsilons: values of the target ε; the sweep's own noise by default.
      group_sizes: values of S; the sweep's own value by default.

    Raises:
      ConfigError: there is no such method.

    >>> names = "dp_gcl", "byol_groups"
    >>> points = of_methods(SweepOptions(), names, epsilons=(1.0,), group_sizes=(2, 4))
    >>> [point.label for point in points]
    ['dp_gcl-S2-eps1', 'dp_gcl-S4-eps1', 'byol_groups-eps1']
    """
    points = []
    for method in map(method_named, dict.fromkeys(methods)):
        changes = changes_for(method)
        has_sizes = method.takes_group_size and "group_size" not in changes
        method_epsilons = epsilons if method.label != "none" else (math.inf,)
        noises = _noise_changes(options, method_epsilons)
        for size in dict.fromkeys(group_sizes) if has_sizes and group_sizes else (None,):
            label = method.name if size is None else f"{method.name}-S{size}"
            sized_changes = changes if size is None else changes | {"group_size": size}
            for name, noise in noises.items():
                points.append(Point(label=f"{label}-{name}", changes=sized_changes | noise))
    return points


def _noise_changes(options: SweepOptions, epsilons: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return the option changes for each ε to train at, by a label's end; ε = ∞ (no noise) comes last."""
    noises = {f"eps{value:g}": {"epsilon": value} for value in epsilons if value != math.inf}
    if options.mechanism.epsilon != math.inf and not epsilons:
        noises["private"] = {}
    if getattr(options, "non_private", False) or math.inf in (options.mechanism.epsilon, *epsilons):
        noises[_NO_NOISE] = {"epsilon": math.inf}
    return noises


def check_groups(method: str) -> None:
    """Raise ConfigError if a method takes the whole batch, because it has no groups to vary.

    >>> check_groups("dp_gcl")
    """
    if not method_named(method).takes_group_size:
        raise ConfigError(
            f"{method} takes the whole batch, so every group size would be the same training. Sweep the "
            "batch size instead (sweeps/batch_size.py), or compare methods (sweeps/methods.py)."
        )
