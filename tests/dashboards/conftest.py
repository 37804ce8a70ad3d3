"""Fake trials with a known shape, as a table and in an MLflow database."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from dpgcl_core.release.metrics import find_metric
from tests.trainers.databases import open_tracker

ALL_SCORES = ("knn_accuracy", "linear_probe_accuracy")
SIZES = (2, 8, 64, "batch")
TUNING_COST = "Open release: all 12 trials together ε = 40 at δ = 1.5e-06"


@pytest.fixture(scope="session")
def make_trials():
    return _make_trials


@pytest.fixture(scope="session")
def make_sweep():
    return _make_sweep


@pytest.fixture(scope="session")
def tracking(tmp_path_factory, make_trials):
    """(URI, trials) of a database with two finished sweeps, `old` and then `new`, and one without trials."""
    folder = tmp_path_factory.mktemp("mlflow")
    tracker = open_tracker(folder)
    trials = make_trials()
    for name, rows in (("empty", trials[:0]), ("old", trials[:1]), ("new", trials)):
        parent = tracker.start_sweep(name, {"dataset": "fashion_mnist"}, {"data_is": "public"})
        log_trials(tracker, parent, rows)
    return f"sqlite:///{folder / 'mlflow.db'}", trials


def log_trials(tracker, parent, rows, series=lambda row: {}):
    for index, row in enumerate(rows.to_dict("records")):
        values = {key: value for key, value in row.items() if value == value}
        metrics = {key: values.pop(key) for key in list(values) if is_metric(key)}
        tags = {key: values.pop(key) for key in ("data_is", "guarantee_label", "tuning_cost")}
        values.pop("dataset")
        tracker.log_trial(parent, f"t{index}", values, metrics, series(row), tags)


def is_metric(name):
    return find_metric(name) is not None


def by_hand(trials, metric, size, epsilon):
    """Mean and standard error of a group size and ε."""
    values = [
        row[metric]
        for _, row in trials.iterrows()
        if row["group_size"] == size and row["target_epsilon"] == epsilon
    ]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _make_trials(
    sizes=SIZES,
    epsilons=(10.0, math.inf),
    augmentations=(1,),
    num_repeats=3,
    scores=ALL_SCORES,
    snr=True,
    data_is="public",
    **changes,
):
    """One row per trial, in the columns that `load_trials` returns."""
    random = np.random.default_rng(0)
    rows = []
    for size, epsilon, count, repeat in (
        (s, e, a, r) for s in sizes for e in epsilons for a in augmentations for r in range(num_repeats)
    ):
        private = epsilon < math.inf
        row = {
            "group_size": size,
            "target_epsilon": epsilon,
            "num_augmentations": count,
            "repeat": repeat,
            "target_delta": 1.5e-6,
            "sampling_prob": 0.02,
            "num_records_public": 60000,
            "num_steps": 600,
            "noise_multiplier": 1.25 if private else 0.0,
            "dataset": "fashion_mnist",
            "data_is": data_is,
            "guarantee_label": "proven" if private else "none",
            "tuning_cost": TUNING_COST,
            "epsilon": 9.99 if private else math.inf,
        }
        for name in scores:
            row[name] = random.uniform(0.6, 0.9)
            row[f"untrained_{name}"] = 0.5 + 0.01 * repeat
        if snr and private:
            row["snr_first_step"] = random.uniform(0.1, 1)
            row["snr_first_step_no_augmentation"] = random.uniform(0.1, 1)
        rows.append(row | changes)
    trials = pd.DataFrame(rows)
    trials["group_size"] = trials["group_size"].astype(object)
    return trials


def _make_sweep(column, values, follow=lambda value: {}, **options):
    """Trials that differ in one column; `follow` gives what else a value decides."""
    options = {"sizes": (8,), "snr": False} | options
    parts = [_make_trials(**options, **({column: value} | follow(value))) for value in values]
    trials = pd.concat(parts, ignore_index=True)
    trials["knn_accuracy"] = np.random.default_rng(1).uniform(0.6, 0.9, len(trials))
    trials["run_id"] = [f"run{i}" for i in range(len(trials))]
    return trials
