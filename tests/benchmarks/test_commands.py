"""Every benchmark runs and says what it promises. What it measures is not tested: a time is no property."""

from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import clip_step, clipping, growth, harness, logit_dp, scoring, sweep_overhead, workers
from benchmarks.engines import ENGINES, PER_VIEW, EngineStep
from benchmarks.pair_steps import IN_GROUPS, ORDINARY, WHOLE_BATCH, OrdinaryPairStep, PairTask, build_step
from benchmarks.record_steps import OrdinaryRecordStep, RecordTask
from benchmarks.steps import (
    Check,
    OrdinaryStep,
    OurStep,
    Task,
    exact_clipped_sum,
    relative_errors,
    views_of,
)
from benchmarks.trial_marks import marks_file
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.image_text import image_text_group_loss
from sweeps.service.storage.folder import SweepFolder
from trainers.tasks import PAIRS
from trainers.tasks.images import group_losses_of

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

ROOT = Path(__file__).resolve().parents[2]


def _task(**changes: Any) -> Task:
    settings: dict[str, Any] = {"model": "small_cnn", "group_size": 2, "expected_batch_size": 8, "threads": 1}
    return Task(**(settings | changes))


def _pair_task(**changes: Any) -> PairTask:
    settings: dict[str, Any] = {"model": "clip-tiny", "group_size": 2, "expected_batch_size": 8, "threads": 1}
    return PairTask(**(settings | changes))


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


def test_clipping_command_prints_one_row() -> None:
    """The names that readers of the row rely on."""
    row = _json_of(
        "clipping.py", "--model", "small_cnn", "--group-size", "2", "--expected-batch-size", "8",
        "--threads", "1", "--repeats", "1", "--microbatches", "24",
    )  # fmt: skip
    assert min(row["time_ratio"], row["memory_ratio"]) > 0
    assert row["time_ratio"] == pytest.approx(row["ours_seconds"] / row["non_private_seconds"])
    assert row["memory_ratio"] == pytest.approx(row["ours_memory_bytes"] / row["non_private_memory_bytes"])
    assert row["relative_error"] < 1e-5
    assert row["paths"]
    assert {"device", "torch", "threads", "command", "ours_views_per_microbatch"} <= set(row)
    assert set(row["sides"]) == {"ours", "non_private"}


def test_clipping_row_has_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those asked for are measured or say why not; ratios are over non-private."""
    monkeypatch.setattr(clipping, "peak_bytes", lambda engine, *_, **__: 300 if engine == "loop" else 100)
    options = clipping.Options(microbatches=(24,), repeats=1, threads=1, max_gigabytes=1e-3)
    row = clipping.measure(options, _task(), ["loop", "opacus"])
    assert row["sides"]["loop"]["memory_ratio"] == 3
    assert "GB" in row["sides"]["opacus"]["not_run"]
    assert "not run" in clipping.table([row])


def test_clipping_command_refuses_json_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["clipping.py", "--model", "small_cnn", "--json"])
    with pytest.raises(ConfigError, match="group_size"):
        clipping.main()


@pytest.mark.long
def test_clip_step_command_measures_time_and_memory() -> None:
    """The names that readers of the rows rely on; the next test has them, but for the memory."""
    result = _json_of(
        "clip_step.py", "--model", "clip-tiny", "--group-sizes", "2", "--augmentations", "0",
        "--expected-batch-size", "8", "--threads", "1", "--repeats", "1",
    )  # fmt: skip
    (row,) = result["rows"]
    ours = row["sides"]["ours"]
    for side in ORDINARY:
        plain = row["sides"][side]
        assert row[f"time_over_{side}"] == pytest.approx(ours["seconds"] / plain["seconds"])
        assert row[f"memory_over_{side}"] == pytest.approx(ours["memory_bytes"] / plain["memory_bytes"])
    assert row["relative_error"] < 1e-5
    assert {"device", "torch", "threads", "command"} <= set(result)


def test_clip_step_covers_every_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = "--model clip-tiny --group-sizes 2 4 --augmentations 0 1 --expected-batch-size 8 --threads 1"
    arguments += f" --repeats 1 --no-measure-memory --output {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["clip_step.py", *arguments.split()])
    assert clip_step.main() == 0
    (data,) = tmp_path.glob("*.json")
    rows = json.loads(data.read_text())["rows"]
    assert [(row["num_augmentations"], row["group_size"]) for row in rows] == [(0, 2), (0, 4), (1, 2), (1, 4)]
    assert all(row[f"memory_over_{side}"] is None for row in rows for side in ORDINARY)
    assert clip_step.table(rows) in capsys.readouterr().out


def test_clip_step_ratio_is_the_median_of_the_rounds() -> None:
    """A round that all sides spend waiting for another program moves no ratio."""
    plain = {"all_seconds": [1.0, 10.0, 2.0], "memory_bytes": 50}
    sides = {side: plain for side in ORDINARY} | {
        "ours": {"all_seconds": [1.2, 12.0, 9.0], "memory_bytes": 60}
    }
    found = clip_step._ratios(sides)
    assert found["time_over_whole_batch"] == pytest.approx(1.2)
    assert found["time_over_whole_batch_range"] == pytest.approx([1.2, 4.5])
    assert found["memory_over_in_groups"] == pytest.approx(1.2)


@pytest.mark.parametrize("model", ["mae-toy", pytest.param("cap-toy", marks=pytest.mark.long)])
def test_record_step_command_measures_time_and_memory(model: str) -> None:
    result = _json_of(
        "record_step.py", "--models", model, "--expected-batch-sizes", "6", "--microbatches", "2", "4",
        "--threads", "1", "--repeats", "1",
    )  # fmt: skip
    (row,) = result["rows"]
    ours, plain = row["sides"]["ours"], row["sides"]["non_private"]
    assert row["time_ratio"] == pytest.approx(ours["seconds"] / plain["seconds"])
    assert row["memory_ratio"] == pytest.approx(ours["memory_bytes"] / plain["memory_bytes"])
    assert row["relative_error"] < 1e-5
    assert "exact loop" not in row["num_layers_by_path"]


def test_ordinary_step_of_records_takes_the_mean_loss() -> None:
    """Both microbatches add up to the gradient of one pass."""
    task = RecordTask(model="mae-toy", expected_batch_size=4, threads=1)
    groups, found = task.groups(np.random.default_rng(0)), []
    for size in (4, 2):
        step = OrdinaryRecordStep(task, size)
        step.accumulate(groups, step=1)
        found.append(torch.cat([p.grad.flatten() for p in step.network.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert float(found[0].norm()) > 0


def test_growth_prints_both_axes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model tiny_cnn --batch-sizes 8 16 --group-sizes 2 --group-size 2 --threads 1"
    arguments += " --expected-batch-size 8 --repeats 1 --json"
    monkeypatch.setattr(sys, "argv", ["growth.py", *arguments.split()])
    monkeypatch.setattr(growth, "peak_bytes", lambda _, task, *__: task.expected_batch_size)
    assert growth.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["expected_batch_size"] for row in result["by_batch_size"]] == [8, 16]
    assert [row["memory_bytes_over_smallest"] for row in result["by_batch_size"]] == [1, 2]
    assert result["by_batch_size"][0]["seconds_per_record_over_smallest"] == 1
    assert len(result["by_group_size"]) == 1


def test_workers_compares_two_arrangements(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--models tiny_cnn --expected-batch-size 16 --group-size 2 --rounds 1 --steps 1 --threads 1"
    monkeypatch.setattr(sys, "argv", ["workers.py", *arguments.split(), "--json"])
    assert workers.main() == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["threads_of_one_worker"], row["num_workers"], row["threads_per_worker"]) == (1, 2, 1)
    assert row["time_ratio"] == pytest.approx(row["many_workers_seconds"] / row["one_worker_seconds"])


def test_logit_dp_prints_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--model tiny_cnn --dim 8 --step-dims 8 --two-tower-records 4 --shared-records 3"
    arguments += " --step-records 16 --reference-rows 2 --repeats 1 --json"
    monkeypatch.setattr(sys, "argv", ["logit_dp.py", *arguments.split()])
    assert logit_dp.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["towers"], row["num_records"]) for row in result["pairs"]] == [(2, 4), (1, 3)]
    assert max(max(row["max_norm_error"], row["sum_error"]) for row in result["pairs"]) < 1e-4
    (step,) = result["steps"]
    seconds = step["processor_seconds"]
    assert step["ratios"]["two towers, exact"] == seconds["two towers, exact"] / seconds["dp_gcl"]


def test_scoring_prints_both_phases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides see the same features and answer alike: neither is fast for doing less."""
    arguments = "--num-index 600 --num-queries 100 --dims 8 --json"
    monkeypatch.setattr(sys, "argv", ["scoring.py", *arguments.split()])
    monkeypatch.setattr(harness, "number_of_fresh_process", lambda *_, **__: 1)
    assert scoring.main() == 0
    rows = {row["phase"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == {"k-NN", "linear probe"}
    assert rows["k-NN"]["now"]["accuracy"] == rows["k-NN"]["before"]["accuracy"]
    probe = rows["linear probe"]
    assert probe["now"]["accuracy"] == pytest.approx(probe["before"]["accuracy"], abs=0.03)


def test_phases_of_a_trial_add_up_to_its_seconds(tmp_path: Path) -> None:
    """Of what a sweep would have noted: the first trial's worker imports, the second one's has done so."""
    heard = sweep_overhead._Heard(2)
    heard.folder, heard.started = SweepFolder(tmp_path), 100.0
    for number, name in enumerate(("first", "second")):
        at = 100.0 + 20 * number
        file = marks_file(heard.folder.checkpoint_folder(name), name)
        file.parent.mkdir(parents=True, exist_ok=True)
        phases = ("function", "worker", "imported", "data", "trained", "fitted")
        times = [at + 2 * step for step in range(1, 7)]
        marks: list[dict[str, Any]] = [
            {"phase": phase, "time": time} for phase, time in zip(phases, times, strict=True)
        ]
        marks[1] |= {"import_seconds": 1.0, "import_started": at + 2.5 if number == 0 else 0.0}
        marks[4] |= {"checkpoint_seconds": 0.25, "all_evaluation_seconds": 0.5, "accounting_seconds": 0.125}
        file.write_text("\n".join(map(json.dumps, marks)))
        heard.metrics[name] = {"train_seconds": 1.0}
        heard.arrived[name], heard.left[name] = at + 15, at + 19
    first, second = sweep_overhead._rows(heard)
    for row, seconds, imports in ((first, 19, 3), (second, 20, 2)):
        assert row["seconds"] == sum(row[phase] for phase in sweep_overhead.PHASES) == seconds
        assert (row["imports"], row["training steps"], row["checkpoints"]) == (imports, 0.75, 0.25)
        assert row["not_training_seconds"] == seconds - 0.75


@pytest.mark.long
@pytest.mark.ray
def test_sweep_overhead_phases_add_up_to_the_trial() -> None:
    result = _json_of(
        "sweep_overhead.py", "--modes", "local", "--trials", "2", "--num-steps", "2",
        "--sweep-options=--max-index-records 100 --max-query-records 100 --network tiny_cnn",
    )  # fmt: skip
    (mode,) = result["modes"]
    assert mode["empty_seconds"] > 0
    for row in mode["trials"]:
        phases = {name: row[name] for name in mode["phases"]}
        assert sum(phases.values()) == pytest.approx(row["seconds"])
        assert min(phases.values()) >= 0


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


@pytest.mark.parametrize("whole_batch", [False, True])
def test_ordinary_step_of_pairs_has_the_gradient_without_clipping(whole_batch: bool) -> None:
    """It sees the private step's own views, and its loss among all pairs or within the groups."""
    task = _pair_task()
    step = OrdinaryPairStep(task, 8, whole_batch=whole_batch)
    groups = task.groups(np.random.default_rng(3)).reshape(1 if whole_batch else -1, 8 if whole_batch else 2)
    config, parameters = step.config, trainable_parameters(step.encoder)
    views = PAIRS.inputs(config, step.encoder, step.records, groups, step=1, num_augmentations=1)
    embed = PAIRS.embed(step.encoder)
    losses = image_text_group_loss(embed(views), temperature=config.temperature)
    expected = torch.autograd.grad(losses.sum() / config.mechanism.divisor, parameters)
    step.accumulate(groups, step=1)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_whole_batch_step_compares_pairs_across_groups() -> None:
    """Its gradient is another than that within groups: the yardstick is ordinary contrastive training."""
    totals = []
    for side in (WHOLE_BATCH, IN_GROUPS):
        step = build_step(side, _pair_task(), 8)
        step.take()
        assert isinstance(step, OrdinaryPairStep)
        totals.append(torch.cat([p.grad.flatten() for p in trainable_parameters(step.encoder)]))
    assert float((totals[0] - totals[1]).norm()) > 0.1 * float(totals[1].norm())


def test_parameter_error_sees_a_single_number() -> None:
    step = OurStep(_task(), 24)
    exact = torch.ones(len(step.run.total), dtype=torch.float64)
    actual = exact.float()
    actual[-1] = 0  # one of the 64 numbers of the last bias
    whole, parameter = relative_errors(step.run.encoder, actual, exact)
    assert parameter == pytest.approx(1 / 8)
    assert whole == pytest.approx(len(exact) ** -0.5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_non_private_step_has_the_gradient_without_clipping(channels_last: bool) -> None:
    """The ordinary step of the benchmark computes the mean group loss's gradient, whatever its microbatch."""
    task = _task(expected_batch_size=16)
    step = OrdinaryStep(task, 36, channels_last=channels_last)
    groups = task.groups(np.random.default_rng(3))
    views = views_of(step.records, groups, step.config, step=1, device="cpu")
    parameters = trainable_parameters(step.encoder)
    expected = torch.zeros(sum(p.numel() for p in parameters))
    group_losses = group_losses_of(step.encoder, step.config.temperature)
    GroupClipper(l2_clip_norm=math.inf).add_clipped_sum(expected, step.encoder, group_losses, views)
    step.accumulate(groups, step=1)
    actual = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(actual, expected / len(groups), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "opacus_ghost"])
def test_other_engines_compute_the_same_sum(engine: str) -> None:
    """Opacus's ghost norms clip each view, and say so; all others have to agree with the exact sum."""
    step = EngineStep(engine, _task(), 24)
    views = step.views(step.task.groups(np.random.default_rng(3)))
    plain = OrdinaryStep(step.task, 24).encoder  # the same weights, without an engine's hooks
    exact = exact_clipped_sum(plain, group_losses_of(plain, step.config.temperature), views, 1.0)
    actual = torch.zeros(len(exact))
    step.add(actual, views)
    assert float((actual.double() - exact).norm() / exact.norm()) < 3e-4  # the margin below C is 1e-4


def test_opacus_ghost_clips_every_view() -> None:
    """No view contributes more than C, so the sum of n views is at most n·C long: not the groups' bound."""
    step = EngineStep("opacus_ghost", _task(), 24)
    views = step.views(step.task.groups(np.random.default_rng(3)))
    total = torch.zeros_like(step.total)
    step.add(total, views)
    assert 0 < float(total.norm()) <= views.shape[:3].numel()
    assert PER_VIEW in clipping.PAGE


def test_infeasible_engine_says_why() -> None:
    options = clipping.Options(max_gigabytes=1e-6)
    reason = clipping.infeasible("opacus", options, _task(), num_parameters=10**6)
    assert "GB" in reason


def test_table_covers_every_model_batch_and_group_size() -> None:
    found = {(t.model, t.expected_batch_size, t.group_size) for t in clipping.tasks(clipping.Options())}
    assert {size for model, _, size in found if model == "resnet18"} == {2, 4, 8, 16, 64}
    assert {model for model, _, _ in found} == {
        "small_cnn",
        "tiny_cnn",
        "wide_cnn",
        "resnet18",
        "vit_b_32_lora",
    }


def test_candidates_hold_different_groups() -> None:
    """With S = 16 a group has 48 views: 24 and 48 views at once are the same microbatch."""
    task = _task(group_size=16, expected_batch_size=32)
    options = clipping.Options(microbatches=(24, 48, 96, 192))
    assert clipping.candidates("ours", options, task) == [48, 96]


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
    result = {"model": "small_cnn", "by_batch_size": [], "by_group_size": []}
    page = harness.Page(name="growth", title="Title", text=growth.PAGE)
    data, text = harness.write(page, facts, result, ["| a |"], tmp_path)
    assert json.loads(data.read_text())["model"] == "small_cnn"
    assert facts["command"] in text.read_text()
    assert data.name == f"growth-{facts['date']}.json"
