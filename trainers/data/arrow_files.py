"""Hugging Face data sets on disk, `hf:PATH`: read as parquet files are, with images that stay in their place.

`dataset.save_to_disk` writes Arrow files without compression. The bytes of an image are then one piece of the
file, which a step reads where it is, so the index holds places and no images.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.object_store import DataFile, ObjectReader, RemoteFile
from trainers.data.class_names import ClassNames, encodable
from trainers.data.image_index import places_of
from trainers.data.pairs import SPLITS

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_END_OF_STREAM, _FILE_MAGIC = b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1"


class ArrowFile:
    """A file of Arrow's IPC format, mapped into memory, with as much of `pq.ParquetFile` as is used here.

    Every method raises `pa.ArrowException` if the file is damaged.

    Attributes:
      schema_arrow: the columns.

    Raises:
      OSError: the file is truncated.
      pa.ArrowException: it is no such file.
    """

    def __init__(self, file: Path) -> None:
        import pyarrow as pa

        self._content = pa.memory_map(str(file)).read_buffer()
        is_stream = self._content[: len(_FILE_MAGIC)].to_pybytes() != _FILE_MAGIC
        if is_stream and self._content[-len(_END_OF_STREAM) :].to_pybytes() != _END_OF_STREAM:
            raise OSError
        self._reader = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(self._content)
        self.schema_arrow: pa.Schema = self._reader.schema

    @cached_property
    def metadata(self) -> pa.Table:
        """The table, which knows its number of rows."""
        return self._reader.read_all()

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return the rows with these columns."""
        table = self.metadata.select(columns)
        table.validate(full=True)
        return table

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with these columns, at most `batch_size` at a time."""
        yield from self.read(columns).to_batches(batch_size)

    def rows_without_bytes(self, column: str) -> pa.ChunkedArray:
        """Return the rows of an image column that hold no bytes, without reading the others' bytes."""
        import pyarrow.compute as pc

        images = self.read([column]).column(column)
        is_struct = hasattr(images.type, "names") and "bytes" in images.type.names
        encoded = pc.struct_field(images, "bytes") if is_struct else images
        return images.filter(encoded.is_null()) if "binary" in str(encoded.type) else images

    def places(self, images: pa.Array) -> dict[str, NDArray[np.uint64]]:
        """Return the places of encoded images, a part of a column from `iter_batches`, in this file.

        Raises:
          DataError: the file is compressed.
        """
        encoded = images.field("bytes") if hasattr(images, "field") else images
        offsets, sizes = places_of(encoded, self._content.address)
        if ((sizes > 0) & (offsets > self._content.size)).any():  # decompressed, somewhere in memory
            raise DataError(
                "images stay only in Arrow files that are not compressed. Write them with "
                "dataset.save_to_disk, or pass --in-memory"
            )
        return {"offset": offsets, "num_bytes": sizes}


def kind_of(file: DataFile) -> str:
    """Return the kind of a table's file, as messages name it: Arrow or parquet."""
    is_arrow = isinstance(file, Path) and file.suffix in (".arrow", ".feather")
    return "Arrow" if is_arrow else "parquet"


@contextmanager
def open_table(file: DataFile) -> Iterator[ArrowFile | pq.ParquetFile]:
    """Open a parquet file, or an Arrow file with the same interface."""
    import pyarrow.parquet as pq

    if isinstance(file, Path) and kind_of(file) == "Arrow":
        yield ArrowFile(file)
    else:
        with pq.ParquetFile(ObjectReader(file) if isinstance(file, RemoteFile) else file) as opened:
            yield opened


def saved_splits(path: Path) -> list[list[Path]]:
    """Return the files of the training split and, if it exists, of the test split.

    The path is a folder from `save_to_disk` of a `Dataset` or `DatasetDict`, or one Arrow file.

    Raises:
      DataError: it is none of these, has no training split, or has rows selected by a file of indices.
    """
    if path.is_file() and kind_of(path) == "Arrow":
        return [[path]]
    names = split_names(path)
    folders = [path / name for name in SPLITS if name in {SPLITS[0], *names}] if names else [path]
    return list(map(_saved_files, folders))


def split_names(path: Path) -> list[str]:
    """Return the names of all splits of a saved `DatasetDict`; none for a `Dataset`."""
    return list(_read_json(path / "dataset_dict.json").get("splits", []))


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of one saved split, in order."""
    state = _read_json(folder / "state.json")
    indices = [*folder.glob("indices*.arrow"), state.get("_indices_files"), state.get("_indices_data_files")]
    if any(indices):
        raise DataError(
            f"hf:PATH must hold all rows in order, without a file of indices; got {str(folder)!r}. Save "
            "dataset.flatten_indices() to disk"
        )
    files = [folder / entry.get("filename", "") for entry in state.get("_data_files", [])]
    missing = sum(not file.is_file() for file in files)
    if missing or not files:
        raise DataError(
            "hf:PATH must be a folder on this machine that dataset.save_to_disk wrote, with a split train if "
            f"there are several, or an .arrow file; got {str(folder)!r}"
            + (f", where {missing} of {len(files)} files are missing" if files else "")
        )
    return files


def saved_class_names(path: Path, label: str) -> ClassNames:
    """Return the names of the classes if a label column is a `ClassLabel`, else none."""
    folders = [path.parent] if path.is_file() else [path / SPLITS[0], path]
    infos = (_read_json(folder / "dataset_info.json") for folder in folders)
    feature: Any = next((info["features"].get(label) for info in infos if info.get("features")), None)
    is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    return tuple(map(encodable, feature["names"])) if is_class else ()


def _read_json(file: Path) -> dict[str, Any]:
    """Return the content of a file of the data set's description; empty if it is missing or unreadable."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}
