"""Scores that need no training: from the images' own pixels, and from an untrained descriptor.

A trained network's gain is the difference between its scores and these. All come from the same scorer and the
same records: k-NN and linear probe, fitted on the index and evaluated on the queries
(`trainers.evaluation.features.label_scores`). HOG is by Dalal and Triggs (2005), from scikit-image; Tramèr
and Boneh (2021) also compare private learning with it. It has nine orientations, blocks of 2 × 2 cells,
`L2-Hys`, and cells of an eighth of the smaller side.

They follow the rules of all scores: with private training data they are computed only from the public records
of `--evaluate-on` and `--probe-datasets`, and without these there are no such scores. They cost no ε.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from dpgcl_core.release.metrics import visible
from trainers.config.nodes import EvaluationConfig
from trainers.data.dataset import AnyRecords, TrainingData
from trainers.data.stored_images import Images
from trainers.evaluation.features import (
    check_not_empty,
    first_records,
    is_labelled,
    label_scores,
    read_images,
)
from trainers.evaluation.linear_probe import Features

MAX_PIXELS_A_SIDE = 32
"""Larger images are averaged down to this side, so that an image has at most 3,072 pixel features."""

_BATCH_SIZE = 512


def reference_scores(data: TrainingData, config: EvaluationConfig) -> dict[str, float]:
    """Return the visible scores of raw pixels and of HOG, by metric name.

    For `data.queries` these are `raw_pixels_knn_accuracy`, `raw_pixels_linear_probe_accuracy`, the same with
    `hog_`, and the other scores of `label_scores`. For every data set in `data.probes` they are
    `raw_pixels_transfer_knn_accuracy/NAME` and so on. There are none without labels, and none if the scored
    records are private. Captions are ignored.

    Args:
      data: the data that a training may access.
      config: subset sizes, and the k of k-NN.

    Raises:
      DataError: there is nothing to score.
    """
    if not (data.train_is_public or data.evaluation_is_public):
        return {}
    scored: list[tuple[AnyRecords | None, AnyRecords | None, str]] = [(data.index, data.queries, "{}")]
    scored += [(probe.index, probe.queries, f"transfer_{{}}/{probe.name}") for probe in data.probes]
    references: dict[str, float] = {}
    for index, queries, name in scored:
        if index is None or queries is None or not is_labelled(index, queries):
            continue
        check_not_empty(index, queries)
        first = first_records(queries, config.max_query_records)
        for prefix, descriptor in DESCRIPTORS.items():
            describe = partial(_describe_in_batches, descriptor)
            scores = label_scores(describe, describe(first.images), first, index, config)
            references |= {prefix + name.format(score): value for score, value in scores.items()}
    return visible(
        references,
        training_data_is_public=data.train_is_public,
        evaluation_data_is_public=data.evaluation_is_public,
    )


def raw_pixels(images: Tensor) -> Features:
    """Return the pixels of uint8 images `[n, channels, height, width]` in [0, 1], at most 32 × 32 a channel.

    >>> raw_pixels(Tensor([[[[0, 255], [255, 0]]]])).tolist()
    [[0.0, 1.0, 1.0, 0.0]]
    """
    height, width = images.shape[-2:]
    size = min(height, MAX_PIXELS_A_SIDE), min(width, MAX_PIXELS_A_SIDE)
    pixels = images.float() / 255
    if size != (height, width):
        pixels = F.adaptive_avg_pool2d(pixels, size)
    return pixels.flatten(1).numpy()


def hog_features(images: Tensor) -> Features:
    """Return the histograms of oriented gradients of uint8 images `[n, channels, height, width]`.

    In colour images each pixel counts in the channel of its largest gradient. Images with fewer than four
    pixels a side are padded with their edge.
    """
    from skimage.feature import hog  # imported late: it takes a second, which workers should not pay

    side = min(images.shape[-2:])
    cell = max(2, -(-side // 8))  # an eighth of the side, rounded up
    missing = [max(0, 2 * cell - each) for each in (images.shape[-1], images.shape[-2])]
    padded = F.pad(images.float(), (0, missing[0], 0, missing[1]), mode="replicate").numpy()
    rows = [
        hog(image, orientations=9, pixels_per_cell=(cell, cell), cells_per_block=(2, 2), channel_axis=0)
        for image in padded
    ]
    return np.stack(rows).astype(np.float32)


DESCRIPTORS: dict[str, Callable[[Tensor], Features]] = {"raw_pixels_": raw_pixels, "hog_": hog_features}


def _describe_in_batches(describe: Callable[[Tensor], Features], images: Images | Tensor) -> Features:
    starts = range(0, images.shape[0], _BATCH_SIZE)
    return np.concatenate([describe(read_images(images, slice(s, s + _BATCH_SIZE))) for s in starts])
