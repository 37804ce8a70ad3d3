"""The built-in public data sets behind one registry, and the image decoder that all sources share.

Addresses and checksums are the publishers'. What is read from an archive is read as data only: nothing
is unpacked to disk, and the CIFAR-10 pickles may build arrays and nothing else.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from trainers.data.decoding import content_ids, decode_images, resize_images
from trainers.data.download import RemoteFile, cache_folder, find_file, find_or_download, write_atomically
from trainers.data.records import Records

if TYPE_CHECKING:
    pass

Splits = tuple[Records, Records | None]
"""Training records, and test records where the source has its own."""

_EUROSAT_SIZE = 32
_MAX_MEMBER_BYTES = 1 << 26
_BAD_ARCHIVE = (zlib.error, zipfile.BadZipFile, tarfile.TarError)
_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, KeyError, *_BAD_ARCHIVE)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One built-in data set.

    Attributes:
      read: (files, image_size) to its splits; may ignore the size, which is then set afterwards.
      files: what its publisher offers, in the order `read` expects.
    """

    read: Callable[[tuple[RemoteFile, ...], int | None], Splits]
    files: tuple[RemoteFile, ...] = ()


def load_builtin(name: str, image_size: int | None = None) -> Splits:
    """Return the records of the built-in `name`, a key of `SOURCES`.

    Ids come from each record's image and label as published, so `image_size` leaves them as they are.

    Raises:
      DataError: the data are not on this machine and cannot be downloaded, or are damaged.
    """
    source = SOURCES[name]
    splits = source.read(source.files, image_size)
    if image_size is None:
        return splits
    train, test = splits
    return _resized(train, image_size), None if test is None else _resized(test, image_size)


def _resized(records: Records, size: int) -> Records:
    return Records(images=resize_images(records.images, size), ids=records.ids, labels=records.labels)


def _records(images: NDArray[np.uint8], labels: NDArray[Any]) -> Records:
    whole = labels.astype(np.int64)
    ids = content_ids((image.tobytes() for image in images), whole)
    return Records(images=images, labels=whole, ids=ids)


def _read_digits(_: tuple[RemoteFile, ...], __: int | None) -> Splits:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # published as 0 to 16
    return _records(images[:, None], digits.target), None


def _read_fashion_mnist(files: tuple[RemoteFile, ...], _: int | None) -> Splits:
    packed = find_file("fashion_mnist.npz", "fashion-mnist")
    if packed is None:
        paths = [find_or_download(file, "fashion-mnist") for file in files]
        arrays = [_read_idx(path, num_axes) for path, num_axes in zip(paths, (3, 1, 3, 1), strict=True)]
    else:
        arrays = _read_packed(packed)
    for images, labels in (arrays[:2], arrays[2:]):
        if images.dtype != np.uint8 or images.shape != (len(labels), 28, 28) or labels.dtype.kind not in "iu":
            raise DataError(
                "Fashion-MNIST must be uint8 [N, 28, 28] images with [N] integer labels; "
                f"got {images.dtype} {images.shape} with {labels.dtype} {labels.shape}"
            )
    return _records(arrays[0][:, None], arrays[1]), _records(arrays[2][:, None], arrays[3])


def _read_packed(path: Path) -> list[NDArray[Any]]:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except (*_DAMAGED, TypeError) as error:
        raise DataError(f"{path} must be a readable .npz with the arrays {', '.join(names)}") from error


def _read_idx(path: Path, num_axes: int) -> NDArray[np.uint8]:
    """An idx file: 0, 0, type 8 (uint8), number of axes, each axis as big-endian uint32, values."""
    try:
        with gzip.open(path) as packed:
            content = packed.read()
        start = 4 + 4 * num_axes
        shape = struct.unpack(f">{num_axes}I", content[4:start])
    except (*_DAMAGED, struct.error) as error:
        raise DataError(f"{path} must be a readable gzip file in idx format") from error
    if content[:4] != bytes((0, 0, 8, num_axes)) or len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} must be an idx file of bytes with {num_axes} axes and as many values as it says"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


class _ArraysOnly(pickle.Unpickler):
    """Loads pickled NumPy arrays; any other class or function is refused, so nothing can be run."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the three things an array is built from."""
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError("a class or function that no array needs")
        return allowed[module, name]


def _read_cifar10(files: tuple[RemoteFile, ...], _: int | None) -> Splits:
    path = find_or_download(files[0], "cifar10")
    names = [*(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)), "cifar-10-batches-py/test_batch"]
    members = _read_tar(path, frozenset(names))
    if members.keys() != set(names):
        raise DataError(f"{path} must hold 6 batches of CIFAR-10; found {len(members)}")
    batches = [_read_batch(members[name], path) for name in names]
    images, labels = (np.concatenate(column) for column in zip(*batches[:5], strict=True))
    return _records(images, labels), _records(*batches[5])


def _read_tar(path: Path, names: frozenset[str]) -> dict[str, bytes]:
    """The named regular files; an archive that reaches outside its own folder is refused as a whole."""
    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts:
                    raise DataError(f"{path} must hold no member outside its own folder; it is not CIFAR-10")
                opened = archive.extractfile(member) if member.isreg() and member.name in names else None
                if opened is not None and member.size <= _MAX_MEMBER_BYTES:
                    contents[member.name] = opened.read()
    except DataError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{path} must be a readable .tar.gz archive") from error
    return contents


def _read_batch(content: bytes, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        # latin1 maps the byte strings of Python 2, which wrote these files, to text one to one.
        batch = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        rows, labels = batch["data"], np.array(batch["labels"])
        if rows.dtype != np.uint8 or labels.dtype.kind != "i" or rows.shape != (len(labels), 3072):
            raise ValueError
    except MemoryError:
        raise
    except Exception as error:  # a pickle can be damaged in any way
        raise DataError(f"{path} must hold batches of arrays as published; {type(error).__name__}") from error
    return rows.reshape(-1, 3, 32, 32).copy(), labels


def _read_eurosat(files: tuple[RemoteFile, ...], image_size: int | None) -> Splits:
    """Decoding 27,000 JPEGs takes a while: the result is cached for each size."""
    size = image_size or _EUROSAT_SIZE
    digits = files[0].checksum.partition(":")[2]
    cached = cache_folder() / "eurosat" / f"decoded-v1-{digits[:12]}-{size}.npz"
    records = _read_decoded(cached)
    if records is None:
        records = _decode_eurosat(find_or_download(files[0], "eurosat"), size)
        try:
            with write_atomically(cached) as out:
                np.savez(out, images=records.images, labels=cast(Any, records.labels), ids=records.ids)
        except DataError as error:
            _log.warning("the decoded EuroSAT images are not kept: %s", error)
    return records, None


def _read_decoded(path: Path) -> Records | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Records(images=archive["images"], labels=archive["labels"], ids=archive["ids"])
    except (*_DAMAGED, TypeError):  # absent or damaged: decoded again (DataError is a ValueError)
        return None


def _decode_eurosat(path: Path, size: int) -> Records:
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
            encoded = [archive.read(name) for name in names]
    except _DAMAGED as error:
        raise DataError(f"{path} must be a readable .zip archive") from error
    if not names:
        raise DataError(f"{path} must hold JPEG images in one folder per class; found none")
    _, labels = np.unique([PurePosixPath(name).parent.name for name in names], return_inverse=True)
    labels = labels.astype(np.int64)
    return Records(images=decode_images(encoded, size), labels=labels, ids=content_ids(encoded, labels))


def _fashion_file(name: str, md5: str) -> RemoteFile:
    commit = "b2617bb6d3ffa2e429640350f613e3291e10b141"
    return _file(
        md5,
        f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}",
        f"https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/{commit}/data/fashion/{name}",
    )


def _file(md5: str, *urls: str) -> RemoteFile:
    return RemoteFile(name=urls[0].rpartition("/")[2], urls=urls, checksum=f"md5:{md5}")


_FASHION_FILES = (
    _fashion_file("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    _fashion_file("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    _fashion_file("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
    _fashion_file("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
)
_CIFAR10_FILE = _file(
    "c58f30108f718f92721af3b95e74349a", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
)
_EUROSAT_FILE = _file(
    "c8fa014336c82ac7804f0398fcb19387",
    "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
)

SOURCES: dict[str, Source] = {
    "digits": Source(read=_read_digits),
    "fashion-mnist": Source(read=_read_fashion_mnist, files=_FASHION_FILES),
    "cifar10": Source(read=_read_cifar10, files=(_CIFAR10_FILE,)),
    "eurosat": Source(read=_read_eurosat, files=(_EUROSAT_FILE,)),
}
"""Every built-in data set by its name on the command line."""
