"""What can be trained: importing the package registers the tasks that it holds (`trainers.tasks.task`)."""

from __future__ import annotations

from trainers.tasks.captions import CAPTIONS
from trainers.tasks.classes import CLASSES
from trainers.tasks.images import IMAGES
from trainers.tasks.masked_images import MASKED_IMAGES
from trainers.tasks.pairs import PAIRS
from trainers.tasks.task import register_task

for _task in (IMAGES, PAIRS, MASKED_IMAGES, CAPTIONS, CLASSES):
    register_task(_task)
