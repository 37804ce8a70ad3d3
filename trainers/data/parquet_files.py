"""Parquet or Arrow files of images or pairs: their columns, and their images, as encoded bytes or paths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError, DpgclError
from dpgcl_core.object_store import DataFile, address_of, find_objects, list_objects
from dpgcl_core.sampling.record_ids import digest_of_content
from trainers.data.arrow_files import ArrowFile, kind_of, open_table, saved_splits
from trainers.data.columns import codes_of, text_column
from trainers.data.decoding import content_digest, in_threads
from trainers.data.faults import RecordsError
from trainers.data.image_index import (
    IMAGES_AT_ONCE,
    ImageScan,
    ScannedImages,
    file_column,
    schema_of,
    stamps_of,
)
from trainers.data.request import Request

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_FIRST_IMAGES = 64
T = TypeVar("T")


@dataclass(frozen=True)
class RowImages:
    """The images of rows.

    Attributes:
      scanned: the images.
      image_of: the image of each row.
      keys: the key of each row's image by its path; None if some rows hold bytes.
      paths: the path of each row's image; None if some rows hold bytes.
      digests: of each row the digest of its image or, of images alone, of image and label; None if the rows
        hold paths.
    """

    scanned: ScannedImages
    image_of: NDArray[np.int64]
    keys: pa.Array | None = None
    paths: Sequence[str | None] | None = None
    digests: pa.Array | None = None


def scan_files(request: Request, base: Path, keys: pa.Array, paths: Sequence[str | None]) -> RowImages:
    """Return the images at `paths`, relative to `base` or absolute; rows with one key have one image."""
    image_of = codes_of(keys)
    rows = np.unique(image_of, return_index=True)[1].tolist()
    first = (base / path for path in (paths[row] for row in rows[:_FIRST_IMAGES]) if path)
    scan = ImageScan(request, len(rows), first, base)
    return RowImages(scan.files(base, file_column(paths[row] or "" for row in rows)), image_of, keys, paths)


def scan_parquet(
    request: Request, files: Sequence[DataFile], column: str, label: str | None = None
) -> RowImages:
    """Return the images in a column of parquet files.

    If there are no captions, some rows may hold bytes and others paths.

    Args:
      request: the data to read.
      files: all files.
      column: the column of the images.
      label: the column of the labels that digests include.

    Raises:
      RecordsError: some files cannot be read; their positions are in the error's details.
      DataError: the column holds something else, or pairs mix bytes and paths.
    """
    base = base_folder(request.path)
    paths = _paths_in(files, column, request)
    if paths is not None:
        keys = image_keys(paths, base) if request.has_captions else paths
        return scan_files(request, base, text_column(key or "" for key in keys), paths)
    import pyarrow as pa

    key, num_images = ["parquet", request.has_captions, column, label], sum(_read_each(files, num_rows))
    scan, stamps = ImageScan(request, num_images, _first_images(files, column, base), base), stamps_of(files)
    are_mapped = all(kind_of(file) == "Arrow" for file in files)
    content = {"content": pa.large_binary()}
    if are_mapped:
        content = dict.fromkeys(("offset", "num_bytes"), pa.uint64())
    if scan.keeps_pixels:
        content = {}
    schema = schema_of(digest=pa.binary(16), **content)

    def name_of(file: DataFile) -> str:
        return os.path.relpath(Path(str(file)), base)

    def read_part(file: DataFile) -> pa.Table:
        read = partial(_read_images, file, column, label, base, scan, schema)
        return scan.part(name_of(file), file, key, lambda: (schema, read()))

    tables = _read_each(files, read_part)
    if "content" not in content:
        scanned = scan.parts(tables, files, stamps)
    else:
        holders = [scan.index_file(name_of(file), *key) for file in files]
        stamps = np.array([scan.stamps[holder] for holder in holders], dtype=np.int64)
        scanned = scan.parts(tables, holders, stamps)
    return RowImages(scanned, np.arange(len(scanned.facts)), digests=scanned.facts["digest"])


def _paths_in(files: Sequence[DataFile], column: str, request: Request) -> list[str | None] | None:
    """Return each row's path, None for a row without; None if some row holds bytes.

    Only the rows up to the first image are read if that image is bytes.

    Raises:
      DataError: the data are pairs, and some rows hold paths and others bytes.
    """
    first = next((value for value in _values(files, column) if value is not None), None)
    if not isinstance(first, str):
        return None
    if address_of(request.path):
        raise DataError(f"{kind_of(files[0])} data in a bucket must hold encoded images; got paths")
    values = unpacked(read_parquet(files, {column}).column(column))
    if all(value is None or isinstance(value, str) for value in values):
        return [value or None for value in values]
    if request.has_captions:
        raise DataError(f"{kind_of(files[0])} column {column} must hold paths or encoded image bytes")
    return None


def _values(files: Sequence[DataFile], column: str) -> Iterator[Any]:
    """Yield the values of the images' column, as far as files can be read."""
    for file in files:
        with suppress(*parquet_read_errors()), open_table(file) as table:
            for batch in table.iter_batches(batch_size=_FIRST_IMAGES, columns=[column]):
                yield from unpacked(batch.column(column))


def _first_images(files: Sequence[DataFile], column: str, base: Path) -> Iterator[bytes | Path | None]:
    """Yield the first images."""
    for value in itertools.islice(_values(files, column), _FIRST_IMAGES):
        yield base / value if isinstance(value, str) else value


def _read_images(
    file: DataFile, column: str, label: str | None, base: Path, scan: ImageScan, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the facts of the images in one file, and the images if the schema has a column for them."""
    import pyarrow as pa

    def read_path(path: str) -> bytes | None:
        # A path in a bucket's table must name no file of this machine.
        return _read_or_none(base / path) if isinstance(file, Path) else None

    are_pairs, kind = scan.request.has_captions, kind_of(file)
    with open_table(file) as table:
        wanted = [column] if label is None else [column, label]
        for batch in table.iter_batches(batch_size=IMAGES_AT_ONCE, columns=wanted):
            values = unpacked(batch.column(column))
            kinds = {type(value) for value in values} - {type(None)}
            if are_pairs and kinds - {bytes}:
                raise DataError(f"{kind} column {column} must hold paths or encoded image bytes")
            if str in kinds and not scan.keeps_pixels:  # whose files would not be noticed if they change
                raise DataError(
                    "images that do not fit into memory must all be paths, or all bytes; "
                    f"{kind} column image holds both. Split the data, or pass --in-memory"
                )
            if kinds - {bytes, str}:
                raise DataError(
                    f"{kind} column image must hold encoded image bytes or paths, plain or as {{bytes, "
                    f"path}}; got {batch.column(column).type}"
                )
            contents = in_threads(lambda v: read_path(v) if isinstance(v, str) else v, values)
            columns = scan.facts(contents)
            if are_pairs:
                columns["digest"] = [digest_of_content(v or b"") for v in contents]
            else:
                labels = [None] * len(values) if label is None else batch.column(label).to_pylist()
                columns["digest"] = list(map(content_digest, contents, labels))
            if "content" in schema.names:
                columns["content"] = contents
            elif isinstance(table, ArrowFile) and not scan.keeps_pixels:
                columns |= table.places(batch.column(column))
            yield pa.RecordBatch.from_pydict(columns, schema)


def _read_or_none(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (OSError, ValueError):
        return None


def has_all_bytes(group: pq.RowGroupMetaData, image: str) -> bool:
    """Whether every image of a row group is stored as bytes, by the group's statistics."""
    columns = [group.column(number) for number in range(group.num_columns)]
    statistics = [c.statistics for c in columns if c.path_in_schema in (image, f"{image}.bytes")]
    return any(s and str(s.logical_type.type) == "NONE" and s.null_count == 0 for s in statistics)


def base_folder(path: Path) -> Path:
    """Return the folder that image paths in parquet data are relative to: the given one, or the file's."""
    return path.parent if path.is_file() else path


def image_keys(paths: Sequence[str | None], base: Path) -> list[str]:
    """Return the key of each image that is given by its path: relative if in `base`, else absolute.

    >>> image_keys(["a.png", "./b/../a.png", "/data/a.png", "../a.png", None], Path("/data"))
    ['a.png', 'a.png', 'a.png', '/a.png', '']
    """
    # A folder that is reached through a link has two absolute paths; the file may contain either.
    roots = [os.path.join(root, "") for root in (os.path.abspath(base), os.path.realpath(base))]

    def key_of_path(path: str) -> str:
        absolute = os.path.normpath(os.path.join(roots[0], path))
        return next((absolute.removeprefix(root) for root in roots if absolute.startswith(root)), absolute)

    return [key_of_path(path) if path else "" for path in paths]


def table_splits(path: Path, scheme: str) -> list[list[DataFile]]:
    """Return the files of the training split and, for a saved data set that has one, of the test split.

    These are the path itself, all parquet files below it in order, or those of a Hugging Face data set.

    Raises:
      DataError: there are none, or as in `trainers.data.arrow_files.saved_splits`.
    """
    if scheme == "hf":
        return [list(files) for files in saved_splits(path)]
    files: list[DataFile]
    if address := address_of(path):
        files = [file for file in list_objects(address) if file.address.endswith(".parquet")]
        files += [] if files else find_objects([address])
    else:
        files = [path] if path.is_file() else [*sorted(path.rglob("*.parquet"))]
    if not files:
        raise DataError(
            f"parquet:PATH must be a .parquet file or a folder of them; got {address or str(path)!r}"
        )
    return [files]


def num_rows(*files: DataFile) -> int:
    """Return the number of rows of files."""
    total = 0
    for file in files:
        with open_table(file) as table:
            total += table.metadata.num_rows
    return total


def parquet_read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for a file that is damaged or of an unknown format."""
    import pyarrow as pa

    return (OSError, ValueError, NotImplementedError, KeyError, pa.ArrowException)


def parquet_header(file: DataFile) -> list[str]:
    """Return the names of a file's columns.

    Raises:
      DataError: the file cannot be read.
    """
    header = None
    with suppress(*parquet_read_errors()), open_table(file) as table:
        header = table.schema_arrow.names
    if header is None:  # raised outside `with`: the reader's own message could quote the file's content
        raise DataError(f"{kind_of(file)} files must be readable; the first one is not")
    return list(header)


def read_parquet(files: Sequence[DataFile], columns: Collection[str]) -> pa.Table:
    """Return the rows of all files in order, with the columns among `columns` that the files have.

    Raises:
      RecordsError: some files cannot be read; their positions are in the error's details.
      DataError: files differ in these columns or their types, or have a column twice.
    """
    import pyarrow as pa

    def read(file: DataFile) -> pa.Table:
        with open_table(file) as opened:
            return opened.read(columns=sorted({*columns} & {*opened.schema_arrow.names}))

    tables = _read_each(files, read)
    names = sorted(tables[0].column_names)
    with suppress(pa.ArrowException):  # files may differ in 32- or 64-bit offsets of a column
        if all(sorted(table.column_names) == names for table in tables) and len({*names}) == len(names):
            return pa.concat_tables([table.select(names) for table in tables], promote_options="permissive")
    raise DataError(
        f"{kind_of(files[0])} files must have the same columns of the same types, each only once; check the "
        f"columns {join_names(list(columns))}"
    )


def unpacked(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column; of a `{bytes, path}` structure the bytes or, without bytes, the path."""
    values = column.to_pylist()
    parts = {"bytes", "path"}  # one of them may be missing; other structures are not images
    return [v.get("bytes") or v.get("path") if isinstance(v, dict) and parts & {*v} else v for v in values]


def _read_each(files: Sequence[DataFile], read: Callable[[DataFile], T]) -> list[T]:
    """Return what `read` returns for each file; raise RecordsError if files are unreadable."""
    results, unreadable = [], []
    for position, file in enumerate(files):
        try:
            results.append(read(file))
        except DpgclError:
            raise
        except parquet_read_errors():
            unreadable.append(position)
    if unreadable:
        raise RecordsError(
            f"{kind_of(files[0])} files must be readable; {len(unreadable)} of {len(files)} are not",
            {"files": unreadable},
        )
    return results


def join_names(names: list[str]) -> str:
    """Return names in order, separated by commas, or `none`."""
    return ", ".join(sorted(names)) or "none"
