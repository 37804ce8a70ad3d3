"""`python -m sweeps.doctor`: what keeps a sweep from running on a cluster, and how to put it right.

python -m sweeps.doctor --dataset npz:/data/scans.npz --storage /shared/results
ray job submit --working-dir . -- python -m sweeps.doctor --json
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dpgcl_core.command_line import run_command
from dpgcl_core.errors import DpgclError, exit_on_bad_input
from sweeps.doctor.checks import (
    check_clocks,
    check_data,
    check_disks,
    check_gpus,
    check_ledger,
    check_nodes,
    check_ports,
    check_tracking,
    check_versions,
)
from sweeps.doctor.findings import Finding, as_json, as_text, is_ready, skipped, wrong
from sweeps.doctor.nodes import NodeFacts, ask_nodes, this_machine
from sweeps.doctor.storage import check_storage
from sweeps.service.options.data import data_path
from sweeps.service.running.display import displayed
from sweeps.service.running.tune import connected_ray
from sweeps.service.storage.runs import tracking_address
from trainers.data.loading import check_dataset_name
from trainers.files.storage import storage_root

_OF_RAY = (
    "start one with `ray start --head`, set RAY_ADDRESS to the host:port that it prints, and install the "
    "versions of constraints.txt on all nodes (docs/cluster.md)"
)


def doctor(
    ray_address: str | None = None,
    tracking_uri: str | None = None,
    ledger: str | None = None,
    storage: Path | None = None,
    dataset: str = "digits",
    json: bool = False,
) -> int:
    """Check everything that a sweep needs of a cluster, and print what to fix; exit code 1 if anything.

    Args:
      ray_address: host:port of the cluster; $RAY_ADDRESS or the job's own, else a private Ray, unless given.
      tracking_uri: MLflow server; $MLFLOW_TRACKING_URI or a database under the storage folder unless given.
      ledger: budget ledger, a path or URL; $DPGCL_LEDGER unless given.
      storage: folder for results; $DPGCL_STORAGE or ~/dpgcl-results unless given.
      dataset: that sweeps will train on; only whether it can be read is looked at.
      json: print one JSON object.
    """
    check_dataset_name(dataset)
    if ray_address is not None:
        os.environ["RAY_ADDRESS"] = ray_address
    root, path = storage_root(storage), data_path(dataset)
    folders = {str(root): "the storage folder", tempfile.gettempdir(): "Ray's and temporary files"}
    with displayed(quiet=json):  # JSON is all that is printed then
        findings = _of_cluster(str(path) if path else None, folders, root)
    findings.append(check_tracking(tracking_address(tracking_uri, root)))
    findings.append(check_ledger(ledger or os.environ.get("DPGCL_LEDGER")))
    print(as_json(findings) if json else as_text(findings))
    return 0 if is_ready(findings) else 1


def _of_cluster(path: str | None, folders: dict[str, str], root: Path) -> list[Finding]:
    """What is found on the nodes; on this machine alone where Ray cannot be reached."""
    driver = this_machine(path, list(folders))
    try:
        with connected_ray():
            nodes, silent = ask_nodes(path, list(folders))
            storage = check_storage(root, len(nodes))
    except DpgclError as error:
        found = [wrong("ray", str(error), _OF_RAY), skipped("nodes", "no Ray, so only this machine is seen")]
        return [*found, *_of_one([driver], driver, folders), *check_storage(root, 1)]
    return [
        check_nodes(nodes, silent),
        *_of_one(nodes, driver, folders),
        *storage,
        check_clocks(nodes),
        *check_ports(nodes),
    ]


def _of_one(nodes: list[NodeFacts], driver: NodeFacts, folders: dict[str, str]) -> list[Finding]:
    """What can be told of each machine by itself."""
    return [
        *check_versions(nodes, driver),
        check_gpus(nodes),
        check_data(nodes, driver),
        *check_disks(nodes, folders),
    ]


def main() -> int:
    """Look, and return the exit code."""
    code: int = run_command(doctor, prog="python -m sweeps.doctor")
    return code


if __name__ == "__main__":
    exit_on_bad_input(main)
