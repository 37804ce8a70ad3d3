"""One private training, without Ray: the data's way from records to the optimizer step.

Stages 2 to 9 stand in `_step`, in order. See ARCHITECTURE.md for the file of each stage. What depends on the
kind of records is the task's (`trainers.tasks.task`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.capture import CapturedPasses
from dpgcl_core.clipping.isolation import refuse_changed_state, unwritten, whole_state
from dpgcl_core.clipping.types import (
    GroupInputs,
    GroupReport,
    Objective,
    no_sum,
    trainable_parameters,
    zeros_where_incomplete,
)
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.method import GradientRule, GroupRule
from dpgcl_core.mechanism.passes import groups_of_a_pass
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.parts import (
    PartNoise,
    add_in_parts,
    drawn_of,
    drawn_on_gpu,
    in_float32,
    parts_of,
)
from dpgcl_core.noise.sources import DrawSource
from dpgcl_core.sampling.groups import BATCH
from dpgcl_core.sampling.stage import DrawnGroups
from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData, image_shape_of
from trainers.files.checkpoint import Attempt, Checkpoint, CheckpointFolder, holds_noised_scores
from trainers.files.outcomes import Outcomes
from trainers.files.oversight import Oversight, TrainingStopped
from trainers.models.encoder import device_named
from trainers.models.networks import AnyEncoder
from trainers.models.precision import gradient_scale
from trainers.tasks.scoring import all_scores, public_outcomes
from trainers.tasks.task import AnyTask, task_of
from trainers.training.allocation import keep_freed_memory
from trainers.training.averaging import WeightAverage, average_of
from trainers.training.foreign import refuse_mixing_network
from trainers.training.microbatch import in_turn, max_views
from trainers.training.observe import Observer, Series
from trainers.training.optimizers import (
    build_optimizer,
    learning_rate_at,
    load_optimizer,
    take_step,
)
from trainers.training.precision import add_clipped_sum
from trainers.training.release import check_release, noised_scores
from trainers.training.warm_start import starting_encoder
from trainers.training.workers import SingleWorker, Workers

_THREADS_BESIDE = 2
"""At least: beside a GPU one draws noise, one makes views, and neither waits for the other."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What leaves a training: the release policy has been applied.

    Attributes:
      metrics: final values by declared name.
      series: per-step values by declared name, as (step, value).
      encoder: the trained network, or with `ema_decay` the average of its iterates.
      outcomes: of the final scores, record by record, where the evaluation records are public; None of
        others.
    """

    metrics: dict[str, float]
    series: Series
    encoder: AnyEncoder
    outcomes: Outcomes | None = None


@dataclass
class _Run:
    """The moving parts of one training."""

    config: TrainingConfig
    task: AnyTask
    data: TrainingData
    workers: Workers
    randomness: DrawSource
    encoder: AnyEncoder
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    observer: Observer
    device: torch.device
    total: Tensor
    states: list[tuple[nn.Module, dict[str, Any]]]
    max_views: int
    beside: ThreadPoolExecutor
    passes: CapturedPasses | None = None
    step: int = 0
    seconds_scoring: float = 0.0
    scores_before: dict[str, float] = field(default_factory=dict)

    @property
    def released(self) -> AnyEncoder:
        """The network that is scored and returned."""
        return self.average.network if self.average and self.config.optimizer.ema_decay else self.encoder

    @cached_property
    def objective(self) -> Objective:
        """Stages 5 and 6, one function for all steps: the clipping engine checks every new one."""
        return self.task.objective(self.config, self.encoder, self.config.network, self.target)

    @property
    def target(self) -> AnyEncoder | None:
        """The network that a method without negatives regresses onto."""
        if self.average is None or not self.config.mechanism.rules.needs_target:
            return None
        return self.average.network


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
    are (ε, δ)-differentially private for adding or removing one record of `data.train` or `data.scored`, at
    the ε reported as `epsilon`, which counts noised numbers and the steps that a resume repeated; where R of
    these are charged in advance, also if restarts follow what was seen (docs/theory/restarts.md). A training
    that `oversight` ends early, after scores that it released, has the ε of all T steps: the number of steps
    that were made is one more thing that follows what was seen (docs/theory/ledger.md). Scores and
    by-products pass through `dpgcl_core.release.metrics.visible`, so with private records only releasable
    ones are returned.

    Args:
      config: the settings.
      data: the records.
      workers: this process among the data-parallel workers; default a single one. Every worker calls
        `train` with the same arguments; the first one's result counts.
      checkpoints: where to save and resume; None for neither.
      oversight: decides whether it goes on, with checkpoints alone; None: to its end.
      memory_share: the part of the machine's free memory, or of the GPU's, that this worker may use.
      progress: hears of the number of steps done, a public number.

    Raises:
      ConfigError: the network mixes records, a name is unknown, or the release policy forbids the data
        or their plain randomness.
      StorageError: a checkpoint is damaged, or restarts would repeat more steps than are charged in advance.
      TrainingStopped: the time is over; what was drawn is saved.
    """
    workers = workers or SingleWorker()
    run = _prepare(config, data, workers, memory_share)
    with run.beside, checkpoints.held() if checkpoints and workers.rank == 0 else nullcontext():
        return _train(run, checkpoints, oversight, progress)


def _train(
    run: _Run,
    checkpoints: CheckpointFolder | None,
    oversight: Oversight | None,
    progress: Callable[[int], object],
) -> TrainingResult:
    config = run.config
    if config.evaluation.also_untrained:
        # Before every resume: the outcomes must not tell whether there was one.
        run.scores_before = _scores_before_training(run)
    _resume(run, checkpoints)
    progress(run.step)
    if run.step == 0:
        run.observer.final.update(run.observer.visible(run.scores_before))
        _score_on_the_way(run)
    attempt = _begin(run, checkpoints, oversight)
    run.seconds_scoring, started, first_step = 0.0, time.perf_counter(), run.step
    goes_on = not _has_ended(run, oversight)
    while goes_on and run.step < config.mechanism.num_steps:
        if checkpoints:
            checkpoints.refuse_outdated()
            _stop_if_told(run, checkpoints, oversight)
        _step(run)
        run.step += 1
        progress(run.step)
        scores = _score_on_the_way(run)
        goes_on = _goes_on(run, scores, checkpoints, oversight)
        if goes_on and checkpoints and run.step % checkpoints.every_steps == 0:
            _save(run, checkpoints)
    seconds = time.perf_counter() - started - run.seconds_scoring
    drawn = _draw_noised_scores(run, checkpoints)
    if checkpoints and (drawn or not goes_on or run.step % checkpoints.every_steps):
        _save(run, checkpoints, is_last=True)
    timing = {"train_seconds": seconds, "step_seconds": seconds / max(1, run.step - first_step)}
    return _finish(run, attempt, timing, checkpoints.drawn().num_scorings if checkpoints else 1)


def _stop_if_told(run: _Run, checkpoints: CheckpointFolder, oversight: Oversight | None) -> None:
    """Save and end where the driver has told the training to stop; all workers at the same step."""
    if oversight is not None and _at_all(run, oversight.must_stop):
        _save(run, checkpoints, is_last=True)
        raise TrainingStopped(run.step)


def _goes_on(
    run: _Run,
    scores: dict[str, float],
    checkpoints: CheckpointFolder | None,
    oversight: Oversight | None,
) -> bool:
    """Whether the driver lets the training go on after the scores of this step; True where it has none."""
    is_last = run.step >= run.config.mechanism.num_steps
    if oversight is None or not oversight.by_scores or is_last or not run.observer.wants_scores(run.step):
        return True
    look = checkpoints.refuse_outdated if checkpoints else lambda: None
    return _at_all(run, lambda: oversight.goes_on(run.step, scores, look))


def _has_ended(run: _Run, oversight: Oversight | None) -> bool:
    """Whether an earlier attempt was ended for its scores by this step, and died before it had a result."""
    if oversight is None or not oversight.by_scores:
        return False
    return _at_all(run, lambda: (ended := oversight.ended_at()) is not None and run.step >= ended)


def _at_all(run: _Run, decide: Callable[[], bool]) -> bool:
    """Let the first worker decide for all."""
    decided = torch.tensor([float(decide())]) if run.workers.rank == 0 else torch.zeros(1)
    run.workers.share(decided)
    return bool(decided.item())


def _step(run: _Run) -> None:
    """One private step, stages 2 to 9; an empty draw is a step like any other."""
    mechanism, observer = run.config.mechanism, run.observer
    num_summed = run.randomness.num_summed_normals
    law = mechanism.noise(num_summed=num_summed)
    groups = _draw_groups(run)
    noise_of = _noise_of(run, law)
    run.total.zero_()
    foreign = [network for network, _ in run.states] if run.config.network.is_foreign else []
    with unwritten(*foreign):
        reports = _add_clipped_sum(run, groups, run.total, run.config.num_augmentations)
    _refuse_changed(run)
    run.workers.sum_at_first(run.total)
    recorded, bare_norm = observer.wants(run.step), None
    if recorded:
        observer.record_groups(run.step, groups.batch_size, groups.num_grouped, reports, run.workers)
        bare_norm = _norm_without_augmentation(run, groups)
    if noise_of is not None:
        clean_norm = _norm(run.total) if recorded and mechanism.is_private else None
        if observer.releases_noised_snr(run.step):
            generator = run.randomness.generator(run.step, "snr noise")
            observer.record_noised_snr(run.total, generator, num_summed=num_summed)
        beside = run.beside if run.device.type == "cpu" else None  # a GPU adds them in turn
        noise_norm = add_in_parts(run.total, law, noise_of, beside=beside)
        if clean_norm is not None:
            observer.record_snr(run.step, clean_norm, bare_norm, noise_norm)
    noisy = in_float32(run.total)  # rounded already, where noise was added
    run.workers.share(noisy)
    _apply(run, noisy.div_(mechanism.divisor))


def _refuse_changed(run: _Run) -> None:
    """Refuse networks of which a pass changed more than the optimizer may: it would be released."""
    for network, before in run.states:
        refuse_changed_state(network, before)


def _noise_of(run: _Run, law: GaussianNoise) -> PartNoise | None:
    """Return how to get the parts of the step's one noise draw; None but at the first worker.

    A GPU draws that of public data itself. Other noise is drawn in threads beside it while it computes the
    gradients, of which it needs nothing; one thread is left for the views. On a CPU the gradients have all
    threads and most memory, so parts are drawn once they are to be added. A step that fails throws its draw
    away, unreleased.
    """
    if run.workers.rank > 0:
        return None
    if run.device.type == "cuda" and run.randomness.gpu_seed(run.step, "noise") is not None:
        return drawn_on_gpu(law, partial(_gpu_seed, run), run.device)
    noise_of = drawn_of(law, partial(run.randomness.generator, run.step))
    if run.device.type == "cpu":
        return noise_of
    parts = parts_of(len(run.total))
    shares = min(len(parts), max(1, _threads_beside(run.config) - 1))

    def draw(share: int) -> list[Tensor]:
        return [noise_of(part) for part in parts[share::shares]]

    drawn = [run.beside.submit(draw, share) for share in range(shares)]
    places = {part.start: divmod(index, shares) for index, part in enumerate(parts)}

    def drawn_part(part: slice) -> Tensor:
        row, share = places[part.start]
        return drawn[share].result()[row]

    return drawn_part


def _gpu_seed(run: _Run, purpose: str) -> int:
    seed = run.randomness.gpu_seed(run.step, purpose)
    assert seed is not None
    return seed


def _threads_beside(config: TrainingConfig) -> int:
    return max(_THREADS_BESIDE, config.performance.threads_per_worker)


def _draw_groups(run: _Run) -> DrawnGroups:
    """Return this worker's share of the step's groups, with their mask.

    The first worker draws for all, in secret; whole groups are dealt out, so no group and no negative
    crosses a worker.
    """
    drawn = None
    if run.workers.rank == 0:
        stage = run.config.mechanism.group_stage()
        drawn = stage.draw(
            len(run.data.train),
            sampling=run.randomness.generator(run.step, "sampling"),
            permutation=run.randomness.generator(run.step, "permutation"),
        )
        if not stage.yields_incomplete and not drawn.complete.all():
            raise ConfigError("a group stage that yields incomplete groups must say so: yields_incomplete")
    groups = run.workers.share_groups(drawn)
    return groups.take(slice(run.workers.rank, None, run.workers.count))


def _add_clipped_sum(
    run: _Run, groups: DrawnGroups, total: Tensor, num_augmentations: int
) -> list[GroupReport]:
    """Add the clipped gradients of `groups` to `total`, a microbatch of whole groups at a time."""
    config = run.config
    if not groups.rows.size:
        return []
    at_once = _groups_at_once(run, groups.rows.shape[1], num_augmentations)
    rule, scale = _rule(run, at_once), gradient_scale(config.network)
    draws = run.randomness.generator(run.step, "statistics") if rule.needs_draws else None
    if rule.whole_batch:
        at_once = len(groups)
    groups = groups.filled_up(at_once)  # one shape, whatever was drawn
    beside = run.beside if config.performance.prefetch else None
    starts = range(0, len(groups), at_once)
    microbatches = [groups.take(slice(start, start + at_once)) for start in starts]

    def make(start: int) -> GroupInputs:
        rows = groups.rows[start : start + at_once]
        complete = torch.from_numpy(groups.complete[start : start + at_once])
        inputs = _inputs(run, rows, num_augmentations)
        if isinstance(inputs, Tensor):
            return zeros_where_incomplete(inputs, complete)
        return tuple(zeros_where_incomplete(leaf, complete) for leaf in inputs)

    made = in_turn(make, starts, beside)
    return [
        add_clipped_sum(
            rule, total, run.encoder, run.objective, inputs, scale, draws, torch.from_numpy(some.complete)
        )
        for some, inputs in zip(microbatches, made, strict=True)
    ]


def _groups_at_once(run: _Run, group_size: int, num_augmentations: int) -> int:
    fits = max(1, run.max_views // (group_size * run.task.num_views(run.config, num_augmentations)))
    return groups_of_a_pass(run.config.mechanism, most=fits, num_workers=run.workers.count)


def _rule(run: _Run, at_once: int) -> GradientRule:
    rule = run.config.rule(at_once)
    if run.passes is None or not isinstance(rule, GroupRule):
        return rule
    return dataclasses.replace(rule, clipper=dataclasses.replace(rule.clipper, passes=run.passes))


def _capture_passes(run: _Run, image_shape: tuple[int, ...]) -> None:
    """Let a GPU capture the training's pass, on groups of zeros that contribute nothing."""
    config, size = run.config, run.config.mechanism.group_size
    if run.passes is None or size == BATCH or config.rule().whole_batch:
        return
    at_once = _groups_at_once(run, int(size), config.num_augmentations)
    num_views = run.task.num_views(config, config.num_augmentations)
    inputs = run.task.blank_inputs(run.encoder, image_shape, (at_once, int(size), num_views))
    nothing = torch.zeros(at_once, dtype=torch.bool)
    rule, scale = _rule(run, at_once), gradient_scale(config.network)
    if rule.needs_draws:
        return
    with run.passes.capturing():
        add_clipped_sum(rule, run.total, run.encoder, run.objective, inputs, scale, None, nothing)


def _inputs(run: _Run, groups: NDArray[np.int64], num_augmentations: int) -> GroupInputs:
    """Return what the objective takes of some groups, `[groups, group_size, views, ...]` each."""
    return run.task.inputs(
        run.config,
        run.encoder,
        run.data.train,
        groups,
        step=run.step,
        num_augmentations=num_augmentations,
    )


def _apply(run: _Run, gradient: Tensor) -> None:
    """Hand the private gradient `[num_parameters]` to the optimizer: post-processing from here on."""
    rate = learning_rate_at(run.config.optimizer, run.step, run.config.mechanism.num_steps)
    take_step(run.optimizer, trainable_parameters(run.encoder), gradient, learning_rate=rate)
    run.task.after_step(run.encoder)
    if run.average:
        run.average.update(run.encoder, run.step)


def _norm_without_augmentation(run: _Run, groups: DrawnGroups) -> float | None:
    """Return the first clean sum's norm with num_augmentations = 0, on the same groups and views."""
    if run.step > 0 or not run.config.mechanism.is_private:
        return None
    bare = torch.zeros_like(run.total)
    _add_clipped_sum(run, groups, bare, 0)
    run.workers.sum_at_first(bare)
    return _norm(bare)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _prepare(config: TrainingConfig, data: TrainingData, workers: Workers, memory_share: float = 1.0) -> _Run:
    check_release(config, data)
    randomness = config.randomness(data_are_private=not data.train_is_public)
    torch.set_num_threads(config.performance.threads_per_worker)
    keep_freed_memory()
    device = device_named(config.performance.device)
    task, shape = task_of(config), image_shape_of(data.train)
    task.check(config, data.train)
    encoder = starting_encoder(config, shape)
    task.check_network(config, encoder, shape)
    task.place(encoder, device, shape)
    fits = max_views(config, encoder, shape, memory_share=memory_share)
    refuse_mixing_network(config, encoder, shape, fits)
    average = average_of(config, encoder)
    networks: list[nn.Module] = [encoder, *([average.network] if average else [])]
    run = _Run(
        config=config,
        task=task,
        data=data,
        workers=workers,
        randomness=randomness,
        encoder=encoder,
        optimizer=build_optimizer(config.optimizer, trainable_parameters(encoder)),
        average=average,
        observer=Observer(
            config, train_is_public=data.train_is_public, evaluation_is_public=data.evaluation_is_public
        ),
        device=device,
        total=no_sum(encoder),
        states=[(network, whole_state(network)) for network in networks],
        max_views=fits,
        beside=ThreadPoolExecutor(_threads_beside(config)),
        passes=CapturedPasses() if _repeats_passes(config, device) else None,
    )
    _capture_passes(run, shape)
    return run


def _repeats_passes(config: TrainingConfig, device: torch.device) -> bool:
    """Whether a GPU may replay passes: network and loss are this package's, and the same at every step."""
    return not (device.type != "cuda" or config.network.is_foreign or config.mechanism.rules.needs_target)


def _resume(run: _Run, checkpoints: CheckpointFolder | None) -> None:
    """Go on from the checkpoint, if there is one."""
    if checkpoints is None:
        return
    saved = checkpoints.load()
    if saved is not None:
        run.encoder.load_state_dict(saved.model)
        load_optimizer(run.optimizer, saved.optimizer)
        if run.average:
            run.average.load(saved.average)
        run.step = saved.step
        run.observer.series, run.observer.final = saved.series, saved.final


def _begin(run: _Run, checkpoints: CheckpointFolder | None, oversight: Oversight | None) -> Attempt:
    """Count the attempt and its first steps, just before they are drawn.

    One that is told to stop earlier counts none, and so costs none, however often that happens.
    """
    if checkpoints is None:
        return Attempt()
    if oversight is not None and _at_all(run, oversight.must_stop):
        raise TrainingStopped(run.step)
    if run.workers.rank > 0:
        return Attempt()
    mechanism = run.config.mechanism
    return checkpoints.begin_attempt(run.step, mechanism.num_steps, mechanism.num_restart_steps)


def _save(run: _Run, checkpoints: CheckpointFolder, *, is_last: bool = False) -> None:
    """Save, and unless it is the last time count the steps until the next."""
    if run.workers.rank > 0:
        return
    _refuse_changed(run)
    checkpoints.save(
        Checkpoint(
            step=run.step,
            model=run.encoder.state_dict(),
            optimizer=run.optimizer.state_dict(),
            average=run.average.state() if run.average else None,
            series=run.observer.series,
            final=run.observer.final,
        ),
        is_last=is_last,
    )


def _scores_before_training(run: _Run) -> dict[str, float]:
    """Return the scores of the start and of the same network at random weights, as `_computed_scores`."""
    config = run.config
    if config.starts_at_random:
        return _computed_scores(run, prefix="untrained_")
    is_private = config.warm_start is not None and config.warm_start.private is not None
    found = _computed_scores(run, prefix="private_start_" if is_private else "public_start_")
    random = dataclasses.replace(config, warm_start=None)
    if run.workers.rank > 0 or not random.starts_at_random:
        return found
    shape = image_shape_of(run.data.train)
    network = starting_encoder(random, shape)
    run.task.place(network, run.device, shape)
    return found | _computed_scores(run, network, prefix="untrained_")


def _computed_scores(
    run: _Run, network: AnyEncoder | None = None, *, prefix: str = "", with_probes: bool = True
) -> dict[str, float]:
    """Return the scores of a network, the released one unless given, before the release policy.

    They come with their outcomes; none are computed where none may be seen.
    """
    if run.workers.rank > 0:
        return {}
    return all_scores(
        run.task,
        run.released if network is None else network,
        run.data,
        run.config,
        device=run.device,
        prefix=prefix,
        with_probes=with_probes,
    )


def _score_on_the_way(run: _Run) -> dict[str, float]:
    """Note the scores after `step` steps: functions of released iterates, seen where final scores are."""
    if not run.observer.wants_scores(run.step):
        return {}
    started = time.perf_counter()
    scores = run.observer.visible(_computed_scores(run, with_probes=False))
    run.observer.note_during(run.step, scores)
    run.seconds_scoring += time.perf_counter() - started
    return scores


def _draw_noised_scores(run: _Run, checkpoints: CheckpointFolder | None) -> bool:
    """Draw the noised scores, once: a resume finds them in the checkpoint. Returns whether it drew."""
    data, final = run.data, run.observer.final
    if data.index is None or data.scored is None or run.workers.rank > 0 or holds_noised_scores(final):
        return False
    generator = run.randomness.generator(run.step, "score noise")
    drawn = noised_scores(
        run.released,
        data.index,
        data.scored,
        run.config,
        generator,
        run.device,
        num_summed=run.randomness.num_summed_normals,
        before_drawing=checkpoints.begin_scoring if checkpoints else None,
    )
    final.update(run.observer.visible(drawn))
    return True


def _finish(run: _Run, attempt: Attempt, timing: dict[str, float], num_scorings: int) -> TrainingResult:
    if run.workers.rank > 0:
        return TrainingResult(metrics={}, series={}, encoder=run.released)
    started = time.perf_counter()
    computed = _computed_scores(run)
    _refuse_changed(run)
    mechanism, num_restarts = run.config.mechanism, attempt.num_restarts
    if mechanism.num_restart_steps is None:
        num_steps_charged = run.step + attempt.num_steps_repeated
        num_steps_promised = mechanism.num_steps + attempt.num_steps_repeated  # though it was stopped early
    else:  # in advance, for whatever restarts there might have been
        num_steps_charged, num_restarts, num_scorings = mechanism.num_steps_charged, 0, 1
        num_steps_promised = num_steps_charged
    charged = {
        "evaluation_seconds": time.perf_counter() - started + run.seconds_scoring,
        "num_steps_done": run.step,
        "num_restarts": attempt.num_restarts,
        "num_steps_charged": num_steps_charged,
    }
    if run.config.guarantee_label == "proven":
        charged["epsilon"] = run.config.epsilon(
            num_steps_promised, num_restarts=num_restarts, num_scorings=num_scorings
        )
    metrics = run.observer.visible(charged | timing | computed | run.observer.final)
    return TrainingResult(
        metrics=metrics,
        series=run.observer.series,
        encoder=run.released,
        outcomes=public_outcomes(run.scores_before | computed, run.data, run.config),
    )
