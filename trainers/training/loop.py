"""One private training, without Ray: from the scores of the start to the scores of the result.

`train` is the loop. A step is defined in `trainers.training.step` and `dpgcl_core.private_step`. Checkpoints
and the driver's decisions are callbacks (`trainers.training.callbacks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from dpgcl_core.workers import SingleWorker, Workers
from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData as TrainingData
from trainers.files.checkpoint import Attempt, CheckpointFolder
from trainers.files.outcome_file import Outcomes
from trainers.files.oversight import Oversight
from trainers.models.task_networks import AnyEncoder
from trainers.training.callbacks import Checkpointing, Supervision, TrainingCallback
from trainers.training.observation import Series
from trainers.training.scores import Scorer
from trainers.training.step import Training, prepare


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training, to which the release policy has been applied.

    Attributes:
      metrics: final values by declared name.
      series: per-step values by declared name, as (step, value).
      encoder: the trained network, or with `ema_decay` the average of its iterates.
      outcomes: the outcomes of the scores, record by record, if the evaluation records are public;
        otherwise None.
    """

    metrics: dict[str, float]
    series: Series
    encoder: AnyEncoder
    outcomes: Outcomes | None = None


def train(
    config: TrainingConfig,
    data: TrainingData,
    *,
    workers: Workers | None = None,
    checkpoints: CheckpointFolder | None = None,
    oversight: Oversight | None = None,
    memory_share: float = 1.0,
    progress: Callable[[int], object] = lambda step: None,
) -> TrainingResult:
    """Train one encoder under `config.mechanism` and score it.

    Guarantee: with the label `proven`, the trained encoder and every iterate, and so all averages of them,
    are (ε, δ)-differentially private for adding or removing one record of `data.train` or
    `data.held_out_records`, at the ε reported as `epsilon`. This ε counts noised scores, the noised SNR and
    the steps that a resume repeated. If R repeated steps are charged in advance, the guarantee also holds if
    restarts depend on results that were seen (docs/theory/restarts.md). A training that `oversight` ends
    early, after scores that it released, has the ε of all T steps, because the number of steps taken also
    depends on results that were seen (docs/theory/ledger.md). Scores and by-products pass through
    `dpgcl_core.release.metrics.visible`, so with private records only releasable values are returned.

    Args:
      config: the training's configuration.
      data: the records; with shards, all of them or this worker's of `TrainingData.parts`.
      workers: this process among the data-parallel workers; a single worker by default. Every worker calls
        `train` with the same other arguments; the first worker's result counts. With shards, worker r of w
        draws shards r, r + w, …, so a single worker draws all of them.
      checkpoints: the folder where the training saves and resumes; None to do neither.
      oversight: decides whether the training continues, if there are checkpoints; None to train to the end.
      memory_share: the share of the machine's or the GPU's free memory that this worker may use.
      progress: function that is called with the number of steps done, a public number.

    Raises:
      ConfigError: the network mixes records, a name is unknown, or the release policy forbids the data, or
        a seeded run on private data.
      StorageError: a checkpoint is damaged, or restarts would repeat more steps than are charged in advance.
      TrainingStopped: `oversight` requested a stop; the steps drawn so far are saved.
    """
    training = prepare(config, data, workers or SingleWorker(), memory_share)
    is_first_worker = training.is_first_worker
    with training.threads, checkpoints.hold() if checkpoints and is_first_worker else nullcontext():
        scorer, callbacks = Scorer(training=training), list[TrainingCallback]()
        checkpointing = Checkpointing(training, checkpoints) if checkpoints else None
        scorer.score_start()  # before resuming, so that the outcomes do not reveal whether there was a resume
        if checkpointing:
            checkpointing.resume()
            supervision = [Supervision(checkpointing, oversight)] if oversight else []
            callbacks = [*supervision, checkpointing]
        progress(training.num_steps_done)
        if training.num_steps_done == 0:
            training.observer.final.update(training.observer.visible(scorer.at_start))
            scorer.score_on_the_way()
        for callback in callbacks:
            callback.on_begin()
        scorer.seconds, start_seconds, first_step = 0.0, time.perf_counter(), training.num_steps_done
        should_continue = all(callback.should_continue(None) for callback in callbacks)
        while should_continue and training.num_steps_done < config.mechanism.num_steps:
            for callback in callbacks:
                callback.before_step()
            training.take_step()
            progress(training.num_steps_done)
            scores = scorer.score_on_the_way()
            should_continue = all(callback.should_continue(scores) for callback in callbacks)
            if should_continue:
                for callback in callbacks:
                    callback.after_step()
        seconds = time.perf_counter() - start_seconds - scorer.seconds
        is_drawn = scorer.draw_noised_scores(checkpoints.begin_scoring if checkpoints else None)
        for callback in callbacks:
            callback.on_end(has_changed=is_drawn or not should_continue)
        num_steps = max(1, training.num_steps_done - first_step)
        timing = {"train_seconds": seconds, "step_seconds": seconds / num_steps}
        return _result(training, scorer, checkpointing, timing)


def _result(
    training: Training, scorer: Scorer, checkpointing: Checkpointing | None, timing: dict[str, float]
) -> TrainingResult:
    """Score the trained network, and return the releasable result of the training, with its ε."""
    if not training.is_first_worker:
        return TrainingResult(metrics={}, series={}, encoder=training.released_network)
    start_seconds = time.perf_counter()
    at_end = scorer.score_end()
    training.refuse_changed_networks()
    config, observer, num_steps_done = training.config, training.observer, training.num_steps_done
    mechanism = config.mechanism
    attempt = checkpointing.attempt if checkpointing else Attempt()
    num_restarts = attempt.num_restarts
    num_scorings = checkpointing.folder.read_counts().num_scorings if checkpointing else 1
    if mechanism.num_restart_steps is None:
        num_steps_charged = num_steps_done + attempt.num_steps_repeated
        num_steps_promised = mechanism.num_steps + attempt.num_steps_repeated  # even if it was ended early
    else:  # charged in advance, for all restarts that there might have been
        num_steps_charged, num_restarts, num_scorings = mechanism.num_steps_charged, 0, 1
        num_steps_promised = num_steps_charged
    training_metrics = {
        "evaluation_seconds": time.perf_counter() - start_seconds + scorer.seconds,
        "num_steps_done": num_steps_done,
        "num_restarts": attempt.num_restarts,
        "num_steps_charged": num_steps_charged,
    }
    if config.guarantee_label == "proven":
        training_metrics["epsilon"] = config.epsilon(
            num_steps_promised, num_restarts=num_restarts, num_scorings=num_scorings
        )
    return TrainingResult(
        metrics=observer.visible(training_metrics | timing | at_end | observer.final),
        series=observer.series,
        encoder=training.released_network,
        outcomes=scorer.outcomes(at_end),
    )
