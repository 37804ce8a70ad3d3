"""Release checks of a training, and scores of private records with noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpgcl_core.errors import ConfigError
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.release.noised_counts import noised_count, public_share, split_public
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords, TrainingData, images_alone
from trainers.data.loading import is_split_held_out
from trainers.data.stored_images import select
from trainers.evaluation.features import embed_features, first_by_hash, knn_rule, linear_probe_rule
from trainers.models.task_networks import AnyEncoder

PROVEN = "proven"


def check_release(config: TrainingConfig, data: TrainingData) -> None:
    """Refuse data for which the release policy could not be kept, before anything is computed.

    Raises:
      ConfigError: private records would be trained on without a proven guarantee or scored against private
        records, the number of records is outside the range that the method's accounting covers, the records
        held out for noised scores differ from the ones that their slots determine, or shards have no slots.
    """
    if not data.train_is_public and config.guarantee_label != PROVEN:
        raise ConfigError(
            f"private records can be trained on only with a guarantee; got label {config.guarantee_label!r}, "
            f"noise_multiplier = {config.mechanism.noise_multiplier}, "
            f"seeded_non_private = {config.seeded_non_private}"
        )
    if not data.train_is_public and not data.evaluation_is_public:
        for name in ("index", "queries", "probes"):
            if getattr(data, name) not in (None, ()):
                raise ConfigError(
                    f"with private training records, the {name} of a score must be public; got private ones. "
                    "One record of a private k-NN index, gallery or probe training set can change every "
                    "answer, and a score without noise leaks its queries. Set --evaluate-on to a public data "
                    "set, and use --score-on-held-out for noised scores of private records."
                )
    if data.is_part:
        return
    config.mechanism.rules.check_records(config.mechanism, len(data.train))
    _check_labels(config, data)
    _check_noised_scores(config, data)
    _check_slots(config, data)


def _check_labels(config: TrainingConfig, data: TrainingData) -> None:
    """Refuse classes other than the scored ones, and private labels that one more record could change."""
    train = images_alone(data.train)
    if train is None or not config.mechanism.rules.takes_labels:
        return
    scored = data.queries is not None and data.queries.labels is not None
    if data.train_is_public and scored and data.train_class_names != data.class_names:
        raise ConfigError(
            f"{config.mechanism.method} must be trained and scored on one list of classes, but the training "
            "data and evaluate_on number their labels by two lists. Use data with the same classes, or with "
            "integer labels from one list."
        )
    if not data.train_is_public and train.classes_from_data:
        raise ConfigError(
            f"{config.mechanism.method} needs integer labels from a public list of classes; got text labels. "
            "Text labels are numbered by their position among all classes of the private data, so one record "
            "could change the labels of others."
        )


def _check_noised_scores(config: TrainingConfig, data: TrainingData) -> None:
    evaluation = config.evaluation
    share, records, index = evaluation.score_on_held_out, data.held_out_records, data.index
    if (records is not None) != (share > 0):
        found = "none" if records is None else "some"
        raise ConfigError(
            f"score_on_held_out and held-out records need each other; got {share} and {found}. "
            "Split the records with trainers.data.loading.split_held_out."
        )
    if records is None:
        return
    train, held_out = images_alone(data.train), images_alone(records)
    if train is None or held_out is None:
        raise ConfigError(
            f"score_on_held_out applies only to images with labels; got {share} for images with captions. "
            "Their score is a recall: each record is a candidate of every query, so one record can change "
            "all answers, which the noise for one count does not cover. Leave score_on_held_out out."
        )
    if index is None or index is data.train or not data.evaluation_is_public or index.labels is None:
        raise ConfigError(
            "score_on_held_out needs a public labelled index other than the training records, so that one "
            "record changes a noised count by at most one. Set --evaluate-on to a public labelled data set."
        )
    if data.slots is None or not is_split_held_out(train, held_out, share, data.slots):
        raise ConfigError(
            "slots must decide whether a record is trained on or scored, in the same way in all trials; got "
            f"{'no slots' if data.slots is None else 'another split'}. Use "
            "trainers.data.loading.split_held_out with score_on_held_out, and pass its slot table."
        )
    if held_out.labels is None or held_out.classes_from_data:
        raise ConfigError(
            "score_on_held_out needs integer labels with the same meaning as the labels of the public index; "
            f"got {'no' if held_out.labels is None else 'text'} labels. Text labels are numbered by their "
            "position among all classes of the private data, so one record could change the labels of others."
        )


def _check_slots(config: TrainingConfig, data: TrainingData) -> None:
    slots, mechanism = data.slots, config.mechanism
    if data.held_out_records is None and mechanism.num_shards == 1:
        return
    if slots is None:
        raise ConfigError(
            f"shards are ranges of a slot table; got shards = {mechanism.num_shards} and no table. Set "
            "TrainingData.slots"
        )
    num_trained, _ = split_public(slots.capacity, config.evaluation.score_on_held_out)
    if num_trained != mechanism.num_records_public:
        raise ConfigError(
            f"the slot table has {num_trained} training slots (of {slots.capacity}), but the training "
            f"is accounted for {mechanism.num_records_public} records. Use the same number for both."
        )


def noised_scores(
    encoder: AnyEncoder,
    index: AnyRecords,
    records: AnyRecords,
    config: TrainingConfig,
    generator: Draws,
    device: torch.device | str,
    *,
    before_drawing: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Return the noised accuracies on `records` by metric name; noise may take them out of [0, 1].

    Guarantee: given the encoder, each count is a Gaussian mechanism with `score_noise_multiplier`, for adding
    or removing one record of `records`: see `dpgcl_core.release.noised_counts`.

    Args:
      encoder: the private network, on `device`.
      index: public labelled records.
      records: private records that were not trained on.
      config: the configuration with the noise and the public divisor.
      generator: the secret generator of the noise.
      device: the device of the encoder.
      before_drawing: function called just before the noise is drawn; nothing is released before this call.
    """
    multiplier = config.evaluation.score_noise_multiplier
    if multiplier is None:
        return {}
    counts = correct_counts(encoder, index, records, config, device)
    if before_drawing is not None:
        before_drawing()
    noised = {name: noised_count(count, multiplier, generator) for name, count in counts.items()}
    return {f"noised_{name}": public_share(count, config.num_scored_public) for name, count in noised.items()}


def correct_counts(
    encoder: AnyEncoder,
    index: AnyRecords,
    records: AnyRecords,
    config: TrainingConfig,
    device: torch.device | str,
) -> dict[str, int]:
    """Return how many of **all** `records` k-NN and the linear probe classify correctly, before noise.

    The arguments are as in `noised_scores`. Every record passes through the network and the rule alone. In a
    batch, the last digits of its features would depend on how many other records the batch holds, and in a
    tie so would its class. The user's own network passes each record on copies of its whole state, so that
    its class does not depend on earlier records.
    """
    index = index.one_row_each()
    first_rows = first_by_hash(index.ids, config.evaluation.max_index_records)
    options: dict[str, Any] = {
        "device": device,
        "isolate": config.isolates_groups,
        "readout": config.evaluation.readout,
    }
    features = embed_features(encoder, select(index.images, first_rows), **options)
    assert index.labels is not None  # `check_release` has checked both sets of labels
    index_labels = index.labels[first_rows]
    rules = {
        "knn_accuracy": knn_rule(features, index_labels, config.evaluation.num_neighbors),
        "linear_probe_accuracy": linear_probe_rule(features, index_labels),
    }
    records = records.one_row_each()
    assert records.labels is not None
    alone = embed_features(encoder, records.images, batch_size=1, **options)
    return {
        name: sum(int(rule(row[None])[0] == label) for row, label in zip(alone, records.labels, strict=True))
        for name, rule in rules.items()
    }
