"""The options of the planner: a sweep's options, grids for some of them, and limits of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from dpgcl_core.errors import ConfigError, require_least, require_positive
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
    """Budget of one training in core-hours; no limit by default."""
    gpu_hours: float | None = None
    """Budget of one training in GPU-hours; needs --records-per-second of one GPU; no limit by default."""
    records_per_second: float | None = None
    """Training records per second on one core (or GPU, with --gpu-hours); by default measured on a core."""
    memory_gib: float | None = None
    """Memory of one worker, in GiB; no limit by default."""
    num_weights: int | None = None
    """Number of trained weights, d; by default the network is built to count them."""
    image_shape: tuple[int, int, int] | None = None
    """Channels, height and width of the images; by default the shape in the named data set."""
    num_trials: int = 10
    """Number of trainings to choose the settings from, m, for the cost of tuning."""
    json: bool = False
    """Print one JSON object."""
    output: Path | None = None
    """Folder for the curves of DP-Cap's Figures 5 and 6: pictures, a page and a CSV file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "core_hours", "gpu_hours", "records_per_second", "memory_gib")
        require_least(self, 1, "num_weights", "num_trials")
        for name in ("batch_sizes", "num_steps_grid"):
            if any(value < 1 for value in getattr(self, name)):
                raise ConfigError(f"{name} must all be at least 1; got {list(getattr(self, name))}")
        if not self.num_steps_grid or not self.group_sizes:
            raise ConfigError("num_steps_grid and group_sizes need at least one value each")
        if self.image_shape is not None and min(self.image_shape) < 1:
            raise ConfigError(f"image_shape must be three positive numbers; got {list(self.image_shape)}")
        self._check_budget()

    def _check_budget(self) -> None:
        if self.core_hours is not None and self.gpu_hours is not None:
            raise ConfigError("set core_hours or gpu_hours, not both")
        if self.gpu_hours is not None and self.records_per_second is None:
            raise ConfigError(
                "gpu_hours needs the throughput of one GPU, but the planner measures only CPU cores. "
                "Set --records-per-second."
            )
        if self.mechanism.noise_multiplier is not None or self.mechanism.sampling_prob is not None:
            raise ConfigError(
                "the planner computes noise_multiplier and sampling_prob from epsilon and the batch sizes. "
                "Leave them out, and set --epsilon."
            )
        if self.mechanism.tan_factor != 1:
            raise ConfigError(
                "--tan-factor must be 1, because a plan describes the full training; got "
                f"{self.mechanism.tan_factor:g}. Leave it out."
            )
        if self.mechanism.epsilon == math.inf:
            raise ConfigError("a plan needs a finite epsilon; got inf")

    @property
    def hours(self) -> float | None:
        """The time budget of one training, in `unit`; None without a limit."""
        return self.core_hours if self.gpu_hours is None else self.gpu_hours

    @property
    def unit(self) -> str:
        """The unit of the time budget: core-hours or GPU-hours."""
        return "core-hours" if self.gpu_hours is None else "GPU-hours"
