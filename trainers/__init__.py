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
    from trainers.config.presets import SETTINGS as SETTINGS
    from trainers.config.presets import named_setting as named_setting
    from trainers.config.settings import MechanismOptions as MechanismOptions
    from trainers.config.settings import TrainingOptions as TrainingOptions
    from trainers.config.training import TrainingConfig as TrainingConfig
    from trainers.config.tree import replace_options as changed  # noqa: F401  # its name in 0.1
    from trainers.config.tree import replace_options as replace_options
    from trainers.data.dataset import Dataset as Dataset
    from trainers.data.dataset import TrainingData as TrainingData
    from trainers.data.loading import load_dataset as load_dataset
    from trainers.data.loading import split_train_test as split_train_test
    from trainers.data.records import Records as Records
    from trainers.embed.embed_images import embed_images as embed_images
    from trainers.embed.embed_images import read_images as read_images
    from trainers.export.export_folder import load_encoder as load_encoder
    from trainers.tasks.task import Task as Task
    from trainers.tasks.task import register_task as register_task
    from trainers.tasks.task import task_named as task_named
    from trainers.training.loop import TrainingResult as TrainingResult
    from trainers.training.loop import train as train
    from trainers.training.resolve import training_config as training_config

__getattr__, __dir__, __all__ = lazy_names(__name__)
