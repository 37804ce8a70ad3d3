"""Scores of a classifier: its own accuracy on labelled records, and the scores of its input features."""

from __future__ import annotations

import numpy as np
import torch

from dpgcl_core.release.metrics import CLASSIFIER_SCORE
from trainers.evaluation import features
from trainers.evaluation.linear_probe import Features, Labels
from trainers.evaluation.outcomes import Score, auc_score, mean_score
from trainers.evaluation.scorer import Scoring
from trainers.models.classifier import Classifier


def evaluate(network: Classifier, scoring: Scoring) -> dict[str, float]:
    """Return `classifier_accuracy` of labelled queries, and the scores of the frozen features, in [0, 1].

    Two classes, or unbalanced classes, add `classifier_balanced_accuracy`. Two classes add `classifier_auc`.

    Args:
      network: the classifier, already on the device; its train/eval modes are restored.
      scoring: the records, and the settings of their scores.

    Raises:
      DataError: there is nothing to score.
    """
    features.check_not_empty(scoring.index, scoring.queries)
    if scoring.queries.labels is None:
        return {} if scoring.index is None else features.evaluate(network, scoring)
    queries = features.first_records(scoring.queries, scoring.config.max_query_records)
    assert queries.labels is not None
    describe = features.describe_by(network, scoring)
    query_features = describe(queries.images)
    scores = features.with_balanced(own_scores(network, query_features, queries.labels), queries.labels)
    if scoring.index is None or scoring.index.labels is None:
        return scores
    return scores | features.label_scores(describe, query_features, queries, scoring.index, scoring.config)


def own_scores(network: Classifier, record_features: Features, labels: Labels) -> dict[str, Score]:
    """Return the share of records whose own class has the largest logit and, for two classes, the AUC.

    Args:
      network: the classifier.
      record_features: `[n, feature_dim]`, the network's features of the records.
      labels: `[n]`; a label that is not a class of the network counts as wrong.
    """
    with torch.no_grad():
        logits = network.logits_of(torch.from_numpy(record_features).to(network.classify.weight.device))
    scores = {CLASSIFIER_SCORE: mean_score(logits.argmax(1).cpu().numpy() == labels)}
    if logits.shape[1] == 2 and np.array_equal(np.unique(labels), [0, 1]):
        margins = (logits[:, 1] - logits[:, 0]).nan_to_num().cpu().numpy()  # the network may have diverged
        scores["classifier_auc"] = auc_score(margins, labels == 1)
    return scores
