"""Describes a failed training: with private records, without any text that a record can have chosen.

The text of an exception may carry a record. Torch names indices, a user's own network may print its input,
and anybody can raise any class of exception, including this package's own, with any text. So a worker does
its work in two stages. In the first stage (`Stage.BEFORE_DATA`) there is no record in the process, and the
messages of this package's own code are reported in full. As soon as records are fetched (`Stage.WITH_DATA`),
a failure is reported only by the name of its class, and only if that class is on a public list, because a
user's own class can have any name.

A full disk is reported by a separate sentence, whatever the data: the sweep ends with it.

**Proposition.** With private records, the text that `describe_error` returns either is one of a fixed finite
set of texts that does not depend on the records, or was composed by this package's code before the process
had any records. *Why.* With data, the text is `NO_ROOM`, or a name of `_NAMES` in a fixed sentence. Before
data, a text is kept if each frame from the handler to the `raise` is of this package and the exception was
not raised while another one was handled, so that no foreign code ran that could have composed the text. ∎

Which of these names is reported is as little protected as the failure itself (docs/limits.md).
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

_PACKAGE_FOLDERS = (Path(dpgcl_core.__file__).resolve().parent, Path(__file__).resolve().parent)
NO_ROOM = "no space is left in the storage folder"
_WITHHELD = "(its message is withheld: the training data are private)"


class Stage(Enum):
    """The stage of a process: whether it had fetched records when it failed."""

    BEFORE_DATA = auto()
    WITH_DATA = auto()


def _exception_classes(module: object) -> set[type[BaseException]]:
    found = vars(module).values()
    return {each for each in found if isinstance(each, type) and issubclass(each, BaseException)}


# Keyed by the class itself, not its name: a user's own class may be called KeyError.
_NAMES = {
    each: each.__name__
    for each in (*_exception_classes(builtins), *_exception_classes(errors), torch.cuda.OutOfMemoryError)
}


def describe_error(error: BaseException, *, data_are_public: bool, stage: Stage = Stage.WITH_DATA) -> str:
    """Return the text that may be disclosed about an exception.

    Args:
      error: the exception, as its handler caught it, so that its traceback begins there.
      data_are_public: whether the training data are public. If so, the text is the whole message, and for
        an exception that is no `DpgclError` also its traceback.
      stage: the stage in which the exception was raised.

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
    if stage is Stage.BEFORE_DATA and _has_own_message(error):
        return str(error)
    return f"{_NAMES.get(type(error), 'an error')} {_WITHHELD}"


def _has_own_message(error: BaseException) -> bool:
    """Whether only this package's code composed the exception's message."""
    return (
        isinstance(error, DpgclError)
        and type(error) in _NAMES
        and error.__cause__ is None
        and error.__context__ is None
        and all(
            any(Path(frame.f_code.co_filename).resolve().is_relative_to(own) for own in _PACKAGE_FOLDERS)
            for frame, _ in traceback.walk_tb(error.__traceback__)
        )
    )
