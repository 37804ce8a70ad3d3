"""Decoding gives the pixels that a viewer shows, counts what it converted, and decides by content."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from trainers.data.decoding import ANIMATED, TRANSPARENT, TURNED, decode_image
from trainers.data.faults import RecordsError
from trainers.data.loading import load_dataset

COLOUR = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
TURNS = [  # of the stored pixels, by EXIF orientation; TIFF 6.0, "Orientation"
    (lambda p: p),
    (lambda p: p[:, ::-1]),
    (lambda p: p[::-1, ::-1]),
    (lambda p: p[::-1]),
    (lambda p: p.transpose(1, 0, 2)),
    (lambda p: np.rot90(p, -1)),
    (lambda p: p[::-1, ::-1].transpose(1, 0, 2)),
    (lambda p: np.rot90(p)),
]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_and_counted(orientation: int, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(Image.fromarray(COLOUR), kind, exif=with_orientation(orientation), **options)
    image, conversions = decode_image(content, None)
    assert not isinstance(image, str)
    assert (image == TURNS[orientation - 1](COLOUR)).all()
    assert conversions == ((TURNED,) if orientation > 1 else ())


def test_damaged_exif_leaves_the_pixels_as_stored() -> None:
    content = encoded(Image.fromarray(COLOUR), exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\x01" * 20)
    image, conversions = decode_image(content, None)
    assert (image == COLOUR).all() if not isinstance(image, str) else False
    assert conversions == ()


def shape_in_alpha() -> np.ndarray:
    alpha = np.zeros((6, 4), dtype=np.uint8)
    alpha[2:4, 1:3] = 255
    return alpha


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L with a transparent grey", "RGB with a colour"])
def test_transparent_parts_are_white_and_counted(mode: str) -> None:
    """All of the image is black: only the transparency tells the shape from its ground."""
    alpha = shape_in_alpha()
    if mode in ("RGBA", "LA"):
        image = Image.fromarray(np.zeros((6, 4, len(mode) - 1), dtype=np.uint8).squeeze())
        image.putalpha(Image.fromarray(alpha))
        content = encoded(image)
    else:
        ground = np.where(alpha > 0, 0, 9).astype(np.uint8)  # nearly black, and transparent
        image = Image.fromarray(ground)
        if mode.startswith("RGB"):
            content = encoded(image.convert("RGB"), transparency=(9, 9, 9))
        elif mode.startswith("L"):
            content = encoded(image, transparency=9)
        else:
            image.putpalette([0] * 768)
            content = encoded(image, transparency=9)
    decoded, conversions = decode_image(content, None)
    assert not isinstance(decoded, str)
    assert decoded.ndim == (2 if mode[0] == "L" else 3)
    assert (decoded.reshape(6, 4, -1).min(axis=2) == 255 - alpha).all()
    assert conversions == (TRANSPARENT,)


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    image = Image.new("RGBA", (2, 2), (100, 0, 200, 128))
    decoded, _ = decode_image(encoded(image), None)
    assert np.abs(np.asarray(decoded, dtype=int)[0, 0] - [177, 127, 227]).max() <= 1


def test_opaque_alpha_changes_nothing() -> None:
    image = Image.fromarray(COLOUR)
    image.putalpha(255)
    decoded, conversions = decode_image(encoded(image), None)
    assert (np.asarray(decoded) == COLOUR).all()
    assert conversions == ()


def deep_png(channels: int, kind: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow cannot write in colour."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    rows = b"".join(b"\0" + struct.pack(">H", 3000) * 4 * channels for _ in range(6))
    header = struct.pack(">IIBBBBB", 4, 6, 16, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def deep_tiff() -> bytes:
    """A TIFF of 16 bits a channel in three channels."""
    pixels = struct.pack("<H", 3000) * 4 * 6 * 3
    tags = [(256, 3, 1, 4), (257, 3, 1, 6), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 14)]
    tags += [(277, 3, 1, 3), (278, 3, 1, 6), (279, 4, 1, len(pixels)), (284, 3, 1, 1)]
    start = 14 + len(pixels)
    tags[2] = (258, 3, 3, 8)
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = b"II*\0" + struct.pack("<I", start) + struct.pack("<HHH", 16, 16, 16)
    return head + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    "content", [deep_png(1, 0), deep_png(3, 2), deep_png(2, 4), deep_png(4, 6), deep_tiff()],
    ids=["grey", "RGB", "grey and alpha", "RGBA", "TIFF"],
)  # fmt: skip
def test_more_than_8_bits_a_channel_are_a_fault(content: bytes) -> None:
    with Image.open(io.BytesIO(content)) as image:
        image.load()
    assert decode_image(content, None) == ("not 8-bit", ())


def test_conversions_are_told_by_kind() -> None:
    frames = [Image.new("RGB", (4, 6), (n, 0, 0)) for n in range(3)]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    turned = encoded(frames[0].transpose(Image.Transpose.ROTATE_90), exif=with_orientation(6))
    clear = encoded(Image.new("RGBA", (4, 6)))
    kinds = [decode_image(content, None)[1] for content in (animation, turned, clear)]
    assert kinds == [(ANIMATED,), (TURNED,), (TRANSPARENT,)]


@pytest.mark.parametrize("kind", ["JPEG", "AVIF", "JPEG2000", "HEIF"])
def test_file_of_a_folder_is_an_image_by_its_content(kind: str, tmp_path: Path) -> None:
    if kind == "HEIF":
        import pillow_heif

        pillow_heif.register_heif_opener()
    for name in ("photo", "photo.bin", "photo.jfif"):
        (tmp_path / name).write_bytes(encoded(Image.fromarray(COLOUR), kind))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").write_bytes(b"")
    loaded = load_dataset(f"folder:{tmp_path}")
    assert loaded.names == ["photo", "photo.bin", "photo.jfif"]
    assert loaded.reading_counts == {"files skipped, because they are not images (no suffix, txt)": 2}


def test_damaged_file_with_the_suffix_of_an_image_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(COLOUR)))
    (tmp_path / "b.heic").write_bytes(b"no image")
    with pytest.raises(RecordsError, match="among 2 images: 1 unreadable"):
        load_dataset(f"folder:{tmp_path}")


def test_thumbnail_of_a_raw_photograph_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(COLOUR)))
    (tmp_path / "b.NEF").write_bytes(encoded(Image.fromarray(COLOUR), "TIFF"))
    loaded = load_dataset(f"folder:{tmp_path}")
    assert len(loaded.train) == 1
    assert loaded.reading_counts == {"files skipped, because they are not images (nef)": 1}


def test_text_beside_the_pixels_is_not_read() -> None:
    """Metadata may name people: nothing but the orientation comes out of a file."""
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Comment", "Orientation=6")
    image, conversions = decode_image(encoded(Image.fromarray(COLOUR), pnginfo=notes), None)
    assert (np.asarray(image) == COLOUR).all()
    assert conversions == ()
