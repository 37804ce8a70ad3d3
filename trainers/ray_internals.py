"""The private parts of Ray that are read or replaced; checked with Ray 2.60.

Everything else in this project uses Ray's public interface. `pyproject.toml` bounds Ray by the version that
these parts were checked for, and `tests/trainers/test_ray_internals.py` fails if one of them is gone or
behaves differently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.train.torch.config import _set_torch_distributed_env_vars as set_torch_distributed_env_vars
from ray.train.torch.config import _setup_torch_process_group as setup_torch_process_group
from ray.train.torch.config import _TorchBackend as TorchBackend

__all__ = ["TorchBackend", "set_torch_distributed_env_vars", "setup_torch_process_group"]

# Environment of a Ray that this program starts for itself. With the first variable, Ray assumes that the
# machine is not part of a cluster, and binds its servers to 127.0.0.1. The others turn off `/metrics`, whose
# readers need no token (an invalid port keeps a server from starting).
_LOOPBACK_VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}


@contextmanager
def loopback_only() -> Iterator[None]:
    """Let a Ray that is started in this context bind to the loopback address and serve no metrics."""
    from ray._private import ray_constants

    constants: Any = ray_constants
    before = {name: os.environ.get(name) for name in _LOOPBACK_VARIABLES}
    enabled = constants.ENABLE_RAY_CLUSTER  # set when Ray was imported, perhaps by the user's own code
    os.environ.update(_LOOPBACK_VARIABLES)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def logs_folder() -> str:
    """Return the folder on this machine in which the connected Ray keeps its logs."""
    from ray._private import worker

    internal: Any = worker
    return str(internal.global_worker.node.get_logs_dir_path())


@contextmanager
def tune_state_in(folder: Path) -> Iterator[None]:
    """Have Tune keep its state in `folder`; by default it uses Ray's folder, which a whole cluster can read.

    Tune has no option for the folder, so Ray's function that returns its path is replaced in this context.
    """
    from ray.train._internal import storage

    internal: Any = storage
    before = internal._get_ray_train_session_dir
    internal._get_ray_train_session_dir = lambda: str(folder)
    try:
        yield
    finally:
        internal._get_ray_train_session_dir = before


def trial_actor(trial: Any) -> Any:
    """Return the actor that runs one of Tune's trials; None while there is none."""
    return trial.temporary_state.ray_actor


def cluster_status() -> Any:
    """Return the `ClusterState` message of Ray's autoscaler v2; None without this autoscaler."""
    import ray
    from ray import _raylet
    from ray.core.generated import autoscaler_pb2

    context: Any = ray.get_runtime_context()
    core: Any = _raylet
    messages: Any = autoscaler_pb2
    reply = core.GcsClient(address=context.gcs_address).get_cluster_status(timeout_s=10)
    state = messages.GetClusterStatusReply.FromString(reply).autoscaling_state
    return state if state.autoscaler_state_version else None


def first_autoscaler_report() -> Mapping[str, Any]:
    """Return the report of Ray's autoscaler v1; an empty mapping without this autoscaler."""
    from ray.experimental.internal_kv import _internal_kv_get

    status: Any = _internal_kv_get("__autoscaling_status")
    return (json.loads(status).get("autoscaler_report") or {}) if status else {}
