"""Copies of a sweep at an address: what may be seen and nothing else, once, and sent later where it fails."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fsspec.implementations.memory import MemoryFileSystem

from dpgcl_core.errors import ConfigError, StorageError
from sweeps.group_size import points
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.running import sweep as service
from sweeps.service.running.outbox import Patience
from sweeps.service.running.publishing import (
    Publisher,
    checked_destination,
    places_of,
    publish_release,
    withdraw_copies,
)
from sweeps.service.storage.folder import SweepFolder
from tests.sweeps.support import options, without_ray
from tests.trainers.tracking.test_tracking import free_port
from trainers.files.destination import MANIFEST, Destination

SOON = Patience(tries=2, seconds=300.0)
RESULT: dict[str, Any] = {
    "metrics": {
        "knn_accuracy": 0.5,
        "epsilon": 1.0,
        "num_steps_done": 10,
        "train_loss": 3.25,
        "made_up": 7.0,
    },
    "series": {"noised_snr_first_step": [[0, 0.1]], "train_loss": [[0, 4.5]]},
    "params": {"group_size": 4, "tracking": "http://me:hush@host/x"},
    "config_hash": "abc",
    "ended_ms": 1,
}
SHOWN = ("config.yaml", "answer.json", "report.html", "group_size.png", "group_size.csv", "group_size.tex")
SHOWN += ("privacy_statement.json", "privacy_statement.md")
KEPT = ("plan.json", "log.jsonl", "lock", "published.json", ".report.html.12.tmp", "notes.txt", "core")
KEPT += ("checkpoints/a/checkpoint.pt", "drawn/a.json", "started/a.json", "trusted/trials/a.json")
KEPT += ("trusted/figure.png", "ray/x/figure.png", "suggested/a.json", "release/model.safetensors")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What lies in memory is gone after the test."""
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def place() -> Destination:
    return Destination.open("memory://copies")


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """The folder of a finished sweep, with all that one may hold."""
    path = tmp_path / "sweeps" / "one"
    for name in (*SHOWN, *KEPT):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("[]" if name == "published.json" else name)
    (path / "link.png").symlink_to(path / "plan.json")
    found = SweepFolder(path)
    found.keep("a", RESULT)
    return found


def published(place: Destination, folder: SweepFolder, *, is_public: bool = False) -> bool:
    with Publisher(place, folder, is_public=is_public) as publisher:
        publisher.begin("id")
        publisher.finished("a")
        return publisher.end(["a"], SOON)


def test_what_may_be_seen_is_copied_and_nothing_else(place: Destination, folder: SweepFolder) -> None:
    assert published(place, folder)
    assert set(place.at("one").sizes()) == {*SHOWN, MANIFEST, "trials/a.json"}
    assert set(place.sizes()) == {f"one/{name}" for name in place.at("one").sizes()}


@pytest.mark.parametrize("is_public", [False, True])
def test_private_only_and_undeclared_numbers_of_private_data_are_left_out(
    is_public: bool, place: Destination, folder: SweepFolder
) -> None:
    published(place, folder, is_public=is_public)
    found = json.loads(place.read("one/trials/a.json") or b"")
    private = {"train_loss", "made_up"} if is_public else set()
    assert set(found["metrics"]) == {"knn_accuracy", "epsilon", "num_steps_done"} | private
    assert set(found["series"]) == {"noised_snr_first_step"} | (private & {"train_loss"})
    assert set(found) == {"params", "metrics", "series"}
    assert found["params"] == {"group_size": 4, "tracking": "http://***@host/x"}


def test_copying_again_sends_what_changed_alone(
    place: Destination, folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(place, folder)
    (folder.path / "report.html").write_text("another")
    names, write = list[str](), Destination.write
    monkeypatch.setattr(
        Destination, "write", lambda self, name, content: names.append(name) or write(self, name, content)
    )
    assert published(place, folder)
    assert names == ["report.html", MANIFEST]


def test_place_that_fails_keeps_all_and_is_told_once(
    place: Destination,
    folder: SweepFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: Destination, name: str, content: Any) -> None:
        if name != MANIFEST:
            raise StorageError(f"memory://copies failed while writing {name}: no room")
        write(self, name, content)

    write = Destination.write
    with monkeypatch.context() as broken:
        broken.setattr(Destination, "write", fail)
        assert not published(place, folder)
    said = capsys.readouterr().out
    assert (
        said.count("warning: memory://copies failed while writing config.yaml: no room; files are kept in")
        == 1
    )
    assert f"memory://copies/one did not take 9 files; kept in {folder.path}." in said
    assert published(place, folder)
    assert set(place.at("one").sizes()) == {*SHOWN, MANIFEST, "trials/a.json"}


def test_place_that_hangs_holds_no_training_up(
    place: Destination, folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, write = threading.Event(), Destination.write
    with Publisher(place, folder, is_public=True) as publisher:
        publisher.begin("id")
        monkeypatch.setattr(
            Destination, "write", lambda self, *given: (answers.wait(), write(self, *given))[1]
        )
        for _ in range(3):
            publisher.finished("a")
        assert not publisher.end(["a"], Patience(tries=3, seconds=0.01))
        answers.set()


def test_sweep_of_the_same_name_is_not_replaced(place: Destination, folder: SweepFolder) -> None:
    published(place, folder)
    with (
        Publisher(place, folder, is_public=True) as publisher,
        pytest.raises(StorageError, match="same name"),
    ):
        publisher.begin("another id")


def test_statements_are_taken_away_wherever_they_were_sent(folder: SweepFolder) -> None:
    """They would promise less than is spent, and so would the captions of figures and tables."""
    places = [Destination.open(f"memory://{name}") for name in ("first", "second")]
    for place in places:
        published(place, folder)
    assert places_of(folder) == ["memory://first", "memory://second"]
    withdraw_copies(folder, "id")
    for place in places:
        left = set(place.at("one").sizes())
        stating = ("privacy_statement", "answer", "report", "group_size")
        assert not {name for name in left if name.startswith(stating)}
        assert any(name.startswith("trials/") for name in left)


def test_statement_that_cannot_be_taken_away_stops_the_sweep(
    place: Destination, folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(place, folder)

    def refuse(self: Destination, name: str) -> None:
        raise StorageError(f"memory://copies failed while removing {name}: denied")

    monkeypatch.setattr(Destination, "remove", refuse)
    with pytest.raises(StorageError, match=r"removing answer\.json: denied"):
        withdraw_copies(folder, "id")


def test_damaged_list_of_places_is_refused(folder: SweepFolder) -> None:
    (folder.path / "published.json").write_text("{")
    with pytest.raises(StorageError, match=r"published\.json is damaged"):
        places_of(folder)


def test_release_of_a_sealed_sweep_is_copied_alone(place: Destination, folder: SweepFolder) -> None:
    assert publish_release(place, "one", "id", folder.path / "release", SOON)
    assert set(place.sizes()) == {"one/model.safetensors", f"one/{MANIFEST}"}


@pytest.mark.parametrize("address", ["file://{root}", "file://{root}/sweeps/one"])
def test_storage_folder_is_no_place_for_its_own_copies(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="outside of its storage folder"):
        checked_destination(address.format(root=tmp_path), tmp_path, asks=True)


def test_nothing_is_asked_of_the_place_in_a_dry_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    address = f"file://{tmp_path}/file/x"
    checked_destination(address, tmp_path / "storage", asks=False)
    with pytest.raises(StorageError):
        checked_destination(address, tmp_path / "storage", asks=True)


# Whole sweeps, on a server that speaks S3

WRITTEN = {*SHOWN[:3], "group_size.png", "privacy_statement.json", "privacy_statement.md", MANIFEST}


class Bucket:
    """A bucket of a server on this machine, which keeps its content when it is stopped."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()
        requests.post(f"http://127.0.0.1:{port}/moto-api/reset", timeout=60)  # of earlier tests
        self.client.create_bucket(Bucket="results")

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", region_name="us-east-1")

    def names(self) -> set[str]:
        found = self.client.list_objects_v2(Bucket="results", Prefix="team/one/")
        return {each["Key"].removeprefix("team/one/") for each in found.get("Contents", [])}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    port = free_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    found = Bucket(port)
    yield found
    found.stop()


class Ray:
    """Stands in for Ray: every trial ends at once, but those that fail.

    Attributes:
      after: called when a trial's result was handed over.
      failing: names of trials.
    """

    def __init__(self) -> None:
        self.after: Callable[[], None] = lambda: None
        self.failing: set[str] = set()
        self.trained: list[str] = []

    def run_trials(
        self,
        session: Any,
        plan: SweepPlan,
        folder: Any,
        trials: list[Trial],
        on_result: Any,
        budget: Any = None,
    ) -> dict[str, str]:
        for trial in trials:
            if trial.name not in self.failing:
                self.trained.append(trial.name)
                metrics = {"epsilon": 1.0, "num_steps_charged": 10, "num_steps_done": 10, "knn_accuracy": 0.5}
                on_result(trial.name, {"metrics": metrics, "series": {}})
                self.after()
        return {trial.name: "it failed" for trial in trials if trial.name in self.failing}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    without_ray(monkeypatch, stand_in.run_trials)
    return stand_in


@pytest.fixture
def sweep(tmp_path: Path, empty_database: Path, ray: Ray) -> Callable[..., int]:
    """Runs the sweep `one` of four trials, which is published."""
    storage = tmp_path / "storage"
    storage.mkdir()
    shutil.copy(empty_database, storage)

    def figure(uri: str, name: str, folder: Path) -> list[Path]:
        (folder / "group_size.png").write_bytes(b"drawn")
        return [folder / "group_size.png"]

    def start(*more: str) -> int:
        chosen: SweepOptions = options(
            *("--tiny", "--noise-multiplier", "1", "--repeats", "2", "--name", "one"),
            *("--storage", str(storage), *more),
        )
        return service.run_sweep("group-size", chosen, points(chosen), figure)

    return start


TO = ("--publish-to", "s3://results/team")
TRIALS = {f"trials/S4-Na1-{kind}-r{seed}.json" for kind in ("private", "eps-inf") for seed in (0, 1)}


@pytest.mark.ci
def test_sweep_is_copied_to_s3_and_only_once(
    sweep: Callable[..., int], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(*TO) == 0
    assert bucket.names() == TRIALS | WRITTEN
    names, write = list[str](), Destination.write
    monkeypatch.setattr(
        Destination, "write", lambda self, name, content: names.append(name) or write(self, name, content)
    )
    assert sweep("--resume") == 0, "to where it was copied before"
    assert not TRIALS & set(names)
    assert bucket.names() == TRIALS | WRITTEN


@pytest.mark.ci
def test_server_that_goes_away_in_mid_sweep_gets_the_rest_by_a_resume(
    sweep: Callable[..., int], ray: Ray, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.after = lambda: bucket.stop() if len(ray.trained) == 1 else None
    assert sweep(*TO) == 1
    said = capsys.readouterr().out
    assert said.count("warning: s3://results") == 1
    assert "s3://results/team/one did not take" in said
    assert said.rstrip().endswith("--resume --name one")
    bucket.start()
    assert sweep("--resume") == 0
    assert len(ray.trained) == 4
    assert bucket.names() == TRIALS | WRITTEN


@pytest.mark.ci
def test_sweep_that_draws_more_takes_its_statement_away_first(
    sweep: Callable[..., int], ray: Ray, bucket: Bucket
) -> None:
    ray.failing = {"S4-Na1-private-r1"}
    assert sweep(*TO) == 1
    assert bucket.names() == (TRIALS - {"trials/S4-Na1-private-r1.json"}) | WRITTEN
    seen = list[set[str]]()
    ray.failing, ray.after = set(), lambda: seen.append(bucket.names())
    assert sweep("--resume") == 0
    assert not {name for name in seen[0] if name.startswith(("privacy_statement", "answer", "report"))}
    assert bucket.names() == TRIALS | WRITTEN


@pytest.mark.ci
def test_bucket_that_is_not_there_is_refused_before_anything_starts(
    sweep: Callable[..., int], ray: Ray, bucket: Bucket, tmp_path: Path
) -> None:
    with pytest.raises(
        StorageError, match=r"^s3://nowhere/team failed while writing .*bucket does not exist"
    ):
        sweep("--publish-to", "s3://nowhere/team")
    assert ray.trained == []
    assert not (tmp_path / "storage" / "sweeps").exists()
