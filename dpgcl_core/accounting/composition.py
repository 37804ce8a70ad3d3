"""Stage 10, the accountant: ε of a mechanism's event at a stated δ, and σ for a target ε.

The privacy loss distribution (PLD) of dp_accounting gives the figure of record. It is a pessimistic
discretisation, hence an upper bound (Koskela, Jälkö and Honkela 2020; Doroshenko et al. 2022). RDP and
Opacus' PRV are reported next to it as cross-checks. All figures are for **adding or removing one record**.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpgcl_core.errors import ConfigError, require_extra

GRID = 1e-4
_COARSE_GRID = 1e-3
# dp_accounting logs the RDP orders that it omitted, through absl: omitting them is safe, and needs no action.
logging.getLogger("absl").setLevel(logging.ERROR)
MIN_NOISE_MULTIPLIER, _MAX_NOISE = 0.1, 1e5
_CELLS_PER_EPSILON = 500
CALIBRATION_TOLERANCE = 0.005


def poisson_gaussian_event(
    *, sampling_prob: float, noise_multiplier: float, num_steps: int
) -> dp_event.DpEvent:
    """Return the event of `num_steps` Gaussian steps on independent Poisson samples.

    `noise_multiplier` is the noise's standard deviation over the **sensitivity** (2C for groups of sampled
    records), not over C. With `noise_multiplier = 0` and at least one step the event is non-private.
    """
    if num_steps == 0:
        return dp_event.NoOpDpEvent()
    if noise_multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    step = dp_event.PoissonSampledDpEvent(sampling_prob, dp_event.GaussianDpEvent(noise_multiplier))
    return dp_event.SelfComposedDpEvent(step, num_steps)


def epsilon_pld(event: dp_event.DpEvent, delta: float, *, grid: float = GRID) -> float:
    """Return an upper bound on ε at `delta`, by PLD, for adding or removing one record.

    ε is `inf` for a non-private event. `grid` is the interval at which privacy losses are discretised.

    >>> event = poisson_gaussian_event(sampling_prob=0.01, noise_multiplier=1.0, num_steps=1000)
    >>> round(epsilon_pld(event, 1e-5), 3)
    1.828
    """
    return _epsilon(PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, grid), event, delta)


@lru_cache(maxsize=256)
def epsilon_of_steps(
    *, sampling_prob: float, noise_multiplier: float, num_steps: int, delta: float, grid: float = GRID
) -> float:
    """Return `epsilon_pld` of `poisson_gaussian_event`, cached: a sweep requests the same ε often."""
    event = poisson_gaussian_event(
        sampling_prob=sampling_prob, noise_multiplier=noise_multiplier, num_steps=num_steps
    )
    return epsilon_pld(event, delta, grid=grid)


def epsilon_rdp(event: dp_event.DpEvent, delta: float) -> float:
    """Return an upper bound on ε at `delta`, by RDP at default orders, for adding or removing one record."""
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
    return _epsilon(accountant, event, delta)


def _epsilon(accountant: PLDAccountant | RdpAccountant, event: dp_event.DpEvent, delta: float) -> float:
    """Return ε of the event at `delta` by the accountant; `inf` for a non-private event."""
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return math.inf
    with warnings.catch_warnings(action="ignore"), memory_errors():
        accountant.compose(event)
        return float(accountant.get_epsilon(delta))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise ConfigError if an accountant runs out of memory."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(
            "accounting for this many steps with this little noise needs too much memory; take fewer steps "
            "or add noise"
        ) from error


def epsilon_prv(*, sampling_prob: float, noise_multiplier: float, num_steps: int, delta: float) -> float:
    """Return ε of Poisson-subsampled Gaussian steps by Opacus' PRV accountant: its upper bound on ε.

    Return `nan` if PRV's error control fails, as it does for some very large or very small ε.

    Raises:
      ExtraMissing: Opacus, a package of the extra `service`, is not installed.
    """
    require_extra("service", "opacus", needed_by="the accountant prv")
    from opacus.accountants import PRVAccountant  # slow to import

    if noise_multiplier == 0:
        return math.inf
    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, sampling_prob, num_steps)]
    with warnings.catch_warnings(action="ignore"):
        try:
            return float(accountant.get_epsilon(delta))
        except (RuntimeError, ValueError, OverflowError):
            return math.nan


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A noise multiplier and its verified ε.

    Attributes:
      noise_multiplier: σ = noise std / sensitivity.
      epsilon: ε of σ by PLD; at most the target, and within the relative `CALIBRATION_TOLERANCE` of it.
    """

    noise_multiplier: float
    epsilon: float


def calibrate_noise_multiplier(
    *,
    sampling_prob: float,
    num_steps: int,
    target_epsilon: float,
    target_delta: float,
    cache_folder: Path | None = None,
) -> Calibration:
    """Search for the smallest noise multiplier that meets (target_epsilon, target_delta) by PLD.

    The returned ε never exceeds the target. It is computed on the PLD grid `GRID`, or on a finer grid for a
    target below 0.05. Coarser grids serve to reject a σ, never to accept one. With `cache_folder`, a σ that
    an earlier call stored there saves the search. Its ε is computed again, so a damaged cache cannot weaken
    the guarantee.

    Raises:
      ConfigError: the target is not positive, or no σ in [0.1, 1e5] meets it; the message then names the
        smallest ε reached.
    """
    check_target(target_epsilon)

    def epsilon(noise: float, grid: float = GRID) -> float:
        finest_grid = min(grid, target_epsilon / _CELLS_PER_EPSILON)
        while True:
            epsilon_on_grid = epsilon_of_steps(
                sampling_prob=sampling_prob,
                noise_multiplier=noise,
                num_steps=num_steps,
                delta=target_delta,
                grid=grid,
            )
            if grid <= finest_grid or epsilon_on_grid > _CELLS_PER_EPSILON * grid:
                return epsilon_on_grid
            grid = max(grid / 10, finest_grid)

    min_epsilon = target_epsilon * (1 - CALIBRATION_TOLERANCE)
    path = _cache_path(cache_folder, sampling_prob, num_steps, target_epsilon, target_delta)
    cached = _read_cached(path)
    if cached is not None and min_epsilon <= (best_epsilon := epsilon(cached)) <= target_epsilon:
        return Calibration(noise_multiplier=cached, epsilon=best_epsilon)
    for grid in (_COARSE_GRID, GRID):
        noise = search_noise_multiplier(partial(epsilon, grid=grid), min_epsilon, target_epsilon)
        best_epsilon = epsilon(noise)
        if min_epsilon <= best_epsilon <= target_epsilon:
            break
    if best_epsilon > target_epsilon:
        raise ConfigError(
            f"no noise multiplier was verified to meet target_epsilon = {target_epsilon}: the best one "
            f"reaches {best_epsilon:.6g}. Raise target_epsilon to at least that value"
        )
    _write_cached(path, noise)
    return Calibration(noise_multiplier=noise, epsilon=best_epsilon)


def search_noise_multiplier(epsilon: Callable[[float], float], low: float, high: float) -> float:
    """Return a σ with ε(σ) in the upper half of [low, high], by bisection of ln σ.

    If ε(σ) jumps over that half, ε of the returned σ is below it.

    Args:
      epsilon: ε(σ), a decreasing function.
      low, high: the range of ε.

    Raises:
      ConfigError: no σ up to 1e5 has ε(σ) ≤ `high`, or σ = 0.1 already has.
    """
    small = large = 1.0
    while (best_epsilon := epsilon(large)) > high:
        small, large = large, large * 2
        if large > _MAX_NOISE:
            raise ConfigError(
                f"target_epsilon = {high:g} cannot be met by any noise_multiplier up to {_MAX_NOISE:g}: the "
                f"smallest epsilon reachable is {best_epsilon:.3g}, at noise_multiplier = {small:g}. Raise "
                "target_epsilon to at least that value, take fewer steps or lower sampling_prob"
            )
    while epsilon(small) <= high:  # divide by only 1.5: accounting is slow for small noise
        if small <= MIN_NOISE_MULTIPLIER:
            raise ConfigError(
                f"target_epsilon = {high:g} is met even by noise_multiplier = {MIN_NOISE_MULTIPLIER}: "
                "such a budget protects nothing. Choose a smaller one, or inf to train without noise"
            )
        small, large = max(small / 1.5, MIN_NOISE_MULTIPLIER), small
    middle = (low + high) / 2
    while True:
        noise = math.sqrt(small * large)
        value = epsilon(noise)
        if middle <= value <= high or large / small < 1 + 1e-5:  # ε jumps to 0 where δ alone is enough
            return noise if value <= high else large
        small, large = (noise, large) if value > high else (small, noise)


def _cache_path(folder: Path | None, *key: float) -> Path | None:
    if folder is None:
        return None
    name = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    return folder / f"noise-{name}.json"


def _read_cached(path: Path | None) -> float | None:
    """Return the stored noise multiplier; None if the file is missing or invalid."""
    if path is None or not path.is_file():
        return None
    try:
        noise = float(json.loads(path.read_text())["noise_multiplier"])
    except (ValueError, KeyError, TypeError):
        return None
    return noise if MIN_NOISE_MULTIPLIER <= noise <= _MAX_NOISE else None


def _write_cached(path: Path | None, noise: float) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"noise_multiplier": noise}))
    temporary.replace(path)


def check_delta_range(delta: float) -> None:
    """Raise ConfigError unless δ is in (0, 1)."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1); got {delta}")


def check_target(target_epsilon: float) -> None:
    """Raise ConfigError unless ε is positive and finite."""
    if not target_epsilon > 0 or math.isinf(target_epsilon):
        raise ConfigError(f"target_epsilon must be positive and finite; got {target_epsilon}")


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raise ConfigError unless σ is finite and not negative."""
    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(f"noise_multiplier must be finite and not negative; got {noise_multiplier}")
