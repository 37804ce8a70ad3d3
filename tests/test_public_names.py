"""The interface: what the packages export, and what importing them does not load."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dpgcl_core", "trainers", "dashboards", "sweeps")
_NAMES = {
    "dpgcl_core": ["ray", "mlflow", "open_clip", "optuna", "peft", "timm", "sklearn"],
    "trainers": ["ray", "mlflow", "open_clip", "optuna", "peft", "timm", "torchvision"],
    "sweeps": ["ray", "mlflow", "open_clip", "peft", "timm"],
}
"""What each package is free of: in this order, for the later ones load the earlier ones."""
_ALSO = {"trainers": ["trainers.models.encoder", "trainers.models.clip.clip_files", "trainers.tracking.runs"]}
"""Modules behind no exported name that are free of it, too."""
_CODE = """
import importlib, json, os, sys
found = {{}}
for package, heavy in {heavy!r}.items():
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
    for name in {also!r}.get(package, ()):
        importlib.import_module(name)
    found[package] = [name for name in heavy if name in sys.modules]
print(json.dumps([found, os.environ["MLFLOW_DISABLE_TELEMETRY"]]))
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


@pytest.mark.ci
def test_import_of_every_name_loads_no_service() -> None:
    """One interpreter for all packages. It writes no line of its own, and leaves MLflow's telemetry off."""
    code = _CODE.format(heavy=_NAMES, also=_ALSO)
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_DISABLE_TELEMETRY"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [{package: [] for package in _NAMES}, "true"]


def test_import_of_trainers_alone_loads_no_torch() -> None:
    """A name is loaded when it is asked for."""
    code = "import sys, trainers, sweeps; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
