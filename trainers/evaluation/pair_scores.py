"""Scores of both towers: retrieval in both directions on pairs and, with class names, zero-shot accuracy.

`trainers.evaluation.retrieval` defines which candidates count as found, by cosine similarity, for which the
image tower's features and the unit embeddings are equivalent. This module passes records to the towers.
Stored images are read once, a batch at a time: each batch in memory is embedded, and its contents are hashed
because identical images count for each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dpgcl_core.sampling.record_ids import Ids
from trainers.data.dataset import captions_of
from trainers.evaluation.features import (
    check_not_empty,
    describe_by,
    finite_features,
    first_records,
    frozen,
    is_labelled,
    label_scores,
    read_images,
    view_retrieval,
)
from trainers.evaluation.retrieval import (
    Matches,
    class_embeddings,
    content_ids,
    embed_in_batches,
    recalls,
    zero_shot_accuracy,
)
from trainers.evaluation.scorer import Scoring
from trainers.models.captioner import Captioner
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.views.image_views import normalise

ZERO_SHOT_TEMPLATES = ("a photo of a {}.", "a picture of a {}.")
"""Prompts, with {} for a class name; public, and the same for every data set. A class is embedded as the mean
of its prompts."""

PAIRS_AT_ONCE = 64
"""Number of images or texts per pass: a large CLIP model keeps ten megabytes for each image."""


def evaluate(encoder: ImageTextEncoder, scoring: Scoring) -> dict[str, float]:
    """Return the scores of a frozen image-text network by metric name, each in [0, 1].

    These are the scores of `tower_scores` and, with labels, k-NN and linear probe on the image tower's
    features. Images that have neither captions nor labels are scored by view retrieval.

    Args:
      encoder: the network, already on the device; its train/eval modes are restored.
      scoring: the records, with or without captions, and the settings of their scores. At most
        `PAIRS_AT_ONCE` images or texts are passed at once.

    Raises:
      DataError: there is nothing to score, or some labels have names and others have none.
    """
    return evaluate_with_captions(encoder, tower_scores, scoring)


def evaluate_with_captions(
    network: ImageTextEncoder | Captioner,
    own_scores: Callable[[Any, Scoring], tuple[dict[str, float], Tensor]],
    scoring: Scoring,
) -> dict[str, float]:
    """Return a network's scores on captions and labels, or view retrieval if the images have neither.

    Args:
      network: the network, already on the device; its train/eval modes are restored.
      own_scores: function like `tower_scores`, from a frozen network to its scores and the queries' features.
      scoring: the records, with or without captions, and the settings of their scores.

    Raises:
      DataError: there is nothing to score, or some labels have names and others have none.
    """
    check_not_empty(scoring.index, scoring.queries)
    queries = first_records(scoring.queries, scoring.config.max_query_records)
    at_once = min(scoring.batch_size, PAIRS_AT_ONCE)
    scoring = dataclasses.replace(scoring, queries=queries, batch_size=at_once)
    index = scoring.index if scoring.index is not None and is_labelled(scoring.index, queries) else None
    if captions_of(queries) is None and index is None:
        return view_retrieval(network, queries, scoring)
    with frozen(network):
        scores, features = own_scores(network, scoring)
    if index is None:
        return scores
    describe, query_features = describe_by(network, scoring), finite_features(features)
    return scores | label_scores(describe, query_features, queries, index, scoring.config)


def tower_scores(encoder: ImageTextEncoder, scoring: Scoring) -> tuple[dict[str, float], Tensor]:
    """Return the scores of all query images, by metric name, and the images' features `[n, feature_dim]`.

    Captions give `image_to_text_recall_at_K` and `text_to_image_recall_at_K` for K = 1, 5, 10. Labels and
    class names give `zero_shot_accuracy`, for images without captions, too. Each image is read, and passed
    through its tower, once for all of these. The features are not scaled, so that other scores can use them.

    Args:
      encoder: both towers, on the device and in evaluation mode.
      scoring: the queries, at least one, the names of their classes, and the batch size.

    Raises:
      DataError: a label has no class name.
    """

    records, batch_size = scoring.queries, scoring.batch_size

    def embed_texts(texts: Sequence[str]) -> Tensor:
        return encoder.embed_texts(encoder.tokenizer(texts).tokens.to(scoring.device))

    scores: dict[str, float] = {}
    owned = captions_of(records)
    features, contents = _features_and_contents(encoder, scoring, hashed=owned is not None)
    if owned is not None:
        captions, image_of_text = owned
        texts = embed_in_batches(lambda part: embed_texts(captions[part]), len(captions), batch_size)
        matches = Matches(
            image_of_text=image_of_text,
            image_contents=contents,
            text_contents=content_ids(caption.encode("utf-8", "surrogatepass") for caption in captions),
        )
        scores = recalls(features, texts, matches)
    if scoring.class_names and records.labels is not None:
        prompts = class_texts(scoring.class_names)
        classes = class_embeddings(prompts, len(scoring.class_names), embed_texts, batch_size=batch_size)
        scores["zero_shot_accuracy"] = zero_shot_accuracy(features, records.labels, classes)
    return scores, features


def class_texts(class_names: Sequence[str]) -> list[str]:
    """Return one text for every class name and template, class by class."""
    names = [name.replace("_", " ") for name in class_names]  # folder names, such as golden_retriever
    return [template.replace("{}", name) for name in names for template in ZERO_SHOT_TEMPLATES]


def _features_and_contents(
    encoder: ImageTextEncoder, scoring: Scoring, *, hashed: bool
) -> tuple[Tensor, Ids]:
    """Return features `[n, feature_dim]` and, if `hashed`, content ids `[n]` of all images, of one shape."""
    images, contents = scoring.queries.images, [np.zeros(0, dtype=np.uint64)]

    def embed(rows: slice) -> Tensor:
        batch = read_images(images, rows)
        if hashed:
            contents.append(content_ids(image.tobytes() for image in batch.numpy()))
        return encoder.features(normalise(batch.to(scoring.device)))

    features = embed_in_batches(embed, images.shape[0], scoring.batch_size)
    return features, np.concatenate(contents)
