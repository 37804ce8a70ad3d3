"""Connections to MLflow: accepted addresses, fast refusals, one-line errors, and searches by tag."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlencode

from dpgcl_core.addresses import has_secret, masked, masked_text, text_of_error
from dpgcl_core.errors import ConfigError, DpgclError, TrackingError

# This is set before MLflow is imported anywhere, because MLflow reads it once. MLflow itself is imported in
# functions, because the import takes two seconds that `--help` and the workers should not pay.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
HEALTH_CHECK_SECONDS = 5
_OWN_SERVER = "http://127.0.0.1:5000"  # where `mlflow ui` listens
# The driver repeats failed calls, so MLflow's own default of seven retries (minutes) only stalls a sweep.
# MLflow must not retry requests: a run whose creation was confirmed too late would then exist twice.
_HTTP_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
# Messages about a server that is unreachable, slow or starting, also from a proxy in front of it.
_UNAVAILABLE = re.compile(
    r"timed out|timeout=|timeout exception|Connection (?:refused|reset|aborted)|RemoteDisconnected"
    r"|error code 50[234]|too many 50[234]|starting up",
    re.IGNORECASE,
)


class NoAnswer(TrackingError):  # noqa: N818 (what it is)
    """The server does not answer now, but may answer later.

    Attributes:
      reason: why the server does not answer, in a few words and without passwords.
    """

    reason = ""


def connect(tracking_uri: str, *, create: bool = False) -> MlflowClient:
    """Connect to an MLflow server or database that answers now, and return the client.

    Args:
      tracking_uri: http(s) address of a server, or URI of a database.
      create: create a missing SQLite file and its folder; otherwise a missing file is refused.

    Raises:
      TrackingError: MLflow does not accept the address, the server does not answer, or the file is unusable.
    """
    check_address(tracking_uri)
    file = _sqlite_file(tracking_uri, create=create) if tracking_uri.lower().startswith("sqlite") else None
    for name, value in _HTTP_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # MLflow's links contain the user and the password.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

    from mlflow.tracking import MlflowClient

    # Its message about a database that does not answer quotes the whole address. The error is raised anyway.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    fix = "" if is_database(tracking_uri) else _SERVER_FIX.format(address=masked(tracking_uri).rstrip("/"))
    with _short_requests(), server_errors(tracking_uri, "connecting", fix, every=True):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=tracking_uri)
        client.search_experiments(max_results=1)
    return client


def check_address(tracking_uri: str) -> None:
    """Check that an address has a scheme that MLflow accepts, without connecting.

    Raises:
      TrackingError: MLflow does not accept the address.
    """
    scheme = tracking_uri.partition(":")[0].partition("+")[0].lower()
    if scheme not in (*DATABASE_SCHEMES, "http", "https") or "://" not in tracking_uri:
        raise TrackingError(
            f"an MLflow address must start with one of {', '.join((*DATABASE_SCHEMES, 'http', 'https'))} and "
            f"'://' (MLflow no longer keeps runs in plain folders); got {masked(tracking_uri)!r}. "
            "Use a server, for example http://127.0.0.1:5000, or a file, for example "
            "sqlite:///results/mlflow.db."
        )


_SERVER_FIX = (
    ". Check that `curl {address}/health` prints OK, start a server with `mlflow server`, "
    "or leave the address out to keep runs in a local file."
)


def runs_link(
    tracking_uri: str, experiment_id: str, tags: Mapping[str, str], score: str | None = None
) -> str:
    """Return the URL of MLflow's page that lists all runs with these tags, in its view for model training.

    For a database it is the page of the server that `mlflow ui` starts on this machine.

    Args:
      tracking_uri, experiment_id: tracking address and experiment of the runs.
      tags: tags that each listed run has. MLflow shows a run below its parent, unless the parent lacks one.
      score: metric that sorts the runs, the highest first; without it, the newest run is first.

    >>> runs_link("http://host:5000/", "7", {"dpgcl.sweep": "one"})[:60]
    'http://host:5000/#/experiments/7/runs?workflowType=machine_l'
    >>> runs_link("http://host:5000", "7", {}, "knn_accuracy").partition("&")[2]
    'searchFilter=&orderByKey=metrics.%60knn_accuracy%60&orderByAsc=false'
    """
    host = _OWN_SERVER if is_database(tracking_uri) else masked(tracking_uri).rstrip("/")
    query = {"workflowType": "machine_learning", "searchFilter": _tag_query(tags)}
    if score is not None:
        query |= {"orderByKey": f"metrics.`{score}`", "orderByAsc": "false"}
    return f"{host}/#/experiments/{experiment_id}/runs?{urlencode(query, quote_via=quote)}"


def run_link(tracking_uri: str, experiment_id: str, run_id: str) -> str:
    """Return the URL of the page of one run; for a database, on the server that `mlflow ui` starts.

    >>> run_link("https://host:5000/", "7", "ab")
    'https://host:5000/#/experiments/7/runs/ab?workflowType=machine_learning'
    """
    host = _OWN_SERVER if is_database(tracking_uri) else masked(tracking_uri).rstrip("/")
    return f"{host}/#/experiments/{quote(experiment_id)}/runs/{quote(run_id)}?workflowType=machine_learning"


def search_runs(client: MlflowClient, experiment_ids: list[str], tags: Mapping[str, str]) -> list[Run]:
    """Return all runs that have all `tags`, newest first, without deleted runs.

    Raises:
      ConfigError: a tag's value holds both kinds of quotes, which MLflow cannot search for.
    """
    query = _tag_query(tags)
    runs: list[Run] = []
    token: str | None = None
    was_collecting = gc.isenabled()
    gc.disable()  # it would rescan all rows as more arrive: two thirds of the time for 2,000 runs
    try:
        while True:
            page = client.search_runs(
                experiment_ids, query, order_by=["attributes.start_time DESC"], page_token=token
            )
            runs += page
            token = page.token
            if not token:
                return runs
    finally:
        if was_collecting:
            gc.enable()


@contextlib.contextmanager
def server_errors(uri: str, action: str, fix: str = "", *, every: bool = False) -> Iterator[None]:
    """Convert exceptions of MLflow and the libraries below it into a `TrackingError` with one line.

    The line shows only the parts of `uri` that hold no secret. If `uri` holds a secret, the error has no
    cause, because a traceback would print it.

    Args:
      uri: address of the server or database.
      action: the attempted action, such as "connecting".
      fix: the end of the message, with a possible remedy.
      every: whether to convert exceptions of every class, which the first use of an address may raise.
    """
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    error_types: tuple[type[Exception], ...] = (MlflowException, RequestException, SQLAlchemyError, OSError)
    error_types = (Exception,) if every else error_types
    try:
        yield
    except DpgclError:
        raise
    except error_types as error:
        reason = _reason(error, uri)
        kind = NoAnswer if _UNAVAILABLE.search(str(error)) else TrackingError
        failure = kind(f"MLflow at {masked(uri)} failed while {action}: {reason}{fix}")
        if isinstance(failure, NoAnswer):
            failure.reason = masked_text(reason)
        raise failure from (None if has_secret(uri) else error)


def database_address(folder: Path) -> str:
    """Return the URI of the database in a storage folder, with % and ? encoded as SQLAlchemy requires.

    >>> database_address(Path("/my results #1/50%"))
    'sqlite:////my results #1/50%25/mlflow.db'
    """
    return "sqlite:///" + str(folder / "mlflow.db").replace("%", "%25").replace("?", "%3F")


def database_file(uri: str) -> Path:
    """Return the file of an SQLite address."""
    return Path(unquote(uri.partition("://")[2].partition("?")[0].removeprefix("/")))


def is_database(uri: str) -> bool:
    """Whether MLflow keeps its runs at `uri` without a server."""
    return not uri.lower().startswith(("http://", "https://"))


def _tag_query(tags: Mapping[str, str]) -> str:
    return " and ".join(f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items())


def _quoted(value: str) -> str:
    if "'" in value and '"' in value:
        raise ConfigError(f"a name may contain ' or \" but not both; got {value}")
    return f'"{value}"' if "'" in value else f"'{value}'"


def _reason(error: Exception, uri: str) -> str:
    """The first line of an error, or its part with the reason why a connection failed."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    network = re.search(r"\[Errno -?\d+\] ([\w ]+)|(?:read|connect) timeout=[\d.]+|timed out", text)
    cause = network.group(network.lastindex or 0) if network else text
    return text_of_error(error, uri, cause)[:300]


def _sqlite_file(uri: str, *, create: bool) -> Path:
    """The file of an SQLite address, which must exist unless `create` is set."""
    path = database_file(uri)
    if path == Path():
        raise TrackingError(
            f"an SQLite address must name a file, such as sqlite:///results/mlflow.db; got {masked(uri)!r}"
        )
    if not create and not path.is_file():
        raise TrackingError(
            f"no MLflow database exists at {path}. Run a sweep first, or set the address of its database."
        )
    return path


@contextlib.contextmanager
def _short_requests() -> Iterator[None]:
    """In this context, requests to a dead server fail after `HEALTH_CHECK_SECONDS`, without retries."""
    limits = {**_HTTP_DEFAULTS, "MLFLOW_HTTP_REQUEST_TIMEOUT": str(HEALTH_CHECK_SECONDS)}
    before = {name: os.environ[name] for name in limits}  # `connect` has set the missing ones
    os.environ.update(limits)
    try:
        yield
    finally:
        os.environ.update(before)
