"""The committed answers: made of their tables, by the rule that sweeps are answered by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.answers import RESULTS, Summary, fill_page, read_answer, summaries, write
from dashboards.compose.answer import Answer
from dashboards.compose.repeats import mean_and_error

TABLES = {str(each.path.relative_to(RESULTS).with_suffix("")): each for each in summaries()}


@pytest.mark.parametrize("name", TABLES)
def test_committed_answer_is_that_of_its_table(name: str) -> None:
    made = Answer.read(json.loads(json.dumps(TABLES[name].answer().as_dict())))
    assert list(leaves_of(read_answer(name).as_dict())) == [
        (place, pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
        for place, value in leaves_of(made.as_dict())
    ]


def leaves_of(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dictionaries and lists, each with its place."""
    if isinstance(value, dict | list | tuple):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in named:
            yield from leaves_of(each, f"{place}/{name}")
    else:
        yield place, value


@pytest.mark.parametrize("name", TABLES)
def test_answer_rests_on_repeats_alone_and_has_every_proven_row(name: str) -> None:
    answer, rows = read_answer(name), TABLES[name].settings
    assert {choice.sources for choice in answer.choices} == {"repeats"}
    proven = rows[(rows["guarantee"] == "proven") & rows[f"{answer.score}_mean"].notna()]
    assert sorted(each.mean for each in answer.settings) == pytest.approx(
        sorted(proven[f"{answer.score}_mean"])
    )


def test_trials_of_a_table_have_its_means_errors_and_gains() -> None:
    summary = TABLES["regime_privacy_budget"]
    score, first = "image_to_text_recall_at_10", summary.settings.iloc[0]
    same = {"target_epsilon": first["target_epsilon"], "sampled": first["sampled"]}
    for gains in (False, True):
        trials = summary.trials(gains=gains)
        cell = trials[(trials[list(same)] == pd.Series(same)).all(axis=1)]
        mean, error, n = mean_and_error(cell, score)
        assert (mean, error, n) == pytest.approx(
            (first[f"{score}_mean"], first[f"{score}_standard_error"], 3), rel=1e-12
        )
        gain = mean_and_error(cell.assign(gain=cell[score] - cell[f"public_start_{score}"]), "gain")
        assert gain[0] == pytest.approx(first[f"{score}_private_gain_mean"])
        assert gains == math.isclose(gain[1], first[f"{score}_private_gain_standard_error"])


def test_variance_is_pooled_over_the_settings() -> None:
    """By hand: √(2 · mean of n SE² / n), with n the same everywhere."""
    answer, rows = read_answer("regime_privacy_budget"), TABLES["regime_privacy_budget"].settings
    proven = rows[rows["guarantee"] == "proven"]
    errors = proven[f"{answer.score}_standard_error"], proven[f"{answer.score}_private_gain_standard_error"]
    pooled, gains = (math.sqrt((each**2).mean()) for each in errors)
    first = answer.settings[0]
    assert first.over_best is not None
    assert first.over_start is not None
    assert first.over_best.standard_error == pytest.approx(math.sqrt(2) * pooled)
    assert first.over_start.standard_error == pytest.approx(gains)


def test_start_is_that_of_the_setting_and_of_its_network() -> None:
    ablation = {each.name: each for each in read_answer("ablation_fashion_mnist").settings}
    table = TABLES["ablation_fashion_mnist"].rows.set_index("option")["knn_accuracy_mean"]
    for name, start in (
        ("plain", "untrained network"),
        ("warm start", "public start alone, warm start and all"),
    ):
        gain = ablation[name].over_start
        assert gain is not None
        assert ablation[name].mean - gain.mean == pytest.approx(table[start])
    methods = {each.name: each for each in read_answer("methods_everything_fashion_mnist").settings}
    rows = TABLES["methods_everything_fashion_mnist"].rows.set_index("method")["knn_accuracy_mean"]
    for name, network in (("DP-GCL", "clip-tiny"), ("Captioner", "cap-toy")):
        gain = methods[name].over_start
        assert gain is not None
        assert methods[name].mean - gain.mean == pytest.approx(rows[f"public start alone, {network}"])


def test_command_writes_answer_page_and_figure_of_one_table(tmp_path: Path) -> None:
    name = "mae_fashion_mnist"
    for ending in (".csv", ".md"):
        (tmp_path / (name + ending)).write_bytes((RESULTS / (name + ending)).read_bytes())
    (tmp_path / f"{name}.png").touch()
    (tmp_path / "README.md").write_text(f"# A\n\n<!-- answer: {name} -->\n<!-- end -->\n\nb\n")
    assert write(folder=tmp_path) == 0
    for ending in (".answer.json", ".md"):
        assert (tmp_path / (name + ending)).read_text() == (RESULTS / (name + ending)).read_text()
    assert (tmp_path / f"{name}.png").stat().st_size > 100_000
    page = (tmp_path / "README.md").read_text()
    assert "| ε = 8 | 70.77 | +2.10 ± 0.30, higher | take |" in page
    assert page.endswith("<!-- end -->\n\nb\n")


def test_title_with_marks_of_markdown_is_escaped_once(tmp_path: Path) -> None:
    page = (RESULTS / "mae_fashion_mnist.md").read_text()
    (tmp_path / "mae_fashion_mnist.md").write_text(
        page.replace("# Fashion-MNIST", r"# Sets \{1\}, A &amp; B", 1)
    )
    (tmp_path / "mae_fashion_mnist.csv").write_bytes((RESULTS / "mae_fashion_mnist.csv").read_bytes())
    (tmp_path / "README.md").write_text("")
    assert write(folder=tmp_path) == 0
    written = (tmp_path / "mae_fashion_mnist.md").read_text()
    assert written == page.replace("# Fashion-MNIST", r"# Sets \{1\}, A &amp; B", 1)


def test_table_of_another_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Summary, "answer", lambda _: pytest.fail("answered"))
    (tmp_path / "tan_x.csv").write_text("tan_factor,guarantee\n")
    (tmp_path / "README.md").write_text("")
    assert write(only="tan_y", folder=tmp_path) == 0


def test_page_of_results_shows_the_committed_answers() -> None:
    page = (RESULTS / "README.md").read_text()
    assert fill_page(page) == page
    assert page.count("<!-- answer: ") > 10
