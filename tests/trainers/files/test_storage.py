"""One storage folder for everything: by option, by environment, or the same default everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpgcl_core.errors import StorageError
from trainers.files import storage
from trainers.files.storage import check_writable, storage_root


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the storage of whoever runs it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(storage, "CODE_ROOT", tmp_path / "elsewhere")
    for name in ("DPGCL_STORAGE", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)


def sweep_in(folder: Path) -> None:
    (folder / "sweeps" / "one").mkdir(parents=True)
    (folder / "sweeps" / "one" / "plan.json").write_text("{}")


@pytest.mark.parametrize("in_job", [False, True])
def test_default_is_one_folder_inside_a_job_and_outside(
    in_job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert storage_root(None) == tmp_path / "home" / "dpgcl-results"


def test_option_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGCL_STORAGE", str(tmp_path / "there"))
    assert storage_root(None) == tmp_path / "there"
    assert storage_root(tmp_path / "here") == tmp_path / "here"


def test_relative_folder_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_root(Path("results")) == tmp_path / "results"


def test_address_is_no_folder() -> None:
    with pytest.raises(
        StorageError, match=r"must be a path on this machine.*; got s3:.*--artifacts-destination"
    ):
        storage_root(Path("s3://bucket/results"))


def test_throw_away_copy_is_refused_inside_a_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "_ray_pkg_1234" / "results"
    assert storage_root(copy) == copy
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(StorageError, match="temporary copy of the code"):
        storage_root(copy)
    monkeypatch.setattr(storage, "CODE_ROOT", tmp_path / "_ray_pkg_99")
    with pytest.raises(StorageError, match="temporary copy of the code"):
        storage_root(tmp_path / "_ray_pkg_99" / "results")


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        check_writable(tmp_path / "file" / "results")
    check_writable(tmp_path / "new" / "results")
    assert not (tmp_path / "new").exists()
