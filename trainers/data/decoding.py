"""Decodes images to pixels for all sources of images; the decoder prints nothing about single images."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.sampling.record_ids import Ids, digest_of_content, ids_from_digests
from trainers.data.faults import RecordsError

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGE_PIXELS = 50_000_000
"""Default maximum for one image as stored. Decoded, each pixel takes three bytes, or 150 MB in all."""
PILLOW_MAX_PIXELS = 178_000_000
"""The highest maximum that can be set: Pillow opens no larger image."""

T = TypeVar("T")
_PILLOW_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL(\.|$)"), 0)


def prepare_decoders() -> None:
    """Suppress Pillow's warnings about single images from here on, since the images may be private.

    Pillow warns about an image's number of pixels and about how its colours are stored. The filter is set
    permanently: `warnings.catch_warnings` changes the filters of all threads, and would restore them while
    other threads decode.
    """
    if _PILLOW_WARNINGS not in warnings.filters[:1]:
        warnings.filterwarnings("ignore", module=_PILLOW_WARNINGS[3].pattern)
    logging.getLogger("PIL").setLevel(logging.CRITICAL + 1)


@cache
def supported_formats() -> list[str]:
    """The formats of `_FORMATS` that Pillow decodes on this machine."""
    from PIL import Image

    Image.init()
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    return [name for name in _FORMATS if name in Image.OPEN]


TOO_LARGE = "too large"
IMAGE_SUFFIXES = frozenset(
    [
        *("avif", "bmp", "gif", "heic", "heif", "j2k", "jfif", "jp2", "jpe", "jpeg", "jpg", "jxl", "pgm"),
        *("png", "ppm", "tif", "tiff", "webp"),
    ]
)
"""Suffixes of files that count as images even if their first bytes are damaged."""

_RAW_SUFFIXES = frozenset(["arw", "cr2", "dng", "nef", "nrw", "orf", "pef", "rw2", "sr2", "srw"])
_TILE_WIDTH, _TILE_HEIGHT, _BITS_PER_SAMPLE, _ORIENTATION = 322, 323, 258, 274

# Only formats that Pillow decodes itself: it passes some files (EPS) to an external program. HEIF needs the
# plug-in pillow-heif.
_FORMATS = ("AVIF", "BMP", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

ANIMATED = "animations and multi-page files, of which the first frame or page is used"
TURNED = "images turned or mirrored by their EXIF orientation"
TRANSPARENT = "images with transparent parts, which become white"
GREY = "grey images converted to colour like the rest"
CONVERSIONS = (ANIMATED, TRANSPARENT, TURNED)


def refuse_faults(image_faults: Sequence[str], max_pixels: int, files: Sequence[bytes] | None = None) -> None:
    """Raise RecordsError if images have faults; the details hold their files, else their positions."""
    faults: dict[str, list[Any]] = {kind: [] for kind in ("missing", "unreadable", "not 8-bit", TOO_LARGE)}
    for i, kind in enumerate(image_faults):
        if kind:
            faults[kind].append(i if files is None else os.fsdecode(files[i]))
    counts = {kind: len(positions) for kind, positions in faults.items() if positions}
    if counts:
        raise RecordsError(
            f"every image must be present and readable, with 8-bit channels and at most {max_pixels} pixels "
            f"(--max-image-pixels); faults among {len(image_faults)} images: "
            + ", ".join(f"{count} {kind}" for kind, count in counts.items())
            + ". Repair or remove these images, save them with 8-bit channels, or raise --max-image-pixels",
            faults,
        )


def stacked(decoded: Sequence[NDArray[np.uint8]], channels: int) -> NDArray[np.uint8]:
    """Return images of one size from `decode_image` as one array `[n, channels, height, width]`."""
    images = np.empty((len(decoded), channels, *decoded[0].shape[:2]), dtype=np.uint8)
    for row, image in zip(images, decoded, strict=True):
        row[:] = image.transpose(2, 0, 1) if image.ndim == 3 else image
    return images


def decode_image(
    source: bytes | Path | None, image_size: int | None, max_pixels: int = MAX_IMAGE_PIXELS
) -> tuple[NDArray[np.uint8] | str, tuple[str, ...]]:
    """Return one image as uint8 `[height, width]` or `[height, width, 3]`, and the kinds of its conversions.

    The pixels are those that a viewer shows on a white page: the EXIF orientation is applied, and transparent
    parts are white. More than 8 bits a channel are a fault, since Pillow would drop the low ones. Only the
    first frame or page is decoded. For an image with a fault, the first value is the fault's name.

    A file of some kilobytes may declare gigabytes of pixels, so only its header is read until its size is
    known to be allowed.

    Args:
      source: encoded bytes or a file; None for a missing image.
      image_size: resize the image to this many pixels square; None keeps its size.
      max_pixels: largest allowed image as stored; a larger one is rejected by its header, before decoding.
    """
    if source is None or (isinstance(source, Path) and not os.path.isfile(source)):
        return "missing", ()
    from PIL import Image, ImageOps  # imported here: arrays need no decoder

    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=supported_formats()) as image:
            if image.width * image.height > max_pixels or _pixels_of_tile(image) > max_pixels:
                return TOO_LARGE, ()
            if image.mode[0] in "IF" or _is_deep(image):
                return "not 8-bit", ()
            has_more_frames = _unless_damaged(lambda: getattr(image, "is_animated", False), False)
            orientation = _unless_damaged(lambda: int(image.getexif().get(_ORIENTATION, 1)), 1)
            orientation = orientation if orientation in range(1, 9) else 1
            plain, is_transparent = _on_white(image)
            if orientation != 1 and image.format != "TIFF":  # Pillow itself turns a TIFF
                plain.getexif()[_ORIENTATION] = orientation
                plain = ImageOps.exif_transpose(plain)
    except MemoryError:
        raise
    except Image.DecompressionBombError:
        return TOO_LARGE, ()
    except Exception:  # decoders raise nearly anything on damaged bytes
        return "unreadable", ()
    kinds = {ANIMATED: has_more_frames, TRANSPARENT: is_transparent, TURNED: orientation != 1}
    pixels = np.asarray(plain if image_size is None else _to_square(plain, image_size))
    return pixels, tuple(kind for kind, is_of_kind in kinds.items() if is_of_kind)


def header_size(source: bytes | Path) -> tuple[int, int]:
    """Return the height and width that an image's header states, (0, 0) if it cannot be read."""
    from PIL import Image

    prepare_decoders()
    try:
        with Image.open(
            io.BytesIO(source) if isinstance(source, bytes) else source, formats=supported_formats()
        ) as image:
            return image.height, image.width
    except Exception:  # decoders raise nearly anything on damaged bytes
        return 0, 0


def _on_white(image: Image.Image) -> tuple[Image.Image, bool]:
    """Return the image as grey or RGB, without its metadata, and whether any pixel was transparent."""
    from PIL import Image

    mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    plain, is_transparent = image, False
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        is_transparent = layer.getchannel("A").getextrema()[0] != 255
        if is_transparent:
            plain = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    plain = plain.convert(mode)
    plain.info = {}
    return plain, is_transparent


def _is_deep(image: Image.Image) -> bool:
    """Whether a file has more than 8 bits a channel, of which Pillow would drop some.

    False for JPEG 2000, AVIF and PPM, whose decoders scale to 8 bits.
    """
    tags = getattr(image, "tag_v2", {})
    return ";16" in str(getattr(image, "tile", "")) or max(tags.get(_BITS_PER_SAMPLE, (8,))) > 8


def is_image(file: str) -> bool:
    """Whether a file begins as an image of a supported format or, if it is damaged, has an image's suffix.

    A camera's raw photographs are not images: what a decoder of TIFF opens in them is a thumbnail.
    """
    from PIL import Image

    suffix = os.path.splitext(file)[1][1:].lower()
    if suffix in IMAGE_SUFFIXES or suffix in _RAW_SUFFIXES:
        return suffix in IMAGE_SUFFIXES
    try:
        with Image.open(file, formats=supported_formats()):
            return True
    except Exception as error:  # decoders raise nearly anything on damaged bytes
        return isinstance(error, Image.DecompressionBombError)


def _unless_damaged(read: Callable[[], T], default: T) -> T:
    """Return the metadata that `read` returns, or `default`: an image with damaged metadata is usable."""
    try:
        return read()
    except Exception:  # decoders raise nearly anything on damaged bytes
        return default


def _pixels_of_tile(image: Image.Image) -> int:
    """The number of pixels of one TIFF tile, which is decoded at once and may be larger than the image."""
    tags = getattr(image, "tag_v2", {})
    width, height = tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0)
    return int(width) * int(height)


def _to_square(image: Image.Image, size: int) -> Image.Image:
    from PIL import Image

    if image.size == (size, size):
        return image
    # A box filter averages exactly when it shrinks but only repeats pixels when it enlarges.
    shrinks = min(image.size) >= size
    return image.resize((size, size), Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR)


def resize_images(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return images `[num_records, channels, height, width]` resized to `size` × `size` pixels."""
    if images.shape[2:] == (size, size):
        return images
    from PIL import Image

    def resize(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        plain = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0).copy())
        resized = np.asarray(_to_square(plain, size))
        return resized[None] if resized.ndim == 2 else resized.transpose(2, 0, 1)

    return np.stack(in_threads(resize, images))


def in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return the results of `function` for all items, in order, computed by several threads."""
    all_items, num_threads = list(items), min(16, os.cpu_count() or 1)
    size = max(1, min(64, len(all_items) // (4 * num_threads)))  # single items would wait for each other
    parts = [all_items[start : start + size] for start in range(0, len(all_items), size)]
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        return [result for part in pool.map(lambda part: list(map(function, part)), parts) for result in part]


def content_ids(images: Iterable[bytes | None], labels: NDArray[Any] | None) -> Ids:
    """Return one id per record, `[num_records]`, from its image and its label, both as stored.

    Labels that are strings are hashed as strings: a class index depends on the other records' classes.

    >>> with_cat, without = np.array(["dog", "cat", "dog"]), np.array(["dog", "dog"])
    >>> a, b = content_ids([b"1", b"2", b"3"], with_cat), content_ids([b"1", b"3"], without)
    >>> bool((a[[0, 2]] == b).all())
    True
    """
    values = itertools.repeat(None) if labels is None else labels.tolist()
    pairs = zip(images, values, strict=labels is not None)
    return ids_from_digests(content_digest(image, label) for image, label in pairs)


def content_digest(image: bytes | None, label: int | str | bytes | None = None) -> bytes:
    """Return the digest that a record's id comes from, of its image and its label, both as stored."""
    content = image or b""
    # The length separates image and label: without it, two different records could have the same bytes.
    key = b"" if label is None else _label_key(label)
    return digest_of_content(len(content).to_bytes(8, "little") + content + key)


def _label_key(label: int | str | bytes) -> bytes:
    if isinstance(label, bytes):
        return label
    if isinstance(label, str):
        return label.encode("utf-8", "surrogatepass")
    return repr(label).encode()
