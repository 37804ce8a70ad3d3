"""Storage of the ledger's rows: SQLite by default, PostgreSQL by URL, through one small interface.

One append-only table: triggers refuse UPDATE, DELETE and a row out of order. One writer at a time (SQLite:
BEGIN IMMEDIATE; PostgreSQL: a transaction-level advisory lock), from reading the last row to the commit,
which returns when the row is on disk. Every transaction has its own connection, so a ledger may be used from
several threads and after a fork.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from dpgcl_core.addresses import has_secret, masked, text_of_error
from dpgcl_core.errors import LedgerError, LedgerMissing
from dpgcl_core.ledger.cap import line_to_register
from dpgcl_core.ledger.chain import Entry

Row = tuple[int, str, str, str | None]

TABLE = "dpgcl_ledger"
_LOCK_NUMBER = 0x6470676C  # "dpgl"; one advisory lock for all ledgers of a PostgreSQL database
_WRITE_OPTION = "dpgcl_writes"
_CREATE_TABLE = f"""CREATE TABLE {TABLE} (
    number INTEGER PRIMARY KEY, content TEXT NOT NULL, entry_hash TEXT NOT NULL, trusted TEXT)"""
_NEXT_ROW = f"SELECT COALESCE(MAX(number), 0) + 1 FROM {TABLE}"
_REFUSED = f"{TABLE}: rows are only added, in order"
_REFUSE = f"BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
_TRIGGERS = {
    "sqlite": (
        f"CREATE TRIGGER {TABLE}_update BEFORE UPDATE ON {TABLE} {_REFUSE}",
        f"CREATE TRIGGER {TABLE}_delete BEFORE DELETE ON {TABLE} {_REFUSE}",
        # REPLACE deletes without firing the delete trigger; this trigger prevents that.
        f"CREATE TRIGGER {TABLE}_insert BEFORE INSERT ON {TABLE} WHEN NEW.number <> ({_NEXT_ROW}) {_REFUSE}",
    ),
    "postgresql": (
        f"CREATE FUNCTION {TABLE}_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSED}'; END $$",
        f"CREATE FUNCTION {TABLE}_in_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF NEW.number <> ({_NEXT_ROW}) THEN RAISE EXCEPTION '{_REFUSED}'; END IF; RETURN NEW; END $$",
        f"CREATE TRIGGER {TABLE}_change BEFORE UPDATE OR DELETE OR TRUNCATE ON {TABLE} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {TABLE}_refuse()",
        f"CREATE TRIGGER {TABLE}_insert BEFORE INSERT ON {TABLE} "
        f"FOR EACH ROW EXECUTE FUNCTION {TABLE}_in_order()",
    ),
}


_BEGINS_AS_URL = re.compile(r"(?i)(sqlite|postgres(ql)?)(\+\w+)?:")


@dataclass(frozen=True)
class LedgerStore:
    """The rows of one ledger in a database; `at` returns the store of a URL.

    Attributes:
      url: the parsed URL.
      wait_seconds: how long to wait for other writers.
      engine: the engine, which opens a new connection for every transaction.
      address: the URL or path as the caller wrote it; it may contain a password.
    """

    url: URL = field(repr=False)
    wait_seconds: float
    engine: Engine = field(compare=False, repr=False)
    address: str = field(compare=False, repr=False)

    @classmethod
    def at(cls, url: str, *, wait_seconds: float = 60.0) -> LedgerStore:
        """Return the store at `url`, without connecting to it.

        Args:
          url: `sqlite:////absolute/path.db`, a plain path, or `postgresql://user@host/database`.
          wait_seconds: how long to wait for other writers.

        Raises:
          LedgerError: the URL has another scheme, or PostgreSQL's driver is not installed.
        """
        store_url = _parse_url(url)
        is_sqlite = store_url.get_backend_name() == "sqlite"
        arguments: dict[str, Any] = {"timeout": wait_seconds} if is_sqlite else {"connect_timeout": 10}
        target = _sqlite_uri(store_url) if is_sqlite else store_url
        try:
            engine = sqlalchemy.create_engine(
                target, connect_args=arguments, poolclass=sqlalchemy.NullPool, hide_parameters=True
            )
        except (SQLAlchemyError, TypeError, ValueError):
            raise LedgerError(_not_a_url(url)) from None
        if not is_sqlite:  # every statement after the lock sees what earlier writers committed
            engine = engine.execution_options(isolation_level="READ COMMITTED")
        if is_sqlite:
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        return cls(store_url, wait_seconds, engine, url)

    @property
    def name(self) -> str:
        """The URL for messages, with secrets masked; without secrets, it also opens the ledger."""
        return masked(self.address) if has_secret(self.address) else self.url.render_as_string()

    @property
    def marks_folder(self) -> Path:
        """The folder for marks on read-only data: next to the SQLite file, else in the user's home folder."""
        if self.url.get_backend_name() == "sqlite":
            return Path(f"{self.url.database}.marks")
        return Path.home() / ".dpgcl" / "marks"

    def create(self, first: Entry) -> None:
        """Create the table with its first row.

        Raises:
          LedgerError: a ledger already exists there, or it cannot be written.
        """
        if self.url.get_backend_name() == "sqlite":
            self._create_file()
        with self.writing() as connection:
            if sqlalchemy.inspect(connection).has_table(TABLE):
                raise LedgerError(f"a ledger already exists at {self.name}; leave --create out")
            for statement in (_CREATE_TABLE, *_TRIGGERS[self.url.get_backend_name()]):
                connection.exec_driver_sql(statement)
            self.add(connection, [first])

    def add(self, connection: Connection, entries: Sequence[Entry]) -> None:
        """Add rows inside a `writing` transaction."""
        statement = text(f"INSERT INTO {TABLE} VALUES (:number, :content, :entry_hash, :trusted)")
        for entry in entries:
            connection.execute(
                statement,
                {
                    "number": entry.number,
                    "content": entry.text,
                    "entry_hash": entry.entry_hash,
                    "trusted": entry.trusted_text,
                },
            )

    def rows(self, connection: Connection, *, first: int) -> list[Row]:
        """Return the rows from number `first` on, in order."""
        statement = text(
            f"SELECT number, content, entry_hash, trusted FROM {TABLE} WHERE number >= :n ORDER BY number"
        )
        return [tuple(row) for row in connection.execute(statement, {"n": first})]

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction that sees one state of the ledger.

        Raises:
          LedgerError: the ledger is missing or cannot be read.
        """
        with self._transaction(self.engine) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction that excludes other writers; its rows are on disk when the block has ended.

        Raises:
          LedgerError: the ledger is missing, locked for too long, or cannot be written. Nothing was
            added, unless the connection broke during the commit itself.
        """
        with self._transaction(self.engine.execution_options(**{_WRITE_OPTION: True})) as connection:
            if self.url.get_backend_name() == "postgresql":
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {int(self.wait_seconds * 1000)}")
                connection.exec_driver_sql("SET LOCAL synchronous_commit = on")
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_NUMBER})")
            yield connection

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Connection]:
        try:
            new_connection = engine.connect()
        except Exception as error:  # a driver may raise any class for a bad host, port or parameter
            raise self._unusable(error) from None
        try:
            with new_connection as connection, connection.begin():
                yield connection
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> LedgerError:
        """Return the error to raise, without a cause: a traceback would print the address in the cause."""
        if missing := self._missing(error):
            return LedgerMissing(
                f"the ledger {self.name} cannot be used: {missing}. Pass another, or create one: "
                f"{line_to_register(self.name, create=True)}"
            )
        return LedgerError(
            f"the ledger {self.name} cannot be used: {self._reason(error)}. No training may start or "
            "continue without it; fix this and try again. If the connection broke during a commit, the row "
            "may have been stored: then too much is charged, never too little"
        )

    def _missing(self, error: Exception) -> str:
        """Return what is missing, for a message; "" if the error does not show that the ledger is missing."""
        original = error.orig if isinstance(error, DBAPIError) else None
        if self.url.get_backend_name() == "sqlite" and not Path(str(self.url.database)).is_file():
            return "there is no such file"
        if "no such table" in str(original or error) or "UndefinedTable" in type(original).__name__:
            return "the database contains no ledger"
        return ""

    def _reason(self, error: Exception) -> str:
        original = error.orig if isinstance(error, DBAPIError) else None
        message = text_of_error(original or error, self.address)
        if "database is locked" in message or "LockNotAvailable" in type(original).__name__:
            return f"another process locked it for more than {self.wait_seconds:g} s"
        return message

    def _create_file(self) -> None:
        """Create an empty file that only its owner may read; opening a ledger never creates a file."""
        path = Path(str(self.url.database))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise LedgerError(f"the ledger {self.name} cannot be created ({error.strerror})") from error


def _parse_url(url: str) -> URL:
    """Return the parsed URL, with an absolute path (SQLite) or with the installed driver (PostgreSQL)."""
    if "://" not in url:
        if has_secret(url) or _BEGINS_AS_URL.match(url):  # neither is the name of a ledger's file
            raise LedgerError(_not_a_url(url))
        return URL.create("sqlite", database=str(Path(url).resolve()))
    try:
        target = make_url(url)
        backend = "postgresql" if target.drivername == "postgres" else target.get_backend_name()
    except (ArgumentError, ValueError):
        raise LedgerError(_not_a_url(url)) from None
    if backend == "sqlite":
        if target.database in (None, "", ":memory:") or str(target.database).startswith("file:"):
            raise LedgerError(f"a SQLite ledger must be a permanent file; got {masked(url)!r}")
        return target.set(drivername="sqlite", database=str(Path(str(target.database)).resolve()), query={})
    if backend == "postgresql":
        for driver in ("psycopg", "psycopg2"):
            if importlib.util.find_spec(driver):
                return target.set(drivername=f"postgresql+{driver}")
        raise LedgerError('a PostgreSQL ledger needs its driver: pip install "dpgcl[postgres]"')
    raise LedgerError(f"a ledger must be in SQLite or PostgreSQL; got {backend!r}")


def _not_a_url(url: str) -> str:
    return (
        f"not a ledger's URL: {masked(url)!r}; use sqlite:////path or postgresql://user@host:port/database. "
        "The port must be a number, and a password needs %2F for /, %40 for @, %23 for # and %25 for %"
    )


def _sqlite_uri(url: URL) -> URL:
    """Return a URL that fails if the file is missing: SQLite would create an empty one, without charges."""
    return url.set(database=Path(str(url.database)).as_uri(), query={"mode": "rw", "uri": "true"})


def _prepare_sqlite(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # sqlite3 begins no transactions; `_begin_sqlite` does
    connection.execute("PRAGMA synchronous = EXTRA")  # the commit survives a power failure


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITE_OPTION)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
