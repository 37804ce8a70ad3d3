"""`--help`: the options that most people need first, in groups; `--help-all`: every option."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dpgcl_core.command_line import errors_in_one_line
from sweeps.service.options.start import Start
from trainers.config.tree import Leaf, leaves

FIRST = (
    "config",
    "tiny",
    "dataset",
    "evaluate_on",
    "epsilon",
    "num_steps",
    "expected_batch_size",
    "repeats",
    "storage",
    "dry_run",
)
"""What most people need first, besides the axes of a sweep."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    title: str
    description: str
    options: list[tuple[Leaf, Any]]


@dataclass(frozen=True, kw_only=True)
class _Page:
    groups: Sequence[_Group]


def show_help(
    trees: Mapping[str, Any],
    description: str | None,
    varied: Collection[str],
    *,
    everything: bool,
) -> None:
    """Print options in groups, with their values as defaults.

    Args:
      trees: of options, by the title of what is in no node of theirs, such as the axes of a sweep.
      description: of the program.
      varied: options that are not shown, for axes take their place.
      everything: all options, not only axes and those of `FIRST`.
    """
    import tyro  # here, for it is needed by command lines alone

    groups = [group for title, tree in trees.items() for group in _groups(title, tree)]
    total = 0
    for group in groups:
        group.options[:] = [each for each in group.options if each[0].option not in varied]
        total += len(group.options)
        if not everything:
            group.options[:] = [each for each in group.options if _comes_first(each[0])]
    more = "" if everything else f"\n\n--help-all shows all {total} options."
    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(_struct_rule)
    with contextlib.suppress(SystemExit), errors_in_one_line(["--help"]):  # as after every help
        tyro.cli(
            _Page,
            default=_Page(groups=[group for group in groups if group.options]),
            args=["--help"],
            description=inspect.cleandoc(description or "") + more,
            config=(tyro.conf.OmitArgPrefixes,),
            registry=registry,
        )


def _groups(title: str, tree: Any) -> list[_Group]:
    """The options of a tree by its nodes; those of no node come first."""
    found = {"": _Group(title=title, description=_first_line(tree), options=[])}
    for leaf in leaves(type(tree)).values():
        section = "" if len(leaf.path) == 1 else leaf.path[0]
        if section not in found:
            node = getattr(tree, section)
            found[section] = _Group(title=section, description=_first_line(node), options=[])
        found[section].options.append((leaf, leaf.of(tree)))
    return list(found.values())


def _first_line(node: object) -> str:
    return (inspect.getdoc(node) or "").partition("\n")[0]


def _comes_first(leaf: Leaf) -> bool:
    return leaf.option in FIRST or (len(leaf.path) == 1 and leaf.option not in leaves(Start))


def _struct_rule(info: Any) -> Any:
    """How tyro takes pages and groups: a field for each group, and in it one for each option."""
    import tyro

    field, shown = tyro.constructors.StructFieldSpec, info.default
    if isinstance(shown, _Page):
        fields = [
            field(name=group.title, type=_Group, default=group, helptext=group.description)
            for group in shown.groups
        ]
    elif isinstance(shown, _Group):
        fields = [
            field(name=leaf.option, type=marked(leaf.type), default=value, helptext=leaf.help)
            for leaf, value in shown.options
        ]
    else:
        return None
    return tyro.constructors.StructConstructorSpec(instantiate=dict, fields=tuple(fields))


def marked(type_: Any) -> Any:
    """Return a type as tyro takes it: what is true, false or left to a rule is typed --name and --no-name."""
    import tyro

    return Annotated[type_, tyro.conf.DisallowNone] if type_ == bool | None else type_
