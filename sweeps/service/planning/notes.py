"""The notes of a plan: sentences for statement, figure and reports, from public numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpgcl_core.mechanism.numbers import GROUPS, default_delta
from dpgcl_core.release.noised_counts import split_public
from dpgcl_core.sampling.slots import empty_step_prob, most_empty, num_blocks, share_lost
from sweeps.service.options.data import DataOptions
from sweeps.service.planning.inputs import PlanInputs
from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData, modality_of
from trainers.data.stored_images import StoredImages
from trainers.training.foreign_network import foreign_note
from trainers.training.warm_start import warm_start_note

_WEAK_DELTA = 1e-3
_LARGE_SCORE_ERROR = 0.1
_TAKEN_FROM_DATA = (
    "The number of records is taken from the data and therefore public. The guarantee is for zeroing out any "
    "one record, which then takes no part. Set --num-records-public to declare a capacity instead; the "
    "guarantee is then for adding or removing one record."
)

_TUNING_NOTES = {
    "none": "Nothing was tuned: all of ε is the model's.",
    "public": "The setting is chosen on public data, which costs no ε: all of ε is the model's.",
}


def plan_notes(
    inputs: PlanInputs, configs: Sequence[TrainingConfig]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the notes of a plan, and the subset of notes that every sweep of its kind has.

    Args:
      inputs: the plan's inputs.
      configs: the configuration of the training at each point.
    """
    options, data = inputs.options, inputs.data
    n = inputs.num_records_public
    sampling, units = _sampling_notes(configs), _unit_notes(options.data, data, configs)
    notes = list(inputs.notes)
    if options.mechanism.num_records_public is None:
        notes.insert(0, _TAKEN_FROM_DATA)
    if (delta := options.mechanism.delta or default_delta(n)) > _WEAK_DELTA:
        notes.append(f"With so few records, δ = {delta:.2g} is too large for a strong guarantee.")
    notes += _noise_of_scores(configs) + sampling
    if options.service.early_stopping != "none":
        notes.append(
            f"Scores during training may stop a training early ({options.service.early_stopping}); every ε "
            "still counts all planned steps."
        )
    notes += _shard_notes(configs) + _noised_notes(configs[0], n) + units + _bucket_notes(data)
    notes += dict.fromkeys(note for config in configs if (note := warm_start_note(config)))
    notes += dict.fromkeys(note for config in configs if (note := foreign_note(config)))
    notes += [earlier.note for earlier in inputs.earlier]
    if options.tuning.strategy in _TUNING_NOTES:
        notes.append(_TUNING_NOTES[options.tuning.strategy])
    return tuple(notes), frozenset([_TAKEN_FROM_DATA, *sampling, *units])


def _bucket_notes(data: TrainingData) -> list[str]:
    """Return a note if each step reads private images from a bucket."""
    images = data.train.images
    if data.train_is_public or not isinstance(images, StoredImages) or not images.is_remote:
        return []
    return [
        "Each step reads its images from a bucket, whose log of requests shows which records it drew. The "
        "guarantee is for readers without that log. A copy on trusted machines leaves no such log."
    ]


def _noise_of_scores(configs: Sequence[TrainingConfig]) -> list[str]:
    """Return a note on the error of noised scores, so that nobody pays for scores that are only noise."""
    errors = [
        noise / config.num_scored_public
        for config in configs
        if (noise := config.evaluation.score_noise_multiplier) is not None
    ]
    if not errors:
        return []
    error = max(errors)
    warning = "; hold out more records, or use less noise" if error > _LARGE_SCORE_ERROR else ""
    return [f"The noise of a noised accuracy has standard deviation {error:.2g}{warning}."]


def _sampling_notes(configs: Sequence[TrainingConfig]) -> list[str]:
    """Return a note on empty steps and slots of group sampling, at the largest S, from public numbers."""
    mechanisms = [config.mechanism for config in configs if config.mechanism.sampling == GROUPS]
    if not mechanisms:
        return []
    largest = max(mechanisms, key=lambda mechanism: int(mechanism.group_size))
    capacity, size = largest.num_records_public, int(largest.group_size)
    empty_prob = empty_step_prob(capacity, size, largest.sampling_prob, largest.num_shards)
    note = (
        f"Groups are sampled, so one record moves a step's sum by C. At S = {size}, the probability that a "
        f"step draws no group is {empty_prob:.1g}"
    )
    if not largest.num_records_from_data:
        hundredth = math.ceil(capacity / 100)
        lost = share_lost(capacity, hundredth, size)
        note += (
            f"; {hundredth} empty slots of {capacity} would cost {lost:.0%} of the groups, and more than "
            f"{most_empty(capacity, size)} empty slots are an error"
        )
    return [f"{note}."]


def _shard_notes(configs: Sequence[TrainingConfig]) -> list[str]:
    """Return a note on shards and the number of blocks K of each group size, from public numbers only."""
    mechanism, num_shards = configs[0].mechanism, configs[0].mechanism.num_shards
    if num_shards == 1:
        return []
    n = mechanism.num_records_public
    sizes = sorted({int(config.mechanism.group_size) for config in configs})
    blocks = ", ".join(f"K = {num_blocks(n, size, num_shards)} at S = {size}" for size in sizes)
    return [
        f"The {n} slots are cut into {num_shards} ranges. Each worker gets only the records of one range and "
        f"samples its groups there. Groups of slots in all ranges: {blocks}."
    ]


def _noised_notes(config: TrainingConfig, num_records_public: int) -> list[str]:
    """Return sentences about noised releases, from public numbers only."""
    notes = []
    if share := config.evaluation.score_on_held_out:
        _, held_out = split_public(num_records_public, share)
        notes.append(
            f"A share of {share:g} of the slots ({held_out}) is not trained on, but scored with noise; each "
            "record was assigned a random slot when it was first seen."
        )
    if config.evaluation.snr_noise_multiplier is not None:
        notes.append("The first step's SNR is released with noise; ε includes its cost.")
    return notes


def _unit_notes(source: DataOptions, data: TrainingData, configs: Sequence[TrainingConfig]) -> list[str]:
    """Return a note on the kind of a record, if it is not one row or if training uses more than its image."""
    labelled = any(config.mechanism.rules.takes_labels for config in configs)
    if source.unit_column is not None:
        rows = "rows, images and labels," if labelled else "rows"
        return [f"One record is all {rows} with the same value of {source.unit_column}."]
    if labelled:
        return ["One record is one image with its label: both are protected together."]
    if modality_of(data.train) == "image-text":
        return ["One record is one image with all its captions."]
    return []
