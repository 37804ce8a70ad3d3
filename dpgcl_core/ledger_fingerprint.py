"""Which data an id stands for: keyed fingerprints, and a mark beside the data that names their ledger.

A plain hash of a data set lets anybody confirm a guess of its records. These fingerprints are HMACs under a
key that stays on the trusted side, and they themselves leave it in no export or statement. A fingerprint
does not depend on the order of the records. It recognises the same records, not similar ones: an edited
copy must be registered, by its owner, under the id of the original, and then inherits every charge.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dpgcl_core.errors import LedgerError
from dpgcl_core.ledger_chain import Head

_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What is recorded of a data set's content; for the trusted side alone.

    Attributes:
      key_id: which key; says nothing about it.
      tag: HMAC of the records, hexadecimal.
    """

    key_id: str
    tag: str


def fingerprint_records(contents: Iterable[bytes], key: bytes) -> Fingerprint:
    """Returns the fingerprint of records, in any order.

    Args:
      contents: each record's bytes, everything that is trained on.
      key: of `fingerprint_key`.

    Raises:
      LedgerError: the key is too short.

    >>> key = bytes(range(32))
    >>> fingerprint_records([b"x", b"y"], key) == fingerprint_records([b"y", b"x"], key)
    True
    >>> fingerprint_records([b"x", b"y"], key) == fingerprint_records([b"x", b"y", b"y"], key)
    False
    """
    if len(key) < _KEY_BYTES:
        raise LedgerError(f"a fingerprint key has at least {_KEY_BYTES} bytes; got {len(key)}")
    tags = sorted(hmac.digest(key, b"record\0" + content, "sha256") for content in contents)
    tag = hmac.new(key, b"data set\0", "sha256")
    for record_tag in tags:
        tag.update(record_tag)
    return Fingerprint(key_id=hmac.new(key, b"key\0", "sha256").hexdigest()[:16], tag=tag.hexdigest())


def fingerprint_key(path: Path) -> bytes:
    """Returns the key in `path`; makes one that its owner alone may read where there is none.

    Keep a copy apart from the ledger: without the key no data set can be recognised any more.

    Raises:
      LedgerError: the file cannot be read or written, or holds no key.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        if not path.exists():
            descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(_KEY_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first: its key counts
                os.link(temporary, path)
            temporary.unlink()
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise LedgerError(
            f"the fingerprint key {path} cannot be used ({type(error).__name__}); restore it"
        ) from error
    if len(key) != _KEY_BYTES:
        raise LedgerError(f"{path} must hold {_KEY_BYTES} bytes in hexadecimal; got {len(key)}; restore it")
    return key


def mark_path(data: Path) -> Path:
    """Returns where the mark of a data file or folder lies."""
    return data / ".dpgcl-ledger.json" if data.is_dir() else data.with_name(data.name + ".dpgcl-ledger.json")


def read_mark(data: Path) -> tuple[str, Head] | None:
    """Returns the data-set id and the head that the mark names; None where there is no mark.

    Raises:
      LedgerError: the mark cannot be read.
    """
    path = mark_path(data)
    try:
        values = json.loads(path.read_text())
        return str(values.pop("dataset_id")), Head(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LedgerError(f"{path} cannot be read ({type(error).__name__}); restore it") from error


def write_mark(data: Path, dataset_id: str, head: Head) -> None:
    """Replaces the mark, at once.

    Raises:
      LedgerError: the folder of the data cannot be written.
    """
    path = mark_path(data)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            json.dump({"dataset_id": dataset_id, **asdict(head)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be written ({error.strerror}); give the folder write access"
        ) from error
