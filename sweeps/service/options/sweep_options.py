"""The options that every sweep has; each sweep adds its own axes to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

from dpgcl_core.accounting.tuning.modes import SEALED
from dpgcl_core.command_line import in_flags
from dpgcl_core.errors import ConfigError, DpgclError
from dpgcl_core.noise.chacha20 import choose_randomness
from sweeps.service.options.data import DataOptions
from sweeps.service.options.release_options import ReleaseOptions, check_release
from sweeps.service.options.score_options import default_score
from sweeps.service.options.service import LedgerOptions, ServiceOptions, StorageOptions
from sweeps.service.options.tuning_options import TuningOptions
from trainers.config.settings import TrainingOptions
from trainers.config.tree import leaves, option, replace_options

VARIES, SYMBOL = "varies", "symbol"


def varies(option: str, symbol: str = "") -> Mapping[str, Any]:
    """Return the metadata of an axis that takes the place of an option in this sweep.

    For example, `temperatures: tuple[float, ...] = field(default=(0.5,), metadata=varies("temperature"))`.

    Args:
      option: the option's name.
      symbol: the symbol of its values in trial names, if only this axis makes the points of the sweep.
    """
    return MappingProxyType({VARIES: option, SYMBOL: symbol})


def varied_by(kind: type[SweepOptions]) -> dict[str, str]:
    """Return the options that a sweep varies, each with the axis that holds its values.

    >>> varied_by(SweepOptions)
    {}
    """
    return {axis.metadata[VARIES]: axis.name for axis in fields(kind) if VARIES in axis.metadata}


def flags_of(kind: type[SweepOptions]) -> dict[str, str]:
    """Return every option's flag by its name; for an option that the sweep varies, the flag of its axis.

    >>> flags_of(SweepOptions)["num_steps"]
    '--num-steps'
    """
    axes = varied_by(kind)
    return {name: "--" + axes.get(name, name).replace("_", "-") for name in leaves(kind)}


@contextmanager
def errors_in_flags(kind: type[SweepOptions]) -> Iterator[None]:
    """Make errors name options by their command-line flags."""
    try:
        yield
    except DpgclError as error:
        if str(error).startswith("in the configuration "):  # it names the file's keys
            raise
        flags = flags_of(kind)
        error.args = tuple(in_flags(part, flags) if isinstance(part, str) else part for part in error.args)
        raise


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TrainingOptions):
    """Options of a sweep: of its trainings, of the whole sweep, and its axes.

    Attributes:
      always_adapts: whether every trial has LoRA adapters; the sweep chooses their rank if none is set.
      overrides: names of the options that the command line or a file sets; None if unknown, as from Python.
    """

    always_adapts: ClassVar[bool] = False
    _tiny: ClassVar[Mapping[str, Any]] = {
        **{"repeats": 1, "num_steps": 10, "expected_batch_size": 64},
        **{"max_index_records": 500, "max_query_records": 500},
    }
    _full: ClassVar[Mapping[str, Any]] = {"dataset": "fashion-mnist", "repeats": 5}

    data: DataOptions = field(default_factory=DataOptions)
    service: ServiceOptions = field(default_factory=ServiceOptions)
    release: ReleaseOptions = field(default_factory=ReleaseOptions)
    tuning: TuningOptions = field(default_factory=TuningOptions)
    ledger: LedgerOptions = field(default_factory=LedgerOptions)
    storage: StorageOptions = field(default_factory=StorageOptions)
    overrides: frozenset[str] | None = field(default=None, metadata=option(None), compare=False, repr=False)

    def __init_subclass__(
        cls, *, tiny: Mapping[str, Any] = MappingProxyType({}), full: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Declare a sweep's options, with their values of `--tiny` and `--full` besides the base's."""
        super().__init_subclass__()
        cls._tiny, cls._full = {**cls._tiny, **tiny}, {**cls._full, **full}

    def __post_init__(self) -> None:
        if self.tuning.strategy == SEALED and self.release.is_open:
            object.__setattr__(self, "release", replace(self.release, mode=SEALED))
        if self.release.select_by == "auto" and not self.release.is_open:
            score = default_score(self.data.modality, self.mechanism.method)
            object.__setattr__(self, "release", replace(self.release, select_by=score))
        if self.mechanism.shards > 1 and self.performance.num_workers == 1:  # one for each shard
            performance = replace(self.performance, num_workers=self.mechanism.shards)
            object.__setattr__(self, "performance", performance)
        seeded, private = self.randomness.seeded_non_private, self.data.are_private
        scores_held_out = self.evaluation.score_on_held_out > 0
        check_release(self.release, scores_held_out=scores_held_out, seeded_non_private=seeded)
        limits = self.service.trial_timeout, self.service.stall_timeout, self.service.time_budget
        if not self.release.is_open and any(limit is not None for limit in limits):
            raise ConfigError(
                "a sealed sweep must not stop a training by time, or the published trial would depend on how "
                "long records take. Leave --trial-timeout, --stall-timeout and --time-budget out."
            )
        if not self.release.is_open and self.service.early_stopping != "none":
            raise ConfigError(
                "a sealed sweep's trainings must be independent of each other, and --early-stopping compares "
                "them as they run. Leave it out, or set --release open."
            )
        if private and seeded:
            raise ConfigError("seeded_non_private must be left out with private data: it has no guarantee")
        choose_randomness(
            secure_noise=self.randomness.secure_noise,
            data_are_private=private,
            public_seed=self.service.seed if seeded else None,
        )

    def training(self) -> TrainingOptions:
        """Return only the options of its trainings."""
        names = [node.name for node in fields(TrainingOptions)]
        return TrainingOptions(**{name: getattr(self, name) for name in names})

    def tiny(self) -> Self:
        """Return the options of a small run of the sweep, to check that everything works."""
        return replace_options(self, **self._tiny)

    def full(self) -> Self:
        """Return the options of the paper's grid, to be used with the paper's setting."""
        return replace_options(self, **self._full)

    def of_dataset(self) -> Self:
        """Return the options with the grid of their data set, if the sweep has one."""
        return self

    def completed(self, overrides: Collection[str]) -> Self:
        """Return the options, completed by options that are derived from others.

        Args:
          overrides: names of the options that the user sets.
        """
        return self


@dataclass(frozen=True, kw_only=True)
class PairSweepOptions(
    SweepOptions,
    tiny={"dataset": "shapes:400", "num_steps": 5, "max_index_records": 200, "max_query_records": 200},
    full={"dataset": "shapes", "image_size": 224},
):
    """Options of a sweep over images with captions."""

    data: DataOptions = field(default_factory=partial(DataOptions, dataset="shapes"))
