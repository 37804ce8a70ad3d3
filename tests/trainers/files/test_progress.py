"""The small file by which a training tells its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.files.progress import Progress, ProgressWriter, read_progress


def test_progress_is_written_once_a_second_at_most_and_at_the_end(tmp_path: Path) -> None:
    path, now = tmp_path / "progress.json", [0.0]
    writer, seen = ProgressWriter(path, 9, lambda: now[0]), []
    for step in range(10):
        now[0] = step * 0.4
        writer(step)
        found = read_progress(path)
        assert found is not None
        seen.append(found.step)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_progress_holds_two_public_numbers_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    ProgressWriter(path, 9)(3)
    assert path.read_text() == '{"step": 3, "num_steps": 9}'
    assert list(tmp_path.iterdir()) == [path]


def test_progress_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    ProgressWriter(tmp_path / "gone" / "progress.json", 9)(3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 3}', '{"step": "<b>", "num_steps": 1}'])
def test_damaged_progress_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "progress.json"
    path.write_text(text)
    assert read_progress(path) is None
    assert read_progress(tmp_path / "missing.json") is None
    path.write_text('{"step": 3, "num_steps": 9, "more": 1}')
    assert read_progress(path) == Progress(step=3, num_steps=9)
