"""The options of the data that a sweep trains and scores on, and whether they are private."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

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

Overlap = Literal["none", "copies", "similar"]
"""Images that private and public data share; similar images include copies."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training and evaluation data."""

    dataset: str = "digits"
    """digits, fashion-mnist, cifar10, eurosat or shapes; or your own: folder:PATH, csv:, npz:, parquet:,
    hf:, webdataset: or shards:. The last two and parquet: may be at s3://BUCKET/PATH."""
    data_is: Literal["auto", "public", "private"] = "auto"
    """Whether the training data are public; auto: built-in data sets are public, your own are private."""
    evaluate_on: str | None = None
    """A public data set to score on, labelled or with captions; private training data need one for scores."""
    probe_datasets: tuple[str, ...] = ()
    """More public labelled data sets to score frozen features on; images get the training data's shape."""
    proxy: str | None = None
    """A public data set in place of the training data, to tune on (--tuning public) or to try the scaling
    rule on (--tuning scaling); by default --tuning public generates images, or shapes for pairs."""
    drop_overlap: Overlap = "none"
    """Train without private records of which the public data hold a copy, or a similar image: one compressed
    again, resized or made brighter. Needs a declared number of records."""
    unit_column: str | None = None
    """Column of your own data that names the privacy unit: all rows of one unit are one record."""
    pairs: PairOptions = field(default_factory=PairOptions)
    class_captions: str | None = None
    """Caption for labelled images, for methods that train on pairs: a text with {} for the class name, such
    as "a photo of a {}."; the class is then part of the record."""
    image_size: int | None = None
    """Resize images to this square, in pixels."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Maximum pixels of one stored image of your own data, 1 to 178000000; larger ones are not decoded."""
    in_memory: bool | None = None
    """Decode your own images into memory; by default if they take at most a quarter of the free memory."""
    index_folder: Path | None = None
    """Folder for the index of images that stay in their files; by default .dpgcl-index beside them, or
    ~/.cache/dpgcl/indices if they are in a bucket."""
    test_fraction: float = 0.2
    """Share of public data without a test split that is held out for scoring, by record id. If
    --evaluate-on has no labels, all its records are scored."""

    def __post_init__(self) -> None:
        for name in (self.dataset, *self.probe_datasets, *([self.proxy] if self.proxy else [])):
            check_dataset_name(name)
        _check_pair_options(self)
        check_max_image_pixels(self.max_image_pixels)
        if self.class_captions != self.pairs_of(self.dataset).class_captions:
            raise ConfigError(
                "class_captions applies only to labelled images without captions; got "
                f"{self.dataset.partition(':')[0]}, which has captions. Leave it out."
            )
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction must be in (0, 1); got {self.test_fraction}")

    @property
    def are_private(self) -> bool:
        """Whether the release policy for private data applies."""
        return self.data_is == "private" or (self.data_is == "auto" and not is_builtin_name(self.dataset))

    @property
    def modality(self) -> Modality:
        """The kind of a record, as far as the options determine it before the data are loaded."""
        return modality_of_name(self.dataset, self.pairs_of(self.dataset))

    @property
    def reading(self) -> dict[str, Any]:
        """How images are read, as arguments of `load_dataset`; results do not depend on it."""
        names = ("max_image_pixels", "in_memory", "index_folder")
        return {name: getattr(self, name) for name in names}

    def pairs_of(self, name: str) -> PairOptions:
        """Return the options to read a data set as images with captions: its own ones or class captions."""
        own = self.pairs.fitting(name)
        if self.class_captions is None or modality_of_name(name, own) == "image-text":  # has its own captions
            return own
        return replace(own, class_captions=self.class_captions).fitting(name)

    @property
    def pairs_of_training(self) -> PairOptions:
        """The options to read training images with captions; labels only if these data are scored, too."""
        fitting = self.pairs_of(self.dataset)
        scored = self.evaluate_on is None and not self.are_private
        return fitting if scored or self.modality == "image" else replace(fitting, label=None)


def data_path(dataset: str) -> Path | None:
    """Return the file or folder of the user's own data set; None for a built-in data set."""
    _, colon, path = dataset.partition(":")
    return Path(path).expanduser() if colon and not is_builtin_name(dataset) else None


def _check_pair_options(data: DataOptions) -> None:
    """Raise ConfigError for options that apply to none of the named data sets."""
    pair_options = data.pairs
    names = {leaf.path[-1]: leaf.option for leaf in leaves(PairOptions).values()}
    others = (data.evaluate_on or "", data.proxy or "", *data.probe_datasets)
    scored = [pair_options.fitting(name) for name in others]
    applicable = {name for pairs in (data.pairs_of_training, *scored) for name in pairs.changed_fields}
    unused = [names[name] for name in pair_options.changed_fields if name not in applicable]
    if "csv_label_key" in unused:
        raise ConfigError(
            "csv_label_key applies only to public pairs that are scored, from csv:PATH or parquet:PATH; got "
            f"--evaluate-on {data.evaluate_on or 'none'}. Labels of training data are not read. "
            "Leave it out."
        )
    if unused:
        raise ConfigError(
            f"{', '.join(unused)} must be left out for {data.dataset.partition(':')[0]}. csv_separator "
            "applies only to csv:PATH, other csv options also to parquet:PATH, and skip_corrupt to these and "
            "webdataset:PATH."
        )
