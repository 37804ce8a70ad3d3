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
import itertools
import math
import os
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError, show_on_a_terminal
from dpgcl_core.sampling.record_ids import Ids, ids_from_digests, ids_from_names
from trainers.data.arrow_files import kind_of
from trainers.data.class_names import as_text, class_indices, encodable
from trainers.data.columns import ArrowColumn, codes_of, raw_values, text_column, values_of
from trainers.data.decoding import GREY, content_ids, is_image, refuse_faults, resize_images
from trainers.data.faults import RecordsError
from trainers.data.image_index import ImageScan, ScannedImages, file_column
from trainers.data.pairs import LoadedData
from trainers.data.parquet_files import (
    base_folder,
    join_names,
    num_rows,
    parquet_header,
    read_parquet,
    scan_parquet,
    table_splits,
)
from trainers.data.records import Records
from trainers.data.request import Request
from trainers.data.stored_images import (
    ArrayImages,
    Images,
    channels_first,
    in_parts,
    select,
    stamp_of,
    unchanged,
)
from trainers.files.machine_memory import free_memory

if TYPE_CHECKING:
    import pyarrow as pa

_SPLIT_NAMES = frozenset(("train", "test", "val", "valid", "validation"))
_ZIP_NAME_SIZES, _ZIP_HEADER_SIZE = 26, 30  # APPNOTE.TXT of PKWARE, 4.3.7: the local header of a file
_UNREADABLE_NPZ = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One split as stored: images `[num_rows, channels, height, width]` and unconverted labels."""

    images: Images
    labels: NDArray[Any] | None
    ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    row_starts: NDArray[np.int64] | None = None
    names: Sequence[str | int] | None = None
    reading_counts: Counter[str] = field(default_factory=Counter)


def _by_unit(part: _Part, units: pa.Array) -> _Part:
    """Group the rows of each unit into one record, whose id is the unit's name."""
    code_of_row, names = codes_of(units), list(dict.fromkeys(values_of(units)))
    order_of_names = np.argsort(np.array(names, dtype=object), kind="stable")
    unit_of_row = np.argsort(order_of_names)[code_of_row]
    order = np.argsort(unit_of_row, kind="stable")
    return dataclasses.replace(
        part,
        images=select(part.images, order),
        labels=None if part.labels is None else part.labels[order],
        ids=_name_ids(names[number] for number in order_of_names),
        row_starts=np.concatenate([[0], np.cumsum(np.bincount(unit_of_row))]).astype(np.int64),
    )


def _scanned_part(
    scanned: ScannedImages,
    image_of: NDArray[np.int64],
    labels: NDArray[Any] | None,
    sources: Sequence[bytes] | None = None,
) -> _Part:
    """Return a split of images without captions, whose rows have the images `image_of`.

    There is one channel if every image of the data set is grayscale, else RGB. Faulty images are named in the
    error's details if `sources` has their names; else the details hold the rows.

    Raises:
      RecordsError: some images cannot be used, or they differ in size.
    """
    if len(image_of) == 0:
        raise DataError("a data set must hold at least one image; found none")
    faults = scanned.facts["fault"].to_numpy()[image_of]
    refuse_faults(faults, scanned.request.max_image_pixels, sources)
    is_grey = scanned.facts["is_grey"].to_numpy()
    channels = 1 if is_grey.all() else 3  # of all splits
    counts = Counter({GREY: int(is_grey[image_of].sum()) if channels == 3 else 0})
    return _Part(images=scanned.images(image_of, channels), labels=labels, reading_counts=counts)


def load_npz(request: Request) -> LoadedData:
    """Return the records of an `.npz` file.

    The file holds `images` (uint8 `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]` with 1 or 3 channels), and
    optionally `labels` `[N]` and `ids` `[N]`; or the same arrays with the prefixes `train_` and `test_`. The
    unit column is an array `[N]` with the same prefixes. Rows with the same value in it form one record.

    Raises:
      DataError: the file cannot be read, or its arrays break one of these rules.
    """
    stamp = stamp_of(request.path)
    with unchanged([request.path]):
        arrays = _read_npz(request)
        prefixes = ("train_", "test_") if "train_images" in arrays else ("",)
        parts = [_npz_part(arrays, p, stamp, request) for p in prefixes if f"{p}images" in arrays]
    return _to_splits(parts, request.image_size)


def _read_npz(request: Request) -> dict[str, NDArray[Any]]:
    """Return the file's images, labels, ids and units by array name, after checks of size and prefix.

    Images that do not fit into memory are mapped.
    """
    path, unit_column, max_pixels = request.path, request.unit_column, request.max_image_pixels
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
            arrays = {name: _member(archive, name, request) for name in member_names if name in names}
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
        raise DataError(f"an .npz must hold either images or train_images; found {join_names(names)}")
    for name in arrays:
        prefix = name[: -len(max((c for c in columns if name.endswith(c)), key=len))]
        if f"{prefix}images" not in arrays:
            raise DataError(f"an .npz with {name} must also hold {prefix}images; found {join_names(names)}")
    return arrays


def _pixels_per_image(archive: np.lib.npyio.NpzFile, name: str) -> int:
    """Return the pixels of one image by an array's header; 0 if the array holds no images.

    Raises ValueError if the header declares more values than are stored, since reading would allocate all.
    """
    shape, _, dtype, member, _ = _header(archive, name)
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError
    return math.prod(sorted(shape[1:])[-2:]) if len(shape) in (3, 4) else 0


def _header(archive: np.lib.npyio.NpzFile, name: str) -> tuple[Any, bool, Any, zipfile.ZipInfo, int]:
    """Return an array's shape, whether it is in Fortran order, its type, its member and its header's size."""
    packed = archive.zip
    if packed is None:
        raise ValueError
    member = packed.getinfo(f"{name}.npy" if f"{name}.npy" in packed.namelist() else name)
    with packed.open(member) as opened:
        major, _ = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        return *read(opened), member, opened.tell()


def _member(archive: np.lib.npyio.NpzFile, name: str, request: Request) -> NDArray[Any]:
    """Return an array of the file, mapped if it holds images that do not fit into memory.

    Raises:
      DataError: images shall stay in their file, and the file is compressed.
    """
    shape, is_fortran, dtype, member, header_size = _header(archive, name)
    fits = request.in_memory
    if fits is None:
        fits = member.file_size <= free_memory() // 4
    if fits or not name.endswith("images"):
        return archive[name]
    if member.compress_type != zipfile.ZIP_STORED or is_fortran or dtype != np.uint8:
        if request.in_memory is None:
            return archive[name]
        raise DataError("images stay only in an .npz that is not compressed. Write it with np.savez")
    with request.path.open("rb") as opened:
        opened.seek(member.header_offset + _ZIP_NAME_SIZES)
        sizes_of_name_and_extra = np.frombuffer(opened.read(4), "<u2")
    start = member.header_offset + _ZIP_HEADER_SIZE + int(sizes_of_name_and_extra.sum()) + header_size
    return np.memmap(request.path, np.uint8, "r", offset=start, shape=shape)


def _npz_part(
    arrays: dict[str, NDArray[Any]], prefix: str, stamp: tuple[int, int], request: Request
) -> _Part:
    """Return the split of this prefix; ids come from the units, else from `ids`, else from the content."""
    images = _stored_or_array(arrays[f"{prefix}images"], f"{prefix}images", stamp, request.path)
    unit_column = request.unit_column
    labels, names = arrays.get(f"{prefix}labels"), arrays.get(f"{prefix}ids")
    for column in ("labels", "ids", *([unit_column] if unit_column else [])):
        values = arrays.get(prefix + column)
        if values is not None and values.shape != images.shape[:1]:
            raise RecordsError(
                f"{prefix}{column} must have one entry per image; got shape {values.shape} for "
                f"{images.shape[0]} images"
            )
    if unit_column is not None:
        units = arrays.get(prefix + unit_column)
        if units is None or units.dtype.kind not in "iuUS":
            raise DataError(
                f"unit_column must name an array of strings or integers; got {prefix + unit_column!r}, "
                f"{'which is missing' if units is None else f'which holds {units.dtype}'}"
            )
        return _by_unit(_Part(images=images, labels=labels), text_column(as_text(units)))
    if names is None:
        contents = (image.tobytes() for part in in_parts(images) for image in part)
        return _Part(images=images, labels=labels, ids=content_ids(contents, labels))
    if names.dtype.kind not in "iuUS":
        raise DataError(f"{prefix}ids must be strings or integers; got {names.dtype}")
    return _Part(images=images, labels=labels, ids=_name_ids(as_text(names)), names=names.tolist())


def _stored_or_array(array: NDArray[Any], name: str, stamp: tuple[int, int], file: Path) -> Images:
    """Return images as `[N, C, H, W]`; images of a mapped array stay in their file."""
    if not isinstance(array, np.memmap):
        return channels_first(array, name)
    channels = channels_first(array[:0], name).shape[1]
    return ArrayImages(
        file=os.fsencode(os.path.abspath(file)),
        stamp=stamp,
        offset=array.offset,
        stored_shape=array.shape,
        rows=np.arange(len(array)),
        channels=channels,
        image_size=None,
    )


def load_parquet(request: Request) -> LoadedData:
    """Return the records of a parquet file, or of all `*.parquet` files below a folder as one data set.

    Rows have a column `image` (encoded image bytes or paths, plain or as `{bytes, path}`) and optionally
    `label` (integers or strings) and `id` (unique integers or strings). Paths are relative to the file's
    folder or the given folder. Other columns are ignored. With captions the rows are pairs, see
    `trainers.data.pair_tables`. Rows with the same value in the unit column form one record.

    Raises:
      DataError: a file cannot be read, or its columns break one of these rules.
    """
    splits, unit_column = table_splits(request.path, request.scheme), request.unit_column
    files = list(itertools.chain(*splits))
    header, kind = parquet_header(files[0]), kind_of(files[0])
    rules = {
        "image": f"{kind} data must have one column named image",
        unit_column: f"unit_column must name exactly one {kind} column; got {unit_column!r}",
    }
    for name, rule in rules.items():
        if name is not None and header.count(name) != 1:
            raise DataError(f"{rule}. Columns found: {join_names(header)}")
    with unchanged(files):
        table = read_parquet(files, {"label", unit_column or "id"})
        labels, names = (_column(table, name, kind) for name in ("label", unit_column or "id"))
        label_name = "label" if names is None and labels is not None else None
        images = scan_parquet(request, files, "image", label_name)
        ends = np.cumsum([num_rows(*files) for files in splits[:-1]], dtype=np.int64)

    def part_of(rows: NDArray[np.int64]) -> _Part:
        part_labels, part_names = (None if column is None else column[rows] for column in (labels, names))
        part = _scanned_part(images.scanned, images.image_of[rows], part_labels)
        if part_names is not None and unit_column is not None:
            return _by_unit(part, text_column(as_text(part_names)))
        if part_names is not None:
            return dataclasses.replace(part, ids=_name_ids(as_text(part_names)), names=part_names.tolist())
        if images.digests is not None:
            return dataclasses.replace(part, ids=ids_from_digests(images.digests.take(rows).to_pylist()))
        files = (base_folder(request.path) / str((images.paths or ())[row]) for row in rows)
        return dataclasses.replace(part, ids=content_ids((file.read_bytes() for file in files), part_labels))

    loaded = _to_splits(
        list(map(part_of, np.split(np.arange(len(images.image_of)), ends))), request.image_size
    )
    return dataclasses.replace(loaded, reading_counts=loaded.reading_counts + images.scanned.reading_counts)


def _column(table: pa.Table, name: str, kind: str) -> NDArray[Any] | None:
    """Return a column, if it exists, as integers or Python strings (NumPy strings lose trailing NULs)."""
    if name not in table.column_names:
        return None
    values = table.column(name).to_pylist()
    missing = values.count(None)
    if missing:
        raise RecordsError(f"{kind} column {name} must have a value in every row; {missing} have none")
    kinds = {type(value) for value in values}
    if kinds - {int, bool, str}:
        raise DataError(f"{kind} column {name} must hold integers or strings; got {table.column(name).type}")
    return np.array(values, object) if str in kinds else table.column(name).to_numpy()


def load_folder(request: Request) -> LoadedData:
    """Return the images below a folder, in the order of their relative paths, which are their ids.

    The folder holds one sub-folder per class, or only images (then there are no labels). A file is an image
    if its suffix or its first bytes are an image's, except camera raw files. Others are left out and counted;
    hidden files are ignored.

    Raises:
      DataError: the folder cannot be read, holds no images or breaks one of these rules.
    """
    import pyarrow as pa

    path = request.path
    if not path.is_dir():
        raise DataError(f"folder:PATH must be an existing folder; got {str(path)!r}")
    names, ignored = _image_names(path)
    classes = [sys.intern(name.split("/", 1)[0]) if "/" in name else None for name in names]
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
    labels = np.array(classes, dtype=object) if any(classes) else None
    column = file_column(names)
    # The index is beside the folder, in which other programs would take it for a class.
    scan = ImageScan(request, len(names), (path / name for name in names), path.resolve().parent)
    del classes, names
    scanned = scan.files(path, column)
    part = _scanned_part(scanned, np.arange(len(column)), labels, scanned.files)
    shown = ArrowColumn(pa.array(encodable(os.fsdecode(name)) for name in raw_values(column)))
    counts = part.reading_counts + scanned.reading_counts + ignored
    part = dataclasses.replace(part, ids=_name_ids(shown), names=shown, reading_counts=counts)
    return _to_splits([part], request.image_size)


def _image_names(path: Path) -> tuple[list[str], Counter[str]]:
    """Return the images' relative paths with forward slashes, sorted, and the number of other files."""
    names: list[str] = []
    unusable, ignored = Counter[str](), Counter[str]()

    # By default os.walk skips a sub-folder that it may not open: records would be lost silently.
    for root, folders, files in os.walk(path, onerror=lambda _: unusable.update(["closed"])):
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
    if any(0 in part.images.shape for part in parts):
        raise DataError(
            "every split must hold at least one record, with at least one pixel; some split holds none"
        )
    labels, class_names = class_indices([part.labels for part in parts])
    images = [_resized(part.images, image_size) for part in parts]
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
        names=parts[0].names if len(parts) == 1 else _join_parts(names),
        reading_counts=sum((part.reading_counts for part in parts), Counter[str]()),
    )


def _join_parts(names: Sequence[Sequence[str | int] | None]) -> list[str | int] | None:
    return None if None in names else [name for part in names for name in part or ()]


def _resized(images: Images, image_size: int | None) -> Images:
    """Return images in this size; stored images are resized when they are read."""
    if isinstance(images, ArrayImages):
        return dataclasses.replace(images, image_size=image_size)
    if image_size is None or not isinstance(images, np.ndarray):
        return images
    return resize_images(images, image_size)


def _name_ids(names: Iterable[str]) -> Ids:
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
    scheme, _, path = name.partition(":")
    if scheme in ("parquet", "hf"):
        header = parquet_header(table_splits(Path(path).expanduser(), scheme)[0][0])
        return f"a column named `label`; found {join_names(header)}"
    return "sub-folders named after the classes" if scheme == "folder" else "an array named `labels`"
