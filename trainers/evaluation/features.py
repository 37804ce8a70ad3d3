"""Scores of frozen features: k-NN, linear probe and, without labels, retrieval of a record's other view.

Image-text networks are scored on both towers and, with labels, by these scores, too: see
`trainers.evaluation.pair_scores`.

Scores are computed from evaluation records, not only from the mechanism's output. Whether they may leave the
training is decided by `dpgcl_core.release.metrics.visible`, not here. A network that diverged gives poor
scores and no error: non-finite features count as zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpgcl_core.clipping.isolation import isolated
from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import Ids, keyed_uniform
from trainers.config.nodes import POOLED, EvaluationConfig
from trainers.data.dataset import AnyRecords
from trainers.data.stored_images import Images
from trainers.evaluation.linear_probe import Features, Labels, fit_linear_probe
from trainers.evaluation.outcomes import Score, auc_score, balanced_score, mean_score, needs_balance
from trainers.evaluation.readout import read_out
from trainers.evaluation.scorer import Scoring
from trainers.models.task_networks import AnyEncoder
from trainers.views.image_views import make_views, normalise

Describe = Callable[[Images | Tensor], Features]
"""Features `[n, feature_dim]` of n images."""
Rule = Callable[[Features], Labels]
"""Labels `[n]` of features `[n, feature_dim]`, each by itself."""

RETRIEVAL_STEP = -1
"""The step in the views' key: no training step has it, so these views were never trained on."""

_RETRIEVAL_ROWS = 1024
_SIMILARITY_BYTES = 2**26


def evaluate(encoder: AnyEncoder, scoring: Scoring) -> dict[str, float]:
    """Return the scores of a frozen network's image features by metric name, each in [0, 1].

    With labels, these are the scores of `label_scores`, such as `knn_accuracy` and `linear_probe_accuracy`:
    both rules are fitted on `scoring.index` and evaluated on `scoring.queries`. Without labels, they are
    `view_retrieval_top1` and `view_retrieval_top10` among the queries.

    Args:
      encoder: the network, already on the device; its train/eval modes are restored.
      scoring: the records, and the settings of their scores.

    Raises:
      DataError: there is nothing to score.
    """
    check_not_empty(scoring.index, scoring.queries)
    queries = first_records(scoring.queries, scoring.config.max_query_records)
    if scoring.index is None or not is_labelled(scoring.index, queries):
        return view_retrieval(encoder, queries, scoring)
    describe = describe_by(encoder, scoring)
    return label_scores(describe, describe(queries.images), queries, scoring.index, scoring.config)


def describe_by(encoder: AnyEncoder, scoring: Scoring) -> Describe:
    """Return the function from images to the features that k-NN and the linear probe use."""
    return partial(
        embed_features,
        encoder,
        batch_size=scoring.batch_size,
        device=scoring.device,
        readout=scoring.config.readout,
    )


def check_not_empty(index: AnyRecords | None, queries: AnyRecords) -> None:
    """Check that the queries, and the index if there is one, hold at least one record.

    Raises:
      DataError: there is nothing to score.
    """
    if (index is not None and len(index) == 0) or len(queries) == 0:
        raise DataError(
            "scoring needs at least one index and one query record; got "
            f"{len(index) if index else 0} and {len(queries)}. Hold out a larger share of the records."
        )


def is_labelled(index: AnyRecords, queries: AnyRecords) -> bool:
    """Whether both index and queries have labels."""
    return index.labels is not None and queries.labels is not None


def label_scores(
    describe: Describe, features: Features, queries: AnyRecords, index: AnyRecords, config: EvaluationConfig
) -> dict[str, float]:
    """Return the scores of k-NN and linear probe on labelled queries, both fitted on a labelled index.

    These are accuracies, and balanced accuracies if there are two classes or the largest class is at least
    twice the smallest. Two classes add the linear probe's AUC.

    Args:
      describe: function from the index's images to their features.
      features: the queries' features, `[n, feature_dim]`.
      queries: labelled records, as `first_records` returns them.
      index: labelled records, of which `first_records` selects the ones that are used.
      config: subset sizes, and the k of k-NN.
    """
    index = first_records(index, config.max_index_records)
    assert index.labels is not None
    assert queries.labels is not None
    index_features = describe(index.images), index.labels
    knn = mean_score(knn_rule(*index_features, config.num_neighbors)(features) == queries.labels)
    scores = {"knn_accuracy": knn} | linear_probe_scores(*index_features, features, queries.labels)
    return with_balanced(scores, queries.labels)


def with_balanced(scores: dict[str, Score], labels: Labels) -> dict[str, float]:
    """Return the scores, each accuracy followed by a balanced accuracy if `needs_balance(labels)`."""
    values: dict[str, float] = {}
    for name, score in scores.items():
        values[name] = score
        if name.endswith("_accuracy") and needs_balance(labels):
            balanced = balanced_score(score.outcomes, labels)
            values[f"{name.removesuffix('_accuracy')}_balanced_accuracy"] = balanced
    return values


def first_records(records: AnyRecords, max_records: int | None) -> AnyRecords:
    """Return the first records in the order of a keyed hash of their ids, with one row each; None for all.

    They depend only on the ids: all trainings of a sweep are scored on the same records, whatever their
    seeds, so that two trainings can be compared record by record.
    """
    return records.take(first_by_hash(records.ids, max_records)).one_row_each()


def first_by_hash(ids: Ids, max_records: int | None, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the rows of the first `max_records` records, or all, in the order of a keyed hash of their ids.

    Which records these are, and their order, depends only on the set of ids, not on their positions.

    >>> ids = np.arange(5, dtype=np.uint64)
    >>> a, b = ids[first_by_hash(ids, 3)], ids[::-1][first_by_hash(ids[::-1], 3)]
    >>> bool((a == b).all())
    True
    """
    order = np.lexsort((ids, keyed_uniform(ids, "evaluation", int(seed))))
    return order[:max_records].astype(np.int64)


@contextlib.contextmanager
def frozen(encoder: nn.Module) -> Iterator[None]:
    """Enter evaluation mode without gradients, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def finite_features(features: Tensor) -> Features:
    """Return features as float32, with 0 in place of values that are not finite."""
    rows: Features = features.float().cpu().numpy()
    return np.where(np.isfinite(rows), rows, np.float32(0))


def read_images(images: Images | Tensor, rows: slice) -> Tensor:
    """Return the images at `rows`, uint8 `[n, C, H, W]`; no other stored image is read."""
    if isinstance(images, (np.ndarray, Tensor)):
        return torch.as_tensor(images[rows])
    return torch.from_numpy(images[np.arange(*rows.indices(images.shape[0]))])


def normalised_batches(
    images: Images | Tensor, batch_size: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield uint8 images `[n, C, H, W]` in batches on the device, normalised as networks take them."""
    for start in range(0, images.shape[0], batch_size):
        yield normalise(read_images(images, slice(start, start + batch_size)).to(device))


def embed_features(
    encoder: AnyEncoder,
    images: Images | Tensor,
    *,
    batch_size: int = 512,
    device: torch.device | str = "cpu",
    isolate: bool = False,
    readout: str = POOLED,
) -> Features:
    """Return finite features of each image without augmentation, float32 `[n, width of the readout]`.

    Args:
      encoder: the network, already on `device`; its train/eval modes are restored.
      images: uint8 `[n, C, H, W]`; stored images are read a batch at a time.
      batch_size: images passed at once.
      device: the encoder's device.
      isolate: pass every batch through copies of the encoder's whole state, so that no data of a batch stay
        in the encoder or reach the next batch (`dpgcl_core.clipping.isolation`).
      readout: the features to read, see `trainers.evaluation.readout`.
    """
    if not images.shape[0]:
        return np.zeros((0, encoder.feature_dim), dtype=np.float32)
    rows = []
    with frozen(encoder):
        for batch in normalised_batches(images, batch_size, device):
            with isolated(encoder) if isolate else contextlib.nullcontext():
                rows.append(finite_features(read_out(encoder, batch, readout)))
    return np.concatenate(rows)


def _unit_rows(features: Features) -> Features:
    # Dividing by the largest entry first keeps the squares of very large features finite.
    scaled = features / np.maximum(np.abs(features).max(axis=1, keepdims=True), np.float32(1e-30))
    unit: Features = scaled / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), np.float32(1e-12))
    return unit


def knn_rule(index_features: Features, index_labels: Labels, num_neighbors: int = 3) -> Rule:
    """Return the rule that predicts the most frequent label among the nearest index records.

    Nearness is cosine similarity (Euclidean distance of unit features gives the same order). Among equally
    frequent labels the smallest wins. A zero feature is equally near to all records. At most 64 MiB of
    similarities are held at once.

    Args:
      index_features: `[num_index, feature_dim]`.
      index_labels: `[num_index]`.
      num_neighbors: k; all index records if there are fewer than k.

    >>> index = np.eye(2, dtype=np.float32)
    >>> knn_rule(index, np.array([0, 1]), num_neighbors=1)(5 * index).tolist()
    [0, 1]
    """
    classes, class_of_row = np.unique(index_labels, return_inverse=True)
    index = torch.from_numpy(_unit_rows(index_features))
    # The squared distance of unit rows is 2 − 2·cosine. To a zero row it is 1, as for a cosine of 1/2.
    offset = torch.where(index.any(dim=1), 0.0, 0.5)
    row_classes = torch.from_numpy(class_of_row)
    at_once = max(1, _SIMILARITY_BYTES // (4 * len(index)))

    def rule(features: Features) -> Labels:
        queries = torch.from_numpy(_unit_rows(features))
        votes = torch.zeros(len(queries), len(classes), dtype=torch.int32)
        for start in range(0, len(queries), at_once):
            nearness = torch.addmm(offset, queries[start : start + at_once], index.T)
            nearest = nearness.topk(min(num_neighbors, len(index)), dim=1, sorted=False).indices
            ones = torch.ones_like(nearest, dtype=torch.int32)
            votes[start : start + len(nearest)].scatter_add_(1, row_classes[nearest], ones)
        found: Labels = classes[votes.argmax(dim=1).numpy()]  # the first among equals
        return found

    return rule


def linear_probe_scores(
    index_features: Features, index_labels: Labels, features: Features, query_labels: Labels
) -> dict[str, Score]:
    """Return `linear_probe_accuracy`: the accuracy on the queries of the linear probe fitted on the index.

    If index and queries have the same two classes, `linear_probe_auc` is added. The probe is multinomial
    logistic regression on standardised features, solved to its optimum: see
    `trainers.evaluation.linear_probe`. If there is only one class, it is the prediction.

    Args:
      index_features: `[num_index, feature_dim]`.
      index_labels: `[num_index]`.
      features: `[num_queries, feature_dim]`.
      query_labels: `[num_queries]`.
    """
    classes = np.unique(index_labels)
    if len(classes) != 2 or not np.array_equal(classes, np.unique(query_labels)):
        rule = linear_probe_rule(index_features, index_labels)
        return {"linear_probe_accuracy": mean_score(rule(features) == query_labels)}
    logits = fit_linear_probe(index_features, index_labels).logits(features).numpy()
    hits = classes[logits.argmax(axis=1)] == query_labels
    auc = auc_score(logits[:, 1] - logits[:, 0], query_labels == classes[1])
    return {"linear_probe_accuracy": mean_score(hits), "linear_probe_auc": auc}


def linear_probe_rule(index_features: Features, index_labels: Labels) -> Rule:
    """Return the linear probe fitted on the index, as a function from features to labels."""
    if len(np.unique(index_labels)) == 1:
        return lambda features: np.full(len(features), index_labels[0])
    return fit_linear_probe(index_features, index_labels).predict


def view_retrieval(encoder: AnyEncoder, records: AnyRecords, scoring: Scoring) -> dict[str, float]:
    """Return how often a record's first view retrieves its second: `view_retrieval_top1`, `_top10`.

    Each record's first view is compared by cosine similarity with the second views of all records. Ties count
    as if broken at random, in expectation, so a network that maps everything to one point has a top-1 of 1/n.

    Args:
      encoder: the network, already on the device; its train/eval modes are restored.
      records: `n` records; labels are not used.
      scoring: augmentation and seed of the views, device and batch size; its own records are not used.
    """
    firsts, seconds = [], []
    with frozen(encoder):
        for start in range(0, len(records), scoring.batch_size):
            batch = slice(start, start + scoring.batch_size)
            views = make_views(
                read_images(records.images, batch).to(scoring.device),
                records.ids[batch],
                config=scoring.view_config,
                seed=scoring.seed,
                step=RETRIEVAL_STEP,
                num_views=2,
            )
            firsts.append(finite_features(encoder.features(views[:, 0])))
            seconds.append(finite_features(encoder.features(views[:, 1])))
    return _retrieval_scores(_unit_rows(np.concatenate(firsts)), _unit_rows(np.concatenate(seconds)))


def _retrieval_scores(firsts: Features, seconds: Features) -> dict[str, float]:
    """Return the top-1 and top-10 scores of unit rows, where row i of both is the same record."""
    outcomes: dict[int, list[NDArray[np.float64]]] = {1: [], 10: []}
    for start in range(0, len(firsts), _RETRIEVAL_ROWS):
        similarities = firsts[start : start + _RETRIEVAL_ROWS] @ seconds.T
        rows = np.arange(len(similarities))
        own = similarities[rows, start + rows][:, None]
        num_nearer = (similarities > own).sum(axis=1)
        num_tied = (similarities == own).sum(axis=1)
        for top, parts in outcomes.items():
            parts.append(np.clip((top - num_nearer) / num_tied, 0, 1))
    return {f"view_retrieval_top{top}": mean_score(np.concatenate(parts)) for top, parts in outcomes.items()}
