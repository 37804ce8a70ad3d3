"""Embeds images with an exported model.

    python -m trainers.embed --model FOLDER --images folder:/data/scans --to scans.parquet
    python -m trainers.embed --model FOLDER --images parquet:/data/scans.parquet --features projection

Images are read by the rules of `trainers.data` (a folder, an `.npz`, parquet files, or a built-in data set),
resized to the model's input and brought to its number of channels. What cannot be read is refused as a
whole, with how many there are; so no row goes missing. `--features backbone` gives the features that the
scores are computed from, `projection` the unit embeddings that the loss saw.

Embeddings of private images are private data themselves. The model's guarantee is about the records that
it was trained on; it covers the model, and nothing that the model is applied to.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dpgcl_core.errors import ConfigError, DataError, StorageError, StrictParser, exit_on_bad_input
from dpgcl_core.records import ids_from_names
from trainers.data import load_dataset
from trainers.data.dataset import Dataset
from trainers.encoder import NORM_FLOOR, Encoder, ImageShape, device_named, to_fast_layout
from trainers.evaluate import Features, embed_features
from trainers.exported import load_encoder

BACKBONE, PROJECTION = "backbone", "projection"
PARQUET, NPZ = ".parquet", ".npz"
NOTE = (
    "Embeddings of private images are private data themselves: the guarantee covers the model, not what it "
    "is applied to."
)
_LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)  # ITU-R 601 in 16 bits: how Pillow makes grey images

Names = NDArray[Any]
"""One name per image, `[num_images]`: strings or integers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0.

    Raises:
      ConfigError, DataError, StorageError: an option, the images or the model are unusable.
    """
    options = _parser().parse_args(arguments)
    _check_target(options.to)
    if options.batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1; got {options.batch_size}")
    encoder, description = load_encoder(options.model, own_network=options.network)
    names, images = read_images(options.images, description.image_shape)
    how = {"features": options.features, "batch_size": options.batch_size}
    embeddings = embed_images(encoder, images, device=_device(options.device), **how)
    about = {"model_sha256": description.sha256, "features": options.features, "note": NOTE}
    write_embeddings(options.to, names, embeddings, about)
    width = embeddings.shape[1]
    print(f"written: {options.to}, {len(images)} embeddings of width {width} ({options.features})")
    print(f"the model: {description.promise}")
    print(f"note: {NOTE}")
    return 0


def read_images(name: str, image_shape: ImageShape) -> tuple[Names, NDArray[np.uint8]]:
    """Returns the names of all images and the images, uint8 `[num_images, *image_shape]`, in their order.

    A name is the path in the folder, the value in the column `id`, or else the image's place, counted from
    0; test images come after the training images.

    Args:
      name: as `trainers.data.load_dataset` takes it.
      image_shape: (channels, height, width) of the model's input.

    Raises:
      ConfigError: the images would have to be stretched to another shape than a square.
      DataError: some are missing or unreadable (the message says how many, never which), or as
        `load_dataset`.
    """
    channels, height, width = image_shape
    dataset = load_dataset(name, image_size=height if height == width else None)
    if dataset.image_shape[1:] != (height, width):
        raise ConfigError(
            f"the model reads images of {height}×{width} pixels, and only squares are resized to; got "
            f"{dataset.image_shape[1]}×{dataset.image_shape[2]}: resize them beforehand"
        )
    parts = [dataset.train] if dataset.test is None else [dataset.train, dataset.test]
    images = np.concatenate([to_channels(part.images, channels) for part in parts])
    return _names(dataset, len(images)), images


def to_channels(images: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Returns images with 1 or 3 channels from those with 1 or 3: grey is repeated, colour becomes its luma.

    >>> to_channels(np.full((1, 3, 1, 1), 200, dtype=np.uint8), 1).tolist()
    [[[[200]]]]
    """
    found = images.shape[1]
    if found == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=1)
    luma = np.tensordot(images.astype(np.uint32), _LUMA, axes=([1], [0]))
    return ((luma + 0x8000) >> 16).astype(np.uint8)[:, None]


def _names(dataset: Dataset, num_images: int) -> Names:
    scheme, _, place = dataset.name.partition(":")
    path = Path(place).expanduser()
    found: list[Any] | None = None
    if dataset.is_builtin:
        pass
    elif scheme == "folder":
        found = _paths_of(dataset, path)
    elif scheme == "npz":
        found = _npz_ids(path)
    else:
        found = _parquet_ids(path)
    if found is None:
        return np.arange(num_images)
    if len(found) != num_images:
        raise DataError(
            f"the images must stay as they are while they are read; found {len(found)} and then {num_images}"
        )
    return np.array(found, dtype=object if isinstance(found[0], str) else None)


def _paths_of(dataset: Dataset, folder: Path) -> list[Any]:
    """The relative path of each record, found by the id that was made of it."""
    places = [(Path(root).relative_to(folder), files) for root, _, files in os.walk(folder)]
    paths = [(place / name).as_posix() for place, files in places for name in files]
    shown = [path.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace") for path in paths]
    path_of = dict(zip(ids_from_names(shown).tolist(), shown, strict=True))
    return [path_of[each] for each in dataset.train.ids.tolist() if each in path_of]


def _npz_ids(path: Path) -> list[Any] | None:
    with np.load(path, allow_pickle=False) as archive:
        columns = ["train_ids", "test_ids"] if "train_images" in archive.files else ["ids"]
        if "test_images" not in archive.files:
            columns = columns[:1]
        if not set(columns) <= set(archive.files):
            return None
        return [value for column in columns for value in archive[column].tolist()]


def _parquet_ids(path: Path) -> list[Any] | None:
    import pyarrow.parquet as pq

    files = [path] if path.is_file() else sorted(path.rglob(f"*{PARQUET}"))
    if "id" not in pq.read_schema(files[0]).names:
        return None
    found: list[Any] = []
    for file in files:
        with pq.ParquetFile(file) as opened:
            found += opened.read(columns=["id"]).column("id").to_pylist()
    return found


def embed_images(
    encoder: Encoder,
    images: NDArray[np.uint8],
    *,
    features: str = BACKBONE,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
) -> Features:
    """Returns one embedding per image, float32 `[num_images, dim]`, finite.

    Args:
      encoder: an exported one; it is moved to `device`.
      images: uint8 `[num_images, channels, height, width]`, not normalised.
      features: `backbone`, the features; or `projection`, the unit embeddings of the projection head.
      batch_size: images passed at once; changes nothing beyond rounding.
      device: where to compute.
    """
    device = torch.device(device)
    to_fast_layout(encoder, device, images.shape[1:])
    found = embed_features(encoder, images, batch_size=batch_size, device=device)
    if features == BACKBONE:
        return found
    rows = [np.zeros((0, encoder.embedding_dim), dtype=np.float32)]
    with torch.no_grad():
        for start in range(0, len(found), batch_size):
            projected = encoder.head(torch.from_numpy(found[start : start + batch_size]).to(device))
            rows.append(F.normalize(projected, dim=1, eps=NORM_FLOOR).cpu().numpy())
    return np.nan_to_num(np.concatenate(rows), posinf=0.0, neginf=0.0)


def write_embeddings(path: Path, names: Names, embeddings: Features, about: dict[str, str]) -> None:
    """Writes `.parquet` with the columns `id` and `embedding`, or `.npz` with `ids` and `embeddings`.

    Args:
      path: a new file.
      names: `[num_images]`.
      embeddings: float32 `[num_images, dim]`.
      about: what the parquet file's metadata say under `dpgcl`, and the array `about` of the npz as JSON.

    Raises:
      StorageError: it cannot be written.
    """
    text = json.dumps(about, ensure_ascii=False)
    ids = names.astype(np.str_) if names.dtype == object else names
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == NPZ:
            np.savez(path, ids=ids, embeddings=embeddings, about=np.array(text))
            return
        _write_parquet(path, names, embeddings, text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _write_parquet(path: Path, names: Names, embeddings: Features, about: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    starts = np.arange(len(embeddings) + 1, dtype=np.int64) * embeddings.shape[1]
    lists = pa.LargeListArray.from_arrays(pa.array(starts), pa.array(embeddings.reshape(-1)))
    table = pa.table({"id": pa.array(names.tolist()), "embedding": lists.cast(pa.list_(pa.float32()))})
    pq.write_table(table.replace_schema_metadata({"dpgcl": about}), path)


def _check_target(path: Path) -> None:
    if path.suffix not in (PARQUET, NPZ):
        raise ConfigError(f"embeddings are written to a {PARQUET} or {NPZ} file; got --to {path}")
    if path.exists():
        raise StorageError(f"{path} exists and is not overwritten: give another --to")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda needs a GPU that torch sees; got none: give --device cpu")
    return device_named(name)


def _parser() -> StrictParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = StrictParser(
        prog="python -m trainers.embed", description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="an exported model")
    add("--images", required=True, metavar="SOURCE", help="folder:PATH, npz:PATH, parquet:PATH, or a name")
    add("--to", type=Path, default=Path("embeddings.parquet"), metavar="FILE", help=".parquet or .npz")
    add("--features", choices=(BACKBONE, PROJECTION), default=BACKBONE, help="what to write (backbone)")
    add("--batch-size", type=int, default=512, help="images at once (512)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (auto)")
    add("--network", metavar="NAME", help="the network of your own that the model names, if you trust it")
    return parser


if __name__ == "__main__":
    exit_on_bad_input(main)
