"""Noise multipliers of earlier plans, verified again when they are used."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sweeps.service.storage.sweep_folder import storage_errors, write_json


@dataclass(frozen=True)
class CalibrationCache:
    """Noise multipliers of earlier plans; see `calibrations`.

    Attributes:
      folder: the folder of one run, from which planning reads them, and to which it writes new ones.
      permanent_folder: the folder in the storage folder.
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
    """Yield the cache of a storage folder, which only `keep` changes, as a plan may still be refused."""
    with tempfile.TemporaryDirectory(prefix="dpgcl-") as folder:
        cache = CalibrationCache(Path(folder), root / "calibration")
        for file in cache.permanent_folder.glob("*.json"):
            shutil.copy(file, cache.folder)
        yield cache
