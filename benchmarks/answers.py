#!/usr/bin/env python
"""Apply the decision rule to the committed sweeps: answers, tables and figures from their CSV files.

    python benchmarks/answers.py                   # all of benchmarks/results, and the answers on its page
    python benchmarks/answers.py --only tan_fashion_mnist

The scores of the single trainings were not kept. A CSV file has the mean, the standard error and the number
of repeats of each setting, and of its gain over its start. An answer needs no more if repeats are treated as
unpaired: the variances of scores and of gains are pooled over settings, whatever part settings have in common
(`dashboards.compose.answer.answer_of`, `paired=False`). This is conservative, because repeats share their
seeds. Each setting gets synthetic scores, one per repeat, with its mean and standard error. Nothing else may
be derived from these scores.
"""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import pandas as pd

from dashboards.compose.answer import Answer, PrivacyNumbers, Setting, answer_of
from dashboards.compose.answer_table import settings_table
from dashboards.compose.content import Content, Table
from dashboards.compose.decision import HIGHER, LOWER, Array
from dashboards.compose.display_names import common_scores, score_names
from dashboards.compose.figure import SETTINGS, content_of
from dashboards.compose.method_table import gain_table, score_table
from dashboards.compose.questions import Question, find_question
from dashboards.compose.references import BASELINES, NETWORK, PUBLIC_START, REFERENCE, ReferenceRow
from dashboards.compose.selection import shown_trials
from dashboards.compose.tables import readable_table
from dashboards.figures import as_markdown
from dashboards.render.pictures import pictures_of
from dashboards.render.table_markup import to_markdown
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import exit_on_bad_input
from dpgcl_core.release.markdown import escaped
from trainers.tracking.runs import TUNING_COST_TAG

RESULTS = Path(__file__).resolve().parent / "results"
QUESTIONS = {
    "ablation": "ablation",
    "cap": "privacy-budget",
    "classify": "classify",
    "group_size": "group-size",
    "mae": "privacy-budget",
    "methods": "methods",
    "privacy_budget": "privacy-budget",
    "regime_epsilon": "group-size",
    "regime_group_size": "group-size",
    "regime_privacy_budget": "privacy-budget",
    "tan": "tan",
    "tuning": "tuning",
    "wide": "group-size",
}
"""The question of a CSV file, by the prefix of its name."""
NETWORKS = {"dp_mae": "mae-toy", "dp_cap": "cap-toy"}
"""Networks of the methods that do not train `clip-tiny`; they distinguish the starts."""
_NUMBERS = ("_mean", "_standard_error", "_n")
_GAIN = "_private_gain"
_COST = re.compile(r"together ε = ([\d.]+) at δ = ([\d.e-]+\d)")


@dataclass(frozen=True)
class Summary:
    """A committed table of a sweep.

    Attributes:
      path: path of the CSV file; the `.md` page next to it has the sweep's title, settings and cost.
    """

    path: Path

    @property
    def question(self) -> Question:
        """The question that the sweep answers."""
        begins = [name for name in QUESTIONS if self.path.stem.startswith(name)]
        return find_question(QUESTIONS[max(begins, key=len)])

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All rows of the table; the rows of settings have a `target_epsilon`."""
        table = pd.read_csv(self.path)
        table = table.drop(columns=table.filter(like="_private_gain_share"))  # a column of version 0.1
        axis = self.question.axis.column
        table[axis] = pd.Series([_number(each) for each in table[axis]], dtype=object)
        if "target_epsilon" not in table:  # TAN: all trainings simulate the one at k = 1
            table["target_epsilon"] = table["epsilon_max"].min()
        return table

    @property
    def settings(self) -> pd.DataFrame:
        """The rows of settings."""
        return self.rows[self.rows["guarantee"] != REFERENCE]

    @property
    def _metrics(self) -> list[str]:
        return [str(name) for name in self.rows if str(name).endswith("_mean") and _GAIN not in str(name)]

    def trials(self, *, gains: bool) -> pd.DataFrame:
        """Return as many rows of each setting as it had repeats, with its means and standard errors.

        Args:
          gains: whether starts are chosen such that the gains have the mean and standard error of the table.
        """
        return pd.concat(
            [self._of_setting(row, gains=gains) for _, row in self.settings.iterrows()], ignore_index=True
        )

    def _of_setting(self, row: pd.Series, *, gains: bool) -> pd.DataFrame:
        columns = map(str, self.rows)
        names = [name for name in columns if not re.search(r"_(mean|standard_error|n|share)$", name)]
        num_repeats = int(row["num_trials"])
        trials = pd.DataFrame({"repeat": range(num_repeats)}).assign(**{name: row[name] for name in names})
        trials["guarantee_label"], trials["data_is"] = row["guarantee"], "public"
        trials["num_steps"] = 0 if row.get("method") == "base" else 1
        trials[TUNING_COST_TAG] = next((note for note in self._notes if "restarts" not in note), None)
        if self._starts_have_networks:
            trials[NETWORK] = self._network_of(row)
        for metric in self._metrics:
            name = metric.removesuffix("_mean")
            trials[name] = _spread(row, name, num_repeats)
            if gains and pd.notna(row.get(f"{name}{_GAIN}_mean")):
                start = trials[name] - _spread(row, f"{name}{_GAIN}", num_repeats)
                trials[f"{self._start_of(row)}_{name}"] = start
        for prefix, reference in self._references_of(row):
            for metric in self._metrics:
                name = metric.removesuffix("_mean")
                if prefix + name not in trials and pd.notna(reference[metric]):
                    trials[prefix + name] = _spread(reference, name, num_repeats)
        return trials.drop(columns=["guarantee", "num_trials"])

    def _start_of(self, row: pd.Series) -> str:
        found = [prefix for prefix, _ in self._references_of(row)]
        return PUBLIC_START if f"{PUBLIC_START}_" in found else "untrained"

    @cached_property
    def _starts_have_networks(self) -> bool:
        labels = self.rows[self.question.axis.column].map(str)
        return bool(labels.str.endswith(tuple(f", {name}" for name in NETWORKS.values())).any())

    def _network_of(self, row: pd.Series) -> str:
        return NETWORKS.get(str(row.get("method")), "clip-tiny")

    def _references_of(self, row: pd.Series) -> Iterator[tuple[str, pd.Series]]:
        """Yield the prefix and the row of each reference that a setting has."""
        axis = self.question.axis.column
        for _, reference in self.rows[self.rows["guarantee"] == REFERENCE].iterrows():
            label, _, at = str(reference[axis]).partition(", ")
            places = at.replace("warm start", "warm-start").split(" and ")
            if not at or str(row[axis]) in places or self._network_of(row) in places:
                yield next(each.prefix for each in BASELINES if each.label == label), reference

    @cached_property
    def _page(self) -> list[str]:
        text = html.unescape(self.path.with_suffix(".md").read_text())  # avoids escaping twice
        return re.sub(r"\\([`*\[\]{}#_])", r"\1", text).splitlines()

    @property
    def _notes(self) -> list[str]:
        """The page's sentences about the cost, which no table contains."""
        kept = ("together ε", "Tuning cost", "restarts are charged")
        return [line.removeprefix("- ") for line in self._page if any(text in line for text in kept)]

    def answer(self) -> Answer:
        """Return the answer."""
        cost = next((match for note in self._notes if (match := _COST.search(note))), None)
        private = self.settings[self.settings["guarantee"] == "proven"]
        privacy = PrivacyNumbers(
            training_epsilon=float(private["epsilon_max"].max()) if len(private) else None,
            tuned_epsilon=float(cost.group(1)) if cost else None,
            delta=float(cost.group(2)) if cost else None,
        )
        stated = privacy if self.question.name != "tuning" else None  # there each row has its own total
        found = answer_of(self.trials(gains=True), self.question, stated, paired=False)
        assert found is not None
        return found

    def content(self, answer: Answer) -> Content:
        """Return figure, tables and notes."""
        content = content_of(self.trials(gains=False), self.question, answer)
        title, subtitle = self._page[0].removeprefix("# "), self._page[2]
        overspent = [note for note in self._notes if "restarts are charged" in note]
        tables = [*self._tables(answer), (SETTINGS, settings_table(answer))]
        return replace(
            content, title=title, subtitle=subtitle, tables=tables, remarks=[*overspent, *content.remarks]
        )

    def _tables(self, answer: Answer) -> list[tuple[str, Table]]:
        if self.question.kind != "methods":
            table, axis = self.settings, self.question.axis.column
            return [("Numbers", readable_table(table, axis, list(self._reference_rows(axis))))]
        trials = shown_trials(self.trials(gains=False), self.question)
        common = common_scores(trials)
        tables = []
        for scores in (common, [name for name in score_names(trials) if name not in common]):
            if scores:
                tables.append(("Scores", score_table(trials, self.question, scores, answer)))
                gained = shown_trials(self.trials(gains=True), self.question)
                gains = gain_table(gained, self.question, scores)
                tables += [("Private gain", gains)] if gains is not None else []
        return tables

    def _reference_rows(self, axis: str) -> Iterator[ReferenceRow]:
        for _, row in self.rows[self.rows["guarantee"] == REFERENCE].iterrows():
            names = [name.removesuffix("_mean") for name in self._metrics if pd.notna(row[name])]
            yield ReferenceRow(
                label=row[axis],
                scores={name: tuple(row[name + ending] for ending in _NUMBERS) for name in names},
            )


def _number(value: object) -> object:
    """Return a number as a number, in a column that also holds words such as `batch`."""
    try:
        found = float(str(value))
    except ValueError:
        return value
    return int(found) if found.is_integer() else found


def _spread(row: pd.Series, name: str, num_repeats: int) -> Array:
    """Return `num_repeats` numbers with the mean and standard error of a row."""
    mean, error = float(row[f"{name}_mean"]), float(row[f"{name}_standard_error"])
    places = np.linspace(-1.0, 1.0, num_repeats) if num_repeats > 1 else np.zeros(1)
    unit = float(places.std(ddof=1)) / math.sqrt(num_repeats) if num_repeats > 1 else 1.0
    found: Array = mean + (0.0 if math.isnan(error) else error) / unit * places
    return found


def fill_page(page: str, folder: Path = RESULTS) -> str:
    """Return the results page with each answer filled in: figure, settings and two sentences.

    An answer stands between the marks `<!-- answer: NAME -->` and `<!-- end -->`.
    """

    def block(mark: re.Match[str]) -> str:
        name = mark.group(1)
        answer = read_answer(name, folder)
        figure = [f"![figure]({name}.png)"] if (folder / f"{name}.png").exists() else []
        sentences = replace(answer, privacy=None).first_lines()
        links = f"[All scores]({name}.md) ([CSV]({name}.csv)), [the whole answer]({name}.answer.json)."
        text = "\n".join([*map(escaped, sentences), links])
        parts = [*figure, to_markdown(_short_table(answer)), text]
        return "\n\n".join([f"<!-- answer: {name} -->", *parts, "<!-- end -->"])

    return re.sub(r"<!-- answer: ([\w/]+) -->.*?<!-- end -->", block, page, flags=re.DOTALL)


def _short_table(answer: Answer) -> Table:
    """Return the settings of an answer, with one column for each of several choices.

    An up arrow marks a distinguishable gain over the start, a down arrow a distinguishable lag behind the
    best setting.
    """
    if len(answer.choices) == 1:
        return settings_table(answer)
    names = list(dict.fromkeys(each.name for each in answer.settings))
    rows, bold = [[name] for name in names], set[tuple[int, int]]()
    for place, choice in enumerate(answer.choices, start=1):
        known = {each.name: each for each in choice.settings}
        bold.add((names.index(choice.take), place))
        for name, row in zip(names, rows, strict=True):
            row.append(_short_text(known[name]) if name in known else "–")
    heading = ["Setting", *(f"{answer.title} (%), {choice.at}" for choice in answer.choices)]
    return Table(heading=heading, rows=rows, bold=frozenset(bold))


def _short_text(setting: Setting) -> str:
    above = setting.over_start is not None and setting.over_start.verdict == HIGHER
    below = setting.over_best is not None and setting.over_best.verdict == LOWER
    return f"{100 * setting.mean:.2f}{' ↑' * above}{' ↓' * below}"


def read_answer(name: str, folder: Path = RESULTS) -> Answer:
    """Return the committed answer of a table."""
    return Answer.read(json.loads((folder / f"{name}.answer.json").read_text()))


def summaries(folder: Path = RESULTS) -> list[Summary]:
    """Return the committed tables of sweeps that have a `guarantee` column."""
    paths = [path for path in sorted(folder.rglob("*.csv")) if path.stem.startswith(tuple(QUESTIONS))]
    return [Summary(path) for path in paths if "guarantee" in path.open().readline().split(",")]


def write(only: str = "", folder: Path = RESULTS) -> int:
    """Write answer, page and figure of each table, and the answers on the results page.

    Args:
      only: name of one table; all tables by default.
      folder: the folder of the CSV files.
    """
    for summary in summaries(folder):
        if only not in ("", summary.path.stem):
            continue
        answer = summary.answer()
        content = summary.content(answer)
        text = json.dumps(answer.as_dict(), indent=1, ensure_ascii=False)
        summary.path.with_suffix(".answer.json").write_text(text + "\n")
        summary.path.with_suffix(".md").write_text(as_markdown(content))
        if summary.path.with_suffix(".png").exists():  # only for tables that the page shows
            summary.path.with_suffix(".png").write_bytes(pictures_of(content)[".png"])
        print(summary.path.stem, *answer.lines(), sep="\n  ")
    page = folder / "README.md"
    page.write_text(fill_page(page.read_text(), folder))
    return 0


def main() -> int:
    """Read the command line and write the answers."""
    code: int = run_command(write, prog="python benchmarks/answers.py", description=__doc__)
    return code


if __name__ == "__main__":
    exit_on_bad_input(main)
