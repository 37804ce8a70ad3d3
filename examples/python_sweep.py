"""A sweep from Python: your own search space and your own score, and a table of trials in return.

python examples/python_sweep.py [FOLDER FOR RESULTS]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps import Between, SweepOptions, search
from trainers import replace_options


def cautious_accuracy(metrics: Mapping[str, float]) -> float:
    """Return the worse of two scores: what is chosen is good by both."""
    return min(metrics["knn_accuracy"], metrics["linear_probe_accuracy"])


def main(storage: Path) -> None:
    """Search three settings of a small training on digits, with ε = 8 each."""
    options = replace_options(
        SweepOptions().tiny(),
        storage=storage,
        dataset="digits",
        network="tiny_cnn",
        epsilon=8.0,
        num_steps=20,
    )
    space: dict[str, Any] = {
        "learning_rate": Between(1e-3, 3e-2),
        "group_size": [2, 4, 8],
        "min_crop_area": [0.2, 0.5],
    }
    found = search(options, space, cautious_accuracy, num_trials=3, sampler="random")
    print(found.trials[["trial", "learning_rate", "group_size", "min_crop_area", "score"]].to_string())
    print(f"best: {found.best}, {cautious_accuracy.__name__} {found.best_score:.3f}")
    print(f"ε of one training: {found.epsilon:.2f}, of the whole search: {found.tuned_epsilon:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="dpgcl-")).absolute())
