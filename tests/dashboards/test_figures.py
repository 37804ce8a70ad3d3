"""The files of a figure, from MLflow alone."""

from __future__ import annotations

import pytest

from dashboards.figures import draw, write_all

pytestmark = pytest.mark.ci

ENDINGS = ("png", "svg", "pdf", "csv", "md", "tex")


def test_files_are_named_after_the_question(make_sweep, tmp_path):
    batches = make_sweep("expected_batch_size", (16.0, 64.0))
    paths = write_all(batches, tmp_path, "batch-size")
    assert [p.name for p in paths] == [f"batch_size.{end}" for end in ENDINGS]


def test_draw_writes_figure_and_tables_from_mlflow_alone(tracking, tmp_path):
    paths = draw("group-size", tracking[0], "new", tmp_path)
    assert [path.name for path in paths] == [f"group_size.{end}" for end in ENDINGS]
    assert all(path.stat().st_size for path in paths)


def test_files_of_hostile_names_hold_no_markup_and_no_formula(make_trials, tmp_path):
    hostile = "=HYPERLINK(1)<img src=x onerror=alert(1)>"
    trials = make_trials(dataset=hostile, run_name="=1+1")
    paths = write_all(trials, tmp_path, "group-size")
    for path in paths:
        if path.suffix in (".md", ".svg"):
            assert "<img src=x" not in path.read_text("utf-8"), path.name


def test_text_that_a_spreadsheet_would_run_is_written_as_text(make_sweep, tmp_path):
    trials = make_sweep("network_name", ("=cmd|'/C calc'!A0", "cnn"))
    *_, path, _, _ = write_all(trials, tmp_path, "architectures")
    assert ",=cmd" not in path.read_text("utf-8")
    assert not path.read_text("utf-8").startswith("=")
    assert "\n=cmd" not in path.read_text("utf-8")
    assert "'=cmd" in path.read_text("utf-8")
