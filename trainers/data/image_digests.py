"""Digests by which the images of two data sets are compared: copies, and images that look alike.

Copies have the same pixels, in colour, after both data sets were resized. Similar images, such as copies that
were compressed again, resized or made brighter, have nearly the same perceptual hash: the signs of the low
frequencies of a discrete cosine transform of the grey image, as in Zauner (2010), Implementation and
Benchmarking of Perceptual Image Hash Functions, section 3.2.1. It sees neither colour nor detail, so it also
finds different images of one composition (docs/private-data.md has measured rates).
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trainers.data.channels import with_channels

DIGESTS = np.dtype([("pixels", np.uint64), ("look", np.uint64)])
"""A digest of the size and colours of an image, and its perceptual hash; 0 if the image has none."""

_LUMA = np.array([0.299, 0.587, 0.114])
_LEAST_CONTRAST = 0.25
_MAX_DISTANCE, _BAND_BITS = 4, 13  # five bands of 13 bits, the last of 12


def image_digests(images: NDArray[np.uint8]) -> NDArray[np.void]:
    """Return the digests of images `[n, channels, height, width]`, `[n]` of type `DIGESTS`.

    An image has no perceptual hash if a side is shorter than 16 pixels, or if its low frequencies have an
    amplitude of less than about one grey level: it would be similar to every flat image.
    """
    digests = np.zeros(len(images), dtype=DIGESTS)
    colour = with_channels(images, 3)
    key = str(colour.shape[1:]).encode()
    pixels = (hashlib.blake2b(image.tobytes(), digest_size=8, key=key).digest() for image in colour)
    digests["pixels"] = np.frombuffer(b"".join(pixels), dtype="<u8")
    if min(images.shape[2:]) >= 16:
        rows, columns = (_cosines(side) for side in images.shape[2:])
        waves = rows @ images.astype(np.float32) @ columns.T
        waves = (_LUMA if images.shape[1] == 3 else np.ones(1)) @ waves.reshape(*images.shape[:2], -1)
        bits = waves > np.median(waves, axis=1, keepdims=True)
        looks = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
        digests["look"] = np.where(np.linalg.norm(waves, axis=1) < _LEAST_CONTRAST, 0, looks)
    return digests


@cache
def _cosines(side: int) -> NDArray[np.float32]:
    """Return the cosines of the frequencies 1 to 8, `[8, side]`; the mean, frequency 0, is the brightness."""
    places = (2 * np.arange(side) + 1) / (2 * side)
    return np.asarray(np.cos(np.pi * np.outer(np.arange(1, 9), places)) / side, dtype=np.float32)


def find_copies(digests: NDArray[np.void], other_digests: NDArray[np.void]) -> NDArray[np.int64]:
    """Return for each image the position of a copy among `other_digests`, or -1.

    Different images have the same digest with a probability of 2^-64.
    """
    order = np.argsort(other_digests["pixels"])
    ranks = np.searchsorted(other_digests["pixels"], digests["pixels"], sorter=order)
    places = order[np.minimum(ranks, len(order) - 1)]
    return np.where(other_digests["pixels"][places] == digests["pixels"], places, -1)


def find_similar(digests: NDArray[np.void], other_digests: NDArray[np.void]) -> NDArray[np.int64]:
    """Return for each image the position of a copy or a similar image among `other_digests`, or -1.

    Hashes that differ in at most 4 bits have one of 5 bands of bits in common, so only images with a common
    band are compared.
    """
    looks, matches = digests["look"], find_copies(digests, other_digests)
    num_keys = 1 << _BAND_BITS
    for shift in range(0, 64, _BAND_BITS):
        keys, other_keys = ((x["look"] >> shift) % num_keys for x in (digests, other_digests))
        order = np.argsort(other_keys)
        starts = np.searchsorted(other_keys[order], np.arange(num_keys + 1))
        places, ends = starts[keys], starts[keys + 1]
        rows = np.flatnonzero((matches < 0) & (looks > 0) & (places < ends))
        while len(rows):
            candidates = order[places[rows]]
            found = other_digests["look"][candidates]
            is_similar = (np.bitwise_count(looks[rows] ^ found) <= _MAX_DISTANCE) & (found > 0)
            matches[rows[is_similar]] = candidates[is_similar]
            places[rows] += 1
            rows = rows[~is_similar & (places[rows] < ends[rows])]
    return matches
