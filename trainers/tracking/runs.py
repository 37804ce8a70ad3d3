"""Stage 12, MLflow: one parent run per sweep and one finished child run per trial.

The sweep driver is the only writer; workers never connect to MLflow. Every call either completes on the
server or raises `TrackingError`. Every call may be repeated: a trial that already exists is not written
twice, so a driver that keeps its results can log them again once the server is available.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dpgcl_core.addresses import masked, masked_text
from dpgcl_core.errors import ConfigError, TrackingError
from dpgcl_core.release.markdown import escaped
from dpgcl_core.release.metrics import declared_name, is_reference, tracked_name
from trainers.config.active_settings import settings_with_effect
from trainers.tracking.mlflow_server import connect, database_address, is_database, search_runs, server_errors

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Metric, Run
    from mlflow.tracking import MlflowClient

SWEEP_TAG = "dpgcl.sweep"
TRIAL_TAG = "dpgcl.trial"
ROLE_TAG = "dpgcl.role"
SWEEP_ROLE, TRIAL_ROLE, SEALED_ROLE = "sweep", "trial", "sealed"
CHANGED_TAG = "dpgcl.changed_on_resume"
SWEEP_ID_TAG = "dpgcl.sweep_id"
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
TUNING_COST_TAG = "tuning_cost"
STOPPED_TAG = "stopped_at_step"
"""Tag of a training that was ended early by its scores: it is left out of comparisons."""
AXIS_PREFIX = "Axis: "
"""Prefix of params that repeat the swept settings, so that they come first among the params by name: MLflow
compares runs by these."""
_COUNT_METRICS = ("num_steps_done", "num_steps_charged", "num_restarts")
"""Metrics that are written to MLflow as params, because runs should not be compared by them."""
NO_TUNING_COST = "The tuning cost of this sweep was not recorded. Each ε covers only one training."
# Times of a sealed run: a real time would disclose the sweep's duration, and so its number of trials.
SEALED_TIME_MS = 1
MASKED_TIMES = (
    "The times of this run are masked as 1 January 1970, because real times would disclose how long the "
    "sweep took, and so how many trials it had."
)

_ANSWER_SEPARATOR = "\n\n---\n\n"

# An MLflow request takes at most 100 params, and at most 1000 params, metrics and tags together.
_PARAMS_PER_REQUEST = 100
_METRICS_PER_REQUEST = 900
_TAG_LENGTH = 4000

Series = Mapping[str, Sequence[tuple[int, float]]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Tracker:
    """Writes one sweep's runs to MLflow; build it with `Tracker.open`.

    Attributes:
      client: client of the tracking server.
      experiment_id: id of the MLflow experiment that holds the runs.
      uri: address of the server; messages show it only as `masked` returns it.
    """

    client: MlflowClient
    experiment_id: str
    uri: str = field(repr=False)

    @classmethod
    def open(
        cls, tracking_uri: str | None, artifact_root: Path, experiment: str, description: str = ""
    ) -> Tracker:
        """Connect to MLflow, create the experiment if it does not exist, and return the tracker.

        Args:
          tracking_uri: http(s) address of a server or URI of a database; None is `mlflow.db` in
            `artifact_root`.
          artifact_root: folder for artifacts if MLflow runs on a database; a server has its own.
          experiment: name of the MLflow experiment.
          description: description of a new experiment.

        Raises:
          TrackingError: the server does not answer or cannot be written, or the experiment was deleted.
        """
        uri = tracking_uri or database_address(artifact_root)
        client = connect(uri, create=True)
        location = (artifact_root / "mlartifacts").resolve().as_uri() if is_database(uri) else None
        with server_errors(uri, f"opening the experiment {experiment!r}"):
            entry = client.get_experiment_by_name(experiment)
            if entry is None:
                # With this kind, MLflow opens the page of runs and metrics without asking for the kind.
                tags = {"mlflow.experimentKind": "custom_model_development"}
                if description:
                    tags[NOTE_TAG] = escaped(masked_text(description))
                entry = _create_experiment(client, experiment, location, tags)
        if entry.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the MLflow experiment {experiment!r} at {masked(uri)} was deleted. Restore it with "
                f"`mlflow experiments restore -x {entry.experiment_id}`, or choose another name."
            )
        return cls(client, entry.experiment_id, uri)

    def start_sweep(
        self,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        description: str = "",
        *,
        sweep_id: str = "",
    ) -> str:
        """Create the parent run of a new sweep, or reopen that of a resumed sweep, and return its id.

        Params of a run are final in MLflow. If a resumed sweep has other params, the first recorded params
        stay and the difference is written to the tag `dpgcl.changed_on_resume`.

        Args:
          name: the sweep's name, unique in the experiment.
          params: settings that all trials share, and the grid.
          tags: further tags, for example `data_is`.
          description: a sentence on the sweep's question, for the run's note.
          sweep_id: distinguishes the sweep from one of the same name in another storage folder.

        Raises:
          TrackingError: the server failed, and the call can be repeated without loss; or the server has
            trials of another sweep of this name.
        """
        run_id = self.find_sweep(name, sweep_id)
        with server_errors(self.uri, f"starting the sweep {name!r}"):
            note = _describe_sweep(name, params, tags, description)
            if run_id is None:
                role_tags = {SWEEP_TAG: name, SWEEP_ID_TAG: sweep_id, ROLE_TAG: SWEEP_ROLE, NOTE_TAG: note}
                run = self.client.create_run(
                    self.experiment_id, tags={**_strings(tags), **_source_tags(), **role_tags}, run_name=name
                )
            else:
                run = self.client.get_run(run_id)
                self.client.update_run(run_id, status="RUNNING")
                self.client.set_tag(run_id, SWEEP_ID_TAG, sweep_id)
                self.client.set_tag(run_id, NOTE_TAG, note)
            old, new = run.data.params, _params(params)
            self._log(run.info.run_id, {k: v for k, v in new.items() if k not in old}, [])
            differences = [f"{k}: {old[k]} → {v}" for k, v in new.items() if old.get(k, v) != v]
            if differences:
                self.client.set_tag(run.info.run_id, CHANGED_TAG, "; ".join(differences))
        return str(run.info.run_id)

    def find_sweep(self, name: str, sweep_id: str = "") -> str | None:
        """Return the id of this sweep's parent run, or of an orphan with its name; None if there is neither.

        An orphan is a parent run without trials, left by a driver that was killed before it had a folder.

        Args:
          name, sweep_id: as in `start_sweep`; without the id, any run of the name is returned.

        Raises:
          TrackingError: the server failed, or it has trials of another sweep of this name.
        """
        with server_errors(self.uri, f"searching for the sweep {name!r}"):
            runs = self._search({ROLE_TAG: SWEEP_ROLE, SWEEP_TAG: name})
            ids = [run.data.tags.get(SWEEP_ID_TAG, "") for run in runs]
            for run, stored_id in zip(runs, ids, strict=True):
                if stored_id == sweep_id:
                    return str(run.info.run_id)
            for run, stored_id in zip(runs, ids, strict=True):
                if sweep_id and stored_id and self._search({PARENT_TAG: run.info.run_id}):
                    raise TrackingError(
                        f"MLflow at {masked(self.uri)} has a sweep {name!r} from another storage "
                        "folder. Choose another --name, or delete its runs there."
                    )
            return str(runs[0].info.run_id) if runs else None

    def log_trial(
        self,
        parent_run_id: str,
        trial_name: str,
        params: Mapping[str, Any],
        metrics: Mapping[str, float],
        series: Series,
        tags: Mapping[str, Any],
        *,
        axes: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        times_ms: tuple[int, int] | None = None,
        is_new: bool = False,
    ) -> str:
        """Write a finished trial as a child run, unless it exists already, and return the run's id.

        A run that an earlier, interrupted call left unfinished is deleted and written again, because MLflow
        cannot remove data from such a run.

        Args:
          parent_run_id: the result of `start_sweep`.
          trial_name: identifies the trial within the sweep, the same after a resume.
          params: the trial's settings.
          metrics: final values, by the names in `dpgcl_core.release.metrics`. They are written at step 0, so
            that MLflow draws a bar for each run.
          series: (step, value) pairs by name, for example of `snr`.
          tags: further tags.
          axes: the trial's values of the swept settings; repeated under names with `AXIS_PREFIX`.
          run_name: the name shown in MLflow; by default the result of `trial_run_name`.
          times_ms: start and end of the training, in milliseconds since the epoch; by default both are now,
            because the duration of logging a run is unrelated to the training.
          is_new: whether no earlier call can have started the trial's run. If not, MLflow is searched for it.

        Raises:
          ConfigError: a name is in both `metrics` and `series`.
          TrackingError: the server failed; the trial is not finished there, so call again.
        """
        points = _metric_points(metrics, series)
        with server_errors(self.uri, f"logging the trial {trial_name!r}"):
            key_tags = {PARENT_TAG: parent_run_id, TRIAL_TAG: trial_name}
            run_id = None
            for earlier in () if is_new else self._search(key_tags):
                if earlier.info.status == "FINISHED":
                    run_id = str(earlier.info.run_id)
                else:  # also a run whose creation was confirmed too late
                    self.client.delete_run(earlier.info.run_id)
            if run_id is not None:
                return run_id
            parent = self.client.get_run(parent_run_id)
            role_tags = key_tags | {SWEEP_TAG: parent.data.tags[SWEEP_TAG], ROLE_TAG: TRIAL_ROLE}
            start, end = times_ms or (_now_ms(),) * 2
            run = self.client.create_run(
                self.experiment_id,
                start_time=start,
                tags={**_strings(tags), **_source_tags(), **role_tags},
                run_name=run_name or trial_run_name(trial_name, params),
            )
            visible_params = {**params, **_count_params(metrics)}
            visible_params |= {f"{AXIS_PREFIX}{name}": value for name, value in (axes or {}).items()}
            self._log(run.info.run_id, _params(visible_params), points)
            self.client.set_terminated(run.info.run_id, "FINISHED", end_time=end)
        return str(run.info.run_id)

    def trial_statuses(self, parent_run_id: str) -> dict[str, str]:
        """Return the MLflow status of a sweep's logged trials by name. Raises as `finish_sweep`."""
        with server_errors(self.uri, "searching for the trials of a sweep"):
            runs = self._search({PARENT_TAG: parent_run_id})
        return {run.data.tags[TRIAL_TAG]: str(run.info.status) for run in runs}

    def log_sealed(
        self,
        name: str,
        params: Mapping[str, Any],
        metrics: Mapping[str, float],
        tags: Mapping[str, Any],
        texts: Mapping[str, str] | None = None,
        *,
        sweep_id: str,
        first: Sequence[str] = (),
    ) -> str:
        """Write the only run of a sealed sweep, unless it exists already, and return its id.

        A sealed sweep must not disclose its number of trials. So the run has no parent, no series and no real
        times. It has no artifacts either, because a server records the time of each upload.

        Args:
          name, params, metrics, tags: as in `log_trial` and `start_sweep`.
          first: sentences that come first in the description.
          sweep_id: random id that distinguishes sweeps of one name.
          texts: documents by name, as tags of the run; a long one takes several, `NAME`, `NAME.2`, ….

        Raises:
          TrackingError: the server failed; call again.
        """
        with server_errors(self.uri, f"publishing the sweep {name!r}"):
            role_tags = {ROLE_TAG: SEALED_ROLE, SWEEP_TAG: name, SWEEP_ID_TAG: sweep_id}
            for earlier in self._search(role_tags):
                if earlier.info.status == "FINISHED":
                    return str(earlier.info.run_id)
                self.client.delete_run(earlier.info.run_id)
            lines = [escaped(masked_text(line)) for line in first]
            role_tags[NOTE_TAG] = "\n\n".join([*lines, _describe_sweep(name, params, tags, MASKED_TIMES)])
            run = self.client.create_run(
                self.experiment_id,
                start_time=SEALED_TIME_MS,
                tags={**_strings(tags), **role_tags, **_split_into_tags(texts or {})},
                run_name=name,
            )
            visible_params = {**params, **_count_params(metrics)}
            self._log(run.info.run_id, _params(visible_params), _metric_points(metrics, {}, SEALED_TIME_MS))
            self.client.set_terminated(run.info.run_id, "FINISHED", end_time=SEALED_TIME_MS)
        return str(run.info.run_id)

    def set_tags(self, parent_run_id: str, tags: Mapping[str, Any]) -> None:
        """Replace tags of a sweep's parent run and of all its trials. Raises as `finish_sweep`."""
        with server_errors(self.uri, "recording the tuning cost"):
            trials = self._search({PARENT_TAG: parent_run_id})
            for run_id in (parent_run_id, *(run.info.run_id for run in trials)):
                for name, value in tags.items():
                    self.client.set_tag(run_id, name, masked_text(str(value)))

    def set_note(self, parent_run_id: str, first: Sequence[str]) -> None:
        """Replace the sentences at the start of a sweep's description. Raises as `finish_sweep`."""
        with server_errors(self.uri, "describing the sweep"):
            note = self.client.get_run(parent_run_id).data.tags.get(NOTE_TAG, "")
            rest = note.rpartition(_ANSWER_SEPARATOR)[2]
            answer = "\n\n".join(escaped(masked_text(line)) for line in first)
            self.client.set_tag(parent_run_id, NOTE_TAG, f"{answer}{_ANSWER_SEPARATOR}{rest}")

    def metrics_of(self, run_id: str) -> dict[str, float]:
        """Return the last values of a run's metrics. Raises `TrackingError` if the server failed."""
        with server_errors(self.uri, "reading the metrics of a run"):
            return dict(self.client.get_run(run_id).data.metrics)

    def log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Write metrics of a whole sweep, such as the scores of raw pixels. Raises as `finish_sweep`."""
        with server_errors(self.uri, "logging the metrics of the sweep"):
            self._log(run_id, {}, _metric_points(metrics, {}))

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload the file `path` to a run, into `folder` there; an earlier upload is overwritten.

        Raises:
          TrackingError: the file does not exist or the server failed.
        """
        with server_errors(self.uri, f"uploading {path.name}"):
            self.client.log_artifact(run_id, str(path), folder)

    def finish_sweep(self, parent_run_id: str, status: str = "FINISHED") -> None:
        """End the parent run as FINISHED, FAILED or KILLED.

        Raises:
          TrackingError: the server failed; call again.
        """
        with server_errors(self.uri, "ending the sweep"):
            self.client.set_terminated(parent_run_id, status)

    def _search(self, tags: Mapping[str, str]) -> list[Run]:
        """The experiment's runs that have all `tags`, newest first."""
        return search_runs(self.client, [self.experiment_id], tags)

    def _log(self, run_id: str, params: Mapping[str, str], points: Sequence[Metric]) -> None:
        """Log params and metrics in as few requests as MLflow allows: one for an ordinary trial."""
        from mlflow.entities import Param

        entries = [Param(name, value) for name, value in params.items()]
        for some_params, some_points in itertools.zip_longest(
            _chunks(entries, _PARAMS_PER_REQUEST), _chunks(points, _METRICS_PER_REQUEST), fillvalue=()
        ):
            self.client.log_batch(run_id, metrics=some_points, params=some_params)


def trial_run_name(trial_name: str, params: Mapping[str, Any]) -> str:
    """Return a trial's name in MLflow's tables and plots.

    It begins with the trial's own name, which contains the swept setting and the repeat, because tables cut
    the end. Group size, ε and number of augmentations follow unless that name contains them.

    >>> trial_run_name("Q+V-private-r0", {"group_size": 8, "target_epsilon": 10.0, "num_augmentations": 1})
    'Q+V-private-r0: S=8 ε=10 Na=1'
    >>> trial_run_name("trial-3", {"group_size": "batch", "target_epsilon": float("inf")})
    'trial-3: S=batch ε=∞'
    >>> trial_run_name("S8-Na1-eps10-r0", {"group_size": 8, "target_epsilon": 10.0, "num_augmentations": 1})
    'S8-Na1-eps10-r0'
    """
    shown = (("group_size", "S", "S"), ("target_epsilon", "ε", "eps"), ("num_augmentations", "Na", "Na"))
    name_parts = trial_name.replace("eps-inf", "eps∞").split("-")
    settings = [
        f"{sign}={_short(params[name])}"
        for name, sign, short in shown
        if name in params and short + _short(params[name]) not in name_parts
    ]
    return f"{trial_name}: {' '.join(settings)}" if settings else trial_name


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_short, value))
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:g}"
    return str(value)


def _params(values: Mapping[str, Any]) -> dict[str, str]:
    """Return params as strings, without params that do not apply.

    >>> _params({"group_size": 8, "warm_start": None})
    {'group_size': '8'}
    """
    return _strings(settings_with_effect(values))


def _create_experiment(
    client: MlflowClient, name: str, location: str | None, tags: Mapping[str, str]
) -> Experiment:
    """Create and return an experiment, or return the one that another user created at the same moment."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_experiment(client.create_experiment(name, location, dict(tags)))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found


def _source_tags() -> dict[str, str]:
    """Return MLflow's tags for the user and the program that started a run."""
    tags = {"mlflow.source.name": Path(sys.argv[0]).name or "python", "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container may have no user
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _strings(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: masked_text(str(value)) for name, value in values.items()}


def _split_into_tags(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts by tag name, split into tags of at most `_TAG_LENGTH` characters.

    >>> sorted(_split_into_tags({"page": "x" * 5000}))
    ['page', 'page.2']
    """
    return {
        name if start == 0 else f"{name}.{1 + start // _TAG_LENGTH}": text[start : start + _TAG_LENGTH]
        for name, text in texts.items()
        for start in range(0, max(1, len(text)), _TAG_LENGTH)
    }


def _chunks(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _describe_sweep(name: str, params: Mapping[str, Any], tags: Mapping[str, Any], description: str) -> str:
    """Return the Markdown description of a sweep's run in MLflow."""

    def first(*names: str) -> str:
        return next((_short(params[each]) for each in names if each in params), "see the trials")

    lines = [
        f"**{escaped(name)}**: a sweep of differentially private contrastive learning"
        + (", with one run per training." if tags.get("release_mode", "open") == "open" else ", in one run."),
        escaped(masked_text(description)),
        f"- ε: {escaped(first('target_epsilons', 'target_epsilon', 'epsilons'))}",
        f"- δ: {escaped(first('target_delta', 'delta'))}",
        f"- {escaped(str(tags.get(TUNING_COST_TAG, NO_TUNING_COST)))}",
    ]
    return "\n\n".join([*filter(None, lines[:2]), "\n".join(lines[2:])])


def _metric_points(metrics: Mapping[str, float], series: Series, time_ms: int | None = None) -> list[Metric]:
    from mlflow.entities import Metric

    both = sorted(set(metrics) & set(series))
    if both:
        raise ConfigError(f"a metric is either a final value or a series; got both for {', '.join(both)}")
    now = _now_ms() if time_ms is None else time_ms
    final = {name: [(0, value)] for name, value in metrics.items() if name not in _COUNT_METRICS}
    found = {tracked_name(name): points for name, points in {**final, **series}.items()}
    return [
        Metric(name, float(value), now, int(step))
        for name in sorted(found, key=_metric_order)
        for step, value in found[name]
    ]


def _metric_order(name: str) -> tuple[bool, bool, str]:
    """Return a sort key, scores before their references: MLflow compares runs by the metric logged first.

    >>> sorted(["privacy.epsilon", "untrained_view_retrieval_top1", "view_retrieval_top1"], key=_metric_order)
    ['view_retrieval_top1', 'untrained_view_retrieval_top1', 'privacy.epsilon']
    """
    return name != declared_name(name), is_reference(name), name


def _count_params(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the metrics that MLflow stores as params.

    >>> _count_params({"num_steps_charged": 12.0, "epsilon": 1.0})
    {'num_steps_charged': 12}
    """
    return {name: int(metrics[name]) for name in _COUNT_METRICS if name in metrics}


def _now_ms() -> int:
    return int(time.time() * 1000)
