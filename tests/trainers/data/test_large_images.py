"""Small files that would be large in memory: refused by their headers, before anything is decoded."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dpgcl_core.errors import ConfigError, DataError
from trainers.data import decoding
from trainers.data.decoding import ANIMATED, MAX_IMAGE_PIXELS, TOO_LARGE, decode_image
from trainers.data.faults import RecordsError
from trainers.data.loading import load_dataset
from trainers.data.pair_options import PairOptions
from trainers.data.pairs import MAX_CAPTION_CHARACTERS, caption_fault

SIDE = 12_000  # 144 million pixels, 0.4 GB as RGB; from 179 million on Pillow refuses by itself


def png(width: int, height: int) -> bytes:
    """A file of some dozen bytes that declares an image; its pixels are cut off."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9)))


def encoded(kind: str, side: int = 8, **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(out, kind, **options)
    return out.getvalue()


def declared(kind: str) -> bytes:
    """A sound file of 8 × 8 pixels whose header says `SIDE` × `SIDE`."""
    content = bytearray(encoded(kind))
    if kind == "PNG":
        return png(SIDE, SIDE)
    if kind == "BMP":
        content[18:26] = struct.pack("<ii", SIDE, SIDE)
    elif kind == "GIF":
        content[6:10] = struct.pack("<HH", SIDE, SIDE)
    elif kind == "PPM":
        content = bytearray(b"P6 %d %d 255\n" % (SIDE, SIDE)) + bytes(9)
    elif kind == "JPEG":
        place = content.index(b"\xff\xc0") + 5
        content[place : place + 4] = struct.pack(">HH", SIDE, SIDE)
    elif kind == "TIFF":
        for tag in (256, 257):
            place = content.index(struct.pack("<H", tag) + b"\x04\x00\x01\x00\x00\x00")
            content[place + 8 : place + 12] = struct.pack("<I", SIDE)
    return bytes(content)


@pytest.fixture(autouse=True)
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pixel of a large image may be decoded."""
    load = Image.Image.convert

    def convert(image: Image.Image, *given: object, **more: object) -> Image.Image:
        assert image.width * image.height <= MAX_IMAGE_PIXELS, "decoded"
        return load(image, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "convert", convert)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "PPM", "JPEG", "TIFF"])
@pytest.mark.parametrize("side", [None, 8])
def test_file_that_declares_too_many_pixels_is_refused_undecoded(kind: str, side: int | None) -> None:
    content = declared(kind)
    assert len(content) < 5000
    assert decode_image(content, side)[0] == TOO_LARGE


def test_webp_over_the_limit_is_refused() -> None:
    assert decode_image(encoded("WEBP", 20), None, 399)[0] == TOO_LARGE
    assert not isinstance(decode_image(encoded("WEBP", 20), None, 400)[0], str)


def test_tile_larger_than_its_image_is_refused() -> None:
    tags = {256: 8, 257: 8, 258: 8, 259: 5, 262: 1, 277: 1, 322: 65536, 323: 65536, 324: 8, 325: 9}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    content = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    assert decode_image(content, None)[0] == TOO_LARGE


def test_frames_after_the_first_are_not_decoded() -> None:
    frames = [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(20)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    image, conversions = decode_image(out.getvalue(), None)
    assert conversions == (ANIMATED,)
    assert not isinstance(image, str)
    assert image.shape[:2] == (8, 8)


def _folder(path: Path, content: bytes) -> str:
    (path / "a.png").write_bytes(content)
    (path / "b.png").write_bytes(encoded("PNG"))
    return f"folder:{path}"


def _parquet(path: Path, content: bytes) -> str:
    pq.write_table(pa.table({"image": [content, encoded("PNG")]}), path / "x.parquet")
    return f"parquet:{path / 'x.parquet'}"


def _pairs_parquet(path: Path, content: bytes) -> str:
    table = {"image": [content, encoded("PNG")], "title": ["a", "b"]}
    pq.write_table(pa.table(table), path / "x.parquet")
    return f"parquet:{path / 'x.parquet'}"


def _csv(path: Path, content: bytes) -> str:
    (path / "a.png").write_bytes(content)
    (path / "b.png").write_bytes(encoded("PNG"))
    (path / "x.csv").write_text("filepath\ttitle\na.png\ta\nb.png\tb\n")
    return f"csv:{path / 'x.csv'}"


def _webdataset(path: Path, content: bytes) -> str:
    with tarfile.open(path / "x.tar", "w") as archive:
        for name, data in (("a", content), ("b", encoded("PNG"))):
            for suffix, held in (("png", data), ("txt", name.encode())):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(held)
                archive.addfile(member, io.BytesIO(held))
    return f"webdataset:{path / 'x.tar'}"


LOADERS = [_folder, _parquet, _pairs_parquet, _csv, _webdataset]


@pytest.mark.parametrize("write", LOADERS)
def test_every_loader_refuses_a_large_image_by_the_limits_name(
    write: Callable[[Path, bytes], str], tmp_path: Path
) -> None:
    name = write(tmp_path, png(SIDE, SIDE))
    with pytest.raises(RecordsError, match=f"at most {MAX_IMAGE_PIXELS} pixels") as caught:
        load_dataset(name, image_size=8)
    assert str(SIDE) not in str(caught.value)
    assert "a.png" not in str(caught.value)


@pytest.mark.parametrize("write", LOADERS)
def test_the_limit_is_an_option(write: Callable[[Path, bytes], str], tmp_path: Path) -> None:
    name = write(tmp_path, encoded("PNG", 40))
    with pytest.raises(RecordsError, match="at most 1599 pixels"):
        load_dataset(name, image_size=8, max_image_pixels=1599)
    assert len(load_dataset(name, image_size=8, max_image_pixels=1600).train) == 2


def test_a_large_image_is_dropped_as_a_corrupt_one(tmp_path: Path) -> None:
    loaded = load_dataset(_csv(tmp_path, png(SIDE, SIDE)), image_size=8, pairs=PairOptions(skip_corrupt=True))
    assert len(loaded.train) == 1


@pytest.mark.parametrize("limit", [0, -1, decoding.PILLOW_MAX_PIXELS + 1])
def test_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="--max-image-pixels"):
        load_dataset("digits", max_image_pixels=limit)


def _npz(path: Path, shape: tuple[int, ...], content: bytes = b"") -> str:
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path / "x.npz", "w") as archive:
        archive.writestr("images.npy", header.getvalue() + content)
    return f"npz:{path / 'x.npz'}"


def test_npz_that_declares_more_than_it_holds_sets_no_memory_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("memory was set aside"))
    with pytest.raises(DataError, match="readable"):
        load_dataset(_npz(tmp_path, (10**9, 100, 100)))


def test_npz_with_large_images_is_refused_by_its_header(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"at most 63 pixels.*--max-image-pixels"):
        load_dataset(_npz(tmp_path, (2, 8, 8), bytes(128)), max_image_pixels=63)
    assert len(load_dataset(_npz(tmp_path, (2, 8, 8), bytes(128)), max_image_pixels=64).train) == 2


def test_caption_that_no_tokenizer_should_read_is_a_fault(tmp_path: Path) -> None:
    assert caption_fault(["x" * MAX_CAPTION_CHARACTERS]) == ""
    assert "characters" in caption_fault(["x" * (MAX_CAPTION_CHARACTERS + 1)])
    name = _webdataset(tmp_path, encoded("PNG"))
    with tarfile.open(tmp_path / "x.tar", "a") as archive:
        held = json.dumps({"captions": ["x" * 2**24]}).encode()
        member = tarfile.TarInfo("a.json")
        member.size = len(held)
        archive.addfile(member, io.BytesIO(held))
    with pytest.raises(RecordsError, match="text too large"):
        load_dataset(name, image_size=8)
