"""What Prometheus may read of a sweep: on Ray's own endpoint, and what it is never told."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest

from sweeps.service.planning.cost import cost_of
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Charged
from sweeps.service.running import metrics as module
from sweeps.service.running import tune
from sweeps.service.running.metrics import MEANINGS, SweepMetrics
from sweeps.service.storage.folder import SweepFolder
from tests.sweeps.support import Driver

QUICK = ("--tiny", "--noise-multiplier=1", "--no-non-private", "--no-references")
Plan = Callable[..., SweepPlan]


@dataclass
class Told:
    """Stands in for Ray's metrics: the last value of every number, by name and labels."""

    values: dict[tuple[str, ...], float] = field(default_factory=dict)
    num_counted: int = 0

    def gauge(self, name: str, meaning: str, labels: tuple[str, ...]) -> Any:
        def set_value(value: float, tags: Mapping[str, str]) -> None:
            assert tuple(tags) == labels
            self.values[(name, *tags.values())] = value

        assert meaning == MEANINGS[name]
        return SimpleNamespace(set=set_value)


def followed(plan: SweepPlan, told: Told, *, num_before: int = 0, clock: Callable[[], float]) -> SweepMetrics:
    before, num_trials = plan.trials[:num_before], len(plan.trials)
    return SweepMetrics(plan, "one", before, num_trials, told.gauge, clock)


def counts(**given: int) -> dict[str, int]:
    names = ("num_running", "num_finished", "num_failed", "num_steps", "num_restarts")
    return {name: given.get(name.removeprefix("num_"), 0) for name in names}


def test_states_and_epsilon_of_a_sweep(make_plan: Plan) -> None:
    plan, told, now = make_plan(*QUICK, "--repeats", "4"), Told(), [0.0]
    sweep = followed(plan, told, num_before=1, clock=lambda: now[0])
    now[0] = 10.0
    sweep.look(plan.trials[1:3], **counts(running=1, finished=1, steps=30, restarts=2))
    states = {state: told.values["dpgcl_trials", "one", state] for state in module.STATES}
    assert states == {"pending": 1, "running": 1, "finished": 2, "failed": 0}
    assert told.values["dpgcl_steps_per_second", "one"] == 3
    assert told.values["dpgcl_restarts", "one"] == 2
    assert plan.cost is not None
    assert told.values["dpgcl_epsilon_reserved", "one"] == plan.cost.tuned_epsilon
    spent = told.values["dpgcl_epsilon_spent", "one"]
    assert plan.trials[0].config.epsilon() < spent < told.values["dpgcl_epsilon_reserved", "one"]
    now[0] = 100_000.0
    sweep.look(plan.trials[1:], **counts(running=2, finished=1))
    assert told.values["dpgcl_epsilon_spent", "one"] == told.values["dpgcl_epsilon_reserved", "one"]


def test_epsilon_spent_of_a_search_is_that_of_its_least_noise(make_plan: Plan) -> None:
    """A σ that scores have chosen is no number to compose at."""
    plan, told = make_plan(*QUICK, "--repeats", "3"), Told()
    config = plan.trials[0].config
    quieter = dataclasses.replace(config.mechanism, noise_multiplier=4 * config.mechanism.noise_multiplier)
    chosen = [
        dataclasses.replace(trial, config=dataclasses.replace(config, mechanism=quieter))
        for trial in plan.trials
    ]
    followed(plan, told, clock=lambda: 0.0).look(chosen, **counts(running=3))
    assert told.values["dpgcl_epsilon_spent", "one"] == told.values["dpgcl_epsilon_reserved", "one"]


def test_epsilon_spent_has_the_earlier_sweep_that_chose_the_settings(make_plan: Plan) -> None:
    plan, told = make_plan(*QUICK, "--repeats", "2"), Told()
    first, second = plan.trials
    drawn = {first.name: Charged(num_steps=first.config.mechanism.num_steps + 3, num_first_steps=2)}
    comparing: Any = SimpleNamespace(
        data=plan.data,
        trials=[second],
        cost=plan.cost,
        release=plan.release,
        earlier=SimpleNamespace(trials=(first,), drawn=drawn),
    )
    followed(comparing, told, clock=lambda: 0.0).look([second], **counts(running=1))
    expected = cost_of(plan.release, plan.trials, drawn)
    assert expected is not None
    assert told.values["dpgcl_epsilon_spent", "one"] == expected.tuned_epsilon


def test_accounting_takes_a_hundredth_of_the_time_at_most(
    make_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, now, counted = make_plan(*QUICK, "--repeats", "4"), [0.0], []

    def slow(*_: object) -> None:
        counted.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(module, "cost_of", slow)
    sweep = followed(plan, Told(), clock=lambda: now[0])
    for moment in range(0, 600, 10):
        now[0] = float(max(moment, now[0]))
        sweep.look(plan.trials[: min(4, moment // 100)], **counts())
    assert counted == [0.0, 210.0, 420.0]


def test_private_records_tell_no_speed_and_no_restarts(make_plan: Plan) -> None:
    plan, told = make_plan(*QUICK, "--repeats", "2"), Told()
    config = plan.trials[0].config
    in_advance = dataclasses.replace(config.mechanism, num_restart_steps=4)
    trial = dataclasses.replace(plan.trials[0], config=dataclasses.replace(config, mechanism=in_advance))
    private: Any = SimpleNamespace(
        data=SimpleNamespace(train_is_public=False),
        **{"trials": [trial], "cost": plan.cost, "release": plan.release, "earlier": None},
    )
    followed(private, told, clock=lambda: 0.0).look([trial], **counts(steps=9, restarts=1))
    assert {name for name, *_ in told.values} == {
        "dpgcl_trials",
        "dpgcl_epsilon_reserved",
        "dpgcl_epsilon_spent",
    }


@pytest.mark.parametrize(("release", "on_cluster"), [("sealed", True), ("open", False)])
def test_sealed_sweeps_and_private_rays_tell_nothing(
    release: str, on_cluster: bool, make_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(*QUICK, "--release", release)
    monkeypatch.setattr(tune, "_joins_cluster", lambda: on_cluster)
    monkeypatch.setattr(tune, "ray_gauge", lambda *_: pytest.fail("told"))
    assert tune._metrics_of(plan, SweepFolder(tmp_path), plan.trials) is None


# On Ray's own endpoint


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of one node."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("DPGCL_TEST_FOLDER", str(tmp_path))  # nodes take it from here
    given = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=given | {"dashboard_port": 0})
    yield cluster
    cluster.shutdown()


def scraped(port: int) -> dict[str, float]:
    """This package's lines of a node's metrics, the labels but sweep and state left out."""
    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if given := re.fullmatch(r"ray_(dpgcl_\w+)\{(.*)\} (\S+)", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', given[2]))
            assert labels["sweep"] == "one"
            found[" ".join([given[1], *([labels["state"]] if "state" in labels else [])])] = float(given[3])
    return found


@pytest.mark.ci
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_rays_own_endpoint_serves_them_while_a_sweep_runs(node: Any, tmp_path: Path) -> None:
    """The first of two trainings waits at its sixth draw; the second has no room."""
    (tmp_path / "hold-0").write_text("6")
    port = node.head_node.metrics_export_port
    faulty = ("--num-steps=12", "--checkpoint-every-steps=4", "--network=tests.sweeps.faulty:network")
    driver = Driver(
        *(*QUICK, *faulty, "--name=one", "--repeats=2", f"--storage={tmp_path / 'storage'}"),
        home=tmp_path / "home",
        env={"RAY_ADDRESS": node.address, "DPGCL_TEST_FOLDER": str(tmp_path)},
    )

    def of_a_running_sweep() -> dict[str, float] | None:
        found = scraped(port)
        began = found.get("dpgcl_trials running") == 1 and found.get("dpgcl_epsilon_spent", 0) > 0
        return found if began and found.get("dpgcl_steps_per_second", 0) > 0 else None

    found = driver.wait_for(of_a_running_sweep)
    (tmp_path / "hold-0").unlink()
    assert driver.wait() == 0, driver.stdout + driver.stderr
    states = {state: found[f"dpgcl_trials {state}"] for state in module.STATES}
    assert states == {"pending": 1, "running": 1, "finished": 0, "failed": 0}
    assert found["dpgcl_restarts"] == 0
    assert 0 < found["dpgcl_epsilon_spent"] < found["dpgcl_epsilon_reserved"]
    said = re.search(r"all (?:its )?2 trials together.*?ε = ([\d.]+)", driver.stdout)
    assert said is None or abs(float(said[1]) - found["dpgcl_epsilon_reserved"]) < 0.01
