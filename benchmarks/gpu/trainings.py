"""Trainings in the DP-GCL paper's image setting on a GPU; each resumes from its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu import Options, is_absent
from benchmarks.harness import RESULTS, Row
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS
from trainers.config.networks import ClassifierConfig
from trainers.config.presets import PAPER
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import TrainingData, image_shape_of
from trainers.data.loading import load_dataset
from trainers.data.records import Records
from trainers.evaluation import features
from trainers.files.checkpoint import CheckpointFolder
from trainers.files.oversight import Oversight
from trainers.training import loop
from trainers.training.public_start import pretrained, recipe_of
from trainers.training.resolve import training_config
from trainers.training.warm_start import read_warm_start

CALIBRATION = RESULTS / "gpu" / "calibration.json"
FASHION_MNIST = "fashion-mnist"
NUM_RECORDS = {FASHION_MNIST: 60_000, "cifar10": 50_000}
"""Training images of each data set."""
SEEDS = (10, 11, 12)
_START_STEPS = 300
_CHANGES = ("sampling", "num_augmentations", "l2_clip_norm")
_SYMBOLS = {"epsilon": "ε", "noise_multiplier": "σ", "num_augmentations": "N_a", "l2_clip_norm": "C"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One training in the paper's setting, without its seed.

    Attributes:
      method: name of the method.
      dataset: name of the built-in data set.
      epsilon: the target ε; None for a fixed σ, and for a method without a guarantee.
      noise_multiplier: σ, if there is no target ε.
      sampling: "groups" or "records"; None for a method without this choice.
      num_augmentations: N_a; None for the paper's.
      l2_clip_norm: C; None for the paper's.
      has_start: whether it starts from public weights, trained on procedural images, not from random weights.
    """

    method: str
    dataset: str = FASHION_MNIST
    epsilon: float | None = None
    noise_multiplier: float | None = None
    sampling: str | None = None
    num_augmentations: int | None = None
    l2_clip_norm: float | None = None
    has_start: bool = False

    @property
    def is_private(self) -> bool:
        """Whether it adds noise."""
        return self.epsilon is not None or self.noise_multiplier is not None

    @property
    def mechanism(self) -> str:
        """The settings that determine σ and ε, in words."""
        dataset = "" if self.dataset == FASHION_MNIST else self.dataset
        words = [dataset, self.method, self.sampling, *self._numbers("epsilon", "noise_multiplier")]
        return ", ".join(filter(None, words))

    def __str__(self) -> str:
        start = "public start" if self.has_start else "random weights"
        return ", ".join([self.mechanism, *self._numbers("num_augmentations", "l2_clip_norm"), start])

    def _numbers(self, *names: str) -> list[str]:
        numbers = {_SYMBOLS[name]: getattr(self, name) for name in names}
        return [f"{symbol} = {number:g}" for symbol, number in numbers.items() if number is not None]


def comparison(dataset: str) -> list[Candidate]:
    """Return the methods of the paper's Table 1, DP-GCL with both samplings, and training without privacy.

    On Fashion-MNIST, some also start from public weights.
    """
    candidate = partial(Candidate, dataset=dataset)
    targets = (1.0, 10.0)
    private = (("dp_gcl", GROUPS), ("dp_gcl", RECORDS), ("dp_clip", None))
    methods = [
        *(
            candidate(method=name, sampling=sampling, epsilon=e)
            for e in targets
            for name, sampling in private
        ),
        *(candidate(method=name) for name in ("non_private", "base")),
    ]
    started = [dataclasses.replace(each, has_start=True) for each in methods if dataset == FASHION_MNIST]
    return [
        *(methods + started),
        *(candidate(method="dp_sgd", epsilon=epsilon) for epsilon in targets),
        *(candidate(method="logit_dp", epsilon=epsilon, num_augmentations=0) for epsilon in targets),
    ]


def curves() -> dict[str, list[Candidate]]:
    """Return the trainings of curves over N_a, C and σ; None stands for the paper's value, at ε = 10."""
    groups = partial(Candidate, method="dp_gcl", sampling=GROUPS)
    return {
        "N_a": [groups(epsilon=10.0, num_augmentations=number) for number in (0, None, 2, 3, 4)],
        "C": [groups(epsilon=10.0, l2_clip_norm=norm) for norm in (0.1, 0.3, None, 3.0, 10.0)],
        "σ": [
            groups(noise_multiplier=0.5),
            groups(epsilon=10.0),
            groups(noise_multiplier=2.0),
            groups(epsilon=1.0),
            groups(noise_multiplier=10.0),
        ],
    }


def candidates(dataset: str) -> list[Candidate]:
    """Return all trainings on a data set, each once."""
    points = [point for curve in curves().values() for point in curve if point.dataset == dataset]
    return list(dict.fromkeys([*comparison(dataset), *points]))


def config_of(
    candidate: Candidate, options: Options, *, num_records: int, seed: int, sigma: float | None
) -> TrainingConfig:
    """Return the paper's setting, in bfloat16 on a GPU; σ is `sigma`, or calibrated for ε if that is None."""
    settings = replace_options(
        PAPER,
        method=candidate.method,
        precision="bfloat16" if options.device == "cuda" else "float32",
        device=options.device,
        threads_per_worker=options.threads,
        **{name: value for name in _CHANGES if (value := getattr(candidate, name)) is not None},
    )
    if sigma is None:
        sigma = candidate.noise_multiplier
    if candidate.is_private:
        noise = (
            {"epsilon": candidate.epsilon} if sigma is None else {"epsilon": None, "noise_multiplier": sigma}
        )
        settings = replace_options(settings, **noise)
    if options.tiny:
        small = {"network": "tiny_cnn", "expected_batch_size": 16, "group_size": 2, "num_steps": 3}
        settings = replace_options(settings, **small, max_query_records=16)
    return training_config(settings, num_records=num_records, public_seed=seed)


def calibrate() -> int:
    """Write σ and the resulting ε of every private candidate; return 0."""
    rows = {}
    options = Options(device="cpu")
    for candidate in (each for dataset in NUM_RECORDS for each in candidates(dataset)):
        if candidate.is_private and candidate.mechanism not in rows:
            num_records = NUM_RECORDS[candidate.dataset]
            config = config_of(candidate, options, num_records=num_records, seed=0, sigma=None)
            numbers = {"noise_multiplier": config.mechanism.noise_multiplier, "epsilon": config.epsilon()}
            rows[candidate.mechanism] = numbers
            print(
                f"{candidate.mechanism}: σ = {numbers['noise_multiplier']:.4f}, ε = {numbers['epsilon']:.4f}"
            )
    CALIBRATION.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return 0


def trainings(
    options: Options, plan: Sequence[Candidate] | None = None
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield whole trainings on `options.dataset`, or of `plan`, all of a seed before the next seed."""
    for seed in SEEDS[: 1 if options.tiny else None]:
        for candidate in candidates(options.dataset) if plan is None else plan:
            yield f"{candidate}, seed {seed}", partial(train, candidate, seed, options)


def train(candidate: Candidate, seed: int, options: Options) -> Row:
    """Train one candidate with one seed, from its checkpoint if there is one, and return its metrics.

    ε comes from the calibration, for T steps. If the process was killed before its time limit, steps were
    repeated, which the metrics `num_restarts` and `num_steps_charged` show.

    Raises:
      TrainingStopped: the time limit was reached; the checkpoint has all steps.
    """
    data = tiny_data() if options.tiny else images_of(candidate.dataset)
    numbers = {"noise_multiplier": 1.0, "epsilon": math.nan}
    if candidate.is_private and not options.tiny:
        numbers = json.loads(CALIBRATION.read_text())[candidate.mechanism]
    config = config_of(
        candidate, options, num_records=len(data.train), seed=seed, sigma=numbers["noise_multiplier"]
    )
    if candidate.has_start:
        path = public_start(config, image_shape_of(data.train), seed, options)
        config = dataclasses.replace(config, warm_start=read_warm_start(path))
    folder = options.output / "checkpoints" / f"{candidate}, seed {seed}".replace("/", "-")
    checkpoints = CheckpointFolder(folder / "training", every_steps=100)
    oversight = Deadline(count_file=folder / "count", at=options.deadline)
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(TrainingConfig, "epsilon", lambda *_, **__: numbers["epsilon"]))
        if is_absent("scipy"):
            patches.enter_context(patch.object(features, "linear_probe_scores", lambda *_: {}))
        metrics = loop.train(config, data, checkpoints=checkpoints, oversight=oversight).metrics
    shutil.rmtree(folder)
    row = {"study": candidate.dataset, "candidate": str(candidate), "seed": seed}
    return {**row, "num_steps": config.mechanism.num_steps, "metrics": metrics}


@dataclass(frozen=True, kw_only=True)
class Deadline(Oversight):
    """Stops a training, which is saved, when the time limit of the call is reached."""

    at: float

    def must_stop(self) -> bool:
        """Return whether the time limit is reached."""
        return time.monotonic() >= self.at


def public_start(
    config: TrainingConfig, image_shape: tuple[int, int, int], seed: int, options: Options
) -> Path:
    """Return the weights of a public start, made on this device by the first training that needs them."""
    path = options.output / "starts" / f"{config.network.name}-{seed}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        steps = 12 if options.tiny else _START_STEPS
        assert not isinstance(config.network, ClassifierConfig)
        recipe = recipe_of(config.network, image_shape, num_steps=steps, seed=seed)
        torch.save(pretrained(recipe, options.device).state_dict(), path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return path


@cache
def images_of(name: str) -> TrainingData:
    """Return a built-in data set with its own split, all public, from its files in `DPGCL_DATA`."""
    dataset = load_dataset(name)
    assert isinstance(dataset.train, Records)
    assert isinstance(dataset.test, Records)
    return _public(dataset.train, dataset.test)


@cache
def tiny_data() -> TrainingData:
    """Return a few random images with labels."""
    generator, count = np.random.default_rng(0), 96
    images = generator.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8)
    records = Records(images=images, ids=np.arange(count, dtype=np.uint64), labels=np.arange(count) % 4)
    kept = np.arange(count) < 64
    return _public(records.take(kept), records.take(~kept))


def _public(train: Records, test: Records) -> TrainingData:
    return TrainingData(
        train=train, index=train, queries=test, train_is_public=True, evaluation_is_public=True
    )
