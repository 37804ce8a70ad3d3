"""How many small random mistakes in the privacy code do the tests catch? Kill rate and branch coverage.

    python benchmarks/mutation_sampling.py measure --coverage build/coverage
    python benchmarks/mutation_sampling.py sample --number 200 --mutants build/mutants.json
    python benchmarks/mutation_sampling.py run --mutants build/mutants.json --coverage build/coverage \
        --results build/kills.json

`measure` runs the tests of the core once, with a coverage context for each of them. `sample` draws mutants
with a fixed seed, as many from each area: a swapped comparison or operator, a constant off by one, a dropped
`not`, `return` or `raise`. `run` applies one after the other to a copy of the tree and runs the tests that
execute the mutated line, the fastest first, up to the first failure. A mutant is known by its function and
its source text, so that the same mutants can be run again after files have moved; interrupted, `run` goes on
where it stopped.
"""

from __future__ import annotations

import ast
import hashlib
import json
import keyword
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from dpgcl_core.command_line import Command, run_command
from dpgcl_core.errors import exit_on_bad_input

TESTS = ("tests/dpgcl_core",)
SECONDS_OF_TESTS = 60.0
"""Recorded time of the tests that one mutant is given."""

AREAS: dict[str, tuple[str, ...]] = {
    "mechanism": (
        "dpgcl_core/mechanism/*.py",
        "dpgcl_core/methods/*.py",
        "dpgcl_core/methods/baselines/*.py",
    ),
    "sampling": ("dpgcl_core/sampling/*.py",),
    "clipping": ("dpgcl_core/clipping/*.py",),
    "noise": ("dpgcl_core/noise/*.py",),
    "accounting": ("dpgcl_core/accounting/**/*.py", "dpgcl_core/release/noised_counts.py"),
    "ledger": ("dpgcl_core/ledger/*.py",),
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_NAMES |= {"floor": "ceil", "ceil": "floor", "clamp_min": "clamp_max", "clamp_max": "clamp_min"}
_VARIABLE = re.compile(rf"(?<![.\w'\"])(?!(?:{'|'.join(keyword.kwlist)})\b)[A-Za-z_]\w*")
_SKIPPED = (ast.JoinedStr, ast.Assert, ast.arguments, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One small mistake, found again by everything but `area` and `file`.

    Attributes:
      area: of `AREAS`.
      file: where it was when it was drawn.
      function: its qualified name in the file.
      statement: source of the innermost statement, in the form of `ast.unparse`.
      before, after: source of what is replaced.
      occurrence: of several equal ones in the function, counted from 0.
    """

    area: str
    file: str
    function: str
    statement: str
    before: str
    after: str
    occurrence: int

    @property
    def key(self) -> str:
        """A short name, the same wherever the function lies."""
        return hashlib.sha256("\0".join(map(str, self._place())).encode()).hexdigest()[:12]

    def _place(self) -> tuple[str, str, str, str, int]:
        return self.function, self.statement, self.before, self.after, self.occurrence

    def outline(self) -> tuple[str, ...]:
        """What is left where variables and the class have other names."""
        texts = (self.statement, self.before, self.after)
        return (
            self.function.rpartition(".")[2],
            str(self.occurrence),
            *(_VARIABLE.sub("_", text) for text in texts),
        )


@dataclass(frozen=True)
class Found:
    """A mutant and where it is in a file: (line, column in bytes) of begin and end."""

    mutant: Mutant
    begin: tuple[int, int]
    end: tuple[int, int]
    first_line: int

    def applied(self, source: bytes) -> bytes:
        """Return the source with the mistake in it."""
        lines = source.splitlines(keepends=True)
        begin = sum(map(len, lines[: self.begin[0] - 1])) + self.begin[1]
        end = sum(map(len, lines[: self.end[0] - 1])) + self.end[1]
        return source[:begin] + self.mutant.after.encode() + source[end:]


def mutants_of(file: Path, area: str) -> Iterator[Found]:
    """Yield every mutant of a file's functions."""
    counts: Counter[tuple[str, ...]] = Counter()
    for function, statement, node, after in _changes(ast.parse(file.read_text(encoding="utf-8")), "", None):
        text = ast.unparse(statement)
        place = function, text, ast.unparse(node), after
        mutant = Mutant(
            area=area,
            file=str(file.relative_to(ROOT)),
            function=function,
            statement=text,
            before=place[2],
            after=after,
            occurrence=counts[place],
        )
        counts[place] += 1
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        yield Found(mutant, begin, end, statement.lineno)


def _changes(node: ast.AST, function: str, statement: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """(function, innermost statement, node, what takes its place) of all changes below a node."""
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = f"{function}.{child.name}" if function else child.name
            for each in child.body:
                yield from _of_statement(each, inside, isinstance(child, ast.FunctionDef))
        elif not function and not isinstance(child, _SKIPPED):
            yield from _changes(child, function, statement)
        elif isinstance(child, ast.expr | ast.keyword | ast.comprehension) and not isinstance(
            child, _SKIPPED
        ):
            for after in _replacements(child) if isinstance(child, ast.expr) else ():
                yield function, statement, child, after
            yield from _changes(child, function, statement)


def _of_statement(node: ast.stmt, function: str, runs: bool) -> Iterator[tuple[str, Any, Any, str]]:
    """The changes of one statement of a function, or of a class where `runs` is false."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = f"{function}.{node.name}"
        for each in node.body:
            yield from _of_statement(each, inside, isinstance(node, ast.FunctionDef))
        return
    if not runs or isinstance(node, _SKIPPED) or _is_docstring(node):
        return
    if isinstance(node, ast.Raise | ast.Continue | ast.Break):
        yield function, node, node, "pass"
        return
    shallow = _without_bodies(node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
            for after in _replacements(child):
                yield function, shallow, child, after
            yield from _changes(child, function, shallow)
    for each in _bodies(node):
        if isinstance(each, ast.Return) and each.value is not None:
            yield function, each, each, "pass"
        yield from _of_statement(each, function, True)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _bodies(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements inside a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        yield from getattr(node, name, [])
    for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
        yield from part.body


def _without_bodies(node: ast.stmt) -> ast.stmt:
    """A compound statement's first line, so that changes in its body do not change its text."""
    if not hasattr(node, "body"):
        return node
    copied = type(node)(**{name: getattr(node, name) for name in node._fields if hasattr(node, name)})
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if hasattr(copied, name):
            setattr(copied, name, [ast.Pass()] if name == "body" else [])
    if isinstance(node, ast.Try):
        copied.finalbody = [ast.Pass()]  # type: ignore[attr-defined]
    return ast.copy_location(copied, node)


def _replacements(node: ast.expr) -> Iterator[str]:
    """What may take the place of an expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = _COMPARISONS[type(node.ops[0])]()
        yield _source(ast.Compare(node.left, [other], node.comparators))
    elif isinstance(node, ast.Compare):
        ops = [_COMPARISONS[type(op)]() for op in node.ops]
        yield _source(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield _source(ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _source(ast.BoolOp(other_op, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield _source(node.operand)
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Call):
        name = node.func
        if isinstance(name, ast.Name) and name.id in _NAMES:
            yield _source(ast.Call(ast.Name(_NAMES[name.id]), node.args, node.keywords))
        elif isinstance(name, ast.Attribute) and name.attr in _NAMES:
            other_name = ast.Attribute(name.value, _NAMES[name.attr])
            yield _source(ast.Call(other_name, node.args, node.keywords))


def _other_constants(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, int):
        yield str(value + 1)
    elif isinstance(value, float):
        yield repr(value * 2 if value else 1.0)


def _source(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"


def files_of(area: str) -> list[Path]:
    """Return the files of an area."""
    return sorted(path for pattern in AREAS[area] for path in ROOT.glob(pattern))


def sample(number: int, seed: int) -> list[Mutant]:
    """Return `number` mutants, as many from every area, in an order of which every beginning is a sample."""
    generator = random.Random(seed)
    drawn: dict[str, list[Mutant]] = {}
    for area in AREAS:
        found = [each.mutant for file in files_of(area) for each in mutants_of(file, area)]
        print(f"{area}: {len(found)} possible mutants in {len(files_of(area))} files")
        drawn[area] = generator.sample(found, -(-number // len(AREAS)))
    turns = [mutants[turn] for turn in range(-(-number // len(AREAS))) for mutants in drawn.values()]
    return turns[:number]


def find(mutant: Mutant) -> Found | None:
    """Return where a mutant is now: in its file, or in the first other one of the core that has it.

    Where no function has its text any more, the one is taken that has it with other names of variables.
    """
    places = [ROOT / mutant.file] if (ROOT / mutant.file).is_file() else []
    places += [path for path in sorted((ROOT / "dpgcl_core").rglob("*.py")) if path not in places]
    name = mutant.function.rpartition(".")[2]
    with_name = [path for path in places if f"def {name}(" in path.read_text(encoding="utf-8")]
    now = [found for path in with_name for found in mutants_of(path, mutant.area)]
    same = [found for found in now if found.mutant.key == mutant.key]
    alike = [found for found in now if found.mutant.outline() == mutant.outline()]

    def likeness(found: Found) -> float:
        now, then = (f"{each.function} {each.file} {each.statement}" for each in (found.mutant, mutant))
        return SequenceMatcher(None, now, then).ratio()

    return same[0] if same else max(alike, key=likeness, default=None)


def measure(folder: Path) -> None:
    """Run the tests of the core with branch coverage, and keep what each of them executes."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DPGCL_TEST_SECONDS": str(folder / "seconds.json")}
    options = ["--branch", "--source=dpgcl_core", f"--data-file={folder / 'data'}"]
    tests = ["-p", "benchmarks.mutation_sampling", "-p", "no:xdist", "-q", "-m", "not gpu and not long"]
    command = [sys.executable, "-m", "coverage", "run", *options, "-m", "pytest", *tests, *TESTS]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    print_branch_coverage(folder / "data")


def print_branch_coverage(data: Path) -> None:
    """Print the share of branches taken, of every folder below the core and of all of it."""
    import coverage

    report = data.with_name("report.json")
    measured = coverage.Coverage(data_file=str(data))
    measured.load()
    measured.json_report(outfile=str(report))
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for name, found in json.loads(report.read_text())["files"].items():
        for group in {str(Path(name).parent), "all"}:
            totals[group].update({k: v for k, v in found["summary"].items() if isinstance(v, int)})
    for group, total in sorted(totals.items()):
        branches = total["covered_branches"] / max(1, total["num_branches"])
        lines = total["covered_lines"] / max(1, total["num_statements"])
        print(f"{group:<32} branches {branches:.2%} of {total['num_branches']}, lines {lines:.2%}")


def pytest_runtest_protocol(item: Any) -> None:
    """Begin a coverage context for each test; a hook of pytest."""
    import coverage

    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(item.nodeid)


_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the time of each test that passes; a hook of pytest."""
    _seconds[report.nodeid] += report.duration if report.passed else float("inf")


def pytest_sessionfinish() -> None:
    """Write the times; a hook of pytest."""
    if path := os.environ.get("DPGCL_TEST_SECONDS"):
        passed = {name: time for name, time in _seconds.items() if time < float("inf")}
        Path(path).write_text(json.dumps(passed))


class Executed:
    """Which tests execute a line, from what `measure` kept."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self._data = coverage.CoverageData(str(folder / "data"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        self._files = list(self._data.measured_files())
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, found: Found, file: str) -> list[str]:
        """Return the tests that execute a mutant, the fastest first, as many as it is given time for."""
        if file not in self._lines:
            measured = [path for path in self._files if path.endswith(f"/{file}")]
            self._lines[file] = self._data.contexts_by_lineno(measured[0]) if measured else {}
        lines = {found.first_line, *range(found.begin[0], found.end[0] + 1)}
        names = {name for line in lines for name in self._lines[file].get(line, []) if name in self._seconds}
        chosen: list[str] = []
        spent = 0.0
        for name in sorted(names, key=lambda name: (self._seconds[name], name)):
            spent += self._seconds[name]
            if chosen and spent > SECONDS_OF_TESTS:
                break
            chosen.append(name)
        return chosen


def run(mutants: list[Mutant], executed: Executed, results: Path, limit: int | None) -> None:
    """Run the mutants that `results` lacks, and write it after each."""
    from tests.mutants.running import copy_tree, preload

    known: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
    preload()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / "copy"
        copy_tree(copy)
        todo = [mutant for mutant in mutants if mutant.key not in known]
        for mutant in todo[:limit]:
            verdict, seconds, num_tests = _verdict(mutant, executed, copy)
            known[mutant.key] = asdict(mutant) | {"verdict": verdict, "num_tests": num_tests}
            results.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
            print(f"{verdict:<12} {seconds:6.1f} s  {mutant.file} {mutant.function}", flush=True)
    print_kills(known)


def _verdict(mutant: Mutant, executed: Executed, copy: Path) -> tuple[str, float, int]:
    from tests.mutants.running import run_tests

    found = find(mutant)
    if found is None:
        return "gone", 0.0, 0
    file = copy / found.mutant.file
    tests = executed.tests(found, found.mutant.file)
    if not tests:
        return "not executed", 0.0, 0
    right = (ROOT / found.mutant.file).read_bytes()
    file.write_bytes(found.applied(right))
    try:
        code, seconds, _ = run_tests(tests, copy)
    finally:
        file.write_bytes(right)
    # Where the mistake keeps pytest from importing the tests, it is caught as well.
    verdict = {0: "survived", 1: "killed", 2: "killed", 3: "killed"}.get(code, f"exit code {code}")
    return verdict, seconds, len(tests)


def print_kills(results: dict[str, Any]) -> None:
    """Print the kill rate of every area; what no test executes has survived."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results.values():
        for area in (result["area"], "all"):
            counts[area][result["verdict"]] += 1
    for area, count in counts.items():
        run_at_all = sum(count.values()) - count["gone"]
        print(f"{area:<12} {count['killed']} of {run_at_all} killed; {dict(count)}")


def measure_command(*, coverage: Path) -> None:
    """Run the tests of the core once.

    Args:
      coverage: file of which test executes which line.
    """
    measure(coverage)


def sample_command(*, mutants: Path, number: int = 200, seed: int = 13) -> None:
    """Draw mutants, as many from each area.

    Args:
      mutants: file to write them to.
      number: of all areas together.
      seed: of the drawing.
    """
    drawn = [asdict(mutant) for mutant in sample(number, seed)]
    mutants.write_text(json.dumps(drawn, indent=1, ensure_ascii=False) + "\n")


def kill_command(*, mutants: Path, results: Path, coverage: Path, limit: int | None = None) -> None:
    """Run the tests against the mutants, and print how many they kill.

    Args:
      mutants: file of the mutants.
      results: file of the verdicts; those it has are kept.
      coverage: file of which test executes which line.
      limit: run so many mutants and stop.
    """
    known = [Mutant(**each) for each in json.loads(mutants.read_text())]
    run(known, Executed(coverage), results, limit)


def main() -> int:
    """Run one command."""
    commands: dict[str, Command] = {"measure": measure_command, "sample": sample_command, "run": kill_command}
    run_command(commands, prog="python benchmarks/mutation_sampling.py", description=__doc__)
    return 0


if __name__ == "__main__":
    exit_on_bad_input(main)
