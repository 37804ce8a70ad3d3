"""Embeddings in parts on disk: memory holds one part, and an interrupted run goes on where it stopped.

A part is a parquet file of some thousand rows, in a private folder next to the output until the output is
complete. The name of the file is a digest of the model, of the other columns, and of the pixels or captions.
So a part is used again only for the same model and data, whatever the batch size and the device.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from dpgcl_core.durable_files import make_folder, replacing, storage_errors
from dpgcl_core.errors import StorageError
from trainers.evaluation.linear_probe import Features

ROWS_PER_PART = 8192
"""Images or captions in a part: a multiple of the default batch sizes, so parts do not change the batches."""

Columns = Mapping[str, Sequence[Any]]
"""Columns of a part by name, apart from its embeddings."""
Embedded = tuple[Features, int]
"""Embeddings `[n, dim]` of n images or captions, and the number of captions cut to the context length."""
EmbedPart = Callable[[], Embedded]
"""Function that computes a part's embeddings."""


class PartFolder:
    """The folder with the finished parts of an output; see `hold_parts`.

    Args:
      target: the output.
      path: the folder.
      model: text that identifies the model and the features that are read from it.

    Attributes:
      files: the parts of this run in their order, by the column of their embeddings.
    """

    def __init__(self, target: Path, path: Path, model: str) -> None:
        self.target = target
        self.path = path
        self.files = defaultdict[str, list[Path]](list)
        self._model = model
        self._earlier_files = set(path.glob("*.parquet"))
        if self._earlier_files:
            print(f"note: {target} is unfinished, and is continued", file=sys.stderr)

    def store(self, column: str, columns: Columns, content: Sequence[Any], embed: EmbedPart) -> None:
        """Append a part, which is computed unless an earlier run has finished it.

        Args:
          column: the column of the embeddings.
          columns: the other columns.
          content: the captions or the images' digests, of which the embeddings are a function.
          embed: function that computes the embeddings.

        Raises:
          StorageError: the part cannot be written, on a full disk for example.
        """
        key = repr((self._model, column, columns, content)).encode("utf-8", "surrogatepass")
        file = self.path / f"{hashlib.sha256(key).hexdigest()}.parquet"
        if not file.exists():
            if self._earlier_files:  # parts are finished in order, so these would have come before this one
                print(f"note: model or data have changed; {self.target} is computed again", file=sys.stderr)
            with storage_errors(self.target):
                while self._earlier_files:
                    self._earlier_files.pop().unlink()
            embeddings, num_truncated = embed()
            table = pa.table(
                {**columns, column: list(embeddings)}, metadata={"num_truncated": str(num_truncated)}
            )
            with storage_errors(self.target), replacing(file, mode=0o600) as out:
                pq.write_table(table, out, use_dictionary=False, compression="none")
        self._earlier_files.discard(file)
        self.files[column].append(file)

    def shape_of(self, column: str) -> tuple[int, int]:
        """Return the number of embeddings in a column, and their width."""
        first = next(read_columns(self.files[column], column))
        return sum(pq.read_metadata(file).num_rows for file in self.files[column]), len(first[0])

    @property
    def num_truncated(self) -> int:
        """Number of captions cut to the context length. **Private-only**: it depends on captions."""
        schemas = [pq.read_schema(file) for files in self.files.values() for file in files]
        return sum(int(schema.metadata[b"num_truncated"]) for schema in schemas)


def read_columns(files: Sequence[Path], column: str) -> Iterator[pa.ChunkedArray]:
    """Yield a column of each part, one part at a time."""
    for file in files:
        # `read_table` would take folders such as `a=1` for columns.
        with pq.ParquetFile(file) as part:
            yield part.read([column])[column]


@contextmanager
def hold_parts(target: Path, model: str) -> Iterator[PartFolder]:
    """Make and lock the folder of an output's parts, and yield it; it is deleted once the output exists.

    Args:
      target: the output, which does not exist yet.
      model: text that identifies the model and the features that are read from it.

    Raises:
      StorageError: another process writes the same output, or the folder cannot be written.
    """
    path = target.with_name(f".{target.name}.unfinished")
    lock = FileLock(path / "lock", mode=0o600, fallback_to_soft=False)
    with storage_errors(target):
        make_folder(path, mode=0o700)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise StorageError(f"another process writes {target}. Choose another --to.") from error
    except (OSError, NotImplementedError):
        pass  # the storage has no locks
    try:
        yield PartFolder(target, path, model)
    finally:
        if target.exists() or not any(path.glob("*.parquet")):
            shutil.rmtree(path, ignore_errors=True)
        lock.release()
