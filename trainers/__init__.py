"""One private training: options, data, tasks, models, the loop, evaluation and export.

    from trainers import TrainingData, TrainingOptions, load_dataset, train, training_config

What is imported from here is the interface; everything else may change. A name is loaded when it is asked
for, and with it neither Ray nor MLflow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainers.config.presets import SETTINGS, named_setting
    from trainers.config.settings import MechanismOptions, TrainingOptions
    from trainers.config.training import TrainingConfig
    from trainers.config.tree import changed
    from trainers.data.dataset import Dataset, TrainingData
    from trainers.data.loading import load_dataset, split_train_test
    from trainers.data.records import Records
    from trainers.embed.images import embed_images, read_images
    from trainers.export.folder import load_encoder
    from trainers.tasks.task import Task, task_named
    from trainers.tasks.task import register as register_task
    from trainers.training.loop import TrainingResult, train
    from trainers.training.resolve import training_config

__all__ = [
    "Dataset",
    "MechanismOptions",
    "Records",
    "SETTINGS",
    "Task",
    "TrainingConfig",
    "TrainingData",
    "TrainingOptions",
    "TrainingResult",
    "changed",
    "embed_images",
    "load_dataset",
    "load_encoder",
    "named_setting",
    "read_images",
    "register_task",
    "split_train_test",
    "task_named",
    "train",
    "training_config",
]

_HOMES = {
    "config.presets": ("SETTINGS", "named_setting"),
    "config.settings": ("MechanismOptions", "TrainingOptions"),
    "config.training": ("TrainingConfig",),
    "config.tree": ("changed",),
    "data.dataset": ("Dataset", "TrainingData"),
    "data.loading": ("load_dataset", "split_train_test"),
    "data.records": ("Records",),
    "embed.images": ("embed_images", "read_images"),
    "export.folder": ("load_encoder",),
    "tasks.task": ("Task", "task_named"),
    "training.loop": ("TrainingResult", "train"),
    "training.resolve": ("training_config",),
}
_FOUND_AT = {name: (module, name) for module, names in _HOMES.items() for name in names}
_FOUND_AT["register_task"] = ("tasks.task", "register")


def __getattr__(name: str) -> Any:
    if name not in _FOUND_AT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _FOUND_AT[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
