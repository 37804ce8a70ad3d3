"""`webdataset:PATH`: images in tar shards, with captions or classes, indexed once, then read by record.

Every shard is read completely once to record each image's place, whether it can be decoded, and its captions;
`trainers.data.image_index` keeps these facts. The index holds the captions.

A sample is the files of one name up to its first dot, as in webdataset: one image, captions in `txt` files
(`txt`, or `0.txt`, `1.txt`, … for several) or in the list `captions` of a `json` file. If the first samples
have no captions, these are images alone, each perhaps with its class, a name or number, in a `cls` file.
Where names themselves have dots (`v1.0_20.jpg` and `v1.0_20.txt`), an image and the texts that share its name
up to the last dot are a sample of their own, so no image gets its neighbour's caption. Ids come from the
image's bytes and the unit (see `pairs`), not from the names, because writers commonly number samples.
"""

from __future__ import annotations

import hashlib
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
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dpgcl_core.errors import DataError
from dpgcl_core.ledger.marks import expand_ranges
from trainers.data.columns import combined, mask_of
from trainers.data.decoding import IMAGE_SUFFIXES
from trainers.data.image_index import IMAGES_AT_ONCE, ImageScan, schema_of, stamps_of
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import LoadedData, PairRows, assemble, caption_fault
from trainers.data.request import Request

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_TEXT_BYTES = 2**23
_TAR_BLOCK_BYTES = 512
_FIRST_IMAGES, _FIRST_FILES = 64, 300
_LEFT_OUT = b"files left out"

_Member = tuple[str, tuple[int, int]]
"""A file of a sample: its kind (its name after the sample's name), and its (offset, number of bytes)."""


def load_webdataset(request: Request) -> LoadedData:
    """Return the pairs, or the images alone, of tar shards.

    The path is a shard, a folder with shards, or a name with ranges such as `train-{000..011}.tar`. The unit
    is a field of each sample's json file.

    Raises:
      RecordsError: some samples are corrupt (their positions are in `details`), or images differ in size.
      DataError: there are no shards, or one cannot be read as a whole.
    """

    files, has_captions = _shards(request.path), request.has_captions
    unit_field = request.pairs.unit
    base, stamps = files[0].parent, stamps_of(files)
    scan = ImageScan(request, *_first_images(files), folder=base)
    tables = [
        scan.part(
            os.path.relpath(file, base),
            file,
            ["webdataset", unit_field, has_captions],
            partial(_read_shard, file, unit_field, scan, has_captions),
        )
        for file in files
    ]
    images = scan.parts(tables, files, stamps)
    labels = images.facts["label"]
    has_labels = not has_captions and mask_of(labels, bool).any()
    rows = PairRows(
        keys=images.facts["key"],
        captions=images.facts["captions"] if has_captions else None,
        faults=combined(images.facts["fault"]),
        images=images,
        image_of=np.arange(len(images.facts)),
        units=None if unit_field is None else images.facts["unit"],
        labels=labels if has_labels else None,
        num_left_out=sum(
            (Counter(json.loads(table.schema.metadata[_LEFT_OUT])) for table in tables), Counter[str]()
        ),
    )
    return assemble(rows, skip_corrupt=request.pairs.skip_corrupt)


def shards_have_captions(path: Path, options: PairOptions | None = None) -> bool:
    """Whether the first samples have captions: a property of the format, which is public.

    The result is True if the shards cannot be read; loading then reports why.
    """
    names: list[str] = []
    with suppress(tarfile.TarError, OSError, DataError), tarfile.open(_shards(path)[0], "r:") as archive:
        names = [member.name.lower() for member in itertools.islice(archive, _FIRST_FILES)]
    kinds = {name.rpartition(".")[2] for name in names}
    return not names or "txt" in kinds or ("json" in kinds and "cls" not in kinds)


def _first_images(files: Sequence[Path]) -> tuple[int, list[bytes]]:
    """Return about the number of images in the shards, and the first images; a damaged shard is no error."""
    images, num_bytes = list[bytes](), 1
    with suppress(tarfile.TarError, OSError), tarfile.open(files[0], "r:") as archive:
        for member in itertools.takewhile(lambda _: len(images) < _FIRST_IMAGES, archive):
            num_bytes = archive.offset
            if member.name.rpartition(".")[2].lower() in IMAGE_SUFFIXES:
                images.append(cast(Any, archive.extractfile(member)).read())
    return len(images) * sum(file.stat().st_size for file in files) // num_bytes, images


def _shards(path: Path) -> list[Path]:
    files = sorted(path.glob("*.tar")) if path.is_dir() else expand_ranges(path)
    missing = sum(not file.is_file() for file in files)
    if not files or missing:
        raise DataError(
            "webdataset:PATH must be a .tar file, a folder of .tar files, or a name with ranges such as "
            f"{{000..011}}; got {str(path)!r}, where {missing} of {len(files)} shards are missing"
        )
    return files


def _read_shard(
    file: Path, unit_field: str | None, scan: ImageScan, has_captions: bool
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns of a shard's samples, with the number of left-out files, and its samples."""
    import pyarrow as pa

    members, left_out = _members(file, has_captions)
    texts = {"captions": pa.list_(pa.string()), "unit": pa.string(), "label": pa.string()}
    schema = schema_of(offset=pa.uint64(), num_bytes=pa.uint32(), key=pa.binary(16), **texts)
    schema = schema.with_metadata({_LEFT_OUT: json.dumps(left_out)})
    return schema, _samples(file, members, unit_field, scan, schema, has_captions)


def _samples(
    file: Path,
    members: dict[str, list[_Member]],
    unit_field: str | None,
    scan: ImageScan,
    schema: pa.Schema,
    has_captions: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield a shard's samples in the order of their first files."""
    import pyarrow as pa

    names = iter(members)
    with file.open("rb", buffering=0) as opened:

        def read(place: tuple[int, int]) -> bytes:
            return os.pread(opened.fileno(), place[1], place[0])

        while chunk := list(itertools.islice(names, IMAGES_AT_ONCE)):
            images = [[place for kind, place in members[n] if kind in IMAGE_SUFFIXES] for n in chunk]
            encoded = [read(places[0]) if len(places) == 1 else b"" for places in images]
            columns = scan.facts(encoded)
            texts = [_texts(members[name], read, unit_field, has_captions) for name in chunk]
            for row, (name, places) in enumerate(zip(chunk, images, strict=True)):
                kinds = [kind for kind, _ in members[name]]
                fault = texts[row][3]
                if len(places) != 1:
                    fault = "several images" if places else "missing image"
                elif len(set(kinds)) < len(kinds):  # one would silently replace the other
                    fault = "several files of one kind"
                image_fault = columns["fault"][row]
                columns["fault"][row] = fault or (f"{image_fault} image" if image_fault else "")
            columns["offset"] = [places[0][0] if places else 0 for places in images]
            columns["num_bytes"] = [places[0][1] if places else 0 for places in images]
            columns["key"] = [hashlib.blake2b(content, digest_size=16).digest() for content in encoded]
            for name, values in zip(("captions", "unit", "label"), zip(*texts, strict=True), strict=False):
                columns[name] = values
            yield pa.RecordBatch.from_pydict(columns, schema)


def _texts(
    files: list[_Member],
    read: Callable[[tuple[int, int]], bytes],
    unit_field: str | None,
    has_captions: bool,
) -> tuple[tuple[str, ...], str, str, str]:
    """Return a sample's captions, unit and class, and the fault of its texts, "" if there is none."""
    places = [(kind, place) for kind, place in files if kind not in IMAGE_SUFFIXES]
    if any(size > _MAX_TEXT_BYTES for _, (_, size) in places):
        return (), "", "", "text too large"
    return _parse_texts({kind: read(place) for kind, place in places}, unit_field, has_captions)


def _members(file: Path, has_captions: bool) -> tuple[dict[str, list[_Member]], Counter[str]]:
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
            if kind in IMAGE_SUFFIXES or _is_text(kind, has_captions):
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
    texts = {part for part, suffix, _, _ in parts if suffix in ("txt", "json", "cls")}
    separate = {part for part in images if part in texts or "" not in images} - {""}
    for part, suffix, kind, place in parts:
        yield (f"{stem}.{part}", suffix, place) if part in separate else (stem, kind, place)


def _is_text(kind: str, has_captions: bool) -> bool:
    return kind == "json" or (kind.rpartition(".")[2] == "txt" if has_captions else kind == "cls")


def _parse_texts(
    files: dict[str, bytes], unit_field: str | None, has_captions: bool
) -> tuple[tuple[str, ...], str, str, str]:
    """Return a sample's captions, unit and class, and the fault of its texts, "" if there is none."""
    kinds = sorted((kind for kind in files if kind.endswith("txt")), key=lambda kind: (len(kind), kind))
    unit: Any = None
    try:
        captions = [files[kind].decode("utf-8-sig").strip() for kind in kinds]
        fields = json.load(io.BytesIO(files["json"])) if "json" in files else {}
        json_captions = fields.get("captions", [])
        if type(json_captions) is not list:
            raise TypeError
        captions += json_captions
        unit = None if unit_field is None else fields.get(unit_field)
        label = files.get("cls", b"").decode().strip()
        fault = caption_fault(captions) if has_captions else ""
    except UnicodeDecodeError:
        return (), "", "", "caption not UTF-8"
    except (ValueError, TypeError, AttributeError, RecursionError):
        return (), "", "", "unreadable json"
    if unit is not None and type(unit) not in (str, int):
        return (), "", "", "unit neither text nor integer"
    captions = [] if fault or not has_captions else captions
    return tuple(captions), "" if unit is None else str(unit), label, fault
