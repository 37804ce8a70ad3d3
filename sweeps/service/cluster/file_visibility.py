"""A check that all nodes of a Ray cluster see the files that trainings read directly: shards and weights.

Images in memory are sent through Ray's object store. But images that stay in their files, which a step reads
when it draws them, and a warm start's weights are read on the training's node. A worker's error would come
after the charge, and for private records its text is withheld. So the nodes are checked before any training
starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpgcl_core.errors import DataError
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.storage.cluster_nodes import answers_of_nodes, living_nodes
from trainers.data.stored_images import ArrayImages, StoredImages

_ANSWER_SECONDS = 60.0
_FILES_CHECKED, _OBJECTS_CHECKED = 1000, 20


NeededFile = tuple[str, int, int | None]
"""A file as the driver sees it: absolute path or address, and its stamp; of weights only the size."""


def files_of_workers(plan: SweepPlan) -> list[NeededFile]:
    """Return the files that the trainings of a plan read directly; of very many files, evenly spaced ones."""
    files: dict[str, NeededFile] = {}
    for images in _stored_images(plan.data):
        is_remote = isinstance(images, StoredImages) and images.is_remote
        limit = _OBJECTS_CHECKED if is_remote else _FILES_CHECKED
        for number in range(0, len(images.files), 1 + len(images.files) // limit):
            name = os.fsdecode(images.files[number])
            absolute_path = name if is_remote else os.path.abspath(name)
            size, modified_ns = images.stamps[number].tolist()
            files[absolute_path] = (absolute_path, size, modified_ns)
    starts = [trial.config.warm_start for trial in plan.trials]
    for path in {Path(start.path) for start in starts if start is not None}:
        if path.is_file():  # else synthetic weights, or a path that fails when it is read
            files[str(path)] = (str(path), path.stat().st_size, None)
    return list(files.values())


def check_files_visible(files: Sequence[NeededFile]) -> None:
    """Raise DataError if a node of the connected Ray does not have the files of this machine at their paths.

    A node that does not answer in time is ignored.

    Raises:
      DataError: files are missing or differ on a node. The message names the nodes, and no file.
    """
    if not files:
        return
    missing = [f"{node} ({number} of {len(files)})" for node, number in _count_missing(files) if number]
    if missing:
        folder = Path(files[0][0]).parent
        raise DataError(
            f"all nodes must see the files that trainings read directly, such as the images and weights in "
            f"{folder}, at the same path; missing or different on {', '.join(missing)}. Mount one shared "
            "file system there, or copy the files to all nodes and keep their times (cp -p)"
        )


def _stored_images(value: Any) -> Iterator[StoredImages | ArrayImages]:
    """Yield all images that are read on access in nested tuples and dataclasses."""
    if isinstance(value, StoredImages | ArrayImages):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _stored_images(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _stored_images(getattr(value, field.name))


def _count_missing(files: Sequence[NeededFile]) -> Iterator[tuple[str, int]]:
    """Yield the address of each node that answers, and the number of files missing or different there."""
    nodes = living_nodes()
    answers = answers_of_nodes(file_check_function(), list(files), nodes=nodes, seconds=_ANSWER_SECONDS)
    for node in nodes:
        if node.id in answers:
            yield node.address, int(answers[node.id])


def file_check_function() -> Callable[[list[NeededFile]], int]:
    """Return the function that counts the missing or different files of the node that runs it.

    It is local, so that Ray sends its code to nodes without this package.
    """

    def count_missing(files: list[NeededFile]) -> int:
        import os

        number = 0
        for path, size, modified_ns in files:
            if path.startswith("s3://"):
                from dpgcl_core.object_store import find_object

                try:
                    file = find_object(path)
                except ValueError:  # a DpgclError
                    file = None
                number += file is None or file.stamp != (size, modified_ns)
                continue
            try:
                state = os.stat(path)
            except OSError:
                number += 1
            else:
                number += state.st_size != size or modified_ns not in (None, state.st_mtime_ns)
        return number

    return count_missing
