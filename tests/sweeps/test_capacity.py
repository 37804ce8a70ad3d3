"""How many trainings run follows the cluster: on real nodes, and what is said while there is no room."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpgcl_core.errors import ClusterError, ConfigError
from sweeps.service.cluster.capacity import Capacity, Node, Scaling, TrialNeeds, max_concurrent_trials
from sweeps.service.cluster.trial_queue import TrialQueue
from sweeps.service.options.service import ServiceOptions
from tests.sweeps.head import Head
from tests.sweeps.support import Driver, run
from trainers.config.training import PerformanceConfig

ONE, TWO = ({"CPU": 1.0}, {"CPU": 2.0})


@dataclass
class Nodes:
    """Stands in for a cluster: nodes that a test gives and takes, and what was asked for."""

    now: list[Node]
    scaling_now: Scaling = field(default_factory=lambda: Scaling(is_refused=True))
    asked: list[int] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        return list(self.now)

    def request(self, needs: TrialNeeds, number: int) -> None:
        self.asked.append(number)

    def scaling(self) -> Scaling:
        return self.scaling_now


class Time:
    """A clock that goes when somebody sleeps."""

    def __init__(self, nodes: Nodes, joins: dict[int, Node] | None = None) -> None:
        self.now, self._nodes, self._joins = 0.0, nodes, joins or {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if (node := self._joins.pop(round(self.now), None)) is not None:
            self._nodes.now.append(node)


def capacity(nodes: Any, clock: Callable[[], float], *, limit: int | None = None, **more: Any) -> Capacity:
    needs = TrialNeeds(worker=more.get("worker", ONE), num_workers=more.get("num_workers", 1))
    return Capacity(needs, limit, nodes, grows=more.get("grows", True), clock=clock)


@pytest.mark.parametrize(
    ("threads", "workers", "gpus", "nodes", "expected"),
    [
        (1, 1, 0.0, [ONE, ONE, ONE], 3),
        (1, 2, 0.0, [ONE, ONE, ONE], 1),
        (2, 1, 0.0, [{"CPU": 3.0}, {"CPU": 3.0}], 2),  # not 6 / 2
        (1, 1, 0.6, [{"CPU": 8.0, "GPU": 2.0}], 2),  # not 2 / 0.6
        (1, 1, 0.1, [{"CPU": 32.0, "GPU": 1.0}], 10),
        (1, 2, 1.0, [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}], 1),
    ],
)
def test_trainings_are_counted_node_by_node(
    threads: int, workers: int, gpus: float, nodes: list[Node], expected: int
) -> None:
    performance = PerformanceConfig(threads_per_worker=threads, num_workers=workers)
    assert max_concurrent_trials(ServiceOptions(gpus_per_worker=gpus), performance, nodes) == expected


def test_training_that_fits_in_total_and_on_no_node_is_refused_by_shape() -> None:
    with pytest.raises(ConfigError, match=r"no node of the cluster can hold a worker \(nodes: 2 of 1"):
        max_concurrent_trials(ServiceOptions(), PerformanceConfig(threads_per_worker=2), [ONE, ONE])


def test_number_of_trainings_follows_nodes_that_join_and_leave() -> None:
    nodes = Nodes([ONE])
    clock = Time(nodes)
    following = capacity(nodes, clock, limit=3)
    seen = []
    for now in ([ONE], [ONE] * 2, [ONE] * 5, [ONE], []):
        nodes.now = list(now)
        clock.sleep(1)
        seen.append(following.trials_at_once())
    assert seen == [1, 2, 3, 1, 1]


def test_room_that_comes_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes([{"CPU": 0.0}], Scaling(has_report=True, starting={"worker": 1}))
    clock = Time(nodes, {130: ONE})
    capacity(nodes, clock).wait_for_room(15, clock.sleep)
    said = capsys.readouterr().out.splitlines()
    assert clock.now == 130
    assert nodes.asked == [1] * 130 + [0], "asked as long as it waits, and let go"
    assert said[0].startswith("waiting up to 15 min for resources: one training needs 1 worker with 1 CPU")
    assert said[1:] == ["still waiting: 1 of 0 CPUs and 0 GPUs; autoscaler: starting 1 of type 'worker'"] * 2


@pytest.mark.parametrize(
    ("now", "scaling", "more", "at_latest"),
    [
        ([ONE, ONE], Scaling(has_report=True, is_refused=True), {"worker": TWO}, 0),
        ([ONE, ONE], Scaling(is_refused=True), {"worker": TWO}, 0),
        ([ONE, ONE], Scaling(), {"worker": TWO}, 15),
        ([ONE], Scaling(), {"num_workers": 2, "grows": False}, 0),
    ],
    ids=["autoscaler has no such type", "nobody starts nodes", "nobody says anything", "private Ray"],
)
def test_room_that_cannot_come_is_refused(
    now: list[Node], scaling: Scaling, more: dict[str, Any], at_latest: float
) -> None:
    nodes = Nodes(now, scaling)
    clock = Time(nodes)
    with pytest.raises(ConfigError, match="one training needs"):
        capacity(nodes, clock, **more).wait_for_room(15, clock.sleep)
    assert clock.now <= at_latest


def test_waiting_ends() -> None:
    nodes = Nodes([ONE])  # of the right shape, and too few
    clock = Time(nodes)
    with pytest.raises(ClusterError, match="did not fit within 2 min"):
        capacity(nodes, clock, num_workers=2).wait_for_room(2, clock.sleep)
    assert clock.now == 120


def test_room_is_asked_for_only_where_all_that_is_there_is_taken() -> None:
    nodes = Nodes([ONE, ONE])
    clock = Time(nodes)
    following = capacity(nodes, clock, limit=5)
    for begun, pending in ((1, 1), (2, 0), (1, 0), (2, 0)):
        clock.sleep(1)
        following.follow(begun, pending, 9)
    following.let_go()
    assert nodes.asked == [0, 3, 0, 3, 0], "the limit is 5, and 2 are there"


def test_nothing_that_starts_is_explained_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes([ONE], Scaling(has_report=True))
    clock = Time(nodes)
    following = capacity(nodes, clock)
    for _ in range(130):
        clock.sleep(1)
        following.follow(0, 1, 3)
    (first, second) = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("no training runs: 1 training pending, each for 1 worker with 1 CPU and 0 GPUs; ")
    assert first.endswith("or processes are slow to start; autoscaler: no node is starting yet")


def test_queue_hands_out_what_there_is_room_for() -> None:
    class Numbered:
        def __init__(self) -> None:
            self.number, self.over = 0, list[str]()

        def next_trial(self) -> Any:
            self.number += 1
            return type("Named", (), {"name": f"t{self.number}"})

        def note_end(self, name: str) -> None:
            self.over.append(name)

    nodes, source = Nodes([ONE, ONE]), Numbered()
    queue = TrialQueue(source, 9, capacity(nodes, lambda: 0.0))
    names = [found.name if (found := queue.next_trial(str(number))) else None for number in range(3)]
    queue.note_end("0")
    again = queue.next_trial("4")
    assert (names, source.over, again and again.name) == (["t1", "t2", None], ["t1"], "t3")


@pytest.mark.parametrize(("requests_nodes", "asked"), [(True, 7), (False, 0)])
def test_ray_knows_how_many_trials_are_left_of_open_sweeps_alone(requests_nodes: bool, asked: int) -> None:
    """All users of a cluster see what is asked of it, and how many trials a sealed sweep has is secret."""
    nodes = Nodes([ONE, ONE])
    trials: Any = SimpleNamespace(next_trial=lambda: SimpleNamespace(name="t"))
    queue = TrialQueue(trials, 9, capacity(nodes, lambda: 0.0), requests_nodes=requests_nodes)
    for number in range(2):
        queue.next_trial(str(number))
    queue.update_requests(num_begun=2)
    assert nodes.asked[-1] == asked


# On real nodes

QUICK = ("--tiny", "--noise-multiplier=1", "--no-non-private", "--name=one", "--no-references")
FAULTY = ("--num-steps=12", "--checkpoint-every-steps=4", "--network=tests.sweeps.faulty:network")


def _nodes(number: int) -> Any:
    """A cluster of nodes with one CPU each, which nobody but its drivers reaches."""
    from ray.cluster_utils import Cluster

    given = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=given)
    for _ in range(number - 1):
        cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    return cluster


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Any]:
    cluster = _nodes(3)
    yield cluster
    cluster.shutdown()


@pytest.mark.ci
@pytest.mark.ray
def test_two_workers_train_on_nodes_of_one_cpu_each(three_nodes: Any, tmp_path: Path) -> None:
    more = ("--repeats=2", "--num-workers=2", f"--storage={tmp_path / 'storage'}")
    code, driver = run(*QUICK, *more, home=tmp_path / "home", env={"RAY_ADDRESS": three_nodes.address})
    assert code == 0, driver.stdout + driver.stderr
    results = sorted((tmp_path / "storage/sweeps/one/trials").glob("*.json"))
    assert [json.loads(path.read_text())["metrics"]["num_steps_done"] for path in results] == [10, 10]


@pytest.mark.ci
@pytest.mark.ray
def test_two_threads_on_nodes_of_one_cpu_are_refused_in_one_line(three_nodes: Any, tmp_path: Path) -> None:
    more = ("--threads-per-worker=2", f"--storage={tmp_path / 'storage'}")
    code, driver = run(*QUICK, *more, home=tmp_path / "home", env={"RAY_ADDRESS": three_nodes.address})
    assert code == 2
    assert re.fullmatch(r"error: one training needs .* \(nodes: 3 of 1 CPU and 0 GPUs\).*\n", driver.stderr)
    assert not (tmp_path / "storage/sweeps").exists()


@dataclass
class Changed:
    """A sweep of three trainings on a cluster whose second node joins late, and leaves again.

    Attributes:
      begun: trainings that had drawn, at each stage.
    """

    code: int
    said: str
    folder: Path
    begun: dict[str, set[str]]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    top = tmp_path_factory.mktemp("late")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPGCL_TEST_FOLDER", str(top))  # nodes take it from here
        cluster = _nodes(1)
        try:
            yield _sweep_on(cluster, top)
        finally:
            cluster.shutdown()


def _sweep_on(cluster: Any, top: Path) -> Changed:
    for seed, steps in ((0, 6), (1, 7), (2, 1)):
        (top / f"hold-{seed}").write_text(str(steps))
    env = {"RAY_ADDRESS": cluster.address, "DPGCL_TEST_FOLDER": str(top)}
    driver = Driver(
        *(*QUICK, *FAULTY, "--repeats=3", f"--storage={top / 'storage'}"), home=top / "home", env=env
    )

    def drawn(seed: int) -> int:
        journal = top / f"journal-{seed}"
        return journal.stat().st_size if journal.exists() else 0

    def begun() -> set[str]:
        return {str(seed) for seed in range(3) if drawn(seed)}

    driver.wait_for(lambda: drawn(0) == 6)
    found = {"one node": begun()}
    node = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    driver.wait_for(lambda: drawn(1) == 7)
    found["two nodes"] = begun()
    cluster.remove_node(node, allow_graceful=False)
    (top / "hold-0").unlink()
    driver.wait_for(lambda: (top / "storage/sweeps/one/trials/S4-Na1-private-r0.json").exists())
    (top / "hold-1").unlink()
    (top / "hold-2").unlink()
    code = driver.wait()
    return Changed(code, driver.stdout + driver.stderr, top / "storage/sweeps/one", found)


@pytest.mark.ci
@pytest.mark.ray
def test_node_that_joins_late_is_used(changed: Changed) -> None:
    assert changed.begun == {"one node": {"0"}, "two nodes": {"0", "1"}}
    assert changed.code == 0, changed.said


@pytest.mark.ci
@pytest.mark.ray
def test_restart_is_told_with_step_and_charge(changed: Changed) -> None:
    told = "worker lost, restarted at step 4, 4 steps charged"
    assert f"\nS4-Na1-private-r1: {told}\n" in changed.said
    assert "Traceback" not in changed.said
    lines = [json.loads(line) for line in (changed.folder / "log.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "restarted"]
    assert (line["trial"], line["text"]) == ("S4-Na1-private-r1", told)
    assert (line["step"], line["num_steps_repeated"]) == (4, 4)


@pytest.mark.long
@pytest.mark.ray
def test_cold_cluster_grows_for_a_sweep_and_shrinks_after_it(tmp_path: Path) -> None:
    """Two trainings wait for each other at their second draw: both run at once, or nothing ends."""
    small = {"resources": {"CPU": 1, "object_store_memory": 100 * 2**20}, "max_workers": 2}
    head = Head(num_cpus=0, node_types={"small": small})
    head.environment["DPGCL_TEST_FOLDER"] = str(tmp_path)
    for seed in (0, 1):
        (tmp_path / f"hold-{seed}").write_text("2")
    with head:
        driver = Driver(
            *(*QUICK, *FAULTY, "--repeats=2", f"--storage={tmp_path / 'storage'}"),
            home=tmp_path / "home",
            env=head.environment | {"RAY_ADDRESS": head.gcs_address},
        )
        journals = [tmp_path / f"journal-{seed}" for seed in (0, 1)]
        driver.wait_for(lambda: all(path.exists() and path.stat().st_size >= 2 for path in journals))
        for seed in (0, 1):
            (tmp_path / f"hold-{seed}").unlink()
        assert driver.wait() == 0, driver.stdout + driver.stderr
        assert "waiting up to 15 min for resources: one training needs 1 worker" in driver.stdout
        count = "import ray; ray.init(); print('alive', sum(node['Alive'] for node in ray.nodes()))"
        environment = {"RAY_ADDRESS": head.gcs_address}
        while "alive 1\n" not in head.run("python", "-c", count, environment=environment).stdout:
            time.sleep(1)


@pytest.mark.long
@pytest.mark.ray
def test_cold_cluster_without_a_fitting_node_type_refuses(tmp_path: Path) -> None:
    small = {"resources": {"CPU": 1, "object_store_memory": 100 * 2**20}, "max_workers": 2}
    with Head(num_cpus=0, node_types={"small": small}) as head:
        more = ("--threads-per-worker=2", f"--storage={tmp_path / 'storage'}")
        env = head.environment | {"RAY_ADDRESS": head.gcs_address}
        code, driver = run(*QUICK, *more, home=tmp_path / "home", env=env)
    assert code == 2
    assert "autoscaler: it will start no more nodes for this request" in driver.stderr
    assert driver.stderr.count("\n") == 1
    assert os.path.exists(tmp_path / "home")
