"""The nodes of the connected Ray, and the answers of all to one function that they run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """One node that is up.

    Attributes:
      id: Ray's.
      address: of its machine.
      num_cpus, num_gpus: that Ray counts.
    """

    id: str
    address: str
    num_cpus: float
    num_gpus: float

    @property
    def name(self) -> str:
        """Its address, and the beginning of Ray's id of it."""
        return f"{self.address} ({self.id[:6]})"


def living_nodes() -> list[ClusterNode]:
    """Return the nodes of the connected Ray that are up."""
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
    look: Callable[..., Any], *arguments: object, nodes: Sequence[ClusterNode], seconds: float
) -> dict[str, Any]:
    """Return the answers of nodes by id, without nodes that do not answer in time, or leave.

    Args:
      look: the function that each node runs: a local one with its own imports, which Ray sends along, as a
        node may lack this code.
      arguments: of the function.
      nodes: that run it.
      seconds: to wait for all nodes, for one may be gone without Ray's knowing yet.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    untyped_ray: Any = ray
    task = untyped_ray.remote(num_cpus=0, max_retries=0)(look)
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
        except untyped_ray.exceptions.RayError:  # the node left meanwhile
            untyped_ray.cancel(reference, force=True)
    return answers
