"""Resuming: fresh randomness, nothing replayed, nothing uncharged."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.errors import StorageError
from tests.trainers.conftest import make_config, make_data
from trainers.files import checkpoint
from trainers.files.checkpoint import CheckpointFolder
from trainers.training import loop
from trainers.training.loop import train


class _CrashError(Exception):
    pass


def _folder(path: Path) -> CheckpointFolder:
    return CheckpointFolder(path, every_steps=2)


def _crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = loop._step

    def crashing(run) -> None:  # type: ignore[no-untyped-def]
        original(run)
        if run.step == step:
            raise _CrashError

    monkeypatch.setattr(loop, "_step", crashing)


def _crashed(monkeypatch: pytest.MonkeyPatch, path: Path, step: int, **changes: object) -> None:
    config = make_config(**changes)
    with monkeypatch.context() as patch:
        _crash_at(patch, step)
        with pytest.raises(_CrashError):
            train(config, make_data(), checkpoints=_folder(path))


def _weights(encoder: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(encoder)])


def test_seeded_resume_equals_the_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(make_config(seeded_non_private=True), make_data())
    _crashed(monkeypatch, tmp_path, 3, seeded_non_private=True)
    resumed = train(make_config(seeded_non_private=True), make_data(), checkpoints=_folder(tmp_path))
    assert torch.equal(_weights(whole.encoder), _weights(resumed.encoder))
    assert resumed.series["train_loss"] == whole.series["train_loss"]


def test_private_resume_draws_fresh_batches_and_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, bytes]] = []
    original = loop._draw_groups

    def spy(run):  # type: ignore[no-untyped-def]
        groups = original(run)
        drawn.append((run.step, groups.rows.tobytes()))
        return groups

    monkeypatch.setattr(loop, "_draw_groups", spy)
    _crashed(monkeypatch, tmp_path, 3)
    train(make_config(), make_data(), checkpoints=_folder(tmp_path))
    again = [groups for step, groups in drawn if step == 3]
    assert len(again) == 2
    assert again[0] != again[1]  # a replayed batch is one step at σ/√2, not two


def test_checkpoint_holds_no_random_state(tmp_path: Path) -> None:
    train(make_config(), make_data(), checkpoints=_folder(tmp_path))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(saved) == {"step", "model", "optimizer", "average", "series", "final"}


@pytest.mark.parametrize(("crash_step", "repeated"), [(0, 2), (1, 2), (3, 2), (5, 2)])
def test_restart_is_charged_for_every_step_it_may_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_step: int, repeated: int
) -> None:
    _crashed(monkeypatch, tmp_path, crash_step)
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_restarts"] == 1
    assert metrics["num_steps_done"] == 6
    assert metrics["num_steps_charged"] == 6 + repeated
    assert metrics["epsilon"] == pytest.approx(make_config().mechanism.epsilon(6 + repeated))
    assert metrics["epsilon"] > make_config().mechanism.epsilon()


def test_charge_is_never_below_the_steps_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = loop._draw_groups
    monkeypatch.setattr(loop, "_draw_groups", lambda run: drawn.append(run.step) or original(run))
    for step in (0, 1, 3, 3, 4):
        _crashed(monkeypatch, tmp_path, step)
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_restarts"] == 5
    assert metrics["num_steps_charged"] >= len(drawn)


def test_charge_follows_the_crashed_attempts_own_checkpoint_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _crash_at(patch, 4)  # five steps drawn, none saved
        with pytest.raises(_CrashError):
            train(make_config(), make_data(), checkpoints=CheckpointFolder(tmp_path, every_steps=100))
    metrics = train(make_config(), make_data(), checkpoints=CheckpointFolder(tmp_path, every_steps=1)).metrics
    assert metrics["num_steps_charged"] >= 5 + 6


def test_two_crashes_after_one_checkpoint_are_both_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crashed(monkeypatch, tmp_path, 3)  # four steps drawn, two saved
    _crashed(monkeypatch, tmp_path, 2)  # one more drawn
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_steps_charged"] == 6 + 2 + 2


def test_missing_attempts_file_is_refused_beside_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    (tmp_path / "attempts.json").unlink()
    with pytest.raises(StorageError, match="missing beside a checkpoint"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_folder_is_held_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_WAIT_SECONDS", 0.5)
    with _folder(tmp_path).held(), pytest.raises(StorageError, match="another process is training"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_folder_of_a_killed_process_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_WAIT_SECONDS", 0.5)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with _folder(tmp_path).held():
            os.write(writing, b"held")
            signal.pause()
    assert os.read(reading, 4) == b"held"
    with pytest.raises(StorageError, match="another process is training"), _folder(tmp_path).held():
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with _folder(tmp_path).held():
        assert (tmp_path / "lock").exists(), "what the killed process left is not in the way"


def test_lost_checkpoint_is_charged_and_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _crashed(monkeypatch, tmp_path, 4)
    (tmp_path / "checkpoint.pt").unlink()
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_restarts"] == 1
    assert metrics["num_steps_charged"] >= 5 + 6


def test_finished_training_is_not_trained_again(tmp_path: Path) -> None:
    first = train(make_config(), make_data(), checkpoints=_folder(tmp_path))
    second = train(make_config(), make_data(), checkpoints=_folder(tmp_path))
    assert torch.equal(_weights(first.encoder), _weights(second.encoder))
    assert second.metrics["num_steps_charged"] == 6


def test_crash_while_saving_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path)
    _crashed(monkeypatch, tmp_path, 3)
    before = folder.load()

    def torn(content: object, file) -> None:  # type: ignore[no-untyped-def]
        file.write(b"half")
        raise _CrashError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torn)
        with pytest.raises(_CrashError):
            train(make_config(), make_data(), checkpoints=folder)
    after = folder.load()
    assert before is not None
    assert after is not None
    assert before.step == after.step == 2


def test_damaged_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(StorageError, match="cannot be read"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_damaged_attempts_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    (tmp_path / "attempts.json").write_text(json.dumps({"attempts": 1}))
    with pytest.raises(StorageError, match="damaged"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_private_checkpoint_holds_no_private_only_number(tmp_path: Path) -> None:
    train(make_config(), make_data(private=True), checkpoints=_folder(tmp_path))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["series"] == {}
    assert saved["final"] == {}
