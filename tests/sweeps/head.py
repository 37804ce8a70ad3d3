"""A real Ray head on loopback for one test module, started in a copy of the repository and ended by pid."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

# Ray's own, whose module takes a second to import
FAKE_HEAD_NODE_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
# What Ray demands of an autoscaler's configuration, and has no defaults for.
_COMMANDS = ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray", "worker_start_ray")
_REQUIRED_OF_A_LAUNCHER: dict[str, Any] = {
    **{f"{name}_commands": [] for name in _COMMANDS},
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{name: {} for name in ("auth", "docker", "file_mounts")},
    "file_mounts_sync_continuously": False,
}
REPOSITORY = Path(__file__).resolve().parents[2]
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
_NOT_INHERITED = ("RAY_", "DPGCL_", "MLFLOW_", "PYTHONPATH")
Found = TypeVar("Found")


class Head:
    """A head node of its own, with the repository's files as they are now; use it as a context manager.

    Nothing is read from or left in the user's home, and nothing listens beyond loopback. A second head, or
    any other Ray on the machine, does not disturb it and is not disturbed.

    Attributes:
      files: paths of the copied files, relative to the copy: tracked ones, and new ones git does not ignore.
      copy: the copy of the repository; the head's working directory.
      home: an empty home folder, where submitted jobs keep their results.
      gcs_address: what `RAY_ADDRESS` must say for a driver to join.
      environment: for clients and for drivers; a plain `ray.init()` discovers this head with it.
    """

    def __init__(
        self,
        *,
        num_cpus: int = 2,
        node_types: Mapping[str, Any] | None = None,
        says_version: str | None = None,
    ) -> None:
        """Prepare a head.

        Args:
          num_cpus: of the head itself.
          node_types: that its autoscaler may start on this machine, as of a launcher's file; None for none.
          says_version: the version of Ray that it tells drivers; its own unless given.
        """
        self._says_version = says_version
        self._num_cpus, self._node_types = num_cpus, node_types
        self._folder = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # short, for sockets lie below
        self.copy = self._folder / "repository"
        self.files = _copy_repository(self.copy)
        self.home = self._folder / "home"
        self.home.mkdir()
        self._token = secrets.token_hex(32)
        token_file = self._folder / "token"
        token_file.write_text(self._token)
        token_file.chmod(0o600)
        self._gcs_port, dashboard, *self._other_ports = _free_ports(5)
        self._dashboard = f"http://127.0.0.1:{dashboard}"
        self.gcs_address = f"127.0.0.2:{self._gcs_port}"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)} | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "NO_PROXY": "127.0.0.1,127.0.0.2",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self._folder),  # where `ray start` notes the address that discovery reads
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else half of the processes outlive SIGTERM
            "RAY_API_SERVER_ADDRESS": self._dashboard,  # where `ray job` submits to
        }

    def __enter__(self) -> Head:
        client, agent_grpc, agent_http = self._other_ports
        command = [
            *("ray", "start", "--head", "--block", "--disable-usage-stats", f"--num-cpus={self._num_cpus}"),
            # 127.0.0.1 would be replaced by the machine's outer address; this one is loopback, and taken
            *("--node-ip-address=127.0.0.2", f"--port={self._gcs_port}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard.rsplit(':')[-1]}"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-grpc-port={agent_grpc}"),
            *(f"--dashboard-agent-listen-port={agent_http}", f"--object-store-memory={150 * 2**20}"),
        ]
        if self._node_types is not None:
            command.append(f"--autoscaling-config={self._write_node_types(self._node_types)}")
        with (self._folder / "head.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                executable=self._program(),
                cwd=self.copy,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_for(self._answers, timeout_seconds=120, what="the head's job server")
        except BaseException:
            self.end()
            raise
        return self

    def _program(self) -> str:
        """Returns `ray`, or a program that is the same under another version."""
        if self._says_version is None:
            return str(shutil.which("ray", path=self.environment["PATH"]))
        path = self._folder / "ray-of-another-version"
        path.write_text(
            f"#!{sys.executable}\nimport ray\nray.__version__ = {self._says_version!r}\n"
            "from ray.scripts.scripts import main\nmain()\n"
        )
        path.chmod(0o755)
        return str(path)

    def _write_node_types(self, node_types: Mapping[str, Any]) -> Path:
        """Have Ray's fake provider start nodes here.

        As `ray.cluster_utils.AutoscalingCluster` does it, whose own start ends all Ray on the machine, and
        whose template is missing from Ray's wheels.
        """
        place = "ray.autoscaler._private.fake_multi_node.node_provider"
        provider = {"type": "external", "module": f"{place}.FakeMultiNodeProvider", "launch_multiple": True}
        head = {"resources": {"CPU": self._num_cpus}, "node_config": {}, "max_workers": 0}
        workers = {name: {"node_config": {}, "min_workers": 0} | kind for name, kind in node_types.items()}
        config = _REQUIRED_OF_A_LAUNCHER | {
            "cluster_name": "cold",
            "max_workers": sum(kind["max_workers"] for kind in node_types.values()),
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": 0.1,
            "provider": provider | {"gcs_address": self.gcs_address},
            "available_node_types": workers | {"ray.head.default": head},
            "head_node_type": "ray.head.default",
        }
        self.environment |= {
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_enable_autoscaler_v2": "1",  # as `ray up` has it
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
        path = self._folder / "autoscaling.json"
        path.write_text(json.dumps(config))
        return path

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends every process of this head, and no other; removes all of its files."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            wait_for(lambda: self._process.poll() is not None, timeout_seconds=15, what="the head's end")
            wait_for(lambda: not list(self._processes()), timeout_seconds=5, what="its processes' end")
        except TimeoutError:
            for pid in self._processes():
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kills every process of this head at once, as a machine that loses its power; its files stay."""
        for pid in list(self._processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)

    def submit(self, *arguments: str) -> str:
        """Runs `ray job submit --no-wait ARGUMENTS` in the copy and returns the submission's id."""
        output = self._ray_job("submit", "--no-wait", *arguments).stdout
        found = re.search(r"'(raysubmit_\w+)' submitted", output)
        assert found, output
        return found[1]

    def submit_and_follow(self, *arguments: str) -> tuple[int, str]:
        """Runs `ray job submit ARGUMENTS` in the copy to the job's end; returns exit code and output."""
        done = self._ray_job("submit", *arguments, check=False)
        return done.returncode, done.stdout + done.stderr

    def stop(self, submission: str) -> None:
        """Runs `ray job stop`."""
        self._ray_job("stop", submission)

    def job(self, submission: str) -> dict[str, Any]:
        """Returns what the head says of a job: `status`, `message`, …"""
        return self._get(f"/api/jobs/{submission}")

    def log(self, submission: str) -> str:
        """Returns what a job has printed so far."""
        return self._get(f"/api/jobs/{submission}/logs")["logs"]

    def drivers(self) -> set[str]:
        """Returns the ids of all drivers that have joined this head without being submitted."""
        return {job["job_id"] for job in self._get("/api/jobs/") if job["type"] == "DRIVER"}

    def wait_until_ended(self, submission: str, *, timeout_seconds: float = 300) -> dict[str, Any]:
        """Waits for a job's end and returns what the head says of it, with its `log`."""

        def ended() -> dict[str, Any] | None:
            job = self.job(submission)
            return job if job["status"] in ENDED else None

        job = wait_for(ended, timeout_seconds=timeout_seconds, what=f"the end of {submission}")
        return job | {"log": self.log(submission)}

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the copy, beside the head and not as its job."""
        return subprocess.run(
            command,
            cwd=self.copy,
            env=self.environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def _ray_job(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = self.run("ray", "job", *arguments)
        if check and done.returncode:
            output = done.stdout + done.stderr
            raise RuntimeError(f"ray job {arguments} exited with {done.returncode}:\n{output}")
        return done

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"the head ended:\n{(self._folder / 'head.log').read_text()}")
        try:
            known = (self._folder / "ray" / "ray_current_cluster").is_file()  # written last
            return known and self._get("/api/jobs/") is not None
        except (URLError, OSError):
            return False

    def _get(self, path: str) -> Any:
        request = Request(self._dashboard + path, headers={"Authorization": f"Bearer {self._token}"})
        with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
            return json.load(answer)

    def _processes(self) -> Iterator[int]:
        """Yields the living processes of this head and of its jobs."""
        folder = os.fsencode(self._folder)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                state, session = (entry / "stat").read_text().rpartition(")")[2].split()[0:4:3]
                ours = folder in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:  # gone meanwhile, or another user's
                continue
            if state != "Z" and (ours or int(session) == self._process.pid):
                yield int(entry.name)


def wait_for(condition: Callable[[], Found], *, timeout_seconds: float, what: str) -> Found:
    """Returns the first true value of `condition()`.

    Raises:
      TimeoutError: it did not come in time.
    """
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise TimeoutError(f"waited {timeout_seconds:g} s for {what}")


def _copy_repository(target: Path) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = {name for name in listed.split("\0") if name and (REPOSITORY / name).is_file()}
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target / name)
    return files


def _free_ports(count: int) -> list[int]:
    """Returns free ports, all different; nobody else is kept from taking one in the meantime."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
