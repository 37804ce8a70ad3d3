"""The interface: what the packages export, and what importing them does not load."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dpgcl_core", "trainers", "dashboards", "sweeps")
_CODE = """
import importlib, sys
package = importlib.import_module({package!r})
for name in {names!r}:
    getattr(package, name)
print(*(name for name in {heavy!r} if name in sys.modules))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_all_is_there_and_listed(package: str) -> None:
    found = importlib.import_module(package)
    assert len(found.__all__) == len(set(found.__all__))
    for name in found.__all__:
        assert getattr(found, name) is not None
        assert name in dir(found)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = found.nothing_of_that_name


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("dpgcl_core", ["ray", "mlflow", "open_clip", "optuna", "peft", "timm", "sklearn"]),
        ("trainers", ["ray", "mlflow", "open_clip", "optuna", "peft", "timm"]),
        ("sweeps", ["ray", "mlflow", "open_clip", "peft", "timm"]),
    ],
)
def test_import_of_every_name_loads_no_service(package: str, heavy: list[str]) -> None:
    names = importlib.import_module(package).__all__
    code = _CODE.format(package=package, names=names, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_import_of_trainers_alone_loads_no_torch() -> None:
    """A name is loaded when it is asked for."""
    code = "import sys, trainers, sweeps; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
