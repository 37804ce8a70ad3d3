"""Folders as `datasets` 5.2 writes them with `save_to_disk`, written with pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def images(contents: Sequence[bytes | None], paths: Sequence[str | None] | None = None) -> pa.Array:
    """A column of images."""
    rows = zip(contents, paths or [None] * len(contents), strict=True)
    return pa.array([{"bytes": content, "path": path} for content, path in rows], IMAGE)


def save_dataset(
    folder: Path,
    columns: Mapping[str, Any],
    *,
    class_names: Mapping[str, Sequence[str]] | None = None,
    num_files: int = 2,
    rows_at_once: int = 5,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """A `Dataset`; `class_names` by column are those of its `ClassLabel`s."""
    folder.mkdir(parents=True)
    table, names = pa.table(dict(columns)), []
    for number in range(num_files):
        names.append(f"data-{number:05d}-of-{num_files:05d}.arrow")
        first, end = (len(table) * (number + part) // num_files for part in (0, 1))
        with pa.OSFile(str(folder / names[-1]), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table.slice(first, end - first), max_chunksize=rows_at_once)
    described = {"_data_files": [{"filename": name} for name in names], "_split": None, **(state or {})}
    (folder / "state.json").write_text(json.dumps(described))
    features: dict[str, Any] = {name: {"dtype": "string", "_type": "Value"} for name in columns}
    features |= {name: {"names": list(c), "_type": "ClassLabel"} for name, c in (class_names or {}).items()}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def save_splits(folder: Path, splits: Mapping[str, Mapping[str, Any]], **options: Any) -> Path:
    """A `DatasetDict` of splits by name."""
    for name, columns in splits.items():
        save_dataset(folder / name, columns, **options)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder
