"""The plan: every trial of a sweep with its mechanism, checked and calibrated before anything is spent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpgcl_core.accounting.composition import epsilon_prv, epsilon_rdp
from dpgcl_core.accounting.filters import composed_event
from dpgcl_core.accounting.tuning.cost import TrialClass, TuningCost
from dpgcl_core.accounting.tuning.trials import cases_of
from dpgcl_core.errors import ConfigError, DpgclError
from dpgcl_core.mechanism.numbers import GROUPS, default_delta
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.release.noised_counts import split_public
from dpgcl_core.sampling.slots import empty_step_prob, most_empty, share_lost
from sweeps.service.options.data import DataOptions
from sweeps.service.options.release import ReleaseOptions
from sweeps.service.options.restarts import num_restart_steps
from sweeps.service.options.scores import default_score, visible_scores
from sweeps.service.options.service import ledger_url
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.planning.cost import cost_of, cost_tags
from sweeps.service.planning.publication import Publication
from sweeps.service.planning.trials import Charged, Point, Trial, is_proven
from sweeps.service.planning.unread import unread_note, unread_options
from sweeps.service.storage.folder import config_hash
from trainers.config.networks import PrivateStart
from trainers.config.nodes import EvaluationConfig
from trainers.config.optimizers import optimizer_named
from trainers.config.training import TrainingConfig
from trainers.config.tree import changed
from trainers.data.dataset import TrainingData, image_shape_of, modality_of, num_public_classes
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.own import label_place
from trainers.data.records import Records
from trainers.data.rows import row_of_each
from trainers.evaluation.features import first_by_hash
from trainers.tasks.task import task_of
from trainers.training.foreign import foreign_note, refuse_mixing_network
from trainers.training.microbatch import max_views
from trainers.training.release import check_release
from trainers.training.resolve import training_config
from trainers.training.warm_start import starting_encoder, warm_start_note

_WEAK_DELTA = 1e-3
_LARGE_SCORE_ERROR = 0.1
_TAKEN_FROM_DATA = (
    "The number of records is taken from the data and therefore public: what is protected is that any one of "
    "them may be zeroed out, that is, take no part. Give --num-records-public to declare a capacity instead, "
    "for which adding or removing one is protected."
)


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
class Fit:
    """What was planned for a total ε, and is planned again on a resume.

    Attributes:
      total_epsilon: most ε of the whole sweep, as given.
      epsilon: of one training; None where options or points give it.
      repeats: trainings per point.
    """

    total_epsilon: float
    epsilon: float | None
    repeats: int

    def params(self) -> dict[str, Any]:
        """Return it as params of the parent run, which `read` finds in a sweep's folder."""
        found = {"fitted_epsilon": self.epsilon, "fitted_repeats": self.repeats}
        return {"total_epsilon": self.total_epsilon} | {n: v for n, v in found.items() if v is not None}

    @classmethod
    def read(cls, params: Mapping[str, Any]) -> Fit | None:
        """Return what a sweep's params say of it; None where it was fitted to no total."""
        if "total_epsilon" not in params:
            return None
        epsilon, repeats = params.get("fitted_epsilon"), params["fitted_repeats"]
        return cls(total_epsilon=params["total_epsilon"], epsilon=epsilon, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep, complete and checked.

    Attributes:
      question: the sweep's name in scripts and folders, for example `group-size`.
      source: where the data come from, and whether they are private.
      release: what leaves of the sweep.
      repeats: trainings per point.
      num_records_public: n, declared public; those held out for noised scores are among them.
      data: the records.
      trials: in the order they are started; of a sealed sweep, the candidates that it draws from.
      notes: sentences for statement, figure and reports; the terminal shows those that not every sweep has.
      usual_notes: those that every sweep of the kind has: docs/sweeps.md tells of them.
      advice: sentences for the terminal alone, before anything is spent: they promise nothing.
      earlier: the sweep that chose the settings, whose cost is part of this one's.
      later: trials of a sweep that will follow this one, to be told and held against a ledger in advance.
      publication: when a sealed sweep is published, and the cap on its trials; None before that is fixed.
      fit: how it was fitted to a total ε; None where none was given.
    """

    question: str
    source: DataOptions
    release: ReleaseOptions
    repeats: int
    num_records_public: int
    data: TrainingData
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    usual_notes: frozenset[str] = frozenset()
    advice: tuple[str, ...] = ()
    earlier: Earlier | None = None
    later: tuple[Trial, ...] = ()
    publication: Publication | None = None
    fit: Fit | None = None

    @property
    def max_trials(self) -> int | None:
        """The cap on a sealed sweep's number of trials."""
        return self.publication.max_trials if self.publication is not None else None

    @property
    def charged_trials(self) -> tuple[Trial, ...]:
        """All trials that the cost is about: those of an earlier sweep that chose the settings, too."""
        return self.trials if self.earlier is None else (*self.trials, *self.earlier.trials)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """What tells each trial's configuration from others, by its name."""
        return {trial.name: config_hash(trial.config) for trial in self.trials}

    @property
    def fingerprint(self) -> str:
        """Identify everything that decides the results; performance and storage do not.

        It is written down, so the true number of private records must not move it; n does.
        """
        source, release = self.source, self.release
        pairs = {name: getattr(source.pairs, name) for name in source.pairs.given}
        limit = [] if source.max_image_pixels == MAX_IMAGE_PIXELS else [source.max_image_pixels]
        is_secure = source.are_private or any(trial.config.secure_noise for trial in self.trials)
        captions = [] if source.class_captions is None else [source.class_captions]
        content = {
            "trials": [[trial.name, self.hashes[trial.name]] for trial in self.trials],
            "data": [source.dataset, source.image_size, source.unit_column, pairs, *limit, *captions],
            "scored": [source.evaluate_on, source.test_fraction, source.probe_datasets],
            "private": source.are_private,
            "num_records": len(self.data.train) if self.data.train_is_public else None,
            "cryptographic stream": is_secure,
            "release": None if release.is_open else dataclasses.asdict(release),
            "earlier": None if self.earlier is None else self.earlier.sweep_id,
        }
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

    def params(self) -> dict[str, Any]:
        """Return the params of the parent run: what all trials share, and where they differ."""
        shared = dict(self.trials[0].params)
        for trial in self.trials[1:]:
            shared = {k: v for k, v in shared.items() if trial.params.get(k) == v}
        counted = "num_trials" if self.release.is_open else "num_candidates"
        fitted = {} if self.fit is None else self.fit.params()
        return shared | {"question": self.question, counted: len(self.trials)} | fitted

    @property
    def private_starts(self) -> dict[Path, PrivateStart]:
        """Models of the same records that trainings start from, by the file of their weights."""
        starts = [trial.config.warm_start for trial in self.trials]
        return {Path(start.path): start.private for start in starts if start is not None and start.private}

    @property
    def row(self) -> str:
        """What a row of the data is, in words."""
        if modality_of(self.data.train) == "image-text":
            return "image with all its captions"
        labelled = any(trial.config.mechanism.rules.takes_labels for trial in self.trials)
        return "image with its label" if labelled else "row"

    @cached_property
    def cost(self) -> TuningCost | None:
        """The cost of the whole sweep, set in advance; None where no trial has a guarantee."""
        drawn = self.earlier.drawn if self.earlier is not None else None
        return cost_of(self.release, self.charged_trials, drawn, self.max_trials)

    def tags(self, cost: TuningCost | None = None) -> dict[str, str]:
        """Return the tags of every run, with the cost in advance or the one given."""
        tags = cost_tags(self.release, self.charged_trials, cost or self.cost) | {
            "data_is": "private" if self.source.are_private else "public",
            "notes": " ".join(self.notes),
        }
        if self.publication is not None:
            tags["published_after_seconds"] = f"{self.publication.interval_seconds:g}"
        if not self.source.are_private:
            tags["research"] = "un-noised scores and SNR of public data are logged"
        return tags


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made of.

    Attributes:
      question: name of the sweep.
      options: the user's; a point replaces some of them.
      points: what is compared.
      data: the records, as `load_training_data` gives them.
      calibration_folder: where calibrations are kept; None for nowhere.
      notes: what must be said about the data.
      earlier: the sweep that chose the points' settings; None without one.
    """

    question: str
    options: SweepOptions
    points: Sequence[Point]
    data: TrainingData
    calibration_folder: Path | None
    notes: Sequence[str] = ()
    earlier: Earlier | None = None


def build_plan(inputs: PlanInputs) -> SweepPlan:
    """Return the plan of a sweep over its points, each repeated `repeats` times.

    Raises:
      ConfigError: an option breaks a rule.
    """
    if not inputs.points:
        raise ConfigError("a sweep needs at least one point: give every axis at least one value")
    options, data, earlier = inputs.options, inputs.data, inputs.earlier
    source, release = options.data, options.release
    told = list(inputs.notes)
    n = options.mechanism.num_records_public or num_records(data)
    if options.mechanism.num_records_public is None:
        told.insert(0, _TAKEN_FROM_DATA)
    if (delta := options.mechanism.delta or default_delta(n)) > _WEAK_DELTA:
        told.append(f"With so few records δ = {delta:.2g}, which is too large to promise much.")
    points = _configs(inputs)
    configs = [config for _, config in points]
    if not configs:
        raise ConfigError(
            "no trial is left: with private data, and in sealed sweeps, trials with epsilon = inf are not "
            "run; give a finite epsilon"
        )
    _check_networks(configs, data)
    networks = [config.network for config in configs]
    if any(each.mixes_no_records for each in networks) and not any(each.is_foreign for each in networks):
        raise ConfigError(
            "--mixes-no-records is your word for a network of your own (package.module:factory), and "
            f"{networks[0].name} is this package's: leave it out"
        )
    told += _noise_of_scores(configs)
    trials = _trials(options, points, data)
    usual = [_TAKEN_FROM_DATA, *_sampling_notes(configs)]
    told += usual[1:]
    if options.service.early_stopping != "none":
        told.append(
            f"Trainings may be ended early by their scores on the way ({options.service.early_stopping}); "
            "every ε counts all planned steps of each."
        )
    usual += _unit_notes(source, data, configs)
    told += _noised_notes(trials[0].config, n) + _unit_notes(source, data, configs)
    told += dict.fromkeys(note for config in configs if (note := warm_start_note(config)))
    told += dict.fromkeys(note for config in configs if (note := foreign_note(config)))
    if earlier is not None:
        told.append(
            f"Each row's setting is the best of the same grid ({earlier.grid}), chosen by the "
            f"{len(earlier.trials)} trainings of the sweep {earlier.sweep}, whose cost is part of the cost "
            "of the whole sweep."
        )
    plan = SweepPlan(
        question=inputs.question,
        source=source,
        release=release,
        repeats=options.service.repeats,
        num_records_public=n,
        data=data,
        trials=tuple(trials),
        notes=tuple(told),
        usual_notes=frozenset(usual),
        advice=tuple(unread_note(unread_options(options.network, [trial.params for trial in trials]))),
        earlier=earlier,
    )
    if not release.is_open:
        _check_sealed_plan(plan)
    elif source.are_private and plan.cost is not None and plan.cost.reason is not None:
        raise ConfigError(f"private data are trained on at a total cost that is known: {plan.cost.reason}")
    return plan


def _check_sealed_plan(plan: SweepPlan) -> None:
    """Refuse candidates without a guarantee, or without a score to select by that is public or noised.

    Raises:
      ConfigError: as said.
    """
    for trial in plan.trials:
        if not is_proven(trial):
            raise ConfigError(
                f"a sealed sweep draws among trainings with a guarantee only, and {trial.name} has label "
                f"{trial.config.guarantee_label!r}; give a finite epsilon and methods that are proven"
            )
        if not trial.config.mechanism.rules.plain_event:
            raise ConfigError(
                f"the bounds on a secret choice are for Poisson-sampled Gaussian steps, and "
                f"{trial.config.mechanism.method} has others: use --release open"
            )
    if plan.data.queries is None or not plan.data.evaluation_is_public:
        raise ConfigError(
            "a sealed sweep selects by a score on public data, or by a noised one, for a bare score on "
            "private records would release them through the choice; give --evaluate-on a public labelled "
            "data set"
        )
    found = visible_scores(plan.data, plan.trials[0].config.mechanism.method)
    if plan.release.select_by not in found:
        raise ConfigError(
            f"no trial on these data has the score to select by, {plan.release.select_by!r}; they have "
            f"{', '.join(found)}"
        )


def planned_trials(inputs: PlanInputs) -> list[Trial]:
    """Return the trials of a sweep, calibrated, without a look at their networks: for who searches a plan.

    Raises:
      ConfigError: an option breaks a rule.
    """
    return _trials(inputs.options, _configs(inputs), inputs.data)


def _trials(
    options: SweepOptions, configs: Sequence[tuple[Point, TrainingConfig]], data: TrainingData
) -> list[Trial]:
    trials = []
    of_data = {each: _data_params(data, each) for each in {config.evaluation for _, config in configs}}
    for repeat in range(options.service.repeats if options.release.is_open else 1):
        for point, config in configs:
            config = dataclasses.replace(config, public_seed=options.service.seed + repeat)
            params = _params(config, options, point, repeat) | of_data[config.evaluation]
            trials.append(Trial(name=f"{point.label}-r{repeat}", config=config, params=params))
    return trials


def trial_at(inputs: PlanInputs, point: Point) -> Trial:
    """Return the training at one point, which names it: for sweeps that choose while they run."""
    ((_, config),) = _configs(dataclasses.replace(inputs, points=[point]))
    _check_networks([config], inputs.data)
    params = _params(config, inputs.options, point, 0) | _data_params(inputs.data, config.evaluation)
    return Trial(name=point.label, config=config, params=params)


def _noise_of_scores(configs: Sequence[TrainingConfig]) -> list[str]:
    """Return what the noise does to the noised scores, so that nobody pays for noise alone."""
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


def _configs(inputs: PlanInputs) -> list[tuple[Point, TrainingConfig]]:
    """Return the checked training of every point that may be run on these data."""
    options, data = inputs.options, inputs.data
    found: list[tuple[Point, TrainingConfig]] = []
    device, held_out = _device(options), options.evaluation.score_on_held_out
    declared = options.mechanism.num_records_public
    the_same = (
        ("score_on_held_out", held_out, "a record to be trained on by all or scored by all"),
        ("num_records_public", declared, "one promise to hold for them together"),
    )
    private, is_open = options.data.are_private, options.release.is_open
    restart_steps = num_restart_steps(options)
    for point in inputs.points:
        for name, given, why in the_same:
            if point.changes.get(name, given) != given:
                raise ConfigError(
                    f"{name} must be the same in all trials of a sweep, for {why}; got {given} and, at the "
                    f"point {point.label}, {point.changes[name]}"
                )
        restarts = {"restart_steps": restart_steps}  # one number, for one note and one word of them
        here = changed(options.training(), **{**point.changes, **restarts, "device": device})
        method = method_named(here.mechanism.method)
        if here.mechanism.epsilon == math.inf or method.label == "none":
            if private or not is_open:
                continue
            here = changed(here, noise_multiplier=None, restart_steps=None)
        if private and method.label == "as-published":
            raise ConfigError(
                f"{method.name} is as-published: its guarantee does not hold, and it is refused with "
                "private data; `python -m dpgcl_core.methods` lists what is proven"
            )
        if private and here.mechanism.tan_factor > 1 and ledger_url(options.data, options.ledger) is None:
            raise ConfigError(
                "tan_factor trains at an ε of its own that is far above the target, so on private data it "
                "must be charged: give --ledger, which reserves it, or search on public data"
            )
        config = training_config(
            here,
            num_records=num_records(data),
            public_seed=options.service.seed,
            modality=modality_of(data.train),
            calibration_folder=inputs.calibration_folder,
            image_shape=image_shape_of(data.train),
            num_classes=num_public_classes(data),
            charged_to=_charged_to(options),
        )
        check_release(config, data)
        if task_of(config).learns_labels and isinstance(data.train, Records) and data.train.labels is None:
            place = label_place(options.data.dataset)
            raise ConfigError(f"{method.name} learns labels, and the data have none: give {place}")
        task_of(config).check(config, data.train)
        found.append((point, _scored_on_the_way(config, options, data)))
    return found


def _scored_on_the_way(config: TrainingConfig, options: SweepOptions, data: TrainingData) -> TrainingConfig:
    """Return a training with the scores on the way that it may be ended by: every tenth of its steps.

    Raises:
      ConfigError: no score of it on the way may be seen.
    """
    if options.service.early_stopping == "none":
        return config
    method = config.mechanism.method
    score = default_score(modality_of(data.train), method)
    if score not in visible_scores(data, method):
        raise ConfigError(
            f"early_stopping compares trainings by their {score} on the way, which must be of public "
            "records: give --evaluate-on a public data set, or leave it out"
        )
    tenth = max(1, config.mechanism.num_steps // 10)
    every = config.evaluation.score_every_steps or tenth
    return dataclasses.replace(
        config, evaluation=dataclasses.replace(config.evaluation, score_every_steps=every)
    )


def _check_networks(configs: Sequence[TrainingConfig], data: TrainingData) -> None:
    """Build each network once, and refuse those that no step should see."""
    for config in _first_of_each(configs, lambda c: (c.network, c.optimizer, c.per_tower_clipping)):
        _check_network(config, data)
    _check_words([config for config in configs if config.network.mixes_no_records], data)


def _first_of_each(
    configs: Sequence[TrainingConfig], key: Callable[[TrainingConfig], tuple[object, ...]]
) -> list[TrainingConfig]:
    """The first training of every kind."""
    found: dict[tuple[object, ...], TrainingConfig] = {}
    for config in configs:
        found.setdefault(key(config), config)
    return list(found.values())


def _charged_to(options: SweepOptions) -> str | None:
    """Return the data set's id in the ledger that private trainings are charged to; None without."""
    charged = options.data.are_private and ledger_url(options.data, options.ledger) is not None
    return options.ledger.dataset_id if charged else None


def _device(options: SweepOptions) -> str:
    """Return the device of every training: a GPU only where Ray sets one aside."""
    device, gpus = options.performance.device, options.service.gpus_per_worker
    if device == "cuda" and not gpus:
        raise ConfigError("device cuda needs gpus_per_worker, for Ray to set a GPU aside; got 0")
    return ("cuda" if gpus else "cpu") if device == "auto" else device


def _check_network(config: TrainingConfig, data: TrainingData) -> None:
    """Build the network once, so that no worker finds it or the optimizer unknown, or mixing records."""
    torch.set_num_threads(config.performance.threads_per_worker)  # one per core would wait for each other
    shape = image_shape_of(data.train)
    encoder = starting_encoder(config, shape)
    task_of(config).check_network(config, encoder, shape)
    optimizer_named(config.optimizer.name)  # not built: torch's optimizers load its compiler, a second


def _check_words(configs: Sequence[TrainingConfig], data: TrainingData) -> None:
    """Try networks that mix nothing on their author's word at the sizes of their steps, on made-up inputs.

    Every worker does so, too, with the memory and the device of its own; but what it finds comes after the
    charge, and is withheld where the data are private. Here nothing but made-up inputs has been seen, and
    nothing been reserved.

    Raises:
      ConfigError: as `refuse_mixing_network`, or a network fails.
    """

    def passes(config: TrainingConfig) -> tuple[object, ...]:
        mechanism = config.mechanism
        sizes = (mechanism.group_size, mechanism.sampling_prob, mechanism.batch_cap)
        return config.network, mechanism.method, sizes, config.num_augmentations

    for config in _first_of_each(configs, passes):
        shape = image_shape_of(data.train)
        encoder = starting_encoder(config, shape)
        try:
            refuse_mixing_network(config, encoder, shape, max_views(config, encoder, shape))
        except (DpgclError, MemoryError):
            raise
        except Exception as error:  # a user's network may fail in any way
            raise ConfigError(
                f"the network {config.network.name} fails on made-up images, as many as a step passes at "
                f"once: {type(error).__name__}: {error}"
            ) from error


def _params(config: TrainingConfig, options: SweepOptions, point: Point, repeat: int) -> dict[str, Any]:
    """Return a trial's params: every setting, the target, and the cross-checks of its ε."""
    mechanism = config.mechanism
    here, source = changed(options.training(), **point.changes), options.data
    target = here.mechanism.target_epsilon() if mechanism.is_private else math.inf
    params = config.as_params() | {
        "dataset": source.dataset,
        "scored_on": source.evaluate_on or (None if source.are_private else source.dataset),
        "target_epsilon": target,
        "expected_batch_size": mechanism.expected_batch_size,
        "sensitivity": mechanism.sensitivity,
        "randomness": config.randomness(data_are_private=source.are_private).description,
        "neighboring_relation": mechanism.neighboring_relation,
        "sampling": mechanism.rules.sampling,
        "repeat": repeat,
        "num_records_public_source": "declared"
        if options.mechanism.num_records_public is not None
        else "size of the data set, then public",
    }
    if config.evaluation.score_noise_multiplier is not None:
        params["num_scored_public"] = config.num_scored_public
    if here.mechanism.tan_factor > 1:
        params["tan_factor"] = here.mechanism.tan_factor
    if target is None or here.mechanism.tan_factor > 1:
        params["target_epsilon"] = round(config.epsilon(), 4)
    return params | dict(point.params)


def _data_params(data: TrainingData, evaluation: EvaluationConfig) -> dict[str, Any]:
    """Return what a trial's params tell of the records: their images' shape, and how many public ones score.

    `num_scored_records`, and with labels `scored_majority_share`, the share of the most frequent class.
    """
    params: dict[str, Any] = {"image_shape": list(data.train.images.shape[1:])}
    queries = data.queries
    if queries is None or not data.evaluation_is_public:
        return params
    scored = first_by_hash(queries.ids, evaluation.max_query_records)
    params["num_scored_records"] = len(scored)
    if queries.labels is not None:
        labels = queries.labels[row_of_each(queries.row_starts, queries.ids, scored)]
        params["scored_majority_share"] = float(np.unique_counts(labels).counts.max() / len(scored))
    return params


def num_records(data: TrainingData) -> int:
    """The records that the guarantee is about: those trained on, and those held out."""
    return len(data.train) + (len(data.scored) if data.scored is not None else 0)


def _sampling_notes(configs: Sequence[TrainingConfig]) -> list[str]:
    """Say what sampling groups costs in empty steps and slots, at the largest S: from public numbers."""
    mechanisms = [config.mechanism for config in configs if config.mechanism.sampling == GROUPS]
    if not mechanisms:
        return []
    largest = max(mechanisms, key=lambda mechanism: int(mechanism.group_size))
    capacity, size = largest.num_records_public, int(largest.group_size)
    empty = empty_step_prob(capacity, size, largest.sampling_prob)
    note = (
        f"Groups are sampled, so one record moves a step's sum by C. At S = {size} a step draws no group "
        f"with probability {empty:.1g}"
    )
    if not largest.num_records_from_data:
        hundredth = math.ceil(capacity / 100)
        lost = share_lost(capacity, hundredth, size)
        note += (
            f"; {hundredth} empty slots of the {capacity} would cost {lost:.0%} of the groups, and more than "
            f"{most_empty(capacity, size)} are refused"
        )
    return [f"{note}."]


def _noised_notes(config: TrainingConfig, num_records_public: int) -> list[str]:
    """Sentences about noised releases, from public numbers alone."""
    notes = []
    if share := config.evaluation.score_on_held_out:
        _, held_out = split_public(num_records_public, share)
        notes.append(
            f"A share of {share:g} of the slots, {held_out}, is not trained on but scored with noise; each "
            "record got its slot at random when it was first seen."
        )
    if config.evaluation.snr_noise_multiplier is not None:
        notes.append("The first step's SNR is released with noise; it is charged in ε.")
    return notes


def _unit_notes(source: DataOptions, data: TrainingData, configs: Sequence[TrainingConfig]) -> list[str]:
    """Say what a record is where that is not one row, or more than its image is learned."""
    labelled = any(config.mechanism.rules.takes_labels for config in configs)
    if source.unit_column is not None:
        rows = "rows, images and labels," if labelled else "rows"
        return [f"One record is all {rows} with the same value of {source.unit_column}."]
    if labelled:
        return ["One record is one image with its label: both are protected together."]
    if modality_of(data.train) == "image-text":
        return ["One record is one image with all its captions."]
    return []


def cross_checks(trial: TrialClass, delta: float) -> dict[str, float]:
    """Return ε of all that one trial releases by the two other accountants; PRV knows plain steps only."""
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
