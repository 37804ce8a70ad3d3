"""Command lines from typed functions, by tyro; every command of this project uses this module.

Bad input raises a `ConfigError` of one line, instead of tyro's boxes. The error for an unknown option
suggests the nearest valid option.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpgcl_core.addresses import masked
from dpgcl_core.errors import ConfigError, require_choice, unknown_choice

Command = Callable[..., Any]


def run_command(
    command: Command | Mapping[str, Command],
    *,
    prog: str,
    description: str | None = None,
    arguments: Sequence[str] | None = None,
    removals: Callable[[str], str | None] = lambda option: None,
) -> Any:
    """Call a function with the options of a command line, and return its result.

    Args:
      command: a typed function whose docstring explains its arguments; a dataclass, whose instance is
        returned; or subcommands by name.
      prog: the command's name in `--help`.
      description: the description in `--help`; by default the function's docstring.
      arguments: the command line without the program's name; None for this process's own.
      removals: a function from an option or subcommand to the error's text after "NAME was", such as the
        version that removed it and its replacement; None if it was not removed.

    Raises:
      ConfigError: an option or subcommand is unknown, removed or missing, or a value has the wrong type.
    """
    import tyro  # imported here, since only command lines need it

    words = list(sys.argv[1:] if arguments is None else arguments)
    _refuse_unknown(command, words, removals)
    with errors_in_one_line(words):
        if isinstance(command, Mapping):
            call = tyro.extras.subcommand_cli_from_dict(
                {name: _deferred(subcommand) for name, subcommand in command.items()},
                prog=prog,
                description=description,
                args=words,
            )
        else:
            call = tyro.cli(_deferred(command), prog=prog, description=description, args=words)
            if isinstance(command, type):
                return call
    _refuse_addresses(call.keywords)
    return call()  # outside `errors_in_one_line`, which captures stderr


def _refuse_addresses(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for an address in place of a path, which would create a local folder of that name."""
    for name, value in values.items():
        is_bucket = name == "data" and str(value).startswith("s3:/")  # it holds marks, as a folder does
        if isinstance(value, Path) and not is_bucket and re.match(r"[A-Za-z][\w+.-]*:/", str(value)):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be a path on this machine; got the address "
                f"{masked(str(value))}. Copy files to and from it with its own tool, such as aws s3 cp"
            )


def _deferred(command: Command) -> Callable[..., Callable[[], Any]]:
    """Return a function of the same signature that only binds its arguments; return a class unchanged."""
    if isinstance(command, type):  # its constructor raises for invalid options while tyro reads them
        return command

    @functools.wraps(command)
    def bind_arguments(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(command, *args, **kwargs)

    return bind_arguments


def options_of(command: Command) -> list[str]:
    """List the options of a typed function as the user types them.

    >>> def shown(num_steps: int, json: bool = False) -> None: ...
    >>> options_of(shown)
    ['--num-steps', '--json']
    """
    return ["--" + name.replace("_", "-") for name in inspect.signature(command).parameters]


def _refuse_unknown(
    command: Command | Mapping[str, Command], arguments: Sequence[str], removals: Callable[[str], str | None]
) -> None:
    """Raise ConfigError for an option or subcommand that is unknown or removed."""
    if isinstance(command, Mapping):
        if not arguments or arguments[0].startswith("-"):
            return  # tyro reports the missing subcommand, or prints its help
        if removal := removals(arguments[0]):
            raise ConfigError(f"{arguments[0]} was {removal}")
        require_choice("command", arguments[0], command)
        command = command[arguments[0]]
    valid = options_of(command)
    negations = {f"--no-{name[2:]}" for name in valid}
    for argument in arguments:
        name = argument.split("=")[0].replace("_", "-")
        if name.startswith("-") and (removal := removals(name)):
            raise ConfigError(f"{name} was {removal}")
        if name.startswith("--") and name not in {*valid, *negations, "--help"}:
            raise ConfigError(unknown_choice("option", name, valid))


@contextlib.contextmanager
def errors_in_one_line(arguments: Sequence[str]) -> Iterator[None]:
    """Replace tyro's boxed errors by a `ConfigError` of one line; help keeps its boxes.

    Args:
      arguments: the command line, which may contain `--help`.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), help_in_columns(arguments):
            yield
    except SystemExit as stop:
        if not stop.code or not stderr.getvalue().lstrip().startswith("╭"):
            raise
        raise ConfigError(plainly(first_section(stderr.getvalue()))) from None


@contextlib.contextmanager
def help_in_columns(arguments: Sequence[str]) -> Iterator[None]:
    """Wrap tyro's help at the terminal's width (100 without a terminal), and do not wrap its errors.

    Args:
      arguments: the command line, which may contain `--help`.
    """
    wants_help = bool({"-h", "--help", "--help-all"} & set(arguments))
    width, page = table_width() if wants_help else 10000, io.StringIO()
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), str(width)
    output = sys.stdout if sys.stdout.isatty() or not wants_help else page
    try:
        with contextlib.redirect_stdout(output):
            yield
    finally:
        for line in page.getvalue().splitlines():
            print(textwrap.fill(line, width) if len(line) > width else line)
        os.environ.pop("COLUMNS", None)
        if columns is not None:
            os.environ["COLUMNS"] = columns


def table_width() -> int:
    """Return the terminal's number of columns; 100 without a terminal."""
    return shutil.get_terminal_size((100, 24)).columns


_NO_VALUE = re.compile(
    r"^(?:Error parsing )?(--[\w-]+): no type matching (\S+) could be instantiated from \[(.*?)\]\..*$",
    re.DOTALL,
)
_NO_NUMBER = re.compile(
    r"^(?:Error parsing )?(--[\w-]+): (invalid literal for int\(\)|could not convert string to float)[^:]*: "
    r"(.*)$",
    re.DOTALL,
)


def plainly(complaint: str) -> str:
    """Return tyro's message about a value of a wrong type, without the list of types that tyro tried.

    >>> plainly("Error parsing --delta: no type matching {None}|FLOAT could be instantiated from ['1O']. Got")
    "--delta must be a number; got '1O'"
    >>> plainly("Error parsing --repeats: invalid literal for int() with base 10: 'x'")
    "--repeats must be a whole number; got 'x'"
    """
    if (no_number := _NO_NUMBER.match(complaint)) is not None:
        kind = "a number" if "float" in no_number[2] else "a whole number"
        return f"{no_number[1]} must be {kind}; got {no_number[3]}"
    if (no_value := _NO_VALUE.match(complaint)) is None:
        return complaint
    kinds = [kind for kind in no_value[2].split("|") if kind != "{None}"]
    words = {"FLOAT": "a number", "INT": "a whole number"}
    return f"{no_value[1]} must be {' or '.join(words.get(kind, kind) for kind in kinds)}; got {no_value[3]}"


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message in which the names of options are replaced by the flags that the user types.

    Args:
      message: an error's message.
      flags: the flags, by name of the option. A name of one word may be an ordinary word; it is replaced
        only before "must", at the start of the message or after "; and".

    >>> in_flags("num_steps must be at least 1; got 0", {"num_steps": "--num-steps"})
    '--num-steps must be at least 1; got 0'
    """
    names = sorted((name for name in flags if "_" in name), key=len, reverse=True)
    words = "|".join(map(re.escape, set(flags) - set(names)))
    for pattern in (
        rf"(?<![\w/.-])({'|'.join(names)})(?![\w(/]|\.\w)",
        rf"(?:^|(?<=; and ))({words})(?= must )",
    ):
        message = re.sub(pattern, lambda match: flags.get(match[1], match[1]), message)
    return message


def first_section(box: str) -> str:
    """Return the first section of tyro's error box as one line.

    >>> first_section("╭ Error ─╮\\n│ Error parsing Sweep: a ≥ 1 │\\n│ ───── │\\n│ More help. │\\n╰───╯")
    'a ≥ 1'
    """
    lines = [line.strip("│ \n") for line in box.splitlines() if line.startswith("│")]
    section = itertools.takewhile(lambda line: not line.startswith("──"), lines)
    text = " ".join(line for line in section if line) or box.strip()
    return re.sub(r"^Error parsing [A-Za-z]\w*: ", "", text)
