"""A private Ray: what it listens on, where two workers meet, and what is left when it does not start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from dpgcl_core.errors import ClusterError
from sweeps.service.cluster import ray_session as connecting
from sweeps.service.cluster.ray_session import ray_session
from sweeps.service.options.service import ServiceOptions
from trainers.config.training import PerformanceConfig
from trainers.ray_worker import FileStoreConfig, _make_store_path

_TREE = """
import json, os, sys
from pathlib import Path
import ray  # before the session: what Ray reads at its import must not matter
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sweeps.service.options.service import ServiceOptions
from sweeps.service.cluster.ray_session import ray_session
from trainers.config.training import PerformanceConfig
from trainers.ray_worker import FileStoreConfig

def listening(config):
    import psutil, torch
    import torch.distributed as dist
    one = torch.ones(1)
    dist.all_reduce(one)
    found = []
    if dist.get_rank() == 0:
        driver = psutil.Process(config["driver"])
        for process in (driver, *driver.children(recursive=True)):
            try:
                found += [
                    [each.laddr.ip, each.laddr.port, " ".join(process.cmdline())[:60]]
                    for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN
                ]
            except psutil.Error:
                pass
        place = dist.distributed_c10d._get_default_store()
        while hasattr(place, "underlying_store"):
            place = place.underlying_store
        folders = Path(config["scratch"]).glob("dpgcl-workers-*")
        modes = [oct(folder.stat().st_mode & 0o777) for folder in folders]
        found = {"sum": one.item(), "sockets": found, "store": type(place).__name__, "modes": modes}
        with open(config["to"], "w") as out:
            json.dump(found, out)
    dist.barrier()

with ray_session(ServiceOptions(), PerformanceConfig()) as session:
    TorchTrainer(
        listening,
        train_loop_config={"driver": os.getpid(), "to": sys.argv[1], "scratch": str(session.scratch)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        torch_config=FileStoreConfig(folder=str(session.scratch)),
        run_config=RunConfig(name="ports", storage_path=str(session.scratch / "train")),
    ).fit()
"""


@pytest.mark.ci
def test_private_ray_and_its_workers_listen_on_loopback_alone_and_meet_in_a_file(tmp_path: Path) -> None:
    script, told = tmp_path / "tree.py", tmp_path / "told.json"
    script.write_text(_TREE)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(told)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(told.read_text())
    assert found["sum"] == 2
    assert found["store"] == "FileStore"
    assert found["modes"] == ["0o700"]
    assert len(found["sockets"]) > 5
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    assert [socket for socket in found["sockets"] if socket[0] not in loopback] == []
    assert not {44217, 44227} & {port for _, port, _ in found["sockets"]}, "metrics are served"


def test_workers_of_several_machines_meet_as_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train.torch.config import _TorchBackend

    asked: list[Any] = []
    monkeypatch.setattr(_TorchBackend, "on_start", lambda *given: asked.append(given))

    class Group:
        def execute(self, function: Any) -> list[str]:
            return ["one", "other"]

    config = FileStoreConfig()
    config.backend_cls().on_start(Group(), config)
    assert len(asked) == 1


def test_meeting_place_is_its_users_alone(tmp_path: Path) -> None:
    place = Path(_make_store_path(str(tmp_path)))
    assert place.parent.parent == tmp_path
    assert place.parent.stat().st_mode & 0o777 == 0o700
    assert place != Path(_make_store_path(str(tmp_path)))


def test_ray_that_does_not_start_in_time_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def starved(**options: Any) -> None:
        folder = options["_temp_dir"]
        started.append(subprocess.Popen([sys.executable, "-c", "input()", folder], stdin=subprocess.PIPE))
        raise Exception("The current node timed out during startup. This could happen because some of …")

    monkeypatch.setattr(ray, "init", starved)
    before, environment = Path.cwd(), dict(os.environ)
    session = ray_session(ServiceOptions(), PerformanceConfig())
    with pytest.raises(ClusterError, match="timed out during startup") as caught, session:
        pass
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert len(started) == 2, "it was not tried once more"
    assert all(each.wait(timeout=60) < 0 for each in started), "it was left running"
    assert Path.cwd() == before
    assert "AUTOSCALER_METRIC_PORT" not in set(os.environ) - set(environment)


@pytest.mark.ci
def test_ray_that_starts_at_the_second_try_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tries: list[dict[str, Any]] = []

    def slow(**options: Any) -> None:
        tries.append(options)
        if len(tries) == 1:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", slow)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    connecting._start({"address": "local"}, tmp_path)
    assert tries == [{"address": "local"}] * 2
