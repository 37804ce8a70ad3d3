"""Station 12, MLflow: one parent run per sweep and one finished child run per trial.

The sweep driver is the only writer; workers never talk to MLflow. Every call either did its work on the
server or raises `TrackingError`, and every call may be repeated: a trial that is already there is not
written twice, so a driver that keeps its results can log them again once the server is back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dpgcl_core.errors import ConfigError, TrackingError, unknown_choice

# Before MLflow is imported anywhere: it reads this once. MLflow itself is imported in functions, for it
# takes two seconds that `--help` and the workers should not pay.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

SWEEP_TAG = "dpgcl.sweep"
TRIAL_TAG = "dpgcl.trial"
ROLE_TAG = "dpgcl.role"
CHANGED_TAG = "dpgcl.changed_on_resume"
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
TUNING_COST_NOTE = "tuning cost not yet accounted"

SWEEP_STATUSES = ("FINISHED", "FAILED", "KILLED")
DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
HEALTH_CHECK_SECONDS = 5
# The driver repeats what failed, so MLflow's own default of seven retries (minutes) only stalls a sweep.
_HTTP_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}
# One request of MLflow takes at most 100 params and 1000 params, metrics and tags together.
_PARAMS_PER_REQUEST = 100
_METRICS_PER_REQUEST = 900

Series = Mapping[str, Sequence[tuple[int, float]]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Tracker:
    """Writes one sweep's runs to MLflow; build it with `Tracker.open`.

    Attributes:
      client: of the tracking server.
      experiment_id: of the MLflow experiment that holds the runs.
      address: of the server, without credentials, for messages.
    """

    client: MlflowClient
    experiment_id: str
    address: str

    @classmethod
    def open(cls, tracking_uri: str | None, artifact_root: Path, experiment: str) -> Tracker:
        """Returns a tracker on a server that answers, with the schema and the experiment created.

        Args:
          tracking_uri: http(s) address of a server or URI of a database; None is `mlflow.db` in
            `artifact_root`.
          artifact_root: folder for artifacts when MLflow runs on a database; a server has its own.
          experiment: name of the MLflow experiment.

        Raises:
          TrackingError: the address is refused, does not answer, or cannot be written.
        """
        uri = tracking_uri or f"sqlite:///{artifact_root / 'mlflow.db'}"
        client = connect(uri, create=True)
        location = (artifact_root / "mlartifacts").resolve().as_uri() if _is_database(uri) else None
        address = without_credentials(uri)
        with server_errors(address, f"opening the experiment {experiment!r}"):
            found = client.get_experiment_by_name(experiment)
            if found is None:
                # The kind makes MLflow's pages open on runs and metrics without asking.
                tags = {"mlflow.experimentKind": "custom_model_development"}
                experiment_id = client.create_experiment(experiment, location, tags)
                return cls(client, experiment_id, address)
        if found.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the MLflow experiment {experiment!r} at {address} was deleted; restore it with "
                f"`mlflow experiments restore -x {found.experiment_id}` or choose another name"
            )
        return cls(client, found.experiment_id, address)

    def find_sweep(self, name: str) -> str | None:
        """Returns the parent run of the sweep `name`, or None."""
        with server_errors(self.address, f"looking for the sweep {name!r}"):
            runs = self._search({ROLE_TAG: "sweep", SWEEP_TAG: name})
        return runs[0].info.run_id if runs else None

    def start_sweep(
        self, name: str, params: Mapping[str, Any], tags: Mapping[str, Any], description: str = ""
    ) -> str:
        """Returns the parent run of a new sweep, or the existing one of a resumed sweep.

        Params of a run are final in MLflow. When a resumed sweep comes with others, those recorded
        first stay and the difference is written to the tag `dpgcl.changed_on_resume`.

        Args:
          name: the sweep's name, unique in the experiment.
          params: settings that all trials share, and the grid.
          tags: further tags, for example `data_is`.
          description: a sentence on the sweep's question, for the run's note.

        Raises:
          TrackingError: the server failed; nothing is lost, call again.
        """
        run_id = self.find_sweep(name)
        with server_errors(self.address, f"starting the sweep {name!r}"):
            if run_id is None:
                own = {SWEEP_TAG: name, ROLE_TAG: "sweep", NOTE_TAG: _note(name, params, description)}
                run = self.client.create_run(
                    self.experiment_id, tags={**_strings(tags), **own}, run_name=name
                )
            else:
                run = self.client.get_run(run_id)
                self.client.update_run(run_id, status="RUNNING")
            known, wanted = run.data.params, _strings(params)
            self._log(run.info.run_id, {k: v for k, v in wanted.items() if k not in known}, [])
            changed = [f"{k}: {known[k]} → {v}" for k, v in wanted.items() if known.get(k, v) != v]
            if changed:
                self.client.set_tag(run.info.run_id, CHANGED_TAG, "; ".join(changed))
        return run.info.run_id

    def log_trial(
        self,
        parent_run_id: str,
        trial_name: str,
        params: Mapping[str, Any],
        metrics: Mapping[str, float],
        series: Series,
        tags: Mapping[str, Any],
        *,
        run_name: str | None = None,
    ) -> str:
        """Returns the child run of a finished trial, written unless it is already there.

        A run that an earlier, interrupted call left unfinished is deleted and written anew: MLflow
        cannot take back what such a run already holds.

        Args:
          parent_run_id: from `start_sweep`.
          trial_name: identifies the trial within the sweep, the same after a resume.
          params: the trial's settings.
          metrics: final values, by the names in `dpgcl_core.metrics`; logged at the last step of `series`.
          series: (step, value) pairs by name, for example of `snr`.
          tags: further tags.
          run_name: shown in MLflow; by default from `params`, see `trial_run_name`.

        Raises:
          ConfigError: a name is in both `metrics` and `series`.
          TrackingError: the server failed; the trial is not finished there, call again.
        """
        points = _metric_points(metrics, series)
        with server_errors(self.address, f"logging the trial {trial_name!r}"):
            for earlier in self._search({PARENT_TAG: parent_run_id, TRIAL_TAG: trial_name}):
                if earlier.info.status == "FINISHED":
                    return earlier.info.run_id
                self.client.delete_run(earlier.info.run_id)
            parent = self.client.get_run(parent_run_id)
            own = {
                PARENT_TAG: parent_run_id,
                SWEEP_TAG: parent.data.tags[SWEEP_TAG],
                TRIAL_TAG: trial_name,
                ROLE_TAG: "trial",
            }
            run = self.client.create_run(
                self.experiment_id,
                tags={**_strings(tags), **own},
                run_name=run_name or trial_run_name(params) or trial_name,
            )
            self._log(run.info.run_id, _strings(params), points)
            self.client.set_terminated(run.info.run_id, "FINISHED")
        return run.info.run_id

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Uploads the file `path` to a run, into `folder` there; an earlier upload is overwritten.

        Raises:
          TrackingError: the file does not exist or the server failed.
        """
        with server_errors(self.address, f"uploading {path.name}"):
            self.client.log_artifact(run_id, str(path), folder)

    def log_figure(self, run_id: str, path: Path) -> None:
        """Uploads a figure's file to a run's folder `figures`. Raises as `log_artifact`."""
        self.log_artifact(run_id, path, "figures")

    def finish_sweep(self, parent_run_id: str, status: str = "FINISHED") -> None:
        """Ends the parent run with one of `SWEEP_STATUSES`.

        Raises:
          ConfigError: `status` is unknown.
          TrackingError: the server failed; call again.
        """
        if status not in SWEEP_STATUSES:
            raise ConfigError(unknown_choice("sweep status", status, SWEEP_STATUSES))
        with server_errors(self.address, "ending the sweep"):
            self.client.set_terminated(parent_run_id, status)

    def _search(self, tags: Mapping[str, str]) -> list[Run]:
        """Runs of the experiment with all `tags`, newest first."""
        return search_runs(self.client, [self.experiment_id], tags)

    def _log(self, run_id: str, params: Mapping[str, str], points: Sequence[Metric]) -> None:
        """Params and metrics in as few requests as MLflow allows: one for an ordinary trial."""
        from mlflow.entities import Param

        entries = [Param(name, value) for name, value in params.items()]
        for some_params, some_points in itertools.zip_longest(
            _chunks(entries, _PARAMS_PER_REQUEST), _chunks(points, _METRICS_PER_REQUEST), fillvalue=()
        ):
            self.client.log_batch(run_id, metrics=some_points, params=some_params)


def connect(tracking_uri: str, *, create: bool = False) -> MlflowClient:
    """Returns a client of a server or database that answers now.

    Args:
      tracking_uri: http(s) address of a server, or URI of a database.
      create: create a missing SQLite file and its folder; otherwise a missing file is refused.

    Raises:
      TrackingError: the scheme is refused, the server does not answer, or the file cannot be used.
    """
    scheme = tracking_uri.partition(":")[0].partition("+")[0].lower()
    if scheme not in (*DATABASE_SCHEMES, "http", "https") or "://" not in tracking_uri:
        raise TrackingError(
            f"an MLflow address must start with one of {', '.join((*DATABASE_SCHEMES, 'http', 'https'))} and "
            f"'://' (MLflow keeps no runs in plain folders any more); got "
            f"{without_credentials(tracking_uri)!r}. Give a server, for example http://127.0.0.1:5000, "
            "or a file, for example sqlite:///results/mlflow.db"
        )
    if scheme == "sqlite":
        _check_sqlite_file(tracking_uri, create=create)
    for name, value in _HTTP_DEFAULTS.items():
        os.environ.setdefault(name, value)

    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    address = without_credentials(tracking_uri)
    fix = "" if _is_database(tracking_uri) else _SERVER_FIX.format(address=address)
    with _short_requests(), server_errors(address, "connecting", fix):
        client = MlflowClient(tracking_uri=tracking_uri)
        client.search_experiments(max_results=1)
    return client


_SERVER_FIX = (
    "; check that `curl {address}/health` says OK, start one with `mlflow server`, "
    "or leave the address out to keep runs in a local file"
)


def search_runs(client: MlflowClient, experiment_ids: list[str], tags: Mapping[str, str]) -> list[Run]:
    """Returns all runs that carry all `tags`, newest first, deleted ones left out.

    Raises:
      ConfigError: a tag's value holds both kinds of quotes, which MLflow cannot search for.
    """
    query = " and ".join(f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items())
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            experiment_ids, query, order_by=["attributes.start_time DESC"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


@contextlib.contextmanager
def server_errors(address: str, action: str, fix: str = "") -> Iterator[None]:
    """Turns whatever MLflow raises into one line of `TrackingError`."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, RequestException, SQLAlchemyError, OSError) as error:
        raise TrackingError(f"MLflow at {address} failed while {action}: {_reason(error)}{fix}") from error


def trial_run_name(params: Mapping[str, Any]) -> str:
    """Returns the name a trial has in MLflow's tables and plots, from those settings it has.

    >>> trial_run_name({"group_size": 8, "target_epsilon": 10.0, "num_augmentations": 1, "repeat": 0})
    'S=8 ε=10 Na=1 #0'
    >>> trial_run_name({"group_size": "batch", "target_epsilon": float("inf")})
    'S=batch ε=∞'
    """
    shown = (("group_size", "S="), ("target_epsilon", "ε="), ("num_augmentations", "Na="), ("repeat", "#"))
    return " ".join(sign + _short(params[name]) for name, sign in shown if name in params)


def without_credentials(uri: str) -> str:
    """Returns `uri` fit for a message.

    >>> without_credentials("https://me:secret@tracking.example/mlflow")
    'https://tracking.example/mlflow'
    """
    return re.sub(r"://[^/]*@", "://", uri)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:g}"
    return str(value)


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _chunks(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _is_database(uri: str) -> bool:
    return not uri.lower().startswith(("http://", "https://"))


def _quoted(value: str) -> str:
    if "'" in value and '"' in value:
        raise ConfigError(f"a name may hold ' or \" but not both; got {value}")
    return f'"{value}"' if "'" in value else f"'{value}'"


def _reason(error: Exception) -> str:
    """The first line of an error, or the part of it that says why a connection failed."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    network = re.search(r"\[Errno -?\d+\] ([\w ]+)|(?:read|connect) timeout=[\d.]+|timed out", text)
    return network.group(network.lastindex or 0) if network else text[:300]


def _note(name: str, params: Mapping[str, Any], description: str) -> str:
    """The parent run's description in MLflow (Markdown)."""

    def first(*names: str) -> str:
        return next((_plain(params[each]) for each in names if each in params), "see the trials")

    lines = [
        f"**{name}**: a sweep of differentially private contrastive learning, one run per training.",
        description,
        f"- ε: {first('target_epsilons', 'target_epsilon', 'epsilons')}",
        f"- δ: {first('target_delta', 'delta')}",
        f"- {TUNING_COST_NOTE}: the ε of a run covers that training alone, not the choice among runs",
    ]
    return "\n\n".join([*filter(None, lines[:2]), "\n".join(lines[2:])])


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_short, value))
    return _short(value)


def _metric_points(metrics: Mapping[str, float], series: Series) -> list[Metric]:
    from mlflow.entities import Metric

    both = sorted(set(metrics) & set(series))
    if both:
        raise ConfigError(f"a metric is either a final value or a series; got both for {', '.join(both)}")
    now = int(time.time() * 1000)
    last_step = max((step for points in series.values() for step, _ in points), default=0)
    final = [Metric(name, float(value), now, last_step) for name, value in metrics.items()]
    return final + [
        Metric(name, float(value), now, int(step))
        for name, points in series.items()
        for step, value in points
    ]


def _check_sqlite_file(uri: str, *, create: bool) -> None:
    path = Path(uri.partition("://")[2].partition("?")[0].removeprefix("/"))
    if path == Path():
        raise TrackingError(
            f"an SQLite address must name a file, as sqlite:///results/mlflow.db; got {uri!r}"
        )
    if not create and not path.is_file():
        raise TrackingError(
            f"no MLflow database at {path}; run a sweep first, or give the address of the one that was used"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrackingError(f"the folder of {path} cannot be created: {error.strerror}") from error
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise TrackingError(f"MLflow must be able to write {target}; choose a folder that you can write")


@contextlib.contextmanager
def _short_requests() -> Iterator[None]:
    """Within it, an unreachable server is given up after `HEALTH_CHECK_SECONDS`, without retries."""
    limits = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(HEALTH_CHECK_SECONDS),
    }
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update(limits)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
