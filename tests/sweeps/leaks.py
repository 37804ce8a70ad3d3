"""A search for secrets in everything that a training has written: text, binary numbers, packed files.

A `Canary` is a secret in all forms in which a program may write it down. `search` unpacks what it finds
(zip, which torch's checkpoints are, gzip, bzip2, xz, zstd, tar, base64 and the rows of SQLite) and looks
for every form in it.
"""

from __future__ import annotations

import base64
import binascii
import bz2
import gzip
import io
import lzma
import re
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow

_BASE64 = re.compile(rb"[A-Za-z0-9+/]{16,}={0,2}")
_PACKED: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\0": lzma.decompress,
    b"\x28\xb5\x2f\xfd": lambda content: bytes(
        pyarrow.CompressedInputStream(io.BytesIO(content), "zstd").read()
    ),
}


@dataclass(frozen=True)
class Canary:
    """One secret.

    Attributes:
      name: what it is.
      literals: byte strings that give it away.
      tokens: the same, unless a digit stands before or after them.
      patterns: regular expressions that do.
    """

    name: str
    literals: tuple[bytes, ...]
    tokens: tuple[bytes, ...] = ()
    patterns: tuple[re.Pattern[bytes], ...] = ()

    def is_in(self, content: bytes) -> bool:
        """Whether any form of it is in `content`."""
        return (
            any(literal in content for literal in self.literals)
            or any(token in content and _alone(token).search(content) for token in self.tokens)
            or any(pattern.search(content) for pattern in self.patterns)
        )


def _alone(token: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"(?<![1-9])" + re.escape(token) + (rb"(?!\d)" if len(token) < 7 else b""))


def number(name: str, value: float) -> Canary:
    """A number of at least seven digits, such as 712345.625: in decimals, rounded or not, and in binary."""
    digits = str(int(value * 1000))[:7]
    shifted = [f"{digits[:place]}.{digits[place:]}" for place in range(1, 7)]
    whole = len(str(int(value)))
    rounded = {f"{value:.{count}{kind}}" for count in (4, 5, 6, 7) for kind in ("g", "G")}
    rounded |= {f"{value:.{count}e}" for count in (3, 4, 5)} | {f"{value:.0f}", f"{value:,.0f}"}
    grouped = {f"{value:,.3f}"[: whole + whole // 3], f"{value:_.3f}"[: whole + whole // 3]}
    binary = [struct.pack(order + kind, value) for order in "<>" for kind in "fd"]
    if value == int(value):
        binary += [b"J" + struct.pack("<i", int(value)), struct.pack("<q", int(value))]
        binary += [struct.pack(">q", int(value))]
    texts = {digits, f".{digits}", *shifted, *rounded, *grouped, float(value).hex()}
    return Canary(name, tuple(binary), tuple(text.encode() for text in texts))


def words(name: str, text: str) -> Canary:
    """A text: in UTF-8, UTF-16 and hexadecimal digits."""
    raw = text.encode()
    return Canary(name, (raw, text.encode("utf-16-le"), raw.hex().encode(), raw.hex().upper().encode()))


def pixels(name: str, values: bytes) -> Canary:
    """A row of pixels: as bytes, as a list, and scaled to [0, 1] or [-1, 1] in decimals and in binary."""
    scaled = [[value / 255 for value in values], [value / 127.5 - 1 for value in values]]
    single = np.frombuffer(values, dtype=np.uint8).astype(np.float32)
    scaled += [row.tolist() for row in (single / 255, (single / 255 - 0.5) / 0.5, single / 127.5 - 1)]
    binary = [
        struct.pack(f"{order}{len(row)}{kind}", *row) for row in scaled for order in "<>" for kind in "fd"
    ]
    as_list = rb"\b" + rb"\D{1,3}".join(str(value).encode() for value in values) + rb"\b"
    as_floats = [
        rb"\D{1,3}".join(re.escape(f"{value:.7f}"[:-2].lstrip("-").encode()) + rb"\d*" for value in row)
        for row in scaled
    ]
    shown = re.escape(repr(values)[2:-1].encode()).replace(rb"\\", rb"\\+")
    patterns = [re.compile(each) for each in (as_list, *as_floats, shown)]
    literals = (values, values.hex().encode(), values.hex().upper().encode(), *binary)
    return Canary(name, literals, patterns=tuple(patterns))


def search(canaries: Iterable[Canary], places: Iterable[tuple[str, bytes]]) -> dict[str, set[str]]:
    """Returns where each canary was found, by name; those that were not are left out."""
    wanted, found = list(canaries), dict[str, set[str]]()
    for place, content in places:
        for canary in wanted:
            if canary.is_in(content):
                found.setdefault(canary.name, set()).add(place)
    return found


def files(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """The content of every file below the folders, with its path, and everything packed in it."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield from unpacked(str(path), path.read_bytes())


def unpacked(place: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """A content, its name, and everything packed in it, to any depth."""
    yield place, place.encode() + b"\n" + content
    for name, inner in _inner(content):
        yield from unpacked(f"{place}#{name}", inner)


def _inner(content: bytes) -> Iterator[tuple[str, bytes]]:
    for magic, unpack in _PACKED.items():
        if content.startswith(magic):
            yield "unpacked", unpack(content)
    if content.startswith(b"SQLite format 3\0"):
        yield from _rows(content)
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
    elif content[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                yield member.name, file.read() if file is not None else b""
    elif runs := _BASE64.findall(content):
        yield "base64", b"\n".join(map(_from_base64, runs))


def _from_base64(run: bytes) -> bytes:
    try:
        return base64.b64decode(run.rstrip(b"=") + b"=" * (-len(run.rstrip(b"=")) % 4))
    except binascii.Error:
        return b""


def _rows(content: bytes) -> Iterator[tuple[str, bytes]]:
    """All values of a database: numbers and short texts a line each, long ones by themselves."""
    connection = sqlite3.connect(":memory:")
    connection.deserialize(content)
    connection.text_factory = bytes
    lines = []
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for row in connection.execute(f'SELECT * FROM "{table.decode()}"'):
            for value in row:
                lines.append(value if isinstance(value, bytes) else str(value).encode())
                if len(lines[-1]) > 50:
                    yield table.decode(), lines[-1]
    yield "rows", b"\n".join(lines)
