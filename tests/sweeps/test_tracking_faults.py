"""Real sweeps whose MLflow server is killed and started again, hangs, or is slow.

Judged by counts: of draws, of the ledger's grants, of results on disk and of runs on the server.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.running.outbox import patiently
from tests.sweeps.gateway import HANG, PASS, SLOW, Gateway
from tests.sweeps.support import Driver, tracked_runs, write_npz
from tests.trainers.tracking.test_tracking import end, free_port, start_server
from trainers.files.checkpoint import read_grant
from trainers.tracking.mlflow_server import connect

pytestmark = [pytest.mark.ray, pytest.mark.server, pytest.mark.ci, pytest.mark.timeout(900)]

NUM_STEPS, EVERY_STEPS = 8, 2
ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--no-non-private", "--name=one", "--no-references"),
    *(f"--num-steps={NUM_STEPS}", f"--checkpoint-every-steps={EVERY_STEPS}", "--max-concurrent-trials=1"),
    "--network=tests.sweeps.faulty:network",
)


class Sweep:
    """One sweep on a server, whose trainings wait where a test says so."""

    def __init__(self, top: Path, address: str, *more: str, **env: str) -> None:
        self._top, self._address, self._more, self._env = top, address, more, env
        self.storage = top / "storage"

    def start(self, *more: str) -> Driver:
        given = (f"--storage={self.storage}", f"--tracking-uri={self._address}", *self._more, *more)
        env = {"DPGCL_TEST_FOLDER": str(self._top), **self._env}
        return Driver(*ARGUMENTS, *given, home=self._top / "home", env=env)

    def hold(self, seed: int, steps: int) -> None:
        (self._top / f"hold-{seed}").write_text(str(steps))

    def let_go(self, seed: int) -> None:
        (self._top / f"hold-{seed}").unlink()

    def drawn(self, seed: int) -> int:
        journal = self._top / f"journal-{seed}"
        return journal.stat().st_size if journal.exists() else 0

    def result(self, seed: int) -> Path:
        return self.storage / f"sweeps/one/trials/S4-Na1-private-r{seed}.json"

    def granted(self, seed: int) -> int:
        grant = read_grant(self.storage / f"sweeps/one/checkpoints/S4-Na1-private-r{seed}")
        return grant.num_steps if grant is not None else 0


def finished(address: str) -> Counter[str]:
    """How many finished runs each trial has on a server."""
    runs = tracked_runs(patiently(lambda: connect(address), print), "tags.`dpgcl.role` = 'trial'")
    return Counter(run.data.tags["dpgcl.trial"] for run in runs if run.info.status == "FINISHED")


def all_taken(sweep: Sweep, driver: Driver) -> str:
    """Resume until the server has all, and return what was said: a busy machine's may outlast a driver."""
    said = ""
    while code := driver.wait():
        said += driver.stdout + driver.stderr
        assert code == 1, said
        assert "MLflow did not accept" in driver.stdout, said
        driver = sweep.start("--resume")
    return said + driver.stdout + driver.stderr


def once(number: int) -> Counter[str]:
    return Counter(f"S4-Na1-private-r{seed}" for seed in range(number))


@pytest.fixture
def storage(tmp_path: Path, empty_database: Path) -> Path:
    """Where a server keeps its runs."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(empty_database.read_bytes())
    return folder


@pytest.fixture
def running(storage: Path) -> Iterator[Callable[[int], Any]]:
    """Starts the server on a port; whatever still runs is ended."""
    servers = []

    def start(port: int) -> Any:
        servers.append(start_server(storage, port))
        return servers[-1]

    yield start
    for server in servers:
        end(server)


def test_server_killed_in_mid_sweep_and_started_again_has_every_trial_once(
    running: Callable[[int], Any], tmp_path: Path
) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server, sweep = running(port), Sweep(tmp_path, address, "--repeats=3")
    sweep.hold(1, 2)
    sweep.hold(2, 2)
    driver = sweep.start()
    driver.wait_for(lambda: sweep.drawn(1) == 2 and finished(address) == once(1))
    end(server)
    sweep.let_go(1)
    driver.wait_for(lambda: sweep.result(1).exists() and sweep.drawn(2) == 2)
    driver.wait_for(lambda: "warning: MLflow at" in driver.stdout)
    running(port)
    driver.wait_for(lambda: "MLflow answers again, and has received" in driver.stdout)
    sweep.let_go(2)
    assert driver.wait() == 0, driver.stdout + driver.stderr
    assert finished(address) == once(3)
    assert driver.stdout.count("warning: MLflow") == 1, driver.stdout
    assert driver.stdout.count("MLflow answers again, and has received") == 1
    assert driver.stderr == ""


@pytest.mark.long
def test_server_that_hangs_stops_neither_trials_nor_the_ledgers_check(
    running: Callable[[int], Any], tmp_path: Path
) -> None:
    """Requests may take an hour: one that the loop waited for would stop the sweep."""
    port, url = free_port(), tmp_path / "ledger" / "ledger.db"
    url.parent.mkdir()
    write_npz(tmp_path / "own.npz", 128)
    Ledger.create(str(url)).register("scans", Cap(epsilon=40.0, delta=1e-4), num_records_public=128)
    running(port)
    data = (f"--dataset=npz:{tmp_path / 'own.npz'}", "--expected-batch-size=32", "--num-records-public=128")
    charged = (*data, f"--ledger={url}", "--dataset-id=scans", "--repeats=3")
    with Gateway(port) as gateway:
        address = f"http://127.0.0.1:{gateway.port}"
        sweep = Sweep(tmp_path, address, *charged, MLFLOW_HTTP_REQUEST_TIMEOUT="3600")
        sweep.hold(0, 2)
        sweep.hold(2, 3)
        driver = sweep.start()
        driver.wait_for(lambda: sweep.drawn(0) == 2)
        gateway.be(HANG)
        sweep.let_go(0)
        driver.wait_for(lambda: gateway.num_held and sweep.result(1).exists() and sweep.drawn(2) == 3)
        assert sweep.granted(2) == NUM_STEPS
        url.rename(tmp_path / "away.db")
        driver.wait_for(lambda: sweep.granted(2) == 0)  # the ledger was asked, and is gone
        drawn = sweep.drawn(2)
        sweep.let_go(2)
        assert driver.wait() == 1, driver.stdout + driver.stderr
        assert sweep.drawn(2) - drawn < EVERY_STEPS
        assert "MLflow did not accept 2 results" in driver.stdout
        assert "--resume --name one\n" in driver.stdout
        (tmp_path / "away.db").rename(url)
        gateway.be(PASS)
        assert finished(address) == Counter(), "nothing got through"
        gateway.be(SLOW)
        driver = sweep.start("--resume")
        assert driver.wait() == 0, driver.stdout + driver.stderr
        assert finished(address) == once(3)


def test_slow_start_of_a_server_is_waited_for(storage: Path, tmp_path: Path) -> None:
    port = free_port()
    sweep = Sweep(tmp_path, f"http://127.0.0.1:{port}", "--repeats=1")
    driver = sweep.start()
    driver.wait_for(lambda: "MLflow does not answer yet (Connection refused); trying again" in driver.stdout)
    server = start_server(storage, port)
    try:
        assert driver.wait() == 0, driver.stdout + driver.stderr
        assert finished(f"http://127.0.0.1:{port}") == once(1)
    finally:
        end(server)


@pytest.mark.skipif(
    importlib.util.find_spec("flask_wtf") is None, reason="mlflow[auth] (flask-wtf) is missing"
)
@pytest.mark.parametrize(
    "where", ["in the address", pytest.param("in the environment", marks=pytest.mark.long)]
)
def test_server_with_basic_auth_is_used_and_no_password_is_shown(
    where: str, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, port = f"Pass-{secrets.token_hex(8)}", free_port()
    settings = storage / "auth.ini"
    settings.write_text(
        "[mlflow]\ndefault_permission = READ\nadmin_username = admin\n"
        f"admin_password = {password}\ndatabase_uri = sqlite:///{storage}/auth.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    monkeypatch.setenv("MLFLOW_AUTH_CONFIG_PATH", str(settings))
    monkeypatch.setenv("MLFLOW_FLASK_SERVER_SECRET_KEY", secrets.token_hex(16))
    plain, full = f"http://127.0.0.1:{port}", f"http://admin:{password}@127.0.0.1:{port}"
    server = start_server(storage, port, "--app-name", "basic-auth")
    try:
        refused = Sweep(tmp_path / "refused", plain).start()
        assert refused.wait() == 2
        assert "401" in refused.stderr
        assert refused.stderr.count("\n") == 1
        user = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": password}
        given = (full, {}) if where == "in the address" else (plain, user)
        sweep = Sweep(tmp_path, given[0], "--repeats=2", **given[1])
        sweep.hold(1, 2)
        driver = sweep.start()
        driver.wait_for(lambda: sweep.drawn(1) == 2)
        end(server)
        sweep.let_go(1)
        driver.wait_for(lambda: "warning: MLflow at" in driver.stdout)
        server = start_server(storage, port, "--app-name", "basic-auth")
        said = all_taken(sweep, driver)
        assert finished(full) == once(2)
    finally:
        end(server)
    assert password not in said
    for path in (tmp_path / "storage").rglob("*"):
        assert not path.is_file() or password.encode() not in path.read_bytes(), path
    kept = json.loads((tmp_path / "storage/sweeps/one/plan.json").read_text())
    assert kept["params"]
