"""What is measured on a GPU runs on a CPU in a tiny mode, adds up over calls, and refuses what it cannot use.

The checks are tests marked `gpu` where they run on one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import Options, _Absent, _AbsentFinder, trainings
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.__main__ import Work, all_works, read_rows, run_works, tables
from benchmarks.harness import RESULTS, ROOT
from benchmarks.steps import ImageTask, PairTask
from dpgcl_core.errors import ConfigError
from tests.benchmarks.gpu_checks import (
    CHECKS,
    CheckError,
    at_most,
    passes_of_pairs_are_replayed,
)
from trainers.files.oversight import TrainingStopped
from trainers.training.step import Training

COMMITTED = RESULTS / "gpu"


def _options(folder: Path, **changes: Any) -> Options:
    return Options(**({"output": folder, "device": "cpu", "tiny": True, "threads": 1} | changes))


def _work(
    name: str, ran: list[str], found: Callable[[], Mapping[str, Any]] = dict, slice_: str = "steps"
) -> Work:
    def run() -> Mapping[str, Any]:
        ran.append(name)
        return found()

    return Work(slice=slice_, name=name, run=run)


def _fails() -> Mapping[str, Any]:
    raise CheckError("it does not hold")


# Rows that add up over calls


def test_rows_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    ran: list[str] = []
    works = [_work("first", ran), _work("second", ran), _work("first", ran, slice_="checks")]
    assert run_works(works[:1], _options(tmp_path)) == 0
    assert run_works(works, _options(tmp_path)) == 0
    assert ran == ["first", "second", "first"]
    assert set(read_rows(tmp_path)) == {"steps: first", "steps: second", "checks: first"}


def test_a_call_that_is_killed_loses_the_row_that_it_was_at_alone(tmp_path: Path) -> None:
    def killed() -> Mapping[str, Any]:
        raise KeyboardInterrupt

    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_works([_work("first", ran), _work("second", ran, killed)], _options(tmp_path))
    assert list(read_rows(tmp_path)) == ["steps: first"]


def test_failed_row_is_kept_and_made_again_where_that_is_asked_for(tmp_path: Path) -> None:
    ran: list[str] = []
    works = [_work("first", ran, _fails), _work("second", ran)]
    assert run_works(works, _options(tmp_path)) == 1
    assert read_rows(tmp_path)["steps: first"]["failed"] == "CheckError: it does not hold"
    assert run_works(works, _options(tmp_path)) == 1
    assert ran == ["first", "second"]
    assert run_works([_work("first", ran)], _options(tmp_path, should_retry=True)) == 0
    assert ran == ["first", "second", "first"]


def test_nothing_begins_after_the_time_of_a_call(tmp_path: Path) -> None:
    ran: list[str] = []
    options = _options(tmp_path, limit_minutes=1.0, start_seconds=time.monotonic() - 61)
    assert run_works([_work("first", ran)], options) == 0
    assert ran == []


def test_training_that_its_time_ends_is_no_row_and_ends_the_call(tmp_path: Path) -> None:
    def stopped() -> Mapping[str, Any]:
        raise TrainingStopped(7)

    ran: list[str] = []
    assert run_works([_work("first", ran, stopped), _work("second", ran)], _options(tmp_path)) == 0
    assert ran == ["first"]
    assert not read_rows(tmp_path)


def test_rows_of_another_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(json.dumps({"name": "first", "device_name": "another"}) + "\n")
    with pytest.raises(ConfigError, match="another"):
        run_works([], _options(tmp_path))
    (tmp_path / "steps.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=re.escape("steps.jsonl")):
        read_rows(tmp_path)


def test_rows_are_those_that_are_promised() -> None:
    works = all_works(Options(device="cpu", threads=1))
    names = [str(work) for work in works]
    assert len(set(names)) == len(names)
    for batch in (64, 1024, 8192, 65536):
        assert f"steps: resnet18, float32, B = {batch}, S = 16" in names
    assert "steps: ViT-B-32, float32, B = 64, S = 16" in names
    assert "trainings: dp_gcl, records, ε = 10, public start, seed 12" in names
    assert "trainings: dp_gcl, groups, ε = 10, N_a = 4, random weights, seed 12" in names
    assert len([name for name in names if name.startswith("trainings: ")]) == (20 + 11) * 3
    assert {name.partition(", ")[0] for name in names if name.startswith("checks: ")} == {
        *(f"checks: {name}" for name in CHECKS),
        "checks: passes of pairs are replayed",
    }


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--device", "cuda"], ["--only", "no such row"]])
def test_command_refuses_what_it_cannot_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny = ["--device", "cpu", "--tiny"] if words[0] == "--only" else []
    with pytest.raises(ConfigError, match=words[-1] if tiny else "--tiny"):
        gpu.main([*words, *tiny, "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


# Trainings


def test_trainings_are_the_papers_at_the_calibrated_noise() -> None:
    """σ of the file is what the accountant finds: a machine without one trains at the same ε."""
    numbers = json.loads(trainings.CALIBRATION.read_text())
    candidates = [each for dataset in trainings.NUM_RECORDS for each in trainings.candidates(dataset)]
    private = {each.mechanism: each for each in candidates if each.is_private}
    assert set(numbers) == set(private)
    options = Options(device="cuda", threads=1)
    for name, candidate in private.items():
        sigma = numbers[name]["noise_multiplier"]
        config = trainings.config_of(
            candidate, options, num_records=trainings.NUM_RECORDS[candidate.dataset], seed=10, sigma=sigma
        )
        mechanism = config.mechanism
        assert (mechanism.expected_batch_size, mechanism.num_steps) == (2048, 1200)
        assert (config.network.name, config.network.precision) == ("resnet18", "bfloat16")
        assert mechanism.noise_multiplier == sigma
        if candidate.epsilon is None:
            assert sigma == candidate.noise_multiplier
        else:
            assert 0.98 * candidate.epsilon < config.epsilon() <= candidate.epsilon
        assert config.epsilon() == pytest.approx(numbers[name]["epsilon"])


def test_points_of_a_curve_differ_from_the_papers_setting_in_one_number() -> None:
    options = Options(device="cpu", threads=1)
    reached = {}
    for axis, points in trainings.curves().items():
        configs = [
            trainings.config_of(point, options, num_records=60_000, seed=10, sigma=1.0) for point in points
        ]
        reached[axis] = [(config.num_augmentations, config.mechanism.l2_clip_norm) for config in configs]
    assert reached["N_a"] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert reached["C"] == [(1, 0.1), (1, 0.3), (1, 1.0), (1, 3.0), (1, 10.0)]
    assert reached["σ"] == [(1, 1.0)] * 5


@pytest.mark.ci
def test_training_goes_on_where_the_time_of_a_call_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row comes with the second call, with no step made twice."""
    steps: list[int] = []
    step = Training.take_step

    def counted(run: Training) -> None:
        steps.append(run.num_steps_done)
        step(run)

    candidate, options = trainings.Candidate(method="dp_clip", epsilon=1.0), _options(tmp_path)
    monkeypatch.setattr(Training, "take_step", counted)
    monkeypatch.setattr(trainings.Deadline, "must_stop", lambda _: len(steps) == 2)
    with pytest.raises(TrainingStopped):
        trainings.train(candidate, 10, options)
    monkeypatch.setattr(trainings.Deadline, "must_stop", lambda _: False)
    row = trainings.train(candidate, 10, options)
    assert steps == [0, 1, 2]
    assert row["metrics"]["num_steps_done"] == row["metrics"]["num_steps_charged"] == 3
    assert math.isnan(row["metrics"]["epsilon"]), "a tiny training has no calibration"
    assert not list((tmp_path / "checkpoints").iterdir())


# A machine with torch and numpy alone


def test_absent_package_is_imported_and_cannot_be_called() -> None:
    found = _AbsentFinder().find_spec("dp_accounting.pld")
    assert found is not None
    assert _AbsentFinder().find_spec("torch") is None
    module = _AbsentFinder().create_module(found)
    assert isinstance(module, _Absent)
    with pytest.raises(ImportError, match=re.escape("dp_accounting.pld.PLDAccountant")):
        module.PLDAccountant()


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but torch, numpy and what they need."""
    folder = tmp_path_factory.mktemp("isolated")
    for name in _needed("torch", "numpy"):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or () if file.parts[0] != ".."}:
            place = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (folder / top).exists():
                (folder / top).symlink_to(place)
    return folder


def _needed(*names: str) -> set[str]:
    """These distributions and what is installed of what they need."""
    needed: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name in needed:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        needed.add(name)
        left += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra" not in need]  # type: ignore[index]
    return needed


_ALONE = """
import runpy, sys
sys.path += sys.argv.pop(1).split(":")
sys.argv[0] = "benchmarks.gpu"
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def _run_alone(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command where Python has its own library, this source and torch, and nothing else."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", _ALONE, f"{ROOT}:{folder}", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        timeout=500,
    )


@pytest.mark.ci
def test_torch_and_numpy_are_enough(isolated: Path, tmp_path: Path) -> None:
    """Rows of all slices run in the tiny mode, and what fails for want of scipy says so."""
    words = ("--device", "cpu", "--tiny", "--threads", "1", "--output", str(tmp_path))
    done = _run_alone(isolated, *words, "--only", "checks", "steps", "ε = 1,", "N_a = 2", "base")
    rows = read_rows(tmp_path)
    assert {name.partition(":")[0] for name in rows} == set(gpu.SLICES), done.stderr
    failed = {name: row["failed"] for name, row in rows.items() if "failed" in row}
    assert all("scipy" in text for text in failed.values()), failed
    assert {name.split(", ")[0].removeprefix("trainings: ") for name in failed} <= {"dp_gcl", "logit_dp"}
    assert not [name for name in failed if "groups" in name]
    trained = [row["found"]["metrics"] for name, row in rows.items() if "dp_gcl, groups" in name]
    assert trained
    assert all("knn_accuracy" in metrics for metrics in trained)
    refused = _run_alone(isolated, "--calibrate")
    assert refused.returncode == 2
    assert "dp-accounting" in refused.stderr


# The checks


def _task(device: str, model: str = "small_cnn") -> ImageTask:
    return ImageTask(model=model, group_size=4, expected_batch_size=32, threads=1, device=device)


@pytest.mark.ci
@pytest.mark.parametrize("name", CHECKS)
def test_check_holds_on_a_cpu(name: str) -> None:
    CHECKS[name](_task("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["small_cnn", "resnet18"])
@pytest.mark.parametrize("name", CHECKS)
def test_check_holds_on_a_gpu(name: str, model: str) -> None:
    CHECKS[name](_task("cuda", model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_passes_of_pairs_are_replayed_on_a_gpu() -> None:
    passes_of_pairs_are_replayed(_task("cuda"))


def test_a_bound_is_kept_by_no_larger_number_and_not_by_nan() -> None:
    assert at_most("it", 1.0, 1.0) == 1.0
    for value in (1.01, float("nan")):
        with pytest.raises(CheckError):
            at_most("it", value, 1.0)


# Steps and tables


@pytest.mark.ci
def test_step_of_pairs_is_measured_over_both_ordinary_steps() -> None:
    task = PairTask(model="clip-tiny", lora_rank=2, group_size=2, expected_batch_size=4, threads=1)
    found = gpu.measure_step(task, rounds=1)
    assert set(found["over"]) == {"non_private", "whole_batch"}
    assert "| clip-tiny | float32 | 4 | 2 |" in tables([{"name": "clip-tiny", "found": found}])


def test_committed_page_is_that_of_the_committed_rows() -> None:
    """The rows of an earlier version of the command are still read."""
    printed = tables(list(read_rows(COMMITTED).values())).splitlines()
    page = [line for line in (COMMITTED / "report.md").read_text().splitlines() if line.startswith("|")]
    assert [line for line in printed if line] == page


def test_failed_row_is_named_below_the_tables(tmp_path: Path) -> None:
    text = tables([{"name": "B = 65536", "failed": "OutOfMemoryError: too large"}])
    assert text == "- B = 65536: failed, OutOfMemoryError: too large"
    assert dataclasses.replace(_options(tmp_path), limit_minutes=2.0, start_seconds=10.0).deadline == 130.0
