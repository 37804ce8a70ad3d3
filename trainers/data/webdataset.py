"""`webdataset:PATH`, pairs in tar shards, and `shards:PATH`, images alone in tar shards.

Every shard is read completely once to record each image's place, whether it can be decoded, and its captions;
`trainers.data.image_index` keeps these facts. The index holds the captions.

A sample is the files of one name up to its first dot, as in webdataset: one image, captions in `txt` files
(`txt`, or `0.txt`, `1.txt`, … for several) or in the list `captions` of a `json` file. The class of an image
alone is in the file of the kind that the options name, such as `cls`. The user says whether there are
captions or classes, because what is found in the shards could depend on one record.
Where names themselves have dots (`v1.0_20.jpg` and `v1.0_20.txt`), an image and the texts that share its name
up to the last dot are a sample of their own, so no image gets its neighbour's caption. Ids come from the
image's bytes and the unit (see `pairs`), not from the names, because writers commonly number samples.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dpgcl_core.errors import DataError
from dpgcl_core.ledger.marks import expand_ranges
from dpgcl_core.object_store import DataFile, address_of, download, find_objects, list_objects, read_ranges
from dpgcl_core.sampling.record_ids import digest_of_content
from trainers.data.columns import combined
from trainers.data.decoding import IMAGE_SUFFIXES
from trainers.data.image_index import IMAGES_AT_ONCE, ImageScan, schema_of, stamps_of
from trainers.data.pairs import LoadedData, PairRows, assemble, caption_fault
from trainers.data.request import Request
from trainers.data.stored_images import stamp_of

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_TEXT_BYTES = 2**23
_TAR_BLOCK_BYTES = 512
_FIRST_IMAGES = 64
_FIRST_BYTES = 2**22
_LEFT_OUT = b"files left out"

_Member = tuple[str, tuple[int, int]]
"""A file of a sample: its kind (its name after the sample's name), and its (offset, number of bytes)."""


def load_webdataset(request: Request) -> LoadedData:
    """Return the pairs, or the images alone, of tar shards.

    The path is a shard, a folder with shards, or a name with ranges such as `train-{000..011}.tar`, on this
    machine or in a bucket. From a bucket each shard is read once, into a temporary file. The unit is a field
    of each sample's json file.

    Raises:
      RecordsError: some samples are corrupt (their positions are in `details`), or images differ in size.
      DataError: there are no shards, or one cannot be read as a whole.
    """
    files, options = _shards(request), request.pairs
    names = [Path(str(file)) for file in files]
    base, stamps = names[0].parent, stamps_of(files)
    scan = ImageScan(request, *_first_images(files), folder=base)
    key = ["shards", request.has_captions, options.unit, options.label]
    tables = [
        scan.part(os.path.relpath(name, base), file, key, partial(_read_shard, file, scan))
        for name, file in zip(names, files, strict=True)
    ]
    images = scan.parts(tables, files, stamps)
    left_out = (Counter(json.loads(table.schema.metadata[_LEFT_OUT])) for table in tables)
    rows = PairRows(
        keys=images.facts["key"],
        captions=images.facts["captions"] if request.has_captions else None,
        faults=combined(images.facts["fault"]),
        images=images,
        image_of=np.arange(len(images.facts)),
        units=None if options.unit is None else images.facts["unit"],
        labels=None if options.label is None else images.facts["label"],
        num_left_out=sum(left_out, Counter[str]()),
    )
    return assemble(rows, skip_corrupt=options.skip_corrupt)


def _first_images(files: Sequence[DataFile]) -> tuple[int, list[bytes]]:
    """Return about the number of images in the shards, and the first images; a damaged shard is no error."""
    images, num_bytes = list[bytes](), 1
    for file in itertools.takewhile(lambda _: not images, files):
        with (
            suppress(tarfile.TarError, OSError),
            _open_shard(file, _FIRST_BYTES) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
        ):
            for member in itertools.takewhile(lambda _: len(images) < _FIRST_IMAGES, archive):
                num_bytes = archive.offset
                if member.isreg() and member.name.rpartition(".")[2].lower() in IMAGE_SUFFIXES:
                    images.append(cast(Any, archive.extractfile(member)).read())
    return len(images) * sum(stamp_of(file)[0] for file in files) // num_bytes, images


def _open_shard(file: DataFile, num_bytes: int | None = None) -> IO[bytes]:
    """Return the shard, opened; of one in a bucket a copy, or only of its first bytes."""
    if isinstance(file, Path):
        return file.open("rb", buffering=0)
    if num_bytes is None or file.num_bytes < num_bytes:
        return download(file)
    return io.BytesIO(read_ranges([(file, 0, num_bytes)])[0] or b"")


def _shards(request: Request) -> list[DataFile]:
    path, address = request.path, address_of(request.path)
    files: list[DataFile]
    if address is None:
        names = sorted(path.glob("*.tar")) if path.is_dir() else expand_ranges(path)
        files = [name for name in names if name.is_file()]
    else:
        files = [file for file in list_objects(address, below=False) if file.address.endswith(".tar")]
        names = [] if files else expand_ranges(path)
        files += find_objects(names)
    missing = max(0, len(names) - len(files))
    if not files or missing:
        raise DataError(
            f"{request.scheme}:PATH must be a .tar file, a folder of .tar files, or a name with ranges such "
            f"as {{000..011}}; got {address or str(path)!r}, where {missing} of {len(names)} shards "
            "are missing"
        )
    return files


def _read_shard(file: DataFile, scan: ImageScan) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns of a shard's samples, with the number of left-out files, and its samples."""
    import pyarrow as pa

    stream = _open_shard(file)
    members, left_out = _members(stream, file, scan.request)
    texts = {"captions": pa.list_(pa.string())} if scan.request.has_captions else {}
    texts |= {name: pa.binary() for name in ("unit", "label") if getattr(scan.request.pairs, name)}
    schema = schema_of(offset=pa.uint64(), num_bytes=pa.uint64(), key=pa.binary(16), **texts)
    schema = schema.with_metadata({_LEFT_OUT: json.dumps(left_out)})
    return schema, _samples(stream, members, scan, schema)


def _samples(
    stream: IO[bytes], members: dict[str, list[_Member]], scan: ImageScan, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield a shard's samples in the order of their first files."""
    import pyarrow as pa

    names = iter(members)
    with stream:

        def read(place: tuple[int, int]) -> bytes:
            return os.pread(stream.fileno(), place[1], place[0])

        while chunk := list(itertools.islice(names, IMAGES_AT_ONCE)):
            images = [[place for kind, place in members[n] if kind in IMAGE_SUFFIXES] for n in chunk]
            encoded = [read(places[0]) if len(places) == 1 else b"" for places in images]
            columns = scan.facts(encoded)
            texts = [_texts(members[name], read, scan.request) for name in chunk]
            for row, (name, places) in enumerate(zip(chunk, images, strict=True)):
                kinds = [kind for kind, _ in members[name]]
                fault = texts[row].fault
                if len(places) != 1:
                    fault = "several images" if places else "missing image"
                elif len(set(kinds)) < len(kinds):  # one would silently replace the other
                    fault = "several files of one kind"
                image_fault = columns["fault"][row]
                columns["fault"][row] = fault or (f"{image_fault} image" if image_fault else "")
            columns["offset"] = [places[0][0] if places else 0 for places in images]
            columns["num_bytes"] = [places[0][1] if places else 0 for places in images]
            columns["key"] = list(map(digest_of_content, encoded))
            columns["captions"] = [text.captions for text in texts]
            columns["unit"] = [text.unit.encode("utf-8", "surrogatepass") for text in texts]
            columns["label"] = [text.label.encode("utf-8", "surrogatepass") for text in texts]
            yield pa.RecordBatch.from_pydict(columns, schema)


class _Texts(NamedTuple):
    """The texts of a sample, and their fault, "" if there is none."""

    captions: tuple[str, ...] = ()
    unit: str = ""
    label: str = ""
    fault: str = ""


def _texts(files: list[_Member], read: Callable[[tuple[int, int]], bytes], request: Request) -> _Texts:
    """Return a sample's texts."""
    places = [(kind, place) for kind, place in files if kind not in IMAGE_SUFFIXES]
    if any(size > _MAX_TEXT_BYTES for _, (_, size) in places):
        return _Texts(fault="text too large")
    return _parse_texts({kind: read(place) for kind, place in places}, request)


def _members(
    stream: IO[bytes], file: DataFile, request: Request
) -> tuple[dict[str, list[_Member]], Counter[str]]:
    """Return the images and texts of each sample, and the number of files that are neither.

    Raises:
      DataError: the file is not a shard, or it ends before its end mark.
    """
    files_by_stem: dict[str, list[_Member]] = {}
    ignored = Counter[str]()
    is_whole = False
    with suppress(tarfile.TarError, OSError), tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            stem, _, kind = name.name.partition(".")
            if member.isreg() and stem and kind:
                place = (member.offset_data, member.size)
                files_by_stem.setdefault(str(name.parent / stem), []).append((kind.lower(), place))
            elif not member.isdir():
                ignored["no suffix" if member.isreg() else "links"] += 1
        # A truncation inside the last file is visible at the end of its content, not in the next header.
        is_whole = os.pread(stream.fileno(), _TAR_BLOCK_BYTES, archive.offset) == bytes(_TAR_BLOCK_BYTES)
    if not is_whole:
        raise DataError(
            f"{request.scheme}:PATH must be complete, readable, uncompressed tar shards; "
            f"{str(file)!r} is not, or it is truncated. Download it again"
        )
    samples: dict[str, list[_Member]] = {}
    for stem, files in files_by_stem.items():
        for sample, kind, place in _split_by_name(stem, files, request):
            if kind in IMAGE_SUFFIXES or _is_text(kind, request):
                samples.setdefault(sample, []).append((kind, place))
            else:
                ignored[kind.rpartition(".")[2]] += 1
    kinds = ", ".join(sorted(ignored))
    return samples, +Counter(
        {f"files skipped, because they are neither images nor captions ({kinds})": ignored.total()}
    )


def _split_by_name(
    stem: str, files: list[_Member], request: Request
) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield the (sample, kind, place) of files whose names are `stem` up to the first dot.

    An image `stem.b.jpg` is a sample of its own, `stem.b`, if there is a text `stem.b.txt` or `stem.b.json`,
    or if there is no image `stem.jpg`, whose sample it could be in.
    """
    parts = [(kind.rpartition(".")[0], kind.rpartition(".")[2], kind, place) for kind, place in files]
    images = {part for part, suffix, _, _ in parts if suffix in IMAGE_SUFFIXES}
    texts = {part for part, suffix, _, _ in parts if suffix == "txt" or _is_text(suffix, request)}
    separate = {part for part in images if part in texts or "" not in images} - {""}
    for part, suffix, kind, place in parts:
        yield (f"{stem}.{part}", suffix, place) if part in separate else (stem, kind, place)


def _is_text(kind: str, request: Request) -> bool:
    """Whether files of this kind are read as captions, classes or fields."""
    return kind == "json" or (
        kind.rpartition(".")[2] == "txt" if request.has_captions else kind == request.pairs.label
    )


def _parse_texts(files: dict[str, bytes], request: Request) -> _Texts:
    """Return the texts of a sample's files."""
    unit_field = request.pairs.unit
    kinds = sorted((kind for kind in files if kind != "json"), key=lambda kind: (len(kind), kind))
    unit: Any = None
    try:
        texts = [files[kind].decode("utf-8-sig").strip() for kind in kinds]
        fields = json.load(io.BytesIO(files["json"])) if "json" in files else {}
        json_captions = fields.get("captions", [])
        if type(json_captions) is not list:
            raise TypeError
        unit = None if unit_field is None else fields.get(unit_field)
        captions = texts + json_captions if request.has_captions else []
        fault = caption_fault(captions) if request.has_captions else ""
    except UnicodeDecodeError:
        return _Texts(fault="caption not UTF-8" if request.has_captions else "class not UTF-8")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _Texts(fault="unreadable json")
    if unit is not None and type(unit) not in (str, int):
        return _Texts(fault="unit neither text nor integer")
    label = "" if request.has_captions or not texts else texts[0]
    return _Texts(() if fault else tuple(captions), "" if unit is None else str(unit), label, fault)
