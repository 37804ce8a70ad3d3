"""The built-in public data sets.

Addresses and checksums are the publishers'. A file is read only after its checksum has matched the published
one, so its contents are known. Nothing is unpacked to disk, and the CIFAR-10 pickles may build only arrays.
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from trainers.data.decoding import (
    MAX_IMAGE_PIXELS,
    content_ids,
    decode_image,
    in_threads,
    prepare_decoders,
    refuse_faults,
    resize_images,
    stacked,
)
from trainers.data.download import RemoteFile, find_file, find_or_download
from trainers.data.pairs import LoadedData
from trainers.data.records import Records
from trainers.data.request import Request

_DAMAGED_FILE_ERRORS = (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, zipfile.BadZipFile)


def _records(images: NDArray[np.uint8], labels: NDArray[Any], size: int | None) -> Records:
    """Return records, resized if `size` is set; their ids come from image and label as published."""
    int_labels = labels.astype(np.int64)
    ids = content_ids((image.tobytes() for image in images), int_labels)
    return Records(images=images if size is None else resize_images(images, size), labels=int_labels, ids=ids)


def load_digits(request: Request) -> LoadedData:
    """Return scikit-learn's 1,797 digits."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # published as 0 to 16
    return LoadedData(train=_records(images[:, None], digits.target, request.image_size))


def load_fashion_mnist(request: Request) -> LoadedData:
    """Return Fashion-MNIST, from the publisher's four files or from all arrays in one `fashion_mnist.npz`.

    Raises:
      DataError: the data are not on this machine and cannot be downloaded, or are damaged.
    """
    packed = find_file("fashion_mnist.npz", "fashion-mnist")
    if packed is None:
        arrays = [_read_idx(find_or_download(file, "fashion-mnist")) for file in FILES["fashion-mnist"]]
    else:
        arrays = _read_packed(packed)
    train, test = (
        _records(images[:, None], labels, request.image_size) for images, labels in (arrays[:2], arrays[2:])
    )
    return LoadedData(train=train, test=test)


def _read_packed(path: Path) -> list[NDArray[Any]]:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = [archive[name] for name in names]
    except _DAMAGED_FILE_ERRORS as error:
        raise DataError(f"{path} must be a readable .npz with the arrays {', '.join(names)}") from error
    for images, labels in (arrays[:2], arrays[2:]):
        if images.dtype != np.uint8 or images.shape != (len(labels), 28, 28) or labels.dtype.kind not in "iu":
            raise DataError(
                "Fashion-MNIST must be uint8 [N, 28, 28] images with [N] integer labels; "
                f"got {images.dtype} {images.shape} with {labels.dtype} {labels.shape}"
            )
    return arrays


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file: 0, 0, type 8 (uint8), number of axes, each axis as big-endian uint32, values."""
    content = gzip.decompress(path.read_bytes())
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


class _ArraysOnly(pickle.Unpickler):
    """Loads pickled NumPy arrays; any other class or function is rejected, so no code can run."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the three objects that an array is built from."""
        builders = {
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in builders:
            raise pickle.UnpicklingError("the file must hold only arrays; it needs another class or function")
        return builders[module, name]


def load_cifar10(request: Request) -> LoadedData:
    """Return CIFAR-10.

    Raises:
      DataError: the data are not on this machine and cannot be downloaded, or are damaged.
    """
    with tarfile.open(find_or_download(FILES["cifar10"][0], "cifar10"), "r:gz") as archive:
        contents = {Path(m.name).name: cast(Any, archive.extractfile(m)).read() for m in archive if m.isreg()}
    batches = []
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        # latin1 maps the byte strings of Python 2, which wrote these files, to text one to one.
        batch = _ArraysOnly(io.BytesIO(contents[name]), encoding="latin1").load()
        batches.append((batch["data"].reshape(-1, 3, 32, 32).copy(), np.array(batch["labels"])))
    images, labels = (np.concatenate(column) for column in zip(*batches[:5], strict=True))
    return LoadedData(
        train=_records(images, labels, request.image_size), test=_records(*batches[5], request.image_size)
    )


def load_eurosat(request: Request) -> LoadedData:
    """Return EuroSAT, decoded to 32 pixels square unless another size is requested.

    Labels are the classes in the order of their names.

    Raises:
      DataError: the data are not on this machine and cannot be downloaded, or are damaged.
    """
    (file,), size = FILES["eurosat"], request.image_size or 32
    with zipfile.ZipFile(find_or_download(file, "eurosat")) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        encoded = [archive.read(name) for name in names]
    _, labels = np.unique([PurePosixPath(name).parent.name for name in names], return_inverse=True)
    labels = labels.astype(np.int64)
    prepare_decoders()
    decoded: list[Any] = in_threads(lambda content: decode_image(content, size)[0], encoded)
    refuse_faults([image if isinstance(image, str) else "" for image in decoded], MAX_IMAGE_PIXELS)
    ids = content_ids(encoded, labels)
    return LoadedData(train=Records(images=stacked(decoded, 3), labels=labels, ids=ids))


def _fashion_file(name: str, md5: str) -> RemoteFile:
    commit = "b2617bb6d3ffa2e429640350f613e3291e10b141"
    return _file(
        md5,
        f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}",
        f"https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/{commit}/data/fashion/{name}",
    )


def _file(md5: str, *urls: str) -> RemoteFile:
    return RemoteFile(name=urls[0].rpartition("/")[2], urls=urls, checksum=f"md5:{md5}")


FILES: dict[str, tuple[RemoteFile, ...]] = {
    "fashion-mnist": (
        _fashion_file("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        _fashion_file("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        _fashion_file("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        _fashion_file("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "cifar10": (
        _file("c58f30108f718f92721af3b95e74349a", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
    ),
    "eurosat": (
        _file(
            "c8fa014336c82ac7804f0398fcb19387",
            "https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
        ),
    ),
}
"""The published files of each data set, in the order in which they are read."""
