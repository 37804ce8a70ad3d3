"""Storage: where a sweep may keep what must last, whose folder it is, and who holds it."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpgcl_core.errors import StorageError, TrackingError, exit_on_bad_input
from sweeps.group_size import points
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.privacy.sweep_statement import write_statement
from sweeps.service.running import prepare, trial_policy
from sweeps.service.running.search_policy import write_suggestion
from sweeps.service.storage.calibrations import calibrations
from sweeps.service.storage.log import SweepLog
from sweeps.service.storage.mlflow_location import tracking_address
from sweeps.service.storage.sweep_folder import Repetition, Starts, SweepFolder, config_hash, find_folder
from sweeps.service.storage.sweep_lock import check_not_running, hold_sweep
from tests.sweeps.support import contents, options, run_script, run_sweep, write_npz
from trainers.config.training import PerformanceConfig
from trainers.files import storage
from trainers.files.checkpoint import Checkpoint, Grant, write_grant
from trainers.files.launch_record import Command
from trainers.files.oversight import Oversight, Question
from trainers.files.progress import ProgressWriter
from trainers.files.storage import check_writable, storage_root

QUICK = ("--tiny", "--noise-multiplier", "1")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process as the entrypoint of a submitted job; returns the throw-away copy of the code."""
    copy = tmp_path / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    copy.mkdir(parents=True)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(storage, "CODE_ROOT", copy)
    return copy


def sweep(root: Path, *arguments: str) -> int:
    chosen = options(*QUICK, "--storage", str(root), *arguments)
    return run_sweep("group-size", chosen, points(chosen), lambda *_: [])


def create(root: Path, name: str, fingerprint: str = "mine") -> SweepFolder:
    folder = SweepFolder(root / "sweeps" / name)
    folder.create({"fingerprint": fingerprint})
    return folder


def find(root: Path, name: str | None, *, resume: bool = False, fingerprint: str = "mine") -> SweepFolder:
    return find_folder(root, name=name, fingerprint=fingerprint, resume=resume, prefix="new")


# Where


def test_storage_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPGCL_STORAGE", str(tmp_path / "there"))
    assert storage_root(None) == tmp_path / "there"


def test_storage_option_beats_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPGCL_STORAGE", str(tmp_path / "there"))
    assert storage_root(tmp_path / "here") == tmp_path / "here"


@pytest.mark.parametrize("by", ["option", "environment"])
def test_relative_storage_lies_where_the_command_was_typed(
    by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if by == "environment":
        monkeypatch.setenv("DPGCL_STORAGE", "results")
    assert storage_root(Path("results") if by == "option" else None) == tmp_path / "results"


def test_storage_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written \(.*Check .*file"):
        check_writable(tmp_path / "file" / "results")


def test_storage_that_the_system_closes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\)\. Check "):
        check_writable(tmp_path / "results")


def test_storage_that_cannot_be_made_is_told_in_a_storage_error() -> None:
    with (
        pytest.raises(StorageError, match="cannot be written"),
        hold_sweep(SweepFolder(Path("/proc/sweeps/one"))),
    ):
        pass


def test_storage_of_a_job_is_in_the_home_folder_by_default(job: Path, tmp_path: Path) -> None:
    assert storage_root(None) == tmp_path / "home" / "dpgcl-results"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("by", ["option", "environment", "link"])
def test_storage_in_the_copy_of_a_job_is_refused(
    by: str, job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inside = job / "results"
    if by == "link":
        (tmp_path / "elsewhere").symlink_to(job)
        inside = tmp_path / "elsewhere" / "results"
    if by == "environment":
        monkeypatch.setenv("DPGCL_STORAGE", str(inside))
    with pytest.raises(StorageError, match="temporary copy of the code"):
        storage_root(None if by == "environment" else inside)


def test_storage_of_a_job_may_be_anywhere_else(job: Path, tmp_path: Path) -> None:
    assert storage_root(tmp_path / "shared") == tmp_path / "shared"


def test_runs_are_kept_in_the_storage_folder_by_default(tmp_path: Path) -> None:
    assert tracking_address(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


def test_tracking_option_beats_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert tracking_address(None, tmp_path) == "http://127.0.0.1:1"
    assert tracking_address("http://127.0.0.1:2", tmp_path) == "http://127.0.0.1:2"


def test_relative_database_is_the_one_of_the_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracking_address("sqlite:///runs/own.db?x=1", tmp_path) == f"sqlite:///{tmp_path}/runs/own.db?x=1"


def test_database_in_the_copy_of_a_job_is_refused(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(job)
    with pytest.raises(StorageError, match="would be lost"):
        tracking_address("sqlite:///mlflow.db", tmp_path)


# Nothing half-written


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "root", "--dry-run") == 0
    assert sweep(tmp_path / "root", "--dry-run", "--noise-multiplier", "None", "--epsilon", "1") == 0
    assert not (tmp_path / "root").exists()


BAD = {
    "data set": ("--dataset", "npz:/gone.npz"),
    "group size": ("--group-sizes", "4", "63", "--sampling", "records"),
    "network": ("--network", "tests.sweeps.networks:batch_norm"),
    "optimizer": ("--optimizer", "adan"),
    "resume of nothing": ("--resume",),
    "resume of another": ("--resume", "--name", "gone"),
    "name": ("--name", "../outside"),
    "workers": ("--num-workers", "4000"),
    "graphics cards": ("--gpus-per-worker", "64"),
    "server": ("--tracking-uri", "http://127.0.0.1:9"),
    "scheme": ("--tracking-uri", "ftp://127.0.0.1/"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_writes_nothing(what: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        sweep(tmp_path / "root", *BAD[what])
    assert contents(tmp_path) == []


def test_bad_input_leaves_an_existing_folder_as_it_is(tmp_path: Path) -> None:
    create(tmp_path, "other", fingerprint="another")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="belongs to another configuration"):
        sweep(tmp_path, "--name", "other")
    assert contents(tmp_path) == before


def test_server_is_asked_before_planning_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial_policy, "build_plan", lambda *_, **__: pytest.fail("planned first"))
    for address in ("http://127.0.0.1:9", "ftp://127.0.0.1/"):
        with pytest.raises(TrackingError):
            sweep(tmp_path / "root", "--tracking-uri", address)


def test_resume_of_another_configuration_tells_where_it_differs(tmp_path: Path) -> None:
    plan = {"fingerprint": "one", "params": {"num_steps": 5, "temperature": 0.5, "device": "cpu"}}
    SweepFolder(tmp_path / "sweeps" / "a").create(plan)
    now = {"num_steps": 7, "temperature": 0.5, "device": "cuda"}
    with pytest.raises(StorageError) as caught:
        find_folder(tmp_path, name="a", fingerprint="two", resume=True, prefix="x", params=now)
    assert "(num_steps was 5, is 7)" in str(caught.value)


def test_calibrations_are_kept_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "noise-old.json").write_text("1")
    with calibrations(tmp_path) as found:
        assert contents(found.folder) == ["noise-old.json"]
        (found.folder / "noise-new.json").write_text("2")
    assert contents(tmp_path / "calibration") == ["noise-old.json"]
    with calibrations(tmp_path) as found:
        (found.folder / "noise-new.json").write_text("2")
        found.keep()
    assert contents(tmp_path / "calibration") == ["noise-new.json", "noise-old.json"]


# Whose folder


def test_new_sweep_has_a_folder_of_its_own(tmp_path: Path) -> None:
    create(tmp_path, "new")
    assert find(tmp_path, None).name == "new-2"


def test_folder_of_another_configuration_is_refused(tmp_path: Path) -> None:
    create(tmp_path, "one", fingerprint="another")
    for resume in (False, True):
        with pytest.raises(StorageError, match="belongs to another configuration"):
            find(tmp_path, "one", resume=resume)


def test_existing_sweep_is_refused_without_resume(tmp_path: Path) -> None:
    create(tmp_path, "one")
    with pytest.raises(StorageError, match=r"exists already .* add --resume"):
        find(tmp_path, "one")
    assert find(tmp_path, "one", resume=True).name == "one"


@pytest.mark.parametrize("name", [None, "one"])
def test_resume_of_nothing_is_refused(name: str | None, tmp_path: Path) -> None:
    create(tmp_path, "other", fingerprint="another")
    with pytest.raises(StorageError, match="nothing to resume"):
        find(tmp_path, name, resume=True)


@pytest.mark.parametrize("text", ["{", "[]", '"plan"'])
def test_damaged_plan_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (create(tmp_path, "one").path / "plan.json").write_text(text)
    with pytest.raises(StorageError, match=r"plan\.json is damaged"):
        find(tmp_path, "one", resume=True)


def test_sweep_that_is_running_is_said_to_be_running_before_it_is_planned(tmp_path: Path) -> None:
    """Neither that it exists already, nor that it could be resumed."""
    folder = create(tmp_path, "one")
    more = ("--tiny", "--name", "one", "--storage", str(tmp_path))
    with hold_sweep(folder):
        for arguments in (more, (*more, "--resume")):
            code, said, errors = run_script("group_size", *arguments)
            assert (code, said.splitlines()) == (2, ["group size: loading …"])
            assert "the sweep 'one' is running" in errors
    check_not_running(folder)


def test_damaged_result_is_refused_not_trained_again(tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    folder.keep("a", {"metrics": {}})
    (folder.path / "trials" / "b.json").write_text('{"metr')
    with pytest.raises(StorageError, match=r"b\.json is damaged"):
        folder.read_results()


def test_result_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    folder.keep("a", {"metrics": {"epsilon": 1.0}})
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.keep("a", {"metrics": {"epsilon": 2.0}})
    assert folder.read_results() == {"a": {"metrics": {"epsilon": 1.0}}}


@pytest.mark.parametrize(
    "name", ["../one", "a/b", "..", ".", "", "/tmp/one", ".hidden", "a\nb", "a b", "x" * 101]
)
def test_sweep_name_cannot_leave_the_storage_folder(name: str, tmp_path: Path) -> None:
    for resume in (False, True):
        with pytest.raises(StorageError, match="the name of a sweep names a folder: it must have"):
            find(tmp_path, name, resume=resume)


@pytest.mark.parametrize("name", ["one", "group-size-digits-20261121-062312-2", "S=8_v1.0", "größe"])
def test_ordinary_sweep_name_is_accepted(name: str, tmp_path: Path) -> None:
    assert find(tmp_path, name).path == tmp_path / "sweeps" / name


@pytest.mark.parametrize("trace", ["trials/a.json", "checkpoints/a/grant.json", "trusted/sealed.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_folder_with_trials_and_without_a_plan_is_refused(trace: str, resume: bool, tmp_path: Path) -> None:
    path = tmp_path / "sweeps" / "one" / trace
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(StorageError, match=r"no plan\.json, .* move it away, or choose another --name"):
        find(tmp_path, "one", resume=resume)


def test_result_of_another_configuration_is_refused(tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    folder.keep("a", {"metrics": {}, "config_hash": "weaker"})
    assert list(folder.read_results({"a": "weaker"})) == ["a"]
    for hashes in ({"a": "stronger"}, {}):
        with pytest.raises(StorageError, match="is the result of another configuration"):
            folder.read_results(hashes)


def test_config_hash_tells_what_decides_the_result(make_plan: Callable[..., SweepPlan]) -> None:
    def found(*more: str) -> str:
        return config_hash(make_plan("--tiny", *more).trials[0].config)

    assert found("--noise-multiplier", "1") != found("--noise-multiplier", "2")
    assert found("--noise-multiplier", "1") == found(
        "--noise-multiplier", "1", "--max-views-per-microbatch", "64"
    )


def test_starts_are_counted_and_those_without_a_trace(tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    assert folder.starts("a") == Starts()
    folder.mark_start("a")
    assert folder.starts("a") == Starts(num_starts=1, num_lost=0)  # a count without a step is there
    folder.checkpoints("a", every_steps=4).begin_attempt(0, 10)
    folder.mark_start("a")
    shutil.rmtree(folder.path / "checkpoints")
    assert folder.starts("a") == Starts(num_starts=2, num_lost=0)
    shutil.rmtree(folder.path / "drawn")
    folder.mark_start("a")
    folder.checkpoints("a", every_steps=4).begin_attempt(0, 10)
    assert folder.starts("a") == Starts(num_starts=3, num_lost=2)


def test_tune_starts_no_training_that_is_not_counted(tmp_path: Path) -> None:
    """Tune calls this before it asks the trial's process to train."""
    folder = create(tmp_path, "one")
    from sweeps.service.cluster.ray_tune import TrialCallback

    nothing: Any = SimpleNamespace(note_start=lambda *_, **__: None)
    running: Any = SimpleNamespace(
        folder=folder, queue=nothing, supervisor=nothing, stopping=nothing, watch=nothing, is_open=True
    )
    mechanism = SimpleNamespace(num_steps=4)
    config = SimpleNamespace(performance=PerformanceConfig(), mechanism=mechanism)
    given = SimpleNamespace(name="a", config=config, progress_file=None)
    of_tune = SimpleNamespace(ray_actor=None)
    trial = SimpleNamespace(config={"trial": given}, temporary_state=of_tune)
    TrialCallback(running).on_trial_start(0, [], trial)
    assert folder.starts("a").num_starts == 1


# Who holds it

FORK = multiprocessing.get_context("fork")


def _hold(folder: Path, held: Event) -> None:
    with hold_sweep(SweepFolder(folder)):
        held.set()
        time.sleep(120)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[], ForkProcess]]:
    """Starts a process that holds the sweep `one`."""
    started = []

    def start() -> ForkProcess:
        held = FORK.Event()
        process = FORK.Process(target=_hold, args=(tmp_path / "sweeps" / "one", held))
        process.start()
        started.append(process)
        assert held.wait(60)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def test_sweep_held_by_another_process_is_refused(holder: Callable[[], ForkProcess], tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    holder()
    with pytest.raises(StorageError, match="is running: wait for its end"), hold_sweep(folder):
        pass


def test_sweep_is_free_once_its_holder_is_killed(holder: Callable[[], ForkProcess], tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    process = holder()
    process.kill()
    process.join()
    with hold_sweep(folder):
        pass


def test_lock_leaves_no_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hold_sweep(SweepFolder(tmp_path / "root" / "sweeps" / "one")):
        raise RuntimeError
    assert contents(tmp_path) == []


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_an_earlier_version_is_refused_in_one_line(resume: bool, tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    plan = json.loads((folder.path / "plan.json").read_text())
    del plan["layout"]
    (folder.path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(
        StorageError, match=r"layout None.* Choose another --name\..*settle --name one --storage /"
    ):
        find(tmp_path, "one", resume=resume)


def test_lock_leaves_a_folder_with_a_plan(tmp_path: Path) -> None:
    folder = create(tmp_path, "one")
    with hold_sweep(folder):
        pass
    assert (folder.read_plan() or {})["fingerprint"] == "mine"


# Who may enter


@pytest.fixture
def open_root(tmp_path: Path) -> Iterator[Path]:
    """A storage folder that stood open before; the umask takes nothing away."""
    root = tmp_path / "results"
    root.mkdir()
    root.chmod(0o755)
    before = os.umask(0)
    yield root
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The permissions of a folder and of all that is in it."""
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))
    }


def write_all(folder: SweepFolder) -> None:
    """Writes what a sweep and a training keep there."""
    again = Repetition(options="num_steps: 3", command=Command(name="one"))
    folder.create({"fingerprint": "mine"}, again)
    folder.keep_head({"num_entries": 3})
    folder.mark_start("trial")
    folder.keep("trial", {"metrics": {}})
    write_suggestion(folder, 1, {"temperature": 0.5})
    SweepLog(folder.path).write("begun", "trial", "it begins")
    checkpoints = folder.checkpoints("trial", every_steps=2)
    with checkpoints.hold():
        checkpoints.begin_attempt(0, 6)
        checkpoints.save(Checkpoint(step=2, model={}, optimizer={}, series={}, final={}))
    write_grant(folder.checkpoint_folder("trial"), Grant(num_steps=6))
    ProgressWriter(folder.progress_file("trial"), 6)(2)
    oversight = Oversight(count_file=folder.count_file("trial"))
    oversight.stop()
    oversight.answer(Question(token="a", step=2, scores={}), goes_on=False)
    assert oversight.goes_on(2, {}, lambda: None)


def test_sweep_on_private_data_is_its_owners_alone_from_the_first_write(
    open_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: None)  # nothing is narrowed after it was written
    folder = SweepFolder(open_root / "sweeps" / "one")
    with hold_sweep(folder, is_closed=True):
        write_all(folder)
    found = modes(folder.path)
    assert len(found) > 20
    assert found == {name: 0o700 if (folder.path / name).is_dir() else 0o600 for name in found}
    assert modes(open_root)["."] == 0o755, "the user's own folder stays as it is"


def test_sweep_that_is_not_closed_is_as_open_as_its_folder(open_root: Path) -> None:
    folder = SweepFolder(open_root / "sweeps" / "one")
    with hold_sweep(folder):
        write_all(folder)
    found = modes(folder.path)
    assert found["."] == found["drawn"] == found["checkpoints/trial"] == 0o755
    assert found["plan.json"] == found["log.jsonl"] == found["drawn/trial.json"] == 0o644


def test_sweep_of_an_earlier_version_is_closed_before_it_goes_on(open_root: Path) -> None:
    folder = create(open_root, "one")
    with hold_sweep(folder, is_closed=True):
        assert modes(folder.path)["."] == 0o700


@pytest.mark.parametrize(
    ("more", "is_closed"),
    [
        (("--data-is=private", "--no-ledger"), True),
        (("--data-is=private", "--no-ledger", "--release=sealed"), False),  # others may read its release
        (("--data-is=public",), False),
    ],
)
def test_open_sweep_on_private_data_is_closed_to_others(
    more: tuple[str, ...], is_closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "hold_sweep", lambda _, *, is_closed: pytest.fail(f"closed: {is_closed}"))
    with pytest.raises(pytest.fail.Exception, match=f"closed: {is_closed}"):
        sweep(tmp_path, "--evaluate-on", write_npz(tmp_path / "public.npz", 40), *more)


class Stated(SimpleNamespace):
    """A statement of two lines."""

    def to_json(self) -> str:
        return "{}"

    def to_markdown(self) -> str:
        return "# ε"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the disk take so many files more."""

    def fill(after: int) -> None:
        written = itertools.count()
        sync = os.fsync

        def fsync(number: int) -> None:
            if next(written) >= after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(number)

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


@pytest.mark.parametrize("after", [0, 1])
def test_full_disk_leaves_no_half_of_a_statement(
    after: int, full_disk: Callable[[int], None], tmp_path: Path
) -> None:
    full_disk(after)
    with pytest.raises(StorageError, match="cannot be written: No space left on device"):
        write_statement(Stated(), tmp_path / "one")  # type: ignore[arg-type]
    assert contents(tmp_path / "one") == []


def test_full_disk_leaves_the_result_that_was_there(full_disk: Callable[[int], None], tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.keep("trial", {"metrics": {}})
    full_disk(0)
    with pytest.raises(StorageError, match="No space left"):
        folder.keep("trial", {"metrics": {"other": 1.0}})
    assert folder.read_results() == {"trial": {"metrics": {}}}
    assert contents(tmp_path / "trials") == ["trial.json"]


def test_full_disk_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/figure.png")

    with pytest.raises(SystemExit) as ended:
        exit_on_bad_input(main)
    assert ended.value.code == 2
    told = "error: no space is left to write /data/figure.png; free some and try again\n"
    assert capsys.readouterr().err == told
