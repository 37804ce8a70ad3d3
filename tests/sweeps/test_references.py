"""Raw pixels and HOG in a sweep: scored once, kept with its parent run, and never of private records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.query.trial_frames import load_trials
from dpgcl_core.release.metrics import is_reference
from sweeps import group_size
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.running import conclude
from tests.sweeps import support
from trainers.tracking.runs import Tracker

OF_IMAGES = {
    f"{of}_{score}" for of in ("raw_pixels", "hog") for score in ("knn_accuracy", "linear_probe_accuracy")
}
QUICK = (
    "--dataset",
    "digits",
    "--group-sizes",
    "4",
    "--no-non-private",
    "--repeats",
    "1",
    "--num-steps",
    "1",
)
LESS = (
    "--expected-batch-size",
    "64",
    "--max-index-records",
    "60",
    "--max-query-records",
    "40",
    "--name",
    "one",
)
Run = Callable[..., dict[str, float]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a sweep of one training in this process, and returns the metrics of its parent run."""
    support.train_here(monkeypatch)

    def ran(*more: str, figure: Callable[..., list[Path]] = lambda *_: []) -> dict[str, float]:
        chosen: SweepOptions = support.options(*QUICK, *LESS, "--storage", str(tmp_path), *more)
        assert isinstance(chosen, group_size.GroupSizeOptions)
        assert support.run_sweep("group-size", chosen, group_size.points(chosen), figure) == 0
        tracker = Tracker.open(f"sqlite:///{tmp_path}/mlflow.db", tmp_path, "group-size on digits")
        parent = tracker.find_sweep("one")
        assert parent is not None
        return {name: value for name, value in tracker.metrics_of(parent).items() if is_reference(name)}

    return ran


@pytest.mark.ci
def test_references_are_scored_once_and_kept_with_the_parent_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run()
    assert set(first) >= OF_IMAGES
    trials = load_trials(f"sqlite:///{tmp_path}/mlflow.db", "one")
    assert dict(trials.iloc[0][list(first)]) == pytest.approx(first)
    monkeypatch.setattr(conclude, "reference_scores", lambda *_, **__: pytest.fail("scored again"))
    assert run("--resume") == first


@pytest.mark.ci
def test_references_are_there_before_the_figure_is_drawn(run: Run, tmp_path: Path) -> None:
    drawn = []

    def figure(uri: str, sweep: str, folder: Path) -> list[Path]:
        drawn.append(set(load_trials(uri, sweep)) >= OF_IMAGES)
        return []

    run(figure=figure)
    assert drawn == [True]


@pytest.mark.ci
def test_references_are_left_out_where_asked(run: Run) -> None:
    assert run("--no-references") == {}


@pytest.mark.ci
def test_references_of_private_records_are_never_scored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainers.evaluation.untrained_scores._describe_in_batches", lambda *_: pytest.fail("seen")
    )
    assert run("--data-is", "private", "--no-ledger", "--num-records-public", "1797") == {}
