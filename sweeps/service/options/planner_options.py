"""The options of the planner: a sweep's options, grids for some of them, and limits of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from dpgcl_core.errors import ConfigError
from dpgcl_core.grids import GROUP_SIZES, NUM_STEPS
from dpgcl_core.sampling.groups import GroupSize
from sweeps.service.options.sweep_options import SweepOptions, varies


@dataclass(frozen=True, kw_only=True)
class PlannerOptions(SweepOptions):
    """Grid, budget and machine of a plan."""

    batch_sizes: tuple[int, ...] = field(default=(), metadata=varies("expected_batch_size"))
    """Values of B; by default powers of two up to an eighth of N."""
    num_steps_grid: tuple[int, ...] = field(default=NUM_STEPS, metadata=varies("num_steps"))
    """Values of T."""
    group_sizes: tuple[GroupSize, ...] = field(default=GROUP_SIZES, metadata=varies("group_size"))
    """Values of S."""
    core_hours: float | None = None
    """Budget of one training in hours of a core; no limit by default."""
    gpu_hours: float | None = None
    """Budget of one training in hours of a GPU, with a GPU's --records-per-second; no limit by default."""
    records_per_second: float | None = None
    """Records that one core (or GPU, with --gpu-hours) trains on in a second; measured here by default."""
    memory_gib: float | None = None
    """Memory of one worker, in GiB; no limit by default."""
    num_weights: int | None = None
    """d, the number of trained weights; by default the network is built, and its weights are counted."""
    image_shape: tuple[int, int, int] | None = None
    """Channels, height and width of the images; by default the shape in the named public data set."""
    num_trials: int = 10
    """m, the number of trainings among which the settings are chosen, for the cost of tuning."""
    json: bool = False
    """Print one JSON object."""
    output: Path | None = None
    """Folder for the curves of DP-Cap's Figures 5 and 6: pictures, a page and a CSV file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("core_hours", "gpu_hours", "records_per_second", "memory_gib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite; got {value}")
        for name in ("num_weights", "num_trials"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}")
        for name in ("batch_sizes", "num_steps_grid"):
            if any(value < 1 for value in getattr(self, name)):
                raise ConfigError(f"{name} must be at least 1 each; got {list(getattr(self, name))}")
        if not self.num_steps_grid or not self.group_sizes:
            raise ConfigError("num_steps_grid and group_sizes need at least one value each")
        if self.image_shape is not None and min(self.image_shape) < 1:
            raise ConfigError(f"image_shape must be three positive numbers; got {list(self.image_shape)}")
        self._check_budget()

    def _check_budget(self) -> None:
        if self.core_hours is not None and self.gpu_hours is not None:
            raise ConfigError("give core_hours or gpu_hours, not both")
        if self.gpu_hours is not None and self.records_per_second is None:
            raise ConfigError(
                "gpu_hours needs --records-per-second of one GPU, for a throughput is measured on a core"
            )
        if self.mechanism.noise_multiplier is not None or self.mechanism.sampling_prob is not None:
            raise ConfigError(
                "the planner finds noise_multiplier and sampling_prob from epsilon and the batch sizes: "
                "leave them out, and give --epsilon"
            )
        if self.mechanism.tan_factor != 1:
            raise ConfigError(
                "a plan is of the full training: leave --tan-factor out, which sweeps take; got "
                f"{self.mechanism.tan_factor:g}"
            )
        if self.mechanism.epsilon == math.inf:
            raise ConfigError("a plan needs a finite epsilon; got inf")

    @property
    def hours(self) -> float | None:
        """The budget of time of one training."""
        return self.core_hours if self.gpu_hours is None else self.gpu_hours

    @property
    def unit(self) -> str:
        """The unit whose hours are counted."""
        return "core-hours" if self.gpu_hours is None else "GPU-hours"
