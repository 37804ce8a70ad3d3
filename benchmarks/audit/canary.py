"""A white-box canary audit of the private step: an empirical lower bound on ε, against the claim.

    python -m benchmarks.audit
    python -m benchmarks.audit --runs 20000 --json
    python -m benchmarks.audit --seed 0 --only one-group groups-of-two

The accountant gives an upper bound on ε; an audit gives a lower bound. The stages of a `Mechanism`, from the
draw of the groups (`Mechanism.group_stage`) through the clipper to noise and divisor, run many times on D and
on D' = D + canary. Gradients are crafted: each is a function of a group's members, the worst known for a
class of defects (`benchmarks.audit.worst_cases`). The canary is at another random row in every run. The score
uses all differences between the releases on D and on D', so it detects a defect in the canary's group or in
any other group. `benchmarks.audit.judging` describes how runs give a bound with the stated confidence, and
how the distribution of the noise is tested (Kairouz, Oh and Viswanath 2015; Jagielski, Ullman and Oprea 2020;
Nasr et al. 2023). Any score gives a valid bound; a poor score gives a loose bound.

The code as written must stay below its claim. The known defects of `benchmarks.audit.defects` must be
detected by the bound or, if a defect costs only accuracy, by the test of the noise. An audit that misses them
would prove nothing when it finds nothing.

All data are synthetic. This audit omits views and networks, which come before the crafted gradient, and the
optimizer, which comes after the noise. It also omits the training loop's fresh seeding of every step: for
speed, one generator per purpose serves all runs. `python -m benchmarks.audit.training_step` audits the
training step itself.

Exit code 0: every row is as expected. 1: a row is not. 2: bad input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from json import dumps
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.audit import defects
from benchmarks.audit.defects import Defect, Step, step_of
from benchmarks.audit.judging import Claim, Releases, judge
from benchmarks.audit.result import AuditResult, markdown, table
from benchmarks.audit.worst_cases import (
    CANARY,
    NOBODY,
    Crafted,
    GroupGradient,
    crafted_inputs,
    foreign,
    in_order,
    members_of,
    newcomer,
    partners,
)
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, require_least, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS
from dpgcl_core.noise.randomness import Draws, DrawSource, SecretRandomness, SeededNonPrivateRandomness
from dpgcl_core.sampling.groups import BATCH
from dpgcl_core.sampling.stage import DrawnGroups

MIN_RUNS, DEFAULT_RUNS = 200, 4000


@dataclass(frozen=True, kw_only=True)
class AuditCase:
    """One setting to audit.

    Attributes:
      name: the name of the case's rows in the table.
      mechanism: the mechanism whose stages run, and whose ε is the claim.
      num_records: number of records of D; D' also has the canary.
      worst: the groups' gradients.
      dim: number of the gradients' coordinates; coordinates that `worst` leaves zero release only noise.
      num_trials: number of trainings whose outputs are all released; the claim composes them.
      defect: the planted defect, or None for the code as written.
      runs_factor: multiplies the number of runs, for a case of few steps that needs many runs.

    Raises:
      ConfigError: the mechanism is not private or does not clip groups, or a number is out of range.
    """

    name: str
    mechanism: Mechanism
    num_records: int
    worst: Callable[..., NDArray[np.float64]] = foreign
    dim: int = 1
    num_trials: int = 1
    defect: Defect | None = None
    runs_factor: int = 1

    def __post_init__(self) -> None:
        if not self.mechanism.is_private:
            raise ConfigError("an audit needs a finite ε, so noise_multiplier must be positive; got 0")
        if not self.mechanism.rules.clips_groups:
            raise ConfigError(
                "an audit crafts one gradient per group, so the method must clip groups; got "
                f"{self.mechanism.method}"
            )
        require_least(self, 1, "num_records", "num_trials", "runs_factor", "dim")
        if self.defect in _OF_GROUPS and self.mechanism.group_size == BATCH:
            raise ConfigError(f"{self.defect.name} needs groups of a fixed size; got {BATCH!r}")

    @property
    def claim(self) -> Claim:
        """The ε charged for all trials, and the standard deviation of the noise."""
        mechanism = self.mechanism
        return Claim(
            epsilon=mechanism.epsilon(self.num_trials * mechanism.num_steps),
            delta=mechanism.target_delta,
            noise_std=mechanism.noise().std,
        )

    @property
    def gradient(self) -> GroupGradient:
        """The function that returns the gradient of a group from its members."""
        size = self.mechanism.group_size
        return partial(self.worst, group_size=None if size == BATCH else int(size), dim=self.dim)


_OF_GROUPS = (
    defects.SHORT_GROUP,
    defects.FILLED_GROUP,
    defects.MASK_LOST,
    defects.NOT_PERMUTED,
    defects.OWN_CAPACITY,
)


def audit(
    case: AuditCase,
    *,
    num_runs: int = DEFAULT_RUNS,
    confidence: float = 0.95,
    randomness: DrawSource | None = None,
) -> AuditResult:
    """Run a case `num_runs` times (times its factor) on each of D and D', and bound ε from below.

    Args:
      case: the setting.
      num_runs: number of runs on each data set; one half chooses the test, the other half evaluates it.
      confidence: probability that both error rates are within their bounds.
      randomness: source of all draws; the operating system by default.

    Raises:
      ConfigError: fewer than `MIN_RUNS` runs, or a confidence outside (0, 1).
    """
    check_numbers(num_runs, confidence)
    runs = num_runs * case.runs_factor
    simulator = _Simulator(case, randomness or SecretRandomness())
    without, with_canary = (simulator.release(runs, has_canary) for has_canary in (False, True))
    defect = case.defect
    return judge(
        case.name,
        without,
        with_canary,
        case.claim,
        confidence=confidence,
        defect=None if defect is None else defect.name,
        must_exceed=defect is not None and defect.breaks_claim,
    )


def check_numbers(num_runs: int, confidence: float) -> None:
    """Raise ConfigError for too few runs, or a confidence outside (0, 1)."""
    if num_runs < MIN_RUNS:
        raise ConfigError(f"num_runs must be at least {MIN_RUNS}; got {num_runs}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be in (0, 1); got {confidence}")


class _Simulator:
    """Runs the stages of a case, with its defect planted."""

    def __init__(self, case: AuditCase, randomness: DrawSource) -> None:
        self._case, self._mechanism = case, case.mechanism
        self._step: Step = step_of(case.mechanism)
        if case.defect is not None:
            self._step = case.defect.plant(self._step, case.mechanism)
        # One generator per purpose serves all runs, because seeding one for each step would be slow.
        self._draws = _RunDraws(randomness, self._step.repeats)
        self._rows = randomness.generator(0, "rows")
        self._gradient = lru_cache(maxsize=2**16)(case.gradient)
        self._sums: dict[bytes, Tensor] = {}
        self._model, self._divisor = Crafted(case.dim), case.mechanism.divisor

    def release(self, runs: int, has_canary: bool) -> Releases:
        """Return the releases of `runs` runs, multiplied by the claimed divisor."""
        shape = (runs, self._case.num_trials, self._mechanism.num_steps, self._case.dim)
        noisy, clean = np.empty(shape), np.empty(shape)
        members = np.append(np.arange(self._case.num_records), NOBODY)
        for run in range(runs):
            self._draws.begin_run()
            present = members
            if has_canary:  # at another random row in every run
                row = int(self._rows.random(1)[0] * (self._case.num_records + 1))
                present = np.insert(members, row, CANARY)
            for trial, step in np.ndindex(shape[1:3]):
                noisy[run, trial, step], clean[run, trial, step] = self._release_step(present, trial, step)
        return Releases(noisy, clean)

    def _release_step(
        self, members: NDArray[np.int64], trial: int, step: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        parts, of = self._step, partial(self._draws.of, trial=trial, step=step)
        groups = parts.stage.draw(len(members) - 1, sampling=of("sampling"), permutation=of("permutation"))
        total = self._clean_sum(members[groups.rows], groups).clone()
        scale = self._divisor / parts.divisor(groups)
        clean = total.double().numpy() * scale
        noise = parts.noise(groups)
        noise.add_rounded_once(total, noise.draw(len(total), of("noise")))
        return total.double().numpy() * scale, clean

    def _clean_sum(self, groups: NDArray[np.int64], draw: DrawnGroups) -> Tensor:
        """Return the clipped sum of groups of members; each combination of gradients is computed once."""
        if not len(groups):
            return torch.zeros(self._case.dim, dtype=torch.float64)
        vectors = [self._gradient(members_of(group)).tobytes() for group in groups.tolist()]
        key = b"".join(sorted(v + bytes([c]) for v, c in zip(vectors, draw.complete.tolist(), strict=True)))
        if key not in self._sums:
            total = torch.zeros(self._case.dim, dtype=torch.float64)
            inputs = crafted_inputs(groups, self._gradient, l2_clip_norm=self._mechanism.l2_clip_norm)
            complete = torch.from_numpy(draw.complete)
            self._step.rule.add_clipped_sum(total, self._model, self._model, inputs, complete=complete)
            self._sums[key] = total
        return self._sums[key]


class _RunDraws:
    """The generators of all runs; some defects repeat draws within a run."""

    def __init__(self, randomness: DrawSource, repeats: tuple[str, str] | None) -> None:
        purposes = ("sampling", "permutation", "noise")
        self._draws: dict[str, Draws] = {each: randomness.generator(0, each) for each in purposes}
        self._seeds = randomness.generator(0, "repeats")
        self._repeats = repeats
        self._seed = 0

    def begin_run(self) -> None:
        self._seed = int(self._seeds.random(1)[0] * 2**53)

    def of(self, purpose: str, *, trial: int, step: int) -> Draws:
        if self._repeats is None or self._repeats[0] != purpose:
            return self._draws[purpose]
        apart = trial if self._repeats[1] == "steps" else step
        return np.random.default_rng([self._seed, apart])


_ONE_GROUP = Mechanism(
    num_records_public=21,
    sampling=RECORDS,
    sampling_prob=0.5,
    group_size=BATCH,
    l2_clip_norm=1.0,
    noise_multiplier=1.5,
    num_steps=4,
    target_delta=0.01,
)
TWO_RECORDS = dataclasses.replace(
    _ONE_GROUP,
    num_records_public=3,
    sampling_prob=1.0,
    group_size=2,
    noise_multiplier=1.0,
    num_steps=1,
    target_delta=0.127,
)
_FOUR_SLOTS = dataclasses.replace(TWO_RECORDS, sampling=GROUPS, num_records_public=4)
_SOME_BLOCKS = dataclasses.replace(
    _FOUR_SLOTS, num_records_public=8, sampling_prob=0.25, noise_multiplier=0.7, target_delta=0.05
)
_FOUR_RECORDS = dataclasses.replace(TWO_RECORDS, num_records_public=5, group_size=4)
_SINGLES = dataclasses.replace(
    TWO_RECORDS, num_records_public=7, sampling_prob=0.5, group_size=1, target_delta=0.05
)
_MANY_GROUPS = dataclasses.replace(TWO_RECORDS, num_records_public=13, target_delta=0.07)
# Sixty records: with few records, many samples are empty, which hides whether the canary is in the data.
_ONE_OF_TEN = dataclasses.replace(
    _ONE_GROUP, num_records_public=61, sampling_prob=0.15, noise_multiplier=1.0, num_steps=1
)


def standard_cases() -> tuple[AuditCase, ...]:
    """Return the cases of the command: each setting as written, then with the defects it can reveal.

    `groups-of-two` is the smallest case in which a short last group violates 2C. With two records and the
    canary, σ = 1 and ε = 1, the true δ is 0.205, and 0.127 is claimed.
    """
    one_group = AuditCase(name="one-group", mechanism=_ONE_GROUP, num_records=20)
    poisson = AuditCase(
        name="poisson-groups", mechanism=dataclasses.replace(_ONE_GROUP, group_size=4), num_records=20
    )
    two = AuditCase(name="groups-of-two", mechanism=TWO_RECORDS, num_records=2, runs_factor=4)
    tensors = dataclasses.replace(two, name="two-tensors", dim=2, runs_factor=1)
    four = AuditCase(name="groups-of-four", mechanism=_FOUR_RECORDS, num_records=4, runs_factor=4)
    six = AuditCase(name="many-groups", mechanism=_MANY_GROUPS, num_records=12)
    order = dataclasses.replace(six, name="order", worst=in_order)
    exchanged = AuditCase(name="partners", mechanism=TWO_RECORDS, num_records=4, worst=partners, dim=2)
    singles = AuditCase(name="groups-of-one", mechanism=_SINGLES, num_records=6)
    wide = AuditCase(name="forty-weights", mechanism=TWO_RECORDS, num_records=3, dim=40)
    empty = AuditCase(name="empty-steps", mechanism=TWO_RECORDS, num_records=1)
    steps = AuditCase(
        name="ten-steps", mechanism=dataclasses.replace(_ONE_OF_TEN, num_steps=10), num_records=60
    )
    ten = AuditCase(name="ten-trials", mechanism=_ONE_OF_TEN, num_records=60, num_trials=10)
    # Groups are sampled: N is the same on D and on D', and the canary fills the last slot.
    slots = AuditCase(name="sampled-groups", mechanism=_FOUR_SLOTS, num_records=3, worst=newcomer)
    left_over = AuditCase(
        name="slot-left-over",
        mechanism=dataclasses.replace(_FOUR_SLOTS, num_records_public=5),
        num_records=4,
        worst=newcomer,
    )
    blocks = AuditCase(
        name="quarter-of-the-blocks",
        mechanism=_SOME_BLOCKS,
        num_records=7,
        worst=newcomer,
        runs_factor=4,
    )
    blocks_of_steps = AuditCase(
        name="blocks-of-four-steps",
        mechanism=dataclasses.replace(_ONE_GROUP, sampling=GROUPS, group_size=4),
        num_records=20,
    )
    planted: tuple[tuple[AuditCase, tuple[Defect, ...]], ...] = (
        (one_group, (defects.HALF_NOISE, defects.NO_NOISE, defects.DOUBLE_NOISE, defects.NOISE_OF_STEPS)),
        (poisson, ()),
        (two, (defects.SHORT_GROUP, defects.MASK_LOST, defects.RECORDS_CLIPPED)),
        (tensors, (defects.NOISE_OF_TENSORS,)),
        (four, (defects.FILLED_GROUP,)),
        (six, (defects.LESS_NOISE, defects.MEAN_CLIPPED, defects.LARGEST_CLIPPED, defects.BATCH_NORMALISED)),
        (order, (defects.NOT_PERMUTED,)),
        (exchanged, ()),
        (singles, (defects.FIXED_SIZE,)),
        (wide, (defects.REALISED_DIVISOR,)),
        (empty, (defects.QUIET_EMPTY,)),
        (steps, (defects.SAMPLES_OF_STEPS,)),
        (ten, (defects.SAMPLES_OF_TRIALS,)),
        (slots, (defects.MASK_LOST, defects.FILLED_GROUP, defects.REALISED_DIVISOR)),
        (left_over, (defects.OWN_CAPACITY,)),
        (blocks, (defects.FIXED_SIZE,)),
        (blocks_of_steps, ()),
    )
    return tuple(
        dataclasses.replace(case, defect=defect) for case, wrong in planted for defect in (None, *wrong)
    )


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of an audit: the cases to run, the number of runs, and the output format.

    Attributes:
      runs: number of runs on each of D and D'.
      confidence: confidence of each row's bound.
      only: run only these cases.
      seed: draw from this seed instead of the operating system, so that results repeat.
      json: print one JSON list.
      markdown: print the Markdown table of the documentation.
    """

    runs: int = DEFAULT_RUNS
    confidence: float = 0.95
    only: tuple[str, ...] = ()
    seed: int | None = None
    json: bool = False
    markdown: bool = False


def print_rows(results: Sequence[AuditResult], options: AuditOptions) -> int:
    """Print a row for each result; return the exit code, 0 if every row is as expected."""
    show: Callable[[Sequence[AuditResult]], str] = markdown if options.markdown else table
    print(dumps([result.as_dict() for result in results]) if options.json else show(results))
    return 0 if all(result.as_expected for result in results) else 1


_Case = TypeVar("_Case", bound=AuditCase)


def chosen_cases(cases: Sequence[_Case], only: Sequence[str]) -> list[_Case]:
    """Return the cases with these names; all cases if there are no names.

    Raises:
      ConfigError: a name is unknown.
    """
    names = list(dict.fromkeys(case.name for case in cases))
    for name in only:
        if name not in names:
            raise ConfigError(unknown_choice("case", name, names))
    return [case for case in cases if case.name in (only or names)]


def source_of(seed: int | None) -> DrawSource:
    """Return draws from a seed, or from the operating system if it is None.

    Raises:
      ConfigError: the seed is negative.
    """
    if seed is not None and seed < 0:
        raise ConfigError(f"seed must not be negative; got {seed}")
    return SecretRandomness() if seed is None else SeededNonPrivateRandomness(seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the standard cases of the command line; return 0 if every row is as expected, else 1.

    Raises:
      ConfigError: an option is unknown or out of range.
    """
    options: AuditOptions = run_command(
        AuditOptions, prog="python -m benchmarks.audit", description=__doc__, arguments=arguments
    )
    results = [
        audit(case, num_runs=options.runs, confidence=options.confidence, randomness=source_of(options.seed))
        for case in chosen_cases(standard_cases(), options.only)
    ]
    return print_rows(results, options)
