"""Pictures for paper: resolution, formats, words that can be searched."""

from __future__ import annotations

import io

from PIL import Image

from dashboards.compose.figure import content_of
from dashboards.render.pictures import pictures_of


def test_png_has_print_resolution(make_trials):
    pictures = pictures_of(content_of(make_trials(), "group-size"))
    with Image.open(io.BytesIO(pictures[".png"])) as picture:
        assert round(picture.info["dpi"][0]) == 200
        assert picture.width > 1500


def test_vector_pictures_have_the_same_size_and_the_words(make_trials):
    pictures = pictures_of(content_of(make_trials(), "group-size"))
    with Image.open(io.BytesIO(pictures[".png"])) as picture:
        width = picture.width * 72 / 200
    svg = pictures[".svg"].decode()
    assert f'width="{width:.0f}"' in svg
    assert "Gradient SNR, first step" in svg
    assert pictures[".pdf"].startswith(b"%PDF")
