"""`--total-epsilon`: the largest ε of one training at which a sweep stays within a total; and what would fit.

Nothing is computed anew here: a plan is a number of trainings, each calibrated as the sweep itself calibrates
it, their cost is `cost_of`, and whether a ledger holds them is asked of the ledger. All of that rises with
the ε of one training, with the number of repeats and with every further point, so the largest that fits is
found by bisection. What is returned was found to fit by the two functions that a sweep is stated and charged
by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpgcl_core.errors import BudgetExceeded, ConfigError
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.release.statement import delta_text
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.plan import Fit
from sweeps.service.planning.space import SearchOptions
from sweeps.service.planning.sweep_cost import cost_of, delta_of
from sweeps.service.planning.trials import Point, Trial, is_proven
from sweeps.service.privacy.budget import largest_admitted
from sweeps.service.privacy.reservations import planned_trainings
from sweeps.service.privacy.sealed_charge import charged_curve
from trainers.config.settings import DEFAULT_EPSILON, SMALLEST_EPSILON
from trainers.config.tree import changed

TrialsOf = Callable[[SweepOptions], Sequence[Trial]]
"""All trials of a sweep with these options, repeat after repeat."""
_MORE_THAN_ALL = 1 + 1e-9
_LEAST_SCALE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all of a sweep must stay within, and what of it fits.

    Attributes:
      options: of the sweep.
      points: what is compared.
      trials_of: the sweep's trials.
      total_epsilon: --total-epsilon; None for the ledger alone.
      account: ledger and data set that it is charged to; None without.
    """

    options: SweepOptions
    points: Sequence[Point]
    trials_of: TrialsOf
    total_epsilon: float | None
    account: tuple[Ledger, str] | None = None

    def fit(self, *, fixed: bool) -> Fit:
        """Return the largest ε of one training, or number of repeats, at which a sweep is within its limits.

        Args:
          fixed: whether options or points give the noise of every private training; else its ε is sought.

        Raises:
          ConfigError: no private training is planned, or nothing fits: what would, in the user's words.
        """
        total, repeats = self.total_epsilon, self.options.service.repeats
        assert total is not None
        if not fixed:
            epsilon = self._largest_epsilon(most=total)
            if epsilon is not None:
                return Fit(total_epsilon=total, epsilon=epsilon, repeats=repeats)
        else:
            fits, (_, wanted) = self._count_that_fits(), self._count
            if fits == wanted or (fits and not isinstance(self.options, SearchOptions)):
                return Fit(total_epsilon=total, epsilon=None, repeats=min(fits, repeats))
        raise ConfigError(
            f"all of the sweep must fit within --total-epsilon {total:g}"
            f"{' and the ledger' if self.account is not None else ''}, and does not"
            f"{self.what_would_fit(fixed=fixed) or ': give more, or fewer points'}"
        )

    def what_would_fit(self, *, fixed: bool) -> str:
        """Return what fits in place of a sweep that does not, as a command line has it; "" for nothing.

        Args:
          fixed: as of `fit`.
        """
        found, mechanism = [], self.options.mechanism
        if mechanism.noise_multiplier is None and not _have_noise(self.points):
            most = mechanism.epsilon or self.total_epsilon or DEFAULT_EPSILON
            if epsilon := self._largest_epsilon(most=most):
                found.append(f"--epsilon {epsilon:g}")
        name, wanted = self._count
        if fixed and 0 < (fits := self._count_that_fits()) < wanted:
            found.append(f"--{name.replace('_', '-')} {fits}")
        return f". What would fit: {', or '.join(found)}" if found else ""

    def text(self, fit: Fit, trials: Sequence[Trial]) -> str:
        """Return what was planned for a total ε, in a sentence."""
        what = (
            f"ε = {fit.epsilon:g} of one training is the largest"
            if fit.epsilon is not None
            else f"{fit.repeats} repeat{'s' * (fit.repeats != 1)} of every point are the most"
        )
        held = ", and the ledger holds it" if self.account is not None else ""
        return (
            f"{what} (to a percent) at which all of the sweep costs ε = {fit.total_epsilon:g} at most, "
            f"at δ = {delta_text(self._delta([trial for trial in trials if is_proven(trial)]))}{held}"
        )

    def _largest_epsilon(self, *, most: float) -> float | None:
        """Return the largest ε of one training, to a percent, at which all of the sweep is within its limits.

        More noise in all trainings is tried first, for that needs no calibration. It tells the ε where all of
        them cost the same, and else where to look.
        """

        def fits(epsilon: float) -> bool:
            trials = self._calibrated(epsilon)
            return trials is not None and self._share(trials) <= 1

        if fits(most):
            return most
        near = most
        while (start := self._calibrated(near)) is None:
            near /= 2
            if near < SMALLEST_EPSILON:
                return None
        scale = largest_that_fits(
            lambda scale: self._share(_with_noise(start, 1 / scale)), most=1.0, least=_LEAST_SCALE
        )
        if scale is None:
            return None
        quieter = _with_noise(start, 1 / scale)
        guess = max(trial.config.epsilon() for trial in quieter if is_proven(trial))
        return _nearest(fits, min(guess, most))

    def _calibrated(self, epsilon: float) -> Sequence[Trial] | None:
        """The trials at an ε of one training; None where no noise is found for one so large, or so small."""
        try:
            trials = self.trials_of(changed(self.options, epsilon=epsilon))
        except ConfigError as error:
            if not str(error).startswith("target_epsilon"):
                raise
            return None
        if not any(map(is_proven, trials)):
            raise ConfigError(
                "--total-epsilon is for trainings with a guarantee, and none is planned: leave it out"
            )
        return trials

    @property
    def _count(self) -> tuple[str, int]:
        """The option that says how often every point is trained, and its value; a search has trials."""
        if isinstance(self.options, SearchOptions):
            return "num_trials", self.options.num_trials
        return "repeats", self.options.service.repeats if self.options.release.is_open else 1

    def _count_that_fits(self) -> int:
        """Return the largest number of repeats (trials of a search), up to that given, that fits; or 0."""
        trials, (_, most) = self.trials_of(self.options), self._count
        each = len(trials) // most
        return largest_admitted(lambda number: self._share(trials[: each * number]) <= 1, most)

    def _delta(self, proven: Sequence[Trial]) -> float:
        """The δ of the total: that of the sweep, or of the ledger's cap where it is smaller."""
        if self.account is None:
            return delta_of(proven)
        ledger, dataset_id = self.account
        return min(delta_of(proven), ledger.read_charges(dataset_id, with_pld=False).cap.delta)

    def _share(self, trials: Sequence[Trial]) -> float:
        """The share of a limit that trials need: at most 1 where they fit, and else above."""
        proven = [trial for trial in trials if is_proven(trial)]
        if not proven:
            return 0.0
        of_ledger = self._share_of_ledger(proven)
        if self.total_epsilon is None or of_ledger > 1:
            return of_ledger
        cost = cost_of(self.options.release, proven, delta=self._delta(proven))
        tuned = cost.tuned_epsilon if cost is not None else None
        return math.inf if tuned is None else max(of_ledger, tuned / self.total_epsilon)

    def _share_of_ledger(self, trials: Sequence[Trial]) -> float:
        """The share of what a ledger has left: of an open sweep in the filter's RDP, else all or nothing."""
        if self.account is None or not all(trial.config.mechanism.rules.plain_event for trial in trials):
            return 0.0
        (ledger, dataset_id), release = self.account, self.options.release
        spent, needed = ledger.read_charges(dataset_id, with_pld=False), 0.0
        try:
            if not release.is_open:
                cost = cost_of(release, trials)
                if cost is None or cost.tuned_epsilon is None:
                    return _MORE_THAN_ALL
                curve = charged_curve(release, trials, spent.cap)
                ledger.would_admit_sealed(
                    dataset_id, epsilon=cost.tuned_epsilon, delta=cost.delta, rdp_curve=curve
                )
                return 0.0
            planned = planned_trainings({f"planned {number}": trial for number, trial in enumerate(trials)})
            if spent.rdp is not None and spent.rdp_budget is not None:
                rule, left = spent.cap.rdp_filter(), spent.rdp_budget - spent.rdp
                total = sum(rule.cost(each.step_class, each.num_steps) for each in planned)
                needed = total / left if left > 0 else math.inf
            ledger.would_admit(dataset_id, planned)
        except BudgetExceeded:
            return max(needed, _MORE_THAN_ALL)
        return min(needed, 1.0)


def _have_noise(points: Sequence[Point]) -> bool:
    """Whether every private point has an ε or σ of its own."""
    given = [{name: point.changes.get(name) for name in ("epsilon", "noise_multiplier")} for point in points]
    private = [each for each in given if each["epsilon"] != math.inf]
    return bool(private) and all(set(each.values()) != {None} for each in private)


def fixes_noise(options: SweepOptions, points: Sequence[Point]) -> bool:
    """Whether options or points give the noise of every private training.

    >>> fixes_noise(SweepOptions(), [Point(label="S2", changes={"group_size": 2})])
    False
    """
    mechanism = options.mechanism
    return mechanism.epsilon is not None or mechanism.noise_multiplier is not None or _have_noise(points)


def _with_noise(trials: Sequence[Trial], factor: float) -> list[Trial]:
    """The trials with that many times the noise."""

    def louder(mechanism: Mechanism) -> Mechanism:
        return replace(mechanism, noise_multiplier=factor * mechanism.noise_multiplier)

    return [
        replace(trial, config=replace(trial.config, mechanism=louder(trial.config.mechanism)))
        for trial in trials
    ]


def _nearest(fits: Callable[[float], bool], guess: float) -> float | None:
    """The largest ε that fits near a guess, to three digits: in steps of 1 %, then of 2 %, and so on."""
    epsilon, step = _rounded_down(guess), 0.01
    if fits(epsilon):
        return epsilon
    while epsilon > SMALLEST_EPSILON:
        epsilon, step = _rounded_down(epsilon * (1 - step)), min(2 * step, 0.5)
        if fits(epsilon):
            return epsilon
    return None


def _rounded_down(value: float) -> float:
    """The number of three digits at or below a value.

    >>> _rounded_down(0.12399), _rounded_down(7.0)
    (0.123, 7.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.floor(value / unit + 1e-9) * unit:.3g}")


def largest_that_fits(share: Callable[[float], float], *, most: float, least: float) -> float | None:
    """Return a number from `least` to `most`, within a percent of the largest, whose share is at most 1.

    Args:
      share: rises with the number.
      most, least: both positive.

    >>> found = largest_that_fits(lambda x: x * x / 2, most=10.0, least=0.001)
    >>> 0.99 * 2**0.5 < found <= 2**0.5
    True
    """
    high, above, low = most, share(most), most
    if above <= 1:
        return most
    while (below := share(low := low / 1.5)) > 1:
        if low < least:
            return None
        high, above = low, below
    while high / low > 1.01:
        part = 0.5 if below <= 0 or above == math.inf else math.log(below) / math.log(below / above)
        middle = low * (high / low) ** min(max(part - 0.05, 0.1), 0.9)
        found = share(middle)
        if found <= 1:
            low, below = middle, found
        else:
            high, above = middle, found
    return low
