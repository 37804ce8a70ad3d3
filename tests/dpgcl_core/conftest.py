"""Ledgers to test on: SQLite files, and databases of a PostgreSQL server that the tests start and end.

And accounting on a coarse grid, for tests of what is made of the figures.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from dp_accounting import dp_event

from dpgcl_core.accounting import composition, filters
from dpgcl_core.accounting.tuning import cost

COARSE_GRID = 1e-3
_BACKENDS = ("sqlite", pytest.param("postgresql", marks=[pytest.mark.server, pytest.mark.ci]))


@pytest.fixture
def coarse_losses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Losses on a grid ten times as coarse: another upper bound on every ε, and ten times as quick.

    For figures that are compared with each other, not with a reference.
    """
    fine = composition.epsilon_pld

    def coarse(event: dp_event.DpEvent, delta: float, *, grid: float = COARSE_GRID) -> float:
        return fine(event, delta, grid=max(grid, COARSE_GRID))

    for module in (composition, cost):
        monkeypatch.setattr(module, "epsilon_pld", coarse)
    for module in (composition, filters, cost):
        monkeypatch.setattr(module, "GRID", COARSE_GRID)
    remembered = (composition.epsilon_of_steps, cost._profile)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A server on a Unix socket, with a folder of its own and no network; yields its URL."""
    pytest.importorskip(
        "psycopg", reason='PostgreSQL\'s driver is not installed: pip install "dpgcl[postgres]"'
    )
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    user = _unprivileged()
    folder = Path(tempfile.mkdtemp(prefix="dpgcl-pg-", dir="/tmp"))
    if user is not None:
        os.chown(folder, user, -1)
    data, log = folder / "data", folder / "log"
    initdb = [programs / "initdb", "-D", data, "-U", "dpgcl", "-A", "trust", "-E", "UTF8", "--locale=C"]
    subprocess.run([*initdb, "--no-sync"], user=user, check=True, capture_output=True, cwd=folder)
    options = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}", "-c", "fsync=off"]
    with log.open("w") as output:
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, *options],
            user=user,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(f"postgresql+psycopg://dpgcl@/postgres?host={folder}", server, log)
        yield f"postgresql://dpgcl@/postgres?host={folder}"
    finally:
        server.send_signal(signal.SIGQUIT)  # at once; nothing has to last
        server.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The URL of a schema of its own, which is a hundred times faster than a database of its own."""
    schema = f"ledger_{uuid.uuid4().hex}"
    engine = sqlalchemy.create_engine(
        postgres_server.replace("postgresql:", "postgresql+psycopg:"), poolclass=sqlalchemy.NullPool
    )
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    return f"{postgres_server}&options=-csearch_path%3D{schema}"


@pytest.fixture(params=_BACKENDS)
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a place that holds no ledger yet, one for every kind of store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    return str(request.getfixturevalue("postgres_url"))


def postgres_programs() -> Path | None:
    found = [Path(name).resolve().parent for name in [shutil.which("postgres") or ""] if name]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if (folder / "initdb").is_file()), None)


def _unprivileged() -> int | None:
    """The user that the server runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or nobody")


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    deadline = time.monotonic() + 60
    while True:
        try:
            engine.connect().close()
            return
        except sqlalchemy.exc.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()}") from None
            time.sleep(0.1)
