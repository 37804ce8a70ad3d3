"""Stage 1, records: one record is one privacy unit, and only its stable id decides its split.

Neighbouring data sets differ by **adding or removing one record**. Every rule that assigns a record to
a shard, a split or an augmentation must therefore leave the assignment of all *other* records unchanged. So
it is a function of the record's id and of public randomness, or of its slot in a slot table, never of its
position or of the number of records. With positional shards, removing one record moves all others, and the
claimed sensitivity of the training step is false (`tests/dpgcl_core/sampling/test_neighbours.py` shows the
violation).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint64]


def ids_from_contents(contents: Iterable[bytes]) -> Ids:
    """Return one id per record, `[num_records]`, from the record's own bytes.

    The k-th copy of identical content gets its own id. Because the copies are identical, the
    *set* of (id, content) pairs does not depend on the order of the records, and removing any one copy
    leaves exactly the set that removing the last copy leaves. So the ids of the other records never
    change.

    >>> a, b = ids_from_contents([b"x", b"y", b"x"]), ids_from_contents([b"y", b"x"])
    >>> set(b.tolist()) < set(a.tolist()), len(set(a.tolist()))
    (True, 3)
    """
    return ids_from_digests(map(digest_of_content, contents))


def digest_of_content(content: bytes) -> bytes:
    """Return the 16 bytes that `ids_from_digests` takes for a record's content."""
    return hashlib.blake2b(content, digest_size=16).digest()


def ids_from_digests(digests: Iterable[bytes]) -> Ids:
    """Return what `ids_from_contents` returns, from the `digest_of_content` of each record's content."""
    num_copies: Counter[bytes] = Counter()

    def id_of(digest: bytes) -> int:
        copy = num_copies[digest]
        num_copies[digest] += 1
        return _digest64(digest + copy.to_bytes(8, "little"))

    return np.fromiter(map(id_of, digests), dtype=np.uint64)


def ids_from_names(names: Iterable[str]) -> Ids:
    """Return one id per record, `[num_records]`, from names that the data set's owner keeps stable.

    >>> int(ids_from_names(["cat/1.png"])[0]) == int(ids_from_names(["dog/7.png", "cat/1.png"])[1])
    True
    """
    return np.fromiter((_digest64(name.encode()) for name in names), dtype=np.uint64)


def _digest64(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def keyed_uniform(ids: Ids, *key: int | str) -> NDArray[np.float64]:
    """Return one number in [0, 1) per id, `[num_records]`: a hash of the id and `key`, which is not secret.

    Each number depends only on its own id and the key, so adding or removing a record changes no other
    record's number. The hash is not cryptographic. Use it for splits and augmentation, never for sampling,
    permutation or noise.

    Args:
      ids: `[num_records]` record ids.
      *key: public values, such as a purpose, a seed, a step or a view. Different keys give unrelated numbers.

    >>> u = keyed_uniform(ids_from_names([f"r{i}" for i in range(1000)]), "split", 0)
    >>> bool(abs(u.mean() - 0.5) < 0.05), bool((keyed_uniform(ids_from_names(["r7"]), "split", 0) == u[7])[0])
    (True, True)
    """
    salt = np.uint64(_digest64(repr(key).encode()))
    mixed = _mix(_mix(ids ^ salt) + salt)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Ids) -> Ids:
    """Mix by SplitMix64's finaliser (Steele, Lea and Flood, 2014): all inputs affect every output bit."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def held_out(ids: Ids, fraction: float, *, key: str = "test-split") -> NDArray[np.bool_]:
    """Return a mask of the records held out for testing, `[num_records]`, each chosen only by its id.

    >>> ids = ids_from_names([f"r{i}" for i in range(100)])
    >>> bool((held_out(ids, 0.2)[1:] == held_out(ids[1:], 0.2)).all())
    True
    """
    return keyed_uniform(ids, key) < fraction
