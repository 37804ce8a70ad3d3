"""What is measured on a GPU runs on a CPU at toy size, adds up over calls, and refuses what it cannot use.

The checks are tests marked `gpu` where they run on one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import bundle, device, packages, report, trainings
from benchmarks.gpu import slices as slices_
from benchmarks.gpu.bundle import Bundle, fill
from benchmarks.gpu.checks import CHECKS, at_most, passes_of_pairs_are_replayed
from benchmarks.gpu.packages import BundleError, Target
from benchmarks.gpu.running import RunOptions, all_slices, run
from benchmarks.gpu.slices import PARTS, Budget, CheckError, Results, Slice, read_heading, run_slices
from benchmarks.gpu.step_costs import Where
from benchmarks.steps import Task
from dpgcl_core.errors import ConfigError, DpgclError
from trainers.data.download import cache_folder

HEADING = {"version": "0123456789ab", "device_name": "some GPU", "toy": False}
CPU = {"device": "cpu", "toy": True, "threads": 1}


def _results(folder: Path, **changes: Any) -> Results:
    return Results(folder, HEADING | changes)


def _slice(name: str, ran: list[str], found: Callable[[], Mapping[str, Any]] = dict, **more: Any) -> Slice:
    def work(_: object) -> Mapping[str, Any]:
        ran.append(name)
        return found()

    return Slice(part="b", name=name, run=work, **more)


def _fails() -> Mapping[str, Any]:
    raise CheckError("it does not hold")


UNLIMITED = Budget(minutes=None)

# What adds up over calls


def test_finished_slices_are_not_run_again(tmp_path: Path) -> None:
    ran: list[str] = []
    work = [_slice("first", ran), _slice("second", ran)]
    assert run_slices(work[:1], _results(tmp_path), UNLIMITED, again=False)
    assert run_slices(work, _results(tmp_path), UNLIMITED, again=False)
    assert ran == ["first", "second"]


def test_a_stopped_call_loses_the_slice_that_it_was_at_alone(tmp_path: Path) -> None:
    def stopped() -> Mapping[str, Any]:
        raise KeyboardInterrupt

    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_slices(
            [_slice("first", ran), _slice("second", ran, stopped)], _results(tmp_path), UNLIMITED, again=False
        )
    assert list(_results(tmp_path).rows("b")) == ["first"]


def test_only_slices_that_are_named_are_run(tmp_path: Path) -> None:
    options = RunOptions(output=tmp_path, device="cpu", toy=True, threads=1, part="a", only=("noise",))
    assert run(options) == 0
    names = set(Results(tmp_path, read_heading(tmp_path)).rows("a"))
    assert names == {each.name for each in all_slices(options) if "noise" in each.name and each.part == "a"}
    assert names


def test_no_slice_begins_that_might_not_end_in_time(tmp_path: Path) -> None:
    now = [100.0]

    def takes_four_minutes() -> Mapping[str, Any]:
        now[0] += 240
        return {}

    budget, ran = Budget(minutes=9, clock=lambda: now[0], started=100.0), list[str]()
    work = [_slice(name, ran, takes_four_minutes, minutes=4.0) for name in ("first", "second", "third")]
    run_slices(work, _results(tmp_path), budget, again=False)
    assert ran == ["first", "second"]


def test_slices_alike_are_expected_to_take_as_long(tmp_path: Path) -> None:
    """After three minutes of nine another one of two minutes is begun, and none that may take eight."""
    results, ran = _results(tmp_path), list[str]()
    results.add("b", {"part": "b", "name": "first", "like": "a study", "found": {}, "seconds": 120.0})
    budget = Budget(minutes=9, clock=lambda: 180.0)
    run_slices([_slice("second", ran, like="a study")], results, budget, again=False)
    run_slices([_slice("third", ran, like="another study")], results, budget, again=False)
    assert ran == ["second"]


def test_a_failed_slice_is_a_row_and_is_run_again_where_that_is_asked_for(tmp_path: Path) -> None:
    ran: list[str] = []
    work = [_slice("first", ran, _fails), _slice("second", ran)]
    assert not run_slices(work, _results(tmp_path), UNLIMITED, again=False)
    assert _results(tmp_path).rows("b")["first"]["failed"] == "CheckError: it does not hold"
    assert not run_slices(work, _results(tmp_path), UNLIMITED, again=False)
    assert ran == ["first", "second"]
    assert run_slices([_slice("first", ran)], _results(tmp_path), UNLIMITED, again=True)
    assert ran == ["first", "second", "first"]


def test_a_slice_whose_library_is_missing_is_named_and_tried_again(tmp_path: Path) -> None:
    ran: list[str] = []
    run_slices(
        [_slice("first", ran, libraries=("no_such_library",))], _results(tmp_path), UNLIMITED, again=False
    )
    assert "no_such_library" in _results(tmp_path).rows("b")["first"]["skipped"]
    run_slices([_slice("first", ran, libraries=())], _results(tmp_path), UNLIMITED, again=False)
    assert ran == ["first"]


def test_every_slice_has_a_name_of_its_own_and_fits_into_a_call() -> None:
    for toy in (False, True):
        options = RunOptions(device="cpu", toy=toy, threads=1, limit_minutes=6)
        names = [(each.part, each.name) for each in all_slices(options)]
        assert len(set(names)) == len(names)
        assert {part for part, _ in names} == set(PARTS)
        assert all(each.minutes <= 5 for each in all_slices(options))


def test_the_parts_are_of_the_sizes_that_are_promised() -> None:
    options = RunOptions(device="cpu", toy=True, threads=1)
    real = [each.name for each in all_slices(dataclasses.replace(options, toy=False))]
    for batch in (64, 1024, 8192, 65536):
        assert f"resnet18, float32, B = {batch}, S = 16" in real
    assert "resnet18, bfloat16, B = 65536, S = 256" in real
    assert "vit_b_32_lora, bfloat16, B = 8192, S = 16" in real
    assert "Fashion-MNIST, DP-GCL, records sampled, ε = 10, public start, seed 12" in real
    (paper,) = (each for each in trainings.studies(toy=False) if each.part == "c")
    mechanism = paper.options.mechanism
    assert (mechanism.expected_batch_size, mechanism.num_steps, mechanism.group_size) == (2048, 1200, 16)
    assert (paper.options.network.name, paper.options.objective.num_augmentations) == ("resnet18", 1)
    assert paper.options.evaluation.max_index_records is None


def test_steps_are_cut_to_what_fits_into_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    (paper, *_) = trainings.studies(toy=False)
    work = trainings._Work(paper, Where(device="cpu", threads=1, toy=False), 8.0)
    for seconds, steps in ((0.1, 1200), (0.5, 672)):
        monkeypatch.setattr(work.__class__, "_step_seconds", lambda *_, s=seconds: s)
        found = work.pace({})
        assert (found["num_steps"], found["wanted_steps"]) == (steps, 1200)
    assert set(found["step_seconds"]) == {"dp_gcl groups", "dp_gcl records", "dp_clip", "non_private"}
    monkeypatch.setattr(work.__class__, "_step_seconds", lambda *_: 1000.0)
    with pytest.raises(ConfigError, match="none fits"):
        work.pace({})


# What is refused, in one line each


def _refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What the command says when it ends with exit code 2."""
    from benchmarks.gpu import __main__ as command
    from dpgcl_core.errors import exit_on_bad_input

    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *words])
    with pytest.raises(SystemExit) as end:
        exit_on_bad_input(command.main)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.count("\n") == 1
    return said


def test_no_gpu_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "a GPU is needed" in _refused(capsys, monkeypatch, "--output", str(tmp_path))
    assert "--toy" in _refused(capsys, monkeypatch, "--device", "cpu", "--output", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "free_memory", lambda _: 2**20)
    words = ("--device", "cpu", "--toy", "--output", str(tmp_path))
    assert "the smallest microbatch" in _refused(capsys, monkeypatch, *words)


def test_results_of_another_device_or_version_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--device", "cpu", "--toy", "--output", str(tmp_path))
    own = {"version": packages.version_of(packages.ROOT), "toy": True, **device.facts("cpu")}
    for name, value, what in (
        ("device_name", "another GPU", "another device"),
        ("version", "0123456789ab", "another version"),
        ("toy", False, "another size"),
    ):
        (tmp_path / slices_.HEADING).write_text(json.dumps(own | {name: value}))
        assert what in _refused(capsys, monkeypatch, *words)
    (tmp_path / slices_.HEADING).write_text("{")
    assert "must hold results" in _refused(capsys, monkeypatch, *words)


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--part" in _refused(capsys, monkeypatch, "--party", "a")
    with pytest.raises(ConfigError, match="limit_minutes must be more than 1"):
        RunOptions(limit_minutes=1)
    with pytest.raises(ConfigError, match="threads"):
        RunOptions(threads=0)
    with pytest.raises(ConfigError, match="python_version"):
        Bundle(python_version="3")
    assert "must hold results" in _refused(capsys, monkeypatch, "report", "/nowhere")


def test_missing_data_end_the_call_and_leave_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def without_its_library(*_: object, **__: object) -> None:
        raise ImportError

    monkeypatch.setattr(trainings, "load_dataset", without_its_library)
    (paper, *_) = trainings.studies(toy=False)
    paper = dataclasses.replace(paper, dataset="another-mnist")
    work = trainings._Work(paper, Where(device="cpu", threads=1, toy=False), 8.0)
    with pytest.raises(DpgclError, match="DPGCL_DATA"):
        run_slices([Slice(part="c", name="pace", run=work.pace)], _results(tmp_path), UNLIMITED, again=False)
    assert not _results(tmp_path).rows("c")


# The bundle


def _described(root: Path, target: Target) -> Path:
    (root / "dpgcl_core").mkdir(parents=True)
    (root / "dpgcl_core" / "module.py").write_text("A = 1\n")
    packages.describe(root, target)
    return root


def test_bundle_of_another_version_is_refused(tmp_path: Path) -> None:
    root = _described(tmp_path, Target.here())
    packages.check(root)
    (root / "dpgcl_core" / "module.py").write_text("A = 2\n")
    with pytest.raises(BundleError, match="another version"):
        packages.check(root)


def test_bundle_for_another_python_is_refused(tmp_path: Path) -> None:
    root = _described(tmp_path, Target(python="2.7", platform="linux-x86_64"))
    with pytest.raises(BundleError, match=r"Python 2\.7"):
        packages.check(root)


def test_damaged_bundle_is_refused(tmp_path: Path) -> None:
    root = _described(tmp_path, Target.here())
    (root / packages.ARCHIVE).write_bytes(b"no archive")
    with pytest.raises(BundleError, match="cannot be unpacked"):
        packages.add_packages(root)
    assert not (root / packages.PACKAGES).exists()
    (root / packages.DESCRIPTION).write_text("{}")
    with pytest.raises(BundleError, match="cannot be read"):
        packages.check(root)


def test_bundle_fills_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    with pytest.raises(ConfigError, match="something else"):
        fill(Bundle(output=tmp_path))
    assert (tmp_path / "kept").exists()


def test_bundle_leaves_tests_and_what_is_never_imported_behind() -> None:
    for place in ("scipy/stats/tests/test_stats.py", "scipy/odr/_odr.so", "sqlalchemy/util/x.so", "a/b.pxd"):
        assert bundle._LEFT_OUT.search(place)
    for place in (
        "scipy/stats/_stats.so",
        "scipy/io/__init__.py",
        "sqlalchemy/util/x.py",
        "ftfy/__init__.py",
    ):
        assert not bundle._LEFT_OUT.search(place)


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle, and one with nothing but torch, numpy and what they need."""
    folder = tmp_path_factory.mktemp("isolated")
    with pytest.MonkeyPatch.context() as patch:  # weaker and quicker than what is copied
        patch.setattr(bundle, "_FILTERS", [{"id": 0x21, "preset": 0}])
        patch.setattr(bundle, "MOST_BYTES", 2**30)
        fill(Bundle(output=folder / "bundle"))
    (folder / "torch").mkdir()
    for name in _needed("torch", "numpy"):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or () if file.parts[0] != ".."}:
            found = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (folder / "torch" / top).exists():
                (folder / "torch" / top).symlink_to(found)
    return folder


def _needed(*names: str) -> set[str]:
    """These distributions and what is installed of what they need."""
    found: set[str] = set()
    left = [*names]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra" not in need]  # type: ignore[index]
    return found


_ALONE = """
import runpy, sys
sys.path += sys.argv.pop(1).split(":")
sys.argv[0] = "benchmarks.gpu"
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def _run_alone(folder: Path, *words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The bundle's command where Python has its own library, the bundle and torch, and nothing else."""
    path = f"{folder / 'bundle'}:{folder / 'torch'}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", _ALONE, path, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "DPGCL_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        timeout=500,
    )


@pytest.mark.ci
def test_bundle_and_torch_are_enough(isolated: Path, tmp_path: Path) -> None:
    """All parts run at toy size, those of missing libraries are named, and a second call finds all done."""
    words = ("--device", "cpu", "--toy", "--threads", "1", "--output", str(tmp_path / "results"))
    done = _run_alone(isolated, *words, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    rows = [row for part in PARTS for row in slices_.read_rows(tmp_path / "results", part).values()]
    assert {row["part"] for row in rows if "found" in row} == {"a", "b", "c", "d"}
    skipped = {row["name"].split(",")[0] for row in rows if "skipped" in row}
    assert skipped == {"clip-tiny", "captioner", "half of the words are new", "passes of pairs are replayed"}
    again = _run_alone(isolated, *words, cache=tmp_path / "cache")
    assert again.returncode == 0
    begun = [line for line in again.stderr.splitlines() if line.startswith("part a, ")]
    assert begun == ["part a, passes of pairs are replayed, clip-tiny"]  # for its libraries are still missing
    told = _run_alone(isolated, "report", str(tmp_path / "results"), cache=tmp_path / "cache")
    assert told.returncode == 0
    assert "Fashion-MNIST" in told.stdout
    assert "vl-convert is not installed" in told.stderr


@pytest.mark.ci
def test_command_of_the_bundle_refuses_another_version(isolated: Path, tmp_path: Path) -> None:
    extra = isolated / "bundle" / "benchmarks" / "extra.py"
    extra.write_text("")
    try:
        done = _run_alone(isolated, "--device", "cpu", "--toy", cache=tmp_path)
    finally:
        extra.unlink()
    assert done.returncode == 2
    assert done.stderr.startswith("error: the bundle")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_bundle_is_small_enough(tmp_path: Path) -> None:
    assert fill(Bundle(output=tmp_path / "bundle")) == 0


# The checks


def _task(device: str, model: str = "small_cnn") -> Task:
    return Task(model=model, group_size=4, expected_batch_size=32, threads=1, device=device)


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


# The report


def _step_row(time: float) -> dict[str, Any]:
    side = {"seconds": 1.0, "all_seconds": [1.0], "memory_bytes": 2**30, "views_per_microbatch": 96}
    ratio = {"time": time, "time_range": [time, time], "memory": 1.5}
    found = {"model": "resnet18", "precision": "float32", "expected_batch_size": 64, "group_size": 2}
    found |= {"sides": {"ours": side, "non_private": side}, "over": {"non_private": ratio}}
    return {"part": "b", "name": "resnet18", "found": found, "seconds": 3.0}


def _training_row(seed: int, accuracy: float) -> dict[str, Any]:
    found = {"study": "Fashion-MNIST", "candidate": "DP-GCL", "seed": seed, "num_steps": 800}
    found |= {"wanted_steps": 1200, "metrics": {"knn_accuracy": accuracy, "epsilon": 0.99}}
    return {"part": "c", "name": f"DP-GCL {seed}", "found": found, "seconds": 3.0}


def test_report_is_of_the_json_alone(tmp_path: Path) -> None:
    results = _results(
        tmp_path, driver="580.1", torch="2.9", max_sm_clock_mhz=1980.0, power_limit_watts=700.0
    )
    results.add("b", _step_row(1.25))
    for seed, accuracy in ((10, 0.70), (11, 0.80)):
        results.add("c", _training_row(seed, accuracy))
    results.add("d", {"part": "d", "name": "captioner", "skipped": "open_clip cannot be imported here"})
    results.add("e", {"part": "e", "name": "ViT", "failed": "OutOfMemoryError: too large"})
    parts = {part: list(slices_.read_rows(tmp_path, part).values()) for part in PARTS}
    page = report.page_of(slices_.read_heading(tmp_path), parts)
    for text in (
        "# some GPU", "driver 580.1", "torch 2.9", "1980 MHz", "power limit 700 W", "version 0123456789ab",
        "| resnet18 | float32 | 64 | 2 |", "**1.25**", "T = 800, cut from 1200", "75.0 ± 5.0",
        "captioner: skipped, open_clip", "ViT: failed, OutOfMemoryError",
    ):  # fmt: skip
        assert text in page


@pytest.mark.ci
def test_report_writes_page_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _results(tmp_path).add("b", _step_row(1.25))
    assert report.write_report(report.Report(tmp_path)) == 0
    assert (tmp_path / report.PAGE).read_text() in capsys.readouterr().out
    assert (tmp_path / report.FIGURE).read_bytes().startswith(b"\x89PNG")


def test_figure_has_every_ratio() -> None:
    points = report.points_of([_step_row(1.25), _step_row(1.5), {"part": "b", "name": "x", "failed": "y"}])
    assert [point["time"] for point in points] == [1.25, 1.5]
    assert report.specification(points)["data"]["values"] == points


@pytest.mark.ci
def test_every_part_runs_with_all_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of open_clip and peft, too, and from public starts that are made on the device."""
    monkeypatch.setenv("DPGCL_CACHE", str(tmp_path / "cache"))
    options = RunOptions(device="cpu", toy=True, threads=1, output=tmp_path / "results", part="e")
    assert run(options) == 0
    rows = slices_.read_rows(options.output, "e")
    assert len(rows) == 6
    assert all("found" in row for row in rows.values())
    untrained = next(row for name, row in rows.items() if "not trained" in name)
    assert untrained["found"]["metrics"]["num_steps_done"] == 0
    assert list((cache_folder() / "starts").glob("clip-tiny-*-common-*"))
