"""Options as one tree of nested dataclasses, and how its leaves are named, described and replaced.

A *node* is a frozen dataclass. A field whose type is a dataclass leads to a further node, and every other
field is a leaf, that is, an option. An option is declared once, as a field with its default and, in the
docstring under it, its description. Names of options are unique over a tree, so that a command line needs no
prefixes and a point of a sweep can be written `{"num_steps": 10}`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from dpgcl_core.errors import require_choice

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Node = TypeVar("Node", bound=DataclassInstance)

_OPTION = "option"


def option(name: str | None) -> Mapping[str, Any]:
    """Return field metadata that gives the option another name than its field; None makes it no option.

    For example, `name: str = field(default="adam", metadata=option("optimizer"))`.
    """
    return MappingProxyType({_OPTION: name})


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One option.

    Attributes:
      option: the option's name, unique over the tree.
      path: names of the fields that lead to the option, its own field last.
      type: the type of its values, with `Annotated` marks.
      help: its description, from the docstring under the field.
    """

    option: str
    path: tuple[str, ...]
    type: Any
    help: str

    @property
    def key(self) -> str:
        """The option's place in a configuration file, such as `mechanism.num_steps`."""
        return ".".join(self.path)

    def of(self, tree: object) -> Any:
        """Return the option's value in `tree`, an instance of the root dataclass."""
        for name in self.path:
            tree = getattr(tree, name)
        return tree


def leaves(kind: type[Any]) -> Mapping[str, Leaf]:
    """Return the options of dataclass `kind` and its nested dataclasses by name, in order of declaration.

    Raises:
      TypeError: two options have the same name.

    >>> from trainers.config.nodes import OptimizerConfig
    >>> list(leaves(OptimizerConfig))[:2], leaves(OptimizerConfig)["optimizer"].key
    (['optimizer', 'learning_rate'], 'name')
    """
    hashable_kind: Any = kind  # a class is hashable even if its instances are not
    return _leaves(hashable_kind)


@cache
def _leaves(kind: Any) -> Mapping[str, Leaf]:
    """Return the options as `leaves` does, computed once per class."""
    leaf_by_option: dict[str, Leaf] = {}
    types, helps = get_type_hints(kind, include_extras=True), _docstrings(kind)
    for field in fields(kind):
        name = field.metadata.get(_OPTION, field.name)
        if name is None:
            continue
        if is_node(types[field.name]):
            inner = leaves(types[field.name]).values()
            field_leaves = [replace(leaf, path=(field.name, *leaf.path)) for leaf in inner]
        else:
            field_leaves = [
                Leaf(option=name, path=(field.name,), type=types[field.name], help=helps.get(field.name, ""))
            ]
        for leaf in field_leaves:
            if leaf.option in leaf_by_option:
                raise TypeError(f"{kind.__name__} has two options named {leaf.option}")
            leaf_by_option[leaf.option] = leaf
    return MappingProxyType(leaf_by_option)


def is_node(type_: Any) -> bool:
    """Whether a field of this type leads to a further node of the tree."""
    return isinstance(type_, type) and is_dataclass(type_)


def values_of(tree: DataclassInstance) -> dict[str, Any]:
    """Return the values of all options of `tree` by name."""
    return {name: leaf.of(tree) for name, leaf in leaves(type(tree)).items()}


def replace_options(tree: Node, /, **values: Any) -> Node:
    """Return a copy of `tree` with new values of some options; each changed node is validated once.

    Raises:
      ConfigError: there is no such option, or a value breaks a rule.

    >>> from trainers.config.settings import TrainingOptions
    >>> replace_options(TrainingOptions(), num_steps=7, optimizer="sgd").optimizer.name
    'sgd'
    """
    leaf_by_option = leaves(type(tree))
    for name in values:
        require_choice("option", name, leaf_by_option)
    return _replace_paths(tree, {leaf_by_option[name].path: value for name, value in values.items()})


def _replace_paths(tree: Node, values: Mapping[tuple[str, ...], Any]) -> Node:
    field_values = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in values if len(path) > 1):
        values_below = {path[1:]: value for path, value in values.items() if path[0] == name}
        field_values[name] = _replace_paths(getattr(tree, name), values_below)
    return replace(tree, **field_values) if field_values else tree


def _docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the docstrings under the fields of a dataclass and its bases, if their source is available."""
    text_by_field: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # no source, because the class was typed into an interpreter
            continue
        body = next(node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    text_by_field[name] = " ".join(words.split())
    return text_by_field
