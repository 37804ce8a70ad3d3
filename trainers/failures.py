"""What may be told of a training that failed: with private records, nothing that a record can have chosen.

The text of an exception may carry a record: torch names indices, a network of the user's own may print its
input, and any class of exception, this package's own among them, can be raised with any text by anybody. So
a worker does its work in two stages. In the first one (`Stage.BEFORE_DATA`) there is no record in the
process: what this package's own code finds wrong then, it says. From the moment on at which records are
fetched (`Stage.WITH_DATA`), a failure is told by the name of its class alone, and only where the name is on a
public list: a class of the user's own can have any name.

A disk that is full is told by a sentence of its own, whatever the data: the sweep ends with it.

**Proposition.** With private records, what `describe_error` returns is one of a fixed finite set of texts
that does not depend on the records, or was composed by this package's code before the process had any.
*Why.* With data, it is `NO_ROOM`, or a name of `_NAMES` in a fixed sentence. Before data, a text is kept if
each frame from the boundary to the `raise` is of this package and the exception was not raised in the
handling of another one, so that no foreign code ran that could have composed it. ∎

Which of the names is told is as little protected as failures are (docs/limits.md).
"""

from __future__ import annotations

import builtins
import traceback
from enum import Enum, auto
from pathlib import Path

import torch

import dpgcl_core
from dpgcl_core import errors
from dpgcl_core.errors import DpgclError, is_disk_full

_OWN_FOLDERS = (Path(dpgcl_core.__file__).resolve().parent, Path(__file__).resolve().parent)
NO_ROOM = "no space is left in the storage folder"
_WITHHELD = "(its message is withheld: the training data are private)"


class Stage(Enum):
    """Whether the process that failed had fetched records."""

    BEFORE_DATA = auto()
    WITH_DATA = auto()


def _classes(module: object) -> set[type[BaseException]]:
    found = vars(module).values()
    return {each for each in found if isinstance(each, type) and issubclass(each, BaseException)}


# By the class itself, not its name: a class of the user's own may be called KeyError.
_NAMES = {
    each: each.__name__ for each in (*_classes(builtins), *_classes(errors), torch.cuda.OutOfMemoryError)
}


def describe_error(error: BaseException, *, data_are_public: bool, stage: Stage = Stage.WITH_DATA) -> str:
    """Return what may be told of an exception.

    Args:
      error: as it was caught at the boundary.
      data_are_public: then all is told, with its traceback.
      stage: that it ended.

    >>> describe_error(KeyError("a name from a record"), data_are_public=False)
    'KeyError (its message is withheld: the training data are private)'
    >>> describe_error(errors.ConfigError("words of a record"), data_are_public=False)
    'ConfigError (its message is withheld: the training data are private)'
    >>> describe_error(type("OfARecord", (KeyError,), {})(), data_are_public=False)
    'an error (its message is withheld: the training data are private)'
    """
    if is_disk_full(error):
        return NO_ROOM
    if data_are_public:
        if isinstance(error, DpgclError):
            return str(error)
        return "".join(traceback.format_exception(error)).strip()
    if stage is Stage.BEFORE_DATA and _is_our_own(error):
        return str(error)
    return f"{_NAMES.get(type(error), 'an error')} {_WITHHELD}"


def _is_our_own(error: BaseException) -> bool:
    """Whether this package's code alone composed the text."""
    return (
        isinstance(error, DpgclError)
        and type(error) in _NAMES
        and error.__cause__ is None
        and error.__context__ is None
        and all(
            any(Path(frame.f_code.co_filename).resolve().is_relative_to(own) for own in _OWN_FOLDERS)
            for frame, _ in traceback.walk_tb(error.__traceback__)
        )
    )
