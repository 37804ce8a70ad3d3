"""Whole trainings: parts c, d and e. A study's first slice finds how many steps fit into the time of one.

All trainings of a study then take that number, T at most, so that they differ in nothing else; σ is
calibrated for the steps that are taken. A row says of how many.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.gpu.packages import ROOT, version_of
from benchmarks.gpu.slices import OPEN_CLIP, PEFT, Slice
from benchmarks.gpu.step_costs import Where
from benchmarks.harness import Row
from dpgcl_core.errors import ConfigError, DataError
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS
from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.release.statement import RESEARCH
from trainers.config.networks import ClassifierConfig
from trainers.config.presets import PAIRS_CPU, PAPER
from trainers.config.settings import TrainingOptions
from trainers.config.training import TrainingConfig, WarmStart
from trainers.config.tree import changed
from trainers.data.dataset import Dataset, TrainingData, image_shape_of, modality_of
from trainers.data.download import cache_folder
from trainers.data.loading import load_dataset
from trainers.data.records import Records
from trainers.files.weights import SAFETENSORS, write_weights
from trainers.models.clip.encoder import ImageTextEncoder
from trainers.models.clip.files import merged_state_dict
from trainers.training import loop
from trainers.training.public_start import pretrained, recipe_of
from trainers.training.resolve import training_config
from trainers.training.warm_start import read_warm_start
from trainers.training.workers import SingleWorker

PACE = "steps that fit"
SEEDS = (10, 11, 12)
_START_STEPS = 300
_TIMED_STEPS = 3
_SHARE_OF_STEPS = 0.7
"""Of a slice's time; the rest is for its data, its start, σ and its scores."""

_TOY_NETWORKS = {
    "resnet18": "tiny_cnn",
    "mae-tiny": "mae-toy",
    "cap-tiny": "cap-toy",
    "ViT-B-32": "clip-tiny",
}
_TOY = "toy"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Public weights that a training starts from, made on this device.

    Attributes:
      num_steps: without privacy.
      common: on pairs of half of the vocabulary of `shapes`, in place of procedural images.
    """

    num_steps: int = _START_STEPS
    common: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of a comparison.

    Attributes:
      changes: options by name.
      start: what it starts from; None for random weights.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    start: Start | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """Trainings that are compared.

    Attributes:
      part: of `benchmarks.gpu.slices.PARTS`.
      title: short.
      dataset: its name.
      options: what all candidates share.
      candidates: by name.
      image_size: of the data; None for their own.
      libraries: without which it is skipped.
    """

    part: str
    title: str
    dataset: str
    options: TrainingOptions
    candidates: Mapping[str, Candidate]
    image_size: int | None = None
    libraries: tuple[str, ...] = ()


def studies(toy: bool) -> list[Study]:
    """Return all studies, small ones where they are to be tried out."""
    found = [_paper(), _auto_encoder(), _captioner(), _regime("clip-tiny", 32), _regime("ViT-B-32", 224)]
    return [_small(each) for each in found[:-1]] if toy else found  # the last two differ in size alone


def training_slices(where: Where, minutes: float) -> list[Slice]:
    """Return parts c, d and e: of each study its pace, then all candidates of a seed before the next seed.

    Args:
      where: the device.
      minutes: of one slice at most.
    """
    found = []
    for study in studies(where.toy):
        made = partial(Slice, part=study.part, libraries=study.libraries, minutes=minutes)
        pace, work = f"{study.title}, {PACE}", _Work(study, where, minutes)
        found.append(made(name=pace, run=work.pace))
        found += [
            made(
                name=f"{study.title}, {name}, seed {seed}",
                run=partial(work.train, name, seed, pace),
                like=f"{study.title}, {'random weights' if each.start is None else 'public start'}",
            )
            for seed in SEEDS[: 1 if where.toy else None]
            for name, each in study.candidates.items()
        ]
    return found


def _compared(epsilons: tuple[float, ...], start: Start | None) -> dict[str, Candidate]:
    """DP-GCL both ways of sampling, DP-CLIP, training without privacy, and none at all."""
    suffix = "" if start is None else ", public start"
    private = {
        "DP-GCL, groups sampled": {"method": "dp_gcl", "sampling": GROUPS},
        "DP-GCL, records sampled": {"method": "dp_gcl", "sampling": RECORDS},
        "DP-CLIP": {"method": "dp_clip"},
    }
    found = {
        f"{name}, ε = {epsilon:g}{suffix}": Candidate(changes={**changes, "epsilon": epsilon}, start=start)
        for epsilon in epsilons
        for name, changes in private.items()
    }
    for name, method in (("without privacy", "non_private"), ("not trained", "base")):
        found[f"{name}{suffix}"] = Candidate(changes={"method": method}, start=start)
    return found


def _paper() -> Study:
    candidates = {**_compared((1.0, 10.0), None), **_compared((1.0, 10.0), Start())}
    return Study(
        part="c", title="Fashion-MNIST", dataset="fashion-mnist", options=PAPER, candidates=candidates
    )


def _of_one_method(method: str) -> dict[str, Candidate]:
    epsilons = {"ε = 10": 10.0, "without noise": float("inf")}
    return {
        name: Candidate(changes={"method": method, "epsilon": epsilon}) for name, epsilon in epsilons.items()
    }


def _auto_encoder() -> Study:
    options = changed(PAPER, network="mae-tiny", patch_size=4, num_augmentations=0, optimizer="adamw")
    return Study(
        part="d",
        title="masked auto-encoder",
        dataset="fashion-mnist",
        options=options,
        candidates=_of_one_method("dp_mae"),
    )


def _captioner() -> Study:
    options = changed(PAPER, network="cap-tiny", patch_size=8, num_augmentations=0, optimizer="adamw")
    return Study(
        part="d",
        title="captioner",
        dataset="shapes:60000:7",
        options=changed(options, max_query_records=1000),
        candidates=_of_one_method("dp_cap"),
        libraries=(OPEN_CLIP,),
    )


def _regime(model: str, image_size: int) -> Study:
    """Of benchmarks/results/README.md: the public start has seen half of the words alone."""
    options = changed(
        PAIRS_CPU,
        network=model,
        num_augmentations=0,
        lora_rank=2,
        lora_alpha=2.0,
        lora_targets=("q", "k", "v", "out", "mlp"),
        expected_batch_size=2048,
        num_steps=40,
        learning_rate=2e-2,
        max_query_records=1000,
    )
    return Study(
        part="e",
        title=f"half of the words are new, {model}",
        dataset="shapes:60000:7",
        options=options,
        candidates=_compared((1.0,), Start(common=True)),
        image_size=image_size,
        libraries=(OPEN_CLIP, PEFT),
    )


def _small(study: Study) -> Study:
    """The same study of two steps on few small records, with fewer candidates."""
    options = study.options
    options = changed(
        options,
        network=_TOY_NETWORKS.get(options.network.name, options.network.name),
        patch_size=None,
        expected_batch_size=16,
        group_size=2,
        num_steps=2,
        max_query_records=16,
    )
    kept = {
        name: each for name, each in study.candidates.items() if "ε = 10" not in name or study.part == "d"
    }
    small = {
        name: dataclasses.replace(each, start=each.start and dataclasses.replace(each.start, num_steps=12))
        for name, each in kept.items()
    }
    dataset = _TOY if study.dataset == "fashion-mnist" else "shapes:64:7"
    return dataclasses.replace(study, options=options, candidates=small, dataset=dataset, image_size=None)


@dataclass(frozen=True)
class _Work:
    """A study on a device, in slices of some minutes."""

    study: Study
    where: Where
    minutes: float

    def pace(self, _: Mapping[str, Row]) -> Row:
        """Return T of all trainings, and what a step of each kind takes."""
        kinds = {
            (changes["method"], changes.get("sampling")): changes
            for changes in (each.changes for each in self.study.candidates.values())
            if method_named(changes["method"]).trains
        }
        seconds = {" ".join(filter(None, kind)): self._step_seconds(kinds[kind]) for kind in kinds}
        wanted = self.study.options.mechanism.num_steps
        fit = int(_SHARE_OF_STEPS * 60 * self.minutes / max(seconds.values()))
        if fit < 1:
            raise ConfigError(
                f"one step takes {max(seconds.values()):.0f} s: none fits into {self.minutes} minutes"
            )
        return {"num_steps": min(wanted, fit), "wanted_steps": wanted, "step_seconds": seconds}

    def _step_seconds(self, changes: Mapping[str, Any]) -> float:
        """Seconds of one step, whose noise does not matter, from random weights."""
        noise = {} if method_named(changes["method"]).label == "none" else {"noise_multiplier": 1.0}
        changes = {**changes, "epsilon": None, "record_every_steps": 0, **noise}
        run = loop._prepare(self._config(changes, seed=0), self._data(), SingleWorker())
        run.step = 1  # the first step records by-products

        def take() -> None:
            loop._step(run)

        harness.seconds_of(take, self.where.device)
        return min(harness.seconds_of(take, self.where.device) for _ in range(_TIMED_STEPS))

    def train(self, name: str, seed: int, pace: str, earlier: Mapping[str, Row]) -> Row:
        """Train one candidate with one seed, and return its metrics."""
        if "found" not in earlier.get(pace, {}):
            raise ConfigError(f"how many steps fit is not known: {pace} has failed")
        found, candidate = earlier[pace]["found"], self.study.candidates[name]
        config = self._config({**candidate.changes, "num_steps": found["num_steps"]}, seed)
        if candidate.start is not None:
            config = dataclasses.replace(config, warm_start=self._start(candidate.start, config, seed))
        metrics = loop.train(config, self._data()).metrics
        row = {"study": self.study.title, "candidate": name, "seed": seed, "metrics": metrics}
        return {**row, "num_steps": found["num_steps"], "wanted_steps": found["wanted_steps"]}

    def _config(self, changes: Mapping[str, Any], seed: int) -> TrainingConfig:
        data = self._data()
        options = changed(
            self.study.options, device=self.where.device, threads_per_worker=self.where.threads, **changes
        )
        return training_config(
            options,
            num_records=len(data.train),
            public_seed=seed,
            modality=modality_of(data.train),
            calibration_folder=cache_folder() / "gpu-calibrations",
        )

    def _data(self) -> TrainingData:
        return _loaded(self.study.dataset, self.study.image_size)

    def _start(self, start: Start, config: TrainingConfig, seed: int) -> WarmStart:
        """The weights of a start, from the cache, or made on this device and kept there."""
        device = re.sub(r"\W+", "-", harness.device_name(self.where.device))
        kind = "common" if start.common else "synthetic"
        shape = image_shape_of(self._data().train)
        name = "-".join(
            map(str, (config.network.name, *shape, kind, start.num_steps, seed, device, version_of(ROOT)))
        )
        path = cache_folder() / "starts" / f"{name}{SAFETENSORS}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make(start, config, seed, path)
        return read_warm_start(path)

    def _make(self, start: Start, config: TrainingConfig, seed: int, path: Path) -> None:
        if start.common:
            state = merged_state_dict(self._trained_on_common_words(start.num_steps, seed))
        else:
            shape = image_shape_of(self._data().train)
            assert not isinstance(config.network, ClassifierConfig)
            recipe = recipe_of(config.network, shape, num_steps=start.num_steps, seed=seed)
            state = pretrained(recipe, self.where.device).state_dict()
        temporary = path.with_name(f"part-{path.name}")
        write_weights(temporary, state, note=json.dumps({"data": RESEARCH}))
        temporary.replace(path)

    def _trained_on_common_words(self, num_steps: int, seed: int) -> ImageTextEncoder:
        data = _loaded(f"shapes:{64 if self.where.toy else 20_000}:101:common", self.study.image_size)
        changes = {"method": "non_private", "lora_rank": 0, "num_steps": num_steps, "learning_rate": 2e-3}
        batch = {"expected_batch_size": min(512, len(data.train))}
        options = changed(self.study.options, device=self.where.device, **changes, **batch)
        config = training_config(
            options, num_records=len(data.train), public_seed=seed, modality=modality_of(data.train)
        )
        unscored = dataclasses.replace(data, index=None, queries=None, class_names=())
        encoder = loop.train(config, unscored).encoder
        assert isinstance(encoder, ImageTextEncoder)
        return encoder


@cache
def _loaded(name: str, image_size: int | None) -> TrainingData:
    """A public data set, trained on and scored by its own split.

    Raises:
      DataError: it is not on this machine.
    """
    try:
        dataset = _toy_images() if name == _TOY else load_dataset(name, image_size=image_size)
    except ImportError:  # what downloads it is not in the bundle
        raise DataError(
            f"{name} is not on this machine: copy its files, and set DPGCL_DATA to their folder"
        ) from None
    assert dataset.test is not None
    return TrainingData(
        train=dataset.train,
        index=dataset.train,
        queries=dataset.test,
        train_is_public=True,
        evaluation_is_public=True,
        class_names=dataset.class_names,
    )


def _toy_images() -> Dataset:
    """Few random images with labels, in place of a data set."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (96, 1, 28, 28), dtype=np.uint8)
    ids, labels = np.arange(96, dtype=np.uint64), np.arange(96) % 4
    records = Records(images=images, ids=ids, labels=labels)
    kept = np.arange(96) < 64
    return Dataset(name=_TOY, train=records.take(kept), test=records.take(~kept), is_builtin=True)
