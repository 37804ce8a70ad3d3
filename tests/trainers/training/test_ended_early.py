"""Trainings that are ended early: by scores, which leaves every ε what it was, and by the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpgcl_core.attempts import DrawCounts
from tests.trainers.conftest import make_config, make_data
from trainers.config.training import EvaluationConfig, TrainingConfig
from trainers.files.checkpoint import CheckpointFolder, write_drawn
from trainers.files.oversight import Oversight, Question, TrainingStopped
from trainers.training.loop import train
from trainers.training.scores import Scorer

pytestmark = pytest.mark.ci  # trainings of a second each

NUM_STEPS, EVERY = 6, 4


def config_of(*, restarts: int | None = None, **changes: Any) -> TrainingConfig:
    evaluation = EvaluationConfig(also_untrained=False, score_every_steps=2)
    config = make_config(evaluation=evaluation, **changes)
    assert config.mechanism.num_steps == NUM_STEPS
    mechanism = dataclasses.replace(config.mechanism, num_restart_steps=restarts)
    return dataclasses.replace(config, mechanism=mechanism)


class Answering(CheckpointFolder):
    """A folder whose training is answered, by `decide`, when it looks whether it is outdated."""

    decide: Callable[[Question], bool]
    oversight: Oversight

    def refuse_outdated(self) -> None:
        super().refuse_outdated()
        if (question := self.oversight.question()) is not None:
            self.oversight.answer(question, goes_on=self.decide(question))


def folder_in(top: Path, decide: Callable[[Question], bool] = lambda _: True) -> Answering:
    checkpoints = Answering(top / "t", every_steps=EVERY, count_file=top / "drawn/t.json")
    checkpoints.decide = decide  # type: ignore[method-assign]
    checkpoints.oversight = Oversight(count_file=checkpoints.count_file, by_scores=True)
    checkpoints.count_file.parent.mkdir(exist_ok=True)
    return checkpoints


def test_training_asks_after_each_score_and_ends_where_it_is_told(tmp_path: Path) -> None:
    asked: list[Question] = []

    def until_four(question: Question) -> bool:
        asked.append(question)
        return question.step < 4

    checkpoints = folder_in(tmp_path, until_four)
    result = train(config_of(), make_data(), checkpoints=checkpoints, oversight=checkpoints.oversight)
    assert [question.step for question in asked] == [2, 4]
    assert [step for step, _ in result.series["knn_accuracy_during"]] == [0, 2, 4]
    assert dict(result.series["knn_accuracy_during"])[4] == asked[-1].scores["knn_accuracy"]
    assert result.metrics["num_steps_done"] == 4
    assert checkpoints.saved_step() == 4
    assert checkpoints.read_counts().num_steps == 4, "no step is counted that is not drawn"


def test_epsilon_of_a_training_that_was_ended_is_that_of_all_its_steps(tmp_path: Path) -> None:
    """How far it came follows scores; ε of the steps that were made would be no (ε, δ) statement."""
    config, checkpoints = config_of(), folder_in(tmp_path, lambda question: question.step < 4)
    ended = train(config, make_data(), checkpoints=checkpoints, oversight=checkpoints.oversight).metrics
    assert ended["epsilon"] == config.epsilon(NUM_STEPS) > config.epsilon(4)
    assert ended["num_steps_charged"] == 4, "the ledger gets the others back"


def test_steps_for_restarts_stay_charged_in_advance(tmp_path: Path) -> None:
    config = config_of(restarts=3)
    checkpoints = folder_in(tmp_path, lambda question: question.step < 4)
    write_drawn(checkpoints.count_file, DrawCounts())  # as the sweep does before the first start
    ended = train(config, make_data(), checkpoints=checkpoints, oversight=checkpoints.oversight).metrics
    assert ended["num_steps_charged"] == NUM_STEPS + 3
    assert ended["epsilon"] == config.epsilon(NUM_STEPS + 3)


@pytest.mark.parametrize("saved", [True, False])
def test_end_decided_by_scores_stands_for_an_attempt_that_died_before_its_result(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the checkpoint of the last step is lost as well, the steps to it are repeated, and no more.

    Where it is not, nothing is repeated, and ε is that of all steps once.
    """

    def die(*_: object, **__: object) -> None:
        raise MemoryError

    checkpoints = folder_in(tmp_path, lambda question: question.step < 2)
    with monkeypatch.context() as dying:
        dying.setattr(Scorer, "score_end" if saved else "draw_noised_scores", die)
        with pytest.raises(MemoryError):
            train(config_of(), make_data(), checkpoints=checkpoints, oversight=checkpoints.oversight)
    assert checkpoints.saved_step() == (2 if saved else 0)
    checkpoints.oversight.begin()
    assert checkpoints.oversight.ended_at() == 2
    asked: list[int] = []

    def by_the_first_decision(question: Question) -> bool:
        asked.append(question.step)
        return question.step < 2

    again = folder_in(tmp_path, by_the_first_decision)
    metrics = train(config_of(), make_data(), checkpoints=again, oversight=again.oversight).metrics
    assert asked == ([] if saved else [2])
    assert metrics["num_steps_done"] == 2
    assert metrics["num_steps_charged"] >= (2 if saved else 4)
    once = config_of().epsilon(NUM_STEPS)
    assert metrics["epsilon"] == once if saved else metrics["epsilon"] > once


def test_driver_is_told_no_score_that_may_not_be_seen(tmp_path: Path) -> None:
    asked: list[Question] = []
    checkpoints = folder_in(tmp_path, lambda question: not asked.append(question))
    private = dataclasses.replace(make_data(), train_is_public=False, index=None, queries=None, probes=())
    config = config_of(secure_noise=True)
    train(config, private, checkpoints=checkpoints, oversight=checkpoints.oversight)
    assert [question.scores for question in asked] == [{}, {}]


def test_stop_by_the_clock_saves_and_a_resume_goes_on(tmp_path: Path) -> None:
    """The steps that were counted until the next checkpoint, and not drawn, are taken back."""
    checkpoints = folder_in(tmp_path)
    stopping = checkpoints.oversight
    checkpoints.decide = lambda question: not stopping.stop()  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped) as stopped:
        train(config_of(), make_data(), checkpoints=checkpoints, oversight=stopping)
    assert (stopped.value.step, checkpoints.saved_step(), checkpoints.read_counts().num_steps) == (2, 2, 2)
    stopping.begin()
    again = folder_in(tmp_path)
    result = train(config_of(), make_data(), checkpoints=again, oversight=again.oversight)
    assert result.metrics["num_steps_done"] == NUM_STEPS
    assert result.metrics["num_steps_charged"] == NUM_STEPS


def test_stops_that_save_use_no_step_for_restarts_however_often(tmp_path: Path) -> None:
    """R = 0, charged in advance: every other step is one attempt's, and none is drawn twice."""
    config, starts = config_of(restarts=0), list[int]()
    write_drawn(folder_in(tmp_path).count_file, DrawCounts())
    for step in (2, 4):
        checkpoints = folder_in(tmp_path)
        stopping = checkpoints.oversight
        stopping.begin()
        checkpoints.decide = lambda question, to=stopping: not to.stop()  # type: ignore[method-assign, misc]
        starts.append(checkpoints.saved_step())
        with pytest.raises(TrainingStopped):
            train(config, make_data(), checkpoints=checkpoints, oversight=stopping)
        assert checkpoints.read_counts() == DrawCounts(num_attempts=step // 2, num_steps=step)
    checkpoints = folder_in(tmp_path)
    checkpoints.oversight.begin()
    assert starts == [0, 2]
    ended = train(config, make_data(), checkpoints=checkpoints, oversight=checkpoints.oversight).metrics
    assert (ended["num_steps_done"], ended["num_steps_charged"]) == (NUM_STEPS, NUM_STEPS)


def test_training_that_is_told_before_its_first_step_draws_none(tmp_path: Path) -> None:
    checkpoints = folder_in(tmp_path)
    checkpoints.oversight.stop()
    with pytest.raises(TrainingStopped):
        train(config_of(), make_data(), checkpoints=checkpoints, oversight=checkpoints.oversight)
    assert checkpoints.load() is None


@pytest.mark.parametrize("num_steps_before", [0, 4])
def test_attempts_that_are_told_before_they_draw_count_nothing(num_steps_before: int, tmp_path: Path) -> None:
    """Whether the time is over before a training begins, or while its first scores are computed."""
    if num_steps_before:
        first = folder_in(tmp_path, lambda question: bool(question.step < num_steps_before or told(question)))
        told = lambda _: first.oversight.stop() or True  # noqa: E731
        with pytest.raises(TrainingStopped):
            train(config_of(), make_data(), checkpoints=first, oversight=first.oversight)
    before = folder_in(tmp_path).read_counts()
    for _ in range(5):
        again = folder_in(tmp_path)
        again.oversight.stop()
        with pytest.raises(TrainingStopped) as stopped:
            train(config_of(), make_data(), checkpoints=again, oversight=again.oversight)
        assert stopped.value.step == num_steps_before
    assert folder_in(tmp_path).read_counts() == before
