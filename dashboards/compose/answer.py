"""The answer of a sweep: the setting to take, the size of its lead, and its privacy cost.

One object, made by one function from the trials, is read by terminal, MLflow, figures, report and export.
Only `dashboards.compose.decision` judges which differences are distinguishable.

*Candidates* are all trained settings with a proven guarantee or, if there are none, all trained settings.
Everything omitted is named with the reason. Settings at several ε are compared separately at each ε,
unless the sweep varies ε.

*To take* is the setting with the highest mean, or a setting within a standard error of it that saves a third
of ε or of the compute (`Layout.recommend`). Compute is the number of views that pass the network over the
training, and is compared only among settings of one method and one network. Run times have no influence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dashboards.compose.axes import Axis
from dashboards.compose.decision import HIGHER, LEVEL, LOWER, Comparison, Cost, Layout, RecordSpread
from dashboards.compose.display_names import (
    common_scores,
    has_values,
    list_names,
    panel_scores,
    score_title,
    symbol,
    value_text,
)
from dashboards.compose.panels import with_relative_loss
from dashboards.compose.questions import Question, find_question
from dashboards.compose.references import BASELINES, NETWORK, start_of, start_prefix, start_text
from dashboards.compose.search_trials import number_trials, objective, searched_columns
from dashboards.compose.selection import AS_PUBLISHED, ORDER, PROVEN, SAMPLED, cell_columns, shown_trials
from dashboards.compose.transfer_rows import PROBE, by_probe
from dashboards.dashboard_error import DashboardError
from dpgcl_core.mechanism.registry import METHODS
from dpgcl_core.release.metrics import Family, scores_of
from dpgcl_core.release.statement import delta_text, rounded_up
from trainers.files.outcome_file import Outcomes

POINT = "point"
OWN = Question(
    name="own",
    heading="points",
    text="Which point?",
    axis=Axis(column=POINT, label="Point", symbol="point", scale="categorical"),
)
"""The question of a sweep whose settings the user lists as points: each point is named by its label."""
NUM_RECORDS, MAJORITY = "num_scored_records", "scored_majority_share"
_WITHOUT_PRIVACY = "the best without privacy"
_EPSILON = "target_epsilon"


@dataclass(frozen=True, kw_only=True)
class PrivacyNumbers:
    """The privacy cost of a sweep, and the remaining budget.

    Attributes:
      training_epsilon: ε of one training, the costliest if they differ; None without a guarantee.
      tuned_epsilon: ε of the whole sweep, including tuning; None if it was not accounted.
      delta: the δ at which both ε hold.
      epsilon_remaining: ε that the ledger's cap still allows; None without a ledger, or if the ledger counts
        steps against quotas.
      trainings_remaining: how many trainings like the costliest still fit the ledger; None without a ledger.
    """

    training_epsilon: float | None = None
    tuned_epsilon: float | None = None
    delta: float | None = None
    epsilon_remaining: float | None = None
    trainings_remaining: int | None = None

    def text(self) -> str:
        """Return the privacy cost and the remaining budget in a sentence.

        >>> PrivacyNumbers(training_epsilon=1.0, tuned_epsilon=4.0, delta=1e-5, trainings_remaining=3).text()
        'ε of one training: 1; of the whole sweep: 4, at δ = 1e-05; the ledger allows 3 more such trainings.'
        >>> PrivacyNumbers().text()
        'No ε: no training has a guarantee.'
        """
        if self.training_epsilon is None:
            return "No ε: no training has a guarantee."
        sweep = "not accounted" if self.tuned_epsilon is None else rounded_up(self.tuned_epsilon, 4)
        delta = "" if self.delta is None else f", at δ = {delta_text(self.delta)}"
        training, num_remaining = rounded_up(self.training_epsilon, 4), self.trainings_remaining
        remainder = ""
        if num_remaining is not None:
            remainder = f"; the ledger allows {num_remaining} more such training{'s' * (num_remaining != 1)}"
        return f"ε of one training: {training}; of the whole sweep: {sweep}{delta}{remainder}."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a sweep, with its scores over the repeats that all settings have.

    Attributes:
      name: the name for readers, for example "S = 8".
      values: the values that distinguish the setting, by column.
      mean: its mean score, a fraction.
      cost: the cost of one training.
      over_start: its score minus the score of the network before training; None if that was not scored.
      over_best: its score minus the score of the setting with the highest mean; None for that setting itself.
      trials: names of its trials.
    """

    name: str
    values: Mapping[str, Any]
    mean: float
    cost: Cost
    over_start: Comparison | None
    over_best: Comparison | None
    trials: tuple[str, ...] = ()

    @property
    def is_contender(self) -> bool:
        """Whether this setting has the highest mean, or is not distinguishable from the one that has it."""
        return self.over_best is None or not self.over_best.is_distinguishable


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The decision among settings whose scores may be compared.

    Attributes:
      at: the ε that the settings share, for example "ε = 1"; empty if the sweep has one choice.
      settings: all candidates, in the order of the axis.
      best: name of the setting with the highest mean score.
      take: name of the setting to take.
      within_noise: names of the best setting and of all settings not distinguishable from it, as one text.
      sources: the sources from which chance was estimated: "repeats and test records", "repeats",
        "test records", or "nothing".
      num_repeats_needed: number of repeats with which a lead as large as the present one would be
        distinguishable; None if it already is, or if no number up to `MOST_REPEATS` is known to suffice.
    """

    at: str
    settings: tuple[Setting, ...]
    best: str
    take: str
    within_noise: str
    sources: str
    num_repeats_needed: int | None = None

    @property
    def best_setting(self) -> Setting:
        """The setting with the highest mean score."""
        return self._find_setting(self.best)

    @property
    def recommendation(self) -> Setting:
        """The setting to take."""
        return self._find_setting(self.take)

    @property
    def contenders(self) -> list[str]:
        """Names of the best setting and of all settings not distinguishable from it."""
        return [setting.name for setting in self.settings if setting.is_contender]

    @property
    def runner_up(self) -> Setting | None:
        """The setting with the second highest mean; None if there is only one setting."""
        settings = [setting for setting in self.settings if setting.name != self.best]
        return max(settings, key=lambda setting: setting.mean, default=None)

    def advice(self, title: str) -> str:
        """Return the recommendation and its reason, with the score's `title`."""
        best, setting = self.best_setting, self.recommendation
        name, score = setting.name, f"{100 * setting.mean:.2f} % {title}"
        if len(self.settings) == 1:
            return f"{name} is the only setting: {score}"
        if name != best.name:
            return (
                f"take {name}: {score}, within a standard error of the highest ({best.name}, "
                f"{100 * best.mean:.2f} %); it saves {setting.cost.saving_text(best.cost)}"
            )
        if len(self.contenders) == 1:
            return f"take {name}: {score}, distinguishable from all others"
        if self.sources == "nothing":
            return f"take {name}: the highest, {score}; too few trainings to distinguish it from chance"
        return f"take {name}: the highest, {score}; {self.within_noise} are within noise of each other"

    def lead(self) -> str:
        """Return the gain of the setting to take over its start, and the best one's lead over the next."""
        setting, second = self.recommendation, self.runner_up
        phrases = [f"{setting.name}: {setting.over_start.text()}"] if setting.over_start is not None else []
        if second is not None and second.over_best is not None:
            lead = replace(second.over_best, mean=0.0 - second.over_best.mean, minus=second.name)
            prefix = f"{self.best}: " * (self.best != self.take or not phrases)
            phrases.append(f"{prefix}{lead.text()}, the second highest")
        return "; ".join(phrases)

    def power(self) -> str:
        """Return the smallest distinguishable lead, and the repeats that the present lead would need."""
        if self.smallest_lead is None:
            return ""
        num_repeats = self.num_repeats_needed
        outlook = "" if num_repeats is None else f"; this lead would need about {num_repeats} repeats"
        return f"leads of at least {100 * self.smallest_lead:.2f} points are distinguishable{outlook}"

    @property
    def smallest_lead(self) -> float | None:
        """The smallest distinguishable lead of the best setting over the runner-up; None if unknown."""
        runner = self.runner_up
        return runner.over_best.smallest if runner is not None and runner.over_best is not None else None

    def _find_setting(self, name: str) -> Setting:
        return next(setting for setting in self.settings if setting.name == name)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a sweep: which setting to take, by what lead, and at what privacy cost.

    Attributes:
      question: the question in words.
      score: name of the metric by which the settings are compared.
      num_repeats: number of repeats that every setting has, so that differences are paired.
      num_repeats_left_out: number of repeats that some setting lacks because trials failed or have not
        finished.
      choices: one choice, or one for each ε.
      left_out: sentences that name the trials and settings that are not candidates, with the reasons.
      references: mean scores by name, of baselines that need none of these trainings (raw pixels, the
        untrained network, the start) and of the best training without privacy.
      num_records: number of scored records; None if it is not public.
      majority_share: share of the largest class among the scored records; None without labels.
      privacy: the privacy cost; None if it is not known here.
    """

    question: str
    score: str
    num_repeats: int
    num_repeats_left_out: int
    choices: tuple[Choice, ...]
    left_out: tuple[str, ...] = ()
    references: Mapping[str, float]
    num_records: int | None = None
    majority_share: float | None = None
    privacy: PrivacyNumbers | None = None

    @property
    def settings(self) -> list[Setting]:
        """The settings of all choices."""
        return [setting for choice in self.choices for setting in choice.settings]

    @property
    def take(self) -> list[str]:
        """Names of the settings to take, one for each choice."""
        return [choice.take for choice in self.choices]

    @property
    def gains(self) -> bool | None:
        """Whether every setting to take is distinguishably above its start; None if no start was scored."""
        gains = [gain for choice in self.choices if (gain := choice.recommendation.over_start) is not None]
        return all(gain.verdict == HIGHER for gain in gains) if gains else None

    @property
    def title(self) -> str:
        """The score's title for readers."""
        return score_title(self.score) or self.score

    def headline(self) -> str:
        """Return the recommendation in a sentence."""
        advice = [
            f"{f'at {choice.at} ' if choice.at else ''}{choice.advice(self.title)}" for choice in self.choices
        ]
        first, *others = advice
        is_name = len(self.choices[0].settings) == 1 and not self.choices[0].at
        text = first if is_name else first[:1].upper() + first[1:]
        return f"{self.question} {'; '.join([text, *others])}."

    def beaten(self) -> str | None:
        """Return a sentence on the baselines that score above every setting; None without any."""
        highest = max(setting.mean for setting in self.settings)
        above = {
            name: mean
            for name, mean in self.references.items()
            if mean > highest and name != _WITHOUT_PRIVACY
        }
        if not above:
            return None
        names = list_names([f"{_with_article(name)} ({100 * mean:.2f} %)" for name, mean in above.items()])
        verb = "score" if len(above) > 1 or names.startswith("raw pixels") else "scores"
        return f"{names[:1].upper()}{names[1:]} {verb} above every setting in {self.title}."

    def leads(self) -> str:
        """Return the leads of all choices in a sentence; empty if there are none."""
        leads = [(choice.at, choice.lead()) for choice in self.choices]
        return _leads_sentence([f"at {at}, {text}" if at else text for at, text in leads if text])

    def beside(self) -> str:
        """Return the references' scores in a sentence; empty without references."""
        scores = [f"{name} {100 * mean:.2f} %" for name, mean in self.references.items()]
        return f"For comparison: {', '.join(scores)}." if scores else ""

    def basis(self) -> str:
        """Return the repeats and test records behind the answer, and the leads that they can show."""
        repeats = f"{self.num_repeats} repeat{'s' * (self.num_repeats != 1)}"
        if self.num_repeats_left_out:
            repeats += f" ({self.num_repeats_left_out} left out: not all their trials have finished)"
        records = ""
        if self.num_records is not None:
            share = "" if self.majority_share is None else f", {100 * self.majority_share:.0f} % of one class"
            records = f" and {self.num_records} test records{share}"
        sources = self.choices[0].sources
        chance = "" if " and " in sources else f"; chance from {sources} only" * (sources != "nothing")
        power = self.choices[0].power() if len(self.choices) == 1 else self._smallest_leads()
        return f"Based on {repeats}{records}{chance}{f': {power}' if power else ''}."

    def _smallest_leads(self) -> str:
        smallest = [lead for choice in self.choices if (lead := choice.smallest_lead) is not None]
        if not smallest:
            return ""
        low, high = (f"{100 * lead:.2f}" for lead in (min(smallest), max(smallest)))
        return f"leads of at least {low if low == high else f'{low} to {high}'} points are distinguishable"

    def warning(self) -> str | None:
        """Return a warning if a setting to take is not distinguishably above its start, else None."""
        if self.gains is not False:
            return None
        settings = [(choice.at, choice.recommendation) for choice in self.choices]
        gains = [(at, setting, gain) for at, setting in settings if (gain := setting.over_start)]
        below = [
            f"{setting.name}{f' at {at}' * bool(at)}" for at, setting, gain in gains if gain.verdict == LOWER
        ]
        no_gain = [at for at, _, gain in gains if gain.verdict != HIGHER]
        start = gains[0][2].minus
        if below:
            addition = f", and no gain is distinguishable at {list_names(no_gain)}" if len(gains) > 1 else ""
            return f"{list_names(below)} scores below {start}{addition}"
        if len(no_gain) < len(gains):
            return f"no gain over {start} is distinguishable at {list_names(no_gain)}"
        unknown = self.choices[0].sources == "nothing"
        reason = "one repeat is too few" if unknown else "it may have learned nothing from the data"
        return f"no gain over {start} is distinguishable: {reason}"

    def first_lines(self) -> list[str]:
        """Return the answer in short: the recommendation, the warning or else the lead, and the cost."""
        warning = self.warning()
        first = " ".join(filter(None, [self.beaten(), self.headline()]))
        privacy = [self.privacy.text()] if self.privacy is not None else []
        return [first, f"Warning: {warning}." if warning else self.leads() or self.basis(), *privacy]

    def lines(self) -> list[str]:
        """Return the answer in sentences: recommendation, warnings, leads, basis and cost."""
        warning = self.warning()
        sentences = [self.beaten(), self.headline(), f"Warning: {warning}." if warning else None]
        sentences += [self.leads(), self.beside(), self.basis(), " ".join(self.left_out)]
        sentences += [self.privacy.text()] if self.privacy is not None else []
        return [line for line in sentences if line]

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the answer: `best_knn_accuracy`, `best_group_size`, `tuned_epsilon`, …."""
        numbers: dict[str, float] = {}
        if len(self.choices) == 1:
            best = self.choices[0].best_setting
            numbers[f"best_{self.score}"] = best.mean
            for name, value in best.values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                    numbers[f"best_{name}"] = float(value)
        if self.privacy is not None:
            values = {name: getattr(self.privacy, name) for name in ("tuned_epsilon", "epsilon_remaining")}
            numbers |= {
                name: float(value) for name, value in values.items() if value is not None and value < math.inf
            }
        return numbers

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, with `lines`, `warning` and `take` under their names."""
        values: dict[str, Any] = json.loads(TypeAdapter(Answer).dump_json(self))  # None for infinity
        return values | {"lines": self.lines(), "warning": self.warning(), "take": self.take}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Answer:
        """Return the answer from the values that `as_dict` returned.

        Raises:
          DashboardError: the values do not form an answer, or their format is of another version.
        """
        try:
            answer = TypeAdapter(cls).validate_python(values)
            answer.lines()
        except (ValueError, StopIteration, IndexError) as error:
            raise DashboardError(f"the recorded answer is damaged ({type(error).__name__})") from error
        return answer


def _with_article(name: str) -> str:
    return f"the {name}" if name.endswith(("network", "start")) else name


def _leads_sentence(texts: Sequence[str]) -> str:
    text = "; ".join(texts)
    return f"{text[:1].upper() if text.startswith('at ') else text[:1]}{text[1:]}." if text else ""


def answer_of(
    trials: pd.DataFrame,
    question: Question | str,
    privacy: PrivacyNumbers | None = None,
    outcomes: Mapping[str, Outcomes] | None = None,
    *,
    paired: bool = True,
) -> Answer | None:
    """Return the answer of a sweep: the setting to take, and why; None if no candidate has a score.

    Args:
      trials: trials from `dashboards.query.trial_frames.load_trials`, or with the same columns.
      question: the question or its name; `OWN` if the user listed the settings as points.
      privacy: the sweep's privacy cost.
      outcomes: by the trial's name, what each public test record contributes to its scores; without them,
        chance is estimated from repeats alone.
      paired: whether trials with the same repeat number share their seed in all settings; otherwise each
        setting has its own repeats.

    Raises:
      DashboardError: as in `dashboards.compose.selection.shown_trials`.
    """
    question = _question_over_settings(find_question(question))
    trials = shown_trials(prepare_trials(trials, question), question)
    scores = panel_scores(common_scores(trials))
    score = objective(trials) if question.kind == "search" else next(iter(scores), None)
    if score is None or not has_values(trials, score):
        return None
    rows, left_out = _candidates(trials, question, score)
    rows = rows[rows[score].notna()]
    if rows.empty:
        return None
    if "repeat" not in rows:
        rows = rows.assign(repeat=0)
    parts = [("", rows)]
    if question.kind != "search" and _EPSILON in question.curve_columns and rows[_EPSILON].nunique() > 1:
        parts = [(f"ε = {value_text(epsilon)}", part) for epsilon, part in rows.groupby(_EPSILON)]
    is_paired = paired and question.kind != "search"
    groups = [
        _Candidates(
            trials=part,
            question=question,
            score=score,
            level=LEVEL / len(parts),
            outcomes=outcomes or {},
            is_paired=is_paired,
        )
        for _, part in parts
    ]
    return Answer(
        question=question.text,
        score=score,
        num_repeats=min(group.num_repeats for group in groups),
        num_repeats_left_out=max(group.num_left_out for group in groups),
        choices=tuple(group.choice(at) for group, (at, _) in zip(groups, parts, strict=True)),
        left_out=left_out,
        references=_references(trials, rows, score),
        num_records=_shared_number(trials, NUM_RECORDS, int),
        majority_share=_shared_number(trials, MAJORITY, float),
        privacy=privacy,
    )


def _question_over_settings(question: Question) -> Question:
    """Return the question, with the method as axis if its own axis (steps, probe data sets) is no setting."""
    if question.is_comparable and question.kind != "convergence":
        return question
    axis = Axis(column="method", label="Method", symbol="method", scale="categorical", order=tuple(METHODS))
    return replace(question, axis=axis, kind="axis")


def prepare_trials(trials: pd.DataFrame, question: Question) -> pd.DataFrame:
    """Return the trials with the columns that the question's figure needs but MLflow does not hold."""
    column = question.axis.column
    if question.kind == "search":
        return number_trials(trials)
    if question.kind == "convergence":
        return with_relative_loss(trials)
    if column == PROBE and PROBE not in trials:
        return by_probe(trials)
    if column == "method" and "method" not in trials:
        return trials.assign(method="")
    if column != POINT or "trial" not in trials:
        return trials
    return trials.assign(**{POINT: [re.sub(r"-r\d+$", "", str(name)) for name in trials["trial"]]})


def _candidates(trials: pd.DataFrame, question: Question, score: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the trials of the candidate settings, and sentences on the omitted settings with the reasons."""
    column = question.axis.column if question.kind == "search" or "method" not in trials else "method"
    candidates, reasons = trials, []
    is_proven = trials["guarantee"] == PROVEN
    is_trained = trials["num_steps"] > 0 if "num_steps" in trials else is_proven | True
    masks = {"not trained": is_trained, "no proven guarantee": is_proven, "no score": trials[score].notna()}
    for reason, mask in masks.items():
        dropped_rows = candidates[~mask.loc[candidates.index]]
        if not len(dropped_rows) or len(dropped_rows) == len(candidates):
            continue
        candidates = candidates.drop(dropped_rows.index)
        reasons.append((reason, dropped_rows))
    sentences = []
    for reason, dropped_rows in reasons:
        published_rows = dropped_rows[dropped_rows["guarantee"] == AS_PUBLISHED]
        names = list(dict.fromkeys(value_text(_python_value(value)) for value in dropped_rows[column]))
        shared_names = set(names) & {value_text(_python_value(value)) for value in candidates[column]}
        subject = (
            f"{len(dropped_rows)} training{'s' * (len(dropped_rows) != 1)} without noise"
            if shared_names and published_rows.empty
            else list_names(names)
        )
        sentences.append(f"Left out, {reason}: {subject}.")
    return candidates, tuple(sentences)


def _references(trials: pd.DataFrame, candidates: pd.DataFrame, score: str) -> dict[str, float]:
    """Return the mean scores of `Answer.references`; of a baseline, the highest over the networks."""
    networks = candidates[NETWORK].map(str) if NETWORK in candidates else pd.Series("", candidates.index)
    references = {}
    for baseline in BASELINES:
        if has_values(candidates, baseline.prefix + score):
            means = candidates[baseline.prefix + score].groupby(networks).mean()
            references[baseline.label.removesuffix(" alone")] = float(means.max())
    free = trials[(trials["guarantee"] == "none") & (trials[_EPSILON] == math.inf) & trials[score].notna()]
    free = free[free["num_steps"] > 0] if "num_steps" in free else free
    if len(free) and (candidates["guarantee"] == PROVEN).any():
        keys = [name for name in (ORDER, "method", NETWORK) if name in free]
        references[_WITHOUT_PRIVACY] = float(free.groupby(keys)[score].mean().max())
    return references


def _shared_number(trials: pd.DataFrame, name: str, kind: Any) -> Any:
    """Return the number in a column, as `kind`, if all trials have the same; else None."""
    return kind(trials[name].iloc[0]) if has_values(trials, name) and trials[name].nunique() == 1 else None


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """Settings that are compared with each other, as their trials.

    Attributes:
      trials: the trials of all settings.
      question: the sweep's question.
      score: the score by which they are compared.
      level: as in `dashboards.compose.decision.Layout`.
      outcomes: by the trial's name, what each public test record contributes to its scores.
      is_paired: as `paired` in `answer_of`.
    """

    trials: pd.DataFrame
    question: Question
    score: str
    level: float
    outcomes: Mapping[str, Outcomes]
    is_paired: bool

    @cached_property
    def keys(self) -> list[str]:
        """Columns that distinguish settings, the axis first."""
        keys = [name for name in cell_columns(self.trials, self.question) if name != "guarantee"]
        return searched_columns(self.trials) or keys if self.question.kind == "search" else keys

    @cached_property
    def cells(self) -> list[pd.DataFrame]:
        """The trials of each setting, in the order of the axis; for a search, of their proposal."""
        cells = [cell for _, cell in self.trials.groupby(self.keys, dropna=False)]
        if self.question.kind == "search":
            cells.sort(key=lambda cell: float(cell["trial_number"].min()))
        return cells

    @cached_property
    def starts(self) -> list[tuple[str, pd.Series]]:
        """The start's name and its score for each trial, for each setting with a scored start."""
        return [start for cell in self.cells if (start := start_of(cell, self.score)) is not None]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Scores, `[repeats, settings]`; NaN where a setting lacks a repeat."""
        return pd.concat([_repeat_means(cell, cell[self.score]) for cell in self.cells], axis=1)

    @property
    def num_repeats(self) -> int:
        """Number of repeats that all settings have."""
        return len(self.layout.scores) if self.is_paired else min(map(len, self.cells))

    @property
    def num_left_out(self) -> int:
        """Number of repeats that are not used because some setting lacks them."""
        return len(self.scores) - self.num_repeats if self.is_paired else 0

    @cached_property
    def layout(self) -> Layout:
        """The scores of all settings over the common repeats, with starts and test records if known."""
        complete, noise_variance = self.scores.dropna(), _noise_variance(self.trials, self.score)
        if not self.is_paired:
            return self._unpaired_layout(noise_variance)
        starts = None
        if len(self.starts) == len(self.cells):
            means = [
                _repeat_means(cell, start) for cell, (_, start) in zip(self.cells, self.starts, strict=True)
            ]
            starts = pd.concat(means, axis=1).reindex(complete.index).dropna().to_numpy(float)
        return Layout(
            scores=complete.to_numpy(float) if len(complete) else self.scores.mean().to_numpy(float)[None],
            starts=starts if starts is not None and len(starts) == len(complete) > 0 else None,
            records=self._record_spread(list(complete.index)),
            noise_variance=noise_variance,
            level=self.level,
        )

    def _unpaired_layout(self, noise_variance: float) -> Layout:
        """Return the layout of settings that share no repeats, or have none.

        Gains over the start are included if all starts were scored, but never for a search.
        """
        cells, counts = self.cells, tuple(map(len, self.cells))
        outcomes = [self._mean_outcomes(cell, self.score) for cell in cells]
        means = [mean for mean in outcomes if mean is not None]
        starts = [start for _, start in self.starts]
        has_gains = self.question.kind != "search" and len(starts) == len(cells)
        gains = [cell[self.score] - start for cell, start in zip(cells, starts, strict=False)]
        return Layout(
            scores=np.array([[float(cell[self.score].mean()) for cell in cells]]),
            starts=np.array([[float(start.mean()) for start in starts]]) if has_gains else None,
            records=RecordSpread.of(np.stack(means)[None]) if len(means) == len(cells) else None,
            noise_variance=noise_variance,
            level=self.level,
            within=_variance_within([cell[self.score] for cell in cells]),
            counts=counts,
            within_gains=(_variance_within(gains)[0], min(counts) - 1) if has_gains else None,
        )

    def _record_spread(self, repeats: Sequence[Any]) -> RecordSpread | None:
        """Return the spread over records in these repeats; None unless all scored the same records."""
        if not self.outcomes or not repeats:
            return None
        parts = [[cell[cell["repeat"] == repeat] for cell in self.cells] for repeat in repeats]
        outcomes = [[self._mean_outcomes(part, self.score) for part in row] for row in parts]
        if any(means is None for row in outcomes for means in row):
            return None
        if (prefix := start_prefix({name for name, _ in self.starts})) is not None:
            starts = [[self._mean_outcomes(part, prefix + self.score) for part in row] for row in parts]
            if all(means is not None for row in starts for means in row):
                outcomes = [[*row, *start] for row, start in zip(outcomes, starts, strict=True)]
        return RecordSpread.of(np.array(outcomes, dtype=float))

    def _mean_outcomes(self, rows: pd.DataFrame, score: str) -> NDArray[np.float64] | None:
        """Return each record's mean outcome over trials; None if not all scored the same records."""
        names = list(map(str, rows["trial"])) if "trial" in rows else []
        outcomes = [self.outcomes[name] for name in names if name in self.outcomes]
        if not names or len(outcomes) < len(names) or any(score not in trial.scores for trial in outcomes):
            return None
        reference = next(iter(self.outcomes.values())).record_ids
        if any(not np.array_equal(trial.record_ids, reference) for trial in outcomes):
            return None
        means: NDArray[np.float64] = np.mean([trial.scores[score] for trial in outcomes], axis=0)
        return means.astype(float)

    def choice(self, at: str) -> Choice:
        """Return the decision among the settings; `at` names the ε that they share."""
        layout, names = self.layout, [self._setting_name(cell) for cell in self.cells]
        start = start_text({name for name, _ in self.starts})
        costs = _costs(self.trials, self.cells)
        best, recommendation = int(layout.means.argmax()), layout.recommend(costs)
        settings = tuple(
            Setting(
                name=names[number],
                values={name: _python_value(cell[name].iloc[0]) for name in self._setting_columns},
                mean=float(layout.means[number]),
                cost=costs[number],
                over_start=layout.over_start(number, start),
                over_best=None if number == best else layout.between(number, best, names[best]),
                trials=tuple(map(str, cell["trial"])) if "trial" in cell else (),
            )
            for number, cell in enumerate(self.cells)
        )
        contenders = [number for number, setting in enumerate(settings) if setting.is_contender]
        order = sorted(range(len(names)), key=lambda number: -layout.means[number])
        num_repeats_needed = layout.repeats_to_show(*order[:2]) if len(contenders) > 1 else None
        return Choice(
            at=at,
            settings=settings,
            best=names[best],
            take=names[recommendation],
            within_noise=self._names_text(contenders),
            sources=layout.sources,
            num_repeats_needed=num_repeats_needed,
        )

    def _names_text(self, numbers: Sequence[int]) -> str:
        """Return the names of the settings with these indices; adjacent numbers on an axis become a range."""
        names = [self._setting_name(self.cells[number]) for number in numbers]
        has_one_axis = len(self._varying_columns) <= 1 and self.question.axis.scale != "categorical"
        in_a_row = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
        if not (has_one_axis and in_a_row) or self.question.kind == "search":
            return list_names(names)
        last = value_text(_python_value(self.cells[numbers[-1]][self.question.axis.column].iloc[0]))
        return f"{names[0]} to {last}"

    @property
    def _setting_columns(self) -> list[str]:
        """Columns that define a setting: the searched columns, or the axis and all columns that vary."""
        if self.question.kind == "search":
            return searched_columns(self.trials)
        return list(dict.fromkeys([self.question.axis.column, *self._varying_columns]))

    @property
    def _varying_columns(self) -> list[str]:
        columns = [self.question.axis.column if name == ORDER else name for name in self.keys]
        return [name for name in columns if self.trials[name].map(str).nunique() > 1]

    def _setting_name(self, cell: pd.DataFrame) -> str:
        if self.question.kind == "search":
            first = f"trial-{value_text(_python_value(cell['trial_number'].min()))}"
            return first if len(cell) == 1 else f"{first} ({len(cell)} trainings)"
        names = self._varying_columns or [self.question.axis.column]
        first, *others = (self._value_name(name, _python_value(cell[name].iloc[0])) for name in names)
        return first + (f" at {', '.join(others)}" if others else "")

    def _value_name(self, column: str, value: Any) -> str:
        is_axis = self.question.axis.column == column and self.question.axis.scale == "categorical"
        if is_axis or column == "method":
            return value_text(value)
        if column == SAMPLED:
            return f"{value_text(value)} sampled"
        return f"{symbol(column)} = {value_text(value)}"


def _repeat_means(cell: pd.DataFrame, values: pd.Series) -> pd.Series:
    return values.groupby(cell["repeat"]).mean()


def _variance_within(cells: Sequence[pd.Series]) -> tuple[float, int]:
    """Return the variance of the values within settings, pooled over them, and its degrees of freedom."""
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in cells)
    degrees = sum(len(values) - 1 for values in cells)
    return (squares / degrees if degrees else 0.0), degrees


def _noise_variance(rows: pd.DataFrame, score: str) -> float:
    """Return the variance of the noise in one value of a noised score; zero for any other score."""
    columns = ("score_noise_multiplier", "num_scored_public")
    if score not in scores_of(Family.NOISED) or not all(has_values(rows, name) for name in columns):
        return 0.0
    multiplier, num_scored = (float(rows[name].iloc[0]) for name in columns)
    return (multiplier / num_scored) ** 2


def _costs(trials: pd.DataFrame, cells: Sequence[pd.DataFrame]) -> list[Cost]:
    """Return the cost of one training of each setting; zero views if methods or networks differ."""
    is_alike = all(trials[name].nunique() <= 1 for name in ("method", NETWORK) if name in trials)
    return [
        Cost(
            epsilon=_rounded(float(cell[_EPSILON].iloc[0])),
            num_views=_num_views(cell.iloc[0]) if is_alike else 0.0,
        )
        for cell in cells
    ]


def _num_views(row: pd.Series) -> float:
    number = {name: float(row[name]) for name in _FACTORS if name in row and pd.notna(row[name])}
    batch = number.get("expected_batch_size", math.nan)
    if math.isnan(batch):
        batch = number.get("sampling_prob", 1.0) * number.get("num_records_public", 1.0)
    return _rounded(number.get("num_steps", 1.0) * batch * (2 + number.get("num_augmentations", 0.0)))


_FACTORS = ("expected_batch_size", "sampling_prob", "num_records_public", "num_steps", "num_augmentations")


def _rounded(value: float) -> float:
    """Round to six significant digits, so that float errors make no two equal costs differ."""
    return float(f"{value:.6g}")


def _python_value(value: Any) -> Any:
    """Return a NumPy scalar as the Python value; any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value
