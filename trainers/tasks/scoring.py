"""The scores of a training's network on all data that it is scored on."""

from __future__ import annotations

from functools import partial

import torch

from trainers.config.training import TrainingConfig
from trainers.data.dataset import TrainingData
from trainers.models.networks import AnyEncoder
from trainers.tasks.task import AnyTask


def all_scores(
    task: AnyTask,
    network: AnyEncoder,
    data: TrainingData,
    config: TrainingConfig,
    *,
    device: torch.device | str,
    prefix: str = "",
    with_probes: bool = True,
) -> dict[str, float]:
    """Return the scores that may be seen by metric name; none are computed where none may.

    Those of `data.queries` as the task's `evaluate` names them; those of every data set in `data.probes` as
    `transfer_knn_accuracy/NAME` and `transfer_linear_probe_accuracy/NAME`, and by an image-text network,
    where its classes have names, `transfer_zero_shot_accuracy/NAME`.

    Args:
      task: that scores.
      network: already on `device`.
      data: what the training may touch.
      config: subset sizes, k, augmentation and the public seed.
      device: where the network is.
      prefix: put before each name, such as "untrained_".
      with_probes: whether `data.probes` are scored, too.

    Raises:
      DataError: there is nothing to score.
      ConfigError: the network cannot be scored on records of this kind.
    """
    if not (data.train_is_public or data.evaluation_is_public):
        return {}
    scores_of = partial(
        task.evaluate,
        config=config.evaluation,
        view_config=config.views,
        seed=config.public_seed,
        device=device,
    )
    found = {}
    if data.queries is not None:
        scores = scores_of(network, data.index, data.queries, class_names=data.class_names)
        found = {prefix + name: score for name, score in scores.items()}
    for probe in data.probes if with_probes else ():
        scores = scores_of(network, probe.index, probe.queries, class_names=probe.class_names)
        found |= {
            f"{prefix}transfer_{name}/{probe.name}": score
            for name, score in scores.items()
            if name not in task.own_scores
        }
    return found
