"""Published numbers stand beside the rows that are there, and every row that is not there is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import papers
from benchmarks.gpu.__main__ import SLICES, Options
from benchmarks.gpu.trainings import Candidate, candidates
from benchmarks.harness import RESULTS
from dpgcl_core.errors import ConfigError

ROWS = sorted(RESULTS.glob("gpu*"))
TRAINED = Candidate(method="dp_clip", epsilon=10.0)


def _metrics(knn: float, untrained: float) -> dict[str, float]:
    return {
        "knn_accuracy": knn,
        "untrained_knn_accuracy": untrained,
        "linear_probe_accuracy": 0.8,
        "untrained_linear_probe_accuracy": 0.75,
    }


def _write(folder: Path, *rows: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "trainings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _line_of(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return line.strip("| ").split(" | ")[1:]


def test_committed_page_is_that_of_the_committed_rows() -> None:
    page = (RESULTS / "papers.md").read_text()
    assert papers.fill_page(page, papers.read_metrics(ROWS)) == page
    assert all(f"<!-- table: {name} -->" in page for name in papers.TABLES)


def test_gain_is_over_the_untrained_network_of_each_seed() -> None:
    """By hand: gains of 2 and 6 points, whose mean is 4 ± 2, while the scores themselves spread less."""
    metrics = {str(TRAINED): [_metrics(0.82, 0.80), _metrics(0.83, 0.77)]}
    line = _line_of(papers.fashion_mnist_table(metrics), str(TRAINED))
    assert line == ["81.1, 79.8", "82.5 ± 0.5, 80.0 ± 0.0", "+3.7, +3.8", "+4.0 ± 2.0, +5.0 ± 0.0", "2 of 3"]


def test_row_without_a_training_is_missing_and_its_command_makes_it() -> None:
    metrics = {str(TRAINED): [_metrics(0.82, 0.8)] * 3}
    table, commands = papers.fashion_mnist_table(metrics), papers.commands_of("dp-gcl-1", metrics)
    assert table.count(papers.MISSING) == len(commands) == len(papers.plan_of("dp-gcl-1")) - 1
    assert not [command for command in commands if str(TRAINED) in command]
    for name in ("dp-gcl-1", "cifar10", "dp-gcl-curves"):
        for candidate, command in zip(papers.plan_of(name), papers.commands_of(name, {}), strict=True):
            (row,) = [words for words in command.split('"') if words.startswith("trainings: ")]
            made = SLICES["trainings"](Options(device="cpu", threads=1, dataset=candidate.dataset))
            assert len([each for each, _ in made if row in f"trainings: {each}"]) == 3
            assert f"--dataset {candidate.dataset} " in command


def test_tables_and_curves_have_every_training() -> None:
    """A row that a GPU makes is shown, so none is trained in vain."""
    shown = {each for name in papers.TABLES for each in papers.plan_of(name)}
    assert shown == {each for dataset in papers.PUBLISHED for each in candidates(dataset)}


def test_published_number_stands_in_its_own_setting_alone() -> None:
    assert "82.1, 81.5" in _line_of(papers.fashion_mnist_table({}), "dp_gcl, records, ε = 1, random weights")
    started = _line_of(papers.fashion_mnist_table({}), "dp_gcl, records, ε = 1, public start")
    assert started == ["–", papers.MISSING, "–", "–", "0 of 3"]


def test_training_in_two_folders_counts_once_and_a_failed_one_not_at_all(tmp_path: Path) -> None:
    row = {"name": "a", "found": {"candidate": "one", "metrics": {"knn_accuracy": 0.5}}}
    _write(tmp_path / "first", row, {"name": "b", "failed": "OutOfMemoryError"})
    _write(tmp_path / "second", row, {**row, "name": "c"})
    metrics = papers.read_metrics([tmp_path / "first", tmp_path / "second"])
    assert {name: len(rows) for name, rows in metrics.items()} == {"one": 2}


@pytest.mark.ci
def test_tiny_trainings_fill_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way, for three rows of a table: trained, kept as rows, read and shown."""
    plan = papers.plan_of("cifar10")
    few = [each for each in plan if each.method in ("base", "logit_dp") or each.sampling == "groups"][:3]
    monkeypatch.setattr(papers, "plan_of", lambda _: few)
    monkeypatch.setattr(
        sys, "argv", ["papers.py", "--table", "cifar10", "--tiny", "--rows", str(tmp_path / "rows")]
    )
    assert papers.main() == 0
    table = capsys.readouterr().out
    assert "no results" in table
    for candidate in plan:
        assert _line_of(table, str(candidate))[-1] == ("1 of 3" if candidate in few else "0 of 3")
    assert table.count(papers.MISSING) == len(plan) - len(few)


def test_tiny_rows_cannot_be_mixed_with_committed_ones() -> None:
    with pytest.raises(ConfigError, match="--rows"):
        papers.PaperOptions(table="cifar10", tiny=True)
