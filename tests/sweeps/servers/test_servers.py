"""The services: started by one command, stopped by another, and what their roles may not do."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import sqlalchemy

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger, StepClass
from dpgcl_core.ledger.store import TABLE
from sweeps.servers import __main__ as command
from sweeps.servers import postgres as module
from sweeps.service.running.outbox import patiently
from trainers.tracking.server import connect

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Services:
    """What a start has left, and said."""

    folder: Path
    said: str
    values: dict[str, str]
    passwords: dict[str, str]

    def engine(self, role: str, database: str = "ledger") -> sqlalchemy.Engine:
        host = re.search(r"@([\d.:]+)/", self.values["DPGCL_LEDGER"])
        assert host
        url = f"postgresql+psycopg://{role}:{self.passwords[role]}@{host[1]}/{database}"
        return sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DPGCL_", "MLFLOW_"))}
    return subprocess.run(
        [sys.executable, "-m", "sweeps.servers", *words],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    pytest.importorskip(
        "psycopg", reason='PostgreSQL\'s driver is not installed: pip install "dpgcl[postgres]"'
    )
    try:
        module._programs()
    except ConfigError as error:
        pytest.skip(str(error))
    folder = Path(tempfile.mkdtemp(prefix="dpgcl-services-", dir="/tmp"))
    folder.chmod(0o755)  # the server's user enters it, where this one is root
    postgres, mlflow = map(str, free_ports(2))
    try:
        done = run("start", "--folder", str(folder), "--postgres-port", postgres, "--mlflow-port", mlflow)
        lines = (folder / "services.env").read_text().splitlines()
        passwords = json.loads((folder / "credentials.json").read_text())["passwords"]
        yield Services(folder, done.stdout, dict(line.split("=", 1) for line in lines), passwords)
    finally:
        run("stop", "--folder", str(folder))
        left = [each.pid for each in psutil.process_iter(["cmdline"]) if str(folder) in str(each.info)]
        shutil.rmtree(folder, ignore_errors=True)
    assert not left, "a process outlives the stop"


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_both_addresses_are_printed_without_a_password(services: Services) -> None:
    assert f"MLFLOW_TRACKING_URI={services.values['MLFLOW_TRACKING_URI']}\n" in services.said
    assert "DPGCL_LEDGER=postgresql://ledger_writer:***@127.0.0.1:" in services.said
    assert not any(password in services.said for password in services.passwords.values())
    assert len(set(services.passwords.values())) == 4


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_passwords_are_in_files_for_their_user_alone_and_on_no_command_line(services: Services) -> None:
    for name in ("credentials.json", "services.env"):
        assert stat.S_IMODE((services.folder / name).stat().st_mode) == 0o600
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert any(str(services.folder) in line for line in lines)
    assert not any(password in line for line in lines for password in services.passwords.values())


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_both_listen_on_the_loopback_address_alone(services: Services) -> None:
    ports = {int(each.rpartition(":")[2].partition("/")[0]) for each in services.values.values()}
    listening = {
        each.laddr.ip
        for each in psutil.net_connections("tcp")
        if each.status == "LISTEN" and each.laddr.port in ports
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_drivers_charge_the_ledger_and_write_runs(services: Services) -> None:
    ledger = Ledger.open(services.values["DPGCL_LEDGER"])
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=1000)
    step = StepClass(sampling_prob=0.01, noise_multiplier=1.0)
    (held,) = ledger.reserve(
        "scans", [PlannedTraining(label="one", step_class=step, num_steps=10, delta=1e-5)]
    )
    ledger.settle(held, 4)
    assert ledger.spent("scans", with_pld=False).num_steps == {step: 4}
    ledger.verify()
    client = patiently(lambda: connect(services.values["MLFLOW_TRACKING_URI"]), print)
    run_id = client.create_run(client.create_experiment("tried")).info.run_id
    client.log_metric(run_id, "score", 0.5)
    assert client.get_run(run_id).data.metrics == {"score": 0.5}


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "statement",
    [
        f"UPDATE {TABLE} SET content = ''",
        f"DELETE FROM {TABLE}",
        f"TRUNCATE {TABLE}",
        f"DROP TABLE {TABLE}",
        f"ALTER TABLE {TABLE} DISABLE TRIGGER ALL",
        f"DROP TRIGGER {TABLE}_change ON {TABLE}",
        f"CREATE OR REPLACE FUNCTION {TABLE}_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN NULL; END $$",
        "SET session_replication_role = replica",
        "CREATE TABLE mine (a int)",
        "SET ROLE ledger_owner",
    ],
)
def test_driver_may_only_add_rows(statement: str, services: Services) -> None:
    """It has no right to, before any trigger is asked."""
    with (
        services.engine("ledger_writer").connect() as connection,
        pytest.raises(sqlalchemy.exc.ProgrammingError) as refused,
    ):
        connection.exec_driver_sql(statement)
    assert re.search("InsufficientPrivilege|must be owner|permission denied", repr(refused.value))


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_triggers_refuse_its_owner_too(services: Services) -> None:
    for statement in (f"UPDATE {TABLE} SET content = ''", f"DELETE FROM {TABLE}", f"TRUNCATE {TABLE}"):
        with (
            services.engine("ledger_owner").connect() as connection,
            pytest.raises(sqlalchemy.exc.SQLAlchemyError, match="rows are only added"),
        ):
            connection.exec_driver_sql(statement)


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_no_role_enters_the_others_database(services: Services) -> None:
    for role, database in (("mlflow", "ledger"), ("ledger_writer", "mlflow")):
        with pytest.raises(sqlalchemy.exc.OperationalError, match="permission denied for database"):
            services.engine(role, database).connect()


@pytest.mark.ci
@pytest.mark.server
@pytest.mark.timeout(900)
def test_stopped_and_started_again_they_hold_what_they_held(services: Services) -> None:
    head = Ledger.open(services.values["DPGCL_LEDGER"]).head()
    before = (services.folder / "services.env").read_text()
    run("stop", "--folder", str(services.folder))
    with pytest.raises(LedgerError):
        Ledger.open(services.values["DPGCL_LEDGER"])
    run("start", "--folder", str(services.folder))
    run("start", "--folder", str(services.folder))  # changes nothing
    assert (services.folder / "services.env").read_text() == before
    assert Ledger.open(services.values["DPGCL_LEDGER"]).head() == head


def test_stop_of_what_was_never_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no services in"):
        command.stop(folder=tmp_path)
