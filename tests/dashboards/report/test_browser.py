"""The report of a real sweep, in a browser, beside the MLflow server that holds its runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dashboards.query.trial_frames import typed
from dashboards.report.page import report_page
from dashboards.report.report_content import report_of
from dpgcl_core.release.metrics import tracked_name
from tests.browser import THEMES, chromium, needs_chromium, page_in, serious
from tests.dashboards.report.conftest import HOSTILE
from tests.trainers.databases import copy_empty_database
from tests.trainers.tracking.test_tracking import end, free_port, start_server
from trainers.tracking.mlflow_server import connect, search_runs

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.ci, pytest.mark.ray, pytest.mark.server, needs_chromium]
DRAWN = ".drawing[data-drawn]"
ROWS = "#main .sortable tbody tr:visible"
CELLS = """cells => cells.map(cell => [
    cell.parentElement.cells[0].textContent, cell.dataset.name, Number(cell.dataset.value), cell.textContent
])"""

SORTED = """found => {
    const links = [...document.querySelectorAll("[row-index] [col-id='attributes.`Run Name`'] a")];
    const row = link => +link.closest("[row-index]").getAttribute("row-index");
    const names = links.sort((a, b) => row(a) - row(b)).map(link => link.textContent);
    const shown = names.filter(name => name in found).map(name => found[name]);
    return shown.length > 9 && shown.every((each, i) => i === 0 || each <= shown[i - 1]);
}"""


@dataclass(frozen=True)
class Finished:
    """A finished sweep: the address of its server, its report, and the link to its runs that it printed."""

    uri: str
    report: Path
    link: str

    @property
    def address(self) -> str:
        return self.report.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    storage = tmp_path_factory.mktemp("storage")
    own = ("DPGCL_STORAGE", "DPGCL_LEDGER", "MLFLOW_TRACKING_URI", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(storage)}
    copy_empty_database(storage)
    server, uri = start_server(storage, port := free_port()), f"http://127.0.0.1:{port}"
    try:
        sweep = ["sweeps/group_size.py", "--tiny", "--group-sizes", "2", "4", "8", "--repeats", "2"]
        sweep += ["--name", "one", "--storage", str(storage), "--tracking-uri", uri]
        ran = subprocess.run(
            [sys.executable, *sweep], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        report = storage / "sweeps" / "one" / "report.html"
        assert f"report: {report}\n" in ran.stdout
        (line,) = (each for each in ran.stdout.splitlines() if each.startswith("runs: "))
        yield Finished(uri, report, line.removeprefix("runs: "))
    finally:
        end(server)


def column(page: Any, heading: str) -> list[str]:
    """The texts of a column, from top to bottom."""
    names = page.locator(".sortable th button").all_inner_texts()
    return page.locator(f".sortable tbody td:nth-child({names.index(heading) + 1})").all_inner_texts()


def test_report_asks_nobody_and_complains_of_nothing(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, heard):
        page.goto(finished.address)
        page.wait_for_selector(DRAWN)
        page.get_by_role("button", name="Dark theme").click()
        page.wait_for_selector(".drawing[data-drawn=dark]")
        assert [url for url in heard.requests if not url.startswith(("data:", "blob:"))] == [finished.address]
        assert heard.complaints == []


def test_policy_blocks_what_a_script_of_somebody_else_would_do(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, heard):
        page.goto(finished.address)
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=http://127.0.0.1:9/x.png>')")
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'own = 1'}))"
        )
        page.wait_for_function("() => true")
        assert page.evaluate("typeof own") == "undefined"
        assert all("Content Security Policy" in each for each in heard.complaints)
        assert len(heard.complaints) >= 2


def test_every_number_of_the_table_is_mlflows(finished: Finished, browser: Any) -> None:
    client = connect(finished.uri)
    ids = [each.experiment_id for each in client.search_experiments()]
    runs = {
        run.data.tags["dpgcl.trial"]: run.data for run in search_runs(client, ids, {"dpgcl.role": "trial"})
    }
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        cells = page.eval_on_selector_all(".sortable td[data-name]", CELLS)
        names = page.locator(".sortable tbody tr td:first-child").all_inner_texts()
    assert sorted(names) == sorted(runs)
    assert len(runs) == 12
    compared = 0
    for trial, name, value, text in cells:
        kept = runs[trial].metrics.get(tracked_name(name), typed(runs[trial].params.get(name, "None")))
        if isinstance(kept, float) and not math.isnan(value):
            assert value == kept or (math.isinf(value) and kept > 1e308), (trial, name)
            if name.endswith("accuracy"):
                assert text == f"{100 * kept:.2f}"
            compared += 1
    assert compared >= 12 * 3


def test_answer_and_privacy_are_those_of_the_documents(finished: Finished, browser: Any) -> None:
    folder = finished.report.parent
    answer = json.loads((folder / "answer.json").read_text())
    statement = json.loads((folder / "privacy_statement.json").read_text())
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        said = page.locator(".card").inner_text()
        panel = page.locator("dl").inner_text()
    assert all(line.removeprefix("Warning: ") in said for line in answer["lines"])
    assert f"{statement['cost']['tuned_epsilon']:.3f}"[:-1] in panel
    assert statement["cost"]["theorem"] in panel


def test_heading_sorts_by_a_click_and_by_enter(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        button = page.locator(".sortable th button", has_text="k-NN accuracy")
        heading = page.locator(".sortable th", has_text="k-NN accuracy")
        button.click()
        rising = list(map(float, column(page, "k-NN accuracy (%)")))
        assert heading.get_attribute("aria-sort") == "ascending"
        button.focus()
        page.keyboard.press("Enter")
        falling = list(map(float, column(page, "k-NN accuracy (%)")))
        assert heading.get_attribute("aria-sort") == "descending"
        assert (rising, falling) == (sorted(rising), sorted(rising, reverse=True))
        assert rising != falling
        page.locator(".sortable th button", has_text="ε spent").click()
        spent = column(page, "ε spent")
        assert heading.get_attribute("aria-sort") is None
        assert spent.index("none") == 6  # numbers first, in either direction
        page.locator(".sortable th button", has_text="ε spent").click()
        assert column(page, "ε spent").index("none") == 6


def test_filter_keeps_the_rows_with_all_words(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        assert page.locator(".filter output").inner_text() == "12 of 12 shown"
        page.get_by_label("Filter: Trials").fill("S4 r0")
        assert page.locator(".filter output").inner_text() == "2 of 12 shown"
        assert page.locator(ROWS).count() == 2
        page.get_by_label("Filter: Trials").fill("nothing like it")
        assert page.locator(ROWS).count() == 0


def test_hovering_over_a_point_shows_its_numbers(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        page.wait_for_selector(DRAWN)
        shown = ""
        for point in page.locator(".canvas .mark-symbol path").all()[:8]:
            point.hover(force=True)
            shown += page.locator("#vg-tooltip-element").inner_text()
        assert re.search(r"mean\s*\d", shown)
        assert re.search(r"standard error\s*\d", shown)


def test_trial_links_to_its_run_in_mlflow(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        link = page.locator(".sortable tbody a").first
        name = link.inner_text()
        with page.context.expect_page() as opened:
            link.click()
        run = opened.value
        run.wait_for_selector(f"text={name}", timeout=120_000)
        assert "workflowType=machine_learning" in run.url


class Clicks:
    """What somebody does with MLflow's page of a sweep's runs, from its printed link on; counts clicks."""

    def __init__(self, page: Any, link: str) -> None:
        self.page, self.count = page, 0
        page.goto(link)
        page.wait_for_selector("text=matching runs", timeout=120_000)

    def on(self, target: Any) -> None:
        target.click()
        self.count += 1

    def compare(self) -> None:
        self.on(self.page.locator("input[type=checkbox]").first)
        self.on(self.page.get_by_role("button", name="Compare", exact=True))
        self.page.wait_for_selector("text=Comparing 12 Runs", timeout=120_000)


def accuracies(uri: str) -> dict[str, float]:
    """The k-NN accuracy of every trial, by the name of its run."""
    client = connect(uri)
    ids = [each.experiment_id for each in client.search_experiments()]
    runs = search_runs(client, ids, {"dpgcl.role": "trial"})
    return {run.info.run_name: run.data.metrics["knn_accuracy"] for run in runs}


def test_link_opens_the_trainings_sorted_by_score_in_mlflows_table(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        Clicks(page, finished.link)
        page.wait_for_function(SORTED, arg=accuracies(finished.uri))  # each name begins with its S
        assert page.get_by_text("one", exact=True).count() == 0, "the sweep's own run"


def test_mlflow_compares_accuracy_with_the_group_size(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        clicks = Clicks(page, finished.link)
        clicks.compare()
        chosen = page.locator(".plotly .axis-title")
        chosen.first.wait_for()
        titles = chosen.all_text_contents()
        assert (titles[0], titles[-1]) == ("Axis: group_size", "knn_accuracy")
        metrics = page.locator("a").filter(has_text=re.compile(r"^[a-z_]+(\.[a-z_]+)?$"))
        metrics.filter(has_text="privacy.epsilon").first.wait_for()
        rows = page.locator("table tr td:first-child, table tr th:first-child").all_inner_texts()
        first = metrics.filter(has_text=re.compile("accuracy|epsilon")).first.inner_text()
        clicks.on(page.get_by_role("tab", name="Scatter Plot"))
        page.locator(".xtitle").wait_for()
        assert page.locator(".xtitle").text_content() == "Axis: group_size"
        assert page.locator(".ytitle").text_content() == "knn_accuracy"
    assert clicks.count <= 3
    assert rows.index("Axis: group_size") < rows.index("group_size")
    assert first == "knn_accuracy"


def test_best_group_size_is_one_click_away_in_mlflows_charts(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        clicks = Clicks(page, finished.link)
        clicks.on(page.locator("label:has(input[value=CHART])"))
        first = page.locator("h4").first
        first.filter(has_text=re.compile("^knn_accuracy$")).wait_for()
        title = page.locator("h4").get_by_text("knn_accuracy", exact=True).first
        title.scroll_into_view_if_needed()
        card = title.locator("xpath=ancestor::*[.//*[contains(@class, 'js-plotly-plot')]][1]")
        bars = card.locator(".barlayer text")
        bars.first.wait_for()
        shown = [float(text) for text in bars.all_text_contents()]
    found = sorted(accuracies(finished.uri).values(), reverse=True)
    assert len(shown) > 1
    assert sorted(shown, reverse=True) == [float(f"{each:.2f}") for each in found[: len(shown)]]
    assert clicks.count == 1


def test_figure_of_the_sweep_is_four_clicks_away_in_mlflow(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        clicks = Clicks(page, finished.link)
        clicks.on(page.get_by_role("link", name=re.compile(r"^S\d+-")).first)
        clicks.on(page.get_by_role("link", name="one", exact=True).first)
        clicks.on(page.get_by_role("tab", name="Artifacts"))
        clicks.on(page.get_by_text("group_size.png", exact=True))
        page.wait_for_function("() => [...document.images].some(each => each.naturalWidth > 1000)")
    assert clicks.count == 4


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [400, 1400])
def test_report_is_accessible_and_fits(finished: Finished, browser: Any, width: int, theme: str) -> None:
    with page_in(browser, theme=theme, width=width) as (page, _):
        page.goto(finished.address)
        page.wait_for_selector(DRAWN)
        page.eval_on_selector_all("details", "all => all.forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = """() => [...document.querySelectorAll("#main *, header *")].filter(each =>
            !each.closest(".table, .canvas, pre, .unseen") && each.getBoundingClientRect().right > innerWidth
        ).map(each => each.outerHTML.slice(0, 99))"""
        assert page.evaluate(cut) == []
        assert serious(page) == []
        page.evaluate("document.querySelector('h1').insertAdjacentHTML('afterend', '<a href=\"/\"></a>')")
        assert [each.partition(":")[0] for each in serious(page)] == ["link-name"], "a planted one is found"


def test_keyboard_reaches_the_content_first_and_shows_where_it_is(finished: Finished, browser: Any) -> None:
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        assert page.locator(".skip").bounding_box()["x"] >= 0
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Runs in MLflow"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "theme"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_theme_changes_the_page_and_its_figure(finished: Finished, browser: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    with page_in(browser) as (page, _):
        page.goto(finished.address)
        page.wait_for_selector(".drawing[data-drawn=light]")
        before = page.evaluate(colour)
        page.get_by_role("button", name="Dark theme").click()
        page.wait_for_selector(".drawing[data-drawn=dark]")
        assert page.evaluate(colour) != before
        assert "#222222" not in page.locator("svg.marks").inner_html()
        page.get_by_role("button", name="Light theme").click()
        page.wait_for_selector(".drawing[data-drawn=light]")
        assert page.evaluate(colour) == before


def test_report_of_hostile_names_runs_nothing(
    browser: Any, make_record: Any, make_trials: Any, tmp_path: Path
) -> None:
    trials = make_trials(method=HOSTILE, network_name=HOSTILE)
    record = make_record(trials=trials, name=HOSTILE, params={"question": "group-size", "dataset": HOSTILE})
    path = tmp_path / "report.html"
    path.write_text(report_page(report_of(record)), encoding="utf-8")
    with page_in(browser) as (page, heard):
        page.on("dialog", lambda dialog: heard.complaints.append(dialog.message))
        page.goto(path.as_uri())
        page.wait_for_selector(DRAWN)
        assert page.locator("#main img").count() == 0
        assert heard.complaints == []
        assert HOSTILE.split()[0] in page.inner_text("body")
