"""Weights to start from that no record made: an encoder pre-trained on procedural images, without privacy.

`--warm-start synthetic:STEPS` takes STEPS contrastive steps (SimCLR, Chen et al. 2020) on two views of each
image of `trainers.data.procedural`, which are made on the way and never seen twice. It costs no ε: the
weights are a function of the network, the image shape, the steps and a public seed, so they are the same for
all neighbouring data sets, and a mechanism may start from any such weights.

The weights are made once and kept in the cache folder of the data sets, under a name that is the hash of all
that decides them; the file is read back as any warm start is (`trainers.training.warm_start`). They are made
on one thread, so that the same machine makes the same bits again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.errors import ConfigError, StorageError, unknown_choice
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.release.statement import RESEARCH
from trainers.config.networks import SYNTHETIC, NetworkConfig, ViewConfig
from trainers.config.training import OptimizerConfig
from trainers.data import procedural
from trainers.data.download import cache_folder
from trainers.data.procedural import procedural_images
from trainers.files.weights import SAFETENSORS, read_note, read_weights, write_weights
from trainers.models.encoder import Encoder, ImageShape, build_encoder, to_fast_layout
from trainers.training.microbatch import in_turn
from trainers.training.optimizers import build_optimizer, learning_rate_at
from trainers.views.images import make_views

VERSION = 1
"""Of the pre-training: raised whenever other weights come of the same recipe."""

NETWORKS = ("tiny_cnn", "small_cnn", "wide_cnn", "resnet18")
"""Networks that are pre-trained here; others have weights of their own, or none."""

_TIMED_STEPS = range(2, 5)
_FOLDER = "starts"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides the weights, besides the versions of this module and of the images.

    Attributes:
      network: of `NETWORKS`.
      embedding_dim: width of the projection head.
      image_shape: (channels, height, width).
      num_steps: steps taken.
      seed: public, of weights, images and views.
      batch_size: images per step; each is compared with all others of its step.
      temperature: τ of the loss.
      optimizer: of the steps.
      views: augmentation.
    """

    network: str
    embedding_dim: int
    image_shape: ImageShape
    num_steps: int
    seed: int
    batch_size: int = 256
    temperature: float = 0.1
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=4e-3, warmup_steps=10, learning_rate_decay="cosine"
        )
    )
    views: ViewConfig = field(default_factory=lambda: ViewConfig(min_crop_area=0.2, saturation=0.4, hue=0.1))

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            known = unknown_choice("network", self.network, NETWORKS)
            raise ConfigError(f"{SYNTHETIC}STEPS pre-trains a CNN of this package: {known}")
        if self.num_steps <= self.optimizer.warmup_steps:
            raise ConfigError(
                f"{SYNTHETIC}STEPS takes more steps than the {self.optimizer.warmup_steps} in which its "
                f"learning rate rises; got {self.num_steps}: give some hundreds"
            )

    @property
    def key(self) -> str:
        """The hash of all that decides the weights."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    @property
    def content(self) -> Mapping[str, Any]:
        """All that decides the weights, as JSON holds it."""
        values = dataclasses.asdict(self) | {"versions": [VERSION, procedural.VERSION]}
        found: Mapping[str, Any] = json.loads(json.dumps(values))
        return found


def public_start(recipe: Recipe) -> Path:
    """Return the file with the weights of a recipe, made unless it is in the cache.

    Processes that want the same weights at the same time make them once. A file that is damaged, or that
    holds something else, is made again.

    Raises:
      ConfigError: the images are too small.
      StorageError: the cache cannot be written.
    """
    path = cache_folder() / _FOLDER / f"{recipe.network}-{recipe.key[:24]}{SAFETENSORS}"
    if _holds(path, recipe):
        return path
    with _alone(path):
        if not _holds(path, recipe):
            _keep(path, pretrained(recipe), recipe)
    return path


def _holds(path: Path, recipe: Recipe) -> bool:
    """Whether the file holds the whole weights of the recipe."""
    try:
        tensors, note = read_weights(path).tensors, json.loads(read_note(path) or "{}")
    except (StorageError, ValueError):
        return False
    return bool(note.get("recipe") == recipe.content and note.get("digest") == _digest(tensors))


def _keep(path: Path, encoder: Encoder, recipe: Recipe) -> None:
    tensors = encoder.state_dict()
    note = {"data": RESEARCH, "recipe": recipe.content, "digest": _digest(tensors)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _cache_errors(path):
        write_weights(temporary, tensors, note=json.dumps(note))
        temporary.replace(path)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the file against other processes, which wait for it; the system releases a dead one's lock."""
    lock = FileLock(path.with_name(f".{path.name}.lock"), fallback_to_soft=False)
    with _cache_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _cache_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"the cache folder must be writable, with file locks; {path.parent} is not ({error}). Set "
            "DPGCL_CACHE to a folder that is"
        ) from error


def pretrained(recipe: Recipe) -> Encoder:
    """Return an encoder trained by a recipe, on the CPU, and say so on stderr with how long it takes.

    Raises:
      ConfigError: the images are too small.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _pretrained(recipe)
    finally:
        torch.set_num_threads(threads)


def _pretrained(recipe: Recipe) -> Encoder:
    network = NetworkConfig(name=recipe.network, embedding_dim=recipe.embedding_dim)
    encoder = build_encoder(network, recipe.image_shape, recipe.seed)
    to_fast_layout(encoder, torch.device("cpu"), recipe.image_shape)
    optimizer = build_optimizer(recipe.optimizer, encoder.parameters())
    make, times = partial(_images, recipe), []
    with ThreadPoolExecutor(1) as beside:
        for step, images in enumerate(in_turn(make, range(recipe.num_steps), beside)):
            times.append(time.perf_counter())
            if step == _TIMED_STEPS.stop - 1:
                _tell(recipe, (times[-1] - times[_TIMED_STEPS.start]) / (len(_TIMED_STEPS) - 1))
            _step(recipe, encoder, optimizer, step, images)
    return encoder


def _ids(recipe: Recipe, step: int) -> NDArray[np.uint64]:
    return np.arange(step * recipe.batch_size, (step + 1) * recipe.batch_size, dtype=np.uint64)


def _images(recipe: Recipe, step: int) -> NDArray[np.uint8]:
    return procedural_images(_ids(recipe, step), recipe.image_shape, seed=recipe.seed)


def _step(
    recipe: Recipe,
    encoder: Encoder,
    optimizer: torch.optim.Optimizer,
    step: int,
    images: NDArray[np.uint8],
) -> None:
    """One step of the mean contrastive loss in both directions."""
    views = make_views(
        torch.from_numpy(images),
        _ids(recipe, step),
        config=recipe.views,
        seed=recipe.seed,
        step=step,
        num_views=2,
    )
    embeddings = encoder.embed_views(views[None])
    both = torch.cat([embeddings, embeddings.flip(2)])
    loss = two_view_group_loss(both, temperature=recipe.temperature).sum() / (2 * recipe.batch_size)
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(recipe.optimizer, step, recipe.num_steps)
    optimizer.step()


def _tell(recipe: Recipe, seconds_per_step: float) -> None:
    seconds = recipe.num_steps * seconds_per_step
    print(
        f"note: making a public start of {recipe.network}: {recipe.num_steps} steps on procedural images, "
        f"about {max(1, round(seconds))} s, once: it is kept in {cache_folder() / _FOLDER}",
        file=sys.stderr,
        flush=True,
    )
