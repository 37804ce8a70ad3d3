"""The index of images that stay in their files: built once, by decoding every image once.

Images are decoded into memory if all of them take at most a quarter of the free memory, or if the user says
so. Otherwise only facts are kept: each image's place, size and fault. They are written to an index, in one
Arrow file for each shard or table, or for some thousand image files, so that an interrupted reading goes on
and a data set that grows is not read again. An index is used as long as the files have the same size and
modification time. It is as private as the data, and only its user can read it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from dpgcl_core.durable_files import replacing
from dpgcl_core.errors import DataError
from dpgcl_core.object_store import DataFile, address_of
from trainers.data.columns import are_all, combined, raw_values
from trainers.data.decoding import (
    CONVERSIONS,
    decode_image,
    header_size,
    in_threads,
    prepare_decoders,
    stacked,
    supported_formats,
)
from trainers.data.download import cache_folder
from trainers.data.faults import check_one_size
from trainers.data.image_digests import DIGESTS, image_digests
from trainers.data.request import Request
from trainers.data.stored_images import PLACE, Images, StoredImages, stamp_of
from trainers.files.machine_memory import free_memory

if TYPE_CHECKING:
    import pyarrow as pa

INDEX_FOLDER = ".dpgcl-index"
IMAGES_AT_ONCE = 256
_FORMAT = 3
_FILES_PER_PART = 8192
_log = logging.getLogger(__name__)

Source = bytes | Path | None
"""An encoded image, its file, or None if it is missing."""


def schema_of(**columns: pa.DataType) -> pa.Schema:
    """Return the schema of an index with the facts of each image and further columns."""
    import pyarrow as pa

    facts = {"height": pa.uint32(), "width": pa.uint32(), "is_grey": pa.bool_()}
    facts |= dict.fromkeys(DIGESTS.names or (), pa.uint64())
    return pa.schema(facts | {"conversions": pa.uint8(), "fault": pa.string()} | columns)


class ImageScan:
    """One pass over all images of a data set, each decoded once.

    Attributes:
      request: the data to read.
      keeps_pixels: whether the pixels stay in memory; else the index is read or built.
      decoded: each image in the order of the scan, or the name of its fault; None without pixels.
      stamps: the `stamp_of` each index file, taken before it was read.
    """

    def __init__(self, request: Request, num_images: int, first: Iterable[Source], folder: Path) -> None:
        """Choose where the pixels stay.

        Args:
          request: the data to read.
          num_images: the number of images, at least approximately.
          first: some images; the size of the first readable one is taken as the size of all.
          folder: the folder of the data, which the index goes into; for an address the user's cache.
        """
        self.request = request
        self.keeps_pixels = request.in_memory
        self.stamps: dict[Path, tuple[int, int]] = {}
        address, parent = address_of(folder), request.index_folder
        if address and parent is None:
            parent = cache_folder() / "indices"
        self._folder = folder / INDEX_FOLDER
        if parent is not None:  # which may hold the indices of several data sets
            self._folder = parent.expanduser() / _digest(os.fsencode(address or folder.resolve()))
        self._num_images, self._num_read, self._start_time = num_images, 0, time.monotonic()
        self._print_time = self._start_time
        if self.keeps_pixels is None:
            size = request.image_size
            sizes = (header_size(source) for source in first if source is not None)
            pixels = size * size if size else next((h * w for h, w in sizes if h), 0)
            # Without a readable image nothing is known, and nothing is kept.
            self.keeps_pixels = pixels > 0 and 3 * pixels * num_images <= free_memory() // 4
        self.decoded: list[Any] | None = [] if self.keeps_pixels else None

    def facts(self, sources: Sequence[Source]) -> dict[str, Any]:
        """Decode images in several threads, and return the facts of each by column; see `schema_of`."""
        limit, size = self.request.max_image_pixels, self.request.image_size

        def decode(source: Source) -> tuple[Any, tuple[str, ...], NDArray[np.void]]:
            image, conversions = decode_image(source, size, limit)
            if self.keeps_pixels or isinstance(image, str):
                return image, conversions, np.zeros(1, DIGESTS)
            return image, conversions, image_digests(np.atleast_3d(image).transpose(2, 0, 1)[None])

        prepare_decoders()
        results = in_threads(decode, sources)
        if self.decoded is not None:
            self.decoded += [image for image, _, _ in results]
        self._show_progress(len(results))
        digests = np.concatenate([np.zeros(0, DIGESTS), *(digest for _, _, digest in results)])
        shapes = [(0, 0, 0) if isinstance(image, str) else image.shape for image, _, _ in results]
        return {name: digests[name] for name in DIGESTS.names or ()} | {
            "height": np.array([shape[0] for shape in shapes], dtype=np.uint32),
            "width": np.array([shape[1] for shape in shapes], dtype=np.uint32),
            "is_grey": [len(shape) == 2 for shape in shapes],
            "conversions": np.array([_flags(kinds) for _, kinds, _ in results], dtype=np.uint8),
            "fault": [image if isinstance(image, str) else "" for image, _, _ in results],
        }

    def part(
        self,
        name: str,
        file: DataFile,
        key: Sequence[Any],
        read: Callable[[], tuple[pa.Schema, Iterator[pa.RecordBatch]]],
    ) -> pa.Table:
        """Return the rows of one shard or table, from its index if the file has not changed since.

        Args:
          name: the part's name, different for each part of the data set.
          file: the file that the rows come from.
          key: the options that decide what `read` returns.
          read: function that reads the file, and returns the columns and the rows. Rows come from `facts`.
            With a column `content` the index holds the encoded images.

        Raises:
          DataError: the index would hold the encoded images, and cannot be written.
        """
        import pyarrow as pa

        header, path = self._header(stamp_of(file), *key), self.index_file(name, *key)
        with self._locked(path):
            table = None if self.keeps_pixels else self._read_index(path, header)
            if table is not None:
                self._num_read += len(table)
                return table
            schema, rows = read()
            if not self.keeps_pixels:
                full_schema = schema.with_metadata({**(schema.metadata or {}), "header": header})
                if self._write(path, full_schema, rows):
                    table = self._read_index(path, header)
                if table is not None:
                    return table
                _, rows = read()  # anew: some rows may have been read before the disk was full
            return pa.Table.from_batches(rows, schema)

    def _header(self, *key: Any) -> str:
        """Return what an index must begin with to be used."""
        limits = self.request.max_image_pixels, self.request.image_size
        return json.dumps([_FORMAT, supported_formats(), *limits, *key])

    def index_file(self, name: str, *key: Any) -> Path:
        """Return the index file of a part of this name, for these options.

        Other options have another file, so that no sweep replaces the index that another one reads from.
        """
        return self._folder / f"{_digest(os.fsencode(self._header(os.fsencode(name).hex(), *key)))}.arrow"

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Lock a part, so that two sweeps do not build it at once; without a lock if the folder has none."""
        lock = FileLock(f"{path}.lock", mode=0o600, fallback_to_soft=False)
        with suppress(OSError, NotImplementedError):
            if not self.keeps_pixels:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    _log.warning("another process indexes the same images; waiting for it to finish")
                    lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def files(self, base: Path, names: pa.Array) -> ScannedImages:
        """Return the images in files; `names` is a `file_column` of paths, relative to `base` or absolute."""
        import pyarrow as pa

        schema = schema_of(name=pa.large_binary(), num_bytes=pa.int64(), modified=pa.int64())
        num_parts = 1 << (0 if self.keeps_pixels else (len(names) // _FILES_PER_PART).bit_length())
        # A file's part is a function of its name, so that a new file changes one part of the index.
        part_of = np.fromiter((zlib.crc32(n) % num_parts for n in raw_values(names)), np.int64, len(names))
        order = np.argsort(part_of, kind="stable")
        bounds = np.searchsorted(part_of[order], np.arange(num_parts + 1))
        tables = []
        for part, (first, end) in enumerate(itertools.pairwise(bounds)):
            # With half as many files there were half as many parts, and this part's files were in `former`.
            index, former = (
                self.index_file(f"{self.request.path.resolve().name}/{num:x}/{part % num:x}")
                for num in (num_parts, max(1, num_parts // 2))
            )
            with self._locked(index):
                tables.append(self._files_part([index, former], base, names.take(order[first:end]), schema))
        facts = pa.concat_tables(tables)
        facts = facts if num_parts == 1 else facts.take(np.argsort(order))
        facts = facts.combine_chunks()
        stamps = np.stack([_array(facts, "num_bytes"), _array(facts, "modified")], axis=1)
        places = np.zeros(len(names), dtype=PLACE)
        places["file"], places["num_bytes"] = np.arange(len(names)), np.maximum(stamps[:, 0], 0)
        names = FileNames(os.fsencode(os.path.abspath(base)), combined(facts["name"]))
        return ScannedImages(self.request, facts, self.decoded, names, stamps, places)

    def parts(
        self, tables: Sequence[pa.Table], files: Sequence[DataFile], stamps: NDArray[np.int64]
    ) -> ScannedImages:
        """Return the images of all parts; `files` hold the encoded images of each part.

        Args:
          tables: the parts, as `part` returns them.
          files: the file of each part that holds its encoded images.
          stamps: the `stamps_of` the files, taken before they were read.
        """
        import pyarrow as pa

        facts = pa.concat_tables(table.replace_schema_metadata() for table in tables)
        places = np.zeros(len(facts), dtype=PLACE)
        places["file"] = np.repeat(np.arange(len(files)), list(map(len, tables)))
        if not self.keeps_pixels:
            places["offset"], places["num_bytes"] = _array(facts, "offset"), _array(facts, "num_bytes")
        names = [os.path.abspath(file) if isinstance(file, Path) else str(file) for file in files]
        files_as_bytes = list(map(os.fsencode, names))
        return ScannedImages(self.request, facts, self.decoded, files_as_bytes, stamps, places)

    def _files_part(
        self, indices: Sequence[Path], base: Path, names: pa.Array, schema: pa.Schema
    ) -> pa.Table:
        """Return the facts of files; for those that have not changed from the first index that exists."""
        import pyarrow as pa

        paths = [base / os.fsdecode(name) for name in raw_values(names)]
        stamps = [stamp_of(path) for path in paths]
        header = self._header("files")
        row_of = dict[Any, int]()
        tables = (None if self.keeps_pixels else self._read_index(index, header) for index in indices)
        index_table = next((table for table in tables if table is not None), None)
        if index_table is not None:
            columns = [index_table[name].to_pylist() for name in ("name", "num_bytes", "modified", "fault")]
            # A faulty file is read again: it may have been unreadable for a reason that has passed.
            row_of = {
                tuple(key): row for row, (*key, fault) in enumerate(zip(*columns, strict=True)) if not fault
            }
        keys = [(name, *stamp) for name, stamp in zip(raw_values(names), stamps, strict=True)]
        rows = np.array([row_of.get(key, -1) for key in keys], dtype=np.int64)
        new = np.flatnonzero(rows < 0)
        self._num_read += len(rows) - len(new)

        def read_new() -> Iterator[pa.RecordBatch]:
            for start in range(0, len(new), IMAGES_AT_ONCE):
                chunk = new[start : start + IMAGES_AT_ONCE]
                columns = self.facts([paths[row] for row in chunk])
                columns["name"] = names.take(chunk)
                columns["num_bytes"] = [stamps[row][0] for row in chunk]
                columns["modified"] = [stamps[row][1] for row in chunk]
                yield pa.RecordBatch.from_pydict(columns, schema)

        scanned = pa.Table.from_batches(read_new(), schema)
        if index_table is None or len(new) == len(rows):
            table = scanned
        else:
            rows[new] = len(index_table) + np.arange(len(new))
            table = pa.concat_tables([index_table.replace_schema_metadata(), scanned]).take(rows)
        if not self.keeps_pixels and (len(new) or index_table is None or len(index_table) > len(rows)):
            table = table.replace_schema_metadata({"header": header})
            self._write(indices[0], table.schema, iter(table.to_batches()))
        return table.replace_schema_metadata()

    def _write(self, path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> bool:
        """Write an index that only this user can read, and return whether that was possible."""
        import pyarrow as pa

        is_reading = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for unfinished in path.parent.glob(f"{path.stem}.*.tmp"):  # of a process that was killed
                unfinished.unlink()
            with replacing(path, mode=0o600) as out, pa.ipc.new_file(out, schema) as writer:
                is_reading = True
                for batch in batches:
                    is_reading = False
                    writer.write_batch(batch)
                    is_reading = True
                is_reading = False
        except OSError:
            if is_reading:  # the data, not the index
                raise
            if "content" in schema.names:
                raise DataError(
                    "data that do not fit into memory need an index, which cannot be written next to them. "
                    "Pass --index-folder, or --in-memory"
                ) from None
            _log.warning(
                "the index of the images could not be saved, so it is built each time. Make the folder of "
                "the data writable, or pass --index-folder"
            )
            return False
        return True

    def _show_progress(self, number: int) -> None:
        """Print the progress every ten seconds, only on a terminal: the number of records may be private."""
        self._num_read += number
        now = time.monotonic()
        if self.keeps_pixels or now - self._print_time < 10 or not sys.stderr.isatty():
            return
        self._print_time, rate = now, self._num_read / (now - self._start_time)
        left = max(0, self._num_images - self._num_read) / rate
        print(
            f"Indexing: {self._num_read:,} of about {self._num_images:,} images, {rate:,.0f} a second, about "
            f"{left / 60:.0f} min left",
            file=sys.stderr,
        )

    def _read_index(self, path: Path, header: str) -> pa.Table | None:
        """Return an index by memory map; None if it is absent, unreadable, or of other files or options.

        An index is trusted as the data are. So it is used only if no other user can have written it.
        """
        import pyarrow as pa

        self.stamps[path] = stamp_of(path)
        try:
            if any(p.stat().st_uid != os.geteuid() or p.stat().st_mode & 0o022 for p in (path, path.parent)):
                return None
            content = pa.memory_map(str(path)).read_buffer()
            table = pa.ipc.open_file(content).read_all()
            if (table.schema.metadata or {}).get(b"header") == header.encode():
                table.validate(full=True)
                return _with_places(table, content.address) if "content" in table.column_names else table
        except Exception:  # a damaged file raises nearly anything
            return None
        return None


@dataclass(frozen=True)
class ScannedImages:
    """Images after a scan, in its order.

    Attributes:
      request: the data to read.
      facts: the columns of `schema_of`, one row for each image.
      decoded: each image or the name of its fault, or None if the images stay in their files.
      files, stamps, places: as in `StoredImages`.
    """

    request: Request
    facts: pa.Table
    decoded: list[Any] | None
    files: Sequence[bytes]
    stamps: NDArray[np.int64]
    places: NDArray[np.void]

    @property
    def reading_counts(self) -> Counter[str]:
        """How many images were converted, by kind."""
        flags = _array(self.facts, "conversions")
        return +Counter({kind: int((flags >> bit & 1).sum()) for bit, kind in enumerate(CONVERSIONS)})

    def are_grey(self, rows: NDArray[np.int64]) -> bool:
        """Return whether all images at `rows` are grey."""
        return bool(_array(self.facts, "is_grey")[rows].all())

    def images(self, rows: NDArray[np.int64], channels: int) -> Images:
        """Return the images at `rows`, none of them faulty, with this number of channels.

        Raises:
          RecordsError: the images differ in size.
        """
        rows_or_all = slice(None) if are_all(rows, len(self.facts)) else rows  # a slice makes no copy
        heights, widths = (_array(self.facts, name)[rows_or_all] for name in ("height", "width"))
        if (heights != heights[0]).any() or (widths != widths[0]).any():
            check_one_size(Counter(zip(heights.tolist(), widths.tolist(), strict=True)))
        if self.decoded is not None:
            return stacked([self.decoded[row] for row in rows], channels)
        digests = self.facts.select(DIGESTS.names)
        return StoredImages(
            files=self.files,
            stamps=self.stamps,
            places=self.places[rows_or_all],
            channels=channels,
            digests=digests if isinstance(rows_or_all, slice) else digests.take(rows),
            height=int(heights[0]),
            width=int(widths[0]),
            image_size=self.request.image_size,
            max_pixels=self.request.max_image_pixels,
        )


@dataclass(frozen=True)
class FileNames(Sequence[bytes]):
    """The paths of files as bytes: their folder, and a column of names, relative to it or absolute."""

    folder: bytes
    names: pa.Array = field(repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: Any) -> Any:
        return os.path.join(self.folder, self.names[number].as_py())


def _flags(conversions: Iterable[str]) -> int:
    return sum(1 << CONVERSIONS.index(kind) for kind in conversions)


def file_column(names: Iterable[str]) -> pa.Array:
    """Return paths of files as the bytes that the operating system knows them by."""
    import pyarrow as pa

    def encoded(name: str) -> bytes:
        try:
            return os.fsencode(name)
        except UnicodeEncodeError:  # no file can have this name
            return name.encode("utf-8", "surrogatepass")

    return pa.array(map(encoded, names), pa.large_binary())


def stamps_of(files: Iterable[DataFile]) -> NDArray[np.int64]:
    """Return the `stamp_of` files, `[num_files, 2]`."""
    return np.array([stamp_of(file) for file in files], dtype=np.int64).reshape(-1, 2)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _array(table: pa.Table, column: str) -> NDArray[Any]:
    values: NDArray[Any] = table[column].to_numpy()
    return values


def _with_places(table: pa.Table, start: int) -> pa.Table:
    """Return a mapped index with the places of the encoded images in it, instead of the images.

    Args:
      table: the index; its column `content` holds the images.
      start: the address that the file is mapped at.
    """
    places = [(np.zeros(0, np.uint64),) * 2, *(places_of(chunk, start) for chunk in table["content"].chunks)]
    offsets, sizes = map(np.concatenate, zip(*places, strict=True))
    table = table.drop_columns("content").append_column("offset", [offsets])
    return table.append_column("num_bytes", [sizes])


def places_of(encoded: pa.Array, start: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the offset and number of bytes of binary values in a file that is mapped at address `start`."""
    kinds = {"binary": np.int32, "large_binary": np.int64}
    _, bounds, data = encoded.buffers()
    ends = np.frombuffer(bounds, kinds[str(encoded.type)])[encoded.offset :][: len(encoded) + 1]
    offsets = ends[:-1].astype(np.int64) + (data.address - start)
    return offsets.astype(np.uint64), np.diff(ends).astype(np.uint64)
