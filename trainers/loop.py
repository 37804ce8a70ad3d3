"""One private training, without Ray: the data's way from records to the optimizer step.

Stations 2 to 9 stand in `_step`, in order. See ARCHITECTURE.md for the file of each station.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.clipping import GroupLosses, GroupReport, num_trainable, trainable_parameters
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses import two_view_group_loss
from dpgcl_core.randomness import Randomness, SecretRandomness, SeededNonPrivateRandomness
from trainers.checkpoint import Attempt, Checkpoint, CheckpointFolder
from trainers.config import TrainingConfig
from trainers.data.dataset import Records
from trainers.encoder import Encoder, build_encoder, refuse_cross_record
from trainers.evaluate import evaluate
from trainers.observe import Observer, Series
from trainers.optimizers import build_optimizer
from trainers.views import make_views
from trainers.workers import SingleWorker, Workers


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What one training may touch.

    Attributes:
      train: the records the guarantee is about.
      index: labelled records for k-NN and the probe, or None: no scores.
      queries: records that are scored, or None: no scores.
      train_is_public: with private records only releasable metrics leave the training.
      evaluation_is_public: whether `index` and `queries` are public.
    """

    train: Records
    index: Records | None
    queries: Records | None
    train_is_public: bool
    evaluation_is_public: bool


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What leaves a training: the release policy has been applied.

    Attributes:
      metrics: final values by declared name.
      series: per-step values by declared name, as (step, value).
      encoder: the trained network.
    """

    metrics: dict[str, float]
    series: Series
    encoder: Encoder


@dataclass
class _Run:
    """The moving parts of one training."""

    config: TrainingConfig
    data: TrainingData
    workers: Workers
    randomness: Randomness
    encoder: Encoder
    optimizer: torch.optim.Optimizer
    observer: Observer
    device: torch.device
    total: Tensor
    buffers: dict[str, Tensor]
    step: int = 0


def train(
    config: TrainingConfig,
    data: TrainingData,
    *,
    workers: Workers | None = None,
    checkpoints: CheckpointFolder | None = None,
) -> TrainingResult:
    """Trains one encoder under `config.mechanism` and scores it.

    Guarantee: with the label `proven`, the trained encoder and every iterate are (ε, δ)-differentially
    private for adding or removing one record of `data.train`, at the ε reported as `epsilon`, which
    counts the steps that a resume repeated. Scores and by-products pass through
    `dpgcl_core.metrics.visible`, so with private records only releasable ones are returned.

    Args:
      config: the settings.
      data: the records.
      workers: this process among the data-parallel workers; default a single one. Every worker calls
        `train` with the same arguments; the first one's result counts.
      checkpoints: where to save and resume; None for neither.

    Raises:
      ConfigError: the network mixes records, or a name is unknown.
      StorageError: a checkpoint is damaged.
    """
    workers = workers or SingleWorker()
    run = _prepare(config, data, workers)
    with checkpoints.held() if checkpoints and workers.rank == 0 else nullcontext():
        return _train(run, checkpoints)


def _train(run: _Run, checkpoints: CheckpointFolder | None) -> TrainingResult:
    config = run.config
    attempt = _resume(run, checkpoints)
    if run.step == 0 and config.evaluation.also_untrained:
        run.observer.final.update(_scores(run, prefix="untrained_"))
    started, first_step = time.perf_counter(), run.step
    while run.step < config.mechanism.num_steps:
        _step(run)
        run.step += 1
        if checkpoints and run.step % checkpoints.every_steps == 0:
            _save(run, checkpoints)
    seconds = time.perf_counter() - started
    if checkpoints and run.step % checkpoints.every_steps:
        _save(run, checkpoints)
    timing = {"train_seconds": seconds, "step_seconds": seconds / max(1, run.step - first_step)}
    return _finish(run, attempt, timing)


def _step(run: _Run) -> None:
    """One private step, stations 2 to 9; an empty draw is a step like any other."""
    mechanism, observer = run.config.mechanism, run.observer
    groups, batch_size = _draw_groups(run)
    run.total.zero_()
    reports = _add_clipped_sum(run, groups, run.total, run.config.num_augmentations)
    _refuse_written_buffers(run)
    run.workers.sum_at_first(run.total)
    recorded, bare_norm = observer.wants(run.step), None
    if recorded:
        observer.record_groups(run.step, batch_size, groups.size, reports, run.workers)
        bare_norm = _norm_without_augmentation(run, groups)
    if run.workers.rank == 0:
        noise = mechanism.noise().draw(len(run.total), run.randomness.generator(run.step, "noise"))
        if recorded and mechanism.is_private:
            observer.record_snr(run.step, _norm(run.total), bare_norm, noise)
        run.total.copy_(run.total.double() + noise.to(run.device))
    run.workers.share(run.total)
    _apply(run, run.total / mechanism.divisor)


def _refuse_written_buffers(run: _Run) -> None:
    """A buffer that follows the data would be released without noise; the first look was at random images."""
    for name, buffer in run.encoder.named_buffers():
        if not torch.equal(buffer, run.buffers[name]):
            raise ConfigError(f"the network wrote its buffer {name!r} during training; keep no such state")


def _draw_groups(run: _Run) -> tuple[NDArray[np.int64], int]:
    """Returns this worker's share of the step's groups, `[groups, group_size]` rows of the records.

    The first worker draws for all, in secret; whole groups are dealt out, so no group and no negative
    crosses a worker.
    """
    mechanism, groups, batch_size = run.config.mechanism, None, 0
    if run.workers.rank == 0:
        sampling = run.randomness.generator(run.step, "sampling")
        sample = mechanism.sampler().sample(len(run.data.train), sampling)
        groups = mechanism.grouper().group(sample, run.randomness.generator(run.step, "permutation"))
        batch_size = len(sample)
    groups = run.workers.share_groups(groups)
    return groups[run.workers.rank :: run.workers.count], batch_size


def _add_clipped_sum(
    run: _Run, groups: NDArray[np.int64], total: Tensor, num_augmentations: int
) -> list[GroupReport]:
    """Adds the clipped gradients of `groups` to `total`, a microbatch of whole groups at a time."""
    config, num_views = run.config, 2 + num_augmentations
    clipper = config.mechanism.clipper()

    group_losses = group_losses_of(run.encoder, config.temperature)
    reports = []
    if groups.size:
        at_once = max(1, config.performance.max_views_per_microbatch // (groups.shape[1] * num_views))
        for start in range(0, len(groups), at_once):
            views = _views(run, groups[start : start + at_once], num_views)
            reports.append(clipper.add_clipped_sum(total, run.encoder, group_losses, views))
    return reports


def group_losses_of(encoder: Encoder, temperature: float) -> GroupLosses:
    """Returns stations 5 and 6: views `[groups, group_size, views, C, H, W]` to losses `[groups]`."""

    def group_losses(views: Tensor) -> Tensor:
        embeddings = encoder(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return two_view_group_loss(embeddings, temperature=temperature)

    return group_losses


def _views(run: _Run, groups: NDArray[np.int64], num_views: int) -> Tensor:
    """Returns views, float32 `[groups, group_size, num_views, channels, height, width]`."""
    rows = groups.reshape(-1)
    views = make_views(
        torch.from_numpy(run.data.train.images[rows]).to(run.device),
        run.data.train.ids[rows],
        config=run.config.views,
        seed=run.config.public_seed,
        step=run.step,
        num_views=num_views,
    )
    return views.unflatten(0, groups.shape)


def _apply(run: _Run, gradient: Tensor) -> None:
    """Hands the private gradient `[num_parameters]` to the optimizer: post-processing from here on."""
    offset = 0
    for parameter in trainable_parameters(run.encoder):
        parameter.grad = gradient[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    run.optimizer.step()


def _norm_without_augmentation(run: _Run, groups: NDArray[np.int64]) -> float | None:
    """Returns the first clean sum's norm with num_augmentations = 0, on the same groups and views."""
    if run.step > 0 or not run.config.mechanism.is_private:
        return None
    bare = torch.zeros_like(run.total)
    _add_clipped_sum(run, groups, bare, 0)
    run.workers.sum_at_first(bare)
    return _norm(bare)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _prepare(config: TrainingConfig, data: TrainingData, workers: Workers) -> _Run:
    if not data.train_is_public and config.guarantee_label == "none":
        raise ConfigError(
            "private records are trained on with a guarantee only; got "
            f"noise_multiplier = {config.mechanism.noise_multiplier}, "
            f"seeded_non_private = {config.seeded_non_private}"
        )
    torch.set_num_threads(config.performance.threads_per_worker)
    device = torch.device(_device_name(config.performance.device))
    shape = data.train.images.shape[1:]
    encoder = build_encoder(config.network, shape, config.public_seed)
    refuse_cross_record(encoder, shape)
    encoder.to(device)
    randomness: Randomness = SecretRandomness()
    if config.seeded_non_private:
        randomness = SeededNonPrivateRandomness(config.public_seed)
    return _Run(
        config=config,
        data=data,
        workers=workers,
        randomness=randomness,
        encoder=encoder,
        optimizer=build_optimizer(config.optimizer, trainable_parameters(encoder)),
        observer=Observer(
            config, train_is_public=data.train_is_public, evaluation_is_public=data.evaluation_is_public
        ),
        device=device,
        total=torch.zeros(num_trainable(encoder), device=device),
        buffers={name: buffer.clone() for name, buffer in encoder.named_buffers()},
    )


def _device_name(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _resume(run: _Run, checkpoints: CheckpointFolder | None) -> Attempt:
    if checkpoints is None:
        return Attempt(num_restarts=0, num_steps_repeated=0, saved_step=0, every_steps=0)
    saved = checkpoints.load()
    if saved is not None:
        run.encoder.load_state_dict(saved.model)
        run.optimizer.load_state_dict(saved.optimizer)
        run.step = saved.step
        run.observer.series, run.observer.final = saved.series, saved.final
    if run.workers.rank > 0:
        return Attempt(num_restarts=0, num_steps_repeated=0, saved_step=run.step, every_steps=0)
    return checkpoints.begin_attempt(run.step, run.config.mechanism.num_steps)


def _save(run: _Run, checkpoints: CheckpointFolder) -> None:
    if run.workers.rank > 0:
        return
    checkpoints.save(
        Checkpoint(
            step=run.step,
            model=run.encoder.state_dict(),
            optimizer=run.optimizer.state_dict(),
            series=run.observer.series,
            final=run.observer.final,
        )
    )


def _scores(run: _Run, *, prefix: str = "") -> dict[str, float]:
    """Returns the scores that may be seen; none are computed where none may."""
    data = run.data
    if data.index is None or data.queries is None or run.workers.rank > 0:
        return {}
    if not (data.train_is_public or data.evaluation_is_public):
        return {}
    scores = evaluate(
        run.encoder,
        data.index,
        data.queries,
        run.config.evaluation,
        view_config=run.config.views,
        seed=run.config.public_seed,
        device=run.device,
        prefix=prefix,
    )
    return run.observer.visible(scores)


def _finish(run: _Run, attempt: Attempt, timing: dict[str, float]) -> TrainingResult:
    if run.workers.rank > 0:
        return TrainingResult(metrics={}, series={}, encoder=run.encoder)
    started = time.perf_counter()
    scores = _scores(run)
    num_steps_charged = run.step + attempt.num_steps_repeated
    charged = {
        "evaluation_seconds": time.perf_counter() - started,
        "num_steps_done": run.step,
        "num_restarts": attempt.num_restarts,
        "num_steps_charged": num_steps_charged,
    }
    if run.config.guarantee_label == "proven":
        charged["epsilon"] = run.config.mechanism.epsilon(num_steps_charged)
    metrics = run.observer.visible(charged | timing | scores | run.observer.final)
    return TrainingResult(metrics=metrics, series=run.observer.series, encoder=run.encoder)
