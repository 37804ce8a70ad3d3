"""Class task: a classifier learns the label of each image (linear probing, fine-tuning; De et al. 2022).

The loss of a record is the cross-entropy of its own label given its own image:

    L(image, y) = −log softmax(W ψ(image) + b)_y

ψ are the whitened features; the head has the weights W and b. A record is the image **and** its label. Both
enter only its own gradient, which is clipped separately, so adding or removing the pair moves the clipped sum
by at most C (`dpgcl_core.methods.record_methods`). Nothing is weighted by the frequency of a class, and K,
the number of classes, is public. Image and label come from the same row, which represents the record at the
step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpgcl_core.clipping.types import GroupInputs, Objective
from dpgcl_core.errors import ConfigError
from dpgcl_core.release.metrics import Family, scores_of
from trainers.config.networks import AnyNetworkConfig, ClassifierConfig, ClipNetworkConfig, NetworkConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.data.pairs import ImageTextRecords
from trainers.data.procedural import procedural_images
from trainers.data.records import Records
from trainers.evaluation import classifier_scores
from trainers.evaluation.features import frozen
from trainers.evaluation.scorer import Scoring
from trainers.models.classifier import Classifier
from trainers.models.clip.clip_encoder import ImageTextEncoder, refuse_other_size
from trainers.models.clip.initial_clip import check_same_model
from trainers.models.encoder import Encoder, ImageShape, to_fast_layout
from trainers.models.initial_encoder import is_classifier, load_whole
from trainers.models.precision import pass_in, scale_gradient
from trainers.tasks.record_task import NUM_PROBES, PerRecordTask, Rows
from trainers.tasks.task import image_views, task_named
from trainers.views.image_views import normalise

_NUM_WHITENING = 512
"""Number of procedural images that determine the whitening of the features."""


class Classes(PerRecordTask[Classifier]):
    """A classifier learns from labelled images, from each image separately."""

    name: ClassVar[str] = ClassifierConfig.task
    learns_labels: ClassVar[bool] = True
    own_scores: ClassVar[tuple[str, ...]] = tuple(scores_of(Family.CLASSIFIER))

    def check_records(self, config: TrainingConfig, records: AnyRecords) -> None:
        method = config.mechanism.method
        if isinstance(records, ImageTextRecords):
            raise ConfigError(
                f"{method} learns labels of images; got pairs of images and texts. Use a method for pairs, "
                "or load images with labels."
            )
        if records.labels is None:
            raise ConfigError(f"{method} learns labels; got images without labels. Use images with labels.")
        num_classes = _classifier_config(config).num_classes
        if len(records.labels) and not 0 <= records.labels.min() <= records.labels.max() < num_classes:
            raise ConfigError(
                f"labels must be integers from 0 to below num_classes = {num_classes}; got others. Set "
                "--num-classes to an upper bound on the number of classes."
            )

    def fresh(
        self,
        config: TrainingConfig,
        image_shape: ImageShape,
        start_tensors: Mapping[str, Tensor] | None = None,
    ) -> Classifier:
        """Return a classifier with whitening; its encoder is random or has the weights `start_tensors`."""
        network = self._unwhitened(config, image_shape, start_tensors)
        numbers = np.arange(_NUM_WHITENING, dtype=np.uint64)
        images = procedural_images(numbers, image_shape, seed=config.public_seed)
        with frozen(network):
            network.whiten_by(normalise(torch.from_numpy(images)))
        return network

    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> Classifier:
        if config.warm_start is None or start_tensors is None or not is_classifier(start_tensors):
            return self.fresh(config, image_shape, start_tensors)
        if isinstance(config.encoder, ClipNetworkConfig):
            check_same_model(config.encoder, config.warm_start)
        network = self._unwhitened(config, image_shape, None)
        load_whole(network, config.warm_start, start_tensors)  # including the whitening map
        return network

    def start_note(self, config: TrainingConfig) -> str:
        return task_named(config.encoder.task).start_note(config)

    def fresh_parts(self, config: TrainingConfig) -> str:
        start = config.warm_start
        return "" if start is None or start.classifies else "the classification head"

    def place(self, network: Classifier, device: torch.device, image_shape: tuple[int, ...]) -> None:
        if isinstance(network.encoder, Encoder):
            to_fast_layout(network, device, image_shape)
        else:
            network.to(device)

    def make_inputs(
        self, config: TrainingConfig, network: Classifier, records: Records, rows: Rows, step: int
    ) -> tuple[Tensor, Tensor]:
        seed = config.public_seed
        pixels = records.images_at(rows, seed=seed, step=step)
        views = image_views(config, network, pixels, records.ids[rows], step=step, num_views=1)
        labels = torch.from_numpy(records.labels_at(rows, seed=seed, step=step)).to(views.device)
        return views, F.one_hot(labels, network.num_classes).float()[:, None]

    def synthetic_records(self, count: int, image_shape: tuple[int, ...]) -> AnyRecords:
        images = super().synthetic_records(count, image_shape)
        return dataclasses.replace(images, labels=np.zeros(count, dtype=np.int64))

    def run(self, network: Classifier, inputs: GroupInputs) -> None:
        network(inputs[0].flatten(0, 2))

    def losses(self, network: Classifier, precision: AnyNetworkConfig | None = None) -> Objective:
        """Return the function from images and labels to each group's mean cross-entropy, `[groups]`.

        A label is a row of `num_classes` numbers, 1 at its class and 0 elsewhere. Other numbers are accepted,
        because the clipping engine compares its ways of clipping on synthetic inputs.
        """
        config = precision or NetworkConfig()

        def losses(inputs: GroupInputs) -> Tensor:
            images, targets = (part.flatten(0, 2) for part in inputs)
            logits = scale_gradient(config, pass_in(config, network, images))
            entropies = -(targets * logits.log_softmax(1)).sum(1)
            return entropies.reshape(len(inputs[0]), -1).mean(1)

        return losses

    def evaluate(self, network: Classifier, scoring: Scoring) -> dict[str, float]:
        return classifier_scores.evaluate(network, scoring)

    def _unwhitened(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> Classifier:
        """Return a classifier without whitening; its encoder is random or has the weights `start_tensors`."""
        head = _classifier_config(config)
        encoder = task_named(config.encoder.task).build(config, image_shape, start_tensors)
        if isinstance(encoder, ImageTextEncoder):
            refuse_other_size(encoder.spec, image_shape)
        return Classifier(
            encoder, image_shape, num_classes=head.num_classes, trained_layers=head.trained_layers
        )

    def draw_conditions(self, network: Classifier, generator: torch.Generator) -> Tensor:
        """Return random labels as one-hot rows, `[NUM_PROBES, 1, 1, num_classes]`."""
        labels = torch.randint(network.num_classes, (NUM_PROBES, 1, 1), generator=generator)
        return F.one_hot(labels, network.num_classes).float()


CLASSES = Classes()


def _classifier_config(config: TrainingConfig) -> ClassifierConfig:
    assert isinstance(config.network, ClassifierConfig)
    return config.network
