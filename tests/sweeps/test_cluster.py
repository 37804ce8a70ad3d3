"""The launcher file as Ray's own validator sees it, and the scripts as a shell and Python see them."""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = yaml.safe_load((REPOSITORY / "ray_cluster.yaml").read_text())
IN_SWEEPS = sorted(
    p.stem
    for p in (REPOSITORY / "sweeps").iterdir()
    if (p.is_dir() or p.suffix == ".py") and not p.stem.startswith("__")
)
SCRIPTS = sorted(p for p in (REPOSITORY / "sweeps").glob("*.py") if p.name != "__init__.py")
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def _changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns the launcher file's content with one value replaced or added."""
    config = copy.deepcopy(LAUNCHER)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


def test_launcher_passes_rays_own_validator():
    validate_config(prepare_config(copy.deepcopy(LAUNCHER)))


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("max_wrokers",), 4, ValidationError),
        (("available_node_types", "worker", "max_wrokers"), 4, ValidationError),
        (("max_workers",), "four", ValidationError),
        (("head_node_type",), "no_such_type", ValueError),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_launcher_with_a_mistake_is_refused(path, value, error):
    with pytest.raises(error):
        validate_config(prepare_config(_changed(path, value)))


def test_launcher_installs_the_tested_versions():
    mounted = [path for path, source in LAUNCHER["file_mounts"].items() if source == "."]
    installs = [c for c in LAUNCHER["setup_commands"] if "pip install" in c]
    assert installs == [
        f"$HOME/venv/bin/pip install -c {folder}/constraints.txt -e {folder}"
        for folder in (path.replace("/home/ubuntu", "$HOME") for path in mounted)
    ]
    assert (REPOSITORY / "constraints.txt").is_file()


@pytest.mark.parametrize("pattern", ["/results/**", "**/.venv/**", "**/.git/**"])
def test_launcher_does_not_mount_what_stays_here(pattern):
    assert pattern in LAUNCHER["rsync_exclude"]


def test_launcher_does_not_mount_what_git_ignores():
    assert ".gitignore" in LAUNCHER["rsync_filter"]
    assert {"*.db", ".venv/"} <= set((REPOSITORY / ".gitignore").read_text().splitlines())


def test_launcher_starts_ray_where_the_bare_submission_finds_the_script():
    starts = [c for c in LAUNCHER["head_start_ray_commands"] if "ray start" in c]
    assert [c.startswith("cd $HOME/dpgcl && PATH=$HOME/venv/bin:$PATH ") for c in starts] == [True]


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_launcher_sends_no_usage_statistics(commands):
    starts = [c for c in LAUNCHER[commands] if "ray start" in c]
    assert starts
    assert all("RAY_USAGE_STATS_ENABLED=0" in c for c in starts)


def test_there_is_a_script_to_check():
    assert REPOSITORY / "sweeps/group_size.py" in SCRIPTS


@each_script
def test_script_can_be_run_by_its_path(script):
    assert script.read_text().startswith("#!/usr/bin/env python\n")
    assert os.access(script, os.X_OK)


@each_script
def test_script_keeps_its_run_bit_in_a_clone(script):
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "--", str(script)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if not listed.stdout:
        pytest.skip("not in git's index yet")
    assert listed.stdout.startswith("100755 ")


@each_script
def test_script_says_how_it_is_launched(script):
    docstring = ast.get_docstring(ast.parse(script.read_text()))
    assert f"    python sweeps/{script.name}" in docstring
    assert f"    ray job submit --working-dir . -- python sweeps/{script.name}" in docstring


@each_script
def test_script_is_at_most_80_lines(script):
    assert len(script.read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", IN_SWEEPS)
def test_nothing_in_sweeps_shadows_a_module(name, monkeypatch):
    """`python sweeps/X.py` puts sweeps/ first on the path until the script's first lines replace it."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p or ".").resolve().name != "sweeps"])
    assert importlib.util.find_spec(name) is None
