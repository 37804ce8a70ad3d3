"""Errors that a user can correct: each states the rule, the received value, and the correction.

Every class derives from `DpgclError`, which the command lines turn into one line on stderr and exit code 2.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import io
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from dpgcl_core.addresses import hide_arguments, masked_text

_SHOWN = 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DpgclError(ValueError):
    """An error that the caller can correct; its message never contains the content of a record.

    It does not contain the secret of an address either: every message passes through `masked_text`.

    Attributes:
      lines: lines printed below the message.
      details: details as private as the records, by name, such as the positions of unusable records.
      details_file: the file with the details, for readers trusted with the records; None if not written.
    """

    lines: Sequence[str] = ()
    details: Mapping[str, Any] = MappingProxyType({})
    details_file: Path | None = None

    def __init__(self, *args: Any, lines: Sequence[str] = ()) -> None:
        super().__init__(*(masked_text(each) if isinstance(each, str) else each for each in args))
        self.lines = tuple(map(masked_text, lines))


class ConfigError(DpgclError):
    """An option or a combination of options breaks a rule."""


class DataError(DpgclError):
    """A data set is missing, corrupt or of a shape that cannot be used."""


class StorageError(DpgclError):
    """A results folder cannot be used as requested."""


class TrackingError(DpgclError):
    """The MLflow server cannot be reached, or refuses the request."""


class ClusterError(DpgclError):
    """Ray did not start, or does not answer."""


class ProcessFailed(DpgclError):  # noqa: N818 (the name describes the cause)
    """Another process of this training has failed, so this one must not continue."""


class LedgerError(DpgclError):
    """The budget ledger is missing, damaged or unreachable, or does not hold the requested entry."""


class LedgerMissing(LedgerError):  # noqa: N818 (the name describes the cause)
    """There is no ledger at the path or URL, or the data set is not registered in it."""


class BudgetExceeded(LedgerError):  # noqa: N818 (a refusal, not a fault)
    """The cap of a data set does not admit the requested charge; nothing was charged."""


class ExtraMissing(DpgclError, ImportError):  # noqa: N818 (the name describes the cause)
    """A part of the package needs an extra that is not installed."""


def require_extra(extra: str, *modules: str, needed_by: str) -> None:
    """Check that packages of an extra are installed, before a part that needs them is imported.

    Args:
      extra: the extra's name in `pyproject.toml`.
      modules: the modules that the part needs.
      needed_by: the part's name, for the message.

    Raises:
      ExtraMissing: one of `modules` is not installed.
    """
    missing = [name for name in modules if name not in sys.modules and not importlib.util.find_spec(name)]
    if missing:
        names = ", ".join(missing)
        raise ExtraMissing(f'{needed_by} needs {names}: pip install "dpgcl[{extra}]"')


def unknown_choice(kind: str, value: str, choices: Iterable[str]) -> str:
    """Return the message for a name that is not among `choices`; it suggests the nearest choice.

    >>> unknown_choice("data set", "digit", ["cifar10", "digits"])
    "unknown data set 'digit'; did you mean 'digits'? Valid: cifar10, digits"
    """
    names = sorted(choices)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {value!r}{hint} Valid: {', '.join(names)}"


def require(condition: bool, message: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_choice(
    kind: str, value: str, choices: Collection[str], *, error: type[DpgclError] = ConfigError
) -> None:
    """Raise an error with the nearest and all valid choices unless `value` is among `choices`."""
    if value not in choices:
        raise error(unknown_choice(kind, value, choices))


def require_each(node: object, names: Iterable[str], rule: str, holds: Callable[[Any], bool]) -> None:
    """Raise ConfigError "NAME must RULE" unless each named field of `node` is None or `holds` for it."""
    for name in names:
        value = getattr(node, name)
        require(value is None or holds(value), f"{name} must {rule}; got {value}")


def require_least(node: object, least: int, *names: str) -> None:
    """Raise ConfigError unless each named field of `node` is None or at least `least`."""
    require_each(node, names, f"be at least {least}", lambda value: value >= least)


def require_whole(name: str, value: object, *, least: int) -> None:
    """Check that a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}; got {value!r}")


def require_positive(node: object, *names: str) -> None:
    """Raise ConfigError unless each named field of `node` is None or positive and finite."""
    require_each(node, names, "be positive and finite", lambda value: 0 < value < math.inf)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, states that no space is left.

    >>> is_disk_full(StorageError("x")), is_disk_full(OSError(errno.ENOSPC, "no space"))
    (False, True)
    """
    visited_ids = set[int]()
    while error is not None and id(error) not in visited_ids:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        visited_ids.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def exit_on_bad_input(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with its code; bad input becomes one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without Greek letters must not cause an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if hide_arguments():
        print(
            "note: other users of this machine may have read the password on the command line, and a Ray "
            "job's entry keeps it. Use $DPGCL_LEDGER, $MLFLOW_TRACKING_URI or a file (docs/cluster.md)",
            file=sys.stderr,
        )
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except DpgclError as error:
        print(f"error: {' '.join(str(error).split())}", *error.lines, sep="\n  ", file=sys.stderr)
        if error.details and not sys.stderr.isatty():
            print(_details_hint(error.details_file), file=sys.stderr)
        show_on_a_terminal(error.details)
        sys.exit(2)
    except KeyboardInterrupt:  # only before a sweep's trials: during them, the sweep handles signals
        sys.exit(130)
    except BrokenPipeError:
        if not _is_unread(sys.stdout):  # a pipe other than the output's
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        place = f" {error.filename}" if error.filename else ""
        print(f"error: no space is left to write{place}; free some and try again", file=sys.stderr)
        sys.exit(2)


def _details_hint(file: Path | None) -> str:
    if file is None:
        return "details are shown only in a terminal; run the command there"
    return f"details are in {file}, which is as private as the data; they are also shown in a terminal"


def _is_unread(stream: TextIO) -> bool:
    """Return whether the reading end of a stream is closed, as after `| head`."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def show_on_a_terminal(details: Mapping[str, Any]) -> None:
    """Show details only in a terminal; a job's log or a file gets none of them.

    Args:
      details: the details by name; positions of records are lists of numbers.
    """
    if not sys.stderr.isatty():
        return
    for line in detail_lines(details, max_entries=_SHOWN):
        print(f"  {line}", file=sys.stderr)


def detail_lines(details: Mapping[str, Any], *, max_entries: int | None = None) -> Iterator[str]:
    """Yield one line for each detail, with at most `max_entries` of its entries.

    >>> list(detail_lines({"unreadable": [3, 7], "missing": [], "no bytes": ["a", "b"]}, max_entries=1))
    ['unreadable: 2, at 0-based positions 3 and 1 more', 'no bytes: 2, a and 1 more']
    """
    for name, entries in details.items():
        if entries == []:
            continue
        are_many = isinstance(entries, (list, tuple))
        all_entries = list(entries) if are_many else [entries]
        first_entries = all_entries[:max_entries]
        more = f" and {num_more} more" if (num_more := len(all_entries) - len(first_entries)) else ""
        are_places = are_many and all(isinstance(entry, int) for entry in entries)
        count = f"{len(all_entries)}, " * are_many + "at 0-based positions " * are_places
        yield f"{name}: {count}{', '.join(map(str, first_entries))}{more}"
