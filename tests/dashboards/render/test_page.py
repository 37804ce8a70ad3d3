"""The page: complete in one file, without a network, with words that cannot run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re

import pytest

from dashboards.compose.content import REFERENCE_COLOUR
from dashboards.compose.curves import NON_PRIVATE_COLOUR, PRIVATE_COLOURS, UNPROVEN_COLOURS
from dashboards.compose.figure import content_of
from dashboards.render.specification import DARK_COLOURS, page_specification
from dashboards.report.page import report_page
from dashboards.report.report_content import Report
from tests.dashboards.conftest import TUNING_COST, by_hand

NUM_SCRIPTS = 5
"""Theme, specification, library, colours, drawings."""


def page_of(content):
    """A report of one figure."""
    return report_page(Report(name="one", title="", status="", figures=[content]))


def test_page_contains_numbers_notes_and_needs_no_network(make_trials):
    trials = make_trials()
    text = page_of(content_of(trials, "group-size"))
    mean, error = by_hand(trials, "knn_accuracy", 8, 10.0)
    assert f"{100 * mean:.2f} ± {100 * error:.2f}" in text
    assert TUNING_COST in text
    assert 'script src="http' not in text


def test_page_of_a_hostile_category_does_not_end_its_script(make_sweep):
    trials = make_sweep("network_name", ("</script><img src=x onerror=alert(1)>", "cnn"))
    page = page_of(content_of(trials, "architectures"))
    assert "<img src=x" not in page
    assert page.count("</script>") == page.count("<script") == NUM_SCRIPTS


def test_page_holds_the_specification(make_trials):
    content = content_of(make_trials(), "group-size")
    page = page_of(content)
    found = re.search(r'<figure .*?<script type="application/json">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(found) == page_specification(content)


def test_page_holds_the_library_once_and_is_small(make_trials):
    page = page_of(content_of(make_trials(), "group-size"))
    packed = re.findall(r'id="library">(.*?)</script>', page)
    assert len(packed) == 1
    assert "vegaEmbed" in gzip.decompress(base64.b64decode(packed[0])).decode()
    assert len(page.encode()) < 600_000


def test_policy_allows_the_scripts_of_the_page_and_nothing_else(make_trials):
    page = page_of(content_of(make_trials(), "group-size"))
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    ran = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    ran.append(gzip.decompress(base64.b64decode(re.search(r'id="library">(.*?)<', page)[1])).decode())
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in ran]
    assert sorted(rules["script-src"].split()) == sorted(f"'sha256-{each}'" for each in hashes)
    assert rules["default-src"] == rules["connect-src"] == "'none'"


def test_page_without_panels_has_the_numbers_and_no_script(make_trials):
    content = content_of(make_trials(scores=(), data_is="private"), "group-size")
    page = page_of(content)
    assert "Largest ε spent" in page
    assert "library" not in page
    assert page.count("<script") == 1  # the theme's


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "colour", [*PRIVATE_COLOURS, *UNPROVEN_COLOURS, NON_PRIVATE_COLOUR, REFERENCE_COLOUR]
)
def test_every_curve_is_seen_on_a_dark_page(colour):
    shown = DARK_COLOURS.get(colour, colour)
    contrast = (luminance(shown) + 0.05) / (luminance(DARK_COLOURS["white"]) + 0.05)
    assert contrast >= 3
