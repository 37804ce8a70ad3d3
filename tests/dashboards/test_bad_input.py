"""The commands given what they cannot draw: an error of one line, and nothing that may not be seen."""

from __future__ import annotations

import pytest

from dashboards.__main__ import main
from dpgcl_core.errors import DpgclError
from tests.dashboards.conftest import log_trials
from tests.dashboards.report.conftest import HOSTILE
from tests.trainers.databases import open_tracker

SECRET = 0.918273
"""A number that the release policy forbids."""

COMPARE = ("compare", "whole")


@pytest.fixture(scope="module")
def uri(tmp_path_factory, make_trials):
    """Sweeps of every bad kind, each of its name."""
    folder = tmp_path_factory.mktemp("mlflow")
    tracker, trials = open_tracker(folder), make_trials(sizes=(2, 8), num_repeats=2)
    trials["scored_on"] = "fashion_mnist"
    private = trials.assign(data_is="private", train_loss=SECRET, snr_first_step=SECRET)
    unproven = private.assign(guarantee_label="none")
    sweeps = {
        "whole": trials,
        "other": trials.assign(knn_accuracy=0.5),
        "empty": trials[:0],
        "unfinished": trials[:0],
        "old": trials.drop(columns=["group_size", "target_epsilon"]),
        "unscored": trials.drop(columns=[name for name in trials if "accuracy" in name]),
        "private": private,
        "private too": private.assign(knn_accuracy=0.5),
        "unproven": unproven,
        HOSTILE.replace('"', ""): trials,
    }
    for name, rows in sweeps.items():
        data_is = "private" if len(rows) and rows["data_is"].iloc[0] == "private" else "public"
        params = {"question": "group-size", "dataset": "fashion_mnist", "num_trials": 8}
        parent = tracker.start_sweep(name, params, {"data_is": data_is, "release_mode": "open"})
        log_trials(tracker, parent, rows)
        if name == "unfinished":
            half_written(tracker, parent)
    return f"sqlite:///{folder / 'mlflow.db'}"


def half_written(tracker, parent):
    """Leave runs of the sweep that failed, and that nobody ended."""
    for status in ("FAILED", "RUNNING"):
        tags = {"mlflow.parentRunId": parent}
        run = tracker.client.create_run(tracker.experiment_id, tags=tags, run_name="half")
        tracker.client.log_metric(run.info.run_id, "knn_accuracy", SECRET)
        if status == "FAILED":
            tracker.client.set_terminated(run.info.run_id, status)


def refused(capsys, *words):
    """Run a command that must refuse, and return what it says."""
    with pytest.raises(DpgclError) as caught:
        main([str(word) for word in words])
    said = str(caught.value)
    assert capsys.readouterr().out == ""
    assert "\n" not in said
    assert str(SECRET) not in said
    return said


CANNOT_BE_DRAWN = [
    ("empty", "no finished trial yet (0 begun)"),
    ("unfinished", "no finished trial yet (2 begun)"),
    ("old", ""),
    ("unscored", "score"),
    ("unproven", "no trial"),
    ("no such sweep", "unknown sweep"),
]
FIGURE = ("figure", "--question", "group-size", "--sweep")
COMMANDS = [FIGURE, ("pareto",), COMPARE]


@pytest.mark.parametrize(
    ("command", "sweep", "reason"),
    [
        pytest.param(command, *case, id=f"{command[0]}-{case[0]}")
        for command in COMMANDS
        for case in CANNOT_BE_DRAWN
        if (command, case[0]) != (FIGURE, "unscored")  # which shows its SNR and its settings
    ],
)
def test_sweeps_that_cannot_be_drawn_are_refused_in_one_line(uri, command, sweep, reason, tmp_path, capsys):
    folder = tmp_path / "figures"
    said = refused(capsys, *command, sweep, "--tracking-uri", uri, "--output", folder)
    assert not folder.exists()
    assert reason in said or command[0] == "pareto"
    if command == COMPARE and sweep != "no such sweep":
        assert f"'{sweep}'" in said, "which of them it is"


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [(*FIGURE, "private"), ("pareto", "private"), ("compare", "private", "private too")],
    ids=lambda words: words[0],
)
def test_forbidden_numbers_are_in_no_file_and_a_note_says_so(uri, words, tmp_path, capsys):
    assert main([*words, "--tracking-uri", uri, "--output", str(tmp_path)]) == 0, capsys.readouterr().err
    written = {path: path.read_bytes().decode("utf-8", "replace") for path in tmp_path.iterdir()}
    assert len(written) == 6
    assert [path.name for path, text in written.items() if str(SECRET) in text or "91.83" in text] == []
    assert any("private" in text for path, text in written.items() if path.suffix == ".md")


@pytest.mark.ci
def test_hostile_sweeps_are_compared_as_text(uri, tmp_path, capsys):
    words = ["compare", "whole", HOSTILE.replace('"', ""), "--tracking-uri", uri, "--output", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err
    for path in tmp_path.iterdir():
        text = path.read_bytes().decode("utf-8", "replace")
        if path.suffix == ".svg":
            assert "<img src=x" not in text
        if path.suffix == ".md":
            assert "<img" not in text
            assert "[c](javascript" not in text
