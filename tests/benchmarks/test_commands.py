"""Every benchmark runs and says what it promises. What it measures is not tested: a time is no property."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import clipping, driver_scale, harness, logit_dp, workers
from benchmarks.steps import (
    NON_PRIVATE,
    OURS,
    WHOLE_BATCH,
    Check,
    ImageTask,
    OrdinaryStep,
    OurStep,
    PairTask,
    RecordTask,
    Task,
    build_step,
    relative_errors,
    task_class,
)
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from trainers.tasks.task import task_of

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

ROOT = Path(__file__).resolve().parents[2]


def _task(**changes: Any) -> ImageTask:
    settings: dict[str, Any] = {"model": "small_cnn", "group_size": 2, "expected_batch_size": 8, "threads": 1}
    return ImageTask(**(settings | changes))


def _pair_task(**changes: Any) -> PairTask:
    settings: dict[str, Any] = {"model": "clip-tiny", "group_size": 2, "expected_batch_size": 8, "threads": 1}
    return PairTask(**(settings | changes))


KINDS = [
    pytest.param(_task(), id="images"),
    pytest.param(_pair_task(), id="pairs"),
    pytest.param(RecordTask(model="mae-toy", expected_batch_size=8, threads=1), id="auto-encoder"),
    pytest.param(RecordTask(model="cap-toy", expected_batch_size=8, threads=1), id="captioner"),
]


def _run(script: str, *arguments: str) -> tuple[int, str, str]:
    """Runs a benchmark from a folder that is not the repository, as a user might."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd="/",
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def _json_of(script: str, *arguments: str) -> dict[str, Any]:
    code, out, err = _run(script, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)  # the whole output is one object
    return found


@pytest.mark.parametrize(
    "model",
    ["small_cnn", *(pytest.param(model, marks=pytest.mark.long) for model in ("clip-tiny", "mae-toy"))],
)
def test_clipping_command_measures_time_and_memory(model: str) -> None:
    """The names that readers of the rows rely on."""
    result = _json_of(
        "clipping.py", "--models", model, "--group-sizes", "2", "--expected-batch-sizes", "8",
        "--threads", "1", "--repeats", "1", "--microbatches", "24",
    )  # fmt: skip
    (row,) = result["rows"]
    ours, plain = row["sides"][OURS], row["sides"][NON_PRIVATE]
    assert row["time_ratio"] == pytest.approx(ours["seconds"] / plain["seconds"])
    assert row["memory_ratio"] == pytest.approx(ours["memory_bytes"] / plain["memory_bytes"])
    assert row["relative_error"] < 1e-5
    assert row["paths"]
    assert {"device", "torch", "threads", "command"} <= set(result)
    assert (WHOLE_BATCH in row["over"]) == (model == "clip-tiny")


def test_clipping_table_is_kept_after_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Networks of every kind stand in one table, and a CLIP model has a column of its own."""
    arguments = "--models tiny_cnn clip-tiny mae-toy --group-sizes 2 4 --expected-batch-sizes 8 --threads 1"
    arguments += f" --microbatches 8 --repeats 1 --no-measure-memory --output {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["clipping.py", *arguments.split()])
    assert clipping.main() == 0
    (data,) = tmp_path.glob("*.json")
    rows = json.loads(data.read_text())["rows"]
    sizes = [(row["model"], row["group_size"]) for row in rows]
    assert sizes == [
        *((model, size) for model in ("tiny_cnn", "clip-tiny") for size in (2, 4)),
        ("mae-toy", 1),
    ]
    assert all(row["memory_ratio"] is None for row in rows)
    assert clipping.table(rows) in capsys.readouterr().out


def test_ratio_is_the_median_of_the_rounds() -> None:
    """A round that all sides spend waiting for another program moves no ratio."""
    plain = {"all_seconds": [1.0, 10.0, 2.0], "memory_bytes": 50}
    ratios = clipping._ratios({"all_seconds": [1.2, 12.0, 9.0], "memory_bytes": 60}, plain)
    assert ratios["time_ratio"] == pytest.approx(1.2)
    assert ratios["time_ratio_range"] == pytest.approx([1.2, 4.5])
    assert ratios["memory_ratio"] == pytest.approx(1.2)


@pytest.mark.parametrize("loop", ["", "--own-loop --one-worker-threads 1"])
def test_workers_compares_two_arrangements(
    loop: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--models tiny_cnn --expected-batch-size 16 --group-size 2 --rounds 1 --steps 1 --threads 1"
    monkeypatch.setattr(sys, "argv", ["workers.py", *f"{arguments} {loop}".split(), "--json"])
    assert workers.main() == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["threads_of_one_worker"], row["num_workers"], row["threads_per_worker"]) == (1, 2, 1)
    assert row["time_ratio"] == pytest.approx(row["many_workers_seconds"] / row["one_worker_seconds"])


def test_logit_dp_prints_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--model tiny_cnn --dim 8 --step-dims 8 --pair-records 4"
    arguments += " --step-records 16 --reference-rows 2 --repeats 1 --json"
    monkeypatch.setattr(sys, "argv", ["logit_dp.py", *arguments.split()])
    assert logit_dp.main() == 0
    result = json.loads(capsys.readouterr().out)
    (pair,), (step,) = result["pairs"], result["steps"]
    assert max(pair["max_vmap_norm_error"], pair["sum_error"]) < 1e-4
    assert pair["smallest_bound"] > 1 - 1e-5
    assert step["ratio"] == step["processor_seconds"]["ours"] / step["processor_seconds"]["dp_gcl"]


def test_seconds_around_a_training_leave_out_its_steps_alone() -> None:
    """Of what a sweep would have noted; the first trial, which starts the processes, is told apart."""
    metrics = [{"train_seconds": 4.0, "evaluation_seconds": each} for each in (1.0, 0.5, 1.5)]
    row = driver_scale.around_trainings([100.0, 120.0, 126.0, 134.0], metrics)
    assert row["first_not_training_seconds"] == 16.0
    assert row["trial_seconds"] == 7.0
    assert row["not_training_seconds"] == 3.0
    assert row["not_training_or_evaluation_seconds"] == 2.0


@pytest.mark.long
@pytest.mark.ray
def test_driver_scale_measures_replayed_and_trained_sweeps() -> None:
    result = _json_of(
        "driver_scale.py", "--trials", "10", "--ray-trials", "0", "--trainings", "2",
        "--training-options=--dataset digits --group-sizes 4 --num-steps 2 --network tiny_cnn"
        " --max-index-records 100 --max-query-records 100",
    )  # fmt: skip
    replayed, trained = result["rows"]
    assert min(replayed["seconds_per_trial"], replayed["resume_seconds"], replayed["report_bytes"]) > 0
    assert 0 < trained["not_training_or_evaluation_seconds"] < trained["trial_seconds"]


def _assert_exact(check: Check) -> None:
    """Float32's rounding and no more: of one tensor, terms that cancel leave more of it than of the whole."""
    assert check.relative_error < 1e-5
    assert check.parameter_error < 1e-4


@pytest.mark.parametrize("group_size", [2, 16])
def test_our_step_is_exact(group_size: int) -> None:
    step = OurStep(_task(group_size=group_size, expected_batch_size=32), 192)
    step.take()
    _assert_exact(step.check())


@pytest.mark.parametrize("group_size", [2, 16])
@pytest.mark.parametrize("num_augmentations", [0, 1])
def test_our_step_of_pairs_is_exact(group_size: int, num_augmentations: int) -> None:
    task = _pair_task(group_size=group_size, expected_batch_size=32, num_augmentations=num_augmentations)
    step = OurStep(task, 128)
    step.take()  # adapters start at zero, where half of the gradients are
    _assert_exact(step.check())


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("num_groups_at_once", [1, 4])
def test_ordinary_step_has_the_gradient_without_clipping(task: Task, num_groups_at_once: int) -> None:
    """It sees the private step's own inputs, and sums the losses of its groups, whatever its microbatch."""
    step = OrdinaryStep(task, num_groups_at_once * task.group_size * task.num_views)
    groups = task.groups(np.random.default_rng(3))
    inputs = OurStep(task, 1_000).inputs(groups, 1)
    parameters = trainable_parameters(step.encoder)
    losses = task_of(step.config).objective(step.config, step.encoder)(inputs)
    expected = torch.autograd.grad(
        losses.sum() / step.config.mechanism.divisor, parameters, allow_unused=True
    )
    step.accumulate(groups, step=1)
    for parameter, gradient in zip(parameters, expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_channels_last_changes_no_gradient() -> None:
    totals = []
    for channels_last in (False, True):
        step = OrdinaryStep(_task(), 12, channels_last=channels_last)
        step.accumulate(step.task.groups(np.random.default_rng(3)), step=1)
        gradients = [parameter.grad for parameter in trainable_parameters(step.encoder)]
        totals.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]))
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-4, atol=1e-6)


def test_whole_batch_step_compares_pairs_across_groups() -> None:
    """Its gradient is another than that within groups: the yardstick is ordinary contrastive training."""
    totals = []
    for side in (WHOLE_BATCH, NON_PRIVATE):
        step = build_step(side, _pair_task(), 8)
        step.take()
        assert isinstance(step, OrdinaryStep)
        gradients = [parameter.grad for parameter in trainable_parameters(step.encoder)]
        totals.append(torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]))
    assert float((totals[0] - totals[1]).norm()) > 0.1 * float(totals[1].norm())


def test_parameter_error_sees_a_single_number() -> None:
    step = OurStep(_task(), 24)
    exact = torch.ones(num_trainable(step.run.encoder), dtype=torch.float64)
    actual = exact.float()
    actual[-1] = 0  # one of the 64 numbers of the last bias
    whole, parameter = relative_errors(step.run.encoder, actual, exact)
    assert parameter == pytest.approx(1 / 8)
    assert whole == pytest.approx(len(exact) ** -0.5)


def test_table_covers_every_model_batch_and_group_size() -> None:
    rows = {(t.model, t.expected_batch_size, t.group_size) for t in clipping.tasks(clipping.Options())}
    assert {size for model, _, size in rows if model == "resnet18"} == {2, 4, 8, 16, 64}
    assert {size for model, _, size in rows if model.startswith(("mae", "cap"))} == {1}
    assert {model for model, _, _ in rows} == set(clipping.BATCH_SIZES)


def test_network_has_one_kind_of_task() -> None:
    kinds = {"resnet18": ImageTask, "clip-tiny": PairTask, "ViT-B-32": PairTask, "cap-toy": RecordTask}
    assert {model: task_class(model) for model in kinds} == kinds
    with pytest.raises(ConfigError, match="resnet19"):
        task_class("resnet19")


def test_candidates_hold_different_groups() -> None:
    """With S = 16 a group has 48 views: 24 and 48 views at once are the same microbatch."""
    task = _task(group_size=16, expected_batch_size=32)
    options = clipping.Options(microbatches=(24, 48, 96, 192))
    assert clipping.candidates(options, task) == [48, 96]


def test_task_refuses_groups_larger_than_the_batch() -> None:
    with pytest.raises(ConfigError, match="group_size must be in"):
        _task(group_size=16)


def test_peak_memory_sees_what_was_freed() -> None:
    """And nothing of it after the peak is reset; a peak that only grows would measure the past."""
    size = 2**28
    assert harness.clear_peak()
    before = harness.memory_status("VmRSS")
    with mmap.mmap(-1, size) as held:  # fresh pages; an allocator might hand out ones already resident
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
    assert harness.memory_status("VmHWM") - before > 0.9 * size
    harness.clear_peak()
    assert harness.memory_status("VmHWM") - before < 0.9 * size


def test_result_files_carry_command_and_numbers(tmp_path: Path) -> None:
    facts = harness.about(device="cpu", threads=1)
    page = harness.Page(name="clipping", title="Title", text=clipping.PAGE)
    data, text = harness.write(page, facts, {"rows": [1]}, ["| a |"], tmp_path)
    assert json.loads(data.read_text())["rows"] == [1]
    assert facts["command"] in text.read_text()
    assert data.name == f"clipping-{facts['date']}.json"
