"""The output file of embeddings, in one of two formats, whatever was embedded.

`.npz` holds arrays, `.parquet` holds rows. Both also state, as JSON, which model made them and that
embeddings of private data are private: in parquet's metadata under `dpgcl`, and in the array `about` of an
npz.
"""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpgcl_core.durable_files import replacing, storage_errors
from dpgcl_core.errors import ConfigError, StorageError
from trainers.embed.embed_pairs import TEXTS
from trainers.embed.embedding_parts import PartFolder, read_columns
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


def write_embeddings(parts: PartFolder, *, model: ModelDescription, features: str) -> None:
    """Write the output, `.npz` or `.parquet`, one part at a time; the file appears when it is complete.

    Args:
      parts: the parts; parquet gets a group of rows for each, with null for missing values. An npz gets
        an array for each column, in which captions have no ids.
      model: description of the model that made them.
      features: what the embeddings are, in words, such as `backbone`.

    Raises:
      StorageError: the file cannot be written.
    """
    about = json.dumps({"model_sha256": model.sha256, "features": features, "note": NOTE}, ensure_ascii=False)
    write = _write_npz if parts.target.suffix == NPZ else _write_parquet
    with storage_errors(parts.target), replacing(parts.target, temporary_folder=parts.path) as file:
        write(file, parts, about)


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
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)
    print(f"written: {path}, {content}")
    print(f"the model: {model.promise}")
    print(f"note: {_NOTE.format(kind)}")


def _write_npz(file: IO[bytes], parts: PartFolder, about: str) -> None:
    """Write what `numpy.savez` writes, with one part of the embeddings in memory."""
    with zipfile.ZipFile(file, "w") as archive:
        for column, files in parts.files.items():
            for name in pq.read_schema(files[0]).names:
                if (column, name) == (TEXTS, "id"):
                    continue
                chunks = read_columns(files, name)
                with archive.open(f"{name}s.npy", "w", force_zip64=True) as member:
                    if name != column:
                        values = [value for chunk in chunks for value in chunk.to_pylist()]
                        np.lib.format.write_array(member, np.array(values), allow_pickle=False)
                        continue
                    header = {"descr": "<f4", "fortran_order": False, "shape": parts.shape_of(column)}
                    np.lib.format.write_array_header_1_0(member, header)
                    for chunk in chunks:
                        member.write(pc.list_flatten(chunk).to_numpy().astype("<f4").tobytes())
        with archive.open("about.npy", "w") as member:
            np.lib.format.write_array(member, np.array(about))


def _write_parquet(file: IO[bytes], parts: PartFolder, about: str) -> None:
    schema = pa.unify_schemas(pq.read_schema(files[0]) for files in parts.files.values())
    empty = schema.empty_table().replace_schema_metadata({"dpgcl": about})
    # Embeddings seldom repeat: without a dictionary of their values the file is smaller, and faster to write.
    with pq.ParquetWriter(file, empty.schema, use_dictionary=["label"]) as writer:
        for part in chain.from_iterable(parts.files.values()):
            with pq.ParquetFile(part) as table:
                writer.write_table(pa.concat_tables([empty, table.read()], promote_options="default"))
