"""The checks: each returns a finding, with a fix if there is a problem."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dpgcl_core.errors import DpgclError
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.object_store import address_of, folder_of, list_objects
from sweeps.doctor.facts import NodeFacts, facts_of_nodes, this_machine
from sweeps.doctor.findings import Finding
from sweeps.service.cluster.ray_session import connected_ray
from sweeps.service.console.terminal import count
from sweeps.service.storage.probe import TO_LOCK, TO_SHARE, StorageProbe, probe_storage
from trainers.files.storage import check_writable
from trainers.tracking.mlflow_server import connect, database_file, is_database


def check_machines(data_path: str | None, root: Path) -> list[Finding]:
    """Return the findings on Ray's nodes, data and storage; on this machine only, if Ray cannot be reached.

    Args:
      data_path: the path of the data; None for built-in data.
      root: the storage folder.
    """
    driver = this_machine()
    try:
        with connected_ray():
            nodes, silent = facts_of_nodes()
            storage = check_storage(root, len(nodes))
    except DpgclError as error:
        fix = "start a cluster with `ray start --head`, and set RAY_ADDRESS to the host:port that it prints"
        alone = [check_versions([driver], driver), check_data(data_path), *check_storage(root, 1)]
        return [Finding("ray", "wrong", str(error), f"{fix} (docs/cluster.md)"), *alone]
    return [
        check_nodes(nodes, silent),
        check_versions(nodes, driver),
        check_gpus(nodes),
        check_data(data_path),
        *storage,
    ]


def check_nodes(nodes: Sequence[NodeFacts], silent: Sequence[str]) -> Finding:
    """Report nodes that do not answer."""
    if silent:
        fix = "check `ray status` and the raylet's log on that node, then stop or replace the node"
        return Finding("ray", "wrong", f"no answer from {', '.join(silent)}", fix)
    num_cpus, num_gpus = sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes)
    return Finding(
        "ray", "ok", f"{count(len(nodes), 'node')} answered, with {num_cpus:g} cores and {num_gpus:g} GPUs"
    )


def check_versions(nodes: Sequence[NodeFacts], driver: NodeFacts) -> Finding:
    """Report nodes whose program versions or copy of this code differ from the driver's."""
    odd = [
        f"{program} is {version or 'missing'} here, but {node.versions[program] or 'missing'} on {node.name}"
        for program, version in driver.versions.items()
        for node in nodes
        if node.versions[program] != version
    ]
    if odd:
        fix = (
            "install the versions of constraints.txt on every node, and restart Ray there; "
            "`ray job submit --working-dir .` sends the code of this machine along"
        )
        return Finding("versions", "wrong", "; ".join(odd), fix)
    shown = ", ".join(f"{program} {version}" for program, version in driver.versions.items())
    return Finding("versions", "ok", f"{shown}, on {count(len(nodes), 'node')}")


def check_gpus(nodes: Sequence[NodeFacts]) -> Finding:
    """Report nodes on which torch sees fewer GPUs than Ray counts."""
    if not any(node.num_gpus for node in nodes):
        return Finding("gpu", "skipped", "Ray counts no GPUs on the running nodes")
    short = [node for node in nodes if node.num_gpus_seen < node.num_gpus]
    if short:
        seen = ", ".join(f"{node.num_gpus_seen} of {node.num_gpus:g} on {node.name}" for node in short)
        fix = "install a driver and torch with CUDA (docs/performance.md): nvidia-smi must list all GPUs"
        return Finding("gpu", "wrong", f"torch sees fewer GPUs than Ray counts: {seen}", fix)
    return Finding("gpu", "ok", f"torch sees all {sum(node.num_gpus for node in nodes):g} GPUs")


def check_data(data_path: str | None) -> Finding:
    """Report data that the driver cannot read; the nodes get the records from the driver."""
    if data_path is None:
        return Finding("data", "skipped", "built-in data need no check; set --dataset to check others")
    fix = "pass the path as the driver's machine sees it: a job's driver runs on the head node"
    try:
        if address := address_of(data_path):
            is_readable = any(list_objects(each, below=False) for each in (address, folder_of(address)))
        else:
            is_readable = os.access(data_path, os.R_OK)
    except DpgclError as error:
        return Finding("data", "wrong", str(error), fix)
    if not is_readable:
        return Finding("data", "wrong", "this machine cannot read the data", fix)
    return Finding("data", "ok", "this machine can read the data")


def check_storage(root: Path, num_nodes: int) -> list[Finding]:
    """Report a folder that this machine cannot write or lock, or that several nodes do not share.

    Args:
      root: the storage folder; it need not exist, because a sweep creates it.
      num_nodes: the number of nodes of the connected Ray, which must share the folder.
    """
    existing = next(parent for parent in (root, *root.parents) if parent.exists())
    try:
        check_writable(root)
        with tempfile.TemporaryFile(dir=existing) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = Finding("storage", "ok", f"this machine can write and lock {root}")
        return [here, *findings_of(probe_storage(existing))] if num_nodes > 1 else [here]
    except DpgclError as error:
        return [Finding("storage", "wrong", str(error), "set --storage to a folder that you can write")]
    except OSError as error:
        fix = "use a POSIX file system with flock: NFS 4 with local_lock=none, or Lustre mounted with flock"
        return [Finding("storage", "wrong", f"{root} cannot be locked ({error.strerror})", fix)]


def findings_of(probe: StorageProbe) -> list[Finding]:
    """Return the findings of a probe: whether all nodes share the folder, and whether locks hold."""
    if unshared_text := probe.unshared_text():
        return [Finding("storage", "wrong", unshared_text, TO_SHARE)]
    locks = [Finding("storage", "note", text, TO_LOCK)] if (text := probe.unlocked_text()) else []
    seen = f"{probe.folder} is the same folder on {count(len(probe.nodes), 'node')}"
    return [*locks, Finding("storage", "ok", seen)]


def check_tracking(uri: str) -> Finding:
    """Report an MLflow that does not answer; a database that does not exist yet is fine."""
    if uri.lower().startswith("sqlite") and not database_file(uri).exists():
        return Finding("mlflow", "ok", "a database on this machine, which the first sweep creates")
    kind = "database" if is_database(uri) else "server"
    return _connection("mlflow", lambda: connect(uri), f"the {kind} answers", "start it (docs/cluster.md)")


def check_ledger(url: str | None) -> Finding:
    """Report a ledger, in a file or in PostgreSQL, that does not answer."""
    if url is None:
        return Finding("ledger", "skipped", "no ledger set (--ledger, $DPGCL_LEDGER); private data need one")
    return _connection("ledger", lambda: Ledger.open(url).head(), "it answers", "see docs/ledger.md")


def _connection(check: str, connect_to: Callable[[], object], text: str, fix: str) -> Finding:
    try:
        connect_to()
    except DpgclError as error:
        return Finding(check, "wrong", str(error), fix)
    return Finding(check, "ok", text)
