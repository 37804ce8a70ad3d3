"""`--help` is a page, and no program loads torch, Ray, MLflow, pandas or SciPy to show it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "mlflow", "pandas", "scipy")
SCRIPTS = sorted(f"sweeps/{path.name}" for path in (ROOT / "sweeps").glob("[a-z]*.py"))
MODULES = (
    "dashboards",
    "dpgcl_core.calculator",
    "dpgcl_core.ledger",
    "sweeps.doctor",
    "sweeps.settle",
    "trainers.caption",
    "trainers.classify",
    "trainers.embed",
    "trainers.export",
)
_CODE = """
import contextlib, io, runpy, sys
heavy, programs = {heavy!r}, {programs!r}
path = list(sys.path)
for program in programs:
    sys.argv, sys.path[:], page = [program, "--help"], path, io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert "--help" in page.getvalue(), program
    loaded = [name for name in heavy if name in sys.modules]
    assert not loaded, f"{{program}} --help loads {{', '.join(loaded)}}"
"""
"""One interpreter for many programs: the first that loads something heavy is named."""
_BLOCKED = """
import runpy, sys
from importlib.machinery import ModuleSpec
class Blocked:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name in {heavy!r} else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise SystemExit(f"imports {{module.__name__}}")
sys.meta_path.insert(0, Blocked())
sys.argv = [{script!r}, *{options!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("programs", [SCRIPTS, MODULES], ids=["scripts", "modules"])
def test_help_loads_nothing_heavy(programs: tuple[str, ...]) -> None:
    done = run_code(_CODE.format(heavy=HEAVY, programs=tuple(programs)))
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_sweep_speaks_before_anything_heavy_is_loaded() -> None:
    """The first line comes while torch is still to be imported; `--quiet` leaves it out."""
    for options, expected in ((("--dry-run",), "group size: loading …\n"), (("--quiet",), "")):
        code = _BLOCKED.format(heavy=HEAVY, script="sweeps/group_size.py", options=options)
        done = run_code(code)
        assert done.stdout == expected
        assert done.stderr.startswith("imports "), done.stderr


def test_planner_prints_json_alone() -> None:
    """A line before the JSON object would be no JSON."""
    code = _BLOCKED.format(heavy=HEAVY, script="sweeps/plan.py", options=("--json",))
    assert run_code(code).stdout == ""
