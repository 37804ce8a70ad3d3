"""The answer of a sweep: which setting is best, by how much, which to take, and what it cost in privacy.

One object, made by one function from the trials, says it to terminal, MLflow, figures and export alike. What
counts as resolved is judged by `dashboards.compose.blocks`, for the best setting is picked after looking.

*Who may be best.* Trials with a proven guarantee; where there are none, all that were trained. A reference
that stands apart on the axis (the whole batch as one group, ε = ∞, σ = 0) is compared elsewhere, and never
what to take.

*Cheaper* is what costs less ε, then fewer views that pass the network over the training, then fewer clipped
gradients; no clock decides. Views are counted among settings of one method and one network alone. Where
settings cost the same, as along a temperature, none is cheaper.

*Take* the cheapest of the settings that are not resolved from the best; where the best is resolved from the
network before training, the cheapest of those that are, too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dashboards.compose.axes import Axis
from dashboards.compose.blocks import HIGHER, Blocks, Difference
from dashboards.compose.names import (
    METHOD_NAMES,
    common_scores,
    has_values,
    listed,
    panel_scores,
    score_title,
    symbol,
    value_text,
)
from dashboards.compose.questions import Question, find_question
from dashboards.compose.references import NETWORK, start_of, start_text
from dashboards.compose.search import number_trials, objective, searched_columns
from dashboards.compose.selection import ORDER, PROVEN, SAMPLED, cell_columns, shown_trials
from dashboards.errors import DashboardError
from dpgcl_core.release.statement import delta_text, rounded_up
from dpgcl_core.sampling.groups import BATCH

POINT = "point"
OWN = Question(
    name="own",
    heading="points",
    asked="Which point?",
    axis=Axis(column=POINT, label="Point", symbol="point", scale="categorical"),
)
"""Of sweeps with points of somebody's own: each is a setting, by its label."""


@dataclass(frozen=True, kw_only=True)
class PrivacyNumbers:
    """What a sweep cost, and what is left.

    Attributes:
      training_epsilon: ε of one training, of the costliest where they differ; None without a guarantee.
      tuned_epsilon: ε of the whole sweep, tuning included; None where there is none.
      delta: δ of both.
      epsilon_remaining: what the ledger's filter has left of its cap; None without a ledger, or with quotas.
      trainings_remaining: how many trainings like the costliest one still fit the ledger; None without one.
    """

    training_epsilon: float | None = None
    tuned_epsilon: float | None = None
    delta: float | None = None
    epsilon_remaining: float | None = None
    trainings_remaining: int | None = None

    def text(self) -> str:
        """Return it in a sentence.

        >>> PrivacyNumbers(training_epsilon=1.0, tuned_epsilon=4.2, delta=1e-5, trainings_remaining=3).text()
        'ε of one training: 1; of the whole sweep: 4.2, at δ = 1e-05; the ledger holds 3 more such trainings.'
        >>> PrivacyNumbers().text()
        'No ε: no training has a guarantee.'
        """
        if self.training_epsilon is None:
            return "No ε: no training has a guarantee."
        tuned = "not accounted" if self.tuned_epsilon is None else rounded_up(self.tuned_epsilon, 4)
        delta = "" if self.delta is None else f", at δ = {delta_text(self.delta)}"
        left = self.trainings_remaining
        more = "" if left is None else f"; the ledger holds {left} more such training{'s' * (left != 1)}"
        own = rounded_up(self.training_epsilon, 4)
        return f"ε of one training: {own}; of the whole sweep: {tuned}{delta}{more}."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a sweep, over the repeats that all settings have.

    Attributes:
      name: for readers, for example "S = 8".
      values: what tells it apart, by column.
      mean: its score, a fraction.
      cost: ε, views and clipped gradients of one training; compared in this order.
      over_start: its difference to the network before training; None where that was not scored.
      trials: names of its trials.
    """

    name: str
    values: Mapping[str, Any]
    mean: float
    cost: tuple[float, ...]
    over_start: Difference | None
    trials: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a sweep.

    Attributes:
      question: in words.
      score: that it is decided by, a metric.
      num_repeats: that every setting has, so that differences are paired.
      num_left_out: repeats that some setting lacks, for trials that failed or have not finished.
      settings: all that may be best, in the order of the axis.
      best: name of the one with the highest mean score.
      cheaper: the best against the next cheaper setting; None where none is cheaper.
      tied: names of the settings that are not resolved from the best, itself included.
      tied_text: the same in words.
      take: names of the settings to take; several where none of them is cheaper, none after one repeat.
      privacy: what it cost; None where that is not known here.
    """

    question: str
    score: str
    num_repeats: int
    num_left_out: int
    settings: tuple[Setting, ...]
    best: str
    cheaper: Difference | None
    tied: tuple[str, ...]
    tied_text: str
    take: tuple[str, ...]
    privacy: PrivacyNumbers | None = None

    @property
    def best_setting(self) -> Setting:
        """The setting with the highest mean score."""
        return self._named(self.best)

    @property
    def gains(self) -> bool | None:
        """Whether what to take is resolved above the network before training; None where none was scored."""
        found = [self._named(name).over_start for name in self.take or (self.best,)]
        known = [each.verdict == HIGHER for each in found if each is not None]
        return all(known) if known else None

    def headline(self) -> str:
        """Return what to take, in a sentence."""
        title = score_title(self.score) or self.score
        if len(self.settings) == 1:
            said = f"{self.best} is the only setting shown"
        elif self.num_repeats < 2:
            said = (
                f"{self.best} has the highest {title}, and one training of each cannot tell whether by chance"
            )
        elif len(self.tied) == 1:
            said = f"{self.best}, whose {title} is resolved from that of all others"
        else:
            said = f"{self.tied_text} are not resolved from each other in {title}{self._advice()}"
        return f"{self.question} {said}."

    def _advice(self) -> str:
        if set(self.take) == set(self.tied):
            return ", and none of them is cheaper"
        taken = self._named(self.take[0])
        passed_over = [name for name in self.tied if name not in self.take]
        cheaper = any(self._named(name).cost <= taken.cost for name in passed_over)
        own = taken.over_start
        why = f"the cheapest that is resolved from {own.minus}" if own and cheaper else "the cheapest"
        return f"; take {'one of ' * (len(self.take) > 1)}{listed(self.take)}, {why}"

    def lead(self) -> str:
        """Return the best score, and by how much it leads."""
        best, title = self.best_setting, score_title(self.score) or self.score
        leads = [each.text() for each in (best.over_start, self.cheaper) if each is not None]
        ends = ", the next cheaper" if self.cheaper is not None else ""
        over = f"{self.num_repeats} repeat{'s' * (self.num_repeats != 1)}"
        if self.num_left_out:
            over += f", {self.num_left_out} more left out, for not all their trials have finished"
        told = f": {'; '.join(leads)}{ends}" if leads else ""
        return f"Highest: {best.name} with {100 * best.mean:.2f} % {title} over {over}{told}."

    def warning(self) -> str | None:
        """Return that what to take is not resolved above the network before training; None where it is."""
        if self.gains is not False:
            return None
        names = [self._named(name).over_start for name in self.take or (self.best,)]
        minus = next(each.minus for each in names if each is not None)
        few = self.num_repeats < 2
        why = "one repeat cannot tell" if few else "they may have learned nothing of the data"
        return f"no gain over {minus} is resolved: {why}"

    def lines(self) -> list[str]:
        """Return the answer in sentences: what to take, what it cost, the lead, and a warning."""
        privacy = [self.privacy.text()] if self.privacy is not None else []
        warned = self.warning()
        return [self.headline(), *privacy, self.lead(), *([f"Warning: {warned}."] if warned else [])]

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the answer: `best_knn_accuracy`, `best_group_size`, `tuned_epsilon`, …."""
        found = {f"best_{self.score}": self.best_setting.mean}
        for name, value in self.best_setting.values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                found[f"best_{name}"] = float(value)
        if self.privacy is not None:
            told = {name: getattr(self.privacy, name) for name in ("tuned_epsilon", "epsilon_remaining")}
            found |= {name: float(value) for name, value in told.items() if value is not None}
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, with the sentences in `lines`."""
        return dataclasses.asdict(self) | {"lines": self.lines(), "warning": self.warning()}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Answer:
        """Return the answer that `as_dict` gave.

        Raises:
          DashboardError: the values are of none, or of another version.
        """
        try:
            given = {each.name: values[each.name] for each in dataclasses.fields(cls)}
            given |= {name: tuple(given[name]) for name in ("tied", "take")}
            given["settings"] = tuple(map(_read_setting, given["settings"]))
            given["cheaper"] = _read_difference(given["cheaper"])
            given["privacy"] = given["privacy"] and PrivacyNumbers(**given["privacy"])
            found = cls(**given)
            found.lines()
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise DashboardError(f"the recorded answer is damaged ({type(error).__name__})") from error
        return found

    def _named(self, name: str) -> Setting:
        return next(setting for setting in self.settings if setting.name == name)


def _read_difference(values: Mapping[str, Any] | None) -> Difference | None:
    return None if values is None else Difference(**values)


def _read_setting(values: Mapping[str, Any]) -> Setting:
    lists = {name: tuple(values[name]) for name in ("cost", "trials")}
    return Setting(**{**values, **lists, "over_start": _read_difference(values["over_start"])})


def answer_of(
    trials: pd.DataFrame, question: Question | str, privacy: PrivacyNumbers | None = None
) -> Answer | None:
    """Return the answer of a sweep; None where no trial has a score.

    Args:
      trials: from `dashboards.query.trials.load_trials`, or the same columns.
      question: or its name; `OWN` for points of somebody's own.
      privacy: what the sweep cost.

    Raises:
      DashboardError: as `dashboards.compose.selection.shown_trials`.
    """
    asked = _about_settings(find_question(question))
    shown = shown_trials(_prepared(trials, asked), asked)
    score = (
        objective(shown) if asked.kind == "search" else next(iter(panel_scores(common_scores(shown))), None)
    )
    if score is None or not has_values(shown, score):
        return None
    found = _Candidates.of(_candidates(shown[shown[score].notna()], asked), asked, score)
    blocks, settings = found.blocks, found.settings()
    best = max(range(len(settings)), key=lambda i: (settings[i].mean, [-each for each in settings[i].cost]))
    tied = [
        i for i in range(len(settings))
        if i == best or not blocks.between(best, i, "").is_resolved
    ]  # fmt: skip
    return Answer(
        question=asked.asked,
        score=score,
        num_repeats=len(blocks.scores),
        num_left_out=found.num_left_out,
        settings=settings,
        best=settings[best].name,
        cheaper=_next_cheaper(blocks, settings, best),
        tied=tuple(settings[i].name for i in tied),
        tied_text=found.span(tied),
        take=_take([settings[i] for i in tied], settings[best]) if len(blocks.scores) > 1 else (),
        privacy=privacy,
    )


def _about_settings(question: Question) -> Question:
    """Return the question over settings where its axis is none: steps, and data sets to probe."""
    if question.compared and question.kind != "convergence":
        return question
    axis = Axis(
        column="method", label="Method", symbol="method", scale="categorical", order=tuple(METHOD_NAMES)
    )
    return dataclasses.replace(question, axis=axis, kind="axis")


def _prepared(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    if question.kind == "search":
        return number_trials(trials)
    if question.axis.column == "method" and "method" not in trials:
        return trials.assign(method="")
    return with_points(trials, question)


def with_points(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the trials with the names of somebody's own points, where the question is about these."""
    if question.axis.column != POINT or "trial" not in trials:
        return trials
    return trials.assign(**{POINT: [re.sub(r"-r\d+$", "", str(name)) for name in trials["trial"]]})


def _candidates(shown: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the trials of the settings that may be best; references where there is nothing else."""
    found = shown[shown["guarantee"] == PROVEN] if (shown["guarantee"] == PROVEN).any() else shown
    if "num_steps" in found and (found["num_steps"] > 0).any():
        found = found[found["num_steps"] > 0]
    apart = found[ORDER].map(question.axis.is_detached)
    if has_values(found, "group_size"):
        apart |= found["group_size"].map(str) == BATCH
    return found if apart.all() else found[~apart]


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """The trials that may be best, by setting.

    Attributes:
      trials: of all settings.
      keys: columns that tell settings apart, the axis first.
      question: of the sweep.
      cells: the trials of each setting, in the order of the axis.
      blocks: their scores over the repeats that all have; over none of them the means, as one repeat.
      num_left_out: repeats that some setting lacks.
      start: name of the network before training.
    """

    trials: pd.DataFrame
    keys: list[str]
    question: Question
    cells: Sequence[pd.DataFrame]
    blocks: Blocks
    num_left_out: int
    start: str
    costs: Sequence[tuple[float, ...]] = field(default=())

    @classmethod
    def of(cls, trials: pd.DataFrame, question: Question, score: str) -> _Candidates:
        """Return the settings of the trials that may be best."""
        keys = [name for name in cell_columns(trials, question) if name != "guarantee"]
        rows = trials if "repeat" in trials else trials.assign(repeat=0)
        cells = [cell for _, cell in rows.groupby(keys)]
        scores = pd.concat([_by_repeat(cell, cell[score]) for cell in cells], axis=1)
        starts = [start_of(cell, score) for cell in cells]
        before = [_by_repeat(cell, each[1]) for cell, each in zip(cells, starts, strict=True) if each]
        whole = scores.dropna()
        start_scores = pd.concat(before, axis=1).reindex(whole.index) if len(before) == len(cells) else None
        known = start_scores is not None and not start_scores.empty and start_scores.notna().all(axis=None)
        blocks = Blocks(
            whole.to_numpy(float) if len(whole) else scores.mean().to_numpy(float)[None],
            start_scores.to_numpy(float) if known and start_scores is not None else None,
        )
        names = {each[0] for each in starts if each}
        return cls(
            trials=rows,
            keys=keys,
            question=question,
            cells=cells,
            blocks=blocks,
            num_left_out=len(scores) - len(blocks.scores),
            start=start_text(names),
            costs=_costs(rows, cells),
        )

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings, in the order of the axis."""
        return tuple(
            Setting(
                name=self._name(cell),
                values={name: _plain(cell[name].iloc[0]) for name in self._columns},
                mean=float(self.blocks.scores[:, number].mean()),
                cost=self.costs[number],
                over_start=self.blocks.over_start(number, self.start),
                trials=tuple(map(str, cell["trial"])) if "trial" in cell else (),
            )
            for number, cell in enumerate(self.cells)
        )

    def span(self, numbers: Sequence[int]) -> str:
        """Return the names of some settings, neighbours on a numeric axis as a range."""
        names = [self._name(self.cells[number]) for number in numbers]
        alone = len(self._varying) <= 1 and self.question.axis.scale != "categorical"
        in_a_row = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
        if not (alone and in_a_row) or self.question.kind == "search":
            return listed(names)
        last = value_text(_plain(self.cells[numbers[-1]][self.question.axis.column].iloc[0]))
        return f"{names[0]} to {last}"

    @property
    def _columns(self) -> list[str]:
        """Columns of what a setting is: those that are searched, or the axis and what varies."""
        if self.question.kind == "search":
            return searched_columns(self.trials)
        return list(dict.fromkeys([self.question.axis.column, *self._varying]))

    @property
    def _varying(self) -> list[str]:
        columns = [self.question.axis.column if name == ORDER else name for name in self.keys]
        return [name for name in columns if self.trials[name].map(str).nunique() > 1]

    def _name(self, cell: pd.DataFrame) -> str:
        if self.question.kind == "search":
            return f"trial-{value_text(_plain(cell['trial_number'].iloc[0]))}"
        names = self._varying or [self.question.axis.column]
        first, *others = (self._value_name(name, _plain(cell[name].iloc[0])) for name in names)
        return first + (f" at {', '.join(others)}" if others else "")

    def _value_name(self, column: str, value: Any) -> str:
        own = self.question.axis.column == column and self.question.axis.scale == "categorical"
        if own or column == "method":
            return value_text(value)
        if column == SAMPLED:
            return f"{value_text(value)} sampled"
        return f"{symbol(column)} = {value_text(value)}"


def _by_repeat(cell: pd.DataFrame, values: pd.Series) -> pd.Series:
    return values.groupby(cell["repeat"]).mean()


def _costs(trials: pd.DataFrame, cells: Sequence[pd.DataFrame]) -> list[tuple[float, ...]]:
    """Return ε, views and clipped gradients of a training of each setting; zero for what is not compared."""
    alike = all(trials[name].nunique() <= 1 for name in ("method", NETWORK) if name in trials)
    return [_cost(cell.iloc[0], views_count=alike) for cell in cells]


def _cost(row: pd.Series, *, views_count: bool) -> tuple[float, ...]:
    epsilon = _rounded(float(row["target_epsilon"]))
    if not views_count:
        return epsilon, 0.0, 0.0
    number = {name: float(row[name]) for name in _COUNTED if name in row and pd.notna(row[name])}
    batch = number.get("expected_batch_size", math.nan)
    if math.isnan(batch):
        batch = number.get("sampling_prob", 1.0) * number.get("num_records_public", 1.0)
    records = number.get("num_steps", 1.0) * batch
    views = records * number.get("num_view_draws", 1.0) * (2 + number.get("num_augmentations", 0.0))
    size = str(row.get("group_size", 1))
    return epsilon, _rounded(views), _rounded(records / (1.0 if size == BATCH else float(size)))


_COUNTED = (
    *("expected_batch_size", "sampling_prob", "num_records_public", "num_steps", "num_view_draws"),
    "num_augmentations",
)


def _rounded(value: float) -> float:
    """Round to six digits, so that sums of the same parts are equal."""
    return float(f"{value:.6g}")


def _next_cheaper(blocks: Blocks, settings: Sequence[Setting], best: int) -> Difference | None:
    below = [i for i, each in enumerate(settings) if each.cost < settings[best].cost]
    if not below:
        return None
    nearest = max(below, key=lambda i: (settings[i].cost, settings[i].mean))
    return blocks.between(best, nearest, settings[nearest].name)


def _take(tied: Sequence[Setting], best: Setting) -> tuple[str, ...]:
    gains = [each for each in tied if _verdict(each) == _verdict(best)] if _verdict(best) == HIGHER else tied
    least = min(each.cost for each in gains)
    return tuple(each.name for each in gains if each.cost == least)


def _verdict(setting: Setting) -> str | None:
    return setting.over_start.verdict if setting.over_start is not None else None


def _plain(value: Any) -> Any:
    """Return a value of a table as Python's own."""
    return value.item() if isinstance(value, np.generic) else value
