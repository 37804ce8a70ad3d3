"""The launcher file as Ray's own validator sees it, and the scripts as a shell and Python see them."""

from __future__ import annotations

import ast
import copy
import gzip
import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator, ValidationError
from ray.autoscaler._private.kuberay import autoscaling_config as of_kuberay
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.sweeps.support import options

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()
LAUNCHER = yaml.safe_load((REPOSITORY / "ray_cluster.yaml").read_text())
ON_PREMISE = yaml.safe_load((REPOSITORY / "clusters/on_premise.yaml").read_text())
LAUNCHERS = {"AWS": LAUNCHER, "on premise": ON_PREMISE}
MANIFESTS = list(yaml.safe_load_all((REPOSITORY / "clusters/kuberay_rayjob.yaml").read_text()))
each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
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


@each_launcher
def test_launcher_passes_rays_own_validator(launcher):
    validate_config(prepare_config(copy.deepcopy(launcher)))


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


@each_launcher
def test_launcher_installs_the_tested_versions(launcher):
    (folder,) = [Path(path).name for path, source in launcher["file_mounts"].items() if source == "."]
    pip = f"$HOME/venv/bin/pip install -c $HOME/{folder}/constraints.txt -e"
    assert [c for c in launcher["setup_commands"] if "pip install" in c] == [
        f'{pip} "$HOME/{folder}[service]"'
    ]
    (of_head,) = launcher["head_setup_commands"]
    assert of_head.startswith(f'{pip} "$HOME/{folder}[service,postgres,s3]"'), "the driver's extras"


@each_launcher
def test_launcher_states_the_python_that_the_constraints_are_for(launcher):
    made = [c for c in launcher["setup_commands"] if "-m venv" in c]
    minor = f"python3.{sys.version_info.minor}"
    assert [f"|| {minor} -m venv $HOME/venv" in c for c in made] == [True]


@each_launcher
def test_launcher_mounts_one_folder_on_all_nodes_and_keeps_results_there(launcher):
    """In the commands of every node, before Ray is started; and with locks of the whole cluster."""
    (mount,) = [c for c in launcher["setup_commands"] if "sudo mount" in c]
    assert mount.startswith("mountpoint -q /mnt/dpgcl || ")
    assert "nfsvers=4.1" in mount
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        (start,) = [c for c in launcher[commands] if "ray start" in c]
        assert "DPGCL_STORAGE=/mnt/dpgcl/results " in start


@each_launcher
def test_launcher_gives_the_addresses_of_services_to_the_driver_alone(launcher):
    home = next(path for path, source in launcher["file_mounts"].items() if source == ".").rpartition("/")[0]
    assert launcher["file_mounts"][f"{home}/services.env"] == "~/.config/dpgcl/services.env"
    (head,) = [c for c in launcher["head_start_ray_commands"] if "ray start" in c]
    (worker,) = [c for c in launcher["worker_start_ray_commands"] if "ray start" in c]
    assert "set -a && . $HOME/services.env && set +a && " in head
    assert "services.env" not in worker


def test_image_that_ray_takes_by_itself_is_too_old_for_torch():
    """Once this fails, `latest_dlami` may do, and the launcher need not name an image."""
    pytest.importorskip("boto3")
    from ray.autoscaler._private.aws.config import DEFAULT_AMI, DEFAULT_AMI_NAME

    assert "Ubuntu 18.04" in DEFAULT_AMI_NAME  # glibc 2.27
    text = (REPOSITORY / "ray_cluster.yaml").read_text()
    assert f"in us-west-2 {DEFAULT_AMI['us-west-2']}" in text, "named as the pinned Ray resolves it"
    (wheel,) = [file for file in distribution("torch").files or () if file.name == "WHEEL"]
    oldest = re.findall(r"manylinux_2_(\d+)_", wheel.read_text())
    assert not oldest or min(map(int, oldest)) > 27
    images = [kind["node_config"]["ImageId"] for kind in LAUNCHER["available_node_types"].values()]
    assert [image.startswith("resolve:ssm:/aws/service/deeplearning/ami/") for image in images] == [True] * 2


# KubeRay


def _job():
    (job,) = [each for each in MANIFESTS if each["kind"] == "RayJob"]
    return job


def test_kuberays_cluster_passes_rays_own_reading_of_it():
    """As the autoscaler of the pinned Ray reads it."""
    cluster = {
        "metadata": {"name": "dpgcl", "namespace": "default"},
        "spec": _job()["spec"]["rayClusterSpec"],
    }
    config = of_kuberay._derive_autoscaling_config_from_ray_cr(cluster)
    validate_config(config)
    kinds = {name: kind["resources"] for name, kind in config["available_node_types"].items()}
    assert kinds["headgroup"]["CPU"] == 0, "no training runs beside the driver's services"
    assert (kinds["gpu"]["CPU"], kinds["gpu"]["GPU"]) == (4, 1)
    assert config["available_node_types"]["gpu"]["max_workers"] == config["max_workers"] == 4
    assert config["idle_timeout_minutes"] == 10


def _closed(schema):
    """Returns KubeRay's schema with unknown names refused, which Kubernetes drops."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {}
    closed = {name: _closed(value) for name, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def test_kuberays_job_fits_the_published_schema_and_a_mistake_does_not():
    with gzip.open(Path(__file__).parent / "kuberay/ray.io_rayjobs.yaml.gz") as file:
        published = yaml.load(file, Loader=yaml.CSafeLoader)
    (version,) = [each for each in published["spec"]["versions"] if each["name"] == "v1"]
    schema = _closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    known = Draft7Validator(schema)
    assert [error.message for error in known.iter_errors(_job())] == []
    for path in (("spec", "rayClusterSpec", "workerGroupSpecs", 0), ("spec",)):
        broken = place = copy.deepcopy(_job())
        for key in path:
            place = place[key]
        place["minReplica"] = 0
        assert len(list(known.iter_errors(broken))) == 1


def test_kuberays_versions_are_the_tested_ones():
    (version,) = re.findall(r"^ray(?:\[\S+\])?==(\S+)", CONSTRAINTS, re.MULTILINE)
    assert _job()["spec"]["rayClusterSpec"]["rayVersion"] == version
    dockerfile = (REPOSITORY / "clusters/Dockerfile").read_text()
    assert f"FROM rayproject/ray:{version}-py3{sys.version_info.minor}-gpu\n" in dockerfile


def test_kuberays_pods_share_results_and_only_the_head_knows_the_services():
    spec = _job()["spec"]["rayClusterSpec"]
    pods = [each["template"]["spec"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    (claim,) = [each for each in MANIFESTS if each["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods:
        (volume,), (container,) = pod["volumes"], pod["containers"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (mount,) = container["volumeMounts"]
        assert {"name": "DPGCL_STORAGE", "value": mount["mountPath"]} in container["env"]
    assert ["envFrom" in pod["containers"][0] for pod in pods] == [True, False]


def test_kuberay_repeats_no_sweep_by_itself():
    """An attempt that Kubernetes repeats would draw again what was charged once."""
    assert _job()["spec"]["backoffLimit"] == 0


def test_kuberays_sweep_is_understood(monkeypatch):
    words = _job()["spec"]["entrypoint"].split()
    assert words[:2] == ["python", "sweeps/group_size.py"]
    assert options(*words[2:]).service.gpus_per_worker == 1


@each_launcher
@pytest.mark.parametrize("pattern", ["/results/**", "**/.venv/**", "**/.git/**"])
def test_launcher_does_not_mount_what_stays_here(pattern, launcher):
    assert pattern in launcher["rsync_exclude"]


@each_launcher
def test_launcher_does_not_mount_what_git_ignores(launcher):
    assert ".gitignore" in launcher["rsync_filter"]
    assert {"*.db", ".venv/"} <= set((REPOSITORY / ".gitignore").read_text().splitlines())


@each_launcher
def test_launcher_starts_ray_where_the_bare_submission_finds_the_script(launcher):
    starts = [c for c in launcher["head_start_ray_commands"] if "ray start" in c]
    found = [c.startswith("cd $HOME/dpgcl && ") and " PATH=$HOME/venv/bin:$PATH " in c for c in starts]
    assert found == [True]


@each_launcher
@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_launcher_sends_no_usage_statistics(commands, launcher):
    starts = [c for c in launcher[commands] if "ray start" in c]
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
