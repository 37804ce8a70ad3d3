"""Facts of each machine of a cluster, and of the driver's own machine without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sweeps.service.storage.cluster_nodes import answers_of_nodes, living_nodes

PACKAGES = ("dpgcl_core", "trainers", "dashboards", "sweeps")
_ANSWER_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The program versions and resources of one machine.

    Attributes:
      name: the node's name; `this machine` for the driver's own.
      versions: the version of each program, and a digest of this project's source code as `this code`; "" for
        what is not installed.
      num_cpus, num_gpus: the numbers that Ray counts.
      num_gpus_seen: the number of GPUs that torch sees; 0, unchecked, if Ray counts none.
    """

    name: str
    versions: Mapping[str, str]
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    num_gpus_seen: int = 0


def this_machine() -> NodeFacts:
    """Return the facts of the driver's own machine."""
    return NodeFacts(name="this machine", versions=versions_function()(PACKAGES))


def facts_of_nodes() -> tuple[list[NodeFacts], list[str]]:
    """Return the facts of the nodes of the connected Ray, and the names of nodes that did not answer."""
    nodes = living_nodes()
    versions = answers_of_nodes(versions_function(), PACKAGES, nodes=nodes, seconds=_ANSWER_SECONDS)
    gpus = answers_of_nodes(
        gpus_function(), nodes=[node for node in nodes if node.num_gpus], seconds=_ANSWER_SECONDS
    )
    facts = [
        NodeFacts(
            name=node.name,
            num_cpus=node.num_cpus,
            num_gpus=node.num_gpus,
            num_gpus_seen=gpus.get(node.id, 0),
            versions=versions[node.id],
        )
        for node in nodes
        if node.id in versions
    ]
    return facts, [node.name for node in nodes if node.id not in versions]


def versions_function() -> Callable[[tuple[str, ...]], dict[str, str]]:
    """Return the function that reads the versions on the node that runs it.

    It is local, so that Ray sends its code to nodes without this package.
    """

    def read_versions(packages: tuple[str, ...]) -> dict[str, str]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import platform
        from pathlib import Path

        versions = {"Python": platform.python_version()}
        for name in ("ray", "torch", "mlflow"):
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = ""
        digest = hashlib.sha256()
        specs = [importlib.util.find_spec(name) for name in packages]
        roots = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]
        for root in roots:
            for file in sorted(root.rglob("*.py")):
                digest.update(f"{root.name}/{file.relative_to(root)}\0".encode() + file.read_bytes())
        versions["this code"] = digest.hexdigest()[:12] if len(roots) == len(packages) else ""
        return versions

    return read_versions


def gpus_function() -> Callable[[], int]:
    """Return a function that counts torch's GPUs in a new process, because Ray hides them from a task."""

    def count_gpus() -> int:
        import os
        import subprocess
        import sys

        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=80, check=False)
        return int(process.stdout.strip() or 0) if process.returncode == 0 else 0

    return count_gpus
