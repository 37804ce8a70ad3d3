"""Images that stay in their files: a step decodes only the images that it draws.

Poisson sampling draws each record independently, so a record must be readable without reading the records
before it. A shuffled stream of shards, the usual way to read them, does not follow the sampling law that the
accountant assumes.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.errors import DataError
from dpgcl_core.object_store import DataFile, RemoteFile, address_of, read_ranges
from trainers.data.channels import with_channels
from trainers.data.decoding import decode_image, in_threads, prepare_decoders, resize_images
from trainers.data.faults import RecordsError
from trainers.data.image_digests import DIGESTS, image_digests

if TYPE_CHECKING:
    import pyarrow as pa

PLACE = np.dtype([("file", np.uint32), ("offset", np.uint64), ("num_bytes", np.uint64)])
"""Where an image is stored: 20 bytes."""


_IMAGES_AT_ONCE = 256
_CHANGED = "a file must not change after it was indexed; one has changed. Load the data again"


@dataclass(frozen=True, kw_only=True)
class StoredImages:
    """Encoded images in files, decoded on access by several threads.

    Attributes:
      files: the path of every file, or its address in a bucket, as bytes.
      stamps: int64 `[num_files, 2]`, the `stamp_of` each file when indexed.
      places: `[num_images]` of type `PLACE`.
      digests: the columns of the `image_digests`, which stay in the index while all images are used; None if
        they are not known.
      channels, height, width: shape of every image as returned.
      image_size: images are resized to this many pixels square, or None.
      max_pixels: largest allowed image as stored.
    """

    files: Sequence[bytes] = field(repr=False)
    stamps: NDArray[np.int64]
    places: NDArray[np.void]
    digests: pa.Table | None
    channels: int
    height: int
    width: int
    image_size: int | None
    max_pixels: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of images, channels, height, width)."""
        return len(self.places), self.channels, self.height, self.width

    @property
    def is_remote(self) -> bool:
        """Whether the files are in a bucket."""
        return len(self.files) > 0 and address_of(os.fsdecode(self.files[0])) is not None

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images at `rows`, uint8 `[n, channels, height, width]`.

        Raises:
          RecordsError: some images can no longer be read, or a file has changed since it was indexed.
        """
        places = self.places[rows].tolist()
        images = np.empty((len(places), *self.shape[1:]), dtype=np.uint8)
        remote = self._remote_contents(places)

        def read(row: int) -> bool:
            content = remote[row] if remote else self._content(places[row])
            pixels = decode_image(content, self.image_size, self.max_pixels)[0]
            if isinstance(pixels, str) or pixels.shape[:2] != images.shape[2:]:
                return False
            image = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            images[row] = with_channels(image[None], self.channels)[0]
            return True

        prepare_decoders()
        is_read = in_threads(read, range(len(places)))
        bad = [place for place, is_sound in zip(places, is_read, strict=True) if not is_sound]
        if bad:
            raise RecordsError(
                # The message holds no count, which would disclose how many records a step has drawn.
                "every image must stay readable; some sampled images no longer are. Restore the files",
                {"files and offsets": [f"{os.fsdecode(self.files[n])}, {offset}" for n, offset, _ in bad]},
            )
        return images

    def select(self, rows: NDArray[np.int64]) -> StoredImages:
        """Return the same store with only the images at `rows`, without reading any."""
        digests = None if self.digests is None else self.digests.take(rows)
        return dataclasses.replace(self, places=self.places[rows], digests=digests)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"digests": None}  # a worker compares no images

    def in_channels(self, channels: int) -> StoredImages:
        """Return the same images as grey (one channel) or colour (three), without reading any."""
        digests = self.digests if channels == 3 else None
        return dataclasses.replace(self, channels=channels, digests=digests)

    def _remote_contents(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Return the encoded images if they are in a bucket; empty if they are in local files."""
        if not self.is_remote:
            return []
        files = [RemoteFile(os.fsdecode(self.files[n]), *self.stamps[n].tolist()) for n, _, _ in places]
        failure = ""
        contents: list[bytes | None] = []
        try:
            contents = read_ranges([(file, *place[1:]) for file, place in zip(files, places, strict=True)])
        except DataError as error:
            failure = str(error)
        if failure:  # the address would disclose information about the records that were drawn
            raise RecordsError("a bucket must answer while its images are used", {"failure": failure})
        sound = [content for content in contents if content is not None]
        if len(sound) < len(places):
            changed = {f.address for f, content in zip(files, contents, strict=True) if content is None}
            raise RecordsError(_CHANGED, {"files": sorted(changed)})
        return sound

    def _content(self, place: tuple[int, int, int]) -> bytes:
        number, offset, num_bytes = place
        return _read_unchanged(self.files[number], self.stamps[number].tolist(), num_bytes, [offset])[0]


@dataclass(frozen=True, kw_only=True)
class ArrayImages:
    """Pixels of an array that stays in an uncompressed `.npz`, read on access.

    Attributes:
      file: the path of the file.
      stamp: its size in bytes and modification time in nanoseconds when it was opened.
      offset: where the array begins in the file.
      stored_shape: the array's shape, uint8 `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]`.
      rows: int64 `[num_images]`, the rows of the array.
      channels: channels of the images as returned.
      image_size: images are resized to this many pixels square, or None.
    """

    file: bytes
    stamp: tuple[int, int]
    offset: int
    stored_shape: tuple[int, ...]
    rows: NDArray[np.int64]
    channels: int
    image_size: int | None

    @property
    def files(self) -> tuple[bytes]:
        """The file."""
        return (self.file,)

    @property
    def stamps(self) -> NDArray[np.int64]:
        """Its stamp, `[1, 2]`."""
        return np.array([self.stamp], dtype=np.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of images, channels, height, width)."""
        _, _, height, width = channels_first(np.empty((0, *self.stored_shape[1:]), np.uint8), "images").shape
        size = self.image_size
        return len(self.rows), self.channels, size or height, size or width

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images at `rows`, uint8 `[n, channels, height, width]`.

        Raises:
          RecordsError: the file has changed since it was opened.
        """
        num_bytes = math.prod(self.stored_shape[1:])
        places = self.offset + num_bytes * self.rows[rows]
        contents = _read_unchanged(self.file, self.stamp, num_bytes, places.tolist())
        pixels = np.frombuffer(b"".join(contents), dtype=np.uint8)
        images = channels_first(pixels.reshape(len(rows), *self.stored_shape[1:]), "images")
        if self.image_size is not None and len(images):
            images = resize_images(images, self.image_size)
        return with_channels(images, self.channels).reshape(len(images), *self.shape[1:])

    def select(self, rows: NDArray[np.int64]) -> ArrayImages:
        """Return the same store with only the images at `rows`, without reading any."""
        return dataclasses.replace(self, rows=self.rows[rows])

    def in_channels(self, channels: int) -> ArrayImages:
        """Return the same images as grey (one channel) or colour (three), without reading any."""
        return dataclasses.replace(self, channels=channels)


Images = NDArray[np.uint8] | StoredImages | ArrayImages
"""Images in memory, or images that are read on access."""


def _read_unchanged(file: bytes, stamp: Sequence[int], num_bytes: int, offsets: Sequence[int]) -> list[bytes]:
    """Return the bytes at each offset of a file; raise RecordsError unless the file has this stamp."""
    # Opening the file each time costs microseconds, and no handle outlives this call or a fork.
    with suppress(OSError), open(file, "rb", buffering=0) as opened:
        state = os.fstat(opened.fileno())
        if (state.st_size, state.st_mtime_ns) == tuple(stamp):
            contents = [os.pread(opened.fileno(), num_bytes, offset) for offset in offsets]
            if all(len(content) == num_bytes for content in contents):
                return contents
    # The file's name would disclose information about the records that were drawn.
    raise RecordsError(_CHANGED, {"files": [os.fsdecode(file)]})


def stamp_of(file: DataFile) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in nanoseconds; (-1, -1) if there is no file.

    Of an object in a bucket, the second number is a digest of its version.
    """
    if isinstance(file, RemoteFile):
        return file.stamp
    try:
        state = file.stat()
    except (OSError, ValueError):
        return -1, -1
    return state.st_size, state.st_mtime_ns


def channels_first(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Return the images of an `.npz` as `[N, C, H, W]`.

    Raises:
      DataError: they have another type or shape.
    """
    if images.dtype != np.uint8:
        raise DataError(f"{name} must be uint8, 0 to 255; got {images.dtype}")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        raise DataError(f"{name} must be [N, H, W], [N, H, W, C] or [N, C, H, W]; got {images.ndim} axes")
    is_channels_first, is_channels_last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if is_channels_first == is_channels_last:
        raise DataError(
            f"{name} must have exactly one channel axis, of size 1 or 3, as second or last axis; got "
            f"the shape {images.shape[1:]} per image"
        )
    return images if is_channels_first else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def in_channels(images: Images, channels: int) -> Images:
    """Return images as grey (one channel) or colour (three), see `with_channels`; stored ones stay stored."""
    return with_channels(images, channels) if isinstance(images, np.ndarray) else images.in_channels(channels)


def digests_of(images: Images) -> NDArray[np.void]:
    """Return the `image_digests` of all images; they are read in parts unless their index has digests."""
    if isinstance(images, StoredImages) and images.digests is not None:
        digests = np.empty(len(images.digests), DIGESTS)
        for name in images.digests.column_names:
            digests[name] = images.digests[name].to_numpy()
        return digests
    return np.concatenate(list(map(image_digests, in_parts(images))))


def select(images: Images, rows: NDArray[np.int64]) -> Images:
    """Return the images at `rows`; stored ones stay stored."""
    return images[rows] if isinstance(images, np.ndarray) else images.select(rows)


def in_parts(images: Images) -> Iterator[NDArray[np.uint8]]:
    """Yield all images in order, some hundred at a time."""
    for start in range(0, images.shape[0], _IMAGES_AT_ONCE):
        yield images[np.arange(start, min(start + _IMAGES_AT_ONCE, images.shape[0]))]


@contextmanager
def unchanged(files: Sequence[DataFile]) -> Iterator[None]:
    """Refuse files that change while they are read, because rows and images could then be of two versions.

    Raises:
      DataError: a file has changed.
    """
    stamps = list(map(stamp_of, files))
    yield
    if list(map(stamp_of, files)) != stamps:
        raise DataError("data must not change while they are read; a file has changed. Load the data again")
