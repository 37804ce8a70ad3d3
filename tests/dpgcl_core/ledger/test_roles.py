"""The roles of the PostgreSQL that a team shares, as `clusters/postgres.sql` makes them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import sqlalchemy

from dpgcl_core.ledger.account import PlannedTraining
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger, StepClass
from dpgcl_core.ledger.store import TABLE
from tests.dpgcl_core.conftest import postgres_programs

STATEMENTS = Path(__file__).parents[3] / "clusters/postgres.sql"
STEP = StepClass(sampling_prob=0.01, noise_multiplier=1.0)


@pytest.fixture(scope="module")
def server(postgres_server: str) -> str:
    """The server's address, with the roles and the ledger's table."""
    passwords = {f"{role}_PASSWORD": "it's" for role in ("MLFLOW", "LEDGER_OWNER", "LEDGER_WRITER")}
    programs = postgres_programs()
    assert programs is not None
    command = [programs / "psql", "--no-psqlrc", "--quiet", f"--file={STATEMENTS}", postgres_server]
    subprocess.run(command, env=os.environ | passwords, check=True, timeout=60)
    Ledger.create(url_of(postgres_server, "ledger_owner", "ledger"))
    return postgres_server


def url_of(server: str, role: str, database: str) -> str:
    return server.replace("dpgcl@/postgres", f"{role}@/{database}")


def engine_of(server: str, role: str, database: str = "ledger") -> sqlalchemy.Engine:
    url = url_of(server, role, database).replace("postgresql:", "postgresql+psycopg:")
    return sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)


def test_drivers_charge_and_settle(server: str) -> None:
    ledger = Ledger.open(url_of(server, "ledger_writer", "ledger"))
    ledger.register("scans", Cap(epsilon=8.0, delta=1e-5), num_records_public=1000)
    training = PlannedTraining(label="one", step_class=STEP, num_steps=10, delta=1e-5)
    (reservation,) = ledger.reserve("scans", [training])
    ledger.settle(reservation, 4)
    assert ledger.read_charges("scans", with_pld=False).num_steps == {STEP: 4}
    ledger.verify()


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
def test_driver_may_only_add_rows(statement: str, server: str) -> None:
    """The role has no right to anything else, before any trigger fires."""
    with (
        engine_of(server, "ledger_writer").connect() as connection,
        pytest.raises(sqlalchemy.exc.ProgrammingError) as refusal,
    ):
        connection.exec_driver_sql(statement)
    assert re.search("InsufficientPrivilege|must be owner|permission denied", repr(refusal.value))


@pytest.mark.parametrize("statement", [f"UPDATE {TABLE} SET content = ''", f"DELETE FROM {TABLE}"])
def test_triggers_stop_the_owner_too(statement: str, server: str) -> None:
    with (
        engine_of(server, "ledger_owner").connect() as connection,
        pytest.raises(sqlalchemy.exc.SQLAlchemyError, match="rows are only added"),
    ):
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize(("role", "database"), [("mlflow", "ledger"), ("ledger_writer", "mlflow")])
def test_no_role_enters_the_other_database(role: str, database: str, server: str) -> None:
    with pytest.raises(sqlalchemy.exc.OperationalError, match="permission denied for database"):
        engine_of(server, role, database).connect()


def test_mlflow_makes_tables_in_its_database(server: str) -> None:
    with engine_of(server, "mlflow", "mlflow").begin() as connection:
        connection.exec_driver_sql("CREATE TABLE runs (a int)")
