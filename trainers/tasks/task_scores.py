"""The scores of a training's network on all data that it is scored on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from dpgcl_core.release.metrics import Release, find_metric
from trainers.config.training import TrainingConfig
from trainers.data.dataset import Probe, TrainingData
from trainers.evaluation.features import first_by_hash
from trainers.evaluation.outcomes import Score
from trainers.evaluation.scorer import Scoring
from trainers.files.outcome_file import Outcomes
from trainers.models.task_networks import AnyEncoder
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
    """Return a network's scores by metric name; {} if neither training nor evaluation records are public.

    Scores of `data.queries` have the names that the task's `evaluate` gives. Scores of every data set in
    `data.probes` are `transfer_knn_accuracy/NAME` and `transfer_linear_probe_accuracy/NAME`, and, for an
    image-text network if its classes have names, `transfer_zero_shot_accuracy/NAME`.

    Args:
      task: the task that computes the scores.
      network: the network, already on `device`.
      data: the data that the training may use.
      config: the configuration with subset sizes, the k of k-NN, augmentation and the public seed.
      device: the device of the network.
      prefix: prefix of each name, such as "untrained_".
      with_probes: whether `data.probes` are scored, too.

    Raises:
      DataError: there is nothing to score.
      ConfigError: the network cannot be scored on records of this kind.
    """
    if not (data.train_is_public or data.evaluation_is_public):
        return {}

    def scores_of(source: TrainingData | Probe) -> dict[str, float]:
        assert source.queries is not None
        scoring = Scoring(
            index=source.index,
            queries=source.queries,
            config=config.evaluation,
            view_config=config.views,
            seed=config.public_seed,
            device=device,
            class_names=source.class_names,
        )
        return task.evaluate(network, scoring)

    scores = {}
    if data.queries is not None:
        scores = {prefix + name: score for name, score in scores_of(data).items()}
    for probe in data.probes if with_probes else ():
        scores |= {
            f"{prefix}transfer_{name}/{probe.name}": score
            for name, score in scores_of(probe).items()
            if name not in task.own_scores
        }
    return scores


def public_outcomes(
    scores: Mapping[str, float], data: TrainingData, config: TrainingConfig
) -> Outcomes | None:
    """Return each scored record's contribution to the scores that are means; None if none may be kept.

    Outcomes describe single records, so they are kept only of public evaluation records, whoever may see the
    scores. Given these records, outcomes are functions of the released network, like the scores, and cost no
    ε.

    Args:
      scores: scores by metric name, as `all_scores` returns them without a prefix.
      data: the data that were scored.
      config: the configuration with subset sizes.
    """
    if not data.evaluation_is_public:
        return None
    outcomes = {
        name: score.outcomes.astype(np.float32)
        for name, score in scores.items()
        if isinstance(score, Score)
        and (metric := find_metric(name)) is not None
        and metric.release is Release.SCORE
    }
    ids = np.zeros(0, dtype=np.uint64)
    if data.queries is not None:
        ids = data.queries.ids[first_by_hash(data.queries.ids, config.evaluation.max_query_records)]
    return Outcomes(record_ids=ids, scores=outcomes) if outcomes else None
