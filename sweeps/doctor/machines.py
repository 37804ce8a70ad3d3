"""What is found on the machines of a cluster, or on this one alone."""

from __future__ import annotations

from pathlib import Path

from dpgcl_core.errors import DpgclError
from sweeps.doctor.checks import (
    check_clocks,
    check_data,
    check_disks,
    check_gpus,
    check_nodes,
    check_ports,
    check_versions,
)
from sweeps.doctor.findings import Finding, skipped, wrong
from sweeps.doctor.nodes import NodeFacts, ask_nodes, this_machine
from sweeps.doctor.storage import check_storage
from sweeps.service.running.tune import connected_ray

_OF_RAY = (
    "start one with `ray start --head`, set RAY_ADDRESS to the host:port that it prints, and install the "
    "versions of constraints.txt on all nodes (docs/cluster.md)"
)


def check_machines(path: str | None, folders: dict[str, str], root: Path) -> list[Finding]:
    """Return what is found on the nodes; on this machine alone where Ray cannot be reached.

    Args:
      path: of the data, where they are files.
      folders: whose room is looked at, each with what it is for.
      root: the storage folder.
    """
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
