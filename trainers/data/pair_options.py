"""The columns of a file of pairs, with the user's names or with open_clip's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpgcl_core.errors import ConfigError, DataError
from trainers.config.tree import option
from trainers.data.dataset_registry import source_of

IMAGE_COLUMNS, CAPTION_COLUMNS = ("filepath", "image"), ("title", "caption")


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """How your own pairs are read: which columns hold which data, and how corrupt rows are treated."""

    image: str | None = field(default=None, metadata=option("csv_img_key"))
    """Column of csv, parquet or hf with image paths or, except csv, bytes; by default filepath or image."""
    caption: str | None = field(default=None, metadata=option("csv_caption_key"))
    """Column of csv, parquet or hf with captions or, except csv, lists of them; default title or caption."""
    separator: str = field(default="\t", metadata=option("csv_separator"))
    """Character between the columns of csv:PATH; by default a tab, as in open_clip."""
    unit: str | None = field(default=None, metadata=option(None))
    """Column that names the privacy unit; None: it is one image with all its captions."""
    split: str | None = field(default=None, metadata=option("csv_split_key"))
    """Column of csv, parquet or hf that holds train or test; by default all rows are training rows."""
    label: str | None = field(default=None, metadata=option("csv_label_key"))
    """Column of csv, parquet or hf with the images' classes; for shards:PATH their kind of file: cls."""
    class_captions: str | None = field(default=None, metadata=option(None))
    """Caption template with {} for the class's name, for labelled images without captions."""
    skip_corrupt: bool = False
    """Drop corrupt image-text rows, such as rows without a readable image, instead of ending in an error."""

    def __post_init__(self) -> None:
        if self.separator == "\\t":  # most shells pass a tab this way
            object.__setattr__(self, "separator", "\t")
        if len(self.separator) != 1 or self.separator in '"\r\n':
            raise ConfigError(
                "the csv separator must be one character other than a quote or a line end; "
                f"got {self.separator!r}. A tab is the default"
            )
        if self.class_captions is not None and "{}" not in self.class_captions:
            raise ConfigError(
                f"class_captions must contain {{}} where the class's name goes; got {self.class_captions!r}. "
                'Example: "a photo of a {}."'
            )
        columns = (self.image, self.caption, self.unit, self.split, self.label)
        names = [name for name in columns if name is not None]
        if "" in names or len(set(names)) < len(names):
            raise ConfigError(f"column names must be distinct and not empty; got {', '.join(names)!r}")

    @property
    def changed_fields(self) -> tuple[str, ...]:
        """The names of the fields that differ from their defaults."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)

    def fitting(self, name: str) -> PairOptions:
        """Return the options with every field that does not apply to data set `name` set to its default.

        >>> PairOptions(separator=",", skip_corrupt=True).fitting("webdataset:x.tar").changed_fields
        ('skip_corrupt',)
        """
        source = source_of(name)
        applicable = () if source is None else source.options
        return PairOptions(
            **{field: getattr(self, field) for field in self.changed_fields if field in applicable}
        )


def resolve_columns(
    options: PairOptions, header: list[str], scheme: str, separator: str = "", *, has_captions: bool = True
) -> PairOptions:
    """Return `options` with the name of every column to read, as it is in the header.

    `scheme` (csv, parquet or hf) and a csv file's separator are for the error message.

    Raises:
      DataError: a column does not occur exactly once; the message holds no column name from the file.
    """

    def find(name: str | None, usual_names: tuple[str, ...], purpose: str) -> str:
        return _find((name,) if name else usual_names, header, scheme, separator, purpose)

    return dataclasses.replace(
        options,
        image=image_column(options, header, scheme, separator),
        caption=find(options.caption, CAPTION_COLUMNS, "captions") if has_captions else None,
        unit=options.unit and find(options.unit, (), "privacy unit"),
        split=options.split and find(options.split, (), "split"),
        label=options.label and find(options.label, (), "labels"),
    )


def image_column(options: PairOptions, header: list[str], scheme: str, separator: str = "") -> str:
    """Return the name of the image column in the header, without checking the other columns.

    Raises:
      DataError: as `resolve_columns`.
    """
    usual = IMAGE_COLUMNS[:1] if scheme == "csv" else IMAGE_COLUMNS
    return _find((options.image,) if options.image else usual, header, scheme, separator, "images")


def _find(names: Sequence[str], header: list[str], scheme: str, separator: str, purpose: str) -> str:
    """Return the name in `names` that occurs once in the header.

    If a csv file has no header, a record is in its place: the message holds neither cells nor their number.
    """
    matches = [name for name in names if header.count(name) == 1]
    if len(matches) == 1:
        return matches[0]
    how_many = "several have" if any(name in names for name in header) else "none has"
    hint = f" with separator {separator!r}" if separator else ""
    error = DataError(
        f"{scheme} data must have one column named {' or '.join(names)} for the {purpose}; {how_many} such a "
        f"name{hint}. Name the column (--csv-img-key, --csv-caption-key, …), or set the separator "
        "(--csv-separator)"
    )
    error.details = {"columns": list(header)}
    raise error
