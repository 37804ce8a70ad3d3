"""The user's own pairs: `csv:PATH` and `parquet:PATH`, in open_clip's convention.

A column `filepath` names the image, a column `title` holds a caption, and several rows with one image give
the image several captions. `trainers.data.pairs` defines a record and its id: without a unit column, a record
is one image with all its captions, whatever other columns there are.

An image that is given by its path is identified by that path: relative to the file's folder if the image is
in that folder, so that ids stay when the folder moves, else absolute. So one image is one record however its
path is spelled. A file that links give several paths becomes several records.

No message holds a line of the file: even the first line is a record if the columns have no names, or if the
file uses another separator.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.object_store import address_of
from trainers.data.arrow_files import ArrowFile, kind_of, open_table, saved_class_names, split_names
from trainers.data.columns import text_column, values_of
from trainers.data.faults import RecordsError
from trainers.data.own_images import load_parquet
from trainers.data.pair_options import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    PairOptions,
    image_column,
    resolve_columns,
)
from trainers.data.pairs import SPLITS, LoadedData, PairRows, assemble, caption_fault
from trainers.data.parquet_files import (
    RowImages,
    base_folder,
    has_all_bytes,
    image_keys,
    num_rows,
    parquet_header,
    parquet_read_errors,
    read_parquet,
    scan_files,
    scan_parquet,
    table_splits,
    unpacked,
)
from trainers.data.request import Request
from trainers.data.stored_images import unchanged

if TYPE_CHECKING:
    import pyarrow as pa

_END = "\x00end of file\x00"
_ID, _LABEL = "id", "label"
# Of UTF-32 first: the one of little endian begins as that of UTF-16.
_BYTE_ORDER_MARKS = {"utf-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"), "utf-16": (b"\xff\xfe", b"\xfe\xff")}


def load_csv(request: Request) -> LoadedData:
    """Return the pairs, or the images alone, of a csv file whose first line names the columns.

    Its text is UTF-8, or UTF-16 or UTF-32 with a byte order mark. Relative image paths start from the file's
    folder. Images alone have the labels of the column `label`, if there is one.

    Raises:
      RecordsError: some rows are corrupt (their positions are in `details`), or images differ in size.
      DataError: the file cannot be read, or its columns break one of these rules.
    """
    path, options = request.path, request.pairs
    header, lines = _read_csv(path, options.separator)
    if not request.has_captions:
        options = dataclasses.replace(options, label=options.label or (_LABEL if _LABEL in header else None))
    names = resolve_columns(options, header, "csv", options.separator, has_captions=request.has_captions)
    sound = [line if len(line) == len(header) else None for line in lines]

    def column(name: str | None) -> list[str] | None:
        index = None if name is None else header.index(name)
        return None if index is None else ["" if line is None else line[index] for line in sound]

    paths, texts = column(names.image) or [], column(names.caption)
    keys = text_column(image_keys(paths, path.parent))
    captions = None if texts is None else [(text,) for text in texts]
    faults = [caption_fault(row) for row in captions] if captions is not None else [""] * len(sound)
    units, splits, labels = map(column, (names.unit, names.split, names.label))
    rows = _pair_rows(
        scan_files(request, path.parent, keys, paths),
        keys,
        captions,
        ["malformed" if line is None else fault for line, fault in zip(sound, faults, strict=True)],
        names=column(_ID) if header.count(_ID) == 1 else _normalised(paths),
        units=units,
        splits=splits,
        labels=labels,
    )
    return assemble(rows, skip_corrupt=options.skip_corrupt)


def load_parquet_pairs(request: Request) -> LoadedData:
    """Return the pairs of a parquet file, or of all parquet files below a folder, sorted by their paths.

    The image column holds paths, encoded bytes, or structures {bytes, path} whose path is read if the bytes
    are missing. Paths are relative to the file's folder or to the given folder. The caption column holds
    one caption or a list. Raises as `load_csv_pairs` does.
    """
    split_files = table_splits(request.path, request.scheme)
    files = list(itertools.chain(*split_files))
    header = parquet_header(files[0])
    names = resolve_columns(request.pairs, header, kind_of(files[0]))
    columns = (names.image, names.caption, names.unit, names.split, names.label)
    wanted = {name for name in columns if name is not None}
    with unchanged(files):
        images = scan_parquet(request, files, names.image or "")
        table = read_parquet(files, (wanted | {_ID} if header.count(_ID) == 1 else wanted) - {names.image})
    values = {name: table.column(name).to_pylist() for name in table.column_names}
    captions = [entry if isinstance(entry, list) else [entry] for entry in values[names.caption or ""]]
    if {type(text) for texts in captions for text in texts} - {str, type(None)}:
        raise DataError(f"{kind_of(files[0])} column {names.caption} must hold strings or lists of strings")
    keys = images.keys
    if images.digests is not None:
        keys = text_column(digest.hex() for digest in images.digests.to_pylist())

    def texts_of(name: str | None) -> list[str] | None:
        # A table marks an empty cell with NaN, the only value that differs from itself.
        return None if name is None else ["" if v is None or v != v else str(v) for v in values[name]]

    units, splits, labels = map(texts_of, (names.unit, names.split, names.label))
    if len(split_files) > 1 and splits is None:
        sizes = [num_rows(*files) for files in split_files]
        splits = np.repeat(SPLITS, sizes).tolist()
    texts = [tuple(text or "" for text in entry) for entry in captions]
    rows = _pair_rows(
        images,
        keys,
        texts,
        list(map(caption_fault, texts)),
        names=values.get(_ID) or _normalised(images.paths),
        units=units,
        splits=splits,
        labels=labels,
    )
    return assemble(rows, skip_corrupt=request.pairs.skip_corrupt)


def _pair_rows(
    images: RowImages,
    keys: pa.Array,
    captions: Sequence[tuple[str, ...]] | None,
    faults: list[str],
    **columns: Sequence[Any] | None,
) -> PairRows:
    """Return the rows of a table; a row without a fault of its own has the fault of its image."""
    import pyarrow as pa

    image_faults = images.scanned.facts["fault"].take(images.image_of)
    faults = [
        own if own == "malformed" or not image else f"{image} image"
        for own, image in zip(faults, values_of(image_faults), strict=True)
    ]
    if captions is not None:
        captions = [() if fault else row for row, fault in zip(captions, faults, strict=True)]
    return PairRows(
        keys=keys,
        captions=None if captions is None else pa.array(captions, pa.large_list(pa.large_string())),
        faults=pa.array(faults),
        images=images.scanned,
        image_of=images.image_of,
        **cast(Any, {k: None if values is None else text_column(values) for k, values in columns.items()}),
    )


def load_parquet_of_either(request: Request) -> LoadedData:
    """Return the records of parquet files: pairs if a column has captions, else images."""
    return load_parquet_pairs(request) if request.has_captions else load_parquet(request)


def load_hf(request: Request) -> LoadedData:
    """Return the records of a saved Hugging Face data set, under the rules of parquet files.

    The splits `train` and `test` of a `DatasetDict` are the records' splits. Others are left out and counted.
    """
    dataset = load_parquet_of_either(request)
    other_splits = sorted({*split_names(request.path)} - {*SPLITS})
    left_out = +Counter({f"splits left out ({', '.join(other_splits)})": len(other_splits)})
    class_names = dataset.class_names
    if not class_names and dataset.train.labels is not None:
        class_names = saved_class_names(request.path, request.pairs.label or _LABEL)
    counts = dataset.reading_counts + left_out
    return dataclasses.replace(dataset, class_names=class_names, reading_counts=counts)


def has_captions(path: Path, options: PairOptions | None = None, scheme: str = "parquet") -> bool:
    """Whether parquet data hold captions: in the column named in the options, else `title` or `caption`.

    Only the first file's schema is read. The result is False if it cannot be read; loading then reports why.
    """
    usual = CAPTION_COLUMNS if options is None or options.caption is None else (options.caption,)
    try:
        return not set(usual).isdisjoint(parquet_header(table_splits(path, scheme)[0][0]))
    except DataError:
        return False


def csv_has_captions(path: Path, options: PairOptions | None = None) -> bool:
    """Whether a csv file has captions: unless it has a column of images and no usual column of captions.

    Only its first line is read. The result is True if it cannot be read; loading then reports why.
    """
    options = options or PairOptions()
    header: list[str] = []
    with (
        suppress(OSError, csv.Error, UnicodeError, DataError),
        path.open(encoding=_encoding(path), errors="surrogateescape", newline="") as opened,
    ):
        header = next(csv.reader(opened, delimiter=options.separator), [])
    has_images = header.count(options.image or IMAGE_COLUMNS[0]) == 1
    return not has_images or options.caption is not None or not set(CAPTION_COLUMNS).isdisjoint(header)


def image_folders(name: str, options: PairOptions | None = None) -> list[Path]:
    """Return the folders of the image files that a csv, parquet or Arrow file lists, and of links' targets.

    No image is read. The list is empty if the images are in the file itself, or if the file cannot be read;
    loading then reports why.
    """
    folders = set()
    for file in image_files(name, options):
        folders.add(os.path.dirname(file))
        if os.path.islink(file):
            folders.add(os.path.dirname(os.path.realpath(file)))
    return [Path(folder) for folder in sorted(folders)]


def image_files(name: str, options: PairOptions | None = None) -> list[str]:
    """Return the image files that a csv, parquet or Arrow file lists, under the rules of `image_folders`."""
    scheme, _, rest = name.partition(":")
    path, options = Path(rest).expanduser(), options or PairOptions()
    if scheme not in ("csv", "parquet", "hf") or address_of(path):  # a table in a bucket holds its images
        return []
    try:
        files = _csv_paths(path, options) if scheme == "csv" else _table_paths(path, options, scheme)
        return [file for file in files if "\0" not in file]
    except (DataError, ConfigError):
        return []


def _csv_paths(path: Path, options: PairOptions) -> Iterator[str]:
    """Yield the path of the image of each well-formed row."""
    header, lines = _read_csv(path, options.separator)
    index = header.index(image_column(options, header, "csv", options.separator))
    for line in lines:
        if len(line) == len(header) and line[index]:
            yield os.path.join(path.parent, line[index])


def _table_paths(path: Path, options: PairOptions, scheme: str) -> Iterator[str]:
    """Yield the path of the image of each row that holds no bytes."""
    base = base_folder(path)
    try:
        for file in itertools.chain(*table_splits(path, scheme)):
            with open_table(file) as table:
                image = image_column(options, table.schema_arrow.names, kind_of(file))
                if isinstance(table, ArrowFile):
                    columns = iter([table.rows_without_bytes(image)])
                else:
                    groups = map(table.metadata.row_group, range(table.num_row_groups))
                    numbers = [n for n, group in enumerate(groups) if not has_all_bytes(group, image)]
                    columns = (table.read_row_group(n, [image]).column(image) for n in numbers)
                for value in itertools.chain.from_iterable(map(unpacked, columns)):
                    if value and isinstance(value, str):
                        yield os.path.join(base, value)
    except parquet_read_errors():
        return


def _normalised(paths: Sequence[str | None] | None) -> list[str | None] | None:
    """Return each image's path without `..`; None for an image without a path."""
    return None if paths is None else [os.path.normpath(path) if path else None for path in paths]


def _read_csv(path: Path, separator: str) -> tuple[list[str], list[list[str]]]:
    """Return the column names in a csv file's first line, and the cells of each further line."""
    if not path.is_file():
        raise DataError(f"csv:PATH must be an existing file; got {str(path)!r}")
    lines: list[list[str]] = []
    with (
        suppress(OSError, csv.Error, UnicodeError),
        path.open(encoding=_encoding(path), errors="surrogateescape", newline="") as opened,
    ):
        # An unclosed quote would absorb the rest of the file, including this last line.
        text = itertools.chain(opened, ["\n", _END])
        lines = [line for line in csv.reader(text, delimiter=separator) if line]
    if len(lines) < 2 or lines[-1] != [_END]:
        raise DataError(
            "csv:PATH must be a readable text file with a line of column names and no unclosed quote; "
            f"got {str(path)!r}"
        )
    _check_one_line_each(lines[:-1])
    return lines[0], lines[1:-1]


def _encoding(path: Path) -> str:
    """Return the encoding that the file's byte order mark states; UTF-8 without a mark.

    Raises:
      DataError: there are zero bytes, so the text is UTF-16 or UTF-32 without a mark.
    """
    with path.open("rb") as opened:
        start = opened.read(64)
    for encoding, marks in _BYTE_ORDER_MARKS.items():
        if start.startswith(marks):
            return encoding
    if b"\0" in start:
        raise DataError(
            f"csv:PATH must be UTF-8, or UTF-16 with a byte order mark; {str(path)!r} is neither: save it as "
            "UTF-8"
        )
    return "utf-8-sig"


def _check_one_line_each(lines: Sequence[Sequence[str]]) -> None:
    """Raise RecordsError if a cell of a csv file, column names included, has a line break.

    Two quotes that do not belong together turn all lines between them into one cell, and those rows would be
    lost silently. No single row shows whether this was intended. Dropping such rows would not be a function
    of each row alone, so the whole file is rejected, even with --skip-corrupt.

    Raises:
      RecordsError: the rows are in `details`, where the first row is 0 and column names are -1.
    """
    rows = [row - 1 for row, line in enumerate(lines) if any("\n" in cell or "\r" in cell for cell in line)]
    if rows:
        raise RecordsError(
            f"every row of a csv file must take one line; rows with line breaks: {len(rows)}. A stray quote "
            "may join rows. Write captions without line breaks, and double each quote in a caption",
            {"rows with line breaks": rows},
        )
