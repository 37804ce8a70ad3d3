"""The options that a search varies and the space that they span, checked before anything starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from dpgcl_core.errors import ConfigError, require_choice
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options.score_options import default_score
from sweeps.service.options.service import ServiceOptions
from sweeps.service.options.sweep_options import SweepOptions, varies
from sweeps.service.planning.samplers import SAMPLERS
from trainers.config.networks import NetworkOptions, TextViewConfig, ViewConfig
from trainers.config.nodes import ObjectiveConfig, OptimizerConfig
from trainers.config.removed_options import check_removed_choice
from trainers.config.tree import leaves, replace_options

EPSILON = "epsilon"
_CHOICES = {"group_sizes": "group_size", "num_augmentations_grid": "num_augmentations"}
_RANGES = ("l2_clip_norm", "epsilon", "noise_multiplier", "learning_rate", "temperature")
# The default search space, if the user sets no option to vary.
_DEFAULT: dict[str, Any] = {
    "group_sizes": (2, 4, 8, 16),
    "num_augmentations_grid": (0, 1, 3),
    "l2_clip_norm_range": (0.1, 10.0),
    "learning_rate_range": (1e-3, 3e-2),
    "temperature_range": (0.1, 1.0),
}

_PLACEHOLDER_CLASSES = 2  # stands for the number of classes in the data, and breaks no rule

Range = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class SearchOptions(
    SweepOptions,
    tiny={"num_trials": 4, "group_sizes": (2, 4, 8), "learning_rate_range": (1e-3, 1e-2)},
    full={"num_trials": 50, "repeats": 1},
):
    """Search space, sampler and objectives; a list or range of one value fixes an option."""

    service: ServiceOptions = field(default_factory=partial(ServiceOptions, repeats=1))
    sampler: str = "tpe"
    """Sampler that proposes settings: tpe learns from earlier trials; random does not."""
    num_trials: int = 20
    """Number of trainings; it is fixed in advance, and so is their total privacy cost."""
    objectives: tuple[str, ...] = ()
    """Scores to maximise; by default k-NN accuracy (recall at 10 for pairs); epsilon adds a Pareto front."""
    earlier: tuple[str, ...] = ()
    """Open sweeps on the same data, by name: the search starts from their results and includes their ε."""
    group_sizes: tuple[GroupSize, ...] = field(default=(), metadata=varies("group_size"))
    """Values of S to choose from."""
    num_augmentations_grid: tuple[int, ...] = ()
    """Values of N_a to choose from; the value of --num-augmentations by default."""
    l2_clip_norm_range: Range = None
    """Smallest and largest C."""
    epsilon_range: Range = None
    """Smallest and largest target ε; every trial is budgeted at the largest ε."""
    noise_multiplier_range: Range = None
    """Smallest and largest σ, in place of ε; every trial is budgeted at the smallest σ."""
    learning_rate_range: Range = None
    """Smallest and largest learning rate."""
    temperature_range: Range = None
    """Smallest and largest τ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        release, mechanism = self.release, self.mechanism
        check_removed_choice("sampler", self.sampler)
        require_choice("sampler", self.sampler, SAMPLERS)
        if not release.is_open:
            raise ConfigError(
                "a search needs --release open, because it shows every trial and learns from earlier ones; "
                f"got {release.mode}. Use a grid sweep, which draws its settings at random in that mode."
            )
        if self.service.repeats != 1:
            raise ConfigError(
                f"a search trains every setting once; got --repeats {self.service.repeats}. Leave it out."
            )
        if self.num_trials < 2:
            raise ConfigError(f"num_trials must be at least 2, to choose from; got {self.num_trials}")
        if self.earlier and self.sampler == "random":
            raise ConfigError(
                "earlier sweeps need a sampler that learns from them, because their ε is added; got random. "
                "Set --sampler tpe, or leave --earlier out."
            )
        if self.epsilon_range and self.noise_multiplier_range:
            raise ConfigError("set epsilon_range or noise_multiplier_range, not both: σ follows from ε")
        if self.epsilon_range or self.noise_multiplier_range:
            for name in ("epsilon", "noise_multiplier"):
                if getattr(mechanism, name) is not None:
                    raise ConfigError(
                        f"set {name} or a range of ε or σ, not both; got {name} = {getattr(mechanism, name)}"
                    )

    def completed(self, overrides: Collection[str]) -> Self:
        """Return the options with a default score to maximise and default axes, if they name none.

        Args:
          overrides: names of options that the user sets; no default axis varies them.

        >>> SearchOptions().completed(["temperature"]).temperature_range is None
        True
        """
        options = self
        if not options.objectives:
            score = default_score(options.data.modality, options.mechanism.method)
            options = replace(options, objectives=(score,))
        if any(getattr(options, name) for name in (*_CHOICES, *(f"{name}_range" for name in _RANGES))):
            return options
        default_axes = {
            name: value
            for name, value in _DEFAULT.items()
            if _CHOICES.get(name, name.removesuffix("_range")) not in overrides
        }
        return replace(options, **default_axes)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An option that a search varies: over an ordered list, or over a range on a logarithmic scale.

    Attributes:
      option: the option's name.
      choices: the list; empty for a range.
      low, high: the ends of the range.
    """

    option: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @property
    def column(self) -> str:
        """The axis's param in MLflow."""
        return "target_epsilon" if self.option == "epsilon" else self.option

    @property
    def text(self) -> str:
        """The axis's values as text for people."""
        return ", ".join(map(str, self.choices)) if self.choices else f"{self.low:g} to {self.high:g}"

    @property
    def first(self) -> Any:
        """The first entry of the list, or the low end of the range, not rounded."""
        return self.choices[0] if self.choices else self.low

    def value(self, proposed: float) -> Any:
        """Return the option's value for a sampler's proposal: an index in the list, or a number.

        Numbers are rounded to three digits, so that people can retype them, and stay in the range.
        """
        if self.choices:
            return self.choices[int(proposed)]
        return min(self.high, max(self.low, float(f"{proposed:.3g}")))

    def proposal(self, value: Any) -> float:
        """Return the proposal that stands for a value. Raises ValueError if the axis has no such value."""
        if self.choices:
            return self.choices.index(value)
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} is outside {self.text}")
        return float(value)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The settings that a search may choose: every combination of its axes' values.

    Attributes:
      axes: the options that vary.
      constants: values of the options that the search fixes to one value.
    """

    axes: tuple[Axis, ...]
    constants: Mapping[str, Any]

    @classmethod
    def of(cls, options: SearchOptions) -> Space:
        """Return the space of the options.

        Raises:
          ConfigError: a range is invalid, or nothing varies.
        """
        lists = {option: tuple(dict.fromkeys(getattr(options, name))) for name, option in _CHOICES.items()}
        if not method_named(options.mechanism.method).takes_group_size:
            del lists["group_size"]
        axes = [Axis(option=option, choices=values) for option, values in lists.items() if values]
        axes += [_range_axis(options, name) for name in _RANGES if getattr(options, f"{name}_range")]
        return cls.from_axes(axes)

    @classmethod
    def from_axes(cls, axes: Sequence[Axis]) -> Space:
        """Return the space of these axes; an axis with one value becomes a constant.

        Raises:
          ConfigError: no axis has two values.
        """
        single = [
            axis for axis in axes if len(axis.choices) == 1 or (not axis.choices and axis.low == axis.high)
        ]
        varied = tuple(axis for axis in axes if axis not in single)
        if not varied:
            ranges = ", ".join(f"--{name.replace('_', '-')}-range" for name in _RANGES)
            raise ConfigError(
                "a search must vary at least one option. Set two or more values for one of --group-sizes, "
                f"--num-augmentations-grid, {ranges}."
            )
        return cls(axes=varied, constants=_with_noise_or_target({axis.option: axis.first for axis in single}))

    @property
    def columns(self) -> list[str]:
        """The MLflow params that vary, in the order of the axes."""
        return [axis.column for axis in self.axes]

    @property
    def text(self) -> str:
        """The space in one line."""
        return "; ".join(f"{axis.option}: {axis.text}" for axis in self.axes)

    @property
    def moves_epsilon(self) -> bool:
        """Whether trials differ in ε; only their noise can differ, because all trials share q and T."""
        return any(axis.option in ("epsilon", "noise_multiplier") for axis in self.axes)

    def extra_params(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of options without a field in `SearchOptions`; MLflow shows them additionally."""
        searchable = {*_CHOICES.values(), *_RANGES}
        return {option: value for option, value in values.items() if option not in searchable}

    def changes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes for the point with these values of the searched options."""
        return {**self.constants, **_with_noise_or_target(values)}

    def corner(self, **values: Any) -> dict[str, Any]:
        """Return the changes for the axes' first values, overridden by these values."""
        return self.changes({axis.option: axis.first for axis in self.axes} | values)

    def costliest(self) -> dict[str, Any]:
        """Return the changes for a point with the smallest noise and the most augmentations of the space."""
        values = {}
        for axis in self.axes:
            if axis.option == EPSILON:
                values[axis.option] = axis.high
            if axis.option == "num_augmentations":
                values[axis.option] = max(axis.choices)
        return self.corner(**values)


@dataclass(frozen=True)
class Between:
    """A range of numbers, searched on a logarithmic scale.

    Attributes:
      low, high: the ends, both positive and finite.

    Raises:
      ConfigError: the ends form no valid range.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range("a range", self.low, self.high)


def space_of(values: Mapping[str, Sequence[Any] | Between]) -> Space:
    """Return the space of a caller's own lists and ranges, by option.

    Any option of network, objective, views and optimizer may vary. Options of the mechanism may vary if they
    do not change the sampling probability q and the number of steps T: the guarantee of a search is about
    trials that share q and T.

    Raises:
      ConfigError: an option is unknown or must not vary, a list holds no plain values, or nothing varies.

    >>> space_of({"group_size": [2, 4], "momentum": [0.0, 0.9], "learning_rate": Between(1e-3, 1e-1)}).text
    'group_size: 2, 4; momentum: 0.0, 0.9; learning_rate: 0.001 to 0.1'
    """
    axes = []
    for option, scope in values.items():
        require_choice("option to search", option, _searchable_options())
        if isinstance(scope, Between):
            axes.append(Axis(option=option, low=scope.low, high=scope.high))
            continue
        is_plain = not isinstance(scope, str) and all(isinstance(v, str | int | float | None) for v in scope)
        if not is_plain or not scope:
            raise ConfigError(
                f"{option} must be searched over a list of plain values, or Between(low, high); got {scope!r}"
            )
        if option in ("epsilon", "noise_multiplier"):  # the costliest trial is one end of a range
            raise ConfigError(f"{option} must be searched over a range, Between(low, high); got {scope!r}")
        axes.append(Axis(option=option, choices=tuple(dict.fromkeys(scope))))
    if {"epsilon", "noise_multiplier"} <= values.keys():
        raise ConfigError("search epsilon or noise_multiplier, not both: σ follows from ε")
    return Space.from_axes(axes)


def _searchable_options() -> list[str]:
    """Return the options that trials of one search may differ in."""
    nodes = (ObjectiveConfig, ViewConfig, TextViewConfig, NetworkOptions, OptimizerConfig)
    of_mechanism = ("group_size", "l2_clip_norm", "clipping", "epsilon", "noise_multiplier")
    return [*of_mechanism, *(name for node in nodes for name in leaves(node))]


def without_invalid(space: Space, options: SearchOptions, num_records: int) -> tuple[Space, list[str]]:
    """Return the space without list entries that no training may have, and a note on each removed entry.

    A training is configured for every combination of list entries and for both ends of every range, so that
    no trial can break a rule while the search runs.

    Raises:
      ConfigError: an end of a range, or every entry of a list, breaks a rule.
    """
    listed = [axis for axis in space.axes if axis.choices]
    refusals: dict[tuple[Any, ...], str] = {}
    combinations = list(itertools.product(*(axis.choices for axis in listed)))
    names = [axis.option for axis in listed]
    for combination in combinations:
        reason = _refusal(options, space.corner(**dict(zip(names, combination, strict=True))), num_records)
        if reason is not None:
            refusals[combination] = reason
    if len(refusals) == len(combinations):
        raise ConfigError(next(iter(refusals.values())))
    valid_axes, notes = [], []
    if options.group_sizes and not method_named(options.mechanism.method).takes_group_size:
        notes.append(f"group_size is not searched, because {options.mechanism.method} takes no group size.")
    for axis in space.axes:
        valid_choices = axis.choices
        if axis.choices:
            index = names.index(axis.option)
            valid_choices = tuple(
                c for c in axis.choices if any(k[index] == c and k not in refusals for k in combinations)
            )
            reasons = {k[index]: reason for k, reason in refusals.items() if k[index] not in valid_choices}
            notes += [f"{axis.option} = {value} is not searched: {why}." for value, why in reasons.items()]
        valid_axes.append(replace(axis, choices=valid_choices))
    valid = Space.from_axes(valid_axes)
    valid = replace(valid, constants={**space.constants, **valid.constants})
    for combination in itertools.product(*(axis.choices for axis in valid_axes if axis.choices)):
        if combination in refusals:
            raise ConfigError(f"these values cannot be searched together: {refusals[combination]}")
    for axis in valid.axes:
        for end in () if axis.choices else (axis.low, axis.high):
            if (reason := _refusal(options, valid.corner(**{axis.option: end}), num_records)) is not None:
                raise ConfigError(reason)
    return valid, notes


def _refusal(options: SearchOptions, changes: Mapping[str, Any], num_records: int) -> str | None:
    """Return the reason why no training may have these settings; None if a training may.

    The check leaves out ε, because σ would have to be calibrated from it. It also leaves out warm start and
    classes, which each plan checks.
    """
    from trainers.training.resolve import training_config  # imported late: it loads networks

    noise = {"epsilon": None, "noise_multiplier": changes.get("noise_multiplier") or 1.0}
    if method_named(options.mechanism.method).label == "none":  # the method has neither ε nor σ
        noise = {}
    try:
        training = replace_options(options.training(), **{**changes, **noise, "warm_start": None})
        seed = options.service.seed
        training_config(training, num_records=num_records, public_seed=seed, num_classes=_PLACEHOLDER_CLASSES)
    except ConfigError as error:
        return str(error).rstrip(".")
    return None


def _with_noise_or_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values; if they set σ, the target ε becomes None."""
    return {**values, "epsilon": None} if "noise_multiplier" in values else dict(values)


def _range_axis(options: SearchOptions, name: str) -> Axis:
    low, high = getattr(options, f"{name}_range")
    _check_range(f"{name}_range", low, high)
    return Axis(option=name, low=low, high=high)


def _check_range(name: str, low: float, high: float) -> None:
    if not 0 < low <= high < math.inf:
        raise ConfigError(
            f"{name} must be a smallest and a largest value, both positive and finite; got {low} and {high}"
        )
