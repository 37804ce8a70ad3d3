"""The plan: every trial of a sweep with its mechanism, checked and calibrated before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpgcl_core.accounting.composition import epsilon_prv, epsilon_rdp
from dpgcl_core.accounting.filters import composed_event
from dpgcl_core.accounting.tuning.cost import TrialClass, TuningCost
from dpgcl_core.accounting.tuning.trial_release import cases_of
from dpgcl_core.errors import ConfigError
from dpgcl_core.release.statement import rounded_up
from sweeps.service.options.data import DataOptions
from sweeps.service.options.release_options import ReleaseOptions
from sweeps.service.options.score_options import visible_scores
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import EarlierSweep, PlanInputs, earlier_draws, earlier_trials
from sweeps.service.planning.notes import plan_notes
from sweeps.service.planning.publication import Publication
from sweeps.service.planning.sweep_cost import cost_of, cost_tags
from sweeps.service.planning.trial_configs import check_networks, trial_configs
from sweeps.service.planning.trials import Point, Trial, is_proven
from sweeps.service.planning.unused_options import unread_note, unread_options
from sweeps.service.storage.sweep_folder import config_hash, content_hash
from trainers.config.networks import PrivateStart
from trainers.config.nodes import EvaluationConfig
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData, modality_of
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.rows import row_of_each
from trainers.evaluation.features import first_by_hash


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The values that fit a sweep to a total ε; its folder stores them for a resume.

    Attributes:
      total_epsilon: the requested maximum ε of the whole sweep.
      epsilon: ε of one training; None if options or points set it.
      repeats: trainings per point.
    """

    total_epsilon: float
    epsilon: float | None
    repeats: int

    def params(self) -> dict[str, Any]:
        """Return the fit as params of the MLflow parent run, from which `read` restores it."""
        fit_params = {"fitted_epsilon": self.epsilon, "fitted_repeats": self.repeats}
        return {"total_epsilon": self.total_epsilon} | {n: v for n, v in fit_params.items() if v is not None}

    @classmethod
    def read(cls, params: Mapping[str, Any]) -> Fit | None:
        """Return the fit in a sweep's params; None if the sweep was not fitted to a total."""
        if "total_epsilon" not in params:
            return None
        epsilon, repeats = params.get("fitted_epsilon"), params["fitted_repeats"]
        return cls(total_epsilon=params["total_epsilon"], epsilon=epsilon, repeats=repeats)


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep, complete and checked.

    Attributes:
      question: the sweep's name in scripts and folders, for example `group-size`.
      source: the origin of the data, and whether they are private.
      release: the results that the sweep releases.
      repeats: trainings per point.
      num_records_public: n, which is public; it includes the records held out for noised scores.
      data: the records.
      trials: the trials in the order of their starts; for a sealed sweep, the candidates that it draws from.
      notes: sentences for statement, figure and reports; the terminal leaves out the usual ones.
      usual_notes: notes that every sweep of the kind has; docs/sweeps.md describes them.
      advice: sentences only for the terminal, before anything is spent; not part of the guarantee.
      earlier: the sweeps whose results decide on the settings; their cost is part of this sweep's cost.
      later: trials of a sweep that will follow this sweep, checked against a ledger in advance.
      publication: the time of a sealed sweep's publication, and the cap on its trials; None until fixed.
      fit: the fit to a total ε; None if no total was requested.
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
    earlier: tuple[EarlierSweep, ...] = ()
    later: tuple[Trial, ...] = ()
    publication: Publication | None = None
    fit: Fit | None = None

    @property
    def max_trials(self) -> int | None:
        """The cap on a sealed sweep's number of trials."""
        return self.publication.max_trials if self.publication is not None else None

    @property
    def charged_trials(self) -> tuple[Trial, ...]:
        """All trials that the cost is about, including those of earlier sweeps."""
        return (*self.trials, *earlier_trials(self.earlier))

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The hash that identifies each trial's configuration, by the trial's name."""
        return {trial.name: config_hash(trial.config) for trial in self.trials}

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that decides the results; performance and storage do not.

        It is stored, so it must not depend on the true number of private records; it depends on n, which is
        public.
        """
        release = self.release
        is_secure = self.source.are_private or any(trial.config.secure_noise for trial in self.trials)
        facts = {
            "trials": [[trial.name, self.hashes[trial.name]] for trial in self.trials],
            "cryptographic stream": is_secure,
            "release": None if release.is_open else asdict(release),
            "earlier": [earlier.sweep_id for earlier in self.earlier] or None,
        }
        return content_hash(data_facts(self.source, self.data) | facts)

    def params(self) -> dict[str, Any]:
        """Return the parent run's params: values that all trials share, question, number of trials, fit."""
        shared = dict(self.trials[0].params)
        for trial in self.trials[1:]:
            shared = {k: v for k, v in shared.items() if trial.params.get(k) == v}
        count_name = "num_trials" if self.release.is_open else "num_candidates"
        fit_params = {} if self.fit is None else self.fit.params()
        return shared | {"question": self.question, count_name: len(self.trials)} | fit_params

    @property
    def private_starts(self) -> dict[Path, PrivateStart]:
        """Models trained on the same records that trainings start from, by the file of their weights."""
        starts = [trial.config.warm_start for trial in self.charged_trials]
        return {Path(start.path): start.private for start in starts if start is not None and start.private}

    @property
    def row(self) -> str:
        """The kind of a row of the data, in words."""
        if modality_of(self.data.train) == "image-text":
            return "image with all its captions"
        labelled = any(trial.config.mechanism.rules.takes_labels for trial in self.trials)
        return "image with its label" if labelled else "row"

    @cached_property
    def cost(self) -> TuningCost | None:
        """The cost of the whole sweep, fixed in advance; None if no trial has a guarantee."""
        return cost_of(self.release, self.charged_trials, earlier_draws(self.earlier), self.max_trials)

    def tags(self, cost: TuningCost | None = None) -> dict[str, str]:
        """Return the tags of every run, with the given cost, or by default the cost fixed in advance."""
        tags = cost_tags(self.release, self.charged_trials, cost or self.cost) | {
            "data_is": "private" if self.source.are_private else "public",
            "notes": " ".join(self.notes),
        }
        if self.publication is not None:
            tags["published_after_seconds"] = f"{self.publication.interval_seconds:g}"
        if not self.source.are_private:
            tags["research"] = "un-noised scores and SNR of public data are logged"
        return tags


def data_facts(source: DataOptions, data: TrainingData) -> dict[str, Any]:
    """Return the public facts that identify the data of a sweep and of its scores."""
    pairs = {name: getattr(source.pairs, name) for name in source.pairs.changed_fields}
    limit = [] if source.max_image_pixels == MAX_IMAGE_PIXELS else [source.max_image_pixels]
    captions = [] if source.class_captions is None else [source.class_captions]
    overlap = {} if source.drop_overlap == "none" else {"drop_overlap": source.drop_overlap}
    return overlap | {
        "data": [source.dataset, source.image_size, source.unit_column, pairs, *limit, *captions],
        "scored": [source.evaluate_on, source.test_fraction, source.probe_datasets],
        "private": source.are_private,
        "num_records": len(data.train) if data.train_is_public else None,
    }


def build_plan(inputs: PlanInputs) -> SweepPlan:
    """Return the plan of a sweep over its points, calibrated and checked; every point has all repeats.

    Raises:
      ConfigError: an option breaks a rule.
    """
    if not inputs.points:
        raise ConfigError("a sweep needs at least one point. Set at least one value for every axis.")
    options, data = inputs.options, inputs.data
    source, release = options.data, options.release
    points = trial_configs(inputs)
    configs = [config for _, config in points]
    if not configs:
        raise ConfigError(
            "a sweep needs at least one trial; private data and sealed sweeps exclude trials with "
            "epsilon = inf. Set a finite epsilon."
        )
    check_networks(configs, data)
    networks = [config.network for config in configs]
    if any(net.mixes_no_records for net in networks) and not any(net.is_foreign for net in networks):
        raise ConfigError(
            "--mixes-no-records applies only to a network of your own (package.module:factory); got "
            f"{networks[0].name}, which is this package's. Leave it out."
        )
    trials = _trials(options, points, data)
    notes, usual_notes = plan_notes(inputs, configs)
    plan = SweepPlan(
        question=inputs.question,
        source=source,
        release=release,
        repeats=options.service.repeats,
        num_records_public=inputs.num_records_public,
        data=data,
        trials=tuple(trials),
        notes=notes,
        usual_notes=usual_notes,
        advice=tuple(unread_note(unread_options(options.network, [trial.params for trial in trials]))),
        earlier=inputs.earlier,
    )
    if plan.earlier:
        plan = replace(plan, notes=(*plan.notes, *_shares_of_cost(plan)))
    if not release.is_open:
        _check_sealed_plan(plan)
    elif source.are_private and plan.cost is not None and plan.cost.reason is not None:
        raise ConfigError(f"training on private data needs a known total cost: {plan.cost.reason}")
    return plan


def _shares_of_cost(plan: SweepPlan) -> list[str]:
    """Return a note with the ε of the earlier sweeps alone and of these trials alone, if both have one."""
    parts = [
        cost_of(plan.release, earlier_trials(plan.earlier), earlier_draws(plan.earlier)),
        cost_of(plan.release, plan.trials),
    ]
    epsilons = [None if part is None else part.tuned_epsilon for part in parts]
    if None in epsilons:
        return []
    tuning, final = (rounded_up(epsilon, 4) for epsilon in epsilons if epsilon is not None)
    return [
        f"The trainings of earlier sweeps alone cost ε = {tuning}, those of this sweep alone ε = {final}; "
        "both compose to the total."
    ]


def _check_sealed_plan(plan: SweepPlan) -> None:
    """Raise ConfigError if candidates lack a guarantee, or lack a public or noised score for selection."""
    for trial in plan.trials:
        if not is_proven(trial):
            raise ConfigError(
                f"every trial of a sealed sweep must have a proven guarantee; {trial.name} has the label "
                f"{trial.config.guarantee_label!r}. Use a finite epsilon and proven methods."
            )
        if not trial.config.mechanism.rules.plain_event:
            raise ConfigError(
                "a sealed sweep needs Poisson-sampled Gaussian steps, as its bounds hold only for these; "
                f"{trial.config.mechanism.method} has other steps. Use --release open."
            )
    if plan.data.queries is None or not plan.data.evaluation_is_public:
        raise ConfigError(
            "a sealed sweep must select by a score on public data or by a noised score, because a choice by "
            "bare scores on private records would reveal the records. Set --evaluate-on to a public labelled "
            "data set."
        )
    scores = visible_scores(plan.data, plan.trials[0].config.mechanism.method)
    if plan.release.select_by not in scores:
        raise ConfigError(
            f"select_by must be a score of trials on these data; got {plan.release.select_by!r}. Valid: "
            f"{', '.join(scores)}"
        )


def planned_trials(inputs: PlanInputs) -> list[Trial]:
    """Return the calibrated trials of a sweep without building their networks, to compare many plans.

    Raises:
      ConfigError: an option breaks a rule.
    """
    return _trials(inputs.options, trial_configs(inputs), inputs.data)


def _trials(
    options: SweepOptions, configs: Sequence[tuple[Point, TrainingConfig]], data: TrainingData
) -> list[Trial]:
    """Return one trial per repeat and point; each repeat has its own public seed."""
    trials = []
    data_params = {node: _data_params(data, node) for node in {config.evaluation for _, config in configs}}
    for repeat in range(options.service.repeats if options.release.is_open else 1):
        for point, config in configs:
            config = replace(config, public_seed=options.service.seed + repeat)
            params = _params(config, options, point, repeat) | data_params[config.evaluation]
            trials.append(Trial(name=f"{point.label}-r{repeat}", config=config, params=params))
    return trials


def trial_at(inputs: PlanInputs, point: Point) -> Trial:
    """Return the trial at one point, named after the point, for sweeps that choose points as they run."""
    ((_, config),) = trial_configs(replace(inputs, points=[point]))
    check_networks([config], inputs.data)
    params = _params(config, inputs.options, point, 0) | _data_params(inputs.data, config.evaluation)
    return Trial(name=point.label, config=config, params=params)


def _params(config: TrainingConfig, options: SweepOptions, point: Point, repeat: int) -> dict[str, Any]:
    """Return the params that MLflow shows for a trial: its settings, its target ε, the point's params."""
    mechanism = config.mechanism
    training, source = replace_options(options.training(), **point.changes), options.data
    target = training.mechanism.target_epsilon() if mechanism.is_private else math.inf
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
    if training.mechanism.tan_factor > 1:
        params["tan_factor"] = training.mechanism.tan_factor
    if target is None or training.mechanism.tan_factor > 1:
        params["target_epsilon"] = round(config.epsilon(), 4)
    return params | dict(point.params)


def _data_params(data: TrainingData, evaluation: EvaluationConfig) -> dict[str, Any]:
    """Return a trial's params about the records: the images' shape, and the number of public scored records.

    The number is `num_scored_records`. With labels, `scored_majority_share` is the share of the most frequent
    class.
    """
    params: dict[str, Any] = {"image_shape": list(data.train.images.shape[1:])}
    queries = data.queries
    if queries is None or not data.evaluation_is_public:
        return params
    scored_ids = first_by_hash(queries.ids, evaluation.max_query_records)
    params["num_scored_records"] = len(scored_ids)
    if queries.labels is not None:
        labels = queries.labels[row_of_each(queries.row_starts, queries.ids, scored_ids)]
        params["scored_majority_share"] = float(np.unique_counts(labels).counts.max() / len(scored_ids))
    return params


def cross_checks(trial: TrialClass, delta: float) -> dict[str, float]:
    """Return the ε of one trial's releases by the RDP accountant and, for plain steps, the PRV accountant."""
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
