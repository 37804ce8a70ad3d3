"""Retrieval examples: of public data alone, by models that may be shown, and truly the nearest."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from dashboards.compose.gallery import Gallery, Tile, content_of_gallery, nearest
from dashboards.errors import DashboardError
from dashboards.render.gallery import data_uri, gallery_page, gallery_pictures
from dashboards.retrieval import check_public, draw_retrieval
from tests.trainers.exporting import write_small_clip, write_small_model
from trainers.export.description import read_description

IMAGE = np.arange(16, dtype=np.uint8).reshape(1, 4, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    write_small_model(folder)
    return folder


HOSTILE = "</script><img src=x onerror=alert(1)> | `a`"


def gallery(text="a"):
    tiles = [Tile(row=1, text=text, image=IMAGE), Tile(row=2, text=text, image=IMAGE, similarity=0.5)]
    caption = [
        Tile(row=3, text=text, image=None),
        Tile(row=4, text="", image=IMAGE, similarity=-0.5, is_right=True),
    ]
    return Gallery(title=text, subtitle=text, rows=[tiles, caption], notes=[text])


@pytest.mark.parametrize(
    "name", ["folder:/data/scans", "npz:digits", "csv:a.csv", "webdataset:a", "parquet:a"]
)
def test_images_of_ones_own_are_refused(name, model):
    with pytest.raises(DashboardError, match="public data alone"):
        check_public(name, read_description(model))


@pytest.mark.parametrize("label", ["none", "as-published"])
def test_model_of_private_data_without_a_proof_is_refused(label, model):
    private = dataclasses.replace(read_description(model), data="private", guarantee_label=label)
    with pytest.raises(DashboardError, match="proven"):
        check_public("digits", private)
    check_public("digits", dataclasses.replace(private, guarantee_label="proven"))


def test_neighbours_are_the_nearest_and_never_the_query_itself():
    points = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
    queries = np.array([3, 40])
    found, similarities = nearest(points[queries], points, 4, own=queries)
    for query, row, cosines in zip(queries, found, similarities, strict=True):
        norms = np.linalg.norm(points, axis=1)
        by_hand = points @ points[query] / norms / norms[query]
        by_hand[query] = -2
        assert row.tolist() == np.argsort(-by_hand)[:4].tolist()
        assert cosines == pytest.approx(by_hand[row], abs=1e-6)


def test_hostile_words_stay_words_in_pictures():
    assert "<img src=x" not in gallery_pictures(gallery(HOSTILE))[".svg"].decode()


@pytest.mark.ci
def test_hostile_words_stay_words_on_the_page():
    page = gallery_page(gallery(HOSTILE), "retrieval")
    assert "<img src=x" not in page
    assert "</script><img" not in page


@pytest.mark.ci
def test_page_holds_its_images_and_asks_for_nothing():
    page = gallery_page(gallery(), "retrieval")
    assert data_uri(IMAGE) in page
    assert not re.search(r'(?:src|href)="https?:', page)


def test_numbers_have_a_row_per_neighbour():
    _, numbers = content_of_gallery(gallery())
    assert numbers[["query", "neighbor", "rank"]].values.tolist() == [[1, 2, 1], [3, 4, 1]]
    assert numbers["is_right"].tolist() == [None, True]


@pytest.mark.ci
def test_examples_of_an_exported_model_are_written(model, tmp_path):
    paths = draw_retrieval(model, "digits", tmp_path / "figures", num_queries=3, num_neighbors=2)
    assert [path.suffix for path in paths] == [".png", ".svg", ".pdf", ".html", ".csv", ".md", ".tex"]
    assert all(path.stat().st_size for path in paths)
    with pytest.raises(DashboardError, match="fewer than"):
        draw_retrieval(model, "digits", tmp_path / "figures", num_neighbors=1797)


@pytest.mark.ci
def test_captions_ask_for_images_of_a_clip_model(tmp_path):
    write_small_clip(tmp_path / "model")
    paths = draw_retrieval(tmp_path / "model", "shapes:60", tmp_path / "figures", num_queries=2)
    assert "Queries are captions" in paths[5].read_text("utf-8")
