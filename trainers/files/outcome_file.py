"""The outcomes of a finished training's scores, record by record: a file next to its checkpoint.

Such files exist only for public evaluation records (`trainers.tasks.task_scores.public_outcomes`). They stay
in the sweep's folder: neither MLflow nor the release of a sealed sweep contains them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpgcl_core.durable_files import make_folder, replacing
from dpgcl_core.errors import StorageError
from dpgcl_core.sampling.record_ids import Ids

OUTCOMES_FILE = "outcomes.npz"
_RECORD_IDS = "record_ids"


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Each scored record's contribution to the final scores of one training.

    Attributes:
      record_ids: uint64 `[num_records]`, ids of the scored records; the same ones in the same order for all
        trainings on the same data with the same number of scored records.
      scores: for each metric name, float32 `[num_records]` whose mean is the score. A score on a probe data
        set, such as `transfer_knn_accuracy/digits`, has one entry for each record of that set instead.
    """

    record_ids: Ids
    scores: Mapping[str, NDArray[np.float32]]


def write_outcomes(folder: Path, outcomes: Outcomes) -> None:
    """Write a training's outcomes into its checkpoint's folder, durably and atomically."""
    arrays: dict[str, Any] = {_RECORD_IDS: outcomes.record_ids, **outcomes.scores}
    make_folder(folder)
    with replacing(folder / OUTCOMES_FILE) as file:
        np.savez_compressed(file, **arrays)


def read_outcomes(folder: Path) -> Outcomes | None:
    """Return the outcomes in a checkpoint's folder; None if there are none.

    Raises:
      StorageError: the file is damaged.
    """
    path = folder / OUTCOMES_FILE
    if not path.is_file():
        return None
    try:
        with np.load(path) as file:
            scores = {name: file[name] for name in file.files}
        return Outcomes(record_ids=scores.pop(_RECORD_IDS), scores=scores)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise StorageError(
            f"{path} must hold the outcomes of a training's scores, but is damaged. Delete it to continue."
        ) from error
