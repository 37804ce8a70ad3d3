"""The file of a training's outcomes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.errors import StorageError
from trainers.files.outcome_file import OUTCOMES_FILE, Outcomes, read_outcomes, write_outcomes


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    scores = {"knn_accuracy": np.float32([0, 1, 1]), "transfer_knn_accuracy/digits": np.float32([1, 0])}
    write_outcomes(
        tmp_path / "trial", Outcomes(record_ids=np.array([7, 2**64 - 1, 0], dtype=np.uint64), scores=scores)
    )
    outcomes = read_outcomes(tmp_path / "trial")
    assert outcomes is not None
    assert (outcomes.record_ids.dtype, outcomes.record_ids.tolist()) == (np.uint64, [7, 2**64 - 1, 0])
    assert {name: each.tolist() for name, each in outcomes.scores.items()} == {
        "knn_accuracy": [0, 1, 1],
        "transfer_knn_accuracy/digits": [1, 0],
    }
    assert {each.dtype for each in outcomes.scores.values()} == {np.dtype(np.float32)}


def test_training_without_a_file_has_no_outcomes(tmp_path: Path) -> None:
    assert read_outcomes(tmp_path) is None


def test_damaged_file_is_named(tmp_path: Path) -> None:
    write_outcomes(tmp_path, Outcomes(record_ids=np.zeros(3, dtype=np.uint64), scores={}))
    path = tmp_path / OUTCOMES_FILE
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StorageError, match=str(path)):
        read_outcomes(tmp_path)
