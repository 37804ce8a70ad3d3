"""What a node looks up of itself. Ray sends this module along: it may import nothing that a node may lack."""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PROGRAMS = ("ray", "torch", "mlflow")
_ASK_TORCH = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


class Asker:
    """One node's answers."""

    def facts(
        self, data_path: str | None, folders: list[str], packages: tuple[str, ...], num_gpus: float
    ) -> dict[str, Any]:
        """Return the fields of `NodeFacts` that a node knows by itself."""
        return {
            "versions": {
                "Python": platform.python_version(),
                **{name: _installed(name) for name in _PROGRAMS},
            },
            "code": _digest(packages),
            "num_gpus": num_gpus,
            "num_gpus_seen": _num_gpus_of_torch() if num_gpus else None,
            "free_bytes": {each: shutil.disk_usage(_existing(Path(each))).free for each in folders},
            "sees_data": None if data_path is None else os.access(data_path, os.R_OK),
            "listens": sorted(set(_open_ports())),
        }

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def listen(self, address: str) -> int:
        """Listen at a free port of the node's address, and return it."""
        self._socket = socket.create_server((address, 0))
        return int(self._socket.getsockname()[1])

    def reach(self, address: str, port: int) -> str:
        """Return why another node cannot be connected to; "" where it can."""
        try:
            socket.create_connection((address, port), timeout=10).close()
        except OSError as error:
            return str(error.strerror or error)
        return ""


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _digest(packages: tuple[str, ...]) -> str:
    """Return a digest of the source of packages as they are imported here; "" where one is missing."""
    digest = hashlib.sha256()
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            return ""
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{name}/{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _num_gpus_of_torch() -> int:
    """Ask a process that hides no GPU, as Ray does from those that asked it for none."""
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", _ASK_TORCH]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=80, check=False)
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address.

    >>> [is_loopback(each) for each in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "::", "10.0.0.1")]
    [True, True, True, False, False]
    """
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)  # as gRPC opens its ports; not loopback to Python 3.11
    return (mapped or found).is_loopback


def _open_ports() -> Iterator[str]:
    """Yield port and process of what this node's Ray listens at, the loopback address left out."""
    import psutil  # Ray brings it along

    raylet = psutil.Process(os.getppid())
    found = re.search(r"session_[\w-]+", " ".join(raylet.cmdline())) if raylet.name() == "raylet" else None
    if found is None:  # asked outside of Ray
        return
    family = {raylet.pid, *(each.pid for each in raylet.children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in family and found[0] not in " ".join(process.cmdline()):
                continue
            for each in process.net_connections(kind="tcp"):
                if each.status == "LISTEN" and not is_loopback(each.laddr.ip):
                    yield f"{each.laddr.port} {process.name()}"
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue
