"""Images that stay in their files: a step decodes only the images that it draws.

Poisson sampling draws each record independently, so a record must be readable without reading the records
before it. A shuffled stream of shards, the usual way to read them, does not follow the sampling law that the
accountant assumes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainers.data.channels import with_channels
from trainers.data.decoding import decode_each, in_threads, stacked
from trainers.data.faults import RecordsError

PLACE = np.dtype([("file", np.uint32), ("offset", np.uint64), ("num_bytes", np.uint32)])
"""Where an image is stored: 16 bytes."""


class ReadOnAccess(Protocol):
    """Images that are read on access; an array has the same interface with all images in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of images, channels, height, width)."""

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images at `rows`, `[n, channels, height, width]`."""

    def select(self, rows: NDArray[np.int64]) -> ReadOnAccess:
        """Return the same store with only the images at `rows`, without reading any."""

    def in_channels(self, channels: int) -> ReadOnAccess:
        """Return the same images as grey (one channel) or colour (three), without reading any."""


Images = NDArray[np.uint8] | ReadOnAccess
"""Images in memory, or images that are read on access."""


@dataclass(frozen=True, kw_only=True)
class StoredImages:
    """Encoded images in files, decoded on access by several threads; see `ReadOnAccess`.

    Attributes:
      files: the path of every file, as bytes.
      stamps: int64 `[num_files, 2]`: size in bytes and modification time in nanoseconds when indexed.
      places: `[num_images]` of type `PLACE`.
      channels, height, width: shape of every image as returned.
      image_size: images are resized to this many pixels square, or None.
      max_pixels: largest allowed image as stored.
    """

    files: Sequence[bytes]
    stamps: NDArray[np.int64]
    places: NDArray[np.void]
    channels: int
    height: int
    width: int
    image_size: int | None
    max_pixels: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of images, channels, height, width)."""
        return len(self.places), self.channels, self.height, self.width

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images at `rows`, uint8 `[n, channels, height, width]`.

        Raises:
          RecordsError: some images can no longer be read, or a file has changed since it was indexed.
        """
        places = self.places[rows]
        if len(places) == 0:
            return np.empty((0, *self.shape[1:]), dtype=np.uint8)
        decoded, _ = decode_each(in_threads(self._read, places.tolist()), self.image_size, self.max_pixels)
        size = self.height, self.width
        bad = [i for i, image in enumerate(decoded) if isinstance(image, str) or image.shape[:2] != size]
        if bad:
            raise RecordsError(
                # The message holds no count, which would disclose how many records a step has drawn.
                "every image must stay readable; some sampled images no longer are. Restore the files",
                {"rows": bad},
            )
        are_grey = all(image.ndim == 2 for image in decoded)
        return with_channels(stacked(decoded, 1 if are_grey else 3), self.channels)

    def select(self, rows: NDArray[np.int64]) -> StoredImages:
        """Return the same store with only the images at `rows`, without reading any."""
        return dataclasses.replace(self, places=self.places[rows])

    def in_channels(self, channels: int) -> StoredImages:
        """Return the same images as grey (one channel) or colour (three), without reading any."""
        return dataclasses.replace(self, channels=channels)

    def _read(self, place: tuple[int, int, int]) -> bytes:
        # Opening the file each time costs microseconds, and no handle outlives this call or a fork.
        number, offset, num_bytes = place
        content = None
        try:
            descriptor = os.open(self.files[number], os.O_RDONLY)
            try:
                state = os.fstat(descriptor)
                if (state.st_size, state.st_mtime_ns) == tuple(self.stamps[number].tolist()):
                    content = os.pread(descriptor, num_bytes, offset)
            finally:
                os.close(descriptor)
        except OSError:
            pass
        if content is None:
            # The file's name would disclose information about the records that were drawn.
            raise RecordsError(
                "a file must not change after it was indexed; one has changed. Load the data again",
                {"files": [number]},
            )
        return content


def in_channels(images: Images, channels: int) -> Images:
    """Return images as grey (one channel) or colour (three), see `with_channels`; stored ones stay stored."""
    return with_channels(images, channels) if isinstance(images, np.ndarray) else images.in_channels(channels)


def select(images: Images, rows: NDArray[np.int64]) -> Images:
    """Return the images at `rows`; stored ones stay stored."""
    return images[rows] if isinstance(images, np.ndarray) else images.select(rows)
