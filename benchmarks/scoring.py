#!/usr/bin/env python
"""What k-NN and linear probe cost on all records: seconds and memory of both, beside what was there before.

    python benchmarks/scoring.py                           # 60,000 and 10,000 records, with a dated file
    python benchmarks/scoring.py --num-index 2000 --num-queries 500 --dims 64 --json

Features are generated: a mixture of as many classes as asked for in 32 directions, through one random layer
of rectifiers; so they are as collinear as a network's. *Before* are scikit-learn's logistic regression with C
= 1 and the tolerance that was used, and the choice of neighbours among all similarities of a row; both on all
records here, where they saw 5,000 to 10,000. Memory is the peak of one phase in a process of its own, less
what was resident with the features there.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from benchmarks import harness
from benchmarks.harness import Output, Page, markdown_table, say, seconds_text
from dpgcl_core.errors import ConfigError, exit_on_bad_input
from trainers.evaluation.features import knn_accuracy, linear_probe_accuracy
from trainers.evaluation.linear_probe import Features, Labels

NUM_DIRECTIONS = 32
_SPREAD = 2.5  # of the records of a class, in distances between classes' means
_ROWS_BEFORE = 256


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """What to measure."""

    num_index: int = 60_000
    """Records that k-NN and probe are fitted on."""
    num_queries: int = 10_000
    """Records that are scored."""
    dims: tuple[int, ...] = (64, 512)
    """Widths of the features."""
    num_classes: int = 10
    """Classes of the labels."""
    threads: int = 1
    """CPU threads, as of one training."""

    def __post_init__(self) -> None:
        least = min(self.num_index, self.num_queries, self.threads, *self.dims)
        if least < 1 or self.num_classes < 2:
            raise ConfigError("scoring needs at least one record, width and thread, and two classes")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Features and labels of index and queries."""

    known: Features
    known_labels: Labels
    asked: Features
    asked_labels: Labels


def generated(num_index: int, num_queries: int, dim: int, num_classes: int) -> Scored:
    """Return features of a random layer over a mixture of classes; the same for the same numbers."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, num_classes, num_index + num_queries)
    means = rng.normal(size=(num_classes, NUM_DIRECTIONS))
    places = means[labels] + _SPREAD * rng.normal(size=(len(labels), NUM_DIRECTIONS))
    layer = rng.normal(size=(NUM_DIRECTIONS, dim)) / NUM_DIRECTIONS**0.5
    features = np.maximum(places @ layer + rng.normal(size=dim), 0).astype(np.float32)
    return Scored(
        known=features[:num_index],
        known_labels=labels[:num_index],
        asked=features[num_index:],
        asked_labels=labels[num_index:],
    )


def probe_before(data: Scored) -> float:
    """Return the accuracy of scikit-learn's logistic regression, as it was used."""
    scaler = StandardScaler().fit(data.known)
    probe = LogisticRegression(max_iter=500, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        probe.fit(scaler.transform(data.known), data.known_labels)
    return float(np.mean(probe.predict(scaler.transform(data.asked)) == data.asked_labels))


def knn_before(data: Scored, num_neighbors: int = 3) -> float:
    """Return the accuracy of k-NN with the choice among all similarities of a row."""
    index, queries = (torch.nn.functional.normalize(torch.from_numpy(f)) for f in (data.known, data.asked))
    labels, hits = torch.from_numpy(data.known_labels), 0
    for start in range(0, len(queries), _ROWS_BEFORE):
        similarities = queries[start : start + _ROWS_BEFORE] @ index.T
        nearest = labels[similarities.topk(num_neighbors, dim=1, sorted=False).indices]
        votes = torch.nn.functional.one_hot(nearest).sum(dim=1).argmax(dim=1).numpy()
        hits += int((votes == data.asked_labels[start : start + _ROWS_BEFORE]).sum())
    return hits / len(queries)


def knn_now(data: Scored) -> float:
    """Return the accuracy of k-NN as trainings are scored."""
    return knn_accuracy(data.known, data.known_labels, data.asked, data.asked_labels)


def probe_now(data: Scored) -> float:
    """Return the accuracy of the linear probe as trainings are scored."""
    return linear_probe_accuracy(data.known, data.known_labels, data.asked, data.asked_labels)


PHASES: Mapping[str, tuple[Callable[[Scored], float], Callable[[Scored], float]]] = {
    "k-NN": (knn_now, knn_before),
    "linear probe": (probe_now, probe_before),
}


def _row(options: Options, dim: int, phase: str) -> dict[str, Any]:
    numbers = (options.num_index, options.num_queries, dim, options.num_classes)
    data, row = generated(*numbers), {"phase": phase, "feature_dim": dim}
    for side, score in zip(("now", "before"), PHASES[phase], strict=True):
        found: dict[str, float] = {}
        spent = harness.timed(partial(_keep, found, score, data))
        order = {"phase": phase, "side": side, "numbers": numbers, "threads": options.threads}
        measure = partial(harness.number_of_fresh_process, "benchmarks.scoring", order, of=phase)
        row[side] = {
            "processor_seconds": spent.processor,
            "clock_seconds": spent.clock,
            "accuracy": found["accuracy"],
            "memory_bytes": harness.or_warning(measure),
        }
        say(f"  {phase}, {dim} features, {side}: {seconds_text(spent.processor)} s")
    return row


def _keep(found: dict[str, float], score: Callable[[Scored], float], data: Scored) -> None:
    found["accuracy"] = score(data)


def peak_bytes(phase: str, side: str, numbers: tuple[int, int, int, int], threads: int) -> int:
    """Return the peak memory of one phase in this process, in bytes, without the features themselves."""
    torch.set_num_threads(threads)
    score = PHASES[phase][("now", "before").index(side)]
    score(generated(50, 5, 4, 2))  # what libraries import late
    data = generated(*numbers)
    before = harness.memory_status("VmRSS")
    if not harness.clear_peak():
        say("the peak could not be reset: making the features counts")
    score(data)
    return harness.memory_status("VmHWM") - before


def measure(options: Options) -> dict[str, Any]:
    """Return a row for each width and phase."""
    torch.set_num_threads(options.threads)
    rows = [_row(options, dim, phase) for dim in options.dims for phase in PHASES]
    return {"num_index": options.num_index, "num_queries": options.num_queries, "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """Return the rows in Markdown."""
    cells = []
    for row in result["rows"]:
        sides = [row[side] for side in ("now", "before")]
        seconds = [f"{seconds_text(side['processor_seconds'])} s" for side in sides]
        memory = [f"{(side['memory_bytes'] or 0) / 2**20:.0f} MiB" for side in sides]
        accuracy = [f"{100 * side['accuracy']:.2f}" for side in sides]
        cells.append([row["feature_dim"], row["phase"], *seconds, *memory, *accuracy])
    columns = ["features", "phase", "now", "before", "memory now", "before", "accuracy now (%)", "before"]
    return markdown_table(columns, cells)


def main() -> int:
    """Measure everything."""
    options = harness.read_options(Options, __doc__)
    facts = harness.about(device="cpu", threads=options.threads)
    result = measure(options)
    page = Page(name="scoring", title="k-NN and linear probe on all records", text=PAGE)
    return harness.publish(page, options, facts, result, [table(result)])


PAGE = """
One scoring of generated features, in processor seconds. *Before*: scikit-learn's logistic regression with
C = 1 and a tolerance of 1e-3, which is no optimum, and neighbours chosen among all similarities of a row; on
all records here, where they saw 5,000 to 10,000. Memory: the peak of one phase in a process of its own, less
what was resident with the features there.
"""


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(peak_bytes(**json.loads(sys.argv[1])))
    else:
        exit_on_bad_input(main)
