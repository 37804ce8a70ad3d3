"""Stage 4 for captions: a caption becomes its augmented views, each a function of only its own record.

As for images (`trainers.views.image_views`), every random choice is a keyed hash of the record's id, the
public seed, the step and the view. So adding or removing one record leaves every other record's captions
unchanged, and therefore one record affects only one group. The augmentations are the three of DP-GCL,
appendix B.3. Any of them can be combined; they are applied in this order:

1. *Sentence swap*: two sentences of a caption with several sentences change places.
2. *Word swap*: two adjacent words change places, within a sentence and with no punctuation between them;
   each word moves once at most.
3. *Word delete*: words that carry little meaning (articles, prepositions, auxiliaries and fillers of
   English, a public list) are dropped, each independently. Nouns, verbs, personal pronouns, negations,
   numbers and words of place stay. A caption that would lose all its words stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.record_ids import Ids
from trainers.config.networks import TextViewConfig

if TYPE_CHECKING:
    from trainers.views.image_views import Draw

TEXT_AUGMENTATIONS = {"sentence_swap": 0.5, "word_swap": 0.3, "word_delete": 0.2}
"""The text augmentations, each with its probability in DP-GCL, appendix B.3."""

_ARTICLES = ("a", "an", "the", "this", "that", "these", "those", "some", "any", "such")
_AUXILIARIES = ("is", "are", "was", "were", "be", "been", "being", "am", "there", "here", "it", "its", "it's")
_PREPOSITIONS = (
    *("of", "to", "at", "by", "for", "from", "as", "into", "onto", "with", "within", "upon", "about"),
)
_FILLERS = ("and", "or", "so", "then", "also", "too", "very", "quite", "rather", "really", "just", "even")
_OF_PICTURES = ("image", "picture", "photo", "photograph", "showing", "shows")
NON_ESSENTIAL_WORDS = frozenset((*_ARTICLES, *_AUXILIARIES, *_PREPOSITIONS, *_FILLERS, *_OF_PICTURES))
"""The words that word delete may drop, in lower case."""

_SENTENCE = re.compile(r"\S.*?(?:(?<![.!?…])[.!?…]++[\"'”’)\]]*(?=\s|$)|[。！？]+|$)", re.DOTALL)
_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_END_MARKS = tuple(".!?…。！？")


def make_text_views(
    captions: Sequence[str], ids: Ids, *, config: TextViewConfig, seed: int, step: int, num_views: int
) -> list[tuple[str, ...]]:
    """Return the augmented captions, `[n][num_views]`; none is empty.

    A view is a function of (caption, id, public seed, step, view index) and nothing else: neither the
    other captions nor their number or order matter. With all probabilities 0 every view is the caption.

    Args:
      captions: `[n]`, none of them empty; one per record (`ImageTextRecords.pairs_at`).
      ids: uint64 `[n]`, the records' stable ids.
      config: the probabilities.
      seed: public seed.
      step: training step, so that a record sampled again gets fresh views.
      num_views: views per record; view k does not depend on how many there are.

    Raises:
      ConfigError: captions and ids do not belong together.

    >>> ids = np.arange(2, dtype=np.uint64)
    >>> make_text_views(["One. Two.", "a b c"], ids, config=TextViewConfig(), seed=1, step=0, num_views=2)
    [('Two. One.', 'One. Two.'), ('a b c', 'a b c')]
    """
    if len(captions) != len(ids):
        raise ConfigError(f"captions must have one id each; got {len(captions)} captions and {len(ids)} ids")
    from trainers.views.image_views import Draw  # imported here, as it loads torch

    draw = Draw(ids, int(seed), int(step), num_views)
    views = [[caption] * num_views for caption in captions]
    if config.sentence_swap_prob > 0:
        _swap_sentences(views, draw, config.sentence_swap_prob)
    for name, prob, change in (
        ("word swap", config.word_swap_prob, _swap_words),
        ("word delete", config.word_delete_prob, _delete_words),
    ):
        num_words = max((len(words_of(caption)) for caption in captions), default=0) if prob > 0 else 0
        if num_words == 0:
            continue
        # Word k's number has its own key, so it does not depend on the longest caption of the batch.
        happens = np.stack([draw.unit(f"{name} {k}") for k in range(num_words)], axis=2) < prob
        for row, happens_here in zip(views, happens, strict=True):
            for view, text in enumerate(row):
                row[view] = change(text, happens_here[view].tolist())
    return [tuple(row) for row in views]


def _swap_sentences(views: list[list[str]], draw: Draw, prob: float) -> None:
    """Swap two sentences in randomly chosen views; `views` is modified."""
    happens = draw.unit("sentence swap") < prob
    first, second = draw.unit("sentence swap first"), draw.unit("sentence swap second")
    for i, row in enumerate(views):
        sentences = split_sentences(row[0]) if row else []
        num = len(sentences)
        for view in np.flatnonzero(happens[i]).tolist() if num > 1 else ():
            # Two different places; every pair of places is equally likely.
            a = min(int(first[i, view] * num), num - 1)
            b = (a + 1 + min(int(second[i, view] * (num - 1)), num - 2)) % num
            row[view] = _join_swapped(sentences, a, b)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text` without surrounding space; a text without end marks is one sentence.

    >>> split_sentences('It costs 3.5 dollars. "Really?" Yes')
    ['It costs 3.5 dollars.', '"Really?"', 'Yes']
    """
    return [found.group().rstrip() for found in _SENTENCE.finditer(text)]


def _join_swapped(sentences: list[str], a: int, b: int) -> str:
    swapped = list(sentences)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    # The last sentence may lack its full stop; before another sentence it would run into that sentence.
    closed = [s if s.rstrip("\"'”’)]").endswith(_END_MARKS) else f"{s}." for s in swapped[:-1]]
    return " ".join([*closed, swapped[-1]])


def _swap_words(text: str, happens: list[bool]) -> str:
    """Swap pairs of words from left to right; a pair that overlaps a swapped pair is skipped."""
    words = list(_WORD.finditer(text))
    order = list(range(len(words)))
    k = 0
    while k + 1 < len(words):
        between = text[words[k].end() : words[k + 1].start()]
        if happens[k] and between.isspace():
            order[k], order[k + 1] = order[k + 1], order[k]
            k += 1
        k += 1
    return with_words(text, [words[other].group() for other in order])


def words_of(text: str) -> list[str]:
    """Return the words of a text, without the characters between them.

    >>> words_of("A well-lit ring, isn't it?")
    ['A', 'well-lit', 'ring', "isn't", 'it']
    """
    return _WORD.findall(text)


def with_words(text: str, words: Sequence[str]) -> str:
    """Return `text` with `words` in place of its own words, one for one; characters between words stay.

    >>> with_words("One ring, two.", ["two", "One", "ring"])
    'two One, ring.'
    """
    pieces, end = [], 0
    for place, word in zip(_WORD.finditer(text), words, strict=True):
        pieces += [text[end : place.start()], word]
        end = place.end()
    return "".join([*pieces, text[end:]])


def _delete_words(text: str, happens: list[bool]) -> str:
    """Drop each word k with `happens[k]` that carries little meaning, unless no word would remain."""
    words = words_of(text)
    kept_words = [
        "" if drop and word.lower() in NON_ESSENTIAL_WORDS else word
        for word, drop in zip(words, happens, strict=False)
    ]
    if kept_words == words or not any(kept_words):  # nothing to drop, or nothing would remain
        return text
    shorter = " ".join(with_words(text, kept_words).split())
    return re.sub(r"\s+([,.;:!?…])", r"\1", shorter)
