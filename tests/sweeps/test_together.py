"""Two users at once, on one cluster, with one ledger and one server; and clusters that cannot be used.

Judged by counts: of draws, of the ledger's steps and of runs on the server.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.running.outbox import patiently
from tests.sweeps.head import Head
from tests.sweeps.support import Driver, tracked_runs, write_npz
from tests.trainers.tracking.test_tracking import end, free_port, start_server
from trainers.tracking.mlflow_server import connect

pytestmark = [
    pytest.mark.ray,
    pytest.mark.server,
    pytest.mark.ci,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="the test's head needs a second loopback address"),
]

NUM_STEPS, NUM_TRIALS = 6, 2
ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--no-references", f"--repeats={NUM_TRIALS}"),
    *(f"--num-steps={NUM_STEPS}", "--checkpoint-every-steps=2", "--max-concurrent-trials=1"),
    *("--network=tests.sweeps.faulty:network", "--dataset-id=scans"),
)


class User:
    """Somebody with a home, a storage folder and public seeds of their own.

    All trainings keep their journals in one folder, by their seeds: workers have the head's environment.
    """

    def __init__(self, name: str, seed: int, top: Path, head: Head, *shared: str) -> None:
        self.name, self.folder, self._seed = name, top / name, seed
        self.folder.mkdir()
        self._top, self._shared, self._head = top, shared, head

    def start(self, *more: str) -> Driver:
        env = {key: value for key, value in self._head.environment.items() if key != "HOME"}
        given = (*ARGUMENTS, *self._shared, f"--storage={self.folder / 'storage'}", f"--seed={self._seed}")
        home = self.folder / "home"
        return Driver(*given, *more, home=home, env=env | {"RAY_ADDRESS": self._head.gcs_address})

    def drawn(self) -> int:
        journals = [self._top / f"journal-{self._seed + number}" for number in range(NUM_TRIALS)]
        return sum(path.stat().st_size for path in journals if path.exists())

    def hold(self) -> None:
        (self._top / f"hold-{self._seed}").write_text("2")

    def let_go(self) -> None:
        (self._top / f"hold-{self._seed}").unlink()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    found = Head(num_cpus=2)
    found.environment["DPGCL_TEST_FOLDER"] = str(tmp_path)
    with found:
        yield found


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[str]:
    folder, port = tmp_path / "server", free_port()
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_database.read_bytes())
    process = start_server(folder, port)
    yield f"http://127.0.0.1:{port}"
    end(process)


def test_two_users_share_a_cluster_a_ledger_and_a_server(head: Head, server: str, tmp_path: Path) -> None:
    """Both train at the same time; a third one takes a name that is in use, and is refused uncharged."""
    data, url = write_npz(tmp_path / "own.npz", 128), str(tmp_path / "ledger.db")
    ledger = Ledger.create(url)
    ledger.register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=128)
    shared = (f"--dataset={data}", "--expected-batch-size=32", "--num-records-public=128")
    shared += (f"--ledger={url}", f"--tracking-uri={server}")
    seeds = {"ann": 0, "ben": 100, "carl": 200}
    ann, ben, carl = (User(name, seed, tmp_path, head, *shared) for name, seed in seeds.items())
    drivers = []
    for user in (ann, ben):
        user.hold()
        drivers.append(user.start(f"--name={user.name}"))
    for user, driver in zip((ann, ben), drivers, strict=True):
        driver.wait_for(lambda user=user: user.drawn() == 2)
    for user in (ann, ben):
        user.let_go()
    for driver in drivers:
        assert driver.wait() == 0, driver.stdout + driver.stderr
    third = carl.start("--name=ann")
    assert third.wait() == 2, third.stdout
    assert re.fullmatch(
        r"error: MLflow at .* has a sweep 'ann' from .*\. Choose another --name.*\n", third.stderr
    )
    assert not (carl.folder / "storage/sweeps/ann").exists()
    runs = tracked_runs(patiently(lambda: connect(server), print), "tags.`dpgcl.role` = 'trial'")
    found = Counter((run.data.tags["dpgcl.sweep"], run.data.tags["dpgcl.trial"]) for run in runs)
    trials = [f"S4-Na1-private-r{seed}" for seed in range(NUM_TRIALS)]
    assert found == Counter((name, trial) for name in ("ann", "ben") for trial in trials)
    assert [ann.drawn(), ben.drawn(), carl.drawn()] == [NUM_STEPS * NUM_TRIALS] * 2 + [0]
    assert _charged(ledger) == 2 * NUM_STEPS * NUM_TRIALS


def _charged(ledger: Ledger) -> int:
    """The steps that the ledger counts; none is reserved and open."""
    spent = ledger.read_charges("scans", with_pld=False)
    assert (spent.num_open, spent.num_settled) == (0, 2 * NUM_TRIALS)
    return sum(spent.num_steps.values())


def test_two_submissions_of_one_sweep_with_other_settings_are_told_apart(tmp_path: Path) -> None:
    """The second one is told that the first one runs, or what differs."""
    common = ("--tiny", "--noise-multiplier=1", "--no-non-private", "--no-references", "--name=one")
    given = (*common, "--network=tests.sweeps.faulty:network", f"--storage={tmp_path / 'storage'}")
    env = {"DPGCL_TEST_FOLDER": str(tmp_path)}
    (tmp_path / "hold-0").write_text("2")
    first = Driver(*given, "--num-steps=4", home=tmp_path / "home", env=env)
    journal = tmp_path / "journal-0"
    first.wait_for(lambda: journal.exists() and journal.stat().st_size == 2)
    differs = "belongs to another configuration (--num-steps was 4, is 5"
    for other in ("the sweep 'one' is running", differs):
        for more, said in (((), other), (("--resume",), "--num-steps 5: the sweep was started with 4")):
            second = Driver(*given, "--num-steps=5", *more, home=tmp_path / "home", env=env)
            assert second.wait() == 2
            assert said in second.stderr
        same = Driver(*given, "--num-steps=4", "--resume", home=tmp_path / "home", env=env)
        if (tmp_path / "hold-0").exists():
            assert same.wait() == 2
            assert same.stderr.startswith("error: the sweep 'one' is running: wait for its end")
            (tmp_path / "hold-0").unlink()
            assert first.wait() == 0, first.stdout + first.stderr
        else:
            assert same.wait() == 0


def test_cluster_of_another_ray_is_refused_in_one_line(tmp_path: Path) -> None:
    with Head(says_version="2.40.0") as head:
        environment = {"RAY_ADDRESS": head.gcs_address}
        command = (
            sys.executable,
            "sweeps/group_size.py",
            "--tiny",
            "--noise-multiplier=1",
            "--no-non-private",
        )
        done = head.run(*command, environment=environment)
        assert done.returncode == 2
        assert re.fullmatch(
            r"error: the cluster must run the same versions as this process, Ray \S+ and Python \S+; "
            r"got Ray 2\.40\.0 and Python \S+\. Install the versions of constraints\.txt on all nodes; .*\n",
            done.stderr,
        ), done.stderr
        assert not list((head.home / "dpgcl-results").glob("sweeps/*"))
