"""A white-box canary audit of the private step: an empirical lower bound on ε, against the claim.

    python -m dpgcl_core.audit
    python -m dpgcl_core.audit --runs 20000 --json
    python -m dpgcl_core.audit --seed 0 --only one-group groups-of-two

The accountant gives an upper bound on ε; an audit gives a lower one. Stages 2, 3, 7 and 8 of a
`Mechanism` run many times on D and on D' = D + canary, with the worst gradients that the sensitivity allows:
every group's is −C·e, but +C·e where the canary is in it. Each run's noisy sums are scored by their
log-likelihood ratio. One half of the runs fits the score and chooses the threshold; the other half, unused
until then, gives Clopper-Pearson bounds on the two error rates and so, with the stated confidence,
ε ≥ ln((TPR − δ)/FPR) (Kairouz, Oh and Viswanath 2015; Jagielski, Ullman and Oprea 2020; Nasr et al. 2023).
Any score gives a valid bound; a poor one gives a loose bound.

The code as written must stay below its claim. Three known defects, which are built in here and nowhere else,
must exceed theirs: noise of half the standard deviation, a short last group that is kept, and one sampler
seed for several trials. An audit that misses those would prove nothing by finding nothing.

All data are synthetic. Views, network and optimizer are outside the audit: they come before the crafted
gradient or after the noise. So is the training loop's fresh seeding of every step: for speed, one generator
of each purpose serves all runs, and sampler and noise draw for all of them in one call.

Exit code 0: every row is as expected; 1: one is not; 2: bad input.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json import dumps

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.audit.bounds import (
    Values,
    best_threshold,
    clean_distribution,
    clopper_pearson_upper,
    epsilon_if_gaussian,
    epsilon_lower_bound,
    log_ratio,
)
from dpgcl_core.audit.result import AuditResult, table
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, unknown_choice
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import Method
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.sources import Draws, DrawSource, SecretRandomness, SeededNonPrivateRandomness
from dpgcl_core.sampling.groups import BATCH, Grouper

HALF_NOISE, SHORT_GROUP, SHARED_SAMPLER = "half-noise", "short-group-kept", "shared-sampler-seed"
DEFECTS = (HALF_NOISE, SHORT_GROUP, SHARED_SAMPLER)

MIN_RUNS, DEFAULT_RUNS = 200, 4000
_NOBODY = np.iinfo(np.int64).max  # pads a short group; like the canary, not below num_records


@dataclass(frozen=True, kw_only=True)
class AuditCase:
    """One setting to audit.

    Attributes:
      name: of the row in the table.
      mechanism: whose stages run, and whose ε is the claim.
      num_records: records of D; D' has the canary besides.
      num_trials: trainings whose outputs are all released; the claim composes them.
      defect: one of `DEFECTS`, built in deliberately, or None for the code as written.
      runs_factor: multiplies the number of runs, for a case of few steps that needs many runs.

    Raises:
      ConfigError: the mechanism is not private, a number is out of range or the defect is unknown.
    """

    name: str
    mechanism: Mechanism
    num_records: int
    num_trials: int = 1
    defect: str | None = None
    runs_factor: int = 1

    def __post_init__(self) -> None:
        if not self.mechanism.is_private:
            raise ConfigError("an audit needs a claim: noise_multiplier must be positive; got 0")
        for name in ("num_records", "num_trials", "runs_factor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.defect is not None and self.defect not in DEFECTS:
            raise ConfigError(unknown_choice("defect", self.defect, DEFECTS))
        if self.defect == SHORT_GROUP and self.mechanism.group_size == BATCH:
            raise ConfigError(f"{SHORT_GROUP} needs groups of a fixed size; got group_size = {BATCH!r}")

    @property
    def claimed_epsilon(self) -> float:
        """The ε charged for all trials, at the mechanism's δ."""
        return self.mechanism.epsilon(self.num_trials * self.mechanism.num_steps)


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
      num_runs: runs on each data set; half of them choose, half of them test.
      confidence: probability that both error rates lie within their bounds.
      randomness: source of all draws; the operating system unless given.

    Raises:
      ConfigError: fewer than `MIN_RUNS` runs, or a confidence outside (0, 1).
    """
    if num_runs < MIN_RUNS:
        raise ConfigError(f"num_runs must be at least {MIN_RUNS}; got {num_runs}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be in (0, 1); got {confidence}")
    runs = num_runs * case.runs_factor
    simulator = _Simulator(case, randomness or SecretRandomness())
    without, with_canary = (simulator.release(runs, has_canary) for has_canary in (False, True))
    return _judge(case, without, with_canary, simulator.noise.std, confidence)


@dataclass(frozen=True)
class _Released:
    """Outputs of all runs, and the clean sums that only an auditor knows, `[runs, trials, steps]`."""

    noisy: Values
    clean: Values


class _Simulator:
    """The stages of a case, with its defect built in."""

    def __init__(self, case: AuditCase, randomness: DrawSource) -> None:
        mechanism = case.mechanism
        if type(mechanism.rules).group_stage is not Method.group_stage:
            raise ConfigError(
                f"{mechanism.method} draws its groups in its own way, and the audit runs sampler and "
                "grouper: it would audit another mechanism than the one that trains"
            )
        self.case = case
        self.sampler = mechanism.sampler()
        self.grouper: Grouper = mechanism.grouper()
        self.noise: GaussianNoise = mechanism.noise()
        if case.defect == SHORT_GROUP:
            self.grouper = _ShortGroupKept(int(mechanism.group_size))
        if case.defect == HALF_NOISE:
            self.noise = GaussianNoise(std=mechanism.noise().std / 2)
        # A group's clipped gradient depends on the group alone, so each of the two is clipped once.
        self.minus, self.plus = (_clipped(mechanism, sign) for sign in (-1.0, 1.0))
        # One generator of each purpose serves all runs: seeding one for each step would be slow.
        self.sampling, self.permutation, self.noising = (
            randomness.generator(0, purpose) for purpose in ("sampling", "permutation", "noise")
        )

    def release(self, runs: int, has_canary: bool) -> _Released:
        """Return the noisy and the clean sums of `runs` runs."""
        shape = (runs, self.case.num_trials, self.case.mechanism.num_steps)
        sums = [self._clean_sum(sample) for sample in self._samples(shape, has_canary)]
        clean = np.array(sums).reshape(shape)
        noise = self.noise.draw(clean.size, self.noising).numpy().reshape(shape)
        return _Released(clean + noise, clean)

    def _samples(self, shape: tuple[int, int, int], has_canary: bool) -> Iterator[NDArray[np.int64]]:
        """Yield one step's sample after the other, run by run and trial by trial.

        Records join independently of each other, so the sampler draws for all steps in one call.
        """
        runs, trials, steps = shape
        is_shared = self.case.defect == SHARED_SAMPLER  # one seed gives every trial the same samples
        num_records, drawn = self.case.num_records + has_canary, runs * steps * (1 if is_shared else trials)
        rows = self.sampler.sample(num_records * drawn, self.sampling)
        ends = np.searchsorted(rows, num_records * np.arange(drawn + 1))
        records = rows % num_records
        for run, trial, step in np.ndindex(shape):
            at = run * steps + step if is_shared else (run * trials + trial) * steps + step
            yield records[ends[at] : ends[at + 1]]

    def _clean_sum(self, sample: NDArray[np.int64]) -> float:
        groups = self.grouper.group(sample, self.permutation)
        canary = self.case.num_records  # the last row of D'
        marked = int(np.count_nonzero((groups >= canary).any(axis=1))) if groups.size else 0
        return marked * self.plus + (len(groups) - marked) * self.minus


@dataclass(frozen=True)
class _ShortGroupKept:
    """The defect: the paper's own grouping, which keeps a last group that is short."""

    group_size: int

    def group(self, sample: NDArray[np.int64], generator: Draws) -> NDArray[np.int64]:
        missing = -len(sample) % self.group_size
        permuted = np.concatenate([generator.permutation(sample), np.full(missing, _NOBODY)])
        return permuted.reshape(-1, self.group_size)


class _Crafted(nn.Module):
    """A network of one weight whose loss has its input as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, gradients: Tensor) -> Tensor:
        return self.weight * gradients.flatten(1).sum(1)


def _clipped(mechanism: Mechanism, sign: float) -> float:
    """Return the clipper's output for one group's gradient that is a thousand times too long."""
    model, total = _Crafted(), torch.zeros(1)
    gradient = torch.full((1, 1, 1), 1000 * sign * mechanism.l2_clip_norm)
    mechanism.clipper().add_clipped_sum(total, model, model, gradient)
    return float(total)


def _judge(
    case: AuditCase, without: _Released, with_canary: _Released, noise_std: float, confidence: float
) -> AuditResult:
    runs, delta = len(without.noisy), case.mechanism.target_delta
    half = runs // 2
    best = -math.inf
    for pooled in (False, True) if case.num_trials > 1 else (False,):
        distributions = [clean_distribution(each.clean[:half], pooled) for each in (without, with_canary)]
        std = noise_std * (math.sqrt(case.num_trials) if pooled else 1)
        scores = [log_ratio(each.noisy, distributions, std, pooled) for each in (without, with_canary)]
        threshold, reached = best_threshold(scores[0][:half], scores[1][:half], delta, confidence)
        if reached > best:
            best, chosen = reached, (scores, threshold)
    scores, threshold = chosen
    negatives, positives = (score[half:] for score in scores)
    wrong = int((negatives > threshold).sum()), int((positives <= threshold).sum())
    tail = (1 - confidence) / 2
    fpr, fnr = (
        float(clopper_pearson_upper(k, len(part), tail))
        for k, part in zip(wrong, (negatives, positives), strict=True)
    )
    claimed = case.claimed_epsilon
    return AuditResult(
        name=case.name,
        defect=case.defect,
        claimed_epsilon=claimed,
        delta=delta,
        epsilon_lower_bound=float(epsilon_lower_bound(fpr, fnr, delta)),
        delta_lower_bound=max(0.0, 1 - fnr - math.exp(claimed) * fpr, 1 - fpr - math.exp(claimed) * fnr),
        epsilon_if_gaussian=epsilon_if_gaussian(fpr, fnr, delta),
        false_positive_rate=wrong[0] / len(negatives),
        false_negative_rate=wrong[1] / len(positives),
        num_runs=runs,
        confidence=confidence,
    )


_ONE_GROUP = Mechanism(
    num_records_public=21,
    sampling_prob=0.5,
    group_size=BATCH,
    l2_clip_norm=1.0,
    noise_multiplier=1.5,
    num_steps=4,
    target_delta=0.01,
)
_TWO_RECORDS = dataclasses.replace(
    _ONE_GROUP,
    num_records_public=3,
    sampling_prob=1.0,
    group_size=2,
    noise_multiplier=1.0,
    num_steps=1,
    target_delta=0.127,
)
# Sixty records: with few, an empty sample would not tell whether the canary is in the data.
_ONE_OF_TEN = dataclasses.replace(
    _ONE_GROUP, num_records_public=61, sampling_prob=0.15, noise_multiplier=1.0, num_steps=1
)


def standard_cases() -> tuple[AuditCase, ...]:
    """Return the cases of the command: each setting as written, then with the defect it can reveal.

    `groups-of-two` is the smallest case in which a short last group violates 2C: with two records and the
    canary, σ = 1, ε = 1, the true δ is 0.205 where 0.127 is claimed.
    """
    one = AuditCase(name="one-group", mechanism=_ONE_GROUP, num_records=20)
    poisson = dataclasses.replace(
        one, name="poisson-groups", mechanism=dataclasses.replace(_ONE_GROUP, group_size=4)
    )
    two = AuditCase(name="groups-of-two", mechanism=_TWO_RECORDS, num_records=2, runs_factor=4)
    ten = AuditCase(name="ten-trials", mechanism=_ONE_OF_TEN, num_records=60, num_trials=10)
    return (
        one,
        dataclasses.replace(one, defect=HALF_NOISE),
        poisson,
        two,
        dataclasses.replace(two, defect=SHORT_GROUP),
        ten,
        dataclasses.replace(ten, defect=SHARED_SAMPLER),
    )


def audit_command(
    runs: int = DEFAULT_RUNS,
    confidence: float = 0.95,
    only: tuple[str, ...] = (),
    seed: int | None = None,
    json: bool = False,
) -> int:
    """Run the standard cases and print a row for each; return 0 if every row is as expected, else 1.

    Args:
      runs: runs on each of D and D'.
      confidence: confidence of each row's bound.
      only: run these cases alone.
      seed: draw from this seed, not from the operating system; repeatable.
      json: print one JSON list.

    Raises:
      ConfigError: an option is out of range.
    """
    cases = standard_cases()
    names = list(dict.fromkeys(case.name for case in cases))
    for name in only:
        if name not in names:
            raise ConfigError(unknown_choice("case", name, names))
    if seed is not None and seed < 0:
        raise ConfigError(f"seed must not be negative; got {seed}")
    results = [
        audit(
            case,
            num_runs=runs,
            confidence=confidence,
            randomness=None if seed is None else SeededNonPrivateRandomness(seed),
        )
        for case in cases
        if case.name in (only or names)
    ]
    print(dumps([result.as_dict() for result in results]) if json else table(results))
    return 0 if all(result.as_expected for result in results) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Raises:
      ConfigError: an option is unknown or out of range.
    """
    code: int = run_command(
        audit_command, prog="python -m dpgcl_core.audit", description=__doc__, arguments=arguments
    )
    return code
