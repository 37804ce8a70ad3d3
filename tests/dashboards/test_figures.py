"""The files of a figure, from MLflow alone."""

from __future__ import annotations

from dashboards.figures import draw, write_figure, write_table

ENDINGS = ("png", "svg", "pdf", "html", "csv", "md")


def test_files_are_named_after_the_question(make_sweep, tmp_path):
    batches = make_sweep("expected_batch_size", (16.0, 64.0))
    paths = [*write_figure(batches, tmp_path, "batch-size"), *write_table(batches, tmp_path, "batch-size")]
    assert [p.name for p in paths] == [f"batch_size.{end}" for end in ENDINGS]


def test_draw_writes_figure_and_tables_from_mlflow_alone(tracking, tmp_path):
    paths = draw("group-size", tracking[0], "new", tmp_path)
    assert [path.name for path in paths] == [f"group_size.{end}" for end in ENDINGS]
    assert all(path.stat().st_size for path in paths)
