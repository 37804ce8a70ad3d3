"""The common part of contrastive tasks: views are embedded, and a method's loss compares the embeddings."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from dpgcl_core.clipping.types import Embed, GroupInputs
from dpgcl_core.errors import ConfigError
from dpgcl_core.losses.objective import EmbeddingObjective
from trainers.config.networks import AnyNetworkConfig
from trainers.config.training import TrainingConfig
from trainers.data.dataset import AnyRecords
from trainers.tasks.task import NetworkT, Task


class ContrastiveTask(Task[NetworkT]):
    """A task whose objective is made of unit embeddings."""

    embeds: ClassVar[bool] = True

    def check(self, config: TrainingConfig, records: AnyRecords) -> None:
        """Check as every task does, and that a method that clips groups has a loss on embeddings."""
        super().check(config, records)
        if config.group_loss() is None and not config.rule().whole_batch:
            raise ConfigError(
                f"{config.mechanism.method} has no loss on embeddings, which the task {self.name} needs. "
                "Use a contrastive method."
            )

    @abstractmethod
    def embed(
        self, network: NetworkT, precision: AnyNetworkConfig | None = None, target: NetworkT | None = None
    ) -> Embed:
        """Return stage 5: from views `[groups, group_size, views, ...]` to unit embeddings `[..., dim]`.

        Args:
          network: the network that is trained.
          precision: the configuration with the precision of its passes; None for float32. With float16 the
            embeddings' gradient reaches the network multiplied by `precision.gradient_scale`; see
            `dpgcl_core.clipping.clipper`.
          target: a network whose embeddings are appended without gradient, which makes `[..., 2·dim]`.
        """

    def objective(
        self,
        config: TrainingConfig,
        network: NetworkT,
        precision: AnyNetworkConfig | None = None,
        target: NetworkT | None = None,
    ) -> EmbeddingObjective:
        return EmbeddingObjective(embed=self.embed(network, precision, target), loss=config.group_loss())

    def run(self, network: NetworkT, inputs: GroupInputs) -> None:
        self.embed(network)(inputs)  # type: ignore[arg-type]
