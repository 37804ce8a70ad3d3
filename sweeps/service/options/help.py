"""`--help`: the options that most people need first, in groups; `--help-all`: every option."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Annotated, Any

from dpgcl_core.command_line import errors_in_one_line
from sweeps.service.options.start import Start
from sweeps.service.options.sweep_options import SweepOptions, varied_by
from trainers.config.tree import Leaf, leaves

FIRST = (
    *("config", "tiny", "dataset", "evaluate_on", "epsilon", "num_steps", "expected_batch_size"),
    *("repeats", "storage", "dry_run"),
)
"""The options that most people need first, in addition to the axes of a sweep."""


_Section = list[tuple[Leaf, Any]]
"""Options with their values."""


def show_help(start: Start, options: SweepOptions, description: str | None, *, is_full: bool) -> None:
    """Print options in groups, with their values as defaults, without options that axes take the place of.

    Args:
      start: the options that others start from.
      options: a sweep's options.
      description: the program's description.
      is_full: print all options, not only axes and the options in `FIRST`.
    """
    import tyro  # imported late: only command lines need it

    groups, total, varied = list[Any](), 0, varied_by(type(options))
    for name, node, pairs in (*_sections("start", start), *_sections("axes", options)):
        section = [pair for pair in pairs if pair[0].option not in varied]
        total += len(section)
        if shown := [pair for pair in section if is_full or _comes_first(pair[0])]:
            groups.append((name, _group(name, shown, (inspect.getdoc(node) or "").partition("\n")[0])))
    hint = "" if is_full else f"\n\n--help-all shows all {total} options."
    with contextlib.suppress(SystemExit), errors_in_one_line(["--help"]):  # tyro exits after it prints help
        tyro.cli(
            dataclasses.make_dataclass("Options", groups),
            args=["--help"],
            description=inspect.cleandoc(description or "") + hint,
            config=(tyro.conf.OmitArgPrefixes,),
        )


def _group(name: str, options: _Section, description: str) -> type:
    """Return a dataclass of some options, which tyro shows as a group."""
    import tyro

    fields = [
        (
            leaf.option,
            Annotated[mark_type(leaf.type), tyro.conf.arg(help=leaf.help)],
            dataclasses.field(default=value),
        )
        for leaf, value in options
    ]
    return dataclasses.make_dataclass(name, fields, namespace={"__doc__": description})


def _sections(title: str, tree: Any) -> list[tuple[str, object, _Section]]:
    """Return the options of a tree by its nodes; options outside all nodes come first."""
    sections: dict[str, tuple[str, object, _Section]] = {"": (title, tree, [])}
    for leaf in leaves(type(tree)).values():
        name = "" if len(leaf.path) == 1 else leaf.path[0]
        if name not in sections:
            sections[name] = (name, getattr(tree, name), [])
        sections[name][2].append((leaf, leaf.of(tree)))
    return list(sections.values())


def _comes_first(leaf: Leaf) -> bool:
    return leaf.option in FIRST or (len(leaf.path) == 1 and leaf.option not in leaves(Start))


def mark_type(option_type: Any) -> Any:
    """Return an option's type, marked for tyro: a flag that may be None is set by --name or --no-name."""
    import tyro

    return Annotated[option_type, tyro.conf.DisallowNone] if option_type == bool | None else option_type
