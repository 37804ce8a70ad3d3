"""The records of a sweep: loaded, split, and refused where their scores would tell of private ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpgcl_core.errors import ConfigError
from sweeps.service.options import SweepOptions
from trainers.data import Records, load_dataset, split_held_out, split_train_test
from trainers.data.probes import load_probes
from trainers.loop import TrainingData


def load_training_data(options: SweepOptions) -> tuple[TrainingData, list[str]]:
    """Returns the records of a sweep and what must be said about them.

    Public data are split for scoring, by their own split or by record id. Private data are trained on
    whole, and scored on `evaluate_on` alone, which is public; but for the share that is held out to be
    scored with noise, by record id.
    """
    _check_data_options(options)
    dataset = load_dataset(options.dataset, image_size=options.image_size, unit_column=options.unit_column)
    private = options.data_are_private
    index = queries = None
    train = dataset.train
    if options.evaluate_on is not None:
        other = load_dataset(options.evaluate_on, image_size=options.image_size)
        if other.image_shape != dataset.image_shape:
            raise ConfigError(
                f"evaluate_on must have images of the training data's shape {dataset.image_shape}; "
                f"got {other.image_shape} (give --image-size, and data of as many channels)"
            )
        if private:
            public = (other.train, other.test) if other.test is not None else (other.train,)
            _refuse_shared_images(dataset.train, public, "evaluate_on")
        index, queries = split_train_test(other, options.test_fraction)
    elif not private:
        train, queries = split_train_test(dataset, options.test_fraction)
        index = train
    train, scored = split_held_out(train, options.score_on_held_out)
    probes = load_probes(options.probe_datasets, dataset, test_fraction=options.test_fraction)
    if private:
        for probe in probes:
            _refuse_shared_images(dataset.train, (probe.index, probe.queries), "probe_datasets")
    data = TrainingData(
        train=train,
        index=index,
        queries=queries,
        train_is_public=not private,
        evaluation_is_public=options.evaluate_on is not None or bool(probes) or not private,
        scored=scored,
        probes=probes,
    )
    return data, _data_notes(options)


def _data_notes(options: SweepOptions) -> list[str]:
    notes = []
    if options.num_records_public is None:
        notes.append(
            "The number of records is taken from the data and therefore public; "
            "give --num-records-public to declare another."
        )
    if options.evaluate_on is not None:
        notes.append(f"Scores are on the public data set {options.evaluate_on}.")
    if options.probe_datasets:
        names = ", ".join(options.probe_datasets)
        notes.append(f"Features are also scored on {names}, taken to be public because they are named.")
    if options.data_are_private:
        notes.append(
            "The training data are private: no ε = ∞ trials, no un-noised SNR or loss of private records."
        )
        if options.evaluate_on is None and not options.probe_datasets:
            notes.append(
                "No scores: give --evaluate-on a public data set, or nothing tells the trials apart."
            )
    return notes


def _check_data_options(options: SweepOptions) -> None:
    """Refuses data that cannot be scored as the options ask, before any are read."""
    share, other = options.score_on_held_out, options.evaluate_on
    for name in options.probe_datasets:
        if any(each and _same_source(name, each) for each in (options.dataset, other)):
            raise ConfigError(
                "probe_datasets must be public data sets other than those trained and scored on already; got "
                f"{name} for both"
            )
    if options.data_are_private and other and _same_source(other, options.dataset):
        raise ConfigError(
            f"evaluate_on must be a public data set, other than the private training data; got {other} for "
            "both"
        )
    if share and not options.data_are_private:
        raise ConfigError(
            "score_on_held_out is for private training data, for scores of public data need no noise; got "
            f"{share} with public data: leave it out, or declare --data-is private"
        )
    if share and other is None:
        raise ConfigError(
            "score_on_held_out scores private records against a public index, for a noised count to move by "
            f"one only; got {share}: give --evaluate-on a public labelled data set, too"
        )


def _refuse_shared_images(private: Records, public: Sequence[Records], option: str) -> None:
    """Refuses a public data set with private images in it, whatever its name."""
    own = {image.tobytes() for image in private.images}
    if any(image.tobytes() in own for records in public for image in records.images):
        raise ConfigError(f"{option} must be public; it holds images of the private training data")


def _same_source(one: str, other: str) -> bool:
    def place(name: str) -> Path | str:
        _, colon, path = name.partition(":")
        return Path(path).expanduser().resolve() if colon else name

    return place(one) == place(other)
