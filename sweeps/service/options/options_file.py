"""Options from a YAML or JSON file, and the file that repeats a sweep.

A file has one section per node of the options, named as the node's field, with one key per option. The axes
of a sweep are next to the sections:

    version: 1
    mechanism: {epsilon: 3.0, num_steps: 200}
    data: {dataset: fashion-mnist}
    group_sizes: [2, 8, batch]

An option that a file leaves out has its default. With `setting: auto` (or another name) it has the value of
the named setting instead. A file may still have an option of an earlier version, with the value at which it
did nothing (`trainers.config.removed_options`). JSON is YAML, so one reader is enough for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from dpgcl_core.addresses import masked
from dpgcl_core.errors import ConfigError, unknown_choice
from sweeps.service.options.sweep_options import SweepOptions
from trainers.config.removed_options import REMOVED_FIELDS, check_removed_field, is_removed_section
from trainers.config.tree import Leaf, leaves, values_of

VERSION = 1
OF_ONE_RUN = (
    *("storage", "name", "resume", "tracking_uri", "ledger", "no_ledger", "dry_run"),
    *("quiet", "time_budget", "listener"),
)
"""Options of one run only: where its results are (addresses may hold passwords), whether it resumes, how long
it runs, and whether private data need no ledger. A repetition must set them again."""
_SECRET = ("ledger", "tracking_uri")
"""Options that may hold a password: no message repeats their values."""


@dataclass(frozen=True, kw_only=True)
class OptionsFile:
    """The content of an options file.

    Attributes:
      setting: name of the setting that its options start from; None for the plain defaults.
      values: the values by option.
    """

    setting: str | None
    values: Mapping[str, Any]


def read_options(kind: type[SweepOptions], path: Path) -> OptionsFile:
    """Return the options of a file, converted to their declared types.

    Raises:
      ConfigError: the file cannot be read, is of another version, or has an unknown key or an invalid value;
        the message names the key with its path.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the configuration {path} must be YAML or JSON{_yaml_problem(error)}"
        ) from None  # the YAML error quotes lines of the file, which may hold a password
    if not isinstance(content, dict):
        raise ConfigError(f"the configuration {path} must hold the key version, and sections of options")
    try:
        return _parse_content(kind, content)
    except ConfigError as error:
        raise ConfigError(f"in the configuration {path}: {error}") from error.__cause__


def options_text(options: SweepOptions) -> str:
    """Return the text of the file that repeats a sweep: axes, data set, and options that are not defaults.

    Options of one run only (`OF_ONE_RUN`) are left out, and passwords in addresses are masked.
    """
    defaults = values_of(type(options)())
    content: dict[str, Any] = {"version": VERSION}
    for name, leaf in leaves(type(options)).items():
        value = leaf.of(options)
        is_always_written = len(leaf.path) == 1 or name == "dataset"
        if name not in OF_ONE_RUN and (is_always_written or value != defaults[name]):
            node = content
            for section in leaf.path[:-1]:
                node = node.setdefault(section, {})
            node[leaf.path[-1]] = _plain(value)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def is_same(value: Any, recorded_value: Any) -> bool:
    """Return whether a value equals a value from a file, in which passwords of addresses are masked."""
    return bool(_plain(value) == _plain(recorded_value))


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Return the problem and its line number, without the line's text, which may hold a password."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    return f": {error.problem} in line {error.problem_mark.line + 1}"


def _plain(value: Any) -> Any:
    """Return a value as lists, numbers and text, with the passwords of addresses masked."""
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, (str, Path)):  # an address is masked, whichever option holds it
        return masked(str(value)) if "://" in str(value) else str(value)
    return value


def _parse_content(kind: type[SweepOptions], content: dict[Any, Any]) -> OptionsFile:
    version = content.pop("version", None)
    if version != VERSION or type(version) is not int:
        problem = "got none" if version is None else f"got {version!r}"
        raise ConfigError(f"version must be {VERSION}, because other versions have other keys; {problem}")
    setting = content.pop("setting", None)
    if not (setting is None or isinstance(setting, str)):
        raise ConfigError(f"setting must be the name of a setting; got {setting!r}")
    options = {leaf.path: leaf for leaf in leaves(kind).values()}
    return OptionsFile(setting=setting, values=dict(_values(options, (), content)))


def _values(
    options: Mapping[tuple[str, ...], Leaf], section: tuple[str, ...], content: Mapping[Any, Any]
) -> list[tuple[str, Any]]:
    """Return names and values of the options in a section and its subsections, without removed options."""
    values: list[tuple[str, Any]] = []
    keys = {path[len(section)] for path in options if path[: len(section)] == section and path != section}
    for key, value in content.items():
        path = (*section, str(key))
        key_path = ".".join(path)
        if path in options:
            values.append((options[path].option, _typed(options[path], value)))
        elif key_path in REMOVED_FIELDS:
            check_removed_field(key_path, value)
        elif key not in keys and not is_removed_section(key_path):
            raise ConfigError(_unknown_key(options, section, key_path, str(key), keys))
        elif isinstance(value, dict):
            values += _values(options, path, value)
        else:
            raise ConfigError(f"{key_path} must be a section of options by name; got {value!r}")
    return values


def _unknown_key(
    options: Mapping[tuple[str, ...], Leaf], section: tuple[str, ...], key_path: str, key: str, keys: set[str]
) -> str:
    """Return a message with the option's correct path, or with the nearest of the section's valid keys."""
    matches = [leaf.key for leaf in options.values() if key in (leaf.option, leaf.path[-1])]
    if matches:
        return f"unknown key {key_path!r}; did you mean {matches[0]!r}?"
    return unknown_choice("key", key_path, [".".join((*section, name)) for name in keys])


def _typed(leaf: Leaf, value: Any) -> Any:
    """Return the value as the option's type, by JSON's rules: a list for a tuple, text for a path."""
    try:
        return TypeAdapter(leaf.type).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError) as error:
        rules = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        messages = dict.fromkeys(rule["msg"] for rule in rules)
        reason = "; ".join(messages) or "the option takes no value of this type"
        got = "" if leaf.option in _SECRET else f"; got {value!r}"
        raise ConfigError(f"{leaf.key} has an invalid value: {reason}{got}") from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects repeated keys, and reads 1e-3 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repetition = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if repetition is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the key {repetition!r} occurs twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
