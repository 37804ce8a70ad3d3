"""The output file of embeddings, in one of two formats, whatever was embedded.

`.npz` holds arrays, `.parquet` holds rows. Both also state, as JSON, which model made them and that
embeddings of private data are private: in parquet's metadata under `dpgcl`, and in the array `about` of an
npz.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, StorageError
from trainers.embed.embed_pairs import Embeddings
from trainers.export.description import ModelDescription

PARQUET, NPZ, CSV = ".parquet", ".npz", ".csv"
_NOTE = (
    "{} of private images are private data themselves: the guarantee covers the model, but not the "
    "data that it is applied to."
)
NOTE = _NOTE.format("Embeddings")


def check_target(path: Path, *formats: str) -> None:
    """Check that `path` can be a new output file.

    Raises:
      ConfigError: the file's suffix is none of `formats`.
      StorageError: the file exists.
    """
    if path.suffix not in formats:
        raise ConfigError(f"--to must be a {' or '.join(formats)} file; got {path}")
    if path.exists():
        raise StorageError(f"{path} exists and is not overwritten. Choose another --to.")


def write_embeddings(path: Path, embeddings: Embeddings, *, model: ModelDescription, features: str) -> None:
    """Write embeddings to a new file.

    Args:
      path: `.npz` or `.parquet`.
      embeddings: the embeddings; an npz gets the arrays that exist, parquet gets rows with null for missing
        values.
      model: description of the model that made them.
      features: what the embeddings are, in words, such as `backbone`.

    Raises:
      StorageError: the file cannot be written.
    """
    about = json.dumps({"model_sha256": model.sha256, "features": features, "note": NOTE}, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == NPZ:
            arrays = embeddings.arrays().items()
            arrays_by_name: dict[str, Any] = {name: _plain(each) for name, each in arrays if each is not None}
            np.savez(path, **arrays_by_name, about=np.array(about))
        else:
            _write_parquet(path, embeddings.rows(), about)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def write_answers(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    content: str,
    kind: str,
    model: ModelDescription,
) -> None:
    """Write a model's answers (captions or classes) to a new csv file, and print notes on their privacy.

    Args:
      path: path of the file, already checked by `check_target`.
      columns: names of the columns.
      rows: rows of text and numbers, one per image.
      content: the number and kind of the answers in words, to be printed.
      kind: plural noun for the answers in the printed note, such as "Captions".
      model: description of the model that made them.

    Raises:
      StorageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    print(f"written: {path}, {content}")
    print(f"the model: {model.promise}")
    print(f"note: {_NOTE.format(kind)}")


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array; objects, which an npz would pickle, become strings of fixed width."""
    return array.astype(np.str_) if array.dtype == object else array


def _write_parquet(path: Path, rows: Sequence[Mapping[str, NDArray[Any]]], about: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pa.table({name: _column(values) for name, values in part.items()}) for part in rows]
    table = pa.concat_tables(tables, promote_options="default")
    pq.write_table(table.replace_schema_metadata({"dpgcl": about}), path)


def _column(values: NDArray[Any]) -> Any:
    """Return a parquet column; a column of lists if `values` has two axes."""
    import pyarrow as pa

    if values.ndim == 1:
        return pa.array(values.tolist())
    starts = np.arange(len(values) + 1, dtype=np.int64) * values.shape[1]
    lists = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(values.reshape(-1)))
    return lists.cast(pa.list_(pa.float32()))
