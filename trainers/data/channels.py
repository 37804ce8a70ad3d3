"""Converts grey images to colour and colour images to grey."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The luma weights of ITU-R BT.601 in 65,536ths, as Pillow applies them to colour files read as grey.
_LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)
_HALF, _BITS = 1 << 15, 16


def with_channels(images: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Return images as grey (one channel) or colour (three).

    A grey image becomes colour by repeating its channel. A colour image becomes grey by taking its luma,
    0.299 R + 0.587 G + 0.114 B, rounded.

    Args:
      images: uint8 `[n, 1 or 3, height, width]`.
      channels: 1 or 3.

    >>> red = np.array([255, 0, 0], dtype=np.uint8).reshape(1, 3, 1, 1)
    >>> with_channels(red, 1).tolist(), with_channels(with_channels(red, 1), 3).ravel().tolist()
    ([[[[76]]]], [76, 76, 76])
    """
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=1)
    grey = np.zeros(images[:, :1].shape, dtype=np.uint32)
    for channel, weight in enumerate(_LUMA):
        grey += images[:, channel : channel + 1] * weight
    return ((grey + _HALF) >> _BITS).astype(np.uint8)
