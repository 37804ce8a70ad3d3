"""The common part of per-record tasks: each record is its own group, and the whole network trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.clipping.cross_record import check_layers, refuse_mixed_groups
from dpgcl_core.clipping.types import GroupInputs, Objective
from trainers.config.networks import AnyNetworkConfig
from trainers.config.training import TrainingConfig
from trainers.evaluation.readout import check_readout
from trainers.models.encoder import ImageShape
from trainers.models.initial_encoder import load_whole
from trainers.tasks.task import NetworkT, Task

Rows = NDArray[np.int64]

NUM_PROBES = 4
"""Number of one-record groups in the inputs that test whether a network mixes records."""


class PerRecordTask(Task[NetworkT]):
    """A task whose network takes images, each with a *condition*: a caption, label or order of patches."""

    cpu_views_at_once: ClassVar[int] = 32
    """Few images make small matrices, see `trainers.tasks.pair_task`."""

    @abstractmethod
    def fresh(self, config: TrainingConfig, image_shape: ImageShape) -> NetworkT:
        """Return the network at random weights, drawn from the public seed.

        Raises:
          ConfigError: the network cannot be built for these images.
        """

    @abstractmethod
    def make_inputs(
        self, config: TrainingConfig, network: NetworkT, records: Any, rows: Rows, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return images `[n, 1, C, H, W]` and conditions `[n, 1, ...]` of the records at `rows` in a step."""

    @abstractmethod
    def draw_conditions(self, network: NetworkT, generator: torch.Generator) -> Tensor:
        """Return synthetic conditions `[NUM_PROBES, 1, 1, ...]`, to test the network or for blank inputs."""

    @abstractmethod
    def losses(self, network: NetworkT, precision: AnyNetworkConfig | None = None) -> Objective:
        """Return the function from images and conditions to each group's mean loss over views, `[groups]`.

        Args:
          network: the network.
          precision: the configuration with the precision of its pass; None for float32.
        """

    def build(
        self, config: TrainingConfig, image_shape: ImageShape, start_tensors: Mapping[str, Tensor] | None
    ) -> NetworkT:
        network = self.fresh(config, image_shape)
        if config.warm_start is not None and start_tensors is not None:
            load_whole(network, config.warm_start, start_tensors)
        return network

    def check_network(self, config: TrainingConfig, network: NetworkT, image_shape: ImageShape) -> None:
        check_layers(network)
        check_readout(network, config.evaluation.readout)
        probes = [self._draw_probe(network, seed) for seed in (0, 1)]
        refuse_mixed_groups(network, self.objective(config, network), *probes)

    def _draw_probe(self, network: Any, seed: int) -> tuple[Tensor, Tensor]:
        """Return random inputs of `NUM_PROBES` one-record groups, to test if the network mixes records."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(NUM_PROBES, 1, 1, *network.image_shape, generator=generator)
        device = next(network.parameters()).device
        return images.to(device), self.draw_conditions(network, generator).to(device)

    def inputs(
        self,
        config: TrainingConfig,
        network: NetworkT,
        records: Any,
        groups: Rows,
        *,
        step: int,
        num_augmentations: int,
    ) -> GroupInputs:
        images, conditions = self.make_inputs(config, network, records, groups.reshape(-1), step)
        return images.unflatten(0, groups.shape), conditions.to(images.device).unflatten(0, groups.shape)

    def blank_inputs(
        self, network: NetworkT, image_shape: tuple[int, ...], shape: tuple[int, int, int]
    ) -> GroupInputs:
        device = next(network.parameters()).device
        images = torch.zeros(*shape, *image_shape, device=device)
        one = self.draw_conditions(network, torch.Generator().manual_seed(0))[0, 0, 0]
        return images, one.expand(*shape, *one.shape).contiguous().to(device)

    def objective(
        self,
        config: TrainingConfig,
        network: NetworkT,
        precision: AnyNetworkConfig | None = None,
        target: NetworkT | None = None,
    ) -> Objective:
        return self.losses(network, precision)

    def run(self, network: NetworkT, inputs: GroupInputs) -> None:
        images, conditions = inputs
        network(images.flatten(0, 2), conditions.flatten(0, 2))
