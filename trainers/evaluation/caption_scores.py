"""Scores of captioners: likelihood of captions, zero-shot classification and the order of words.

A captioner assigns every text a likelihood, given an image. These scores are computed from the likelihoods:

- `caption_token_probability`: exp of the mean log-likelihood of the captions' tokens, which is the geometric
  mean of their probabilities, and the reciprocal of their perplexity; and `next_token_accuracy`: the share of
  tokens that are the likeliest after the tokens before them;
- `zero_shot_accuracy`: share of images whose own class has the likeliest texts (Sander et al. 2024, A.3.1);
- `word_order_accuracy`: how often a caption is likelier than the same words in another order (after the order
  tests of ARO, Yuksekgonul et al. 2022). A network that uses only words, and not their order, scores one
  half. A network that knows the language and ignores the image may score near one.

An image is encoded once for all of these scores. There are four orders per caption, each a function of the
caption and the public seed: content words permuted, the other words permuted, words permuted within triples,
and triples permuted. Places and punctuation stay. An order with the same tokens as the caption is omitted.

A network that diverged gives poor scores and no error: a value that is not finite counts as impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpgcl_core.sampling.record_ids import ids_from_names, keyed_uniform
from trainers.data.class_names import encodable
from trainers.data.dataset import captions_of
from trainers.evaluation.features import read_images
from trainers.evaluation.outcomes import Score, exp_score, ratio_score
from trainers.evaluation.pair_scores import class_texts, evaluate_with_captions
from trainers.evaluation.retrieval import check_labels, largest_is_own, share_of_texts
from trainers.evaluation.scorer import Scoring
from trainers.models.captioner import Captioner
from trainers.views.caption_views import NON_ESSENTIAL_WORDS, with_words, words_of
from trainers.views.image_views import normalise

TIE_TOLERANCE = 1e-3
"""Log-likelihoods of texts that are closer are ties: sums of some sixty float32 numbers round by less."""

_MAX_LOGITS = 2**25
_TRIPLE = 3


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts whose likelihood is to be computed, each given one image.

    Attributes:
      tokens: int64 `[n, max_tokens]`.
      images: int64 `[n]`, rows of the images, in ascending order.
    """

    tokens: Tensor
    images: NDArray[np.int64]


class Likelihoods(NamedTuple):
    """A captioner's likelihoods of texts.

    Attributes:
      log_likelihoods: float64 `[n]`, log-likelihood of each whole text.
      num_tokens: int64 `[n]`, number of real tokens.
      num_right: int64 `[n]`, number of real tokens that are the likeliest after the tokens before them.
    """

    log_likelihoods: Tensor
    num_tokens: Tensor
    num_right: Tensor


def evaluate(network: Captioner, scoring: Scoring) -> dict[str, float]:
    """Return the scores of a frozen captioner by metric name, each in [0, 1].

    These are the scores of `caption_scores` and, with labels, k-NN and linear probe on the encoder's
    features. Images that have neither captions nor labels are scored by view retrieval.

    Args:
      network: the captioner, already on the device; its train/eval modes are restored.
      scoring: the records, with or without captions, and the settings of their scores. At most
        `PAIRS_AT_ONCE` images or texts are passed at once.

    Raises:
      DataError: there is nothing to score, or some labels have names and others have none.
    """
    return evaluate_with_captions(network, caption_scores, scoring)


@torch.no_grad()
def caption_scores(network: Captioner, scoring: Scoring) -> tuple[dict[str, float], Tensor]:
    """Return the likelihood scores of all query images, and the images' features `[n, feature_dim]`.

    Captions give `caption_token_probability`, `next_token_accuracy` and, if the words of a caption can be
    reordered, `word_order_accuracy`. Labels and class names give `zero_shot_accuracy`, for images without
    captions, too.

    Args:
      network: the captioner, on the device and in evaluation mode.
      scoring: the queries, at least one, the names of their classes, the public seed of the word orders, and
        the batch size.

    Raises:
      DataError: a label has no class name.
    """
    records, class_names, batch_size = scoring.queries, scoring.class_names, scoring.batch_size
    num_images, targets = records.images.shape[0], dict[str, Texts]()
    captions = captions_of(records)
    if captions is not None:
        texts, owners = captions
        targets["captions"] = Texts(tokens=network.tokenizer(texts).tokens, images=owners)
        orders, caption_of_order = _reordered_tokens(network, texts, targets["captions"].tokens, scoring.seed)
        targets["orders"] = Texts(tokens=orders, images=owners[caption_of_order])
    if class_names and records.labels is not None:
        check_labels(records.labels, len(class_names))
        per_image = network.tokenizer(class_texts(class_names)).tokens
        image_of_text = np.repeat(np.arange(num_images), len(per_image))
        targets["classes"] = Texts(tokens=per_image.repeat(num_images, 1), images=image_of_text)
    features, parts = list[Tensor](), {name: list[Likelihoods]() for name in targets}
    for start in range(0, num_images, batch_size):
        rows = slice(start, min(start + batch_size, num_images))
        encoded = network.encode(normalise(read_images(records.images, rows).to(scoring.device)))
        features.append(encoded.mean(1))
        for name, each in targets.items():
            parts[name].append(_likelihoods(network, encoded, each, rows))
    likelihoods = {name: _join_likelihoods(each) for name, each in parts.items()}
    scores = dict[str, float]()
    if captions is not None:
        true = likelihoods["captions"]
        per_token = partial(_per_token, num_tokens=true.num_tokens, images=captions[1], num_images=num_images)
        scores["caption_token_probability"] = exp_score(per_token(true.log_likelihoods))
        scores["next_token_accuracy"] = per_token(true.num_right)
        if len(caption_of_order):
            caption_likelihoods = true.log_likelihoods[torch.from_numpy(caption_of_order)]
            wins = order_wins(caption_likelihoods, likelihoods["orders"].log_likelihoods).numpy()
            scores["word_order_accuracy"] = share_of_texts(wins, targets["orders"].images, num_images)
    if "classes" in likelihoods:
        assert records.labels is not None
        of_texts = likelihoods["classes"].log_likelihoods
        of_classes = of_texts.view(num_images, len(class_names), -1).mean(2)
        scores["zero_shot_accuracy"] = largest_is_own(of_classes, records.labels, tolerance=TIE_TOLERANCE)
    return scores, torch.cat(features)


def _per_token(sums: Tensor, *, num_tokens: Tensor, images: NDArray[np.int64], num_images: int) -> Score:
    """Return the mean per token from each text's sum and number of tokens, with one outcome per image."""
    of_images = (
        np.bincount(images, weights=each.double().numpy(), minlength=num_images)
        for each in (sums, num_tokens)
    )
    return ratio_score(*of_images)


def order_wins(captions: Tensor, orders: Tensor) -> Tensor:
    """Return 1 where a caption is likelier than its words in another order, and one half for a tie, `[n]`.

    Args:
      captions: log-likelihoods `[n]` of the captions.
      orders: log-likelihoods `[n]` of the same words in another order.

    >>> order_wins(torch.tensor([-3.0, -3.0, -3.0]), torch.tensor([-4.0, -3.0, -2.0])).tolist()
    [1.0, 0.5, 0.0]
    """
    tied = (captions == orders) | ((captions - orders).abs() <= TIE_TOLERANCE)
    return torch.where(tied, 0.5, (captions > orders).double())


def other_orders(text: str, *, seed: int) -> list[str]:
    """Return a text with its words in four other orders, each a function of the text and the public seed.

    Permuted are the content words, the other words, the words within triples, and the triples.

    >>> other_orders("A small red ring at the top left and two large blue squares.", seed=0)[3]
    'ring at the top left and A small red two large blue squares.'
    """
    words = words_of(text)
    places = np.arange(len(words))
    is_content = np.array([word.lower() not in NON_ESSENTIAL_WORDS for word in words], dtype=bool)
    num_in_triples = len(words) // _TRIPLE * _TRIPLE
    triples = places[:num_in_triples].reshape(-1, _TRIPLE)
    names = (f"{place} {encodable(text)}" for place in places)
    draw = partial(keyed_uniform, ids_from_names(names), "word order", seed)
    orders = [
        _permute_where(places, is_content, draw("content")),
        _permute_where(places, ~is_content, draw("other")),
        places[np.lexsort((draw("within"), places // _TRIPLE))],
        np.concatenate([*triples[draw("triples")[: len(triples)].argsort()], places[num_in_triples:]]),
    ]
    return [with_words(text, [words[place] for place in order.tolist()]) for order in orders]


def _permute_where(
    places: NDArray[np.int64], mask: NDArray[np.bool_], uniform: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return `places`, those where `mask` is true permuted among themselves in the order of `uniform`."""
    order = places.copy()
    order[mask] = places[mask][uniform[mask].argsort()]
    return order


def _reordered_tokens(
    network: Captioner, texts: Sequence[str], tokens: Tensor, seed: int
) -> tuple[Tensor, NDArray[np.int64]]:
    """Return the tokens of all reordered texts that differ, and the row of each one's text, ascending."""
    orders = [other_orders(text, seed=seed) for text in texts]
    owners = np.repeat(np.arange(len(texts)), [len(each) for each in orders])
    found = network.tokenizer([order for each in orders for order in each]).tokens
    differs = (found != tokens[torch.from_numpy(owners)]).any(1)
    return found[differs], owners[differs.numpy()]


def _likelihoods(network: Captioner, encoded: Tensor, texts: Texts, rows: slice) -> Likelihoods:
    """Return the likelihoods of the texts of the images in `rows`, which `encoded` represents."""
    first, last = np.searchsorted(texts.images, [rows.start, rows.stop]).tolist()
    tokens = texts.tokens[first:last].to(encoded.device)
    images = torch.from_numpy(texts.images[first:last] - rows.start).to(encoded.device)
    at_once = max(1, _MAX_LOGITS // (network.max_tokens * network.vocabulary))
    parts = zip(images.split(at_once), tokens.split(at_once), strict=True)
    return _join_likelihoods(
        [_batch_likelihoods(network, encoded[rows], some) for rows, some in parts if len(rows)]
    )


def _batch_likelihoods(network: Captioner, encoded: Tensor, tokens: Tensor) -> Likelihoods:
    ends = (tokens == network.end_token).int().argmax(1)
    tokens = tokens[:, : int(ends.max()) + 1]  # tokens that are padding in every text have no likelihood
    logits = network.decode(encoded, tokens[:, :-1]).float()
    predictions = network.next_tokens(logits, tokens)
    likelihoods = torch.nan_to_num(predictions.log_likelihoods.double(), nan=-torch.inf, neginf=-torch.inf)
    right = (logits.argmax(2) == tokens[:, 1:]) & predictions.counts & predictions.log_likelihoods.isfinite()
    return Likelihoods(
        log_likelihoods=likelihoods.sum(1).cpu(),
        num_tokens=predictions.counts.sum(1).cpu(),
        num_right=right.sum(1).cpu(),
    )


def _join_likelihoods(parts: Sequence[Likelihoods]) -> Likelihoods:
    counts = torch.zeros(0, dtype=torch.int64)
    empty = Likelihoods(log_likelihoods=counts.double(), num_tokens=counts, num_right=counts)
    return Likelihoods(*(torch.cat(columns) for columns in zip(empty, *parts, strict=True)))
