"""The command line: lists, draws, and refuses in one line."""

from __future__ import annotations

import pytest

from dashboards.__main__ import main
from dashboards.dashboard_error import DashboardError
from dpgcl_core.errors import ConfigError, TrackingError

pytestmark = pytest.mark.ci


def test_command_draws_from_mlflow_alone(tracking, tmp_path, capsys):
    assert (
        main(["figure", "--question", "group-size", "--tracking-uri", tracking[0], "--output", str(tmp_path)])
        == 0
    )
    names = {f"group_size.{ending}" for ending in ("png", "svg", "pdf", "csv", "md", "tex")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "group_size.png" in capsys.readouterr().out


def test_command_takes_the_address_from_the_environment(tracking, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking[0])
    assert main(["list"]) == 0
    assert "new" in capsys.readouterr().out


def test_command_falls_back_to_the_storage_folder(tracking, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("DPGCL_STORAGE", tracking[0].removeprefix("sqlite:///").removesuffix("/mlflow.db"))
    assert main(["list"]) == 0
    assert "old" in capsys.readouterr().out


def test_command_error_is_one_line(tmp_path):
    with pytest.raises(TrackingError, match=r"^no MLflow database.*$"):
        main(["list", "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"])


@pytest.mark.parametrize(
    ("command", "instead"),
    [("group-size", "figure --question"), ("importance", "optuna-dashboard"), ("retrieval", "embed_images")],
)
def test_command_of_an_earlier_version_is_refused_with_what_to_use(command, instead):
    with pytest.raises(ConfigError, match=f"^{command} .*removed in 0.2.0: use .*{instead}"):
        main([command, "--sweep", "x"])


@pytest.mark.ci
def test_command_draws_a_question_by_name(tracking, tmp_path):
    arguments = ["--question", "privacy-budget", "--tracking-uri", tracking[0], "--output", str(tmp_path)]
    with pytest.raises(DashboardError, match="group_size"):  # the sweep has several
        main(["figure", *arguments])
    arguments[1] = "group-size"
    assert main(["figure", *arguments]) == 0
    assert (tmp_path / "group_size.png").exists()
