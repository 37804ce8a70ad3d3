"""The data and settings with which a frozen network is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainers.config.networks import ViewConfig
from trainers.config.nodes import EvaluationConfig
from trainers.data.dataset import AnyRecords


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """All inputs of a network's scores other than the network.

    Attributes:
      index: labelled records on which k-NN and linear probe are fitted; None if there are none.
      queries: the records that are scored.
      config: subset sizes, and the k of k-NN.
      view_config: the augmentation, for scores that compare views.
      seed: public seed of the views; it does not affect which records are scored.
      device: the network's device.
      class_names: names of the queries' labels 0, 1, …, for the zero-shot score; empty if unknown.
      batch_size: records passed at once; affects scores only by rounding.
    """

    index: AnyRecords | None
    queries: AnyRecords
    config: EvaluationConfig
    view_config: ViewConfig
    seed: int
    device: torch.device | str
    class_names: Sequence[str] = ()
    batch_size: int = 512
