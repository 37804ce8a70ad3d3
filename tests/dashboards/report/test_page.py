"""The report's page: small, complete, and no text of it is markup."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest

from dashboards.report.page import report_page
from dashboards.report.report_content import report_of
from tests.dashboards.report.conftest import CONFIG, HOSTILE, STATEMENT

MOST_BYTES = 2_000_000


class Elements(HTMLParser):
    """Every element of a page, with its attributes, and the texts outside of scripts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts, self._raw = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._raw = False

    def handle_data(self, data):
        if not self._raw:
            self.texts.append(data)


def test_page_of_hostile_names_has_no_element_of_theirs(make_record, make_trials):
    trials = make_trials(method=HOSTILE, network_name=HOSTILE, sweep=HOSTILE)
    given = {
        "name": HOSTILE,
        "tags": dict.fromkeys(("data_is", "release_mode", "tuning_cost"), HOSTILE),
        "params": {"question": "group-size", "dataset": HOSTILE},
        "statement": STATEMENT | {"headline": HOSTILE, "unit": HOSTILE},
        "config": HOSTILE,
        "sweep_link": f"http://host/{HOSTILE}",
    }
    record = make_record(trials=trials.assign(data_is="public"), **given)
    record.trials["trial"] = HOSTILE
    page = Elements(report_page(report_of(record)))
    plain = Elements(report_page(report_of(make_record(sweep_link="http://host/"))))
    assert not any(tag == "img" for tag, _ in page.found)
    assert [tag for tag, _ in page.found].count("script") == [tag for tag, _ in plain.found].count("script")
    assert not any(name.startswith("on") for _, attributes in page.found for name in attributes)
    links = [attributes["href"] for tag, attributes in page.found if tag == "a"]
    assert all(link.startswith(("http://", "https://", "#", "data:application/yaml;")) for link in links)
    assert any(HOSTILE in text for text in page.texts)  # shown as it is


@pytest.mark.ci
def test_page_of_500_trials_is_small_and_has_a_row_for_each(make_record, make_trials):
    sizes = tuple(range(2, 127))
    trials = make_trials(sizes=sizes, epsilons=(10.0,), num_repeats=4)
    assert len(trials) == 500
    links = {f"run{i}": f"http://127.0.0.1:5000/#/experiments/1/runs/{i:032d}" for i in range(500)}
    page = report_page(report_of(make_record(trials=trials, links=links)))
    body = page[page.index('class="sortable"') :].partition("</table>")[0]
    assert len(page.encode()) <= MOST_BYTES
    assert body.count("<tr>") == 1 + 500
    assert body.count("<a href=") == 500


@pytest.mark.parametrize(
    ("status", "is_running"), [("RUNNING", True), ("FINISHED", False), ("KILLED", False)]
)
def test_page_loads_itself_again_while_the_sweep_runs(make_record, status, is_running):
    page = Elements(report_page(report_of(make_record(status=status))))
    (main,) = (attributes for tag, attributes in page.found if tag == "main")
    assert ("data-reload-seconds" in main) is is_running
    assert ("location.reload()" in report_page(report_of(make_record(status=status)))) is is_running


def test_page_shows_the_command_and_the_file_and_lets_it_be_saved(make_record):
    page = report_page(report_of(make_record()))
    assert "python sweeps/group_size.py --config config.yaml" in page
    assert html.escape(CONFIG) in page
    assert re.search(r'<a download="config.yaml" href="data:application/yaml;base64,[\w+/=]+"', page)


def test_page_without_a_server_links_nowhere(make_record):
    page = Elements(report_page(report_of(make_record())))
    links = [attributes["href"] for tag, attributes in page.found if tag == "a"]
    assert all(link.startswith(("#", "data:")) for link in links)


def test_same_runs_give_the_same_page(make_record):
    assert report_page(report_of(make_record())) == report_page(report_of(make_record()))
