"""The commands and code blocks that the documentation shows, as data for the tests beside this file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(python (?:-m|sweeps/|benchmarks/)[^`]+)`")


@dataclass(frozen=True)
class Command:
    """One command that a page shows.

    Attributes:
      page: file of the repository.
      program: `sweeps/group_size.py`, or the module of `python -m`.
      arguments: what follows the program.
    """

    page: str
    program: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.program} {' '.join(self.arguments)}"


def pages() -> list[Path]:
    """Return every Markdown page that a reader is shown."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    return [*top, ROOT / "benchmarks/results/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the page's fenced code blocks of one language."""
    return [body for kind, body in _BLOCK.findall(page.read_text()) if kind == language]


def commands() -> list[Command]:
    """Return every command of the project that any page shows, in blocks and in sentences."""
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        text = page.read_text()
        lines = [line for block in blocks(page, "sh") for line in _lines(block)]
        for line in [*lines, *_INLINE.findall(text)]:
            found += [Command(name, *parts) for parts in programs(line)]
    return found


def _lines(block: str) -> Iterator[str]:
    """Yield the lines of a shell block, continued ones joined."""
    yield from re.sub(r"\\\n\s*", " ", block).splitlines()


def programs(line: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the programs of this project that a shell line starts, with their arguments.

    >>> list(programs('ray job submit --working-dir . -- python sweeps/search.py --num-trials 3  # three'))
    [('sweeps/search.py', ('--num-trials', '3'))]
    >>> list(programs('make sweep OPTIONS="--resume"'))
    [('sweeps/group_size.py', ('--resume',))]
    >>> list(programs('for s in 0 1; do python -m benchmarks.audit.training_step --seed $s; done'))
    [('benchmarks.audit.training_step', ('--seed', '0'))]
    >>> list(programs('python sweeps/tan.py --tiny && echo done'))
    [('sweeps/tan.py', ('--tiny',))]
    """
    line = re.sub(r"\$(s|split)\b", "0", line)  # the loops of the pages
    if line.startswith("make sweep OPTIONS="):
        words = shlex.split(line, comments=True)
        yield "sweeps/group_size.py", tuple(shlex.split(words[2].removeprefix("OPTIONS=")))
        return
    for part in re.split(";|&&", line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:  # a string that runs over several lines: no command of ours
            continue
        for at, word in enumerate(words):
            if re.fullmatch(r"(sweeps|benchmarks)/\w+\.py", word):
                yield word, tuple(words[at + 1 :])
                break
            if word == "-m" and at and words[at - 1].endswith("python") and at + 1 < len(words):
                yield words[at + 1], tuple(words[at + 2 :])
                break
