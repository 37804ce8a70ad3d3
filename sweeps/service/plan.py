"""The plan: every trial of a sweep with its mechanism, checked and calibrated before anything is spent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dpgcl_core.accounting.composition import epsilon_prv, epsilon_rdp
from dpgcl_core.accounting.filters import composed_event
from dpgcl_core.accounting.tuning.cost import OPEN, TrialClass, TuningCost
from dpgcl_core.accounting.tuning.trials import cases_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.numbers import default_delta
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.noise.chacha20 import choose_randomness
from sweeps.service.data import load_training_data
from sweeps.service.options import SweepOptions
from sweeps.service.release import Charged, check_sealed_plan, cost_of, cost_tags
from sweeps.service.storage import config_hash
from trainers.config.training import TrainingConfig
from trainers.data.dataset import image_shape_of, modality_of
from trainers.tasks.task import task_of
from trainers.training.loop import TrainingData
from trainers.training.optimizers import check_optimizer
from trainers.training.release import check_release
from trainers.training.warm_start import starting_encoder, warm_start_note

_WEAK_DELTA = 1e-3
_LARGE_SCORE_ERROR = 0.1


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep: the options that differ from the sweep's own.

    Attributes:
      label: short name of the point, fit for a file name.
      changes: option values by name; `epsilon = inf` is a trial without noise and clipping.
      params: what MLflow shows of it besides its settings, for example the name of what is compared.
    """

    label: str
    changes: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep.

    Attributes:
      name: unique in the sweep, fit for a file name.
      config: the training.
      params: what MLflow shows of it.
    """

    name: str
    config: TrainingConfig
    params: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A sweep on the same records whose results chose the settings of another one.

    Attributes:
      sweep: its name.
      sweep_id: random; a sweep that it chose the settings of belongs to it alone.
      trials: its trials.
      drawn: what each of them may have drawn, by name.
      grid: the settings among which was chosen, in words.
    """

    sweep: str
    sweep_id: str
    trials: tuple[Trial, ...]
    drawn: Mapping[str, Charged]
    grid: str


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep, complete and checked.

    Attributes:
      question: the sweep's name in scripts and folders, for example `group-size`.
      options: as given.
      data: the records.
      trials: in the order they are started; of a sealed sweep, the candidates that it draws from.
      notes: sentences for terminal, figure and reports.
      earlier: the sweep that chose the settings, whose cost is part of this one's.
      later: trials of a sweep that will follow this one, to be told and held against a ledger in advance.
    """

    question: str
    options: SweepOptions
    data: TrainingData
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    earlier: Earlier | None = None
    later: tuple[Trial, ...] = ()

    @property
    def charged_trials(self) -> tuple[Trial, ...]:
        """All trials that the cost is about: those of an earlier sweep that chose the settings, too."""
        return self.trials if self.earlier is None else (*self.trials, *self.earlier.trials)

    @property
    def num_records_public(self) -> int:
        """n, declared public; those held out for noised scores are among them."""
        return _num_records_public(self.options, self.data)

    @property
    def fingerprint(self) -> str:
        """Identifies everything that decides the results; performance and storage do not.

        It is written down, so the true number of private records must not move it; n does.
        """
        num_records = len(self.data.train) if self.data.train_is_public else None
        content: list[Any] = [[trial.name, config_hash(trial.config)] for trial in self.trials]
        content.append([self.options.dataset, self.options.image_size, self.options.evaluate_on])
        content.append([self.options.data_are_private, self.options.test_fraction, num_records])
        content.append(self.options.unit_column)
        if self.options.pairs.given:
            given = {name: getattr(self.options.pairs, name) for name in self.options.pairs.given}
            content.append(["pairs", given])
        content += [["probe_datasets", *self.options.probe_datasets]] if self.options.probe_datasets else []
        if self.options.data_are_private or self.options.secure_noise:
            content.append("cryptographic stream")
        if self.options.release != OPEN:
            names = ("release", "mean_trials", "eta", "bound", "halting_prob", "min_score", "select_by")
            content.append([getattr(self.options, name) for name in names])
        if self.earlier is not None:
            content.append(self.earlier.sweep_id)
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def params(self) -> dict[str, Any]:
        """Returns the params of the parent run: what all trials share, and where they differ."""
        shared = dict(self.trials[0].params)
        for trial in self.trials[1:]:
            shared = {k: v for k, v in shared.items() if trial.params.get(k) == v}
        counted = "num_trials" if self.options.release == OPEN else "num_candidates"
        return shared | {"question": self.question, counted: len(self.trials)}

    @cached_property
    def cost(self) -> TuningCost | None:
        """The cost of the whole sweep, set in advance; None where no trial has a guarantee."""
        drawn = self.earlier.drawn if self.earlier is not None else None
        return cost_of(self.options, self.charged_trials, drawn)

    def tags(self, cost: TuningCost | None = None) -> dict[str, str]:
        """Returns the tags of every run, with the cost in advance or the one given."""
        tags = cost_tags(self.options, self.charged_trials, cost or self.cost) | {
            "data_is": "private" if self.options.data_are_private else "public",
            "notes": " ".join(self.notes),
        }
        if not self.options.data_are_private:
            tags["research"] = "un-noised scores and SNR of public data are logged"
        return tags


def build_plan(
    question: str,
    options: SweepOptions,
    points: Sequence[Point],
    *,
    calibration_folder: Path | None,
    earlier: Earlier | None = None,
    loaded: tuple[TrainingData, list[str]] | None = None,
) -> SweepPlan:
    """Returns the plan of a sweep over `points`, each repeated `options.repeats` times.

    The data are read unless `loaded` has them, as `load_training_data` gives them.

    Raises:
      ConfigError: an option breaks a rule.
      DataError: the data are missing or unusable.
    """
    if not points:
        raise ConfigError("a sweep needs at least one point: give every axis at least one value")
    if options.data_are_private and options.seeded_non_private:
        raise ConfigError("seeded_non_private has no guarantee and is refused with private data")
    choose_randomness(
        secure_noise=options.secure_noise,
        data_are_private=options.data_are_private,
        public_seed=options.seed if options.seeded_non_private else None,
    )
    data, notes = loaded or load_training_data(options)
    n = _num_records_public(options, data)
    if (delta := options.delta or default_delta(n)) > _WEAK_DELTA:
        notes.append(f"With so few records δ = {delta:.2g}, which is too large to promise much.")
    configs = _configs(options, points, data, calibration_folder)
    if not configs:
        raise ConfigError(
            "no trial is left: with private data, and in sealed sweeps, trials with epsilon = inf are not "
            "run; give a finite epsilon"
        )
    notes += _noise_of_scores([config for _, config in configs])
    trials = []
    for repeat in range(options.repeats if options.release == OPEN else 1):
        for point, config in configs:
            config = dataclasses.replace(config, public_seed=options.seed + repeat)
            params = _params(config, options, point, repeat)
            params["image_shape"] = list(data.train.images.shape[1:])
            trials.append(Trial(name=f"{point.label}-r{repeat}", config=config, params=params))
    notes += _noised_notes(trials[0].config, options) + _unit_notes(options, data)
    notes += dict.fromkeys(note for _, config in configs if (note := warm_start_note(config)))
    if earlier is not None:
        notes.append(
            f"Each row's setting is the best of the same grid ({earlier.grid}), chosen by the "
            f"{len(earlier.trials)} trainings of the sweep {earlier.sweep}, whose cost is part of the cost "
            "of the whole sweep."
        )
    plan = SweepPlan(
        question=question,
        options=options,
        data=data,
        trials=tuple(trials),
        notes=tuple(notes),
        earlier=earlier,
    )
    if options.release != OPEN:
        check_sealed_plan(plan)
    elif options.data_are_private and plan.cost is not None and plan.cost.reason is not None:
        raise ConfigError(f"private data are trained on at a total cost that is known: {plan.cost.reason}")
    return plan


def trial_at(
    options: SweepOptions, point: Point, data: TrainingData, calibration_folder: Path | None
) -> Trial:
    """Returns the training at one point, which names it: for sweeps that choose while they run."""
    ((_, config),) = _configs(options, [point], data, calibration_folder)
    params = _params(config, options, point, 0) | {"image_shape": list(data.train.images.shape[1:])}
    return Trial(name=point.label, config=config, params=params)


def _noise_of_scores(configs: Sequence[TrainingConfig]) -> list[str]:
    """Returns what the noise does to the noised scores, so that nobody pays for noise alone."""
    errors = [
        noise / config.num_scored_public
        for config in configs
        if (noise := config.evaluation.score_noise_multiplier) is not None
    ]
    if not errors:
        return []
    error = max(errors)
    warning = "; more records held out, or less noise, would tell more" if error > _LARGE_SCORE_ERROR else ""
    return [f"A noised accuracy has noise of standard deviation {error:.2g} in it{warning}."]


def _configs(
    options: SweepOptions, points: Sequence[Point], data: TrainingData, calibration_folder: Path | None
) -> list[tuple[Point, TrainingConfig]]:
    """Returns the checked training of every point that may be run on these data."""
    found: list[tuple[Point, TrainingConfig]] = []
    device = _device(options)
    for point in points:
        if point.changes.get("score_on_held_out", options.score_on_held_out) != options.score_on_held_out:
            raise ConfigError(
                "score_on_held_out must be the same in all trials of a sweep, for a record to be trained on "
                f"by all or scored by all; got {options.score_on_held_out} and, at the point {point.label}, "
                f"{point.changes['score_on_held_out']}"
            )
        setting = dataclasses.replace(options.training_setting(), **point.changes, device=device)
        if setting.epsilon == math.inf or method_named(setting.method).label == "none":
            if options.data_are_private or options.release != OPEN:
                continue
            setting = dataclasses.replace(setting, noise_multiplier=None)
        if options.data_are_private and method_named(setting.method).label == "as-published":
            raise ConfigError(
                f"{setting.method} is as-published: its guarantee does not hold, and it is refused with "
                "private data; `python -m dpgcl_core.methods` lists what is proven"
            )
        config = setting.training_config(
            num_records=_num_records(data),
            public_seed=options.seed,
            modality=modality_of(data.train),
            calibration_folder=calibration_folder,
        )
        task_of(config).check(config, data.train)
        check_release(config, data)
        if not any(
            config.network == c.network
            and config.optimizer == c.optimizer
            and config.per_tower_clipping == c.per_tower_clipping
            for _, c in found
        ):
            _check_network(config, data)
        found.append((point, config))
    return found


def _device(options: SweepOptions) -> str:
    """Returns the device of every training: a GPU only where Ray sets one aside."""
    if options.device == "cuda" and not options.gpus_per_worker:
        raise ConfigError("device cuda needs gpus_per_worker, for Ray to set a GPU aside; got 0")
    return ("cuda" if options.gpus_per_worker else "cpu") if options.device == "auto" else options.device


def _check_network(config: TrainingConfig, data: TrainingData) -> None:
    """Builds the network once, so that no worker finds it or the optimizer unknown, or mixing records."""
    torch.set_num_threads(config.performance.threads_per_worker)  # one per core would wait for each other
    shape = image_shape_of(data.train)
    task_of(config).check_network(config, starting_encoder(config, shape), shape)
    check_optimizer(config.optimizer.name)  # not built: torch's optimizers load its compiler, a second


def _params(config: TrainingConfig, options: SweepOptions, point: Point, repeat: int) -> dict[str, Any]:
    """Returns a trial's params: every setting, the target, and the cross-checks of its ε."""
    mechanism = config.mechanism
    setting = dataclasses.replace(options.training_setting(), **point.changes)
    target = setting.target_epsilon() if mechanism.is_private else math.inf
    params = config.as_params() | {
        "dataset": options.dataset,
        "scored_on": options.evaluate_on or (None if options.data_are_private else options.dataset),
        "target_epsilon": target,
        "expected_batch_size": mechanism.expected_batch_size,
        "sensitivity": mechanism.sensitivity,
        "randomness": config.randomness(data_are_private=options.data_are_private).description,
        "neighboring_relation": mechanism.neighboring_relation,
        "sampling": mechanism.rules.sampling,
        "repeat": repeat,
        "num_records_public_source": "declared"
        if options.num_records_public is not None
        else "size of the data set, then public",
    }
    if target is None:
        params["target_epsilon"] = round(config.epsilon(), 4)
    return params | dict(point.params)


def _num_records(data: TrainingData) -> int:
    """The records that the guarantee is about: those trained on, and those held out."""
    return len(data.train) + (len(data.scored) if data.scored is not None else 0)


def _num_records_public(options: SweepOptions, data: TrainingData) -> int:
    return options.num_records_public or _num_records(data)


def _noised_notes(config: TrainingConfig, options: SweepOptions) -> list[str]:
    """Sentences about noised releases, from public numbers alone."""
    notes = []
    if share := options.score_on_held_out:
        notes.append(
            f"A share of {share:g} of the private records, about {config.num_scored_public}, is not trained "
            "on but scored with noise; which ones depends on the hash of each record's id."
        )
    if options.snr_noise_multiplier is not None:
        notes.append("The first step's SNR is released with noise; it is charged in ε.")
    return notes


def _unit_notes(options: SweepOptions, data: TrainingData) -> list[str]:
    """Says what a record is where that is not one row."""
    if options.unit_column is not None:
        return [f"One record is all rows with the same value of {options.unit_column}."]
    if modality_of(data.train) == "image-text":
        return ["One record is one image with all its captions."]
    return []


def cross_checks(trial: TrialClass, delta: float) -> dict[str, float]:
    """Returns ε of all that one trial releases by the two other accountants; PRV knows plain steps only."""
    events = [composed_event(steps) for (steps,) in cases_of([trial])]
    checks = {"epsilon_rdp": max(epsilon_rdp(event, delta) for event in events)}
    if trial.joint_noise_multiplier is None and trial.score_noise_multiplier is None:
        checks["epsilon_prv"] = epsilon_prv(
            sampling_prob=trial.sampling_prob,
            noise_multiplier=trial.noise_multiplier,
            num_steps=trial.num_steps,
            delta=delta,
        )
    return checks
