"""The user's own data: `npz:PATH`, `parquet:PATH` and `folder:PATH`.

Every record's id depends only on that record (see `dpgcl_core.sampling.record_ids`): on the name its owner
gave it, else on its bytes *as stored* and its label *as stored*. A class index or a resized image would
depend on the other records or on options, and removing one record would then move the rest.

The common shape of all images (size, and grayscale or colour) is a property of the whole data set and is
treated as public, like the data set's format. No message here holds a record's name or content. Which
records have which fault is only in `RecordsError.details`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError, show_on_a_terminal
from dpgcl_core.sampling.record_ids import Ids, ids_from_names
from trainers.data.class_names import as_text, class_indices, encodable
from trainers.data.decoding import content_ids, decode_images, is_image, resize_images
from trainers.data.faults import RecordsError
from trainers.data.pairs import LoadedData
from trainers.data.records import Records
from trainers.data.request import Request

if TYPE_CHECKING:
    import pyarrow as pa

_SPLIT_NAMES = frozenset(("train", "test", "val", "valid", "validation"))
_UNREADABLE_NPZ = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One split as stored: uint8 images `[num_rows, channels, height, width]` and unconverted labels."""

    images: NDArray[np.uint8]
    labels: NDArray[Any] | None
    ids: Ids
    row_starts: NDArray[np.int64] | None = None
    names: Sequence[str | int] | None = None
    reading_counts: Counter[str] = field(default_factory=Counter)


def _part_of_units(images: NDArray[np.uint8], labels: NDArray[Any] | None, units: list[str]) -> _Part:
    """Group the rows of each unit into one record, whose id is the unit's name."""
    names = sorted(set(units))  # no array of strings: it would drop trailing NULs and could merge two units
    number_of_unit = {name: number for number, name in enumerate(names)}
    unit_of_row = np.array([number_of_unit[unit] for unit in units], dtype=np.int64)
    order = np.argsort(unit_of_row, kind="stable")
    return _Part(
        images=images[order],
        labels=None if labels is None else labels[order],
        ids=_name_ids(names),
        row_starts=np.concatenate([[0], np.cumsum(np.bincount(unit_of_row))]).astype(np.int64),
    )


def load_npz(request: Request) -> LoadedData:
    """Return the records of an `.npz` file.

    The file holds `images` (uint8 `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` with 1 or 3 channels), and
    optionally `labels` `[N]` and `ids` `[N]`; or the same arrays with the prefixes `train_` and `test_`. The
    unit column is an array `[N]` with the same prefixes. Rows with the same value in it form one record.

    Raises:
      DataError: the file cannot be read, or its arrays break one of these rules.
    """
    unit_column = request.unit_column
    arrays = _read_npz(request.path, unit_column, request.max_image_pixels)
    prefixes = ("train_", "test_") if "train_images" in arrays else ("",)
    parts = [_npz_part(arrays, prefix, unit_column) for prefix in prefixes if f"{prefix}images" in arrays]
    return _to_splits(parts, request.image_size)


def _read_npz(path: Path, unit_column: str | None, max_pixels: int) -> dict[str, NDArray[Any]]:
    """Return the file's images, labels, ids and units by array name, after checks of size and prefix."""
    if not path.is_file():
        raise DataError(f"npz:PATH must be an existing file; got {str(path)!r}")
    columns = ["images", "labels", "ids", *([unit_column] if unit_column else [])]
    member_names = [prefix + name for prefix in ("", "train_", "test_") for name in columns]
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError
        with archive:
            names = sorted(archive.files)
            pixels = max(
                (_pixels_per_image(archive, name) for name in member_names if name in names), default=0
            )
            if pixels > max_pixels:
                raise DataError(
                    f"images of npz:PATH must have at most {max_pixels} pixels; got {pixels}. "
                    "Resize them, or raise --max-image-pixels"
                )
            arrays = {name: archive[name] for name in member_names if name in names}
    except DataError:
        raise
    except MemoryError:
        raise DataError(
            f"the arrays of npz:PATH must fit into memory; those of {str(path)!r} do not"
        ) from None
    except _UNREADABLE_NPZ:
        arrays = None
    if arrays is None:  # raised outside `except`: the reader's own message could quote the file's content
        raise DataError(
            f"npz:PATH must be a readable .npz of arrays without Python objects; got {str(path)!r}"
        )
    if ("images" in arrays) == ("train_images" in arrays):
        raise DataError(f"an .npz must hold either images or train_images; found {_join_names(names)}")
    for name in arrays:
        prefix = name[: -len(max((c for c in columns if name.endswith(c)), key=len))]
        if f"{prefix}images" not in arrays:
            raise DataError(f"an .npz with {name} must also hold {prefix}images; found {_join_names(names)}")
    return arrays


def _pixels_per_image(archive: np.lib.npyio.NpzFile, name: str) -> int:
    """Return the pixels of one image by an array's header; 0 if the array holds no images.

    Raises ValueError if the header declares more values than are stored, since reading would allocate all.
    """
    packed = archive.zip
    if packed is None:
        raise ValueError
    member = packed.getinfo(f"{name}.npy" if f"{name}.npy" in packed.namelist() else name)
    with packed.open(member) as opened:
        major, _ = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(opened)
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError
    return math.prod(sorted(shape[1:])[-2:]) if len(shape) in (3, 4) else 0


def _npz_part(arrays: dict[str, NDArray[Any]], prefix: str, unit_column: str | None) -> _Part:
    """Return the split of this prefix; ids come from the units, else from `ids`, else from the content."""
    images = _channels_first(arrays[f"{prefix}images"], f"{prefix}images")
    labels, names = arrays.get(f"{prefix}labels"), arrays.get(f"{prefix}ids")
    for column in ("labels", "ids", *([unit_column] if unit_column else [])):
        values = arrays.get(prefix + column)
        if values is not None and values.shape != (len(images),):
            raise RecordsError(
                f"{prefix}{column} must have one entry per image; got shape {values.shape} for "
                f"{len(images)} images"
            )
    if unit_column is not None:
        units = arrays.get(prefix + unit_column)
        if units is None or units.dtype.kind not in "iuUS":
            raise DataError(
                f"unit_column must name an array of strings or integers; got {prefix + unit_column!r}, "
                f"{'which is missing' if units is None else f'which holds {units.dtype}'}"
            )
        return _part_of_units(images, labels, as_text(units))
    if names is None:
        return _Part(images=images, labels=labels, ids=content_ids((i.tobytes() for i in images), labels))
    if names.dtype.kind not in "iuUS":
        raise DataError(f"{prefix}ids must be strings or integers; got {names.dtype}")
    return _Part(images=images, labels=labels, ids=_name_ids(as_text(names)), names=names.tolist())


def _channels_first(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if images.dtype != np.uint8:
        raise DataError(f"{name} must be uint8, 0 to 255; got {images.dtype}")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        raise DataError(f"{name} must be [N, H, W], [N, H, W, C] or [N, C, H, W]; got {images.ndim} axes")
    is_channels_first, is_channels_last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if is_channels_first == is_channels_last:
        raise DataError(
            f"{name} must have exactly one channel axis, of size 1 or 3, as second or last axis; got "
            f"the shape {images.shape[1:]} per image"
        )
    return images if is_channels_first else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def load_parquet(request: Request) -> LoadedData:
    """Return the records of a parquet file, or of all `*.parquet` files below a folder as one data set.

    Rows have a column `image` (encoded image bytes or paths, plain or as `{bytes, path}`) and optionally
    `label` (integers or strings) and `id` (unique integers or strings). Paths are relative to the file's
    folder or the given folder. Other columns are ignored. With captions the rows are pairs, see
    `trainers.data.pair_tables`. Rows with the same value in the unit column form one record.

    Raises:
      DataError: a file cannot be read, or its columns break one of these rules.
    """
    files, unit_column = existing_parquet_files(request.path), request.unit_column
    header = parquet_header(files[0])
    unit_rule = f"unit_column must name exactly one parquet column; got {unit_column!r}"
    for name, rule in (("image", "parquet data must have one column named image"), (unit_column, unit_rule)):
        if name is not None and header.count(name) != 1:
            raise DataError(f"{rule}. Columns found: {_join_names(header)}")
    table = read_parquet(files, {"image", "label", unit_column or "id"})
    base = base_folder(request.path)
    encoded = [_read_or_none(base / v) if isinstance(v, str) else v for v in unpacked(table.column("image"))]
    if {type(image) for image in encoded} - {bytes, type(None)}:
        raise DataError(
            "parquet column image must hold encoded image bytes or paths, plain or as {bytes, path}; "
            f"got {table.column('image').type}"
        )
    images, counts = decode_images(encoded, request.image_size, max_pixels=request.max_image_pixels)
    labels, names = _column(table, "label"), _column(table, unit_column or "id")
    if unit_column is not None and names is not None:
        part = _part_of_units(images, labels, as_text(names))
    elif names is None:
        part = _Part(images=images, labels=labels, ids=content_ids(encoded, labels))
    else:
        part = _Part(images=images, labels=labels, ids=_name_ids(as_text(names)), names=names.tolist())
    return _to_splits([dataclasses.replace(part, reading_counts=counts)], request.image_size)


def _read_or_none(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (OSError, ValueError):
        return None


def base_folder(path: Path) -> Path:
    """Return the folder that image paths in parquet data are relative to: the given one, or the file's."""
    return path.parent if path.is_file() else path


def parquet_files(path: Path) -> list[Path]:
    """Return the path itself if it is a parquet file, or the parquet files below a folder in order."""
    return [path] if path.is_file() else sorted(path.rglob("*.parquet"))


def existing_parquet_files(path: Path) -> list[Path]:
    """Return the parquet files at a path, as `parquet_files` does, but at least one.

    Raises:
      DataError: there are none.
    """
    files = parquet_files(path)
    if not files:
        raise DataError(f"parquet:PATH must be a .parquet file or a folder of them; got {str(path)!r}")
    return files


def parquet_read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that pyarrow raises for a file that is damaged or of an unknown format."""
    import pyarrow as pa

    return (OSError, ValueError, NotImplementedError, KeyError, pa.ArrowException)


def parquet_header(file: Path) -> list[str]:
    """Return the names of a file's columns.

    Raises:
      DataError: the file cannot be read.
    """
    import pyarrow.parquet as pq

    header = None
    with suppress(*parquet_read_errors()):
        header = pq.read_schema(file).names
    if header is None:  # raised outside `with`: the reader's own message could quote the file's content
        raise DataError("parquet files must be readable; the first one is not")
    return list(header)


def read_parquet(files: Sequence[Path], columns: Collection[str]) -> pa.Table:
    """Return the rows of all parquet files in order, with the columns among `columns` that the files have.

    Raises:
      RecordsError: some files cannot be read; their positions are in the error's details.
      DataError: files differ in these columns or their types, or have a column twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables, unreadable = [], []
    for position, file in enumerate(files):
        try:
            with pq.ParquetFile(file) as opened:
                tables.append(opened.read(columns=sorted({*columns} & {*opened.schema_arrow.names})))
        except parquet_read_errors():
            unreadable.append(position)
    if unreadable:
        raise RecordsError(
            f"parquet files must be readable; {len(unreadable)} of {len(files)} are not",
            {"files": unreadable},
        )
    names = sorted(tables[0].column_names)
    with suppress(pa.ArrowException):  # files may differ in 32- or 64-bit offsets of a column
        if all(sorted(table.column_names) == names for table in tables) and len({*names}) == len(names):
            return pa.concat_tables([table.select(names) for table in tables], promote_options="permissive")
    raise DataError(
        "parquet files must have the same columns of the same types, each only once; check the columns "
        f"{_join_names(list(columns))}"
    )


def unpacked(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column; of a `{bytes, path}` structure the bytes or, without bytes, the path."""
    values = column.to_pylist()
    parts = {"bytes", "path"}  # one of them may be missing; other structures are not images
    return [v.get("bytes") or v.get("path") if isinstance(v, dict) and parts & {*v} else v for v in values]


def _column(table: pa.Table, name: str) -> NDArray[Any] | None:
    """Return a column, if it exists, as integers or Python strings (NumPy strings lose trailing NULs)."""
    if name not in table.column_names:
        return None
    values = table.column(name).to_pylist()
    missing = values.count(None)
    if missing:
        raise RecordsError(f"parquet column {name} must have a value in every row; {missing} have none")
    kinds = {type(value) for value in values}
    if kinds - {int, bool, str}:
        raise DataError(f"parquet column {name} must hold integers or strings; got {table.column(name).type}")
    return np.array(values, object) if str in kinds else table.column(name).to_numpy()


def load_folder(request: Request) -> LoadedData:
    """Return the images below a folder, in the order of their relative paths, which are their ids.

    The folder holds one sub-folder per class, or only images (then there are no labels). A file is an image
    if its suffix or its first bytes are an image's, except camera raw files. Others are left out and counted;
    hidden files are ignored.

    Raises:
      DataError: the folder cannot be read, holds no images or breaks one of these rules.
    """
    path, image_size = request.path, request.image_size
    if not path.is_dir():
        raise DataError(f"folder:PATH must be an existing folder; got {str(path)!r}")
    names, ignored = _image_names(path)
    classes = [name.split("/", 1)[0] if "/" in name else None for name in names]
    if None in classes and any(classes):
        raise RecordsError(
            "folder:PATH must hold all images in class sub-folders, or none of them; "
            f"{classes.count(None)} of {len(classes)} images are outside"
        )
    if "train" in classes and _SPLIT_NAMES.issuperset(classes):
        raise DataError(
            "folder:PATH must hold class sub-folders, not splits; pass its train sub-folder as PATH"
        )
    if any(name.count("/") > 1 for name in names):  # cats/tabby/1.png is of the class cats
        shown_classes = sorted({str(name) for name in classes})
        show_on_a_terminal({"classes, named after the sub-folders directly below PATH": shown_classes})
    files = [path / name for name in names]
    images, counts = decode_images(files, image_size, max_pixels=request.max_image_pixels)
    labels = np.array(classes, dtype=np.str_) if any(classes) else None
    shown = list(map(encodable, names))
    ids, counts = _name_ids(names), counts + ignored
    part = _Part(images=images, labels=labels, ids=ids, names=shown, reading_counts=counts)
    return _to_splits([part], image_size)


def _image_names(path: Path) -> tuple[list[str], Counter[str]]:
    """Return the images' relative paths with forward slashes, sorted, and the number of other files."""
    names: list[str] = []
    unusable, ignored = Counter[str](), Counter[str]()

    def count_unreadable(_: OSError) -> None:
        unusable["closed"] += 1

    # By default os.walk skips a sub-folder that it may not open: records would be lost silently.
    for root, folders, files in os.walk(path, onerror=count_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        unusable["links"] += sum(os.path.islink(os.path.join(root, name)) for name in folders)
        prefix = Path(root).relative_to(path)
        for name in (name for name in files if not name.startswith(".")):
            if is_image(os.path.join(root, name)):
                names.append((prefix / name).as_posix())
            else:
                ignored[os.path.splitext(name)[1][1:].lower() or "no suffix"] += 1
    if unusable.total():
        raise RecordsError(
            "sub-folders of folder:PATH must be readable and must not be links; "
            f"{unusable['closed']} cannot be read, {unusable['links']} are links",
            dict(unusable),
        )
    kinds = ", ".join(sorted(ignored))
    return sorted(names), +Counter({f"files skipped, because they are not images ({kinds})": ignored.total()})


def _to_splits(parts: list[_Part], image_size: int | None) -> LoadedData:
    """Return the parts as records, with images of one shape and one list of classes."""
    if any(len(part.images) == 0 or 0 in part.images.shape for part in parts):
        raise DataError(
            "every split must hold at least one record, with at least one pixel; some split holds none"
        )
    labels, class_names = class_indices([part.labels for part in parts])
    images = [part.images if image_size is None else resize_images(part.images, image_size) for part in parts]
    shapes = [split.shape[1:] for split in images]
    if len(set(shapes)) > 1:
        raise DataError(
            "training and test images must have the same shape (channels, height, width); "
            f"got {shapes[0]} and {shapes[1]}"
        )
    records = [
        Records(
            images=split,
            ids=part.ids,
            labels=index,
            row_starts=part.row_starts,
            classes_from_data=part.labels is not None and part.labels.dtype.kind in "USO",
        )
        for split, part, index in zip(images, parts, labels, strict=True)
    ]
    names = [part.names for part in parts]
    return LoadedData(
        train=records[0],
        test=records[1] if len(records) > 1 else None,
        class_names=class_names,
        names=None if None in names else [name for part in names for name in part or ()],
        reading_counts=sum((part.reading_counts for part in parts), Counter[str]()),
    )


def _name_ids(names: list[str]) -> Ids:
    ids = ids_from_names(map(encodable, names))
    repeated = len(ids) - len(np.unique(ids))
    if repeated:
        raise RecordsError(
            f"ids must be unique, one per record; {repeated} of {len(ids)} repeat an earlier one. "
            "Make them unique, or leave them out to identify records by their content"
        )
    return ids


def label_place(name: str) -> str:
    """Return a phrase that names the place where `load_dataset` looks for labels of your own images.

    >>> label_place("folder:scans")
    'sub-folders named after the classes'
    """
    import pyarrow.parquet as pq

    scheme, _, path = name.partition(":")
    if scheme == "parquet":
        file = min(Path(path).expanduser().rglob("*.parquet"), default=Path(path).expanduser())
        return f"a column named `label`; found {_join_names(pq.read_schema(file).names)}"
    return "sub-folders named after the classes" if scheme == "folder" else "an array named `labels`"


def _join_names(names: list[str]) -> str:
    return ", ".join(sorted(names)) or "none"
