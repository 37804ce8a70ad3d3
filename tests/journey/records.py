"""Data for the journey: small PNG files of patients, in a folder whose name has a space, and public ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

SHAPES = ("disk", "square")
NUM_PATIENTS, SCANS_OF_EACH = 200, 3


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the data lie.

    Attributes:
      table: scans of the private patients with label and patient (parquet).
      pairs: the same scans with captions and patients (tab-separated).
      public_folder, public_pairs: other scans, whose records nobody protects.
    """

    table: Path
    pairs: Path
    public_folder: Path
    public_pairs: Path


def make_files(root: Path) -> Files:
    """Write all data below a folder, the same at every call."""
    rng, private, public = np.random.default_rng(0), root / "private scans", root / "public scans"
    private.mkdir(parents=True)
    rows, others = [], []
    for number in range(NUM_PATIENTS * SCANS_OF_EACH):
        shape, path = SHAPES[number % 2], private / f"scan {number}.png"
        _picture(shape, rng).save(path)
        caption, patient = _caption(shape, number), f"p{number // SCANS_OF_EACH}"
        rows.append({"filepath": path, "title": caption, "label": number % 2, "patient": patient})
    for number in range(100):
        shape = SHAPES[number % 2]
        path = public / shape / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        _picture(shape, rng).save(path)
        others.append({"filepath": path, "title": _caption(shape, number)})
    files = Files(
        table=root / "private scans.parquet",
        pairs=root / "private pairs.csv",
        public_folder=public,
        public_pairs=root / "public pairs.csv",
    )
    scans = pd.DataFrame(rows)
    scans[["filepath", "title", "patient"]].to_csv(files.pairs, sep="\t", index=False)
    images = [path.read_bytes() for path in scans["filepath"]]
    scans.assign(image=images)[["image", "label", "patient"]].to_parquet(files.table)
    pd.DataFrame(others).to_csv(files.public_pairs, sep="\t", index=False)
    return files


def _caption(shape: str, number: int) -> str:
    return f"a bright {shape}, view {number % 7} of patient {number}"


def _picture(shape: str, rng: np.random.Generator) -> Image.Image:
    down, across = np.mgrid[:16, :16] - 7.5 + rng.normal(0, 1, (2, 1, 1))
    inside = np.hypot(down, across) < 5 if shape == "disk" else np.maximum(abs(down), abs(across)) < 4.5
    return Image.fromarray(np.clip(160 * inside + rng.normal(50, 20, (16, 16)), 0, 255).astype(np.uint8))
