"""State → HTML of the live page: its parts, which a browser replaces as they change, and whole pages."""

from __future__ import annotations

import functools
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from dashboards.compose.content import Content
from dashboards.compose.figure import content_of
from dashboards.compose.names import score_names, score_title
from dashboards.compose.questions import QUESTIONS
from dashboards.compose.search import front_content
from dashboards.errors import DashboardError
from dashboards.live.state import UNFIT, FinishedTrial, Reader, SweepState
from dashboards.render.document import DRAWINGS, document_of, drawing_of_specification, header_of, policy_of
from dashboards.render.page import description_of
from dashboards.render.specification import page_specification
from dpgcl_core.release.statement import rounded_up
from trainers.tracking.runs import ROLE_TAG, SEALED_ROLE, SWEEP_TAG, TRIAL_ROLE
from trainers.tracking.server import is_database, runs_link

LIVE, STYLE = "live.js", "live.css"
_SECONDS_RUNNING, _SECONDS_IDLE = 2, 10
_BUDGET = {
    "training_epsilon": "ε of one training",
    "tuned_epsilon": "ε of the whole sweep",
    "tuned_delta": "δ",
    "epsilon_remaining": "ε that the ledger had left",
}
Json = dict[str, Any]
Drawn = tuple[Sequence[tuple[str, Json, str]], Sequence[str]]
"""Figures (heading, specification, description), and why others are missing."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A page's changing parts.

    Attributes:
      title: of the page.
      parts: HTML by name.
      figures: heading and what is drawn: specification and its description.
      every_seconds: how often it is worth asking again.
    """

    title: str
    parts: Mapping[str, str]
    figures: Sequence[tuple[str, Json, str]] = ()
    every_seconds: int = _SECONDS_IDLE

    def as_json(self) -> str:
        """Return the parts and figures for the page's script."""
        figures = [
            {"name": name, "specification": drawn, "description": said} for name, drawn, said in self.figures
        ]
        told = {"parts": dict(self.parts), "figures": figures, "every_seconds": self.every_seconds}
        return json.dumps(told, ensure_ascii=False)

    @property
    def tag(self) -> str:
        """What tells it from another state of the same page."""
        return hashlib.blake2b(self.as_json().encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Pages:
    """The pages of a reader.

    Attributes:
      reader: what they show.
    """

    reader: Reader
    _drawn: dict[str, tuple[Sequence[str], Drawn]] = field(default_factory=dict)

    def index(self) -> View:
        """Return the list of sweeps."""
        sweeps, notes = self.reader.sweeps()
        body = _template("index.html").render(sweeps=sweeps, notes=notes, ledger=self.reader.ledger_lines())
        runs = any(each.status == "running" for each in sweeps)
        return View(title="Sweeps", parts=_parts(body), every_seconds=_every(runs))

    def sweep(self, name: str) -> View | None:
        """Return the page of one sweep; None where there is none that may be seen."""
        state = self.reader.sweep(name)
        if state is None:
            return None
        uri, answer = self.reader.tracking_uri, state.answer()
        figures, said = self._figures(state)
        tags = {SWEEP_TAG: name, ROLE_TAG: SEALED_ROLE if state.is_sealed else TRIAL_ROLE}
        score = None if answer is None else answer.score
        body = _template("sweep.html").render(
            sweep=state,
            answer=[] if answer is None else answer.lines(),
            budget=[(text, state.numbers[key]) for key, text in _BUDGET.items() if key in state.numbers],
            ledger=self.reader.ledger_lines(),
            columns=_columns(state.trials),
            links={each.run_id: _run_link(uri, state.experiment_id, each.run_id) for each in state.trials},
            runs_link=runs_link(uri, state.experiment_id, tags, score) if _is_searchable(name) else "",
            by_database=is_database(uri),
            notes=(*state.notes, *said),
        )
        parts = _parts(body)
        return View(
            title=state.name, parts=parts, figures=figures, every_seconds=_every(state.status == "running")
        )

    def _figures(self, state: SweepState) -> Drawn:
        """The figures of the trials so far; drawn anew when a trial has finished."""
        key = [trial.run_id for trial in state.trials]
        known = self._drawn.get(state.name)
        if known is None or known[0] != key:
            known = self._drawn[state.name] = key, figures_of(state)
        return known[1]


def figures_of(state: SweepState) -> Drawn:
    """Return the figure of the sweep's question and the Pareto front, and why one cannot be drawn."""
    if (frame := state.frame) is None:
        return [], []
    asked = QUESTIONS.get(state.question)
    kinds: dict[str, Callable[[], Content]] = {"ε against score": partial(front_content, frame)}
    if asked is not None:
        kinds = {"Scores": partial(content_of, frame, asked, state.recorded)} | kinds
    found, said = [], []
    for name, make in kinds.items():
        try:
            content = make()
        except DashboardError as error:
            said.append(f"{name}: not drawn: {error}.")
        except UNFIT as error:
            said.append(f"{name}: not drawn, for the trials do not fit together ({type(error).__name__}).")
        else:
            drawn = page_specification(content) if content.rows else {}
            found += [(name, drawn, description_of(content))] if drawn else []
    return found, said


def page_of(view: View, at: str, *, home: bool = False) -> str:
    """Return a whole page.

    Args:
      view: what it shows.
      at: the address, under this server, of its parts as JSON.
      home: whether it is the list of sweeps.
    """
    above = "" if home else '<p><a href="/">All sweeps</a></p>'
    figures = "".join(
        f"<h3>{html.escape(name)}</h3>{drawing_of_specification(drawn, name, said)}"
        for name, drawn, said in view.figures
    )
    sections = "".join(f'<section data-part="{name}">{part}</section>' for name, part in view.parts.items())
    body = (
        f'{header_of(view.title, above)}<main id="main" data-at="{html.escape(at)}" '
        f'data-tag="{view.tag}" data-every="{view.every_seconds}">'
        f'<p id="news" class="unseen" role="status"></p>{sections}'
        f'<section id="figures" aria-label="Figures">{figures}</section></main>'
    )
    scripts, connect = _scripts(home=home), "'self'"
    return document_of(f"{view.title} · dpgcl", body, scripts=scripts, styles=(STYLE,), connect=connect)


def policy(*, home: bool = False) -> str:
    """Return the Content-Security-Policy of a page."""
    return policy_of(_scripts(home=home), connect="'self'") + "; frame-ancestors 'none'"


def _scripts(*, home: bool) -> Sequence[str]:
    return (LIVE,) if home else (DRAWINGS, LIVE)


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("dashboards.live"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    found.filters |= {
        "urlencode_all": lambda text: quote(text, safe=""),
        "moment": lambda seconds: f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}",
        "duration": duration,
        "epsilon": lambda value: rounded_up(value, 4),
        "number": _number,
    }
    return found


def _template(name: str) -> Any:
    return _environment().get_template(name)


_PART = re.compile(r"<!--part (\w+)-->(.*?)(?=<!--part |\Z)", re.DOTALL)


def _parts(body: str) -> dict[str, str]:
    """The parts of a rendered template: it marks them by comments, which no escaped text holds."""
    return {name: part.strip() for name, part in _PART.findall(body)}


def _every(runs: bool) -> int:
    return _SECONDS_RUNNING if runs else _SECONDS_IDLE


def _columns(trials: Sequence[FinishedTrial]) -> list[tuple[str, str]]:
    """The metrics that a table has room for, and their titles."""
    frame = pd.DataFrame([dict(each.metrics) for each in trials])
    scores = [(name, f"{score_title(name)} (%)") for name in score_names(frame)]
    others = {"snr_first_step": "SNR, first step", "noised_snr_first_step": "SNR, noised", "epsilon": "ε"}
    return scores + [(name, title) for name, title in others.items() if name in frame]


def _number(value: float, name: str) -> str:
    """Return a metric for readers.

    >>> _number(0.50004, "knn_accuracy"), _number(0.99843, "epsilon"), _number(1.23456, "snr_first_step")
    ('50.00', '0.9985', '1.235')
    """
    if score_title(name):
        return f"{100 * value:.2f}"
    return rounded_up(value, 4) if name == "epsilon" else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(5), duration(65), duration(7265)
    ('5 s', '1 min 05 s', '2 h 01 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _run_link(uri: str, experiment_id: str, run_id: str) -> str:
    return runs_link(uri, experiment_id, {}).partition("?")[0] + "/" + quote(run_id, safe="")


def _is_searchable(name: str) -> bool:
    return not ("'" in name and '"' in name)
