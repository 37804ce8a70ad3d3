"""What each node of a Ray cluster says of itself: asked at once, of a small actor on each.

Ray sends the actor's class along, so a node that lacks this package, or has another copy of it, can say so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle as _cloudpickle

from sweeps.doctor import asker
from sweeps.doctor.asker import Asker

cloudpickle: Any = _cloudpickle  # without types

PACKAGES = ("dpgcl_core", "trainers", "dashboards", "sweeps")
_ANSWER_SECONDS = 90.0
_NUM_CLOCK_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What one node says.

    Attributes:
      name: its address, and the beginning of Ray's id of it; `this machine` for the driver's own.
      versions: by program; "" where it is not installed.
      code: a digest of this package's source as it is imported there; "" where it is not found.
      num_gpus: that Ray counts.
      num_gpus_seen: that torch sees; None where Ray counts none.
      free_bytes: by folder.
      sees_data: whether the data's path is there and can be read; None where none was given.
      listens: "port process" of each of Ray's that answers on other addresses than the loopback one.
      offset_seconds: how far its clock is ahead of the driver's; None where it was not asked.
      offset_error_seconds: by how much that may be wrong.
      unreached: the names of nodes that it cannot connect to on a port of their choice, and why.
    """

    name: str
    versions: Mapping[str, str]
    code: str
    num_gpus: float = 0.0
    num_gpus_seen: int | None = None
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    sees_data: bool | None = None
    listens: Sequence[str] = ()
    offset_seconds: float | None = None
    offset_error_seconds: float = 0.0
    unreached: Mapping[str, str] = field(default_factory=dict)


def this_machine(data_path: str | None, folders: Sequence[str]) -> NodeFacts:
    """Return what the driver's own machine says, without Ray."""
    return NodeFacts(name="this machine", **Asker().facts(data_path, list(folders), PACKAGES, 0.0))


def ask_nodes(data_path: str | None, folders: Sequence[str]) -> tuple[list[NodeFacts], list[str]]:
    """Return what the nodes of the connected Ray say, and the names of those that did not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    of_ray: Any = ray
    living = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node
        for node in of_ray.nodes()
        if node["Alive"]
    }
    cloudpickle.register_pickle_by_value(asker)
    try:
        actor_class = of_ray.remote(num_cpus=0)(Asker)
        actors = {
            name: actor_class.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for name, node in living.items()
        }
    finally:
        cloudpickle.unregister_pickle_by_value(asker)
    asked = {
        name: actor.facts.remote(
            data_path, list(folders), PACKAGES, float(living[name]["Resources"].get("GPU", 0.0))
        )
        for name, actor in actors.items()
    }
    told = _answers(asked)
    answering = {name: actors[name] for name in told}
    offsets = {name: _offset(actor) for name, actor in answering.items()}
    unreached = _unreached(answering, {name: living[name]["NodeManagerAddress"] for name in answering})
    found = [
        NodeFacts(
            name=name,
            offset_seconds=offsets[name][0],
            offset_error_seconds=offsets[name][1],
            unreached=unreached[name],
            **facts,
        )
        for name, facts in told.items()
    ]
    return found, [name for name in living if name not in told]


def _answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers that come in time, by name."""
    import ray

    of_ray: Any = ray
    ready, _ = of_ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_SECONDS)
    found = {}
    for name, reference in asked.items():
        if reference in ready:
            try:
                found[name] = of_ray.get(reference)
            except of_ray.exceptions.RayError:  # the node left meanwhile
                continue
    return found


def _offset(actor: Any) -> tuple[float, float]:
    """Return how far a node's clock is ahead, and the error of that: half of the quickest answer's time."""
    import ray

    of_ray: Any = ray
    tries = []
    for _ in range(_NUM_CLOCK_TRIES):
        before = time.time()
        theirs = of_ray.get(actor.now.remote())
        tries.append(offset_of(before, theirs, time.time()))
    return min(tries, key=lambda each: each[1])


def offset_of(before: float, theirs: float, after: float) -> tuple[float, float]:
    """Return how far a clock that was read between two moments is ahead, and the error of that.

    >>> offset_of(10.0, 13.0, 12.0)
    (2.0, 1.0)
    """
    return theirs - (before + after) / 2, (after - before) / 2


def _unreached(actors: Mapping[str, Any], addresses: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Let each node connect to the next one, as workers of one training do; return what failed."""
    import ray

    of_ray: Any = ray
    names = list(actors)
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    if len(names) < 2:
        return found
    ports = of_ray.get([actors[name].listen.remote(addresses[name]) for name in names])
    for at, name in enumerate(names):
        following = (at + 1) % len(names)
        if why := of_ray.get(actors[name].reach.remote(addresses[names[following]], ports[following])):
            found[name][names[following]] = why
    return found
