"""Room for what a sweep writes: a disk that fills up meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from dpgcl_core.durable_files import replacing
from dpgcl_core.errors import StorageError
from sweeps.service.cluster.interruption import DiskFull, full_disk_ends_sweep
from sweeps.service.storage.log import SweepLog
from tests.sweeps.support import Driver, tracked_runs
from trainers.failures import NO_ROOM, Stage, describe_error
from trainers.files.launch_record import resume_line
from trainers.tracking.mlflow_server import connect

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [FULL, raised(StorageError("x"), FULL), OSError(errno.EDQUOT, "quota")])
def test_full_disk_ends_the_sweep_and_no_training(error: Exception) -> None:
    with pytest.raises(DiskFull), full_disk_ends_sweep():
        raise error


@pytest.mark.parametrize("error", [StorageError("another"), OSError(errno.EACCES, "no"), KeyError("x")])
def test_other_errors_are_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)), full_disk_ends_sweep():
        raise error


def save_to_full_disk() -> None:
    """As `CheckpointFolder.save`; torch raises an error of its own over that of the file."""
    with open("/dev/full", "wb", buffering=0) as file:
        torch.save({"weights": torch.zeros(10_000)}, file)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("are_public", [False, True])
def test_checkpoint_that_finds_no_room_is_told_in_one_sentence(are_public: bool) -> None:
    with pytest.raises((OSError, RuntimeError)) as caught:
        save_to_full_disk()
    assert describe_error(caught.value, data_are_public=are_public, stage=Stage.WITH_DATA) == NO_ROOM


def test_file_that_finds_no_room_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"old")
    with suppress(OSError), replacing(path) as file:
        file.write(b"half")
        raise FULL
    assert (path.read_bytes(), len(list(tmp_path.iterdir()))) == (b"old", 1)


def test_log_that_cannot_be_written_ends_no_sweep(tmp_path: Path) -> None:
    SweepLog(tmp_path / "nowhere").write("begun", "", "text")


# A disk that fills up in mid-sweep

NUM_STEPS = 8
ARGUMENTS = (
    *("--tiny", "--noise-multiplier=1", "--no-non-private", "--name=one", "--no-references", "--repeats=3"),
    *(f"--num-steps={NUM_STEPS}", "--checkpoint-every-steps=2", "--max-concurrent-trials=1"),
    "--network=tests.sweeps.faulty:network",
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Takes all that is left of a disk."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    return path


@pytest.mark.ci
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_full_disk_ends_a_sweep_in_one_line_loses_nothing_and_is_resumed(
    small_disk: Path, tmp_path: Path, empty_database: Path
) -> None:
    storage, runs = small_disk / "storage", tmp_path / "runs.db"
    shutil.copy(empty_database, runs)
    given = (*ARGUMENTS, f"--storage={storage}", f"--tracking-uri=sqlite:///{runs}")
    env = {"DPGCL_TEST_FOLDER": str(tmp_path)}
    hold, journal = tmp_path / "hold-1", tmp_path / "journal-1"
    hold.write_text("3")
    driver = Driver(*given, home=tmp_path / "home", env=env)
    driver.wait_for(lambda: journal.exists() and journal.stat().st_size == 3)
    filler = fill(small_disk)
    hold.unlink()
    assert driver.wait() == 1, driver.stdout + driver.stderr
    said = [line for line in driver.stdout.splitlines() if "no space" in line or "Traceback" in line]
    assert said == [
        f"stopped: no space is left in {storage}. No finished result is lost. Free some space, then "
        f"continue with {resume_line(storage / 'sweeps' / 'one')}"
    ]
    assert driver.stderr == ""
    assert [path.stem for path in (storage / "sweeps/one/trials").iterdir()] == ["S4-Na1-private-r0"]
    filler.unlink()
    driver = Driver(*given, "--resume", home=tmp_path / "home", env=env)
    assert driver.wait() == 0, driver.stdout + driver.stderr
    found = tracked_runs(connect(f"sqlite:///{runs}"), "tags.`dpgcl.role` = 'trial'")
    assert sorted(run.data.tags["dpgcl.trial"] for run in found) == [f"S4-Na1-private-r{i}" for i in range(3)]
    drawn = [(tmp_path / f"journal-{seed}").stat().st_size for seed in range(3)]
    charged = {int(r.data.tags["dpgcl.trial"][-1]): int(r.data.params["num_steps_charged"]) for r in found}
    assert drawn[0] == drawn[2] == NUM_STEPS
    assert all(charged[seed] >= drawn[seed] >= NUM_STEPS for seed in range(3))
