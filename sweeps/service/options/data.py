"""The options of the data that a sweep trains and scores on, and whether they are private."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dpgcl_core.errors import ConfigError
from trainers.config.tree import leaves
from trainers.data.dataset import Modality
from trainers.data.decoding import MAX_IMAGE_PIXELS
from trainers.data.loading import (
    check_dataset_name,
    check_max_image_pixels,
    is_builtin_name,
    modality_of_name,
)
from trainers.data.pair_options import PairOptions


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training and evaluation data."""

    dataset: str = "digits"
    """digits, fashion-mnist, cifar10, eurosat, shapes; your own: {npz,parquet,folder,csv,webdataset}:PATH."""
    data_is: Literal["auto", "public", "private"] = "auto"
    """Whether the training data are public; auto: the built-in benchmarks are, your own are not."""
    evaluate_on: str | None = None
    """A public data set to score on, labelled or with captions; needed when the training data are private."""
    probe_datasets: tuple[str, ...] = ()
    """Other public labelled data sets to score the frozen features on, too: resized, in grey or colour."""
    unit_column: str | None = None
    """Column of your own data that names the privacy unit: all rows of one unit are one record."""
    pairs: PairOptions = field(default_factory=PairOptions)
    class_captions: str | None = None
    """Caption labelled images by their class, for methods of pairs: a text with {} for the class name, such
    as "a photo of a {}."; the class is then part of the record."""
    image_size: int | None = None
    """Resize images to this square, in pixels."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Most pixels of one stored image of your own data, 1 to 178000000; larger images are not decoded."""
    test_fraction: float = 0.2
    """Share held out for scoring, by record id, if public data have no test split. All records of an
    --evaluate-on without labels are scored."""

    def __post_init__(self) -> None:
        for name in (self.dataset, *self.probe_datasets):
            check_dataset_name(name)
        _check_pair_options(self)
        check_max_image_pixels(self.max_image_pixels)
        if self.class_captions != self.pairs_of(self.dataset).class_captions:
            raise ConfigError(
                "class_captions are for labelled images without captions, and "
                f"{self.dataset.partition(':')[0]} has captions of its own: leave it out"
            )
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction must be in (0, 1); got {self.test_fraction}")

    @property
    def are_private(self) -> bool:
        """Whether the release policy for private data applies."""
        return self.data_is == "private" or (self.data_is == "auto" and not is_builtin_name(self.dataset))

    @property
    def modality(self) -> Modality:
        """The kind of a record, as far as it is known before the data are loaded."""
        return modality_of_name(self.dataset, self.pairs_of(self.dataset))

    def pairs_of(self, name: str) -> PairOptions:
        """Return the options to read the training data, or similar data, as images with captions."""
        own = self.pairs.fitting(name)
        if self.class_captions is None or modality_of_name(name, own) == "image-text":  # has its own captions
            return own
        return dataclasses.replace(own, class_captions=self.class_captions).fitting(name)

    @property
    def pairs_of_training(self) -> PairOptions:
        """The options to read training images with captions; labels only if these data are scored, too."""
        fitting = self.pairs_of(self.dataset)
        scored = self.evaluate_on is None and not self.are_private
        return fitting if scored else dataclasses.replace(fitting, label=None)


def data_path(dataset: str) -> Path | None:
    """Return the file or folder of the user's own data set; None for a built-in data set."""
    _, colon, path = dataset.partition(":")
    return Path(path).expanduser() if colon and not is_builtin_name(dataset) else None


def _check_pair_options(data: DataOptions) -> None:
    """Refuse options that have no meaning for any of the named data sets."""
    given = data.pairs
    names = {leaf.path[-1]: leaf.option for leaf in leaves(PairOptions).values()}
    others = (data.evaluate_on or "", *data.probe_datasets)
    scored = [given.fitting(name) for name in others]
    meant = {each for pairs in (data.pairs_of_training, *scored) for each in pairs.changed_fields}
    unused = [names[each] for each in given.changed_fields if each not in meant]
    if "csv_label_key" in unused:
        raise ConfigError(
            "csv_label_key names the classes of public pairs that are scored, in csv:PATH or parquet:PATH; "
            f"here {data.evaluate_on or 'nothing'} is scored, and labels of training data are not read: "
            "leave it out"
        )
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} must be left out: they tell how csv:PATH is read (all but csv_separator "
            "also parquet:PATH, skip_corrupt also webdataset:PATH), and mean nothing for "
            f"{data.dataset.partition(':')[0]}"
        )
