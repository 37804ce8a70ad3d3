"""Columns of text as Arrow arrays: a million captions take the bytes of their text, not a million objects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 65_536


class ArrowColumn(Sequence[Any]):
    """An Arrow column as a sequence of Python values, in which a list is a tuple.

    >>> import pyarrow as pa
    >>> captions = ArrowColumn(pa.array([["a cat", "it sleeps"], ["a dog"]]))
    >>> captions[0], captions.select(np.array([1])) == (("a dog",),)
    (('a cat', 'it sleeps'), True)
    """

    def __init__(self, array: pa.Array | pa.ChunkedArray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, row: Any) -> Any:
        value = self.array[row].as_py()
        return tuple(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[Any]:
        return (tuple(value) if isinstance(value, list) else value for value in values_of(self.array))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Sequence) and len(self) == len(value) and all(map(operator.eq, self, value))

    __hash__ = None  # type: ignore[assignment]

    def select(self, rows: NDArray[np.int64]) -> ArrowColumn:
        """Return the values at `rows`."""
        return ArrowColumn(take_rows(self.array, rows))


def combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, with 64-bit offsets so that it may exceed 2 GB."""
    import pyarrow as pa

    kinds = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    kinds[pa.list_(pa.string())] = pa.large_list(pa.large_string())
    column = column.cast(kinds.get(column.type, column.type))
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def are_all(rows: NDArray[np.int64], num_rows: int) -> bool:
    """Whether `rows` are all rows in order."""
    return len(rows) == num_rows and bool((rows[1:] > rows[:-1]).all())


def take_rows(column: pa.Array | pa.ChunkedArray, rows: NDArray[np.int64]) -> pa.Array | pa.ChunkedArray:
    """Return the values at `rows`; the column itself, without a copy, if these are all rows in order."""
    return column if are_all(rows, len(column)) else column.take(rows)


def text_column(values: Iterable[Any]) -> pa.Array:
    """Return values as text, or None, in a column that also holds text that is not valid Unicode."""
    import pyarrow as pa

    return pa.array(
        (None if value is None else str(value).encode("utf-8", "surrogatepass") for value in values),
        pa.large_binary(),
    )


def values_of(column: pa.Array | pa.ChunkedArray) -> Iterator[Any]:
    """Yield a column's values; binary values as the text of a `text_column`, and digests in hexadecimal."""
    kind = str(column.type)
    for value in raw_values(column):
        if value is not None and kind in ("binary", "large_binary"):
            yield value.decode("utf-8", "surrogatepass")
        else:
            yield value.hex() if kind == "fixed_size_binary[16]" else value


def raw_values(column: pa.Array | pa.ChunkedArray) -> Iterator[Any]:
    """Yield a column's values as Arrow holds them, some thousand at a time."""
    for start in range(0, len(column), _ROWS_AT_ONCE):
        yield from column.slice(start, _ROWS_AT_ONCE).to_pylist()


def codes_of(column: pa.Array | pa.ChunkedArray | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each value, equal for equal values, in the order of first occurrence."""
    import pyarrow as pa

    if isinstance(column, np.ndarray) and (column[1:] > column[:-1]).all():
        return np.arange(len(column))
    array: Any = pa.array(column) if isinstance(column, np.ndarray) else column
    codes = _codes_of_different(array) if array.type == pa.binary(16) else None
    if codes is None:
        codes = combined(array).dictionary_encode().indices.to_numpy().astype(np.int64)
    pa.default_memory_pool().release_unused()  # the dictionary, which can be as large as the column
    return codes


def _codes_of_different(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64] | None:
    """Return the codes of digests whose first halves differ, in less memory than a dictionary; else None."""
    halves = [np.frombuffer(chunk.buffers()[1], np.uint64)[2 * chunk.offset :][: 2 * len(chunk) : 2]
              for chunk in getattr(column, "chunks", [column]) if len(chunk)]  # fmt: skip
    ordered = np.sort(np.concatenate([np.zeros(0, np.uint64), *halves]))
    return np.arange(len(column)) if (ordered[1:] != ordered[:-1]).all() else None


def mask_of(column: pa.Array | pa.ChunkedArray, predicate: Callable[[Any], bool]) -> NDArray[np.bool_]:
    """Return whether each value of a column satisfies a predicate."""
    return np.fromiter(map(predicate, values_of(column)), dtype=np.bool_, count=len(column))
