"""Retrieval and zero-shot scores: slow oracles, ties, duplicates, and memory that does not grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dpgcl_core.errors import DataError
from trainers.evaluation import retrieval
from trainers.evaluation.retrieval import (
    Matches,
    class_embeddings,
    content_ids,
    embed_in_batches,
    recalls,
    unit_rows,
    zero_shot_accuracy,
)

PERFECT = {f"{way}_recall_at_{k}": 1.0 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}


def _matches(image_of_text: Sequence[int], images: str, texts: str) -> Matches:
    """Contents by letters, one per row."""
    return Matches(
        image_of_text=np.array(image_of_text, dtype=np.int64),
        image_contents=content_ids(letter.encode() for letter in images),
        text_contents=content_ids(letter.encode() for letter in texts),
    )


def _one_each(n: int) -> Matches:
    ids = np.arange(n)
    return Matches(
        image_of_text=ids, image_contents=ids.astype(np.uint64), text_contents=ids.astype(np.uint64)
    )


def _random(n: int, dim: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def _random_matches(num_images: int, more_texts: int, num_contents: int, seed: int) -> Matches:
    """A caption for every image and some more, with contents drawn from few, so that many are the same."""
    rng = np.random.default_rng(seed)
    owners = np.concatenate([np.arange(num_images), rng.integers(0, num_images, more_texts)])
    return Matches(
        image_of_text=rng.permutation(owners),
        image_contents=rng.integers(0, num_contents, num_images).astype(np.uint64),
        text_contents=rng.integers(0, num_contents, len(owners)).astype(np.uint64),
    )


def _slow_recalls(images: Tensor, texts: Tensor, matches: Matches) -> dict[str, float]:
    """Query by query, candidate by candidate, from the sentence that defines what is right."""

    def is_right(image: int, text: int) -> bool:
        return any(
            matches.text_contents[t] == matches.text_contents[text]
            and matches.image_contents[matches.image_of_text[t]] == matches.image_contents[image]
            for t in range(len(texts))
        )

    def cosine(image: int, text: int) -> float:
        x, y = images[image].double(), texts[text].double()
        return float(x @ y / (x.norm() * y.norm()))

    image_rows, text_rows = range(len(images)), range(len(texts))
    pairs = {
        "image_to_text": [[(image, text) for text in text_rows] for image in image_rows],
        "text_to_image": [[(image, text) for image in image_rows] for text in text_rows],
    }
    found = {}
    for way, queries in pairs.items():
        for k in (1, 5, 10):
            hits = 0
            for query in queries:
                best = max(cosine(*pair) for pair in query if is_right(*pair))
                wrong = [cosine(*pair) for pair in query if not is_right(*pair)]
                hits += sum(near >= best for near in wrong) < k
            found[f"{way}_recall_at_{k}"] = hits / len(queries)
    return found


@settings(max_examples=25, deadline=None)
@given(
    num_images=st.integers(1, 14),
    more_texts=st.integers(0, 12),
    num_contents=st.integers(1, 30),
    seed=st.integers(0, 2**16),
)
def test_recalls_equal_slow_oracle_with_captions_and_duplicates(
    num_images: int, more_texts: int, num_contents: int, seed: int
) -> None:
    matches = _random_matches(num_images, more_texts, num_contents, seed)
    images, texts = _random(num_images, seed=seed), _random(num_images + more_texts, seed=seed + 1)
    assert recalls(images, texts, matches) == pytest.approx(_slow_recalls(images, texts, matches))


def test_recall_of_perfect_towers_is_one() -> None:
    assert recalls(torch.eye(30), 3 * torch.eye(30), _one_each(30)) == PERFECT


@pytest.mark.parametrize("rank", [1, 2, 5, 6, 10, 11])
def test_recall_at_k_counts_ranks_up_to_k(rank: int) -> None:
    """Row i of the circulant similarities is shifted by i, so every right candidate has the same rank."""
    values = [float(each) for each in range(12, 0, -1)]
    values.insert(0, values.pop(rank - 1))
    texts = torch.stack([torch.tensor(values).flip(0).roll(1 + row) for row in range(12)])
    found = recalls(torch.eye(12), texts, _one_each(12))
    assert found == {name: float(rank <= int(name.rsplit("_", 1)[1])) for name in PERFECT}


def test_any_of_several_captions_is_a_hit() -> None:
    images = torch.eye(3)
    stray = torch.tensor([0.0, 0.8, 0.6])  # one of image 0's two captions, nearest to image 1
    texts = torch.stack([stray, images[0], images[1], images[2]])
    found = recalls(images, texts, _matches([0, 0, 1, 2], "abc", "wxyz"))
    assert found["image_to_text_recall_at_1"] == 1.0
    assert found["text_to_image_recall_at_1"] == 3 / 4


def test_identical_captions_count_for_each_others_images() -> None:
    # Each image is nearest to the other's caption; the two captions say the same.
    images, texts = torch.eye(2), torch.eye(2).roll(1, 0)
    assert recalls(images, texts, _matches([0, 1], "ab", "xx"))["image_to_text_recall_at_1"] == 1.0
    assert recalls(images, texts, _matches([0, 1], "ab", "xy"))["image_to_text_recall_at_1"] == 0.0


def test_identical_images_count_for_each_others_captions() -> None:
    images, texts = torch.eye(2), torch.eye(2).roll(1, 0)
    assert recalls(images, texts, _matches([0, 1], "aa", "xy"))["text_to_image_recall_at_1"] == 1.0
    assert recalls(images, texts, _matches([0, 1], "ab", "xy"))["text_to_image_recall_at_1"] == 0.0


def test_shared_caption_does_not_make_images_identical() -> None:
    # Images a and b share caption x; y belongs to b alone and stays wrong for a.
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    texts = torch.tensor([[0.6, 0.8], [0.6, 0.8], [1.0, 0.0]])
    found = recalls(images, texts, _matches([0, 1, 1], "ab", "xxy"))
    assert found["image_to_text_recall_at_1"] == 0.5


def test_collapsed_network_has_no_recall() -> None:
    # Enough wrong candidates for every k; a matrix product may round equal rows differently.
    images, texts = (_random(1, 300, seed=seed).expand(50, -1) for seed in (0, 1))
    assert recalls(images, texts, _one_each(50)) == dict.fromkeys(PERFECT, 0.0)


def test_one_tied_wrong_candidate_is_a_miss_at_one_and_a_hit_at_five() -> None:
    images, texts = torch.eye(8), torch.eye(8)
    texts[1] = texts[0]
    found = recalls(images, texts, _one_each(8))
    assert found["image_to_text_recall_at_1"] == 6 / 8  # image 0 tied; image 1 is equally far from all
    assert found["image_to_text_recall_at_5"] == 7 / 8


def test_embeddings_that_are_not_finite_are_misses_and_no_error() -> None:
    images = torch.eye(30)
    images[:3] = torch.tensor([[float("nan")], [float("inf")], [float("-inf")]])
    texts = torch.eye(30)
    texts[29] = float("nan")
    found = recalls(images, texts, _one_each(30))
    assert found["image_to_text_recall_at_1"] == found["image_to_text_recall_at_10"] == 26 / 30


def test_difference_within_the_rounding_is_a_tie() -> None:
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    nearly = torch.tensor([[1.0, 0.0], [1.0, 5e-4]])  # the cosine of the second to image 0 is 1 − 1.2e-7
    assert recalls(images, nearly, _one_each(2))["image_to_text_recall_at_1"] == 0.5
    apart = torch.tensor([[1.0, 0.0], [1.0, 5e-3]])
    assert recalls(images, apart, _one_each(2))["image_to_text_recall_at_1"] == 1.0


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 64])
def test_recalls_do_not_depend_on_the_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matches = _random_matches(60, 70, 40, seed=3)
    images = _random(60, 32, seed=1)
    texts = images[torch.from_numpy(matches.image_of_text)] + _random(130, 32, seed=2)
    texts[:20] = texts[20]  # ties
    whole = recalls(images, texts, matches)
    monkeypatch.setattr(retrieval, "MAX_BYTES", rows * 12 * 130)
    assert recalls(images, texts, matches) == whole
    assert 0.1 < whole["image_to_text_recall_at_1"] < 0.9


def test_recall_does_not_depend_on_the_order_of_records() -> None:
    matches = _random_matches(20, 15, 12, seed=5)
    images, texts = _random(20, seed=1), _random(35, seed=2)
    order = np.random.default_rng(0).permutation(20)
    shuffled = Matches(
        image_of_text=order.argsort()[matches.image_of_text],
        image_contents=matches.image_contents[order],
        text_contents=matches.text_contents,
    )
    found = recalls(images[torch.from_numpy(order)], texts, shuffled)
    assert found == pytest.approx(recalls(images, texts, matches))


def _peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that torch held at once while it worked, those inside its operations included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    assert run.profiler is not None
    events = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize(("image_content", "text_content"), [(0, 0), (0, 1), (1, 1)])
def test_memory_of_similarities_stays_below_the_bound(
    image_content: int, text_content: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All contents the same or all different: with the same images every candidate is right for each."""
    n, max_bytes = 600, 2**18
    rows = np.arange(n)
    matches = Matches(
        image_of_text=rows,
        image_contents=(rows * image_content).astype(np.uint64),
        text_contents=(rows * text_content).astype(np.uint64),
    )
    images, texts = _random(n, 4), _random(n, 4, seed=1)
    monkeypatch.setattr(retrieval, "MAX_BYTES", max_bytes)
    peak = _peak_bytes(lambda: recalls(images, texts, matches))
    per_row = 100 * n  # unit embeddings, classes and hits
    assert peak < max_bytes + per_row
    assert 4 * n * n > 5 * max_bytes  # the whole matrix would not fit


@pytest.mark.parametrize("batch_size", [1, 4, 9, 100])
def test_embeddings_in_batches_are_those_of_all_in_order(batch_size: int) -> None:
    rows = _random(9)
    assert torch.equal(embed_in_batches(lambda part: rows[part], 9, batch_size), rows)


def test_embeddings_of_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="nothing to embed"):
        embed_in_batches(lambda part: torch.ones(1, 2)[part], 0, 4)


def test_towers_run_without_gradients() -> None:
    modes = []

    def embed(some: Sequence[str]) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return torch.ones(len(some), 2)

    class_embeddings(["cat"], 1, embed)
    assert modes == [False]


WORDS = {
    "a cat": [3.0, 0.0, 0.0],
    "cats": [0.0, 0.5, 0.0],
    "a dog": [0.0, 0.0, 9.0],
    "dogs": [0.0, 0.0, 1.0],
}


def _embed_words(texts: Sequence[str]) -> Tensor:
    return torch.tensor([WORDS[text] for text in texts])


def test_class_embeddings_are_normalised_before_and_after_the_mean() -> None:
    found = class_embeddings(["a cat", "cats", "a dog", "dogs"], 2, _embed_words, batch_size=3)
    half = 0.5**0.5
    np.testing.assert_allclose(found, [[half, half, 0], [0, 0, 1]], atol=1e-6)


def test_zero_shot_accuracy_equals_slow_oracle() -> None:
    images, classes = _random(50, 5, seed=1), _random(4, 5, seed=2)
    labels = np.random.default_rng(0).integers(0, 4, 50)
    hits = 0
    for image, label in zip(images, labels, strict=True):
        cosines = [float(image @ row / image.norm() / row.norm()) for row in classes]
        hits += cosines.index(max(cosines)) == label
    assert zero_shot_accuracy(images, labels, classes) == hits / 50


def test_zero_shot_ties_are_misses() -> None:
    classes = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert zero_shot_accuracy(classes, np.arange(3), classes) == 1 / 3


@pytest.mark.parametrize(("labels", "message"), [([0, 2], "0 to 1"), ([-1, 0], "-1 to 0")])
def test_zero_shot_refuses_labels_without_class(labels: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        zero_shot_accuracy(torch.eye(2), np.array(labels, dtype=np.int64), torch.eye(2))


def test_content_ids_are_equal_for_equal_contents_only() -> None:
    assert len(set(content_ids([b"x", b"y", b"x", b""]).tolist())) == 3


def test_unit_rows_of_huge_embeddings_have_length_one() -> None:
    rows = unit_rows(torch.full((2, 4), 1e30))
    np.testing.assert_allclose(rows.norm(dim=1), [1, 1], rtol=1e-6)
