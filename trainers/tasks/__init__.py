"""The kinds of training: importing this package registers its tasks (`trainers.tasks.task`)."""

from __future__ import annotations

from trainers.tasks.caption_task import CAPTIONS
from trainers.tasks.class_task import CLASSES
from trainers.tasks.image_task import IMAGES
from trainers.tasks.masked_task import MASKED_IMAGES
from trainers.tasks.pair_task import PAIRS
from trainers.tasks.task import register_task

for _task in (IMAGES, PAIRS, MASKED_IMAGES, CAPTIONS, CLASSES):
    register_task(_task)
