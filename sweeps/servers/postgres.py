"""A PostgreSQL of one's own: a folder with its data, made by Debian's programs, started and stopped."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.errors import ConfigError
from sweeps.servers.roles import ADMIN

_INSTALL = "install Debian's package: apt-get install postgresql"
_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class Postgres:
    """One server.

    Attributes:
      folder: of its data, its socket and its log; made when it is first started.
      host, port: where it listens; the loopback address unless others are to reach it.
    """

    folder: Path
    host: str
    port: int

    def url(self, role: str, password: str, database: str) -> str:
        """Return a role's address of a database, with its password."""
        return f"postgresql://{role}:{password}@{self.host}:{self.port}/{database}"

    @property
    def exists(self) -> bool:
        """Whether its data are there."""
        return (self.folder / "data/PG_VERSION").is_file()

    def make(self, admin_password: str) -> None:
        """Make the data, with one role that may do everything.

        Raises:
          ConfigError: PostgreSQL is not installed, or cannot use the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (user := _unprivileged()) is not None:
            os.chown(self.folder, user, -1)
        with tempfile.NamedTemporaryFile("w", dir=_folder_for_all()) as file:
            file.write(admin_password)
            file.flush()
            if user is not None:
                os.chown(file.name, user, -1)
            given = ["-U", ADMIN, f"--pwfile={file.name}", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"]
            self._run("initdb", ["-D", str(self.folder / "data"), *given])
        if self.host not in ("127.0.0.1", "localhost"):
            with (self.folder / "data/pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet scram-sha-256\n")

    def start(self) -> None:
        """Start it, and return when it answers; nothing where it runs.

        Raises:
          ConfigError: it does not start.
        """
        if self.is_running:
            return
        options = (
            f"-c listen_addresses={self.host} -c port={self.port} -c unix_socket_directories={self.folder}"
        )
        log = str(self.folder / "log")
        self._run("pg_ctl", ["-D", str(self.folder / "data"), "-l", log, "-w", "-o", options, "start"])

    def stop(self) -> None:
        """Stop it, and return when it has ended; nothing where it does not run."""
        if self.is_running:
            self._run("pg_ctl", ["-D", str(self.folder / "data"), "-m", "fast", "-w", "stop"])

    @property
    def is_running(self) -> bool:
        """Whether a server runs on the data."""
        if not self.exists:
            return False
        done = self._done("pg_ctl", ["-D", str(self.folder / "data"), "status"])
        return done.returncode == 0

    def _run(self, program: str, arguments: Sequence[str]) -> None:
        done = self._done(program, arguments)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[-_SHOWN:]
            log = self.folder / "log"
            more = f"; its log is {log}" if log.is_file() else ""
            raise ConfigError(f"PostgreSQL's {program} failed in {self.folder}: {said}{more}")

    def _done(self, program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        # Its output goes to files: the server that pg_ctl starts would keep a pipe open for good.
        with tempfile.TemporaryFile("w+") as out:
            done = subprocess.run(
                [str(_programs() / program), *arguments],
                user=_unprivileged(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
            out.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, out.read(), "")


def _programs() -> Path:
    found = [Path(name).resolve().parent for name in [shutil.which("pg_ctl") or ""] if name]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    folder = next((each for each in found if (each / "initdb").is_file()), None)
    if folder is None:
        raise ConfigError(f"PostgreSQL is not installed: {_INSTALL}")
    return folder


def _unprivileged() -> int | None:
    """The user that the server runs as where this one is root: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_uid
    except KeyError:
        raise ConfigError(
            f"PostgreSQL refuses to run as root, and there is no user postgres: {_INSTALL}"
        ) from None


def _folder_for_all() -> str:
    """A folder that the server's user can enter."""
    return "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()
