"""Every form of submission, on one real head of the test's own; the jobs are shared by the tests."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.sweeps.head import Head, wait_for
from tests.sweeps.support import run_script

pytestmark = [
    pytest.mark.ray,
    pytest.mark.ci,
    pytest.mark.skipif(sys.platform != "linux", reason="the test's head needs a second loopback address"),
]

SCRIPT = "sweeps/group_size.py"
FROM_COPY = ("--working-dir", ".", "--")
FAST = ("--tiny", "--noise-multiplier", "1", "--num-steps", "2", "--no-non-private")  # one trial, calibrated
NOT_UPLOADED = ("results/big.bin", "mlflow.db", "data/images.npz", "own.parquet")
EDIT = "\nprint('this is the edited copy', flush=True)\n"
SESSION = """
from sweeps.service.options.service import ServiceOptions
from sweeps.service.cluster.ray_session import ray_session
from trainers.config.training import PerformanceConfig
with ray_session(ServiceOptions(), PerformanceConfig()):
    pass
"""
# Appended to trainers/ray_worker.py: whichever copy a worker imports notes itself, or, being the
# installed one, notes nothing.
NOTE_IMPORT = """

def _train(trial, data, _train=_train):
    trial.checkpoint_folder.mkdir(parents=True, exist_ok=True)
    (trial.checkpoint_folder / "imported_from").write_text(__file__)
    return _train(trial, data)
"""


@pytest.fixture(scope="module")
def head():
    """A head in a copy of the repository that holds results, a database and data, too."""
    with Head() as head:
        _append(head.copy / "trainers/ray_worker.py", NOTE_IMPORT)
        for name in NOT_UPLOADED:
            (head.copy / name).parent.mkdir(exist_ok=True)
            (head.copy / name).write_bytes(bytes(5 * 2**20))
        yield head


@pytest.fixture(scope="module")
def tiny_job(head) -> tuple[int, str]:
    """Exit code and output of `ray job submit --working-dir . -- python SCRIPT --tiny`."""
    return head.submit_and_follow(*FROM_COPY, "python", SCRIPT, "--tiny")


@pytest.fixture(scope="module")
def tiny_sweep(head, tiny_job) -> Path:
    """The folder of that job's sweep."""
    return _sweep_folder(head, tiny_job[1])


@pytest.fixture(scope="module")
def resumed_job(head, tiny_sweep) -> dict[str, Any]:
    """The same sweep submitted again with `--resume`, after an edit."""
    edited = head.copy / "sweeps/service/running/sweep.py"
    before = edited.read_text()
    _append(edited, EDIT)
    try:
        submission = head.submit(*FROM_COPY, "python", SCRIPT, "--tiny", "--resume")
    finally:
        edited.write_text(before)
    return head.wait_until_ended(submission)


@pytest.fixture(scope="module")
def small_jobs(head) -> dict[str, dict[str, Any]]:
    """Jobs that train nothing, side by side."""
    commands = {
        "dry run": (SCRIPT, "--dry-run", "--tiny"),
        "storage in the copy": ("bash", "-c", f"{SCRIPT} --dry-run --tiny --storage $PWD/results"),
        "relative storage": (SCRIPT, "--dry-run", "--tiny", "--storage", "results"),
        "bad option": (SCRIPT, "--dry-run", "--tiny", "--dataset", "no-such-data"),
        "doctor": ("python", "-m", "sweeps.doctor"),
        "files": ("find", ".", "-type", "f"),
    }
    with ThreadPoolExecutor(2) as threads:
        submissions = list(threads.map(lambda command: head.submit(*FROM_COPY, *command), commands.values()))
    return dict(zip(commands, map(head.wait_until_ended, submissions), strict=True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("--working-dir", "."), id="working-dir"),
        pytest.param((), id="bare", marks=pytest.mark.long),
    ],
)
def stopped_job(request, head) -> dict[str, Any]:
    """The default sweep, by a script's path alone, stopped by `ray job stop` in its first trials."""
    submission = head.submit(*request.param, SCRIPT)
    wait_for(
        lambda: re.search(r"^sweep: .* \(0 of 18 trials done\)$", head.log(submission), re.MULTILINE),
        timeout_seconds=240,
        what="the start of the sweep",
    )
    folder = _sweep_folder(head, head.log(submission))
    wait_for(lambda: _imported_from(folder), timeout_seconds=120, what="the first trial")
    head.stop(submission)
    return head.wait_until_ended(submission)


@pytest.fixture(scope="module")
def plain_run(head) -> Callable[..., tuple[Path, set[str]]]:
    """Runs `python SCRIPT` beside the head; returns the sweep's folder and who joined the head."""

    def run(name: str, **environment: str) -> tuple[Path, set[str]]:
        storage, before = head.home / "plain", head.drivers()
        options = (*FAST, "--storage", str(storage), "--name", name)
        done = head.run("python", SCRIPT, *options, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return storage / "sweeps" / name, head.drivers() - before

    return run


def test_submitted_sweep_succeeds_with_a_figure(tiny_job, tiny_sweep):
    code, output = tiny_job
    assert code == 0, output
    assert (tiny_sweep / "group_size.png").stat().st_size > 10_000


def test_submitted_sweep_keeps_its_results_in_home_and_says_so(head, tiny_job, tiny_sweep):
    assert f"storage: {head.home / 'dpgcl-results'}\n" in tiny_job[1]
    assert len(list((tiny_sweep / "trials").glob("*.json"))) == 2


def test_workers_of_a_job_import_the_submitted_copy(tiny_sweep):
    copies = _imported_from(tiny_sweep)
    assert len(copies) == 2
    assert all("_ray_pkg_" in copy for copy in copies), copies


def test_resubmitted_job_runs_the_edited_copy(tiny_job, resumed_job):
    assert "this is the edited copy" in resumed_job["log"]
    assert "this is the edited copy" not in tiny_job[1]


def test_resubmitted_job_finds_its_finished_trials(tiny_sweep, resumed_job):
    assert resumed_job["status"] == "SUCCEEDED", resumed_job["log"]
    assert f"sweep: {tiny_sweep.name} (2 of 2 trials done)" in resumed_job["log"]
    assert "[2/2]" not in resumed_job["log"]


def test_script_is_submitted_with_options_without_python(small_jobs):
    job = small_jobs["dry run"]
    assert job["status"] == "SUCCEEDED", job["log"]
    assert "2 trials = " in job["log"]


def test_module_is_submitted_with_python(small_jobs):
    log = small_jobs["doctor"]["log"]
    assert re.search(rf"versions: Python \S+, ray {re.escape(ray.__version__)}, ", log), log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("storage in the copy", r"error: the storage folder /\S+/results is in the job's temporary copy"),
        ("relative storage", r"error: the storage folder /\S+/results is in the job's temporary copy"),
    ],
)
def test_job_refuses_storage_that_would_be_lost(small_jobs, name, message):
    job = small_jobs[name]
    assert job["status"] == "FAILED"
    assert re.search(message, job["log"]), job["log"]


def test_job_with_bad_input_ends_with_exit_code_two(small_jobs):
    job = small_jobs["bad option"]
    assert job["status"] == "FAILED"
    assert "exit code 2" in job["message"]
    assert "no-such-data" in job["log"]


def test_upload_is_the_code_without_results_databases_and_data(head, small_jobs):
    # Ray's own line may fall into the middle of a name: both write to one log.
    log = re.sub(r"Running entrypoint for job \w+: find \. -type f\n", "", small_jobs["files"]["log"])
    found = re.findall(r"^\./(.+)$", log, re.MULTILINE)
    uploaded = {name for name in found if "__pycache__" not in name}
    assert uploaded == head.files
    assert not uploaded & set(NOT_UPLOADED)


def test_script_path_alone_is_submitted_and_stopped(stopped_job):
    assert "\n18 trials = 6 points × 3 repeats; --dry-run lists them\n" in stopped_job["log"]
    assert stopped_job["status"] == "STOPPED"
    assert "stopped by SIGTERM; continue with ray job submit --working-dir . -- python " in stopped_job["log"]


def test_stopped_job_leaves_a_sweep_to_resume(head, stopped_job):
    folder = _sweep_folder(head, stopped_job["log"])
    options = ("--dry-run", "--resume", "--name", folder.name, "--storage", str(folder.parents[1]))
    code, out, err = run_script("group_size", *options)
    assert code == 0, out + err


def test_workers_of_a_job_by_script_path_import_the_copy_of_the_driver(head, stopped_job):
    bare = "working_dir" not in stopped_job["runtime_env"]
    expected = str(head.copy) if bare else "_ray_pkg_"
    copies = _imported_from(_sweep_folder(head, stopped_job["log"]))
    assert all(expected in copy for copy in copies), copies


def test_folder_with_large_data_is_refused_until_they_are_excluded(head):
    """The job server takes 100 MiB; docs/cluster.md quotes what it says, and what to do."""
    data, ignore = head.copy / "scans.bin", head.copy / ".rayignore"
    with data.open("wb") as file:
        file.truncate(101 * 2**20)  # sparse here; a package holds every byte
    try:
        code, told = head.submit_and_follow(*FROM_COPY, "true")
        assert code != 0
        page = " ".join((head.copy / "docs/cluster.md").read_text().split())
        assert (quoted := "Maximum request body size 104857600 exceeded") in told
        assert f"`{quoted}`" in page
        ignore.write_text(f"{data.name}\n")
        code, told = head.submit_and_follow(*FROM_COPY, "test", "!", "-e", data.name)
        assert code == 0, told
    finally:
        data.unlink()
        ignore.unlink(missing_ok=True)


@pytest.mark.long
def test_bare_job_from_another_folder_trains_with_the_copy_of_its_driver(head):
    script = f"cd / && {head.copy / SCRIPT} {' '.join(FAST)}"  # Ray puts the driver's folder on the path
    job = head.wait_until_ended(head.submit("--", "bash", "-c", script))
    assert job["status"] == "SUCCEEDED", job["log"]
    copies = _imported_from(_sweep_folder(head, job["log"]))
    assert [str(head.copy) in copy for copy in copies] == [True]


@pytest.mark.long
def test_plain_python_does_not_join_a_head_it_could_discover(head):
    before = head.drivers()
    head.run("python", "-c", "import ray; ray.init()")
    assert len(head.drivers() - before) == 1, "the head cannot be discovered: this test shows nothing"
    assert _joined_by(head, SESSION) == set()


def test_plain_python_joins_the_head_that_ray_address_names(head):
    assert len(_joined_by(head, SESSION, RAY_ADDRESS=head.gcs_address)) == 1


@pytest.mark.long
def test_sweep_of_plain_python_trains_with_its_own_copy_in_a_ray_of_its_own(head, plain_run):
    folder, joined = plain_run("private-ray")
    assert joined == set()
    assert [str(head.copy) in copy for copy in _imported_from(folder)] == [True]


@pytest.mark.long
def test_sweep_of_plain_python_trains_on_the_head_that_ray_address_names(head, plain_run):
    _, joined = plain_run("ray-address", RAY_ADDRESS=head.gcs_address)
    assert len(joined) == 1


def _joined_by(head: Head, code: str, **environment: str) -> set[str]:
    """Returns who has joined the head while `python -c CODE` ran beside it."""
    before = head.drivers()
    done = head.run("python", "-c", code, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return head.drivers() - before


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def _sweep_folder(head: Head, log: str) -> Path:
    """Returns the folder of the sweep that a job's log names."""
    name = re.search(r"^sweep: (\S+) \(", log, re.MULTILINE)
    assert name, log
    return head.home / "dpgcl-results" / "sweeps" / name[1]


def _imported_from(sweep: Path) -> list[str]:
    """Returns what the trials' processes have noted of the copy they run."""
    return [file.read_text() for file in sweep.glob("checkpoints/*/imported_from")]
