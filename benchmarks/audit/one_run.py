"""Audit a training with the options that a team ships: canaries in one training, a lower bound on its ε.

    python -m benchmarks.audit.one_run --dataset fashion-mnist
    python -m benchmarks.audit.one_run --config CONFIG --group-size 16
    python -m benchmarks.audit.one_run --dataset fashion-mnist --epsilon 2 --noise-factor 0

The other audits repeat a step thousands of times on crafted data. This audit trains once, with
`trainers.training.loop.train` and the options of a sweep (Steinke, Nasr and Jagielski 2023). The data must be
public. CONFIG is the `config.yaml` of a sweep. Its axes are left out, so set the options of the audited point
on the command line.

*Canaries.* m of the N records are canaries. Each is in the data or not, by a fair coin that only the auditor
knows. A canary that is out leaves its slot empty (or, if records are sampled, is no row). Number of slots,
sampling, clipping, noise and divisor are those of the shipped training, and so is the claimed ε. A record
moves the training only through the clipped gradient of its group, and the claim holds for any function from
a group's members to its gradient. So the canaries have the worst function known: the gradient of a group with
a canary is the canary's own direction, one coordinate of the weights, far longer than C before clipping. All
other groups have their gradients from views, network and loss.

*Attacks.* One attacker sees the noisy sum of every step, the other only the trained weights. Each gives every
canary a score, and guesses "in" for the highest scores and "out" for the lowest scores. The numbers of
guesses are fixed before the training. `benchmarks.audit.bounds.one_run_epsilon` turns the number of right
guesses into a lower bound on ε, with its proof. The attacker may know everything except the coins and the
secret draws. Two canaries in one group make the attack weaker, not the bound invalid: the proof needs only
that each coin alone is protected by (ε, δ).

*What it shows.* A bound above the claim refutes it, with the stated confidence. A bound below the claim
proves nothing: the attack may be weak, and m canaries never show more than about ln(m/5). With 1,000 canaries
a claim of ε = 10 cannot be refuted, whatever the training does; the report states this limit.

Private data are refused: the choice of coordinates reads gradients without noise (docs/theory/audits.md).

Exit code 0: the claim is refuted exactly if noise was left out on purpose. 1: otherwise. 2: bad input.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.audit.bounds import Guesses, Values, guess_canaries, largest_epsilon
from benchmarks.audit.step_defects import as_planted
from benchmarks.audit.worst_cases import Crafted
from benchmarks.harness import aligned
from benchmarks.steps import unscored_data
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import GroupReport, no_sum
from dpgcl_core.errors import ConfigError, exit_on_bad_input, require_least
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.method import GradientRule, LossSettings
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.sampling.groups import BATCH
from dpgcl_core.sampling.slots import MOST_BLOCKS_LOST
from dpgcl_core.sampling.stage import DrawnGroups, GroupStage
from dpgcl_core.workers import SingleWorker
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions, errors_in_flags
from sweeps.service.planning.sweep_data import load_training_data
from trainers.config.nodes import EvaluationConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import image_shape_of, modality_of, num_public_classes
from trainers.training.loop import train
from trainers.training.resolve import training_config
from trainers.training.step import Training, prepare

Coins = NDArray[np.bool_]

_NUM_DRAWS = 8
_NO_SCORES = EvaluationConfig(record_every_steps=0, also_untrained=False)
_LONGER = 1e3
"""Length of a canary's gradient before clipping, in multiples of C."""


@dataclass(frozen=True, kw_only=True)
class OneRunOptions(SweepOptions):
    """The canaries and the output."""

    num_canaries: int = 1000
    """m, the number of records that are in the training or not, each by a fair coin."""
    confidence: float = 0.95
    """Confidence of each attack's bound."""
    noise_factor: float = 1.0
    """Plant a mistake: multiply the noise by this number below 1, and leave the claim unchanged."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, 1, "num_canaries")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence must be in (0, 1); got {self.confidence}")
        if not 0 <= self.noise_factor <= 1:
            raise ConfigError(f"noise_factor must be from 0 to 1; got {self.noise_factor}")
        if self.data.are_private:
            raise ConfigError(
                f"the data of an audit must be public; got {self.data.dataset}, which is private. Set "
                "--dataset to a public data set; the audit needs the options of the training, not its data"
            )


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """The result of an audit in one training.

    Attributes:
      claimed_epsilon, delta: the claim for all steps.
      largest_epsilon: the bound if every guess was right; no larger claim can be refuted.
      attacks: the guesses of each attacker, by what the attacker sees; each with its own confidence.
      num_canaries: m.
      noise_factor: below 1 with a planted mistake.
      confidence: confidence of each attack's bound.
    """

    claimed_epsilon: float
    delta: float
    largest_epsilon: float
    attacks: dict[str, Guesses]
    num_canaries: int
    noise_factor: float
    confidence: float

    @property
    def is_refuted(self) -> bool:
        """Whether an attack's bound exceeds the claim."""
        return any(attack.epsilon_lower_bound > self.claimed_epsilon for attack in self.attacks.values())

    @property
    def as_expected(self) -> bool:
        """Whether the claim is refuted exactly if a mistake was planted."""
        return self.is_refuted == (self.noise_factor < 1)


# Canaries


@dataclass(eq=False)
class Canaries:
    """The canaries of one training: those that are in have the last rows of the records.

    Attributes:
      first_row: the row of the first canary that is in.
      coordinates: `[num_in]`, each one's own coordinate of the flat gradient.
      groups: the coordinates of the canaries in each group of the last draw, until they are summed.
    """

    first_row: int
    coordinates: NDArray[np.int64]
    groups: list[NDArray[np.int64]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _CanaryStage:
    """Draws groups by the mechanism's own stage, and takes complete groups with a canary from the network."""

    right: GroupStage
    canaries: Canaries
    yields_incomplete: bool = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        groups = self.right.draw(num_records, sampling=sampling, permutation=permutation)
        is_canary = groups.rows >= self.canaries.first_row
        has_canary = is_canary.any(axis=1) & groups.complete
        row_sets = [groups.rows[index][is_canary[index]] for index in np.flatnonzero(has_canary)]
        self.canaries.groups = [
            self.canaries.coordinates[rows - self.canaries.first_row] for rows in row_sets
        ]
        return dataclasses.replace(groups, complete=groups.complete & ~has_canary)


@dataclass(frozen=True, kw_only=True)
class _CanaryClipper(GroupClipper):
    """The mechanism's clipper, which also clips and adds the crafted gradients of groups with canaries."""

    canaries: Canaries

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, objective: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> GroupReport:
        if groups := self.canaries.groups:
            self.canaries.groups = []
            clipper = GroupClipper(l2_clip_norm=self.l2_clip_norm, gamma=self.gamma)
            crafted = Crafted(len(total)).to(total.device)
            for coordinates in groups:
                gradient = torch.zeros(1, 1, 1, len(total), device=total.device)
                gradient[..., torch.from_numpy(coordinates)] = _LONGER * self.l2_clip_norm
                clipper.add_clipped_sum(total, crafted, crafted, gradient)
        return super().add_clipped_sum(total, model, objective, inputs, *args, **kwargs)


class _CanaryMechanism(Mechanism):
    """A mechanism with canaries, perhaps with less noise than it claims."""

    canaries: ClassVar[Canaries]
    noise_factor: ClassVar[float]

    def group_stage(self) -> GroupStage:
        stage: Any = super().group_stage()
        return _CanaryStage(right=stage, canaries=self.canaries)

    def rule(self, loss: LossSettings) -> GradientRule:
        return _CanaryClipper(**vars(super().rule(loss)), canaries=self.canaries)

    def noise(self, *, num_grid_coordinates: int | None = None) -> GaussianNoise:
        noise = super().noise(num_grid_coordinates=num_grid_coordinates)
        return dataclasses.replace(noise, std=self.noise_factor * noise.std)


def _with_canaries(config: TrainingConfig, canaries: Canaries, noise_factor: float) -> TrainingConfig:
    attributes = {"canaries": canaries, "noise_factor": noise_factor}
    return dataclasses.replace(config, mechanism=as_planted(config.mechanism, _CanaryMechanism, **attributes))


# Attacks


class _NoisySums(SingleWorker):
    """The only worker, which records some coordinates of the noisy sum of every step."""

    def __init__(self, coordinates: NDArray[np.int64]) -> None:
        self._coordinates = torch.from_numpy(coordinates)
        self.steps: list[Values] = []

    def gather_shares(self, values: Tensor) -> None:
        self.steps.append(values.cpu()[self._coordinates].double().numpy())


def step_scores(sums: Values, mechanism: Mechanism) -> Values:
    """Return the log-likelihood ratio of "in" to "out" for each canary, `[num_canaries]`.

    A canary that is in adds C to its coordinate at a share q of the steps, and the noise is the claimed one.
    Gradients of other groups are ignored, as they are small at the canaries' coordinates.

    Args:
      sums: noisy sums at the canaries' coordinates, `[steps, num_canaries]`.
      mechanism: the mechanism with its claim.
    """
    norm, q = mechanism.l2_clip_norm, mechanism.sampling_prob
    ratios = norm * (sums - norm / 2) / mechanism.noise().std ** 2
    with np.errstate(divide="ignore"):  # q may be 1
        scores: Values = np.logaddexp(np.log1p(-q), np.log(q) + ratios).sum(axis=0)
    return scores


def quiet_coordinates(training: Training, num_coordinates: int) -> NDArray[np.int64]:
    """Return the coordinates where the clipped sums of some draws are smallest, `[num_coordinates]`.

    The draws are those of a training before its first update, of all records, whatever the coins are.

    Raises:
      ConfigError: the network has fewer trained weights.
    """
    step, squares = training.private_step, no_sum(training.encoder)
    if num_coordinates > len(squares):
        raise ConfigError(
            f"num_canaries must be at most the number of trained weights, {len(squares)}; got "
            f"{num_coordinates}"
        )
    for number in range(_NUM_DRAWS):
        groups = training.in_one_shape(step.draw(number, len(training.data.train)))
        inputs_of = partial(training.inputs, groups, num_augmentations=training.config.num_augmentations)
        total = no_sum(training.encoder)
        step.add_clipped_sum(total, number, groups, inputs_of)
        squares += total**2
    quietest: NDArray[np.int64] = squares.argsort(stable=True)[:num_coordinates].cpu().numpy()
    return quietest


def audit_once(options: OneRunOptions, generator: np.random.Generator | None = None) -> OneRunResult:
    """Train once with canaries, attack the result, and return the bounds.

    Args:
      options: the options of the training and of the audit.
      generator: source of coins, canaries and coordinates; by default seeded by the operating system. The
        bounds hold only if nothing else depends on its draws.

    Raises:
      ConfigError: the training has no finite ε or does not clip groups, or there are too many canaries.
    """
    generator = generator or np.random.default_rng()
    data, _ = load_training_data(options.data)
    config = training_config(
        options.training(),
        num_records=len(data.train),
        public_seed=options.service.seed,
        modality=modality_of(data.train),
        image_shape=image_shape_of(data.train),
        num_classes=num_public_classes(data),
    )
    config = dataclasses.replace(config, evaluation=_NO_SCORES)  # its noise was calibrated with the scores
    records = data.train.take(np.arange(min(len(data.train), config.mechanism.num_records_public)))
    num_canaries = options.num_canaries
    _check(config, len(records), options)
    start = prepare(config, unscored_data(records), SingleWorker())
    coordinates = generator.permutation(quiet_coordinates(start, num_canaries))
    order = generator.permutation(len(records))
    coins: Coins = generator.random(num_canaries) < 0.5
    num_others = len(records) - num_canaries
    rows = np.concatenate([order[:num_others], order[num_others:][coins]])
    canaries = Canaries(first_row=num_others, coordinates=coordinates[coins])
    workers, mechanism = _NoisySums(coordinates), config.mechanism
    trained = _with_canaries(config, canaries, options.noise_factor)
    result = train(trained, unscored_data(records.take(rows)), workers=workers)
    names = [name for name, weight in start.encoder.named_parameters() if weight.requires_grad]
    scores = {
        "every step": step_scores(np.stack(workers.steps), mechanism),
        "the trained weights": (_weights(start.encoder, names) - _weights(result.encoder, names))[
            coordinates
        ],
    }
    delta, confidence = mechanism.target_delta, options.confidence
    attacks = {name: guess_canaries(values, coins, delta, confidence) for name, values in scores.items()}
    return OneRunResult(
        claimed_epsilon=mechanism.epsilon(),
        delta=delta,
        largest_epsilon=largest_epsilon(num_canaries, delta, confidence),
        attacks=attacks,
        num_canaries=num_canaries,
        noise_factor=options.noise_factor,
        confidence=confidence,
    )


def _weights(network: nn.Module, names: Sequence[str]) -> Values:
    """Return the named weights as one vector, in the order of the flat gradient."""
    weights = dict(network.named_parameters())
    return torch.cat([weights[name].detach().cpu().double().flatten() for name in names]).numpy()


def _check(config: TrainingConfig, num_records: int, options: OneRunOptions) -> None:
    """Raise ConfigError for a training that this audit cannot attack, or for too many canaries."""
    mechanism, num_canaries = config.mechanism, options.num_canaries
    if not mechanism.is_private:
        raise ConfigError("an audit needs a finite ε, so noise_multiplier must be positive; got 0")
    if not isinstance(config.rule(), GroupClipper) or mechanism.group_size == BATCH:
        raise ConfigError(
            "an audit crafts one gradient per group, so the method must clip groups of a fixed size; got "
            f"{mechanism.method} with group_size = {mechanism.group_size}"
        )
    if mechanism.num_shards > 1:
        raise ConfigError(
            f"shards must be 1, because this audit trains on one worker; got {mechanism.num_shards}"
        )
    lost = 1 - (1 - num_canaries / num_records / 2) ** int(mechanism.group_size)
    if num_canaries >= num_records or lost > MOST_BLOCKS_LOST:
        raise ConfigError(
            f"num_canaries must be so few that half of them empty at most {MOST_BLOCKS_LOST:.0%} of the "
            f"groups of {mechanism.group_size} among {num_records} records; got {num_canaries}. Lower it"
        )
    if num_canaries * mechanism.target_delta >= 1 - options.confidence:
        raise ConfigError(
            "num_canaries times delta must be less than 1 - confidence; got "
            f"{num_canaries} · {mechanism.target_delta:g} and {options.confidence}. Lower one of them"
        )


# Command line


def table(result: OneRunResult) -> str:
    """Return the result as text, one line for each attack."""
    head = ("the attacker sees", "right guesses", "audited ε ≥", "claimed ε", "claim")
    rows = [head] + [
        (
            name,
            f"{attack.num_right} of {attack.num_guesses}",
            f"{attack.epsilon_lower_bound:.3f}",
            f"{result.claimed_epsilon:.3f}",
            "REFUTED" if attack.epsilon_lower_bound > result.claimed_epsilon else "not refuted",
        )
        for name, attack in result.attacks.items()
    ]
    note = (
        f"Lower bounds at δ = {result.delta:g}, each with confidence {result.confidence:g}.\n"
        f"{result.num_canaries} canaries show at most ε ≥ {result.largest_epsilon:.3f}. "
        "A claim that is not refuted is not proven."
    )
    return "\n".join([*aligned(rows), note])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if the claim is refuted exactly if a mistake was planted, else 1.

    Raises:
      ConfigError: an option is unknown or breaks a rule, or the data are private.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = _without_axes(list(sys.argv[1:] if arguments is None else arguments), Path(folder))
        options = parse_options(OneRunOptions, description=__doc__, arguments=words)
    with errors_in_flags(OneRunOptions):
        result = audit_once(options)
    print(json.dumps(dataclasses.asdict(result)) if options.json else table(result))
    return 0 if result.as_expected else 1


def _without_axes(words: list[str], folder: Path) -> list[str]:
    """Return a command line whose `--config` names a copy of the file without the axes of its sweep."""
    if "--config" not in words[:-1]:
        return words
    at = words.index("--config") + 1
    try:
        content = yaml.safe_load(Path(words[at]).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return words  # the options' own reader reports the problem
    if isinstance(content, dict):
        kept = {"version", "setting", *(each.name for each in dataclasses.fields(OneRunOptions))}
        copy = folder / Path(words[at]).name
        copy.write_text(
            yaml.safe_dump({key: content[key] for key in content if key in kept}), encoding="utf-8"
        )
        words = [*words[:at], str(copy), *words[at + 1 :]]
    return words


if __name__ == "__main__":
    exit_on_bad_input(main)
