"""What tasks of single records have in common: each is a group of its own, and all of the network trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from dpgcl_core.clipping.cross_record import check_layers, refuse_mixed_groups
from dpgcl_core.clipping.types import GroupInputs
from trainers.config.training import TrainingConfig
from trainers.models.encoder import ImageShape
from trainers.models.starting import load_whole
from trainers.tasks.task import NetworkT, Task

NUM_PROBES = 4
"""Groups of one that a probe of mixing takes."""

_CPU_VIEWS_AT_ONCE = 32
"""Few images make small matrices; see `trainers.tasks.pairs`."""


class PerRecordTask(Task[NetworkT]):
    """A task whose network takes images, and beside each what its own objective asks for."""

    embeds: ClassVar[bool] = False
    cpu_views_at_once: ClassVar[int] = _CPU_VIEWS_AT_ONCE

    @abstractmethod
    def fresh(self, config: TrainingConfig, image_shape: ImageShape) -> NetworkT:
        """Return the network at random weights, of the public seed.

        Raises:
          ConfigError: it cannot be built for these images.
        """

    @abstractmethod
    def made_up(self, network: NetworkT, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs of `NUM_PROBES` groups of one, to look for mixing with."""

    def build(
        self, config: TrainingConfig, image_shape: ImageShape, given: Mapping[str, Tensor] | None
    ) -> NetworkT:
        network = self.fresh(config, image_shape)
        if config.warm_start is not None and given is not None:
            load_whole(network, config.warm_start, given)
        return network

    def check_network(self, config: TrainingConfig, network: NetworkT, image_shape: tuple[int, ...]) -> None:
        check_layers(network)
        probes = [self.made_up(network, seed) for seed in (0, 1)]
        refuse_mixed_groups(network, self.objective(config, network), *probes)

    def start_note(self, config: TrainingConfig) -> str:
        return ""

    def fresh_parts(self, config: TrainingConfig) -> str:
        return ""

    def num_views(self, config: TrainingConfig, num_augmentations: int) -> int:
        return 1

    def run(self, network: NetworkT, inputs: GroupInputs) -> None:
        images, beside = inputs
        with torch.no_grad():
            network(images.flatten(0, 2), beside.flatten(0, 2))
