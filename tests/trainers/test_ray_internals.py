"""Ray's private parts are there, and do what this project needs of them."""

from __future__ import annotations

import inspect
import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers import ray_internals


def test_ray_is_the_version_that_the_private_parts_were_checked_for() -> None:
    assert (
        str(ray_internals.__doc__)
        .partition("checked with Ray ")[2]
        .startswith(".".join(version("ray").split(".")[:2]) + ".")
    )


def test_a_ray_of_this_machine_alone_is_no_part_of_a_cluster() -> None:
    """Ray binds its servers to 127.0.0.1 where this constant is false, and to all interfaces else."""
    from ray._private import ray_constants, services

    internal: Any = ray_constants
    before = internal.ENABLE_RAY_CLUSTER, dict(os.environ)
    with ray_internals.loopback_only():
        assert internal.ENABLE_RAY_CLUSTER is False
        assert os.environ["AUTOSCALER_METRIC_PORT"] == "-1"
    assert before == (internal.ENABLE_RAY_CLUSTER, dict(os.environ))
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services), "Ray does not ask it any more"


def test_tune_keeps_its_state_where_it_is_told(tmp_path: Path) -> None:
    from ray.train._internal.storage import StorageContext

    def driver_folder() -> str:
        context = StorageContext(storage_path=str(tmp_path / "results"), experiment_dir_name="tune")
        return str(context.experiment_driver_staging_path)

    with ray_internals.tune_state_in(tmp_path / "state"):
        assert driver_folder().startswith(str(tmp_path / "state"))
    with pytest.raises(AssertionError, match="Ray"):  # its own folder, of a Ray that is not connected
        driver_folder()


def test_tunes_trials_name_their_actor() -> None:
    from ray.tune.experiment.trial import Trial

    assert ray_internals.trial_actor(Trial("x", stub=True)) is None
    assert ray_internals.trial_actor(SimpleNamespace(temporary_state=SimpleNamespace(ray_actor="it"))) == "it"


def test_workers_of_a_group_are_joined_by_rays_own_functions() -> None:
    group = inspect.signature(ray_internals.setup_torch_process_group).parameters
    assert {"backend", "world_rank", "world_size", "init_method", "timeout_s"} <= group.keys()
    assert not inspect.signature(ray_internals.set_torch_distributed_env_vars).parameters
    assert {"worker_group", "backend_config"} <= inspect.signature(
        ray_internals.TorchBackend.on_start
    ).parameters.keys()


def test_autoscalers_messages_have_what_is_read_of_them() -> None:
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2
    state = messages.GetClusterStatusReply().autoscaling_state
    names = {field.name for field in state.DESCRIPTOR.fields}
    assert names >= {
        *("autoscaler_state_version", "infeasible_gang_resource_requests"),
        *("pending_instance_requests", "pending_instances", "failed_instance_requests"),
    }


@pytest.mark.ci
@pytest.mark.ray
def test_connected_ray_tells_of_its_logs_and_autoscaler() -> None:
    from sweeps.service.cluster.ray_session import connected_ray

    with connected_ray():
        assert list(Path(ray_internals.logs_folder()).glob("raylet*"))
        assert ray_internals.cluster_status() is None, "a private Ray has none of the second version"
        report = ray_internals.first_autoscaler_report()  # empty until Ray's monitor has written one
        assert not report or {"pending_nodes", "pending_launches", "failed_nodes"} <= report.keys()


@pytest.mark.ci
@pytest.mark.ray
def test_private_ray_leaves_no_token_to_the_process() -> None:
    """Its token would hide that of a cluster that the process joins afterwards."""
    from sweeps.service.cluster.ray_session import connected_ray

    with connected_ray():
        assert os.environ["RAY_AUTH_TOKEN"]
    assert not [name for name in os.environ if name.startswith("RAY_AUTH")]
    with connected_ray():  # a second one starts
        assert list(Path(ray_internals.logs_folder()).glob("raylet*"))
