"""Audit the real training step, on one worker and on two.

    python -m benchmarks.audit.training_step
    python -m benchmarks.audit.training_step --runs 4000 --json
    python -m benchmarks.audit.training_step --seed 0 --only one-worker

`trainers.training.loop.train` runs on D and on D' = D + canary, including its own seeding of every step,
sampling, groups, microbatches, clipping, the sum over workers, noise, divisor and optimizer. It releases its
iterates: each step of plain SGD on a linear network is one release. A linear network's gradients do not
depend on its weights, so the steps of one long training are independent runs. Only the inputs of the records
are crafted (`benchmarks.audit.worst_cases`), by an ordinary task of the trainers' registry. The canary is at
every row in turn, in equal shares of the runs.

The defects of `benchmarks.audit.defects` are planted in the mechanism that the loop gets. Other defects are
possible only in a step with its own draws, or with two workers. `benchmarks.audit.judging` describes how runs
give a verdict. Two workers are two processes, connected as in trainings.

Exit code 0: every row is as expected. 1: a row is not. 2: bad input.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException

from benchmarks.audit import defects
from benchmarks.audit.canary import (
    TWO_RECORDS,
    AuditCase,
    AuditOptions,
    check_numbers,
    chosen_cases,
    print_rows,
    source_of,
)
from benchmarks.audit.defects import Defect
from benchmarks.audit.judging import Releases, judge
from benchmarks.audit.result import AuditResult
from benchmarks.audit.step_defects import (
    DealtTwice,
    NoiseOfEveryWorker,
    NoiseOfTheRun,
    NoiseOverWorkers,
    WatchedWorkers,
    WithoutNoise,
    planted_mechanism,
)
from benchmarks.audit.worst_cases import (
    CANARY,
    Crafted,
    GroupGradient,
    crafted_inputs,
    in_order,
    newcomer,
)
from benchmarks.steps import unscored_data
from dpgcl_core.clipping.types import Objective
from dpgcl_core.command_line import run_command
from dpgcl_core.durable_files import replacing
from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.mechanism.numbers import GROUPS
from dpgcl_core.noise import chunked_draw
from dpgcl_core.noise.randomness import DrawSource
from dpgcl_core.workers import DistributedWorkers, SingleWorker, Workers
from trainers.config.networks import AnyNetworkConfig, NetworkConfig
from trainers.config.nodes import EvaluationConfig, OptimizerConfig, PerformanceConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.records import Records
from trainers.models.encoder import ImageShape
from trainers.tasks.task import Task, register_task
from trainers.training.loop import train

DEFAULT_RUNS = 1200
_CANARY_ID = 2**32
_DIM = 8


@dataclass(frozen=True, kw_only=True)
class _CraftedNetwork(NetworkConfig):
    """A network config that selects the task of this audit."""

    task: ClassVar[str] = "audit"


class _CraftedTask(Task[Crafted]):
    """A linear network whose inputs are gradients that depend on the members of a group."""

    name: ClassVar[str] = "audit"
    embeds: ClassVar[bool] = True  # the mechanism's rule takes any objective; its loss is not used

    def __init__(self) -> None:
        self.gradient: GroupGradient | None = None
        self.iterates: list[Tensor] = []

    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        return

    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> Crafted:
        network = Crafted(_DIM)
        self.iterates = [_weights(network)]
        return network

    def check_network(self, config: TrainingConfig, network: Crafted, image_shape: tuple[int, ...]) -> None:
        return

    def inputs(
        self,
        config: TrainingConfig,
        network: Crafted,
        records: Records,
        groups: NDArray[np.int64],
        *,
        step: int,
        num_augmentations: int,
    ) -> Tensor:
        assert self.gradient is not None
        ids = records.ids.astype(np.int64)
        members = np.where(ids == _CANARY_ID, CANARY, ids)[groups]
        return crafted_inputs(members, self.gradient, l2_clip_norm=config.mechanism.l2_clip_norm)

    def blank_inputs(
        self, network: Crafted, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> Tensor:
        return torch.zeros(*shape, _DIM)

    def objective(
        self,
        config: TrainingConfig,
        network: Crafted,
        precision: AnyNetworkConfig | None = None,
        target: Crafted | None = None,
    ) -> Objective:
        return network

    def after_step(self, network: Crafted) -> None:
        self.iterates.append(_weights(network))


_TASK = _CraftedTask()


def _weights(network: Crafted) -> Tensor:
    return network.layer.weight.detach().double().flatten().clone()


def _records(num_records: int, canary_row: int | None) -> Records:
    ids = np.arange(num_records, dtype=np.uint64)
    if canary_row is not None:
        ids = np.insert(ids, canary_row, np.uint64(_CANARY_ID))
    return Records(images=np.zeros((len(ids), 1, 1, 1), dtype=np.uint8), ids=ids)


@dataclass(frozen=True, kw_only=True)
class _Config(TrainingConfig):
    """A training that contains many runs; its total ε is not needed.

    Attributes:
      noise_repeats_for: number of steps of a run that share one noise draw; 0 for independent draws.
    """

    noise_repeats_for: int = 0

    def randomness(self, *, data_are_private: bool) -> DrawSource:
        source = super().randomness(data_are_private=data_are_private)
        return NoiseOfTheRun(source, self.noise_repeats_for) if self.noise_repeats_for else source

    def epsilon(self, num_steps: int | None = None, *, num_restarts: int = 0, num_scorings: int = 1) -> float:
        return float("nan")


# Cases


@dataclass(frozen=True, kw_only=True)
class StepCase(AuditCase):
    """One setting of the training step to audit.

    Attributes:
      num_workers: 1 or 2.
      workers: class of the wrapper between the loop and its workers.
      repeated_noise: whether all steps of a run get the same noise.
      defect_name: the defect's name in the table; None for the code as written.
      breaks_claim: whether the privacy loss exceeds the claim.
    """

    dim: int = _DIM
    num_workers: int = 1
    workers: type[WatchedWorkers] = WatchedWorkers
    repeated_noise: bool = False
    defect_name: str | None = None
    breaks_claim: bool = True


_PAIRS = dataclasses.replace(TWO_RECORDS, num_records_public=7)
_SLOTS = dataclasses.replace(_PAIRS, sampling=GROUPS, num_records_public=8, target_delta=0.12)


def standard_cases() -> tuple[StepCase, ...]:
    """Return the cases of the command: each setting as written, then with its defects."""
    one_worker = StepCase(name="one-worker", mechanism=_PAIRS, num_records=6)
    # With this claim, few runs suffice to detect noise × 0.7.
    little = dataclasses.replace(
        one_worker,
        name="little-noise",
        mechanism=dataclasses.replace(_PAIRS, noise_multiplier=0.5),
        runs_factor=4,
    )
    six = StepCase(
        name="six-groups",
        mechanism=dataclasses.replace(_PAIRS, num_records_public=13, target_delta=0.07),
        num_records=12,
        runs_factor=2,
    )
    order = dataclasses.replace(one_worker, name="order", worst=in_order)
    steps = dataclasses.replace(
        one_worker, name="two-steps", mechanism=dataclasses.replace(_PAIRS, num_steps=2, noise_multiplier=1.5)
    )
    short = StepCase(name="short-rest", mechanism=_PAIRS, num_records=2, runs_factor=4)
    growing = StepCase(name="one-more-group", mechanism=_PAIRS, num_records=3)
    empty = StepCase(name="empty-steps", mechanism=_PAIRS, num_records=1)
    two = dataclasses.replace(one_worker, name="two-workers", num_workers=2)
    # Groups are sampled: N is the same on D and on D', and the canary fills the last slot.
    slots = StepCase(name="sampled-groups", mechanism=_SLOTS, num_records=7, worst=newcomer)
    quarter = dataclasses.replace(
        slots,
        name="quarter-of-the-blocks",
        mechanism=dataclasses.replace(_SLOTS, sampling_prob=0.25, noise_multiplier=0.7, target_delta=0.05),
    )
    slots_of_two = dataclasses.replace(slots, name="sampled-groups-two-workers", num_workers=2)

    def with_defects(case: StepCase, *defects_of_case: Defect) -> tuple[StepCase, ...]:
        wrong = [
            dataclasses.replace(case, defect=each, defect_name=each.name, breaks_claim=each.breaks_claim)
            for each in defects_of_case
        ]
        return case, *wrong

    def among_workers(
        name: str, workers: type[WatchedWorkers], *, breaks_claim: bool = True, of: StepCase = two
    ) -> StepCase:
        return dataclasses.replace(of, workers=workers, defect_name=name, breaks_claim=breaks_claim)

    return (
        *with_defects(
            one_worker,
            defects.NO_NOISE,
            defects.DOUBLE_NOISE,
            defects.NOISE_OF_TENSORS,
            defects.MEAN_CLIPPED,
            defects.RECORDS_CLIPPED,
        ),
        *with_defects(little, defects.LESS_NOISE),
        *with_defects(six, defects.BATCH_NORMALISED),
        *with_defects(order, defects.NOT_PERMUTED),
        steps,
        dataclasses.replace(steps, repeated_noise=True, defect_name=defects.NOISE_OF_STEPS.name),
        *with_defects(short, defects.MASK_LOST),
        *with_defects(growing, defects.REALISED_DIVISOR),
        *with_defects(empty, defects.QUIET_EMPTY),
        two,
        among_workers("no noise in one worker's share", WithoutNoise),
        among_workers("noise divided by the number of workers", NoiseOverWorkers),
        among_workers("noise added by every worker", NoiseOfEveryWorker, breaks_claim=False),
        among_workers("every group given to both workers", DealtTwice),
        *with_defects(slots, defects.MASK_LOST, defects.FILLED_GROUP, defects.REALISED_DIVISOR),
        quarter,
        slots_of_two,
        among_workers("every group given to both workers", DealtTwice, of=slots_of_two),
    )


def _release(case: StepCase, num_runs: int, has_canary: bool, seed: int | None, inner: Workers) -> Releases:
    """Return the releases of `num_runs` runs at this worker; only the first worker's result is used."""
    rows = list(range(case.num_records + 1)) if has_canary else [None]
    parts = []
    for turn, row in enumerate(rows):
        share = -(-num_runs // len(rows))
        parts.append(_one_training(case, share, row, None if seed is None else 100 * seed + turn, inner))
    # Rows take turns, so that each quarter of the runs has all of them.
    noisy, clean = (
        np.stack([getattr(part, name) for part in parts], axis=1).reshape(-1, *parts[0].noisy.shape[1:])
        for name in ("noisy", "clean")
    )
    return Releases(noisy[:num_runs], clean[:num_runs])


def _one_training(
    case: StepCase, num_runs: int, canary_row: int | None, seed: int | None, inner: Workers
) -> Releases:
    """Train once; each run is some steps of the training. The first run is dropped, because there a training
    on public data computes its groups more than once."""
    num_steps = case.mechanism.num_steps
    mechanism = dataclasses.replace(case.mechanism, num_steps=(num_runs + 1) * num_steps)
    divisor = mechanism.divisor
    config = _Config(
        mechanism=mechanism if case.defect is None else planted_mechanism(mechanism, case.defect),
        network=_CraftedNetwork(),
        optimizer=OptimizerConfig(name="sgd", learning_rate=1.0, momentum=0.0),
        evaluation=EvaluationConfig(record_every_steps=0, also_untrained=False),
        performance=PerformanceConfig(max_views_per_microbatch=64, device="cpu"),
        num_augmentations=0,
        seeded_non_private=seed is not None,
        public_seed=seed or 0,
        noise_repeats_for=num_steps if case.repeated_noise else 0,
    )
    register_task(_TASK)
    _TASK.gradient = case.gradient
    workers = case.workers(inner, config.mechanism)
    records = _records(case.num_records, canary_row)
    # A seeded training is not private, so its records are declared public; all others are private.
    train(config, unscored_data(records, are_public=seed is not None), workers=workers)
    shape = (num_runs + 1, 1, num_steps, case.dim)
    iterates = divisor * torch.stack(_TASK.iterates).numpy()
    clean = divisor * torch.stack(workers.clean).numpy()
    return Releases((iterates[:-1] - iterates[1:]).reshape(shape)[1:], clean.reshape(shape)[1:])


def audit_steps(
    cases: Sequence[StepCase],
    *,
    num_runs: int = DEFAULT_RUNS,
    confidence: float = 0.95,
    seed: int | None = None,
) -> list[AuditResult]:
    """Run cases of `standard_cases` on D and on D', `num_runs` times each, and judge them.

    Args:
      cases: some of `standard_cases`; all cases on two workers share one start of the processes.
      num_runs: number of runs on each data set, times the case's factor.
      confidence: confidence of each row's bound.
      seed: seed of all draws; None for the operating system's draws.

    Raises:
      ConfigError: there are too few runs, or the confidence is outside (0, 1).
    """
    check_numbers(num_runs, confidence)
    apart = [case for case in cases if case.num_workers > 1]
    found = dict(zip(map(id, apart), _on_two_workers(apart, num_runs, seed), strict=True))
    results = []
    for case in cases:
        worlds = found.get(id(case)) or _release_both(case, num_runs, seed, SingleWorker())
        results.append(
            judge(
                case.name,
                *worlds,
                case.claim,
                confidence=confidence,
                defect=case.defect_name,
                must_exceed=case.defect_name is not None and case.breaks_claim,
            )
        )
    return results


def _release_both(
    case: StepCase, num_runs: int, seed: int | None, inner: Workers
) -> tuple[Releases, Releases]:
    num_runs *= case.runs_factor
    seeds = (None, None) if seed is None else (2 * seed, 2 * seed + 1)
    return (
        _release(case, num_runs, False, seeds[0], inner),
        _release(case, num_runs, True, seeds[1], inner),
    )


def _on_two_workers(
    cases: Sequence[StepCase], num_runs: int, seed: int | None
) -> list[tuple[Releases, Releases]]:
    """Run cases in two processes, and return the first worker's releases."""
    if not cases:
        return []
    with tempfile.TemporaryDirectory() as folder:
        case_keys = [(case.name, case.defect_name) for case in cases]  # the cases themselves hold functions
        arguments = (folder, case_keys, num_runs, seed)
        try:
            mp.spawn(_as_worker, args=arguments, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
        except ProcessExitedException:  # PyTorch's threads can abort a process at exit
            if not (Path(folder) / _RELEASED).exists():
                raise
        releases: list[tuple[Releases, Releases]] = pickle.loads((Path(folder) / _RELEASED).read_bytes())
        return releases


_RELEASED = "released"
"""Name of the file with the releases of all cases on two workers; it is written only when complete."""


def _as_worker(
    rank: int, folder: str, case_keys: list[tuple[str, str | None]], num_runs: int, seed: int | None
) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    chunked_draw.PART = _DIM // 2  # so that each worker noises a share
    case_by_key = {(case.name, case.defect_name): case for case in standard_cases()}
    releases = [_release_both(case_by_key[name], num_runs, seed, DistributedWorkers()) for name in case_keys]
    if rank == 0:
        with replacing(Path(folder) / _RELEASED) as file:
            pickle.dump(releases, file)
    dist.barrier()  # neither process exits before the file is written
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class StepAuditOptions(AuditOptions):
    """Options of this audit, with fewer runs, because each one is a training.

    Attributes:
      runs: number of runs on each of D and D'.
    """

    runs: int = DEFAULT_RUNS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the standard cases of the command line; return 0 if every row is as expected, else 1.

    Raises:
      ConfigError: an option is unknown or out of range.
    """
    options: StepAuditOptions = run_command(
        StepAuditOptions,
        prog="python -m benchmarks.audit.training_step",
        description=__doc__,
        arguments=arguments,
    )
    chosen = chosen_cases(standard_cases(), options.only)
    source_of(options.seed)  # raises for a negative seed
    results = audit_steps(chosen, num_runs=options.runs, confidence=options.confidence, seed=options.seed)
    return print_rows(results, options)


if __name__ == "__main__":
    exit_on_bad_input(main)
