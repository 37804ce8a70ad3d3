"""Callbacks of the training loop: its checkpoints, and the decisions of the sweep's driver.

Every worker calls every hook at the same step; the first worker makes each decision for all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from trainers.files.checkpoint import Attempt, Checkpoint, CheckpointFolder
from trainers.files.oversight import Oversight, TrainingStopped
from trainers.training.optimizers import load_optimizer
from trainers.training.step import Training


class TrainingCallback:
    """Observes one training; every hook does nothing unless overridden."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def on_begin(self) -> None:
        """Prepare for this attempt, just before its first draw."""

    def should_continue(self, scores: Mapping[str, float] | None) -> bool:
        """Return whether to take another step, given the last step's scores; None before the first step."""
        return True

    def before_step(self) -> None:
        """Check that a step may be drawn; an exception raised here ends the attempt."""

    def after_step(self) -> None:
        """Act after a step; not called if a callback ends the training with this step."""

    def on_end(self, has_changed: bool) -> None:
        """Act after the last draw; `has_changed`: whether the training changed since `after_step`."""

    def decide_for_all(self, decide: Callable[[], bool]) -> bool:
        """Return the first worker's decision on every worker; `decide` is called only there."""
        training = self.training
        decision = torch.tensor([float(decide())]) if training.is_first_worker else torch.zeros(1)
        training.private_step.workers.gather_shares(decision)
        return bool(decision.item())


class Checkpointing(TrainingCallback):
    """Counts an attempt's steps before they are drawn, and saves the training.

    Attributes:
      attempt: the counts of steps and restarts when this attempt began.
    """

    def __init__(self, training: Training, folder: CheckpointFolder) -> None:
        super().__init__(training)
        self.folder, self.attempt = folder, Attempt()

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        checkpoint, training = self.folder.load(), self.training
        if checkpoint is not None:
            training.encoder.load_state_dict(checkpoint.model)
            load_optimizer(training.optimizer, checkpoint.optimizer)
            if training.average:
                training.average.load(checkpoint.average)
            training.num_steps_done = checkpoint.step
            training.observer.series, training.observer.final = checkpoint.series, checkpoint.final

    def on_begin(self) -> None:
        if self.training.is_first_worker:
            mechanism = self.training.config.mechanism
            self.attempt = self.folder.begin_attempt(
                self.training.num_steps_done, mechanism.num_steps, mechanism.num_restart_steps
            )

    def before_step(self) -> None:
        self.folder.refuse_outdated()

    def after_step(self) -> None:
        if self.training.num_steps_done % self.folder.every_steps == 0:
            self.save()

    def on_end(self, has_changed: bool) -> None:
        if has_changed or self.training.num_steps_done % self.folder.every_steps:
            self.save(is_last=True)

    def save(self, *, is_last: bool = False) -> None:
        """Save a checkpoint and, unless `is_last`, count the steps until the next one in advance."""
        training = self.training
        if not training.is_first_worker:
            return
        training.refuse_changed_networks()
        self.folder.save(
            Checkpoint(
                step=training.num_steps_done,
                model=training.encoder.state_dict(),
                optimizer=training.optimizer.state_dict(),
                average=training.average.state() if training.average else None,
                series=training.observer.series,
                final=training.observer.final,
            ),
            is_last=is_last,
        )


class Supervision(TrainingCallback):
    """Stops the training to be resumed later, or ends it by its scores so far, as the driver decides.

    It comes before `Checkpointing`: an attempt that is stopped before its first draw counts no steps, and so
    costs none, however often that happens.
    """

    def __init__(self, checkpointing: Checkpointing, oversight: Oversight) -> None:
        super().__init__(checkpointing.training)
        self.checkpointing, self.oversight = checkpointing, oversight

    def on_begin(self) -> None:
        if self.decide_for_all(self.oversight.must_stop):
            raise TrainingStopped(self.training.num_steps_done)

    def before_step(self) -> None:
        if self.decide_for_all(self.oversight.must_stop):
            self.checkpointing.save(is_last=True)
            raise TrainingStopped(self.training.num_steps_done)

    def should_continue(self, scores: Mapping[str, float] | None) -> bool:
        """Return whether the scores allow another step.

        Before the first step, return False if an earlier attempt ended here and died without a result.
        """
        oversight, step = self.oversight, self.training.num_steps_done
        if not oversight.by_scores:
            return True
        if scores is None:
            return self.decide_for_all(lambda: (ended := oversight.ended_at()) is None or step < ended)
        is_last = step >= self.training.config.mechanism.num_steps
        if is_last or not self.training.observer.wants_scores(step):
            return True
        return self.decide_for_all(
            lambda: oversight.goes_on(step, scores, self.checkpointing.folder.refuse_outdated)
        )
