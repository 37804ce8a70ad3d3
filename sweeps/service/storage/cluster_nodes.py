"""The nodes of the connected Ray, and a function that runs code on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """One running node.

    Attributes:
      id: Ray's id of the node.
      address: the address of its machine.
      num_cpus, num_gpus: the numbers that Ray counts.
    """

    id: str
    address: str
    num_cpus: float
    num_gpus: float

    @property
    def name(self) -> str:
        """The node's address, and the beginning of its id in Ray."""
        return f"{self.address} ({self.id[:6]})"


def living_nodes() -> list[ClusterNode]:
    """Return the running nodes of the connected Ray."""
    import ray

    untyped_ray: Any = ray
    return [
        ClusterNode(
            id=str(node["NodeID"]),
            address=str(node["NodeManagerAddress"]),
            num_cpus=float(node["Resources"].get("CPU", 0.0)),
            num_gpus=float(node["Resources"].get("GPU", 0.0)),
        )
        for node in untyped_ray.nodes()
        if node["Alive"]
    ]


def answers_of_nodes(
    function: Callable[..., Any], *arguments: object, nodes: Sequence[ClusterNode], seconds: float
) -> dict[str, Any]:
    """Run a function on each node, and return the results by node id.

    Nodes that leave or do not answer in time are omitted.

    Args:
      function: a local function with its own imports, so that Ray sends its code to nodes without this
        package.
      arguments: the function's arguments.
      nodes: the nodes to run it on.
      seconds: the time to wait for all nodes, because Ray may not yet know that a node is gone.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    untyped_ray: Any = ray
    task = untyped_ray.remote(num_cpus=0, max_retries=0)(function)
    node_ids = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            *arguments
        ): node.id
        for node in nodes
    }
    ready, late = untyped_ray.wait(list(node_ids), num_returns=len(node_ids), timeout=seconds)
    for reference in late:
        untyped_ray.cancel(reference, force=True)
    answers = {}
    for reference in ready:
        try:
            answers[node_ids[reference]] = untyped_ray.get(reference)
        except untyped_ray.exceptions.RayError:  # the node left in the meantime
            untyped_ray.cancel(reference, force=True)
    return answers
