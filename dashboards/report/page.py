"""A report as one HTML file, which works offline."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from dashboards.compose.answer_table import settings_table
from dashboards.compose.content import Content, Table
from dashboards.compose.figure import SETTINGS
from dashboards.render.document import DRAWINGS, RELOAD, TABLES, document_of, drawing_of, header_of
from dashboards.render.table_markup import boxed, to_sortable_html
from dashboards.report.report_content import Report

_RELOAD_SECONDS = 30
"""The time between reloads while the sweep runs; the sweep rewrites the file once a minute."""
_MOST_OPEN = 8
"""The most rows of an unfolded table; a longer table is folded, so that the figure stays in sight."""


def report_page(report: Report) -> str:
    """Return a report as an HTML page, every text escaped."""
    parts = [_answer(report), *map(_figure, report.figures), _trials(report), _privacy(report)]
    parts += [_repetition(report), _notes(report.notes)]
    has_drawing = any(figure.rows for figure in report.figures)
    scripts = [DRAWINGS] * has_drawing + [TABLES] * (report.trials is not None) + [RELOAD] * report.is_running
    below = f'<p class="soft">{html.escape(report.name)}. {html.escape(report.status)}{_link(report)}</p>'
    reload = f' data-reload-seconds="{_RELOAD_SECONDS}"' if report.is_running else ""
    main = f'<main id="main"{reload}>'
    head = header_of(report.title or report.name, below)
    return document_of(
        f"{report.name}: {report.title}", f"{head}{main}{''.join(parts)}</main>", scripts=scripts
    )


def _link(report: Report) -> str:
    if not report.link:
        return ""
    return f' <a href="{html.escape(report.link)}" rel="noreferrer" target="_blank">Runs in MLflow</a>'


def _answer(report: Report) -> str:
    """Return the section with the answer and its settings; empty without an answer."""
    if report.answer is None:
        return ""
    warning = report.answer.warning()
    first, *lines = [line for line in report.answer.lines() if not line.startswith("Warning")]
    so_far = "" if report.is_final else '<p class="soft">From the trials so far:</p>'
    warning_text = f'<p class="warning">Warning: {html.escape(warning)}.</p>' if warning else ""
    return (
        f'<section class="card" aria-label="Answer"><h2 class="unseen">Answer</h2>{so_far}'
        f'<p class="first">{html.escape(first)}</p>{_paragraphs(lines)}{warning_text}</section>'
        f"{_settings(settings_table(report.answer))}"
    )


def _settings(table: Table) -> str:
    """Return the table of settings as HTML, folded if it has many rows."""
    is_open = " open" if len(table.rows) <= _MOST_OPEN else ""
    return f"<details{is_open}><summary>{SETTINGS}</summary>{boxed(table, SETTINGS)}</details>"


def _figure(content: Content) -> str:
    """Return a figure, its remarks and its tables, without the answer, which the page shows above."""
    drawing = drawing_of(content, "figure")
    tables = [(name, table) for name, table in content.tables if name != SETTINGS]
    body = "".join(f"<h3>{html.escape(name)}</h3>{boxed(table, name)}" for name, table in tables)
    folded = f"<details><summary>The figure's numbers, as tables</summary>{body}</details>" if body else ""
    return (
        f'<h2>{html.escape(content.title)}</h2><p class="soft">{html.escape(content.subtitle)}</p>'
        f"{drawing}{_paragraphs(content.remarks)}{folded}"
    )


def _trials(report: Report) -> str:
    if report.trials is None:
        return ""
    return f"<h2>Trials</h2>{to_sortable_html(report.trials, 'Trials')}"


def _privacy(report: Report) -> str:
    rows = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in report.privacy
    )
    return f"<h2>Privacy</h2><p><b>{html.escape(report.promise)}</b></p><dl>{rows}</dl>"


def _repetition(report: Report) -> str:
    """Return the command and the file that repeat the sweep; the file can be saved."""
    if report.config is None:
        return "<h2>Repeat it</h2><p>The configuration of this sweep was not logged.</p>"
    packed = base64.b64encode(report.config.encode()).decode()
    link = f'<a download="config.yaml" href="data:application/yaml;base64,{packed}">config.yaml</a>'
    command = f'<pre tabindex="0">{html.escape(report.command)}</pre>' if report.command else ""
    return f'<h2>Repeat it</h2>{command}<p>{link}:</p><pre tabindex="0">{html.escape(report.config)}</pre>'


def _notes(notes: Sequence[str]) -> str:
    return f"<h2>Notes</h2>{_paragraphs(notes)}" if notes else ""


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)
