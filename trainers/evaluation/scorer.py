"""What a frozen network is scored on, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainers.config.networks import ViewConfig
from trainers.config.nodes import EvaluationConfig
from trainers.data.dataset import AnyRecords


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """All that decides the scores of a network, besides the network.

    Attributes:
      index: labelled records for k-NN and probe; None where there are none.
      queries: records scored.
      config: subset sizes and k.
      view_config: augmentation, for scores that compare views.
      seed: public seed of the views; which records are scored does not depend on it.
      device: where the network is.
      class_names: of the queries' labels 0, 1, …, for the zero-shot score; empty where unknown.
      batch_size: records passed at once; changes no score beyond rounding.
    """

    index: AnyRecords | None
    queries: AnyRecords
    config: EvaluationConfig
    view_config: ViewConfig
    seed: int
    device: torch.device | str
    class_names: Sequence[str] = ()
    batch_size: int = 512
