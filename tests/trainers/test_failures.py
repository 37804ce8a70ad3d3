"""What a failed training may tell: attacks by errors that anybody may raise, before records come or after."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError, DpgclError, LedgerError, StorageError
from tests.trainers.conftest import make_config, make_records
from trainers import failures, ray_worker
from trainers.data.dataset import TrainingData
from trainers.data.loading import load_dataset
from trainers.failures import Stage, describe_error
from trainers.files.checkpoint import CheckpointFolder, Grant, write_grant
from trainers.training.step import Training

SECRET = "Ombrelune"
WITHHELD = "(its message is withheld: the training data are private)"


class Ombrelune(DpgclError):  # noqa: N818 (its name is the secret)
    pass


KeyErrorOfMyOwn = type("KeyError", (ConfigError,), {})


def caught(work: Callable[[], Any]) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError


def raising(error: BaseException, cause: BaseException | None = None) -> Callable[[], Any]:
    def work() -> None:
        raise error from cause

    return work


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize(
    ("error", "name"),
    [
        (ConfigError(SECRET), "ConfigError"),
        (LedgerError(SECRET), "LedgerError"),
        (Ombrelune(SECRET), "an error"),
        (KeyErrorOfMyOwn(SECRET), "an error"),
        (type(SECRET, (RuntimeError,), {})(SECRET), "an error"),
        (RuntimeError(SECRET), "RuntimeError"),
        (SystemExit(SECRET), "SystemExit"),
    ],
)
def test_error_of_other_code_is_told_by_a_listed_name_alone(
    error: BaseException, name: str, stage: Stage
) -> None:
    found = caught(raising(error))
    assert describe_error(found, data_are_public=False, stage=stage) == f"{name} {WITHHELD}"


def test_own_error_before_data_keeps_its_text_and_loses_it_with_data(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path, every_steps=2, is_paid=True)
    error = caught(lambda: checkpoints.check_grant(10))
    error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next.tb_next)  # type: ignore[union-attr]
    before = describe_error(error, data_are_public=False, stage=Stage.BEFORE_DATA)
    assert before.startswith("the budget ledger grants 0 steps")
    assert describe_error(error, data_are_public=False) == f"LedgerError {WITHHELD}"


def test_own_error_about_another_error_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_PACKAGE_FOLDERS", (Path(__file__).parent,))
    own, about = caught(raising(StorageError("x"))), caught(raising(StorageError("x"), ValueError(SECRET)))
    assert describe_error(own, data_are_public=False, stage=Stage.BEFORE_DATA) == "x"
    assert describe_error(about, data_are_public=False, stage=Stage.BEFORE_DATA) == f"StorageError {WITHHELD}"


@pytest.fixture
def trial(tmp_path: Path) -> ray_worker.RayTrial:
    return ray_worker.RayTrial(
        name="one",
        config=make_config(num_steps=2),
        checkpoint_folder=tmp_path / "checkpoints",
        count_file=tmp_path / "drawn.json",
        ray_folder=tmp_path / "ray",
        storage_root=tmp_path,
        code_root=None,
        gpus_per_worker=0,
        memory_share=0.5,
        is_paid=True,
    )


def worked(trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch, *, public: bool = False) -> Any:
    """The result of a worker, and how often it fetched the records."""
    fetched: list[Any] = []
    records = make_records(40)
    data = TrainingData(
        train=records, index=None, queries=None, train_is_public=public, evaluation_is_public=True
    )

    def get(reference: Any) -> TrainingData:
        fetched.append(reference)
        return data

    monkeypatch.setattr(ray_worker, "ray", SimpleNamespace(get=get))
    return ray_worker.train_worker({"trial": trial, "records": [0]}), len(fetched)


def test_file_that_changes_is_named_only_on_the_trusted_side_and_the_training_goes_on_once_it_is_back(
    trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images = tmp_path / "images.npz"
    np.savez(images, images=make_records(40).images)
    records, state = load_dataset(f"npz:{images}", in_memory=False).train, images.stat()
    monkeypatch.setattr("tests.trainers.test_failures.make_records", lambda _: records)
    config = make_config(num_records_public=40, num_steps=6, secure_noise=True)
    trial = dataclasses.replace(trial, config=config, is_paid=False)
    take_step = Training.take_step

    def change_after_two_steps(run: Training) -> None:
        if run.num_steps_done == 3:
            os.utime(images, ns=(0, 12345))
        take_step(run)

    monkeypatch.setattr(Training, "take_step", change_after_two_steps)
    result, _ = worked(trial, monkeypatch)
    assert result == {"error": f"an error {WITHHELD}"}
    (trusted,) = (tmp_path / "trusted").iterdir()
    assert str(images) in trusted.read_text()
    assert trusted.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(Training, "take_step", take_step)
    os.utime(images, ns=(state.st_atime_ns, state.st_mtime_ns))
    result, _ = worked(trial, monkeypatch)
    assert result["metrics"]["num_steps_charged"] >= 7, "the step that failed is charged, and taken again"


def test_worker_without_a_grant_says_so_and_fetches_no_record(
    trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, num_fetched = worked(trial, monkeypatch)
    assert result["error"].startswith("the budget ledger grants 0 steps")
    assert num_fetched == 0


def test_worker_with_other_code_says_so_and_fetches_no_record(
    trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, num_fetched = worked(dataclasses.replace(trial, code_root=tmp_path), monkeypatch)
    assert result["error"].startswith("every process must import the sweep's copy of the code")
    assert num_fetched == 0


@pytest.mark.parametrize("error", [ConfigError(SECRET), Ombrelune(SECRET), ConfigError("no text")])
def test_method_of_ones_own_that_cannot_be_unpacked_tells_no_text(
    error: Exception, trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "METHODS", {})
    monkeypatch.setattr(ray_worker, "cloudpickle", SimpleNamespace(loads=lambda _: raising(error)()))
    result, _ = worked(dataclasses.replace(trial, method=b"x"), monkeypatch)
    name = "an error" if isinstance(error, Ombrelune) else "ConfigError"
    assert result == {"error": f"{name} {WITHHELD}"}


def test_public_data_keep_the_text(trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "_prepare", lambda _: raising(Ombrelune(SECRET))())
    result, _ = worked(dataclasses.replace(trial, data_are_public=True), monkeypatch, public=True)
    assert result == {"error": SECRET}


def test_error_with_records_tells_no_text_and_no_context(
    trial: ray_worker.RayTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_grant(trial.checkpoint_folder, Grant(num_steps=2))
    monkeypatch.setattr(ray_worker, "_train", lambda *_: raising(ConfigError(SECRET), ValueError(SECRET))())
    assert worked(trial, monkeypatch) == ({"error": f"ConfigError {WITHHELD}"}, 1)
    monkeypatch.setattr(ray_worker, "current_workers", lambda: SimpleNamespace(count=2, rank=0))
    failed = caught(lambda: worked(trial, monkeypatch))
    assert (str(failed), failed.__context__, failed.__cause__) == (f"ConfigError {WITHHELD}", None, None)
