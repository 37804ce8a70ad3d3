"""Resuming: fresh randomness, nothing replayed, nothing uncharged."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpgcl_core import private_step
from dpgcl_core.attempts import DrawCounts
from dpgcl_core.clipping.types import trainable_parameters
from dpgcl_core.errors import ConfigError, StorageError
from dpgcl_core.noise.randomness import Draws
from dpgcl_core.private_step import PrivateStep
from dpgcl_core.sampling.slots import SampledGroups
from tests.trainers.conftest import drawn_groups, make_config, make_data
from trainers.files import checkpoint
from trainers.files.checkpoint import Attempt, Checkpoint, CheckpointFolder, write_drawn
from trainers.training.callbacks import Checkpointing
from trainers.training.loop import train
from trainers.training.step import Training


class _CrashError(Exception):
    pass


def _folder(path: Path) -> CheckpointFolder:
    return CheckpointFolder(path, every_steps=2)


def _crash_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original = Training.take_step

    def crashing(run) -> None:  # type: ignore[no-untyped-def]
        original(run)
        if run.num_steps_done == step + 1:
            raise _CrashError

    monkeypatch.setattr(Training, "take_step", crashing)


def _crashed(
    monkeypatch: pytest.MonkeyPatch, path: Path, step: int, *, private: bool = False, **changes: object
) -> None:
    config = make_config(**changes)
    with monkeypatch.context() as patch:
        _crash_at(patch, step)
        with pytest.raises(_CrashError):
            train(config, make_data(private=private), checkpoints=_folder(path))


def _weights(encoder: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable_parameters(encoder)])


@pytest.mark.ci
def test_seeded_resume_equals_the_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(make_config(seeded_non_private=True), make_data())
    _crashed(monkeypatch, tmp_path, 3, seeded_non_private=True)
    resumed = train(make_config(seeded_non_private=True), make_data(), checkpoints=_folder(tmp_path))
    assert torch.equal(_weights(whole.encoder), _weights(resumed.encoder))
    assert resumed.series["train_loss"] == whole.series["train_loss"]


class _Recorder:
    """Draws of a generator, which it keeps."""

    def __init__(self, generator: Draws, kept: list[bytes]) -> None:
        self._generator, self._kept = generator, kept

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def draw(*arguments: Any) -> Any:
            values = getattr(self._generator, name)(*arguments)
            self._kept.append(values.tobytes())
            return values

        return draw


@pytest.fixture
def draws_by_step(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], list[bytes]]:
    """All that the steps of a test draw, by step and purpose; an entry for each attempt."""
    kept: dict[tuple[int, str], list[bytes]] = defaultdict(list)
    step, add, draw = Training.take_step, private_step.add_in_parts, SampledGroups.draw
    now: dict[str, list[bytes]] = {}

    def spy_step(run: Any) -> None:
        now.update(sampling=[], permutation=[], noise=[])
        step(run)
        for purpose, values in now.items():
            kept[run.num_steps_done - 1, purpose].append(b"".join(values))

    def spy_draw(stage: SampledGroups, num_records: int, **generators: Draws) -> Any:
        return draw(stage, num_records, **{k: _Recorder(v, now[k]) for k, v in generators.items()})

    def spy_add(total: torch.Tensor, law: Any, noise_of: Any, *parts: Any, **options: Any) -> float:
        def keep(part: slice) -> torch.Tensor:
            noise = noise_of(part)
            now["noise"].append(noise.numpy().tobytes())
            return noise

        return add(total, law, keep, *parts, **options)

    monkeypatch.setattr(Training, "take_step", spy_step)
    monkeypatch.setattr(private_step, "add_in_parts", spy_add)
    monkeypatch.setattr(SampledGroups, "draw", spy_draw)
    return kept


@pytest.mark.parametrize("private", [True, False])
def test_every_repeated_step_is_drawn_afresh_by_every_attempt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draws_by_step: dict[tuple[int, str], list[bytes]],
    private: bool,
) -> None:
    """A replayed batch or noise is one step at σ/√2, not two; the second resume repeats the first one's."""
    for _ in range(3):  # each saves after step 2, or goes on from there
        _crashed(monkeypatch, tmp_path, 3, private=private, sampling_prob=0.9)
    for step in (2, 3):
        for purpose in ("sampling", "permutation", "noise"):
            drawn = draws_by_step[step, purpose]
            assert len(drawn) == 3
            assert len({*drawn, b""}) == 4, f"{purpose} of step {step}"


def test_checkpoint_holds_no_random_state(tmp_path: Path) -> None:
    train(make_config(), make_data(), checkpoints=_folder(tmp_path))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(saved) == {"step", "model", "optimizer", "average", "series", "final"}


def test_checkpoint_of_an_earlier_version_is_read_unless_it_is_of_a_public_subspace(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    train(make_config(), make_data(), checkpoints=folder)
    path = tmp_path / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"basis": None}, path)
    read = folder.load()
    assert read is not None
    assert read.step == saved["step"]
    torch.save(saved | {"basis": torch.eye(3, 5)}, path)
    with pytest.raises(ConfigError) as refusal:
        folder.load()
    assert all(words in str(refusal.value) for words in ("public.subspace_dim = 3", "removed in 0.2.0: use"))


@pytest.mark.ci
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


@pytest.mark.ci
def test_charge_is_never_below_the_steps_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = PrivateStep.draw
    monkeypatch.setattr(
        PrivateStep, "draw", lambda self, step, *more: drawn.append(step) or original(self, step, *more)
    )
    for step in (0, 1, 3, 3, 4):
        _crashed(monkeypatch, tmp_path, step)
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_restarts"] == 5
    assert metrics["num_steps_charged"] >= len(drawn)


@pytest.mark.ci
def test_charge_follows_the_crashed_attempts_own_checkpoint_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _crash_at(patch, 4)  # five steps drawn, none saved
        with pytest.raises(_CrashError):
            train(make_config(), make_data(), checkpoints=CheckpointFolder(tmp_path, every_steps=100))
    metrics = train(make_config(), make_data(), checkpoints=CheckpointFolder(tmp_path, every_steps=1)).metrics
    assert metrics["num_steps_charged"] >= 5 + 6


@pytest.mark.ci
def test_two_crashes_after_one_checkpoint_are_both_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crashed(monkeypatch, tmp_path, 3)  # four steps drawn, two saved
    _crashed(monkeypatch, tmp_path, 2)  # one more drawn
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_steps_charged"] == 6 + 2 + 2


def test_missing_count_is_refused_beside_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    _folder(tmp_path).count_file.unlink()
    with pytest.raises(StorageError, match=r"count of drawn steps .* is missing"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_folder_is_held_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_WAIT_SECONDS", 0.5)
    with _folder(tmp_path).hold(), pytest.raises(StorageError, match="another process is training"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_folder_of_a_killed_process_is_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_WAIT_SECONDS", 0.5)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with _folder(tmp_path).hold():
            os.write(writing, b"held")
            signal.pause()
    assert os.read(reading, 4) == b"held"
    with pytest.raises(StorageError, match="another process is training"), _folder(tmp_path).hold():
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with _folder(tmp_path).hold():
        assert _folder(tmp_path).count_file.with_suffix(".lock").exists(), (
            "what the killed process left is not in the way"
        )


@pytest.mark.ci
def test_lost_checkpoint_is_charged_and_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _crashed(monkeypatch, tmp_path, 4)
    (tmp_path / "checkpoint.pt").unlink()
    metrics = train(make_config(), make_data(), checkpoints=_folder(tmp_path)).metrics
    assert metrics["num_restarts"] == 1
    assert metrics["num_steps_charged"] >= 5 + 6


@pytest.mark.ci
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


def test_damaged_count_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _crashed(monkeypatch, tmp_path, 3)
    _folder(tmp_path).count_file.write_text(json.dumps({"attempts": 1}))
    with pytest.raises(StorageError, match="damaged"):
        train(make_config(), make_data(), checkpoints=_folder(tmp_path))


def test_private_checkpoint_holds_no_private_only_number(tmp_path: Path) -> None:
    train(make_config(), make_data(private=True), checkpoints=_folder(tmp_path))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["series"] == {}
    assert saved["final"] == {}


# Restarts that follow what is seen: R steps are charged in advance.

T, R = 6, 2


class _Killed(BaseException):
    """A kill: nothing of the training goes on."""


class _Journal:
    """What really happened, apart from all that the training keeps: the draws, and where it may be killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draws = self.at = self.drawn_now = 0
        self.die_at: int | None = None
        self.die_at_draw: int | None = None
        self.places: list[str] = []
        replaced, drawn = Path.replace, PrivateStep.draw

        def replace(path: Path, target: Path) -> Path:
            self._come_to(f"before {Path(target).name}")
            found = replaced(path, target)
            self._come_to(f"after {Path(target).name}")
            return found

        def draw(*of_step):  # type: ignore[no-untyped-def]
            self.draws += 1
            self.drawn_now += 1
            self._come_to("draw")
            if self.drawn_now == self.die_at_draw:
                raise _Killed
            return drawn(*of_step)

        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(PrivateStep, "draw", draw)

    def _come_to(self, place: str) -> None:
        self.at += 1
        self.places.append(place)
        if self.at == self.die_at:
            raise _Killed

    def train(
        self, path: Path, *, die_at: int | None = None, die_at_draw: int | None = None, **changes: object
    ) -> dict[str, float] | str:
        """Trains until a place, or a draw of this attempt; returns the metrics, or why it ended."""
        self.at, self.die_at, self.drawn_now, self.die_at_draw = 0, die_at, 0, die_at_draw
        config = make_config(num_steps=T, **{"num_restart_steps": R} | changes)
        try:
            return train(config, make_data(private=True), checkpoints=_folder(path)).metrics
        except _Killed:
            return "killed"
        except StorageError as error:
            return str(error)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> _Journal:
    monkeypatch.setattr(Training, "take_step", _step_without_gradients)
    return _Journal(monkeypatch)


def _step_without_gradients(run) -> None:  # type: ignore[no-untyped-def]
    drawn_groups(run)
    run.num_steps_done += 1


@pytest.mark.ci
def test_kill_at_any_place_leaves_no_draw_uncounted(tmp_path: Path, journal: _Journal) -> None:
    """At each place between count, draw and checkpoint; then again at each place of the resumed training."""
    whole = journal.train(tmp_path / "whole")
    places = list(journal.places)
    assert {"draw", "before checkpoint.pt", "after checkpoint.pt", "after whole.drawn.json"} <= set(places)
    assert isinstance(whole, dict)
    for first in range(1, len(places) + 1):
        path, journal.draws = tmp_path / str(first), 0
        assert journal.train(path, die_at=first) == "killed"
        assert journal.draws <= _folder(path).read_counts().num_steps <= T + R
        resumed = journal.train(path)
        assert isinstance(resumed, dict), places[first - 1]  # R = one interval pays for one kill anywhere
        assert journal.draws <= _folder(path).read_counts().num_steps <= T + R
        assert resumed == whole, "what is stated does not follow what was restarted"


def test_operator_who_restarts_by_what_is_seen_gets_no_more_than_is_charged(
    tmp_path: Path, journal: _Journal
) -> None:
    """Kill amid steps, as often as it is let: T + R draws at most, and then one line."""
    told = [journal.train(tmp_path / "one", die_at_draw=draw) for draw in (3, 1, 1, 1)]
    drawn = journal.draws
    assert drawn <= T + R
    assert told[:2] == ["killed", "killed"]
    assert all(
        "left out: its restarts could repeat 4 steps, but only R = 2" in str(each) for each in told[2:]
    )
    assert "\n" not in str(told[-1])
    assert journal.train(tmp_path / "one") == told[-1]
    assert journal.draws == drawn


def test_older_checkpoint_put_back_does_not_take_the_count_back(tmp_path: Path, journal: _Journal) -> None:
    path = tmp_path / "one"
    journal.train(path, die_at_draw=3)
    shutil.copytree(path, tmp_path / "copy")
    assert isinstance(journal.train(path), dict)
    shutil.rmtree(path)
    shutil.copytree(tmp_path / "copy", path)
    assert "left out" in str(journal.train(path))
    assert journal.draws <= T + R


def test_two_that_count_together_draw_no_more_than_is_charged(tmp_path: Path) -> None:
    """Should a lock fail: the one that began first ends, and what both may have drawn is counted."""
    first, second = _folder(tmp_path), _folder(tmp_path)
    first.begin_attempt(0, T, R)
    second.begin_attempt(0, T, R)
    state = Checkpoint(step=2, model={}, optimizer={}, series={}, final={})
    with pytest.raises(StorageError, match=r"attempt 1 of this training, .* is outdated by attempt 2"):
        first.save(state)
    for step in (2, 4, 6):
        second.save(replace(state, step=step))
    assert second.read_counts().num_steps == T + R


def test_count_beyond_what_is_charged_stops_whoever_counts(tmp_path: Path) -> None:
    """Should the numbers of attempts be lost as well."""
    folder = _folder(tmp_path)
    folder.begin_attempt(0, T, R)
    write_drawn(folder.count_file, DrawCounts(num_attempts=1, num_steps=T + R))
    with pytest.raises(StorageError, match="Another process trains in this folder"):
        folder.save(Checkpoint(step=2, model={}, optimizer={}, series={}, final={}))


def test_no_restart_steps_refuse_every_repetition(tmp_path: Path, journal: _Journal) -> None:
    journal.train(tmp_path / "one", die_at_draw=3, num_restart_steps=0)
    assert "could repeat 2 steps, but only R = 0" in str(journal.train(tmp_path / "one", num_restart_steps=0))


def test_steps_for_restarts_are_in_epsilon_whether_drawn_or_not(tmp_path: Path, journal: _Journal) -> None:
    metrics = journal.train(tmp_path / "one")
    assert isinstance(metrics, dict)
    assert metrics["num_steps_charged"] == T + R
    assert metrics["epsilon"] == make_config(num_steps=T + R).mechanism.epsilon()
    assert "num_restarts" not in metrics  # private: a crash may come of the records


def test_noise_for_a_target_is_that_of_the_steps_for_restarts_too() -> None:
    mechanism = make_config(num_steps=T, num_restart_steps=R).mechanism.calibrated(5.0)
    assert (
        mechanism.noise_multiplier == make_config(num_steps=T + R).mechanism.calibrated(5.0).noise_multiplier
    )
    assert mechanism.epsilon() <= 5.0 < mechanism.epsilon(T + R + 1)


def test_second_worker_counts_and_draws_nothing(tmp_path: Path) -> None:
    """Of two workers the first one alone draws, so it alone counts."""
    folder = _folder(tmp_path / "one")
    second = SimpleNamespace(is_first_worker=False, num_steps_done=0)
    checkpointing = Checkpointing(second, folder)  # type: ignore[arg-type]
    checkpointing.on_begin()
    checkpointing.save()
    assert checkpointing.attempt == Attempt()
    assert folder.read_counts() == DrawCounts()
