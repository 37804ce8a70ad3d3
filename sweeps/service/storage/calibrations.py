"""Noise multipliers of earlier plans, verified again when they are used."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.durable_files import storage_errors
from sweeps.service.storage.sweep_folder import write_json


@dataclass(frozen=True)
class CalibrationCache:
    """Noise multipliers of earlier plans; see `calibrations`.

    Attributes:
      folder: a temporary folder, where planning reads them and writes new ones.
      permanent_folder: the folder under the storage folder, which `keep` copies new ones to.
    """

    folder: Path
    permanent_folder: Path

    def keep(self) -> None:
        """Copy new noise multipliers to the permanent folder."""
        with storage_errors(self.permanent_folder):
            for file in self.folder.glob("*.json"):
                if not (self.permanent_folder / file.name).exists():
                    self.permanent_folder.mkdir(parents=True, exist_ok=True)
                    write_json(self.permanent_folder / file.name, json.loads(file.read_text()))


@contextmanager
def calibrations(root: Path) -> Iterator[CalibrationCache]:
    """Yield a temporary copy of the storage folder's noise multipliers; only `keep` stores new ones.

    So a plan that fails a later check leaves nothing behind.
    """
    with tempfile.TemporaryDirectory(prefix="dpgcl-") as folder:
        cache = CalibrationCache(Path(folder), root / "calibration")
        for file in cache.permanent_folder.glob("*.json"):
            shutil.copy(file, cache.folder)
        yield cache
