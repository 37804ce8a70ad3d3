"""Scores that trials are compared and chosen by: the available scores, and the default one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpgcl_core.mechanism.registry import method_named
from dpgcl_core.release.metrics import CLASSIFIER_SCORE, METRICS, Family, scores_of
from trainers.config.networks import CaptionerConfig, ClassifierConfig, MaskedNetworkConfig
from trainers.data.dataset import Modality, TrainingData, modality_of

NOISED_SCORES = scores_of(Family.NOISED)
_LABELS = [name for name in scores_of(Family.LABELS) if METRICS[name].has_panel]
_VIEWS = scores_of(Family.VIEWS)
_CAPTIONS = scores_of(Family.CAPTIONS)
_RECALLS = sorted(scores_of(Family.PAIRS), key=lambda name: not METRICS[name].has_panel)  # the default first
_DEFAULT: dict[Modality, str] = {"image": _LABELS[0], "image-text": _RECALLS[0]}
_OF_TASKS = {
    CaptionerConfig.task: _CAPTIONS[0],
    MaskedNetworkConfig.task: _LABELS[0],
    ClassifierConfig.task: CLASSIFIER_SCORE,
}


def default_score(modality: Modality, method: str) -> str:
    """Return the score that trials are compared and chosen by, unless the user names another.

    Args:
      modality: the modality of the records.
      method: the trained method, because some methods' networks have other scores; "" if undecided.

    >>> [default_score(*each) for each in (("image", "dp_gcl"), ("image-text", "dp_gcl"))]
    ['knn_accuracy', 'image_to_text_recall_at_10']
    >>> default_score("image-text", "dp_cap")
    'caption_token_probability'
    >>> default_score("image", "dp_classifier")
    'classifier_accuracy'
    """
    return _OF_TASKS.get(_task(method), _DEFAULT[modality])


def _task(method: str) -> str:
    return method_named(method).task if method else ""


def final_scores() -> list[str]:
    """Return every score, with or without noise, that a finished trial may have for its own network.

    Scores during and before training are histories and references: they are not a trial's final scores.

    >>> [name in final_scores() for name in ("knn_accuracy", "knn_accuracy_during", "noised_knn_accuracy")]
    [True, False, True]
    """
    return scores_of(*Family)


def visible_scores(data: TrainingData, method: str) -> list[str]:
    """Return the names of a method's scores that may be shown: on public records, or with noise."""
    scores: list[str] = []
    index, queries = data.index, data.queries
    if queries is not None and (data.evaluation_is_public or data.train_is_public):
        labelled = index is not None and index.labels is not None and queries.labels is not None
        if modality_of(data.train) == "image-text" and _task(method) != MaskedNetworkConfig.task:
            has_classes = queries.labels is not None and data.class_names
            scores += _CAPTIONS if _task(method) == CaptionerConfig.task else _RECALLS
            scores += [*(("zero_shot_accuracy",) if has_classes else ()), *(_LABELS if labelled else ())]
        else:
            is_classifier = _task(method) == ClassifierConfig.task and queries.labels is not None
            scores += [*((CLASSIFIER_SCORE,) if is_classifier else ()), *(_LABELS if labelled else _VIEWS)]
    return scores + (NOISED_SCORES if data.held_out_records is not None else [])


def scores_to_compare(data: TrainingData, methods: Sequence[str]) -> dict[str, str]:
    """Return each method's score for tuning: the first that all methods have, else the method's own first.

    A method without any score on these data is left out.
    """
    possible = {method: visible_scores(data, method) for method in methods}
    common = [
        name
        for name in next(iter(possible.values()), [])
        if all(name in names for names in possible.values())
    ]
    return {method: (common or names)[0] for method, names in possible.items() if names}


def shown_scores(metrics: Mapping[str, float]) -> list[str]:
    """Return the names of the scores to show on one line for a trial.

    >>> shown_scores({"knn_accuracy": 0.5, "image_to_text_recall_at_10": 0.25, "epsilon": 10.0})
    ['image_to_text_recall_at_10']
    """
    of_images = (CLASSIFIER_SCORE, *_LABELS, _VIEWS[0])
    of_pairs = [names for names in (_RECALLS[:2], _CAPTIONS) if names[0] in metrics]
    names = of_pairs[0] if of_pairs else of_images
    return [name for name in (*names, *NOISED_SCORES) if name in metrics]
