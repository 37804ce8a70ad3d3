"""`webdataset:PATH`: image-text pairs in tar shards, indexed once, then read by record.

Poisson sampling draws each record independently, so a record must be readable without reading the records
before it. A shuffled stream of shards, the usual way to read them, does not follow the sampling law that the
accountant assumes. So every shard is read completely **once** to record each image's place, whether it can be
decoded, and its captions. These are kept in one index file next to each shard, which is used as long as the
shard has the same size and modification time. The index holds the captions: it is as private as the shard and
gets the shard's permissions.

A sample is the files of one name up to its first dot, as in webdataset: one image, captions in `txt` files
(`txt`, or `0.txt`, `1.txt`, … for several) or in the list `captions` of a `json` file.
Where names themselves have dots (`v1.0_20.jpg` and `v1.0_20.txt`), an image and the texts that share its name
up to the last dot are a sample of their own, so no image gets its neighbour's caption. Ids come from the
image's bytes and the unit (see `pairs`), not from the names, because writers commonly number samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.ledger.marks import expand_ranges
from trainers.data.decoding import IMAGE_SUFFIXES, MAX_IMAGE_PIXELS, decode_each, in_threads
from trainers.data.faults import RecordsError, check_one_size
from trainers.data.pairs import LoadedData, PairRows, assemble, caption_fault, stack_images
from trainers.data.request import Request
from trainers.files.durable_files import replacing

_FORMAT = 5
_MAX_TEXT_BYTES = 2**23
_IMAGES_AT_ONCE = 256
_TAR_BLOCK_BYTES = 512
_log = logging.getLogger(__name__)

_Member = tuple[str, tuple[int, int]]
"""A file of a sample: its kind (its name after the sample's name), and its (offset, number of bytes)."""


class _Sample(NamedTuple):
    """One sample in a shard's index: its image's place, size and digest, its texts, and its fault if any."""

    offset: int
    num_bytes: int
    height: int
    width: int
    key: str
    captions: tuple[str, ...]
    unit: str
    fault: str


class _ShardIndex(NamedTuple):
    """A shard's size and modification time, its samples, and `LoadedData.reading_counts` of them."""

    stamp: tuple[int, int]
    samples: list[_Sample]
    reading_counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ShardImages:
    """Images in shards, decoded on access by several threads; see `StoredImages`.

    Attributes:
      files: the shards.
      stamps: int64 `[num_shards, 2]`: size in bytes and modification time in nanoseconds when indexed.
      places: int64 `[num_images, 3]`: shard, offset and number of bytes.
      height, width: size of every image as returned.
      image_size: images are resized to this many pixels square, or None.
      max_pixels: largest allowed image as stored.
    """

    files: tuple[Path, ...]
    stamps: NDArray[np.int64]
    places: NDArray[np.int64]
    height: int
    width: int
    image_size: int | None
    max_pixels: int = MAX_IMAGE_PIXELS

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of images, 3, height, width)."""
        return len(self.places), 3, self.height, self.width

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images at `rows`, uint8 `[n, 3, height, width]`.

        Raises:
          RecordsError: some images can no longer be read, or a shard has changed since it was indexed.
        """
        wanted = self.places[rows]
        if len(wanted) == 0:
            return np.empty((0, *self.shape[1:]), dtype=np.uint8)
        decoded, _ = decode_each(in_threads(self._read, wanted.tolist()), self.image_size, self.max_pixels)
        bad = [i for i, image in enumerate(decoded) if isinstance(image, str)]
        if bad:
            raise RecordsError(
                # The message holds no count, which would disclose how many records a step has drawn.
                "every image must stay readable; some sampled images no longer are. Restore the shards",
                {"rows": bad},
            )
        return stack_images(decoded)

    def select(self, rows: NDArray[np.int64]) -> ShardImages:
        """Return the same store with only the images at `rows`, without reading any."""
        return dataclasses.replace(self, places=self.places[rows])

    def _read(self, place: list[int]) -> bytes:
        # Opening the shard each time costs microseconds, and no handle outlives this call or a fork.
        shard, offset, size = place
        try:
            with self.files[shard].open("rb", buffering=0) as opened:
                state = os.fstat(opened.fileno())
                is_same = (state.st_size, state.st_mtime_ns) == tuple(self.stamps[shard].tolist())
                content = os.pread(opened.fileno(), size, offset) if is_same else None
        except OSError:
            content = None
        if content is None:
            # The shard's name would disclose information about the records that were drawn.
            raise RecordsError(
                "a shard must not change after it was indexed; one has changed. Load the data again",
                {"shards": [shard]},
            )
        return content


def load_webdataset(request: Request) -> LoadedData:
    """Return the pairs of tar shards; the images stay in the shards and are read by record.

    The path is a shard, a folder with shards, or a name with ranges such as `train-{000..011}.tar`. The unit
    is a field of each sample's json file.

    Raises:
      RecordsError: some samples are corrupt (their positions are in `details`), or images differ in size.
      DataError: there are no shards, or one cannot be read as a whole.
    """
    image_size, max_pixels, unit_field = request.image_size, request.max_image_pixels, request.pairs.unit
    files = _shards(request.path)
    indices = [_read_or_build_index(file, unit_field, max_pixels) for file in files]
    samples = [sample for index in indices for sample in index.samples]
    shard_of = np.repeat(np.arange(len(files)), [len(index.samples) for index in indices])
    stamps = np.array([index.stamp for index in indices], dtype=np.int64)
    rows = PairRows(
        keys=[sample.key for sample in samples],
        captions=[sample.captions for sample in samples],
        faults=[sample.fault for sample in samples],
        units=None if unit_field is None else [sample.unit for sample in samples],
        max_pixels=max_pixels,
        reading_counts=sum((Counter(index.reading_counts) for index in indices), Counter[str]()),
    )

    def images_of(sound: list[int]) -> ShardImages:
        height, width = (image_size, image_size) if image_size else _common_size([samples[i] for i in sound])
        places = [(shard_of[row], samples[row].offset, samples[row].num_bytes) for row in sound]
        return ShardImages(
            files=tuple(files),
            stamps=stamps,
            places=np.array(places, dtype=np.int64),
            height=height,
            width=width,
            image_size=image_size,
            max_pixels=max_pixels,
        )

    return assemble(rows, images_of, skip_corrupt=request.pairs.skip_corrupt)


def _common_size(samples: list[_Sample]) -> tuple[int, int]:
    check_one_size(Counter((sample.height, sample.width) for sample in samples))
    return samples[0].height, samples[0].width


def _shards(path: Path) -> list[Path]:
    files = sorted(path.glob("*.tar")) if path.is_dir() else expand_ranges(path)
    missing = sum(not file.is_file() for file in files)
    if not files or missing:
        raise DataError(
            "webdataset:PATH must be a .tar file, a folder of .tar files, or a name with ranges such as "
            f"{{000..011}}; got {str(path)!r}, where {missing} of {len(files)} shards are missing"
        )
    return files


def _read_or_build_index(file: Path, unit_field: str | None, max_pixels: int) -> _ShardIndex:
    """Return a shard's stored index if the shard has not changed since, else build and store it."""
    state = file.stat()
    stamp = (state.st_size, state.st_mtime_ns)
    index_file = file.with_name(f".{file.name}.pairs.json")
    header = [_FORMAT, *stamp, unit_field, max_pixels]
    with suppress(OSError, ValueError, TypeError):  # absent or damaged: built again
        stored_header, rows, counts = json.loads(index_file.read_bytes())
        if stored_header == header:
            samples = [_Sample(*row) for row in rows]
            samples = [sample._replace(captions=tuple(sample.captions)) for sample in samples]
            return _ShardIndex(stamp, samples, counts)
    samples, counts = _read_shard(file, unit_field, max_pixels)
    try:
        with replacing(index_file) as out:
            os.fchmod(out.fileno(), state.st_mode & 0o666)
            out.write(json.dumps([header, samples, counts]).encode())
    except OSError:
        _log.warning("a shard's index could not be saved, so it is built each time. Make its folder writable")
    return _ShardIndex(stamp, samples, counts)


def _read_shard(file: Path, unit_field: str | None, max_pixels: int) -> tuple[list[_Sample], Counter[str]]:
    """Return a shard's samples in the order of their first files, and its `LoadedData.reading_counts`."""
    members, counts = _members(file)
    samples = []
    with file.open("rb", buffering=0) as opened:

        def read(place: tuple[int, int]) -> bytes:
            return os.pread(opened.fileno(), place[1], place[0])

        names = iter(members)
        while chunk := list(itertools.islice(names, _IMAGES_AT_ONCE)):
            images = [[place for kind, place in members[n] if kind in IMAGE_SUFFIXES] for n in chunk]
            encoded = [read(places[0]) if len(places) == 1 else b"" for places in images]
            decoded, conversions = decode_each(encoded, None, max_pixels)
            counts += conversions
            for name, places, content, image in zip(chunk, images, encoded, decoded, strict=True):
                places_of_texts = [(kind, place) for kind, place in members[name] if _is_text(kind)]
                is_large = any(size > _MAX_TEXT_BYTES for _, (_, size) in places_of_texts)
                texts = {} if is_large else {kind: read(place) for kind, place in places_of_texts}
                captions, unit, fault = _parse_texts(texts, unit_field)
                fault = "text too large" if is_large else fault
                kinds = [kind for kind, _ in members[name]]
                if len(places) != 1:
                    fault = "several images" if places else "missing image"
                elif len(set(kinds)) < len(kinds):  # one would silently replace the other
                    fault = "several files of one kind"
                fault = fault or (f"{image} image" if isinstance(image, str) else "")
                offset, num_bytes = places[0] if places else (0, 0)
                height, width = (0, 0) if isinstance(image, str) else image.shape[:2]
                key = hashlib.blake2b(content, digest_size=16).hexdigest()
                samples.append(_Sample(offset, num_bytes, height, width, key, captions, unit, fault))
    return samples, counts


def _members(file: Path) -> tuple[dict[str, list[_Member]], Counter[str]]:
    """Return the images and texts of each sample, and the number of files that are neither.

    Raises:
      DataError: the file is not a shard, or it ends before its end mark.
    """
    files_by_stem: dict[str, list[_Member]] = {}
    ignored = Counter[str]()
    is_whole = False
    with suppress(tarfile.TarError, OSError), tarfile.open(file, "r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            stem, _, kind = name.name.partition(".")
            if member.isreg() and stem and kind:
                place = (member.offset_data, member.size)
                files_by_stem.setdefault(str(name.parent / stem), []).append((kind.lower(), place))
            elif not member.isdir():
                ignored["no suffix" if member.isreg() else "links"] += 1
        # A truncation inside the last file is visible at the end of its content, not in the next header.
        is_whole = os.pread(cast(Any, archive.fileobj).fileno(), _TAR_BLOCK_BYTES, archive.offset) == bytes(
            _TAR_BLOCK_BYTES
        )
    if not is_whole:
        raise DataError(
            "webdataset:PATH must be complete, readable, uncompressed tar shards; "
            f"{str(file)!r} is not, or it is truncated. Download it again"
        )
    samples: dict[str, list[_Member]] = {}
    for stem, files in files_by_stem.items():
        for sample, kind, place in _split_by_name(stem, files):
            if kind in IMAGE_SUFFIXES or _is_text(kind):
                samples.setdefault(sample, []).append((kind, place))
            else:
                ignored[kind.rpartition(".")[2]] += 1
    kinds = ", ".join(sorted(ignored))
    return samples, +Counter(
        {f"files skipped, because they are neither images nor captions ({kinds})": ignored.total()}
    )


def _split_by_name(stem: str, files: list[_Member]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield the (sample, kind, place) of files whose names are `stem` up to the first dot.

    An image `stem.b.jpg` is a sample of its own, `stem.b`, if there is a text `stem.b.txt` or `stem.b.json`,
    or if there is no image `stem.jpg`, whose sample it could be in.
    """
    parts = [(kind.rpartition(".")[0], kind.rpartition(".")[2], kind, place) for kind, place in files]
    images = {part for part, suffix, _, _ in parts if suffix in IMAGE_SUFFIXES}
    texts = {part for part, suffix, _, _ in parts if suffix in ("txt", "json")}
    separate = {part for part in images if part in texts or "" not in images} - {""}
    for part, suffix, kind, place in parts:
        yield (f"{stem}.{part}", suffix, place) if part in separate else (stem, kind, place)


def _is_text(kind: str) -> bool:
    return kind.rpartition(".")[2] == "txt" or kind == "json"


def _parse_texts(files: dict[str, bytes], unit_field: str | None) -> tuple[tuple[str, ...], str, str]:
    """Return a sample's captions and unit, and the fault of its texts, "" if there is none."""
    kinds = sorted((kind for kind in files if kind != "json"), key=lambda kind: (len(kind), kind))
    unit: Any = None
    try:
        captions = [files[kind].decode("utf-8-sig").strip() for kind in kinds]
        fields = json.load(io.BytesIO(files["json"])) if "json" in files else {}
        json_captions = fields.get("captions", [])
        if type(json_captions) is not list:
            raise TypeError
        captions += json_captions
        unit = None if unit_field is None else fields.get(unit_field)
        fault = caption_fault(captions)
    except UnicodeDecodeError:
        return (), "", "caption not UTF-8"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return (), "", "unreadable json"
    if unit is not None and type(unit) not in (str, int):
        return (), "", "unit neither text nor integer"
    return (() if fault else tuple(captions)), "" if unit is None else str(unit), fault
