"""The page: complete in one file, without a network, with words that cannot run."""

from __future__ import annotations

import json
import re

import pytest

from dashboards.compose.figure import content_of
from dashboards.figures import write_figure
from dashboards.render.page import page_of
from dashboards.render.specification import page_specification
from tests.dashboards.conftest import TUNING_COST, by_hand


@pytest.mark.ci
def test_html_contains_numbers_notes_and_needs_no_network(make_trials, tmp_path):
    trials = make_trials()
    *_, page = write_figure(trials, tmp_path, "group-size")
    text = page.read_text(encoding="utf-8")
    mean, error = by_hand(trials, "knn_accuracy", 8, 10.0)
    assert f"{100 * mean:.2f} ± {100 * error:.2f}" in text
    assert TUNING_COST in text
    assert 'script src="http' not in text


def test_html_of_a_hostile_data_set_name_holds_no_markup(make_trials, tmp_path):
    *_, page = write_figure(make_trials(dataset="<img src=x onerror=alert(1)>"), tmp_path, "group-size")
    assert "<img src=x" not in page.read_text(encoding="utf-8")


def test_page_of_a_hostile_category_does_not_end_its_script(make_sweep):
    trials = make_sweep("network_name", ("</script><img src=x onerror=alert(1)>", "cnn"))
    page = page_of(content_of(trials, "architectures"), "architectures")
    assert "<img src=x" not in page
    assert page.count("</script>") == 2


def test_page_draws_the_specification(make_trials):
    content = content_of(make_trials(), "group-size")
    call = re.search(r'vegaEmbed\("#group-size", (.*)\);</script>', page_of(content, "group-size"))[1]
    drawn, end = json.JSONDecoder().raw_decode(call)
    assert drawn == page_specification(content)
    assert json.loads(call[end + 1 :])["actions"] == {
        "export": True,
        "source": False,
        "compiled": False,
        "editor": False,
    }


def test_page_without_panels_has_the_facts_and_no_script(make_trials):
    content = content_of(make_trials(scores=(), data_is="private"), "group-size")
    page = page_of(content, "group-size")
    assert "What was trained" in page
    assert "<script" not in page
