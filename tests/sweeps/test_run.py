"""Whole sweeps on Ray: one as a user starts it; what else needs Tune and Train, on one Ray that is shared.

The first of them runs without Ray as well, in this process, which takes seconds.
What the sweeps of the other scripts do without Ray is in `test_every_sweep`, signals and kills are in
`test_interrupted`, a ledger that dies under a sweep is in `test_faults`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dashboards.query.trial_frames import load_trials
from dpgcl_core.sampling.slots import SampledGroups
from sweeps.service.cluster.ray_session import RaySession, capacity_of, ray_session
from sweeps.service.options.service import ServiceOptions
from sweeps.service.running import driver as running
from sweeps.service.running.clock import SystemClock
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import contents, plan, run, run_script, tracked_runs, train_here, write_npz
from trainers.config.training import PerformanceConfig
from trainers.data.dataset import TrainingData
from trainers.files.outcome_file import OUTCOMES_FILE
from trainers.tracking.mlflow_server import connect

pytestmark = pytest.mark.ray

QUICK = ("--tiny", "--noise-multiplier", "1")


# A sweep that nothing disturbs, and then the same with --resume


@dataclass
class Whole:
    """What a sweep left, and what resuming it changed."""

    code: int
    out: str
    err: str
    left_at_home: list[str]
    folder: Path
    uri: str
    written: dict[str, float]
    resumed_code: int
    resumed: str


@pytest.fixture(scope="module", params=["here", pytest.param("on Ray", marks=pytest.mark.ci)])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, empty_database: Path
) -> Whole:
    top = tmp_path_factory.mktemp("whole")
    home, storage = top / "home", top / "storage"
    arguments = (*QUICK, "--storage", str(storage), "--name", "one")
    if request.param == "here":
        storage.mkdir()
        shutil.copy(empty_database, storage)
        code, out, err = run_here(*arguments, home=home)
    else:
        code, driver = run(*arguments, home=home)
        out, err = driver.stdout, driver.stderr
    folder = storage / "sweeps" / "one"
    written = {path.name: path.stat().st_mtime for path in (folder / "trials").glob("*.json")}
    left_at_home = contents(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "ray_session", lambda *_: pytest.fail("Ray was started"))
        resumed_code, resumed, _ = run_script("group_size", *arguments, "--resume")
    uri = f"sqlite:///{storage}/mlflow.db"
    return Whole(code, out, err, left_at_home, folder, uri, written, resumed_code, resumed)


def run_here(*arguments: str, home: Path) -> tuple[int, str, str]:
    """The sweep in this process, which trains, too."""
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        patch.setenv("HOME", str(home))
        return run_script("group_size", *arguments)


def test_sweep_ends_with_code_0_and_silent_stderr(whole: Whole) -> None:
    assert (whole.code, whole.err) == (0, ""), whole.out


def test_sweep_tells_progress(whole: Whole) -> None:
    assert "sweep: one (0 of 2 trials done)" in whole.out
    assert "[1/2] " in whole.out


def test_sweep_writes_figure_and_table(whole: Whole) -> None:
    for name in ("group_size.png", "group_size.csv", "group_size.md"):
        assert (whole.folder / name).stat().st_size > 100


def test_sweep_logs_figure_and_table_to_its_parent_run(whole: Whole) -> None:
    client = connect(whole.uri)
    (parent,) = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    logged = {Path(entry.path).name for entry in client.list_artifacts(parent.info.run_id)}
    assert {"group_size.png", "group_size.csv", "group_size.md"} <= logged


def test_sweep_says_on_every_run_what_tuning_costs(whole: Whole) -> None:
    client = connect(whole.uri)
    runs = tracked_runs(client)
    assert len(runs) == 3
    (line,) = {run.data.tags["tuning_cost"] for run in runs}
    assert line.startswith("Open release: its one trial ε = ")
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert line in (whole.folder / "group_size.md").read_text()


def test_sweep_tracks_params_and_metrics_of_its_trials(whole: Whole) -> None:
    trials = load_trials(whole.uri, "one").set_index("noise_multiplier").sort_index()
    assert list(trials.index) == [0.0, 1.0]
    assert set(trials["group_size"]) == {4}
    assert set(trials["num_steps_charged"]) == {10}
    assert (trials["knn_accuracy"] > 0.2).all()
    private = trials.loc[1.0]
    assert private["epsilon"] == pytest.approx(private["epsilon_prv"], rel=0.05)
    assert private["snr_first_step"] > 0
    assert private["snr_first_step_no_augmentation"] > 0


def test_outcomes_of_public_scores_are_kept_in_the_folder_and_survive_a_resume(whole: Whole) -> None:
    folder = SweepFolder(whole.folder)
    outcomes, results = folder.outcomes(), folder.read_results()
    assert set(outcomes) == set(results)
    for name, each in outcomes.items():
        assert {"knn_accuracy", "linear_probe_accuracy"} <= set(each.scores)
        for score, values in each.scores.items():
            assert len(values) == len(each.record_ids) == results[name]["params"]["num_scored_records"]
            assert values.mean() == pytest.approx(results[name]["metrics"][score], abs=1e-6)
    assert len({each.record_ids.tobytes() for each in outcomes.values()}) == 1


def test_outcomes_are_not_in_mlflow(whole: Whole) -> None:
    assert list(whole.folder.rglob(OUTCOMES_FILE))
    assert not list((whole.folder.parents[1] / "mlartifacts").rglob("*.npz"))


def test_sweep_writes_nothing_to_the_home_folder(whole: Whole) -> None:
    assert whole.left_at_home == []


def test_sweep_keeps_all_in_the_storage_folder(whole: Whole) -> None:
    kept = {path.split("/")[0] for path in contents(whole.folder.parents[1])}
    assert kept == {"mlartifacts", "mlflow.db", "sweeps"}
    assert {path.name for path in whole.folder.iterdir() if path.is_dir()} == {
        "checkpoints",
        "drawn",
        "started",
        "trials",
    }


def test_resume_of_a_finished_sweep_trains_nothing(whole: Whole) -> None:
    assert whole.resumed_code == 0, whole.resumed
    assert "sweep: one (2 of 2 trials done)" in whole.resumed
    assert "[" not in whole.resumed.split("trials done)")[1]
    now = {path.name: path.stat().st_mtime for path in (whole.folder / "trials").glob("*.json")}
    assert now == whole.written


def test_unreachable_server_ends_the_sweep_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running, "ray_session", lambda *_: pytest.fail("Ray was started"))
    storage = ("--storage", str(tmp_path / "storage"))
    code, _, err = run_script("group_size", *QUICK, *storage, "--tracking-uri", "http://127.0.0.1:9")
    assert code == 2
    assert err.startswith("error: MLflow at http://127.0.0.1:9 failed while connecting")
    assert err.count("\n") == 1
    assert not (tmp_path / "storage").exists()


# What is shared by the sweeps below


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """$DPGCL_TEST_FOLDER of all processes on the shared Ray."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def shared_ray(own_folder: Path) -> Iterator[None]:
    """One Ray for all sweeps of this process that follow; each has a folder of its own for Tune."""
    before = dict(os.environ)
    os.environ["DPGCL_TEST_FOLDER"] = str(own_folder)
    with ray_session(ServiceOptions(), PerformanceConfig()) as session, pytest.MonkeyPatch.context() as patch:

        def shared(
            service: ServiceOptions, performance: PerformanceConfig, *places: object
        ) -> nullcontext[RaySession]:
            scratch = Path(tempfile.mkdtemp(dir=session.scratch))
            return nullcontext(
                replace(session, scratch=scratch, capacity=capacity_of(service, performance), service=service)
            )

        patch.setattr(running, "ray_session", shared)
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.ci
def test_records_are_shared_by_the_trials_of_a_machine(shared_ray: None, own_folder: Path) -> None:
    import ray

    records = [ray.put(plan(*QUICK).data)]

    @ray.remote(num_cpus=1)
    def look(number: int, records: list[Any]) -> tuple[str, list[tuple[bool, bool]]]:
        data = ray.get(records[0])
        (own_folder / f"looked-{number}").touch()
        while not (own_folder / f"looked-{1 - number}").exists():  # until the other one looks, too
            time.sleep(0.01)
        arrays = [data.train.images, data.train.ids, data.queries.images]
        flags = [(array.flags.owndata, array.flags.writeable) for array in arrays]
        return ray.get_runtime_context().get_worker_id(), flags

    looks = [look.remote(0, records), look.remote(1, records)]
    (one, flags), (other, other_flags) = ray.get(looks, timeout=300)
    assert one != other
    assert flags == other_flags == [(False, False)] * 3


# A training whose process dies, and one that fails


@dataclass
class Restarted:
    """A sweep of two trainings: the first one's process dies once, the second one raises."""

    code: int
    out: str
    folder: Path

    def kept(self, path: str) -> dict[str, Any]:
        return json.loads((self.folder / path).read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def restarted(
    shared_ray: None, own_folder: Path, tmp_path_factory: pytest.TempPathFactory, empty_database: Path
) -> Restarted:
    storage = tmp_path_factory.mktemp("restarted")
    shutil.copy(empty_database, storage)
    (own_folder / "die-0").write_text("7")
    (own_folder / "raise-1").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampledGroups, "draw", SampledGroups.draw)  # planning builds the network here
        code, out, err = run_script(
            "group_size",
            *(*QUICK, "--no-non-private", "--repeats=2", "--num-steps=12", "--checkpoint-every-steps=4"),
            *("--network=tests.sweeps.faulty:network", f"--storage={storage}", "--name=one"),
        )
    return Restarted(code, out + err, storage / "sweeps" / "one")


@pytest.mark.ci
def test_dead_training_is_restarted_from_its_checkpoint_by_the_same_driver(
    restarted: Restarted, own_folder: Path
) -> None:
    metrics = restarted.kept("trials/S4-Na1-private-r0.json")["metrics"]
    assert (metrics["num_steps_done"], metrics["num_restarts"]) == (12, 1), restarted.out
    assert (
        own_folder / "journal-0"
    ).stat().st_size == 7 + 8  # it died at the seventh draw, after the fourth step
    assert metrics["num_steps_charged"] == 12 + 4  # as many may be lost between two checkpoints


@pytest.mark.ci
def test_repeated_steps_cost_more_than_the_plan_said(restarted: Restarted) -> None:
    planned = restarted.kept("plan.json")["params"]["target_epsilon"]
    assert restarted.kept("trials/S4-Na1-private-r0.json")["metrics"]["epsilon"] > planned * 1.05


@pytest.mark.ci
def test_failing_training_stops_no_other_is_told_and_not_repeated(restarted: Restarted) -> None:
    assert restarted.code == 1
    assert "failed: S4-Na1-private-r1 (" in restarted.out
    assert "RuntimeError: the words of a record" in restarted.out  # public data: all may be told
    assert "--resume --name one\n" in restarted.out
    assert restarted.kept("drawn/S4-Na1-private-r1.json")["num_attempts"] == 1


# Two workers, private data


@dataclass
class Pair:
    """A sweep of two trainings on two workers each, of which the second fails."""

    code: int
    said: str
    folder: Path


@pytest.fixture(scope="module")
def pair(
    shared_ray: None, own_folder: Path, tmp_path_factory: pytest.TempPathFactory, empty_database: Path
) -> Pair:
    top = tmp_path_factory.mktemp("pair")
    (top / "storage").mkdir()
    shutil.copy(empty_database, top / "storage")
    (own_folder / "fail").touch()
    data = write_npz(top / "own.npz", 128)
    code, out, err = run_script(
        "group_size",
        *(*QUICK, "--dataset", data, "--num-records-public", "128", "--num-workers", "2", "--no-ledger"),
        *("--seed", "1", "--repeats", "2", "--network", "tests.sweeps.watched:network"),
        *("--storage", str(top / "storage"), "--name", "one"),
    )
    return Pair(code, out + err, top / "storage" / "sweeps" / "one")


@pytest.mark.ci
def test_two_workers_train_one_trial(pair: Pair) -> None:
    assert list(path.stem for path in (pair.folder / "trials").iterdir()) == ["S4-Na1-private-r0"], pair.said
    metrics = json.loads((pair.folder / "trials" / "S4-Na1-private-r0.json").read_text())["metrics"]
    assert metrics["num_steps_charged"] == 10 + 10  # T + R: private data without a ledger


@pytest.mark.ci
def test_private_training_releases_only_what_may_be_released(pair: Pair) -> None:
    kept = json.loads((pair.folder / "trials" / "S4-Na1-private-r0.json").read_text())
    assert set(kept["metrics"]) == {"epsilon", "num_steps_done", "num_steps_charged"}
    assert kept["series"] == {}


@pytest.mark.ci
def test_failure_on_two_workers_is_told_and_not_repeated(pair: Pair) -> None:
    assert pair.code == 1
    assert "failed: S4-Na1-private-r1 (RuntimeError (its message is withheld" in pair.said
    assert SweepFolder(pair.folder).starts("S4-Na1-private-r1").num_starts == 1


@pytest.mark.ci
def test_failure_on_private_data_leaves_its_words_nowhere(pair: Pair) -> None:
    assert "the words of a record" not in pair.said
    files = [path for path in pair.folder.parents[1].rglob("*") if path.is_file()]
    assert [path for path in files if b"the words of a record" in path.read_bytes()] == []


@pytest.mark.ci
def test_workers_with_a_shard_each_train_a_resumable_sweep(
    shared_ray: None, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetches its own part of the records; the slots are kept, so that a resume has the same shards."""
    shutil.copy(empty_database, tmp_path)
    import ray

    put, parts = ray.put, list[TrainingData]()

    def record_put(value: Any) -> Any:
        parts.extend([value] if isinstance(value, TrainingData) else [])
        return put(value)

    monkeypatch.setattr(ray, "put", record_put)
    given = ("--dataset", write_npz(tmp_path / "own.npz", 128), "--num-records-public", "130", "--no-ledger")
    own = ("--shards", "2", "--storage", str(tmp_path), "--name", "one")
    code, out, err = run_script("group_size", *QUICK, *given, *own)
    assert code == 0, err
    assert "The 130 slots are cut into 2 ranges" in out
    assert [part.is_part for part in parts] == [True, True]
    assert sum(len(part.train) for part in parts) == len({*parts[0].train.ids, *parts[1].train.ids}) == 128
    (trial,) = (tmp_path / "sweeps" / "one" / "trials").iterdir()
    table = next((tmp_path / "slot-tables").glob("*-130.npz"))
    before = table.read_bytes()
    trial.unlink()
    code, _, err = run_script("group_size", "--resume", "--name", "one", "--storage", str(tmp_path))
    assert code == 0, err
    assert trial.exists()
    assert table.read_bytes() == before


# A sealed sweep


@pytest.mark.ci
def test_sealed_sweep_publishes_one_model(
    shared_ray: None, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(empty_database, tmp_path)
    import ray

    monkeypatch.setattr(SystemClock, "sleep_until", lambda *_: None)
    sealed = ("--release", "sealed", "--mean-trials", "1.5", "--name", "one")
    code, _, err = run_script("group_size", *QUICK, *sealed, "--storage", str(tmp_path))
    assert code == 0, err
    statement = {"privacy_statement.json", "privacy_statement.md"}
    names = {"model.safetensors", "answer.json", "result.json"} | statement
    assert {path.name for path in (tmp_path / "sweeps/one/release").iterdir()} == names
    session = Path(
        ray._private.worker._global_node.get_session_dir_path()
    )  # of a cluster, all of it reads this
    written = [path for path in session.rglob("*") if "experiment_state" in path.name or "draw-" in path.name]
    assert written == []
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    assert len(tracked_runs(client)) == 1


# A search, and then the same with --resume, one result lost


@dataclass
class Searched:
    """What a search left, and what resuming it changed; `ended` and `resumed` are code, stdout and stderr."""

    ended: tuple[int, str, str]
    folder: Path
    uri: str
    resumed: tuple[int, str, str]
    before: dict[str, Any]


def read_trials(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "trials").glob("*.json")}


@pytest.fixture(scope="module")
def searched(shared_ray: None, tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Searched:
    top = tmp_path_factory.mktemp("searched")
    shutil.copy(empty_database, top)
    given = ("--tiny", "--noise-multiplier-range", "1", "4", "--objectives", "knn_accuracy", "epsilon")
    given += ("--name", "one", f"--storage={top}")
    ended = run_script("search", *given)
    folder = top / "sweeps" / "one"
    before = read_trials(folder)
    (folder / "trials" / "trial-2.json").unlink()
    resumed = run_script("search", *given, "--resume")
    return Searched(ended, folder, f"sqlite:///{top}/mlflow.db", resumed, before)


@pytest.mark.ci
def test_search_ends_with_code_0_and_silent_stderr(searched: Searched) -> None:
    assert (searched.ended[0], searched.ended[2]) == (0, ""), searched.ended[1]
    assert sorted(searched.before) == ["trial-1", "trial-2", "trial-3", "trial-4"]


@pytest.mark.ci
def test_search_says_its_pareto_front(searched: Searched) -> None:
    assert "Pareto front, " in searched.ended[1]


@pytest.mark.ci
def test_search_writes_its_figure(searched: Searched) -> None:
    for name in ("search.png", "search.csv", "search.md"):
        assert (searched.folder / name).stat().st_size > 100


@pytest.mark.ci
def test_search_tracks_what_was_searched_and_each_trial(searched: Searched) -> None:
    client = connect(searched.uri)
    (parent,) = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    assert parent.data.params["searched"] == "group_size, noise_multiplier, learning_rate"
    assert parent.data.params["objectives"] == "knn_accuracy, epsilon"
    assert (parent.data.params["sampler"], parent.data.params["num_trials"]) == ("tpe", "4")
    trials = load_trials(searched.uri, "one")
    assert sorted(trials["trial_number"]) == [1, 2, 3, 4]
    assert set(trials["num_steps_charged"]) == {10}
    for row in trials.itertuples():
        written = json.loads((searched.folder / "suggested" / f"{row.trial}.json").read_text())
        assert (row.group_size, row.noise_multiplier) == (written["group_size"], written["noise_multiplier"])


@pytest.mark.ci
def test_resumed_search_trains_the_lost_trial_alone(searched: Searched) -> None:
    assert searched.resumed[0] == 0, searched.resumed[2]
    assert "(3 of 4 trials done)" in searched.resumed[1]
    after = read_trials(searched.folder)
    assert [name for name in after if after[name] != searched.before[name]] in ([], ["trial-2"])
    assert after["trial-2"]["config_hash"] == searched.before["trial-2"]["config_hash"]
