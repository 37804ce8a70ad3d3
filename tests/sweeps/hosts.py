"""Hosts with networks of their own, on one machine: each in a network namespace, on one bridge.

They share the machine's files, as nodes of a cluster share a folder. A host that is cut off goes on running.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.sweeps.head import wait_for

_IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin") or ""
_NOT_INHERITED = ("RAY_", "DPGCL_", "MLFLOW_", "PYTHONPATH")


@cache
def why_no_hosts() -> str:
    """Why this machine can have none; empty where it can."""
    if sys.platform != "linux" or not _IP:
        return "network namespaces need Linux and Debian's iproute2"
    name = f"dpgcl-{secrets.token_hex(2)}"
    if _ip("netns", "add", name, check=False):
        return "network namespaces need root"
    _ip("netns", "delete", name)
    return ""


class Hosts:
    """A Ray head and its nodes, each on a host of its own; use it as a context manager.

    Args:
      folder: for Ray's files; a short path, for sockets lie in it.
      nodes: CPUs of each node; the head has none.
      env: for drivers and workers.
      apart: a folder of which the last node sees another, empty one of its own; None for none.

    Attributes:
      environment: for drivers, which run on the head's host.
    """

    def __init__(
        self, folder: Path, nodes: tuple[int, ...], env: Mapping[str, str], apart: Path | None = None
    ) -> None:
        self._folder, self._cpus, self._apart = folder, (0, *nodes), apart
        self._id = secrets.token_hex(2)
        self._bridge = f"dpgcl-{self._id}"
        self._processes: list[subprocess.Popen[bytes]] = []
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)} | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "NO_PROXY": "*",
            "RAY_USAGE_STATS_ENABLED": "0",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": f"{self.address(0)}:6379",
            # The head takes a node for dead soon; a node without a head does not end itself meanwhile.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
        }
        self.environment.update(env)

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for number in range(len(self._cpus)):
                self._add(number)
            for number, cpus in enumerate(self._cpus):
                self._start_ray(number, cpus)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._end()

    def address(self, number: int) -> str:
        return f"10.213.{int(self._id[:2], 16)}.{number + 1}"

    def start(
        self, number: int, log: Path, *command: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a program on a host, in a session of its own; its output goes to a file."""
        with log.open("wb") as file:
            return subprocess.Popen(
                [_IP, "netns", "exec", self._name(number), *command],
                cwd=self._folder,
                env=self.environment | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def host_of(self, pid: int) -> int:
        """The host that a process runs on."""
        own = os.stat(f"/proc/{pid}/ns/net").st_ino
        spaces = [os.stat(f"/run/netns/{self._name(number)}").st_ino for number in range(len(self._cpus))]
        return spaces.index(own)

    def cut_off(self, number: int) -> None:
        """Lets nothing through to and from a host any more."""
        _ip("link", "set", self._link(number), "down")

    def _name(self, number: int) -> str:
        return f"dpgcl-{self._id}-{number}"

    def _link(self, number: int) -> str:
        return f"dpgcl{self._id}{number}"

    def _add(self, number: int) -> None:
        name, inside = self._name(number), ("netns", "exec", self._name(number), _IP)
        _ip("netns", "add", name)
        _ip("link", "add", self._link(number), "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", self._link(number), "master", self._bridge, "up")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")

    def _start_ray(self, number: int, cpus: int) -> None:
        address = self.address(number)
        if number == 0:
            given = ["--head", "--port=6379", f"--dashboard-host={address}", "--include-dashboard=false"]
            given.append(f"--temp-dir={self._folder / 'ray'}")
        else:
            given = [f"--address={self.environment['RAY_ADDRESS']}"]
        given += [f"--node-ip-address={address}", f"--num-cpus={cpus}", "--disable-usage-stats"]
        given.append(f"--object-store-memory={150 * 2**20}")
        log = self._folder / f"ray-{number}.log"
        alone = {"RAY_ADDRESS": ""}
        command = ["ray", "start", "--block", *given]
        if (
            self._apart is not None and number == len(self._cpus) - 1
        ):  # each program here has mounts of its own
            command = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(self._apart), *command]
        self._processes.append(self.start(number, log, *command, env=alone))
        wait_for(
            lambda: "Ray runtime started" in log.read_text(), timeout_seconds=120, what=f"Ray, see {log}"
        )

    def _end(self) -> None:
        """Ends all that runs on the hosts, and takes them away."""
        for number in reversed(range(len(self._cpus))):
            found = subprocess.run([_IP, "netns", "pids", self._name(number)], capture_output=True, text=True)
            for pid in found.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in self._processes:
            process.wait(30)
        for number in range(len(self._cpus)):
            _ip("netns", "delete", self._name(number), check=False)
        _ip("link", "delete", self._bridge, check=False)


def _ip(*arguments: str, check: bool = True) -> int:
    done = subprocess.run([_IP, *arguments], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr}")
    return done.returncode
