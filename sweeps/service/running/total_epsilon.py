"""`--total-epsilon`: the largest ε of one training that keeps a sweep within a total, and options that fit.

This module has no accounting of its own. The trainings are calibrated as in the sweep itself, `cost_of`
states their cost, and the ledger decides whether it has room for them. All costs rise with the ε of one
training, with the number of repeats and with every further point, so bisection finds the largest value that
fits.
Whether a value fits is decided by the functions that state and charge a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpgcl_core.errors import BudgetExceeded, ConfigError
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.release.statement import delta_text, rounded_up
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import EarlierSweep, earlier_draws, earlier_trials
from sweeps.service.planning.plan import Fit
from sweeps.service.planning.space import SearchOptions
from sweeps.service.planning.sweep_cost import cost_of, delta_of
from sweeps.service.planning.trials import Point, Trial, is_proven
from sweeps.service.privacy.budget import largest_admitted
from sweeps.service.privacy.reservations import planned_trainings
from sweeps.service.privacy.sealed_charge import charged_curve
from trainers.config.settings import DEFAULT_EPSILON, SMALLEST_EPSILON
from trainers.config.tree import replace_options

TrialsOf = Callable[[SweepOptions], Sequence[Trial]]
"""Returns all trials of a sweep with these options, ordered by repeat: all points once, then again."""
_OVER_LIMIT = 1 + 1e-9
_OTHERS = " without an ε of its own"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a whole sweep, and the largest sweep within them.

    Attributes:
      options: the sweep's options.
      points: the settings to compare.
      trials_of: returns the sweep's trials for given options.
      total_epsilon: the limit on the whole sweep's ε; None if only the ledger limits it.
      account: the ledger and data set that it is charged to; None without a ledger.
      earlier: the sweeps that it starts from. They count for its ε, and are in the ledger already.
    """

    options: SweepOptions
    points: Sequence[Point]
    trials_of: TrialsOf
    total_epsilon: float | None
    account: tuple[Ledger, str] | None = None
    earlier: tuple[EarlierSweep, ...] = ()

    def fit(self, *, has_fixed_noise: bool) -> Fit:
        """Return the largest ε of one training, or the most repeats, that keep the sweep within its limits.

        Args:
          has_fixed_noise: whether options or points set the noise of every private training. If so, the
            number of repeats is fitted, else ε.

        Raises:
          ConfigError: no training has a guarantee, or nothing fits; the message suggests options that fit.
        """
        total, repeats = self.total_epsilon, self.options.service.repeats
        assert total is not None
        if (alone := self._epsilon_of([])) >= total:
            raise ConfigError(
                f"--total-epsilon must exceed the ε of the earlier sweeps, which is {rounded_up(alone, 4)}; "
                f"got {total:g}. Raise it, or leave sweeps out of --earlier"
            )
        if not has_fixed_noise:
            epsilon = self._largest_epsilon(max_epsilon=total)
            if epsilon is not None:
                return Fit(total_epsilon=total, epsilon=epsilon, repeats=repeats)
        else:
            num_fitting, (_, num_wanted) = self._count_that_fits(), self._count
            if num_fitting == num_wanted or (num_fitting and not isinstance(self.options, SearchOptions)):
                return Fit(total_epsilon=total, epsilon=None, repeats=min(num_fitting, repeats))
        raise ConfigError(
            f"the whole sweep must fit within --total-epsilon {total:g}"
            f"{' and the ledger' if self.account is not None else ''}, and it does not"
            f"{self.what_would_fit(has_fixed_noise=has_fixed_noise) or '. Raise it, or use fewer points'}"
        )

    def what_would_fit(self, *, has_fixed_noise: bool) -> str:
        """Return the end of an error message, with options that would fit; "" if there are none.

        Args:
          has_fixed_noise: as in `fit`.
        """
        alternatives, mechanism = [], self.options.mechanism
        if mechanism.noise_multiplier is None and not _sets_noise(self.points):
            max_epsilon = mechanism.epsilon or self.total_epsilon or DEFAULT_EPSILON
            if epsilon := self._largest_epsilon(max_epsilon=max_epsilon):
                alternatives.append(f"--epsilon {epsilon:g}")
        name, num_wanted = self._count
        if has_fixed_noise and 0 < (num_fitting := self._count_that_fits()) < num_wanted:
            alternatives.append(f"--{name.replace('_', '-')} {num_fitting}")
        return f". What would fit: {', or '.join(alternatives)}" if alternatives else ""

    def text(self, fit: Fit, trials: Sequence[Trial]) -> str:
        """Return a sentence on what was fitted to `--total-epsilon`."""
        summary = (
            f"ε = {fit.epsilon:g} of one training{_OTHERS * _sets_noise(self.points)} is (to within a "
            "percent) the largest value"
            if fit.epsilon is not None
            else f"repeats = {fit.repeats} is the largest number"
        )
        ledger_text = ", and the ledger has budget for it" if self.account is not None else ""
        return (
            f"{summary} at which the whole sweep costs at most ε = {fit.total_epsilon:g}, "
            f"at δ = {delta_text(self._delta([trial for trial in trials if is_proven(trial)]))}{ledger_text}"
        )

    def _largest_epsilon(self, *, max_epsilon: float) -> float | None:
        """Return the largest ε of one training, to a percent, at which the whole sweep is within its limits.

        First the noise of all trainings is scaled by one factor, which needs no calibration. The resulting ε
        is right if all trainings cost the same, and a first guess otherwise.
        None if not even the smallest ε fits.
        """

        def fits(epsilon: float) -> bool:
            trials = self._calibrated(epsilon)
            return trials is not None and self._limit_share(trials) <= 1

        if fits(max_epsilon):
            return max_epsilon
        near = max_epsilon
        while (start := self._calibrated(near)) is None:
            near /= 2
            if near < SMALLEST_EPSILON:
                return None
        scale = largest_that_fits(
            lambda scale: self._limit_share(_with_noise(start, 1 / scale)), maximum=1.0, minimum=1e-4
        )
        if scale is None:
            return None
        quieter = _with_noise(start, 1 / scale)
        guess = max(trial.config.epsilon() for trial in quieter if is_proven(trial))
        return _largest_near(fits, min(guess, max_epsilon))

    def _calibrated(self, epsilon: float) -> Sequence[Trial] | None:
        """Return the trials calibrated to an ε of one training; None if no noise gives this ε."""
        if epsilon < SMALLEST_EPSILON:
            return None
        try:
            trials = self.trials_of(replace_options(self.options, epsilon=epsilon))
        except ConfigError as error:
            if not str(error).startswith("target_epsilon"):
                raise
            return None
        if not any(map(is_proven, trials)):
            raise ConfigError(
                "--total-epsilon needs trainings with a guarantee, and none is planned. Leave it out"
            )
        return trials

    @property
    def _count(self) -> tuple[str, int]:
        """Return the option for the number of trainings (repeats, or trials of a search), and its value."""
        if isinstance(self.options, SearchOptions):
            return "num_trials", self.options.num_trials
        return "repeats", self.options.service.repeats if self.options.release.is_open else 1

    def _count_that_fits(self) -> int:
        """Return the most repeats, or trials of a search, that fit, up to the number in the options; or 0."""
        trials, (_, max_count) = self.trials_of(self.options), self._count
        num_per_count = len(trials) // max_count
        return largest_admitted(
            lambda number: self._limit_share(trials[: num_per_count * number]) <= 1, max_count
        )

    def _delta(self, proven: Sequence[Trial]) -> float:
        """Return the δ of the total: the smaller of the sweep's δ and the δ of the ledger's cap."""
        delta = delta_of([*proven, *filter(is_proven, earlier_trials(self.earlier))])
        if self.account is None:
            return delta
        ledger, dataset_id = self.account
        return min(delta, ledger.read_charges(dataset_id, with_pld=False).cap.delta)

    def _limit_share(self, trials: Sequence[Trial]) -> float:
        """Return the share of the tighter limit that trials need: above 1 if they do not fit."""
        proven = [trial for trial in trials if is_proven(trial)]
        if not proven:
            return 0.0
        of_ledger = self._share_of_ledger(proven)
        if self.total_epsilon is None or of_ledger > 1:
            return of_ledger
        return max(of_ledger, self._epsilon_of(proven) / self.total_epsilon)

    def _epsilon_of(self, proven: Sequence[Trial]) -> float:
        """Return the ε of these trials and of all earlier sweeps; inf if it is not accounted."""
        charged, draws = [*proven, *earlier_trials(self.earlier)], earlier_draws(self.earlier)
        if not any(map(is_proven, charged)):
            return 0.0
        cost = cost_of(self.options.release, charged, draws, delta=self._delta(proven))
        return math.inf if cost is None or cost.tuned_epsilon is None else cost.tuned_epsilon

    def _share_of_ledger(self, trials: Sequence[Trial]) -> float:
        """Return the share of the ledger's remaining RDP that trials need; above 1 if the ledger has no room.

        For a sealed sweep with room the share is 0, as it is charged as a whole.
        """
        if self.account is None or not all(trial.config.mechanism.rules.plain_event for trial in trials):
            return 0.0
        (ledger, dataset_id), release = self.account, self.options.release
        spending, needed_share = ledger.read_charges(dataset_id, with_pld=False), 0.0
        try:
            if not release.is_open:
                cost = cost_of(release, trials)
                if cost is None or cost.tuned_epsilon is None:
                    return _OVER_LIMIT
                curve = charged_curve(release, trials, spending.cap)
                ledger.would_admit_sealed(
                    dataset_id, epsilon=cost.tuned_epsilon, delta=cost.delta, rdp_curve=curve
                )
                return 0.0
            planned = planned_trainings({f"planned {number}": trial for number, trial in enumerate(trials)})
            if spending.rdp is not None and spending.rdp_budget is not None:
                rule, rdp_left = spending.cap.rdp_filter(), spending.rdp_budget - spending.rdp
                total = sum(rule.cost(training.step_class, training.num_steps) for training in planned)
                needed_share = total / rdp_left if rdp_left > 0 else math.inf
            ledger.would_admit(dataset_id, planned)
        except BudgetExceeded:
            return max(needed_share, _OVER_LIMIT)
        return min(needed_share, 1.0)


def _sets_noise(points: Sequence[Point]) -> bool:
    """Return whether every point with noise sets its own ε or σ, and there is such a point."""
    noises = [{name: point.changes.get(name) for name in ("epsilon", "noise_multiplier")} for point in points]
    private = [noise for noise in noises if noise["epsilon"] != math.inf]
    return bool(private) and all(set(noise.values()) != {None} for noise in private)


def fixes_noise(options: SweepOptions, points: Sequence[Point]) -> bool:
    """Return whether options or points set ε or the noise multiplier of every private training.

    >>> fixes_noise(SweepOptions(), [Point(label="S2", changes={"group_size": 2})])
    False
    """
    mechanism = options.mechanism
    return mechanism.epsilon is not None or mechanism.noise_multiplier is not None or _sets_noise(points)


def _with_noise(trials: Sequence[Trial], factor: float) -> list[Trial]:
    """Return the trials with their noise multiplied by a factor."""

    def with_noise(mechanism: Mechanism) -> Mechanism:
        return replace(mechanism, noise_multiplier=factor * mechanism.noise_multiplier)

    return [
        replace(trial, config=replace(trial.config, mechanism=with_noise(trial.config.mechanism)))
        for trial in trials
    ]


def _largest_near(fits: Callable[[float], bool], guess: float) -> float | None:
    """Return an ε of three digits that fits, at or below a guess; lower it by 1 %, then 2 %, 4 %, …"""
    epsilon, step = _rounded_down(guess), 0.01
    while not fits(epsilon):
        if epsilon <= SMALLEST_EPSILON:
            return None
        epsilon, step = _rounded_down(epsilon * (1 - step)), min(2 * step, 0.5)
    return epsilon


def _rounded_down(value: float) -> float:
    """Return a value rounded down to three digits.

    >>> _rounded_down(0.12399), _rounded_down(7.0)
    (0.123, 7.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit + 1e-9) * unit:.3g}")


def largest_that_fits(share: Callable[[float], float], *, maximum: float, minimum: float) -> float | None:
    """Return the largest number whose share is at most 1, to a percent; None if it is below `minimum`.

    Args:
      share: maps a number to the share of the limits that it needs; the share rises with the number.
      maximum, minimum: the ends of the search, both positive.

    >>> largest = largest_that_fits(lambda x: x * x / 2, maximum=10.0, minimum=0.001)
    >>> 0.99 * 2**0.5 < largest <= 2**0.5
    True
    """
    high, above, low = maximum, share(maximum), maximum
    if above <= 1:
        return maximum
    while (below := share(low := low / 1.5)) > 1:
        if low < minimum:
            return None
        high, above = low, below
    while high / low > 1.01:
        part = 0.5 if below <= 0 or above == math.inf else math.log(below) / math.log(below / above)
        middle = low * (high / low) ** min(max(part - 0.05, 0.1), 0.9)
        middle_share = share(middle)
        if middle_share <= 1:
            low, below = middle, middle_share
        else:
            high, above = middle, middle_share
    return low
