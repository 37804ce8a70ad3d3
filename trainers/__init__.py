"""One private training: options, data, tasks, models, the loop, evaluation and export.

    from trainers import TrainingData, TrainingOptions, load_dataset, train, training_config

The names imported from here are the interface; everything else may change. Each name is loaded on first use,
without Ray and without MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpgcl_core.errors import require_extra
from dpgcl_core.lazy_names import lazy_names

require_extra("service", "safetensors", needed_by=__name__)

if TYPE_CHECKING:
    from trainers.config.presets import SETTINGS, named_setting
    from trainers.config.settings import MechanismOptions, TrainingOptions
    from trainers.config.training import TrainingConfig
    from trainers.config.tree import replace_options
    from trainers.config.tree import replace_options as changed
    from trainers.data.dataset import Dataset, TrainingData
    from trainers.data.loading import load_dataset, split_train_test
    from trainers.data.records import Records
    from trainers.embed.embed_images import embed_images, read_images
    from trainers.export.export_folder import load_encoder
    from trainers.tasks.task import Task, register_task, task_named
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
    "replace_options",
    "split_train_test",
    "task_named",
    "train",
    "training_config",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "config.presets": ("SETTINGS", "named_setting"),
        "config.settings": ("MechanismOptions", "TrainingOptions"),
        "config.training": ("TrainingConfig",),
        "config.removed_options": ("changed",),
        "config.tree": ("replace_options",),
        "data.dataset": ("Dataset", "TrainingData"),
        "data.loading": ("load_dataset", "split_train_test"),
        "data.records": ("Records",),
        "embed.embed_images": ("embed_images", "read_images"),
        "export.export_folder": ("load_encoder",),
        "tasks.task": ("Task", "task_named", "register_task"),
        "training.loop": ("TrainingResult", "train"),
        "training.resolve": ("training_config",),
    },
)
