"""Scores that trials are compared and chosen by: which there are, and which counts where none is named."""

from __future__ import annotations

from dpgcl_core.release.metrics import METRICS, Release, is_reference
from trainers.data.dataset import Modality, TrainingData, modality_of

NOISED_SCORES = ("noised_knn_accuracy", "noised_linear_probe_accuracy")
_LABELS = ("knn_accuracy", "linear_probe_accuracy")
_VIEWS = ("view_retrieval_top1", "view_retrieval_top10")
_RECALLS = tuple(
    f"{way}_recall_at_{k}" for k in (10, 5, 1) for way in ("image_to_text", "text_to_image")
)  # the default first
_DEFAULT: dict[Modality, str] = {"image": _LABELS[0], "image-text": _RECALLS[0]}


def default_score(modality: Modality) -> str:
    """Return the score that counts where none is named.

    >>> default_score("image"), default_score("image-text")
    ('knn_accuracy', 'image_to_text_recall_at_10')
    """
    return _DEFAULT[modality]


def final_scores() -> list[str]:
    """Return every score, bare or noised, that a finished trial may have of its own network.

    Scores on the way and before training are histories and references: no trial ends with them.

    >>> [name in final_scores() for name in ("knn_accuracy", "knn_accuracy_during", "noised_knn_accuracy")]
    [True, False, True]
    """
    bare = [name for name, metric in METRICS.items() if metric.release is Release.SCORE]
    bare = [name for name in bare if not is_reference(name) and not name.endswith("_during")]
    return [*bare, *NOISED_SCORES]


def visible_scores(data: TrainingData) -> list[str]:
    """Return the scores that may be chosen by on these data: of public records, or noised."""
    found: list[str] = []
    index, queries = data.index, data.queries
    if index is not None and queries is not None and (data.evaluation_is_public or data.train_is_public):
        labelled = index.labels is not None and queries.labels is not None
        if modality_of(data.train) == "image-text":
            named = queries.labels is not None and data.class_names
            found += [*_RECALLS, *(("zero_shot_accuracy",) if named else ()), *(_LABELS if labelled else ())]
        else:
            found += _LABELS if labelled else _VIEWS
    return found + (list(NOISED_SCORES) if data.scored is not None else [])


def shown_scores(metrics: dict[str, float]) -> list[str]:
    """Return the scores of a trial that a line has room for.

    >>> shown_scores({"knn_accuracy": 0.5, "image_to_text_recall_at_10": 0.25, "epsilon": 10.0})
    ['image_to_text_recall_at_10']
    """
    of_images = (*_LABELS, _VIEWS[0])
    names = _RECALLS[:2] if _RECALLS[0] in metrics else of_images
    return [name for name in (*names, *NOISED_SCORES) if name in metrics]
