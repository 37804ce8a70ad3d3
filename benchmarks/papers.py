"""Print published numbers of the papers beside ours, and name the rows that are missing.

    python benchmarks/papers.py                                           # fills benchmarks/results/papers.md
    python benchmarks/papers.py --table dp-gcl-1                          # prints one table
    python benchmarks/papers.py --table dp-gcl-1 --tiny --rows FOLDER     # first trains its rows, on a CPU

Our numbers are the trainings that `python -m benchmarks.gpu` has made, and committed tables of sweeps.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

import pandas as pd

from benchmarks.gpu import Options
from benchmarks.gpu.__main__ import Work, read_rows, run_works
from benchmarks.gpu.trainings import FASHION_MNIST, SEEDS, Candidate, comparison, curves, trainings
from benchmarks.harness import RESULTS, markdown_table, print_line, read_options
from dpgcl_core.errors import ConfigError, exit_on_bad_input

Published = Mapping[tuple[str, float | None], tuple[float, float]]
"""k-NN and linear-probe accuracy in per cent, by method and ε."""
Metrics = Mapping[str, Sequence[Mapping[str, float]]]
"""The metrics of each seed, by candidate."""

PUBLISHED: dict[str, Published] = {
    FASHION_MNIST: {
        ("dp_gcl", 1.0): (82.1, 81.5),
        ("dp_gcl", 10.0): (82.8, 82.9),
        ("dp_clip", 1.0): (80.0, 78.3),
        ("dp_clip", 10.0): (81.1, 79.8),
        ("logit_dp", 1.0): (79.6, 78.2),
        ("logit_dp", 10.0): (79.7, 78.4),
        ("dp_sgd", 1.0): (79.4, 77.5),
        ("dp_sgd", 10.0): (78.8, 77.5),
        ("non_private", None): (92.7, 92.6),
        ("base", None): (77.4, 76.0),
    },
    "cifar10": {
        ("dp_gcl", 1.0): (33.8, 37.6),
        ("dp_gcl", 10.0): (39.5, 42.3),
        ("dp_clip", 1.0): (28.1, 33.4),
        ("dp_clip", 10.0): (28.9, 35.1),
        ("logit_dp", 1.0): (25.4, 31.8),
        ("logit_dp", 10.0): (25.3, 32.1),
        ("dp_sgd", 1.0): (25.6, 32.0),
        ("dp_sgd", 10.0): (28.5, 33.6),
        ("non_private", None): (59.4, 60.3),
        ("base", None): (24.5, 30.6),
    },
}
"""Table 1 of the DP-GCL paper, by data set; its Table 13 for training without privacy."""

TOYS: dict[tuple[str, ...], list[tuple[str, str, str]]] = {
    ("ViP (Tables 1 and 9), probe on ImageNet-1K", "55.7", "+5.9", "60.5"): [
        ("mae_fashion_mnist", "probe on Fashion-MNIST, `mae-toy`", "linear_probe_accuracy"),
    ],
    ("DP-Cap (Table 2; start in B.1), probe on ImageNet-1K", "63.4", "+19.4", "77.5"): [
        ("cap_fashion_mnist", "probe on Fashion-MNIST, `cap-toy`", "linear_probe_accuracy"),
        ("cap_shapes", "probe on generated pairs, `cap-toy`", "linear_probe_accuracy"),
    ],
    ("DP-Cap (Table 3), zero-shot on CIFAR-10", "54.4", "–", "90.0"): [
        ("cap_fashion_mnist", "zero-shot on Fashion-MNIST, `cap-toy`", "zero_shot_accuracy"),
        ("cap_shapes", "zero-shot on generated pairs, `cap-toy`", "zero_shot_accuracy"),
    ],
}
"""A published row, and our rows below it: table of a sweep, setting, score."""

MISSING = "**missing**"
_CALL = "--limit-minutes 7 --output benchmarks/results/gpu"
_SCORES = ("knn_accuracy", "linear_probe_accuracy")
_COLUMNS = ("published (%)", "ours (%)", "published gain", "our gain", "seeds")


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """What to print.

    Raises:
      ConfigError: `tiny` without `table` or `rows`.
    """

    table: Literal["dp-gcl-1", "cifar10", "dp-gcl-curves", "toys"] | None = None
    """Print only this table, and to stderr a command for each missing row."""
    rows: tuple[Path, ...] = ()
    """Folders with rows of trainings; by default the committed ones."""
    tiny: bool = False
    """Make the table's rows in the first folder: tiny trainings that try out the code and are no result."""

    def __post_init__(self) -> None:
        if self.tiny and not (self.table and self.rows):
            raise ConfigError("--tiny needs --table, and --rows with a folder for its rows. Add both")


def read_metrics(folders: Sequence[Path]) -> Metrics:
    """Return the metrics of all trainings in the folders; a training in two folders counts once."""
    rows = {name: row for folder in folders for name, row in read_rows(folder).items() if "found" in row}
    metrics: dict[str, list[Mapping[str, float]]] = {}
    for name, row in rows.items():
        if name.startswith("trainings: "):
            metrics.setdefault(row["found"]["candidate"], []).append(row["found"]["metrics"])
    return metrics


# Tables


def fashion_mnist_table(metrics: Metrics) -> str:
    """Return the DP-GCL paper's Table 1 on Fashion-MNIST beside ours, and scores that need no training."""
    lines = [_line(each, metrics, PUBLISHED[FASHION_MNIST]) for each in comparison(FASHION_MNIST)]
    rows = read_table("mae_fashion_mnist")
    for name in ("raw pixels", "HOG"):
        scores = ", ".join(_cell(rows[name], score) for score in _SCORES)
        lines.append([name, "–", scores, "–", "–", "no training"])
    return markdown_table(["k-NN, probe", *_COLUMNS], lines)


def cifar10_table(metrics: Metrics) -> str:
    """Return the DP-GCL paper's Table 1 on CIFAR-10 beside ours."""
    lines = [_line(each, metrics, PUBLISHED["cifar10"]) for each in comparison("cifar10")]
    return markdown_table(["k-NN, probe", *_COLUMNS], lines)


def curve_tables(metrics: Metrics) -> str:
    """Return the curves over N_a, C and σ, one table each."""
    return "\n\n".join(
        markdown_table(
            [f"over {axis}: k-NN, probe", *_COLUMNS], [_line(each, metrics, {}) for each in points]
        )
        for axis, points in curves().items()
    )


def toy_table(_: Metrics) -> str:
    """Return rows of ViP's and DP-Cap's tables, each above our toys with the same score."""
    lines: list[Sequence[object]] = []
    for published, toys in TOYS.items():
        lines.append(published)
        for name, setting, score in toys:
            table = read_table(name)
            private, non_private = table["8.0"], table["inf"]
            gain = _cell(private, f"{score}_private_gain", "+")
            lines.append([f"ours, toy: {setting}", _cell(private, score), gain, _cell(non_private, score)])
    return markdown_table(["", "ε = 8 (%)", "over its start (points)", "not private (%)"], lines)


TABLES: dict[str, Callable[[Metrics], str]] = {
    "dp-gcl-1": fashion_mnist_table,
    "cifar10": cifar10_table,
    "dp-gcl-curves": curve_tables,
    "toys": toy_table,
}


def plan_of(table: str) -> list[Candidate]:
    """Return the trainings of a table, each once."""
    points = [point for curve in curves().values() for point in curve]
    plans = {"dp-gcl-1": comparison(FASHION_MNIST), "cifar10": comparison("cifar10"), "dp-gcl-curves": points}
    return list(dict.fromkeys(plans.get(table, ())))


def _line(candidate: Candidate, metrics: Metrics, published: Published) -> list[object]:
    rows = metrics.get(str(candidate), ())
    scores = [[100 * row[score] for row in rows if score in row] for score in _SCORES]
    gains = [
        [100 * (row[score] - row[f"untrained_{score}"]) for row in rows if score in row] for score in _SCORES
    ]
    theirs = () if candidate.has_start else published.get((candidate.method, candidate.epsilon), ())
    untrained = published["base", None] if theirs else ()
    has_gain = candidate.method != "base" or candidate.has_start
    return [
        str(candidate),
        pair_text([[score] for score in theirs]),
        pair_text(scores) if rows else MISSING,
        pair_text([[score - start] for score, start in zip(theirs, untrained, strict=True) if has_gain], "+"),
        pair_text(gains, "+") if rows and has_gain else "–",
        f"{len(rows)} of {len(SEEDS)}",
    ]


def read_table(name: str) -> dict[str, pd.Series]:
    """Return the rows of a committed sweep over ε, by target ε or the reference's name."""
    table = pd.read_csv(RESULTS / f"{name}.csv", index_col=0)
    return {str(label): row for label, row in table.iterrows()}


def _cell(row: pd.Series, score: str, sign: str = "") -> str:
    mean, error = 100 * row[f"{score}_mean"], 100 * row[f"{score}_standard_error"]
    return f"{mean:{sign}.1f}" + ("" if math.isnan(error) else f" ± {error:.1f}")


def pair_text(scores: Sequence[Sequence[float]], sign: str = "") -> str:
    """Return the means of several scores.

    >>> pair_text([[50, 70], [60]], "+"), pair_text([])
    ('+60.0 ± 10.0, +60.0', '–')
    """
    return ", ".join(mean_text(values, sign) for values in scores) or "–"


def mean_text(values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard error.

    >>> mean_text([50, 70]), mean_text([50], "+"), mean_text([])
    ('60.0 ± 10.0', '+50.0', '–')
    """
    if not values:
        return "–"
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.1f}{error}"


# Page and command


def fill_page(page: str, metrics: Metrics) -> str:
    """Return the page with each table filled in, between `<!-- table: NAME -->` and `<!-- end -->`."""

    def block(mark: re.Match[str]) -> str:
        return f"<!-- table: {mark[1]} -->\n\n{TABLES[mark[1]](metrics)}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->.*?<!-- end -->", block, page, flags=re.DOTALL)


def commands_of(table: str, metrics: Metrics) -> list[str]:
    """Return a command for each training of a table that has fewer seeds than promised."""
    return [
        f'python -m benchmarks.gpu --dataset {each.dataset} --only "trainings: {each}" {_CALL}'
        for each in plan_of(table)
        if len(metrics.get(str(each), ())) < len(SEEDS)
    ]


def train_tiny(table: str, folder: Path) -> int:
    """Make the rows of a table with one seed, tiny, on a CPU, in a folder; return 1 if one has failed."""
    options = Options(output=folder, device="cpu", tiny=True, threads=1)
    rows = trainings(options, plan_of(table))
    return run_works([Work(slice="trainings", name=name, run=run) for name, run in rows], options)


def main() -> int:
    """Fill the page, or print one table; return 1 if a tiny training has failed, else 0."""
    options = read_options(PaperOptions, __doc__)
    code = train_tiny(options.table, options.rows[0]) if options.tiny and options.table else 0
    metrics = read_metrics(options.rows or sorted(RESULTS.glob("gpu*")))
    if options.table is None:
        path = RESULTS / "papers.md"
        path.write_text(fill_page(path.read_text(), metrics))
        return code
    if options.tiny:
        print("Ours are tiny trainings on random images: no results.\n")
    print(TABLES[options.table](metrics))
    for command in () if options.tiny else commands_of(options.table, metrics):
        print_line(command)
    return code


if __name__ == "__main__":
    exit_on_bad_input(main)
