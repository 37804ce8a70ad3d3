"""Results when MLflow fails midway: kept locally, never lost, sent later, once. No Ray is started."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from mlflow.tracking import MlflowClient

from dashboards.compose.answer import answer_of
from dashboards.dashboard_error import DashboardError
from dashboards.query.trial_frames import load_trials
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import (
    BudgetExceeded,
    ClusterError,
    ConfigError,
    LedgerError,
    StorageError,
    TrackingError,
)
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import read_head
from dpgcl_core.release.markdown import escaped
from sweeps.group_size import points
from sweeps.service.cluster.interruption import StopRequest
from sweeps.service.options.service import ServiceOptions
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.trials import Trial
from sweeps.service.running import driver
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps.support import contents, options, run_sweep, tracked_runs, without_ray
from trainers.config.training import PerformanceConfig
from trainers.tracking.mlflow_server import connect
from trainers.tracking.runs import NOTE_TAG, Tracker

pytestmark = pytest.mark.ci

RESULT = {
    "metrics": {"epsilon": 1.0, "num_steps_charged": 10, "knn_accuracy": 0.5},
    "series": {"snr": [(0, 0.1)]},
}


class Ray:
    """Stands in for Ray: every trial ends at once with the same result.

    Attributes:
      trained: names of the trials, in order.
      before: called before the first trial.
      after: called with the name of each trial once its result was handed over.
      failing: trials that fail, and why.
    """

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.after: Callable[[str], None] = lambda _: None
        self.before: Callable[[], None] = lambda: None
        self.failing: dict[str, str] = {}

    def run_trials(
        self,
        session: Any,
        plan: SweepPlan,
        folder: SweepFolder,
        trials: Sequence[Trial],
        on_result: Any,
        *_: Any,
    ) -> dict[str, str]:
        self.before()
        for trial in trials:
            if trial.name not in self.failing:
                self.trained.append(trial.name)
                on_result(trial.name, RESULT)
                self.after(trial.name)
        return {trial.name: self.failing[trial.name] for trial in trials if trial.name in self.failing}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    stand_in = Ray()
    without_ray(monkeypatch, stand_in.run_trials)
    return stand_in


@pytest.fixture
def sweep(tmp_path: Path, empty_database: Path) -> Callable[..., int]:
    """Runs the sweep `one` of four trials."""
    shutil.copy(empty_database, tmp_path)

    def start(*more: str, figure: Any = lambda *_: []) -> int:
        chosen: SweepOptions = options(
            *("--tiny", "--noise-multiplier", "1", "--repeats", "2", "--name", "one"),
            *("--storage", str(tmp_path), *more),
        )
        return run_sweep("group-size", chosen, points(chosen), figure)

    return start


def break_after(monkeypatch: pytest.MonkeyPatch, method: str, num_calls: int) -> None:
    """From the call after `num_calls`, MLflow does not answer `method`."""
    calls, works = [], getattr(Tracker, method)

    def call(self: Tracker, *given: Any, **named: Any) -> Any:
        calls.append(method)
        if len(calls) > num_calls:
            raise TrackingError("MLflow does not answer")
        return works(self, *given, **named)

    monkeypatch.setattr(Tracker, method, call)


def kept(tmp_path: Path) -> list[str]:
    return contents(tmp_path / "sweeps" / "one" / "trials")


def sent(tmp_path: Path) -> list[str]:
    trials = load_trials(f"sqlite:///{tmp_path}/mlflow.db", "one")
    return sorted(f"{row.target_epsilon:.3g} {row.repeat}" for row in trials.itertuples())


ALL_SENT = ["1.08 0", "1.08 1", "inf 0", "inf 1"]


def test_results_are_kept_when_mlflow_fails_midway(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as broken:
        break_after(broken, "log_trial", 1)
        assert sweep() == 1
    assert len(kept(tmp_path)) == len(ray.trained) == 4
    assert len(sent(tmp_path)) == 1


def test_results_are_not_read_again_as_others_come(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, finished = list[str](), SweepFolder.result
    monkeypatch.setattr(
        SweepFolder, "result", lambda self, trial, *more: read.append(trial) or finished(self, trial, *more)
    )
    assert sweep() == 0
    assert read == [], "the driver keeps what it has written"
    assert sweep("--resume") == 0
    assert sorted(read) == sorted(ray.trained), "and reads once what another one has"


@pytest.mark.ci
def test_resume_sends_what_mlflow_lacks_and_asks_for_the_rest_once(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        break_after(broken, "log_trial", 3)
        assert sweep() == 1
    sent_now, log = list[str](), Tracker.log_trial
    monkeypatch.setattr(
        Tracker,
        "log_trial",
        lambda self, *given, **more: sent_now.append(given[1]) or log(self, *given, **more),
    )
    assert sweep("--resume") == 0
    assert sent_now == ray.trained[3:]


@pytest.mark.ci
def test_results_that_were_kept_are_sent_by_resume_without_training(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as broken:
        break_after(broken, "log_trial", 1)
        sweep()
    assert sweep("--resume") == 0
    assert len(ray.trained) == 4
    assert sent(tmp_path) == ALL_SENT


@pytest.mark.ci
def test_results_are_sent_once_however_often_a_sweep_is_resumed(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    assert [sweep(), sweep("--resume"), sweep("--resume")] == [0, 0, 0]
    assert sent(tmp_path) == ALL_SENT


@pytest.mark.ci
def test_results_of_a_short_failure_are_sent_at_the_end(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as broken:
        break_after(broken, "log_trial", 0)
        ray.after = lambda _: broken.undo() if len(ray.trained) == 4 else None
        assert sweep() == 0
    assert sent(tmp_path) == ALL_SENT


def test_failure_of_mlflow_is_told_once_with_the_place_of_the_results(
    ray: Ray,
    sweep: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_after(monkeypatch, "log_trial", 0)
    sweep()
    shown = capsys.readouterr().out
    place = tmp_path / "sweeps" / "one"
    assert shown.count("warning: MLflow does not answer") == 1
    assert f"MLflow did not accept 4 results; kept in {place}." in shown
    assert shown.count("--resume --name one\n") == 1


def test_failure_before_the_first_trial_leaves_no_sweep(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_after(monkeypatch, "start_sweep", 0)
    with pytest.raises(TrackingError):
        sweep()
    assert ray.trained == []
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.ci
def test_failure_before_a_resume_loses_nothing(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweep()
    before = kept(tmp_path)
    break_after(monkeypatch, "start_sweep", 0)
    with pytest.raises(TrackingError):
        sweep("--resume")
    assert kept(tmp_path) == before


@pytest.mark.ci
@pytest.mark.parametrize("method", ["finish_sweep", "log_artifact"])
def test_failure_at_the_end_loses_nothing(
    method: str, ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def figure(uri: str, name: str, folder: Path) -> list[Path]:
        (folder / "figure.png").write_text("drawn")
        return [folder / "figure.png"]

    break_after(monkeypatch, method, 0)
    assert sweep(figure=figure) == 0
    assert (tmp_path / "sweeps" / "one" / "figure.png").exists()
    assert sent(tmp_path) == ALL_SENT


@pytest.mark.ci
def test_figure_that_cannot_be_drawn_loses_nothing(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def figure(*_: Any) -> list[Path]:
        raise DashboardError("nothing to draw")

    assert sweep(figure=figure) == 0
    assert "warning: no figure: nothing to draw" in capsys.readouterr().out
    assert sent(tmp_path) == ALL_SENT


def test_failed_trial_is_told_and_run_again_by_resume(
    ray: Ray, sweep: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    ray.failing = {"S4-Na1-private-r1": "it broke"}
    assert sweep() == 1
    assert "failed: S4-Na1-private-r1 (it broke)" in capsys.readouterr().out
    ray.failing, ray.trained = {}, []
    assert sweep("--resume") == 0
    assert ray.trained == ["S4-Na1-private-r1"]


def test_stopped_sweep_keeps_what_was_finished(ray: Ray, sweep: Callable[..., int], tmp_path: Path) -> None:
    def stop(name: str) -> None:
        raise StopRequest(15)

    ray.after = stop
    assert sweep() == 128 + 15
    assert len(kept(tmp_path)) == len(sent(tmp_path)) == 1


@pytest.mark.ci
def test_sweep_is_held_while_it_runs(ray: Ray, sweep: Callable[..., int]) -> None:
    def start_another(_: str) -> None:
        with pytest.raises(ValueError, match="is running: wait for its end"):
            sweep("--resume")

    ray.after = start_another
    assert sweep() == 0


def test_resume_of_another_configuration_trains_nothing(ray: Ray, sweep: Callable[..., int]) -> None:
    sweep()
    ray.trained = []
    with pytest.raises(ConfigError, match="these differ"):
        sweep("--resume", "--learning-rate", "0.5")
    assert ray.trained == []


@pytest.mark.ci
def test_resume_may_change_performance(ray: Ray, sweep: Callable[..., int]) -> None:
    sweep()
    assert sweep("--resume", "--max-views-per-microbatch", "64", "--max-concurrent-trials", "1") == 0


def make_ledger(path: Path, quota: int) -> tuple[str, ...]:
    """The options of a ledger whose cap holds `quota` steps of this sweep."""
    step_class = StepClass(64 / 1445, 1.0)
    cap = Cap(epsilon=500.0, delta=9e-5, quotas=((step_class, quota),))
    Ledger.create(str(path)).register("scans", cap, num_records_public=1445)
    return ("--no-non-private", "--ledger", str(path), "--dataset-id", "scans")


def test_sweep_that_the_ledger_refuses_starts_nothing(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    given = make_ledger(tmp_path / "ledger.db", 19)
    with pytest.raises(BudgetExceeded, match="nothing was started"):
        sweep(*given)
    assert ray.trained == []
    assert not (tmp_path / "sweeps").exists()


def test_sweep_is_charged_before_its_first_trial_and_settled_after(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    seen = []
    given = make_ledger(tmp_path / "ledger.db", 20)
    ledger = Ledger.open(str(tmp_path / "ledger.db"))
    ray.before = lambda: seen.append(ledger.read_charges("scans", with_pld=False))
    assert sweep(*given) == 0
    assert [(sum(spent.num_steps.values()), spent.num_open) for spent in seen] == [(20, 2)]
    assert ledger.read_charges("scans", with_pld=False).num_settled == 2


def test_sweep_with_a_ledger_does_not_go_on_without(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    """Where the ledger is not named again, it is the one that the plan keeps."""
    given = make_ledger(tmp_path / "ledger.db", 20)
    sweep(*given)
    assert sweep("--no-non-private", "--resume") == 0
    assert Ledger.open(str(tmp_path / "ledger.db")).read_charges("scans", with_pld=False).num_settled == 2
    with pytest.raises(ConfigError, match="'scans' needs a ledger: pass --ledger"):
        sweep("--no-non-private", "--resume", "--no-ledger")
    (tmp_path / "ledger.db").rename(tmp_path / "away.db")
    with pytest.raises(LedgerError, match="there is no such file"):
        sweep("--no-non-private", "--resume")


def test_resume_of_a_trial_with_another_noise_is_refused(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    """The plan is gone, and the results of a weaker noise would be stated at the stronger one's ε."""
    sweep("--no-non-private")
    (tmp_path / "sweeps/one/plan.json").unlink()
    with pytest.raises(StorageError, match="move it away, or choose another --name"):
        sweep("--no-non-private", "--noise-multiplier", "2")


@pytest.mark.ci
def test_statement_of_a_sweep_names_the_ledgers_head(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(*make_ledger(tmp_path / "ledger.db", 20))
    path = tmp_path / "sweeps/one/privacy_statement.json"
    assert read_head(path) == Ledger.open(str(tmp_path / "ledger.db")).head()
    assert "privacy: Public data: nothing to protect. " in capsys.readouterr().out


def test_statement_is_an_artifact_of_the_sweep(ray: Ray, sweep: Callable[..., int], tmp_path: Path) -> None:
    sweep()
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    (parent,) = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    names = {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    assert {"privacy_statement.json", "privacy_statement.md"} <= names


def test_answer_is_printed_kept_on_disk_and_first_in_the_parent_run(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("--group-sizes", "2", "4")
    kept = json.loads((tmp_path / "sweeps" / "one" / "answer.json").read_text())
    printed = capsys.readouterr().out
    beaten, headline = kept["lines"][:2]
    assert f"answer: {beaten}\n  {headline}" in printed
    assert beaten.startswith("Raw pixels (")
    assert headline.startswith("Which group size? Take S = 2: the highest, 50.00 % k-NN accuracy")
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    (parent,) = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    note = parent.data.tags[NOTE_TAG].split("\n\n")[:3]
    assert note[0] == escaped(f"{beaten} {headline}")
    assert "points over S = 4 (within noise), the second highest" in note[1]
    assert "ε of one training" in note[2]
    assert "of the whole sweep" in note[2]
    assert parent.data.metrics["best_knn_accuracy"] == 0.5
    assert parent.data.metrics["tuned_epsilon"] == kept["privacy"]["tuned_epsilon"]
    assert {entry.path for entry in client.list_artifacts(parent.info.run_id)} >= {"answer.json"}
    resumed = sweep("--resume", "--group-sizes", "2", "4")
    note = client.get_run(parent.info.run_id).data.tags[NOTE_TAG]
    assert (resumed, note) == (0, parent.data.tags[NOTE_TAG])  # once, however often


def test_answer_from_disk_is_that_of_the_trials_in_mlflow(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    sweep()
    found = answer_of(load_trials(f"sqlite:///{tmp_path}/mlflow.db", "one"), "group-size")
    assert found is not None
    kept = json.loads((tmp_path / "sweeps" / "one" / "answer.json").read_text())
    assert kept["choices"] == json.loads(json.dumps(found.as_dict()))["choices"]


def test_answer_of_a_server_that_is_gone_is_kept_all_the_same(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_after(monkeypatch, "log_trial", 1)
    assert sweep() == 1
    assert (tmp_path / "sweeps" / "one" / "answer.json").is_file()


@pytest.mark.parametrize("name", ["answer.json", "report.html", "privacy_statement.json", "group_size.png"])
def test_what_states_the_cost_is_withdrawn_before_more_is_drawn(
    name: str, ray: Ray, sweep: Callable[..., int], tmp_path: Path
) -> None:
    ray.failing = {"S4-Na1-private-r1": "because"}
    path = tmp_path / "sweeps" / "one" / name
    sweep()
    if name.endswith(".png"):
        path.touch()  # figures are not drawn here
    assert path.is_file()
    found = []
    ray.before = lambda: found.append(path.exists())
    sweep("--resume")
    assert found == [False]


def test_report_is_written_told_and_an_artifact_of_the_sweep(
    real_reports: None,
    ray: Ray,
    sweep: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cap = Cap(epsilon=500.0, delta=9e-5)
    Ledger.create(str(tmp_path / "ledger.db")).register("scans", cap, num_records_public=1445)
    sweep("--no-non-private", "--ledger", str(tmp_path / "ledger.db"), "--dataset-id", "scans")
    path = tmp_path / "sweeps" / "one" / "report.html"
    assert f"report: {path}\n" in capsys.readouterr().out
    page = path.read_text(encoding="utf-8")
    kept = json.loads((path.parent / "answer.json").read_text())
    assert html.escape(kept["lines"][0]) in page
    assert html.escape((path.parent / "config.yaml").read_text()) in page
    left = [float(text) for text in re.findall(r"ε left \w+ the sweep</dt><dd>([\d.]+)", page)]
    assert left[0] > left[1] > 0
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    (parent,) = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    assert {entry.path for entry in client.list_artifacts(parent.info.run_id)} >= {
        "report.html",
        "config.yaml",
    }


def test_answer_counts_the_trainings_that_the_ledger_still_holds(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = make_ledger(tmp_path / "ledger.db", 65)
    assert sweep(*given) == 0
    assert "The ledger allows 4 more trainings like the costliest of these." in capsys.readouterr().out
    with pytest.raises(BudgetExceeded):
        sweep("--repeats", "5", "--name", "more", *given)
    assert sweep("--repeats", "4", "--name", "more", *given) == 0
    assert "The ledger allows 0 more trainings" in capsys.readouterr().out


def test_description_of_the_parent_run_has_the_answers_warning(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(RESULT, "metrics", RESULT["metrics"] | {"untrained_knn_accuracy": 0.5})
    sweep("--group-sizes", "2", "4")
    lines = json.loads((tmp_path / "sweeps" / "one" / "answer.json").read_text())["lines"]
    (parent,) = tracked_runs(connect(f"sqlite:///{tmp_path}/mlflow.db"), "tags.`dpgcl.role` = 'sweep'")
    first = parent.data.tags[NOTE_TAG].partition("\n\n---\n\n")[0].split("\n\n")
    (warning,) = (escaped(line) for line in lines if line.startswith("Warning"))
    assert first[:2] == [escaped(" ".join(lines[:2])), warning]


def test_link_opens_the_trainings_of_the_sweep_by_score_in_the_mode_for_training_models(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep()
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("runs: "))
    page, _, query = line.rpartition(" ")[2].partition("?")
    asked = parse_qs(query)
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment(page.split("/experiments/")[1].partition("/")[0])
    assert asked["workflowType"] == ["machine_learning"]
    order = f"{asked['orderByKey'][0]} {'ASC' if asked['orderByAsc'] == ['true'] else 'DESC'}"
    assert order == "metrics.`knn_accuracy` DESC"
    found = client.search_runs([experiment.experiment_id], asked["searchFilter"][0], order_by=[order])
    assert [run.data.tags["dpgcl.role"] for run in found] == ["trial"] * 4
    assert {run.data.params["Axis: group_size"] for run in found} == {"4"}
    assert experiment.name == "group-size on digits"
    assert "Which group size?" in experiment.tags["mlflow.note.content"]


def test_printed_command_opens_the_database_in_a_folder_of_any_name(
    ray: Ray, sweep: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep("--storage", str(tmp_path / "it's a b#c?d 50%20"))
    (line,) = (each for each in capsys.readouterr().out.splitlines() if each.startswith("runs: "))
    stand_in = tmp_path / "bin" / "mlflow"  # tells what the shell made of the line
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stand_in.chmod(0o755)
    path = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    pasted = subprocess.run(
        ["sh", "-c", line.removeprefix("runs: ")], env=path, capture_output=True, text=True, check=True
    )
    *command, uri = pasted.stdout.splitlines()
    assert (command, pasted.stderr) == (["ui", "--backend-store-uri"], "")
    assert len(tracked_runs(MlflowClient(uri), "tags.`dpgcl.role` = 'trial'")) == 4


def test_trial_of_public_data_has_the_times_of_its_training(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    took = RESULT["metrics"] | {"train_seconds": 3.0, "evaluation_seconds": 1.5, "num_steps_done": 10}
    monkeypatch.setitem(RESULT, "metrics", took)
    sweep()
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    for run in tracked_runs(client, "tags.`dpgcl.role` = 'trial'"):
        assert run.info.end_time - run.info.start_time == 4500
        assert "num_steps_done" not in run.data.metrics  # it is the param num_steps
        assert "warm_start" not in run.data.params  # there is none
        assert run.data.tags["mlflow.source.name"]
    (parent,) = tracked_runs(client, "tags.`dpgcl.role` = 'sweep'")
    assert parent.data.params["dataset"] == "digits"


def test_ray_that_does_not_start_leaves_no_sweep(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def starved(*_: object) -> Any:
        raise ClusterError("Ray did not start")

    monkeypatch.setattr(driver, "ray_session", starved)
    with pytest.raises(ClusterError):
        sweep()
    assert not (tmp_path / "sweeps").exists()


def test_cluster_too_small_leaves_no_sweep(
    ray: Ray, sweep: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sweeps.service.cluster.capacity import max_concurrent_trials

    def too_small(service: ServiceOptions, performance: PerformanceConfig, *places: object) -> Any:
        two = dataclasses.replace(performance, num_workers=2)
        return nullcontext(max_concurrent_trials(service, two, [{"CPU": 1.0}]))

    monkeypatch.setattr(driver, "ray_session", too_small)
    with pytest.raises(ValueError, match="the cluster can hold only 1 "):
        sweep()
    assert not (tmp_path / "sweeps").exists()
    with pytest.raises(DashboardError):
        sent(tmp_path)
