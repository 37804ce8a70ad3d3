"""`python -m sweeps.servers`: start and stop PostgreSQL and an MLflow server on it, with the ledger beside.

    python -m sweeps.servers start --folder ~/dpgcl-services
    set -a; . ~/dpgcl-services/services.env; set +a
    python -m sweeps.servers stop --folder ~/dpgcl-services

The file `services.env` has the two variables that drivers need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpgcl_core.addresses import masked
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, LedgerError, exit_on_bad_input
from sweeps.servers.postgres import Postgres
from sweeps.servers.roles import (
    ADMIN,
    LEDGER,
    MLFLOW,
    OWNER,
    WRITER,
    ledger_statements,
    new_passwords,
    role_statements,
)
from sweeps.servers.tracking import MlflowServer
from trainers.files.durable import replacing

_FOLDER = Path("~/dpgcl-services")


def start(
    folder: Path = _FOLDER, host: str = "127.0.0.1", postgres_port: int = 5433, mlflow_port: int = 5000
) -> None:
    """Start both services, made anew where the folder is; print the two variables that drivers need.

    Args:
      folder: of the databases, the artifacts, the logs and the passwords (files of mode 0600).
      host: address of this machine to listen on, 127.0.0.1 for itself alone; fixed at the first start.
      postgres_port: of PostgreSQL; fixed at the first start.
      mlflow_port: of the MLflow server; likewise.
    """
    place = folder.expanduser().absolute()
    known = _known(place) or _new(place, host, postgres_port, mlflow_port)
    postgres, server = _services(place, known)
    passwords = known["passwords"]
    is_new = not postgres.exists
    if is_new:
        postgres.make(passwords[ADMIN])
    postgres.start()
    if is_new:
        _make_roles(postgres, passwords)
    _make_ledger(postgres, passwords)
    store = postgres.url(MLFLOW, passwords[MLFLOW], MLFLOW).replace("postgresql:", "postgresql+psycopg:")
    server.start(store)
    _tell(place, server.uri, postgres.url(WRITER, passwords[WRITER], LEDGER))


def stop(folder: Path = _FOLDER) -> None:
    """Stop both services; what they hold stays.

    Args:
      folder: as of `start`.
    """
    place = folder.expanduser().absolute()
    if (known := _known(place)) is None:
        raise ConfigError(f"there are no services in {place}; give the --folder that they were started with")
    postgres, server = _services(place, known)
    server.stop()
    postgres.stop()
    print(f"stopped; what they hold is in {place}")


def _known(place: Path) -> dict[str, Any] | None:
    """What was decided at the first start, with the passwords; None before it."""
    path = place / "credentials.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def _new(place: Path, host: str, postgres_port: int, mlflow_port: int) -> dict[str, Any]:
    place.mkdir(parents=True, exist_ok=True)
    made = {
        "host": host,
        "postgres_port": postgres_port,
        "mlflow_port": mlflow_port,
        "passwords": new_passwords(),
    }
    _write_secret(place / "credentials.json", json.dumps(made, indent=1))
    return made


def _services(place: Path, known: dict[str, Any]) -> tuple[Postgres, MlflowServer]:
    host = known["host"]
    return (
        Postgres(folder=place / "postgres", host=host, port=known["postgres_port"]),
        MlflowServer(folder=place / "mlflow", host=host, port=known["mlflow_port"]),
    )


def _make_roles(postgres: Postgres, passwords: dict[str, str]) -> None:
    _execute(postgres.url(ADMIN, passwords[ADMIN], "postgres"), role_statements(passwords))
    _execute(postgres.url(ADMIN, passwords[ADMIN], LEDGER), ledger_statements())


def _make_ledger(postgres: Postgres, passwords: dict[str, str]) -> None:
    """Make the ledger's table, as its owner; one that is there stays as it is."""
    from dpgcl_core.ledger.ledger import Ledger  # here, with the accountants

    try:
        Ledger.create(postgres.url(OWNER, passwords[OWNER], LEDGER))
    except LedgerError as error:
        if "there is a ledger" not in str(error):
            raise


def _execute(url: str, statements: list[str]) -> None:
    """Execute statements one by one, outside of a transaction, which CREATE DATABASE needs.

    Raises:
      ConfigError: one is refused; it does not show the statement, which may hold a password.
    """
    import sqlalchemy

    engine = sqlalchemy.create_engine(
        url.replace("postgresql:", "postgresql+psycopg:"),
        poolclass=sqlalchemy.NullPool,
        isolation_level="AUTOCOMMIT",
    )
    with engine.connect() as connection:
        for statement in statements:
            try:
                connection.exec_driver_sql(statement)
            except sqlalchemy.exc.SQLAlchemyError:
                words = " ".join(statement.split()[:3])
                raise ConfigError(f"PostgreSQL at {masked(url)} refused {words} …; see its log") from None


def _tell(place: Path, tracking_uri: str, ledger: str) -> None:
    path = place / "services.env"
    _write_secret(path, f"MLFLOW_TRACKING_URI={tracking_uri}\nDPGCL_LEDGER={ledger}\n")
    print(f"MLFLOW_TRACKING_URI={tracking_uri}")
    print(f"DPGCL_LEDGER={masked(ledger)}")
    print(f"both with the password, for this user alone: set -a; . {path}; set +a")


def _write_secret(path: Path, text: str) -> None:
    with replacing(path, mode=0o600) as file:
        file.write(text.encode())


def main() -> int:
    """Run one command."""
    run_command({"start": start, "stop": stop}, prog="python -m sweeps.servers", description=__doc__)
    return 0


if __name__ == "__main__":
    exit_on_bad_input(main)
