"""Scores of two towers: retrieval in both directions, and zero-shot classification.

Right candidates. A record is an image with one or more captions. Images of identical content count for each
other, and so do captions: a caption is right for an image if a caption of the same content belongs to an
image of the same content. If several candidates are right, the nearest counts.

Ties. A query is a hit at k if fewer than k wrong candidates are *at least as near* as its nearest right
candidate. Ties count against the network, and similarities within the rounding of float32 are ties. So a
network that maps everything to one point scores 0 (unless there are fewer than k wrong candidates at all),
while chance is about k/n. No order of the records or size of a chunk can turn ties into hits.

Memory. Similarities are computed for a chunk of queries against all candidates, and only the hits are kept:
24,000 images and captions take `MAX_BYTES` (256 MiB) instead of the 2.3 GB of the whole matrix.

Scores are computed from evaluation records; `dpgcl_core.release.metrics.visible` decides who may see them. A
recall is not a mean of terms that each depend on one record: every record is a candidate for all queries, and
adding one record can turn each query's hit into a miss. So a recall must not be released with an accuracy's
noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.errors import DataError
from dpgcl_core.sampling.record_ids import Ids
from trainers.evaluation.outcomes import Score, mean_score, ratio_score

Rows = NDArray[np.int64]
EmbedTexts = Callable[[Sequence[str]], Tensor]
"""Embeddings `[n, dim]` of n texts, in evaluation mode."""

RECALL_AT = (1, 5, 10)
MAX_BYTES = 2**28
"""Bound on the memory of similarities, which one query may exceed; changes no score."""
TIE_TOLERANCE = 1e-6
"""Similarities closer than this are ties: about the rounding error of a product of float32 unit vectors."""

_BYTES_PER_SIMILARITY = 12  # two tensors of 4 bytes, two masks of 1 byte, and slack


@dataclass(frozen=True, kw_only=True)
class Matches:
    """Which images and captions belong together.

    Attributes:
      image_of_text: `[num_texts]`, the row of each caption's image.
      image_contents: `[num_images]`, ids from `content_ids`, equal for identical images and only for them.
      text_contents: `[num_texts]`, the same ids for captions. Records of pairs have one for every image.
    """

    image_of_text: Rows
    image_contents: Ids
    text_contents: Ids


def content_ids(contents: Iterable[bytes]) -> Ids:
    """Return one id per content, `[n]`, the same for the same bytes (unlike `ids_from_contents`).

    For images, pass the shape and decoded pixels, since one picture may be stored as different files.

    >>> a, b, c = content_ids([b"x", b"y", b"x"])
    >>> bool(a == c), bool(a == b)
    (True, False)
    """
    digests = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    return np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)


def recalls(images: Tensor, texts: Tensor, matches: Matches) -> dict[str, float]:
    """Return the recalls at K = 1, 5, 10: the share of queries with a right candidate among the K nearest.

    The queries of `image_to_text_recall_at_K` are images, those of `text_to_image_recall_at_K` are captions.
    Ties count against the network. Each recall has one outcome per image, to which its captions contribute.

    Args:
      images: `[num_images, dim]` embeddings of any length; compared by cosine.
      texts: `[num_texts, dim]`, on the same device. Values that are not finite count as zero.
      matches: which images and texts belong together.

    >>> eye, ids = torch.eye(12), np.arange(12)
    >>> pairs = Matches(image_of_text=ids, image_contents=ids.astype(np.uint64), text_contents=ids)
    >>> found = recalls(eye, eye.roll(1, 0), pairs)
    >>> found["image_to_text_recall_at_1"], found["text_to_image_recall_at_1"]
    (0.0, 0.0)
    """
    images, texts = unit_rows(images), unit_rows(texts)
    image_class = np.unique(matches.image_contents, return_inverse=True)[1]
    text_class = np.unique(matches.text_contents, return_inverse=True)[1]
    owner_class = image_class[matches.image_of_text]
    directions = {
        "image_to_text": (images, texts, image_class, text_class, _right_classes(owner_class, text_class)),
        "text_to_image": (texts, images, text_class, image_class, _right_classes(text_class, owner_class)),
    }
    scores: dict[str, float] = {}
    for name, direction in directions.items():
        hits = _hits(*direction).cpu().numpy()
        for k, of_queries in zip(RECALL_AT, hits.T, strict=True):
            score = mean_score(of_queries)
            if name == "text_to_image":
                score = share_of_texts(of_queries, matches.image_of_text, len(images))
            scores[f"{name}_recall_at_{k}"] = score
    return scores


def share_of_texts(hits: NDArray[np.generic], image_of_text: Rows, num_images: int) -> Score:
    """Return the mean of `hits` `[num_texts]`, with one outcome for each image.

    `image_of_text` `[num_texts]` holds the row of each text's image.

    >>> score = share_of_texts(np.array([True, False, True]), np.array([0, 0, 1]), 2)
    >>> score.outcomes.round(3).tolist()
    [0.444, 0.889]
    """
    hits_of = np.bincount(image_of_text, weights=hits.astype(np.float64), minlength=num_images)
    return ratio_score(hits_of, np.bincount(image_of_text, minlength=num_images))


def class_embeddings(
    texts: Sequence[str], num_classes: int, embed_texts: EmbedTexts, *, batch_size: int = 256
) -> Tensor:
    """Return one unit embedding per class, `[num_classes, dim]`: the mean over the templates (CLIP, 3.1.4).

    The text embeddings are normalised, averaged per class, and normalised again.

    Args:
      texts: the texts of class 0, then of class 1, …; every class has equally many.
      num_classes: the number of labels.
      embed_texts: function from n texts to their embeddings `[n, dim]`.
      batch_size: texts passed at once.
    """
    embedded = unit_rows(embed_in_batches(lambda part: embed_texts(texts[part]), len(texts), batch_size))
    return unit_rows(embedded.view(num_classes, -1, embedded.shape[1]).mean(dim=1))


def check_labels(labels: NDArray[np.int64], num_classes: int) -> None:
    """Check that labels `[n]`, of at least one record, are from 0 to `num_classes` − 1.

    Raises:
      DataError: a label has no class; the message states the valid labels.
    """
    if labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"labels must be from 0 to {num_classes - 1}, rows of the class names; got {labels.min()} "
            f"to {labels.max()}. Name every class."
        )


def zero_shot_accuracy(images: Tensor, labels: Rows, classes: Tensor) -> Score:
    """Return the share of images nearer to their own class than to any other; ties are misses.

    Args:
      images: `[n, dim]` embeddings of any length.
      labels: `[n]`, the row of each image's class in `classes`.
      classes: `[num_classes, dim]`, the result of `class_embeddings`.

    Raises:
      DataError: a label has no class.
    """
    check_labels(labels, len(classes))
    return largest_is_own(unit_rows(images) @ unit_rows(classes).T, labels, tolerance=TIE_TOLERANCE)


def largest_is_own(values: Tensor, labels: Rows, *, tolerance: float) -> Score:
    """Return the share of images with a larger value at their own class than at any other; ties are misses.

    Args:
      values: `[n, num_classes]`, such as similarities or log-likelihoods.
      labels: `[n]`, the column of each image's own class.
      tolerance: values that differ by no more than this are ties.

    >>> largest_is_own(torch.tensor([[-1.0, -2.0], [-2.0, -2.0]]), np.array([0, 1]), tolerance=1e-3)
    0.5
    """
    rows = torch.from_numpy(labels)[:, None].to(values.device)
    others = values.scatter(1, rows, -torch.inf)
    return mean_score((values.gather(1, rows) > others + tolerance).all(1).cpu().numpy())


def unit_rows(embeddings: Tensor) -> Tensor:
    """Return float32 rows of length 1 `[n, dim]`; zero rows stay, and non-finite values count as zero."""
    finite = embeddings.detach().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    # Dividing by the largest entry first keeps the squares of very large embeddings finite.
    scaled = finite / finite.abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
    return F.normalize(scaled, dim=1)


def embed_in_batches(embed: Callable[[slice], Tensor], num_rows: int, batch_size: int) -> Tensor:
    """Return the embeddings `[num_rows, dim]` of all rows, taken without gradients.

    Args:
      embed: function called with the slices 0 to batch_size, batch_size to 2 · batch_size, … in this order.
      num_rows: number of rows, at least one.
      batch_size: rows passed at once.

    Raises:
      DataError: there is nothing to embed.
    """
    starts = range(0, num_rows, batch_size)
    with torch.no_grad():
        parts = [embed(slice(start, min(start + batch_size, num_rows))) for start in starts]
    if not parts:
        raise DataError("there is nothing to embed. Pass at least one image and one text.")
    return torch.cat(parts)


def _right_classes(query_class: Rows, candidate_class: Rows) -> list[Rows]:
    """Return the classes of right candidates for each class of queries, given the classes of true pairs."""
    pairs = np.unique(np.stack([query_class, candidate_class], axis=1), axis=0)
    starts = np.flatnonzero(np.diff(pairs[:, 0]))
    return np.split(pairs[:, 1], starts + 1)


def _hits(
    queries: Tensor,
    candidates: Tensor,
    query_class: Rows,
    candidate_class: Rows,
    linked: Sequence[Rows],
) -> Tensor:
    """Return bool `[queries, 3]`: whether a query is a hit at k = 1, 5, 10, as defined in the module."""
    step = max(1, MAX_BYTES // (_BYTES_PER_SIMILARITY * len(candidates)))
    columns = torch.from_numpy(candidate_class).to(queries.device)
    right_classes = [torch.from_numpy(each).to(queries.device) for each in linked]
    num_kept = min(max(RECALL_AT), len(candidates))
    hits = []
    for start in range(0, len(queries), step):
        similarities = queries[start : start + step] @ candidates.T
        right = _right_mask(right_classes, query_class[start : start + step], columns)
        nearest = torch.where(right, similarities, -torch.inf).amax(dim=1, keepdim=True)
        # `topk` rather than a count of nearer candidates: the sum of a mask takes 8 bytes for each entry.
        wrong = similarities.masked_fill_(right, -torch.inf).topk(num_kept, dim=1).values
        nearer = nearest - TIE_TOLERANCE > wrong
        hits.append(nearer[:, [min(k, num_kept) - 1 for k in RECALL_AT]])
    return torch.cat(hits)


def _right_mask(right_classes: Sequence[Tensor], query_class: Rows, columns: Tensor) -> Tensor:
    """Return the mask of right candidates, bool `[queries, candidates]`."""
    # Row by row: the positions of all right candidates of a chunk could take 16 bytes each.
    by_class = torch.zeros(len(query_class), len(columns), dtype=torch.bool, device=columns.device)
    for row, each in enumerate(query_class):
        by_class[row, right_classes[each]] = True
    return by_class.index_select(1, columns)
