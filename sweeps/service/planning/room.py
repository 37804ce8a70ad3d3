"""Whether what a sweep writes has room: the least that its checkpoints and results take, and what is free."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import StorageError
from sweeps.service.planning.trials import Trial
from sweeps.service.storage.folder import SweepFolder
from trainers.config.optimizers import optimizer_named
from trainers.config.training import TrainingConfig
from trainers.models.encoder import ImageShape
from trainers.training.warm_start import starting_encoder

_RESULT_BYTES = 4096
Usage = Callable[[Path], Any]
"""`shutil.disk_usage`, whose `free` is what is left in bytes."""


def check_room(
    folder: SweepFolder,
    trials: Sequence[Trial],
    shape: ImageShape,
    at_once: int,
    *,
    num_certain: int | None = None,
    usage: Usage = shutil.disk_usage,
) -> None:
    """Refuse a sweep that surely does not fit into its storage folder, before anything is charged.

    Every training keeps its last checkpoint, from which a model is exported, and while one is replaced both
    lie there. What is counted is less than what is written, so a sweep that passes may still fill the disk.

    Args:
      folder: of the sweep; checkpoints that lie in it need no more room.
      trials: of the sweep.
      shape: of its images.
      at_once: trainings that run side by side.
      num_certain: trainings that are certain to end; all unless given.
      usage: tells what is free.

    Raises:
      StorageError: too little is free.
    """
    known: dict[Any, int] = {}
    left = [
        trial for trial in trials if not (folder.checkpoint_folder(trial.name) / "checkpoint.pt").exists()
    ]
    sizes = sorted((_checkpoint_bytes(trial.config, shape, known) for trial in left), reverse=True)
    certain = sorted(sizes)[:num_certain]
    needed = sum(certain) + sum(sorted(certain)[-at_once:]) + _RESULT_BYTES * len(certain)
    place = next(parent for parent in (folder.path, *folder.path.parents) if parent.exists())
    free = int(usage(place).free)
    if needed > free:
        raise StorageError(
            f"the checkpoints and results of {len(certain)} trainings take at least {_text(needed)}, and "
            f"{_text(free)} are free in {place}: make room, give another --storage, or train fewer"
        )


def _checkpoint_bytes(config: TrainingConfig, shape: ImageShape, known: dict[Any, int]) -> int:
    """Weights, what the optimizer keeps of the trained ones, and their average; one network is built once."""
    if config.mechanism.num_steps == 0:
        return 0
    averaged = config.optimizer.ema_decay > 0
    key = (
        config.network,
        config.mechanism.method,
        config.optimizer.name,
        config.optimizer.momentum,
        averaged,
    )
    if key not in known:
        torch.set_num_threads(config.performance.threads_per_worker)
        encoder = starting_encoder(config, shape)
        tensors = [each for each in encoder.state_dict().values() if isinstance(each, Tensor)]
        weights = sum(each.numel() * each.element_size() for each in tensors)
        kept = optimizer_named(config.optimizer.name).num_states(config.optimizer.momentum) + averaged
        known[key] = weights + 4 * kept * num_trainable(encoder)
    return known[key]


def _text(number: int) -> str:
    """A number of bytes in words.

    >>> _text(5 * 2**30), _text(3 * 2**20), _text(2)
    ('5 GiB', '3 MiB', '2 bytes')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} bytes"
