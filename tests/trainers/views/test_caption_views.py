"""Captions' views: no record's views depend on another's, rates are the paper's, nothing becomes empty."""

from __future__ import annotations

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.record_ids import ids_from_names
from trainers.views.caption_views import (
    NON_ESSENTIAL_WORDS,
    TEXT_AUGMENTATIONS,
    TextViewConfig,
    make_text_views,
    split_sentences,
)

ALL = TextViewConfig(sentence_swap_prob=0.5, word_swap_prob=0.3, word_delete_prob=0.2)
ALWAYS = {"sentence_swap_prob": 0.0, "word_swap_prob": 0.0, "word_delete_prob": 0.0}
CAPTIONS = [
    "A man is walking. He wears a red coat. His bag is black.",
    "two dogs",
    "There is a large blue circle at the top left, and a very small red cross in the centre.",
    "the",
    "Is it? Yes. It is the one and only.",
]
MANY = 4000


def ids_of(num: int) -> np.ndarray:
    return ids_from_names(f"r{i}" for i in range(num))


def views_of(captions, ids=None, *, config=ALL, seed=0, step=3, num_views=3):
    ids = ids_of(len(captions)) if ids is None else ids
    return make_text_views(captions, ids, config=config, seed=seed, step=step, num_views=num_views)


def only(**probs: float) -> TextViewConfig:
    return TextViewConfig(**(ALWAYS | probs))


def many(caption: str, config: TextViewConfig) -> list[str]:
    return [view for (view,) in views_of([caption] * MANY, config=config, num_views=1)]


def is_rate(count: float, num: int, prob: float) -> bool:
    return abs(count - num * prob) < 4 * (num * prob * (1 - prob)) ** 0.5


def test_views_of_the_others_stay_when_any_one_record_is_removed():
    captions, ids = CAPTIONS * 8, ids_of(8 * len(CAPTIONS))
    whole = views_of(captions, ids)
    for gone in range(len(captions)):
        fewer = views_of(captions[:gone] + captions[gone + 1 :], np.delete(ids, gone))
        assert fewer == whole[:gone] + whole[gone + 1 :]


def test_views_of_the_others_stay_when_a_record_with_the_longest_caption_joins():
    captions, ids = CAPTIONS * 8, ids_of(8 * len(CAPTIONS) + 1)
    joined = views_of([*captions, " ".join(["the"] * 90)], ids)
    assert joined[:-1] == views_of(captions, ids[:-1])


def test_views_follow_their_record_through_a_permutation():
    captions, ids = CAPTIONS * 8, ids_of(8 * len(CAPTIONS))
    order = np.random.default_rng(0).permutation(len(captions))
    whole = views_of(captions, ids)
    assert views_of([captions[i] for i in order], ids[order]) == [whole[i] for i in order]


def test_a_view_does_not_depend_on_how_many_there_are():
    captions = CAPTIONS * 8
    assert [row[:2] for row in views_of(captions, num_views=5)] == views_of(captions, num_views=2)


@pytest.mark.parametrize("other", [{"step": 4}, {"seed": 1}])
def test_another_step_or_seed_gives_other_views(other):
    captions = CAPTIONS * 8
    same = sum(a == b for a, b in zip(views_of(captions), views_of(captions, **other), strict=True))
    assert same < len(captions) * 0.8


def test_views_of_one_record_differ():
    assert len(set(views_of([CAPTIONS[0]], num_views=20)[0])) > 5


def test_default_is_the_papers_default():
    assert TextViewConfig() == TextViewConfig(
        sentence_swap_prob=TEXT_AUGMENTATIONS["sentence_swap"], word_swap_prob=0.0, word_delete_prob=0.0
    )


def test_with_all_off_every_view_is_the_caption():
    odd = ["  two  spaces ", "line\nbreak", *CAPTIONS]
    assert views_of(odd, config=only()) == [(caption,) * 3 for caption in odd]


def test_no_view_is_empty():
    certain = TextViewConfig(sentence_swap_prob=1, word_swap_prob=1, word_delete_prob=1)
    words = np.array([*sorted(NON_ESSENTIAL_WORDS)[:12], "cat", ".", "!", "…", "。", "'", "🙂", "猫"])
    random = np.random.default_rng(0)
    captions = [" ".join(random.choice(words, random.integers(1, 8))) for _ in range(500)]
    for config in (ALL, certain):
        assert all(view.strip() for row in views_of([*captions, *CAPTIONS], config=config) for view in row)


# Sentence swap


def test_sentences_are_swapped_with_the_probability_given():
    views = many("One. Two.", only(sentence_swap_prob=0.5))
    assert set(views) == {"One. Two.", "Two. One."}
    assert is_rate(views.count("Two. One."), MANY, 0.5)


def test_every_two_sentences_are_swapped_equally_often():
    views = many("A. B. C.", only(sentence_swap_prob=1))
    counts = [views.count(expected) for expected in ("B. A. C.", "C. B. A.", "A. C. B.")]
    assert sum(counts) == MANY
    assert all(is_rate(count, MANY, 1 / 3) for count in counts)


def test_a_caption_of_one_sentence_is_not_swapped():
    assert set(many("It costs 3.5 dollars, e.g here", only(sentence_swap_prob=1))) == {
        "It costs 3.5 dollars, e.g here"
    }


def test_a_swapped_last_sentence_gets_the_full_stop_it_lacked():
    assert set(many("A dog runs. It is big", only(sentence_swap_prob=1))) == {"It is big. A dog runs."}


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Wait... What?! Yes", ["Wait...", "What?!", "Yes"]),
        ("他在走。他穿红衣。", ["他在走。", "他穿红衣。"]),
        ('"No." he said.', ['"No."', "he said."]),
        ("no end", ["no end"]),
        (" \n", []),
    ],
)
def test_sentences_end_at_marks_before_space(text, sentences):
    assert split_sentences(text) == sentences


# Word swap


def test_two_words_are_swapped_with_the_probability_given():
    views = many("red cross", only(word_swap_prob=0.3))
    assert set(views) == {"red cross", "cross red"}
    assert is_rate(views.count("cross red"), MANY, 0.3)


def test_pairs_of_words_are_swapped_each_by_itself():
    views = many("a b, c d", only(word_swap_prob=0.3))
    assert is_rate(views.count("b a, d c"), MANY, 0.09)


def test_word_swap_moves_every_word_one_place_at_most():
    words = [f"w{i}" for i in range(12)]
    for view in many(" ".join(words), only(word_swap_prob=0.3)):
        places = [words.index(word) for word in view.split()]
        assert sorted(places) == list(range(12))
        assert max(abs(place - i) for i, place in enumerate(places)) <= 1


def test_word_swap_keeps_punctuation_in_its_place():
    views = many("A red, b. C (d)!", only(word_swap_prob=1))
    assert set(views) == {"red A, b. C (d)!"}


# Word delete


def test_words_of_little_meaning_are_dropped_with_the_probability_given():
    views = many("the cat", only(word_delete_prob=0.2))
    assert set(views) == {"the cat", "cat"}
    assert is_rate(views.count("cat"), MANY, 0.2)


def test_words_are_dropped_each_by_itself():
    assert is_rate(many("a cat of the house", only(word_delete_prob=0.2)).count("cat house"), MANY, 0.008)


def test_words_of_meaning_are_never_dropped():
    caption = "Two red dogs do not see three cats left of him"
    assert set(many(caption, only(word_delete_prob=1))) == {"Two red dogs do not see three cats left him"}


def test_a_caption_of_which_nothing_would_be_left_stays():
    assert set(many("there it is", only(word_delete_prob=1))) == {"there it is"}


def test_word_delete_leaves_no_space_before_punctuation():
    assert set(many("Cats there, dogs too.", only(word_delete_prob=1))) == {"Cats, dogs."}


# What is refused


@pytest.mark.parametrize("prob", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("name", TEXT_AUGMENTATIONS)
def test_probabilities_outside_their_range_are_refused(name, prob):
    with pytest.raises(ConfigError, match=rf"{name}_prob must be in \[0, 1\]"):
        TextViewConfig(**{f"{name}_prob": prob})


def test_captions_without_an_id_each_are_refused():
    with pytest.raises(ConfigError, match="got 2 captions and 3 ids"):
        views_of(["a", "b"], ids_of(3))


def test_an_empty_draw_has_no_views():
    assert views_of([], ids_of(0)) == []
