"""The number of trainings that a cluster holds: now, as nodes change, and with nodes of an autoscaler.

Resources are requested from Ray by placement groups, one for each training that waits for space, with a
bundle for each of its W workers. The groups end with the driver, even if it is killed, and the groups of two
sweeps add up. A direct resource request to an autoscaler would outlast its driver, and replace the request of
another driver. A granted group holds its resources until it is released. So groups exist only while all
existing resources are in use: otherwise they would compete with the trainings themselves, whose workers Ray
places later.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpgcl_core.errors import ClusterError, ConfigError
from sweeps.service.console.terminal import count, print_line, warn
from sweeps.service.options.service import ServiceOptions
from trainers.config.nodes import PerformanceConfig

Node = Mapping[str, float]
"""The resources of one node, by kind; only `CPU` and `GPU` are used."""

_CHECK_EVERY_SECONDS = 1.0
_WARN_AFTER_SECONDS = 60.0
_SILENT_CHECKS = 15  # after so many checks without a report, no autoscaler is assumed
_MAX_REQUESTS = 16
_KINDS = ("CPU", "GPU")


@dataclass(frozen=True, kw_only=True)
class TrialNeeds:
    """The resources reserved for one training.

    Attributes:
      worker: the resources of one worker, by kind, without zeros; a worker is on one node.
      num_workers: W, the number of workers.
    """

    worker: Mapping[str, float]
    num_workers: int

    @staticmethod
    def of(service: ServiceOptions, performance: PerformanceConfig) -> TrialNeeds:
        """Return the resources that the options request."""
        amounts = {"CPU": float(performance.threads_per_worker), "GPU": service.gpus_per_worker}
        worker = {kind: amount for kind, amount in amounts.items() if amount}
        return TrialNeeds(worker=worker, num_workers=performance.num_workers)

    def workers_on(self, node: Node) -> int:
        """Return how many workers one node can hold; a worker's fraction of a GPU is on a single GPU.

        >>> needs = TrialNeeds(worker={"CPU": 1.0, "GPU": 0.4}, num_workers=1)
        >>> needs.workers_on({"CPU": 8.0, "GPU": 2.0}), needs.workers_on({"CPU": 3.0, "GPU": 2.0})
        (4, 3)
        """
        return min(_num_fitting(node.get(kind, 0.0), amount, kind) for kind, amount in self.worker.items())

    def trials_on(self, nodes: Sequence[Node]) -> int:
        """Return how many trainings the nodes can hold; a training's workers may be on different nodes.

        >>> needs = TrialNeeds(worker={"CPU": 2.0}, num_workers=2)
        >>> needs.trials_on([{"CPU": 1.0}] * 8), needs.trials_on([{"CPU": 5.0}, {"CPU": 4.0}])
        (0, 2)
        """
        return sum(map(self.workers_on, nodes)) // self.num_workers

    def __str__(self) -> str:
        """Return the needs as text for a message.

        >>> str(TrialNeeds(worker={"CPU": 2.0}, num_workers=1))
        '1 worker with 2 CPUs and 0 GPUs'
        """
        suffix = " each" if self.num_workers > 1 else ""
        return f"{count(self.num_workers, 'worker')} with {_shape(self.worker)}{suffix}"


def max_concurrent_trials(
    service: ServiceOptions, performance: PerformanceConfig, nodes: Sequence[Node]
) -> int:
    """Return how many trainings may run at once: as many as fit on the nodes, up to the user's limit.

    Raises:
      ConfigError: not even one training fits.

    >>> max_concurrent_trials(ServiceOptions(), PerformanceConfig(), [{"CPU": 2.0}])
    2
    """
    needs = TrialNeeds.of(service, performance)
    fits = needs.trials_on(nodes)
    if fits < 1:
        raise ConfigError(no_room_text(needs, nodes))
    return min(fits, service.max_concurrent_trials or fits)


def no_room_text(needs: TrialNeeds, nodes: Sequence[Node]) -> str:
    """Return a message that no training fits, with the resources of the nodes.

    >>> print(no_room_text(TrialNeeds(worker={"CPU": 2.0}, num_workers=1), [{"CPU": 1.0}] * 3))
    one training needs 1 worker with 2 CPUs and 0 GPUs, but no node of the cluster can hold a worker (nodes: 3 of 1 CPU and 0 GPUs)
    """  # noqa: E501
    held = sum(map(needs.workers_on, nodes))
    problem = f"the cluster can hold only {held}" if held else "no node of the cluster can hold a worker"
    return f"one training needs {needs}, but {problem} (nodes: {shapes_text(nodes)})"


def shapes_text(nodes: Sequence[Node]) -> str:
    """Return how many nodes have which CPUs and GPUs, as text.

    >>> shapes_text([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 2.0}])
    '1 of 4 CPUs and 1 GPU, 2 of 2 CPUs and 0 GPUs'
    """
    shapes = Counter(map(_shape, nodes))
    return ", ".join(f"{number} of {shape}" for shape, number in shapes.items()) or "no nodes"


def _shape(resources: Node) -> str:
    amounts = {kind: resources.get(kind, 0.0) for kind in _KINDS}
    return " and ".join(f"{amount:g} {kind}{'s' * (amount != 1)}" for kind, amount in amounts.items())


def _num_fitting(available: float, amount: float, kind: str) -> int:
    """Return how many amounts fit into a node's resources, with a tolerance for rounding of fractions."""
    if kind == "GPU" and amount < 1:
        return int(available) * int(1 / amount + 1e-6)
    return int(available / amount + 1e-6)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """An autoscaler's report on requests for resources.

    Attributes:
      has_report: whether an autoscaler has reported.
      is_refused: whether it will start no node for the requests: no node type is large enough, or the limit
        on nodes is reached.
      starting: the number of nodes that are being started, by type.
      failed: the reasons why other nodes were not started.
    """

    has_report: bool = False
    is_refused: bool = False
    starting: Mapping[str, int] = field(default_factory=dict)
    failed: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the report as text for a message."""
        parts = [f"starting {number} of type {kind!r}" for kind, number in self.starting.items()]
        parts += [f"not started: {reason}" for reason in dict.fromkeys(self.failed)]
        parts += ["it will start no more nodes for this request"] if self.is_refused else []
        text = "; ".join(parts) or "no node is starting yet"
        return f"autoscaler: {text}" if self.has_report else "there is no autoscaler"


class Cluster:
    """The nodes of the Ray that this process is connected to, and requests for more resources."""

    def __init__(self) -> None:
        self._requests: list[Any] = []

    def nodes(self) -> list[Node]:
        """Return the resources of running nodes."""
        import ray

        untyped_ray: Any = ray
        return [node["Resources"] for node in untyped_ray.nodes() if node["Alive"]]

    def request(self, needs: TrialNeeds, number: int) -> None:
        """Adjust the open requests to this number of trainings, at most 16.

        Requests that Ray has granted are withdrawn, so that trainings get these resources.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        open_requests: list[Any] = []
        for group in self._requests:
            if len(open_requests) < number and not group.wait(0):
                open_requests.append(group)
            else:
                remove_placement_group(group)
        bundles = [dict(needs.worker)] * needs.num_workers
        num_missing = min(number, _MAX_REQUESTS) - len(open_requests)
        self._requests = open_requests + [placement_group(bundles) for _ in range(num_missing)]

    def scaling(self) -> Scaling:
        """Return the autoscaler's report on the requests."""
        from trainers.ray_internals import cluster_status, first_autoscaler_report

        state = cluster_status()
        if state is None:
            return _scaling_of_report(first_autoscaler_report())
        ids = {group.id.hex() for group in self._requests}
        infeasible = state.infeasible_gang_resource_requests  # with details "ID:STRATEGY|STATE"
        is_refused = any(request.details.partition(":")[0] in ids for request in infeasible)
        starting = Counter(
            {node.ray_node_type_name: node.count for node in state.pending_instance_requests}
        ) + Counter(node.ray_node_type_name for node in state.pending_instances)
        failed = [node.reason for node in state.failed_instance_requests]
        return Scaling(has_report=True, is_refused=is_refused, starting=starting, failed=failed)


def _scaling_of_report(report: Mapping[str, Any]) -> Scaling:
    """Return the report of Ray's autoscaler v1, which does not list refused requests."""
    kinds = set((report.get("node_type_mapping") or {}).values())
    if all(kind.startswith("node_") for kind in kinds):  # only nodes that it did not start
        return Scaling(is_refused=bool(report))
    starting = Counter(report.get("pending_launches") or {})
    starting += Counter(kind for _, kind, _ in report.get("pending_nodes") or ())
    failed = [str(node) for node in report.get("failed_nodes") or ()]
    return Scaling(has_report=True, starting=starting, failed=failed)


class Capacity:
    """The number of trainings that a cluster can hold at a time, as nodes join and leave.

    Args:
      needs: the resources of one training.
      limit: the most trainings that may run at once; None for no limit.
      cluster: the cluster that runs them.
      grows: whether nodes may join; nodes never join a private Ray.
      clock: returns seconds.
    """

    def __init__(
        self,
        needs: TrialNeeds,
        limit: int | None,
        cluster: Cluster,
        *,
        grows: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.needs, self._limit, self._cluster = needs, limit, cluster
        self._grows, self._clock = grows, clock
        self._nodes: list[Node] = []
        self._last_query_time = self._last_follow_time = -float("inf")
        self._last_warning_time = clock()

    def trials_at_once(self) -> int:
        """Return how many trainings may run at once; at least 1, as the sweep waits for lost nodes."""
        fits = self.needs.trials_on(self._running_nodes())
        return max(1, fits if self._limit is None else min(fits, self._limit))

    def workers_per_node(self) -> int:
        """Return the largest number of this sweep's workers that may be on one node at once."""
        num_fitting = max(map(self.needs.workers_on, self._running_nodes()), default=1)
        return max(1, min(num_fitting, self.trials_at_once() * self.needs.num_workers))

    def wait_for_room(self, minutes: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait up to this number of minutes until one training fits; request its resources meanwhile.

        Raises:
          ConfigError: no training fits, and no node that would change this is expected.
          ClusterError: the training did not fit in time.
        """
        start_seconds, num_checks = self._clock(), 0
        while self.needs.trials_on(nodes := self._running_nodes()) < 1:
            num_checks += 1
            self._cluster.request(self.needs, 1)
            scaling = self._cluster.scaling()
            has_no_autoscaler = not scaling.has_report and (scaling.is_refused or num_checks > _SILENT_CHECKS)
            no_worker_fits = not any(map(self.needs.workers_on, nodes))
            if not self._grows or (no_worker_fits and (has_no_autoscaler or scaling.is_refused)):
                raise ConfigError(f"{no_room_text(self.needs, nodes)}{self._advice(scaling)}")
            if self._clock() - start_seconds >= 60 * minutes:
                raise ClusterError(
                    f"{no_room_text(self.needs, nodes)}; it did not fit within {minutes:g} min "
                    f"(--wait-for-resources), and nothing was charged; {scaling}"
                )
            if num_checks == 1:
                print_line(f"waiting up to {minutes:g} min for resources: {no_room_text(self.needs, nodes)}")
            self._warn_each_minute(f"still waiting: {shapes_text(nodes)}; {scaling}")
            sleep(_CHECK_EVERY_SECONDS)
        self._cluster.request(self.needs, 0)

    def follow(self, num_begun: int, num_pending: int, num_left: int) -> None:
        """Update the requests for the trainings that do not fit, and warn once a minute while none runs.

        On a private Ray this is a no-op, because its resources are fixed.

        Args:
          num_begun: the number of running trainings.
          num_pending: the number of trainings that Ray has, but that do not run yet.
          num_left: the number of trainings not yet handed to Ray.
        """
        if not self._grows or self._clock() - self._last_follow_time < _CHECK_EVERY_SECONDS:
            return
        self._last_follow_time, fits = self._clock(), self.trials_at_once()
        num_wanted = num_left if self._limit is None else min(num_left, self._limit - fits)
        is_full = not num_pending and num_begun >= fits
        self._cluster.request(self.needs, num_wanted if is_full else 0)
        if num_begun or not num_pending:
            self._last_warning_time = self._clock()
        else:
            self._warn_each_minute(self._pending_text(num_pending))

    def let_go(self) -> None:
        """Withdraw all requests, because an ended training leaves space for the next one."""
        if self._grows:
            self._cluster.request(self.needs, 0)

    def _pending_text(self, num_pending: int) -> str:
        nodes = self._running_nodes()
        num_fitting = self.needs.trials_on(nodes)
        reason = (
            "other programs may use them, or processes are slow to start"
            if num_fitting
            else no_room_text(self.needs, nodes)
        )
        return (
            f"no training runs: {count(num_pending, 'training')} pending, each for {self.needs}; "
            f"nodes: {shapes_text(nodes)}; {reason}; {self._cluster.scaling()}"
        )

    def _warn_each_minute(self, text: str) -> None:
        if self._clock() - self._last_warning_time >= _WARN_AFTER_SECONDS:
            warn(text)
            self._last_warning_time = self._clock()

    def _advice(self, scaling: Scaling) -> str:
        scaling_text = f"; {scaling}" if self._grows else ""
        return f"{scaling_text}. Lower --num-workers, --threads-per-worker or --gpus-per-worker"

    def _running_nodes(self) -> list[Node]:
        """Return the resources of the running nodes, queried at most once a second."""
        if self._clock() - self._last_query_time >= _CHECK_EVERY_SECONDS:
            self._nodes, self._last_query_time = self._cluster.nodes(), self._clock()
        return self._nodes
