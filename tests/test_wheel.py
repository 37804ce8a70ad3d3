"""The wheel without an extra: the library beside torch, in an environment that has nothing else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.mutants.running import copy_tree

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVICE = 'pip install "dpgcl[service]"'
OPTIONAL = {"opacus", "triton", "obstore", "boto3"}
"""What the library imports in single functions that need an extra, or a GPU, whose torch brings it."""
_MODULES = {"dp-accounting": "dp_accounting"}


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def test_library_needs_torch_and_at_most_six_more() -> None:
    """PyTorch itself installs mpmath."""
    assert len(_names(PROJECT["dependencies"]) - {"torch", "mpmath"}) <= 6


def test_every_package_that_the_library_imports_is_declared_and_no_other() -> None:
    found = {
        module.split(".")[0]
        for file in (ROOT / "dpgcl_core").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for module in _imported(node)
    }
    own = {"dpgcl_core", *sys.stdlib_module_names}
    declared = {_MODULES.get(name, name) for name in _names(PROJECT["dependencies"])}
    assert found - own - OPTIONAL == declared


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_service_and_tests_declare_what_the_project_is_built_on() -> None:
    extras = PROJECT["optional-dependencies"]
    expected = {"ray", "opacus", "open-clip-torch", "peft", "optuna", "mlflow", "pandas"}
    assert expected <= _names(extras["service"])
    assert "pytest" in _names(extras["dev"])
    (ray,) = (Requirement(each) for each in extras["service"] if each.startswith("ray["))
    assert {"train", "tune"} <= ray.extras


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what the wheel requires, nothing else."""
    top = tmp_path_factory.mktemp("wheel")
    source, wheels, libraries = top / "source", top / "wheels", top / "libraries"
    copy_tree(source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--quiet", "--wheel-dir", wheels, source], check=True, cwd=top)
    (wheel,) = wheels.glob("*.whl")
    venv.create(top / "venv", with_pip=False)
    python = top / "venv" / "bin" / "python"
    (site,) = (top / "venv" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", site, wheel], check=True, cwd=top)
    libraries.mkdir()
    (installed,) = site.glob("dpgcl-*.dist-info")
    for each in _required(PathDistribution(installed), set()):
        for name in {
            file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            target = Path(str(each.locate_file(name)))
            if not (libraries / name).exists():
                (libraries / name).symlink_to(target)
    (site / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    return python


def _required(of: Distribution, known: set[str]) -> Iterator[Distribution]:
    """Yield the distributions that one requires without an extra, and what they require."""
    for text in of.requires or ():
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in known or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        known.add(name)
        yield distribution(name)
        yield from _required(distribution(name), known)


def _run(python: Path, *arguments: str, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, *arguments], cwd=python.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.ci
def test_every_name_of_the_library_is_there_without_a_service(python: Path) -> None:
    said = _run(
        python,
        "-c",
        "import dpgcl_core, importlib.util as u\n"
        "assert all(getattr(dpgcl_core, name) is not None for name in dpgcl_core.__all__)\n"
        "print(dpgcl_core.__file__, [u.find_spec(name) for name in ('ray', 'mlflow', 'opacus', 'pandas')])",
    )
    assert str(python.parents[1]) in said
    assert "[None, None, None, None]" in said


@pytest.mark.ci
def test_calculator_answers_without_a_service(python: Path) -> None:
    options = ("--sampling-prob", "0.034", "--noise-multiplier", "1.94", "--delta", "1.5e-6")
    calculator = ("-m", "dpgcl_core.calculator", "epsilon", "--num-steps", "1200", *options)
    assert json.loads(_run(python, *calculator, "--json"))["epsilon"] == pytest.approx(3.0528, abs=1e-3)
    assert SERVICE in _run(python, *calculator, "--accountant", "prv", code=2)


@pytest.mark.ci
@pytest.mark.parametrize("example", ["own_loop.py", "accounting.py"])
def test_examples_of_the_library_run_without_a_service(python: Path, example: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / example).read_text(encoding="utf-8")
    script = tmp_path / example
    script.write_text(text.replace("num_steps=50", "num_steps=2"), encoding="utf-8")
    assert re.search(r"ε = \d+\.\d+", _run(python, str(script)))


_CHARGE = """
import sys
from dpgcl_core import Ledger
from dpgcl_core.ledger.account import PlannedTraining, StepClass
ledger = Ledger.open(sys.argv[1])
steps = StepClass(sampling_prob=0.01, noise_multiplier=2.0)
(reservation,) = ledger.reserve("scans", [PlannedTraining(step_class=steps, num_steps=10, label="own loop")])
ledger.settle(reservation, 2)
"""


@pytest.mark.ci
def test_ledger_is_made_charged_and_verified_without_a_service(python: Path, tmp_path: Path) -> None:
    ledger, command = str(tmp_path / "ledger.db"), ("-m", "dpgcl_core.ledger")
    cap = ("--dataset", "scans", "--epsilon", "8", "--delta", "1e-6", "--num-records-public", "60000")
    _run(python, *command, "cap", "--ledger", ledger, "--create", *cap)
    _run(python, "-c", _CHARGE, ledger)
    assert "0 open, 1 settled" in _run(python, *command, "show", "--ledger", ledger)
    assert "4 rows" in _run(python, *command, "verify", "--ledger", ledger)


@pytest.mark.ci
@pytest.mark.parametrize("package", ["trainers", "trainers.training.loop", "sweeps", "dashboards"])
def test_part_of_the_service_names_the_extra_that_it_needs(python: Path, package: str) -> None:
    said = _run(python, "-c", f"import {package}", code=1)
    assert said.splitlines()[-1].startswith("dpgcl_core.errors.ExtraMissing: ")
    assert SERVICE in said.splitlines()[-1]
