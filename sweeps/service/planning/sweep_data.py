"""The records of a sweep: loaded, split, and rejected if their scores would reveal private ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpgcl_core.errors import ConfigError, DataError, DpgclError, show_on_a_terminal
from dpgcl_core.noise.chacha20 import SecureGenerator
from dpgcl_core.sampling.record_ids import Ids
from dpgcl_core.sampling.slot_table import SlotTable
from sweeps.service.options.data import DataOptions, data_path
from sweeps.service.planning.public_overlap import without_overlap
from trainers.data.dataset import AnyRecords, Dataset, TrainingData
from trainers.data.faults import RecordsError
from trainers.data.loading import load_dataset, split_held_out, split_train_test
from trainers.data.own_images import label_place
from trainers.data.probes import load_probes
from trainers.data.shapes import shapes_name
from trainers.failures import describe_error

SlotsFor = Callable[[int, Ids], SlotTable]
"""A function of a capacity and record ids that returns the slots of the records."""


def load_training_data(
    options: DataOptions,
    *,
    score_on_held_out: float = 0.0,
    num_records_public: int | None = None,
    slots_for: SlotsFor | None = None,
    has_shards: bool = False,
) -> tuple[TrainingData, list[str]]:
    """Return the records of a sweep, and notes about them.

    Public data are split for scoring, by their own split or by record id. Private data are all used for
    training, and scores use only `evaluate_on`, which is public. As an exception, a share of private
    data may be held out, by slot, to be scored with noise.

    Args:
      options: the data options.
      score_on_held_out: the held-out share, see `trainers.config.training.EvaluationConfig`.
      num_records_public: N, the declared number of records and, if records have slots, of slots; by default
        the number of records.
      slots_for: returns the slots if records have any; by default fresh slots, which are not stored.
      has_shards: whether the workers of a training have shards, and so the records slots; if records are held
        out, they have slots, too.

    Raises:
      ConfigError: the options do not fit the data, or each other.
      DataError: the data cannot be used. For private data it also replaces any other exception, and names
        only its type, because the exception's text and traceback may carry a record.
    """
    try:
        return _load(options, score_on_held_out, num_records_public, slots_for or _fresh_slots, has_shards)
    except DpgclError:
        raise
    except Exception as error:
        if not options.are_private:
            raise
        withheld = describe_error(error, data_are_public=False)
    raise DataError(f"the data of this sweep must be readable; loading them failed with {withheld}")


def _fresh_slots(capacity: int, ids: Ids) -> SlotTable:
    return SlotTable.empty(capacity).holding(ids, SecureGenerator())


def _load_own(options: DataOptions) -> Dataset:
    """Load the data to train on; an error about private data has numbers only in its details."""
    try:
        return load_dataset(
            options.dataset,
            image_size=options.image_size,
            unit_column=options.unit_column,
            pairs=options.pairs_of_training,
            **options.reading,
        )
    except RecordsError as error:
        if not options.are_private:
            raise
        refusal = error
    raise _without_counts(refusal)  # outside `except`, so that no traceback shows the original error


def _load_public(options: DataOptions, name: str) -> Dataset:
    return load_dataset(name, image_size=options.image_size, pairs=options.pairs_of(name), **options.reading)


def _without_counts(error: RecordsError) -> RecordsError:
    """Return the error for private records: only its details have the count and list of bad records."""
    rule, _, facts = str(error).partition(";")
    _, _, fix = facts.partition(". ")
    return RecordsError(
        f"{rule}; some of the training data break this rule{'. ' * bool(fix)}{fix}",
        {"in full": str(error)} | dict(error.details),
    )


def _load(
    options: DataOptions,
    score_on_held_out: float,
    num_records_public: int | None,
    slots_for: SlotsFor,
    has_shards: bool,
) -> tuple[TrainingData, list[str]]:
    """Check the options, then load and split the records; see `load_training_data`."""
    _check_data_options(options, score_on_held_out)
    if options.drop_overlap != "none":
        _check_drop_overlap(options, num_records_public)
    dataset = _load_own(options)
    private = options.are_private
    index = queries = scored_set = None
    train = dataset.train
    if options.evaluate_on is not None:
        scored_set = _load_public(options, options.evaluate_on)
        _check_same_kind(dataset, scored_set)
        if scored_set.modality == "image" and scored_set.train.labels is None:
            raise ConfigError(
                f"evaluate_on must have labels to score by; {scored_set.name} has none. Add "
                f"{label_place(scored_set.name)}, or leave --evaluate-on out."
            )
        index, queries = _split_to_score(scored_set, options.test_fraction)
    elif not private:
        train, queries = split_train_test(dataset, options.test_fraction)
        index = train
    if private:
        show_on_a_terminal({f"training data: {kind}": n for kind, n in dataset.reading_counts.items()})
    probes = load_probes(
        options.probe_datasets,
        dataset,
        test_fraction=options.test_fraction,
        pairs=options.pairs,
        **options.reading,
    )
    if private:
        public = {}
        if options.proxy is not None:
            proxy = _load_public(options, options.proxy)
            public["proxy"] = [proxy.train, *([proxy.test] if proxy.test else [])]
        if scored_set is not None:
            public["evaluate_on"] = [scored_set.train, *([scored_set.test] if scored_set.test else [])]
        if probes:
            public["probe_datasets"] = [part for probe in probes for part in (probe.index, probe.queries)]
        train = without_overlap(dataset, public, options.drop_overlap)
    slots = held_out = None
    if score_on_held_out or has_shards:
        slots = slots_for(num_records_public or len(train), train.ids)
        train, held_out = split_held_out(train, score_on_held_out, slots)
    data = TrainingData(
        train=train,
        index=index,
        queries=queries,
        train_is_public=not private,
        evaluation_is_public=options.evaluate_on is not None or bool(probes) or not private,
        held_out_records=held_out,
        slots=slots,
        probes=probes,
        # Classes of the scored records, which are public: names of private classes are never passed on.
        class_names=() if queries is None else (scored_set or dataset).class_names,
        train_class_names=() if private else dataset.class_names,
    )
    return data, _data_notes(options) + _unscorable_notes(data) + _reading_notes(options, dataset, scored_set)


def _split_to_score(dataset: Dataset, test_fraction: float) -> tuple[AnyRecords | None, AnyRecords]:
    """Return the index for k-NN and the probe, and the scored records (all, if no index is needed)."""
    if dataset.test is None and dataset.train.labels is None:
        return None, dataset.train
    return split_train_test(dataset, test_fraction)


def _check_same_kind(dataset: Dataset, scored_set: Dataset) -> None:
    """Raise ConfigError unless both data sets have the same modality and image shape."""
    if scored_set.modality != dataset.modality:
        raise ConfigError(
            f"evaluate_on must hold {_KINDS[dataset.modality]}, like the training data; "
            f"{scored_set.name} holds {_KINDS[scored_set.modality]}. "
            "--probe-datasets takes labelled images for both."
        )
    if scored_set.image_shape != dataset.image_shape:
        raise ConfigError(
            f"evaluate_on must have images of the training data's shape {dataset.image_shape}; "
            f"got {scored_set.image_shape}. Set --image-size, and use data with the same channels."
        )


def _unscorable_notes(data: TrainingData) -> list[str]:
    """Return a note on the public scored records whose class has no record to learn from."""
    index, queries = data.index, data.queries
    if index is None or queries is None or index.labels is None or queries.labels is None:
        return []
    unknown = ~np.isin(queries.labels, index.labels)
    if not unknown.any():
        return []
    num_classes = len(np.unique(queries.labels[unknown]))
    return [
        f"Of the {len(queries)} scored public records, {int(unknown.sum())} belong to {num_classes} classes "
        "without an image to learn from and cannot be classified correctly. Add images of every class, or "
        "set another --test-fraction."
    ]


_KINDS = {"image": "images", "image-text": "images with captions"}


def _reading_notes(options: DataOptions, dataset: Dataset, scored_set: Dataset | None) -> list[str]:
    """Return notes on converted and left-out records; none on private data, whose counts reveal records."""
    public = [] if options.are_private else [dataset]
    return [
        f"In {data_set.name}: {number} {kind}."
        for data_set in (*public, *([scored_set] if scored_set is not None else []))
        for kind, number in data_set.reading_counts.items()
    ]


def _data_notes(options: DataOptions) -> list[str]:
    """Return sentences on the data that scores use, and on private training data."""
    notes = []
    if options.evaluate_on is not None:
        notes.append(f"Scores are on the public data set {options.evaluate_on}.")
    if options.probe_datasets:
        names = ", ".join(options.probe_datasets)
        notes.append(f"Features are also scored on {names}, which are public because the user named them.")
    if options.are_private:
        notes.append(
            "The training data are private: there are no trials at ε = ∞, and no un-noised SNR or loss of "
            "private records."
        )
        if options.drop_overlap != "none":
            kind = "a copy of" if options.drop_overlap == "copies" else "an image similar to"
            notes.append(f"Records with {kind} an image of the public data are left out (--drop-overlap).")
        if options.evaluate_on is None and not options.probe_datasets:
            notes.append("There are no scores to compare trials by. Set --evaluate-on to a public data set.")
    return notes


def _check_data_options(options: DataOptions, share: float) -> None:
    """Raise ConfigError if the data cannot be scored with these options; `share` is the held-out share."""
    scored_name = options.evaluate_on
    if share and options.modality != "image":
        raise ConfigError(
            f"score_on_held_out applies only to images with labels; got {share} for images with captions. "
            "Their score is a recall: one record is a candidate for every query and can change all answers, "
            "more than noise for one count covers. Leave it out, and set --evaluate-on to public pairs."
        )
    for name in options.probe_datasets:
        if any(used_name and same_source(name, used_name) for used_name in (options.dataset, scored_name)):
            raise ConfigError(
                "probe_datasets must be public data sets other than the training data and --evaluate-on; got "
                f"{name} for both"
            )
    for option, public_name in (("evaluate_on", scored_name), ("proxy", options.proxy)):
        if options.are_private and public_name and same_source(public_name, options.dataset):
            raise ConfigError(
                f"{option} must be a public data set, other than the private training data; got "
                f"{public_name} for both"
            )
    if share and not options.are_private:
        raise ConfigError(
            "score_on_held_out applies only to private training data, because scores of public data need no "
            f"noise; got {share} with public data. Leave it out, or set --data-is private."
        )
    if share and scored_name is None:
        raise ConfigError(
            "score_on_held_out needs a public index, so that one private record changes a noised count by at "
            f"most one; got {share}. Also set --evaluate-on to a public labelled data set."
        )


def _check_drop_overlap(options: DataOptions, num_records_public: int | None) -> None:
    """Raise ConfigError unless records can be dropped, see `sweeps.service.planning.public_overlap`."""
    if not options.are_private or not (options.evaluate_on or options.probe_datasets or options.proxy):
        raise ConfigError(
            "drop_overlap applies only to private training data beside public data; got "
            f"{options.drop_overlap} without {'public' if options.are_private else 'private'} data. Leave it "
            f"out, or set --{'evaluate-on' if options.are_private else 'data-is private'}"
        )
    if num_records_public is None:
        raise ConfigError(
            "drop_overlap needs a declared number of records, since the number that stays is private; got "
            f"{options.drop_overlap} and no number. Set --num-records-public, or register them in a ledger"
        )


def same_source(first: str, second: str) -> bool:
    """Return whether two names refer to the same records, or to parts of them."""

    def source_key(name: str) -> Path | str | int:
        if name.startswith("shapes"):  # of one seed, a smaller set is part of a larger one,
            return shapes_name(name).seed  # and sets of both vocabularies share a few pairs
        if name.startswith("procedural"):
            return "procedural"
        path = data_path(name)
        return name if path is None else path.resolve()

    return source_key(first) == source_key(second)
