"""Checks names: nouns of the domain, no verbs of speech, each file name once.

Launch: python .ci/check_names.py

A bare participle or pronoun (`found`, `given`, `each`) is no name. It may be a local of at most `FEW_LINES`
lines, from its first to its last use, and nothing else: no parameter, attribute, function or class, and
nothing of a module. No function's name begins with a verb of speech. The scripts of `sweeps/` are named
after their questions; all other files of the product have names that occur once.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("dpgcl_core", "trainers", "sweeps", "dashboards")
CHECKED = (*PRODUCT, "benchmarks", "examples", ".ci")
FEW_LINES = 3
_PARTICIPLES = """
    added allowed answered applied asked begun bought broken brought built called carried caught changed
    charged checked chosen clipped compared computed copied counted covered dealt decided declared
    described displayed done drawn dropped ended entered expected filled finished fitted fixed forgiven
    found given gone got granted grown held joined kept known laid learnt left lent lifted listed loaded
    looked lost made made_up marked matched meant measured met missed moved named needed noted offered
    opened owed owned paid parsed passed placed planted prepared printed promised raised reached recorded
    refused released removed rendered repeated reported requested resolved returned said saved scaled
    scored seen selected sent settled shown skipped sorted spared spent spoken started stated stopped
    stored stuck summed supported taken taught thought thrown told tried trained turned unread untold used
    waited wanted watched won worn written
"""
_PRONOUNS = """
    again another anybody anyone anything both each either else elsewhere everybody everyone everything he
    here how it its itself many mine more most much neither nobody none nothing one ones other others ours
    over own rest same somebody someone something such that theirs them themselves then there these they
    this those too what whatever when where which whichever who whoever whom whose why
"""
NOT_NAMES = frozenset(f"{_PARTICIPLES} {_PRONOUNS}".split())
SPEECH = frozenset(("ask", "hear", "listen", "say", "speak", "talk", "tell"))


def long_lived_names(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Yield name, line and kind of everything that outlives a few lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node.lineno, "function"
            case ast.ClassDef():
                yield node.name.lower(), node.lineno, "class"
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                        yield statement.target.id, statement.lineno, "attribute"
            case ast.arg():
                yield node.arg, node.lineno, "parameter"
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.attr, node.lineno, "attribute"
    for scope in ast.walk(tree):
        if isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _long_lived_locals(scope)


def _long_lived_locals(scope: ast.AST) -> Iterator[tuple[str, int, str]]:
    lines = defaultdict[str, list[int]](list)
    assignments = set[str]()
    for node in _walk_scope(scope):
        if isinstance(node, ast.Name):
            lines[node.id].append(node.lineno)
            if isinstance(node.ctx, ast.Store):
                assignments.add(node.id)
    for name in assignments:
        if isinstance(scope, ast.Module) or max(lines[name]) - min(lines[name]) > FEW_LINES:
            yield name, min(lines[name]), "local name"


def _walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without comprehensions: what they bind lives no longer than they do."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            continue
        if isinstance(scope, ast.Module) and isinstance(child, ast.FunctionDef | ast.ClassDef):
            continue
        yield child
        yield from _walk_scope(child)


def name_problems(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each problem.

    >>> list(name_problems("def tell_time(given): ..."))
    [(1, "function tell_time: 'tell' is a verb of speech"), (1, "parameter given: 'given' is no name")]
    """
    for name, line, kind in long_lived_names(ast.parse(source)):
        word = name.strip("_")
        if word in NOT_NAMES:
            yield line, f"{kind} {name}: {word!r} is no name"
        elif kind == "function" and (verb := word.partition("_")[0]) in SPEECH:
            yield line, f"{kind} {name}: {verb!r} is a verb of speech"


def file_problems(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the text of each file name that occurs twice in the product.

    >>> list(file_problems([Path("trainers/a/pairs.py"), Path("sweeps/b/pairs.py"), Path("sweeps/pairs.py")]))
    ['pairs.py names two files: trainers/a, sweeps/b']
    """
    folders = defaultdict[str, list[str]](list)
    for path in paths:
        if not path.stem.startswith("__") and path.parent.as_posix() != "sweeps":
            folders[path.name].append(path.parent.as_posix())
    for name, places in folders.items():
        if len(places) > 1:
            yield f"{name} names {'two' if len(places) == 2 else len(places)} files: {', '.join(places)}"


def main() -> int:
    """Print all problems, and return 1 where there is one."""
    product = [path.relative_to(ROOT) for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    texts = list(file_problems(product))
    for path in sorted(path for folder in CHECKED for path in (ROOT / folder).rglob("*.py")):
        for line, text in sorted(name_problems(path.read_text(encoding="utf-8"))):
            texts.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    print(*texts, sep="\n", end="\n" * bool(texts))
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
