"""The privacy statement: a sweep's guarantee, on one page for people and as JSON for machines.

A statement separates the ε of one training from the ε of the whole sweep. It names the theorem behind the
whole sweep's ε, and states every lack of a guarantee. It never calls a sweep private unless all released
trainings are `proven`. For a sealed sweep it contains nothing that reveals the number of trials.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from dpgcl_core.accounting.tuning.modes import OPEN
from dpgcl_core.addresses import masked_text
from dpgcl_core.errors import ConfigError, require_choice
from dpgcl_core.release.markdown import escaped

if TYPE_CHECKING:
    from dpgcl_core.accounting.attacks import AttackBounds
    from dpgcl_core.accounting.tuning.cost import TuningCost
    from dpgcl_core.ledger.report import LedgerStatement
    from dpgcl_core.mechanism.mechanism import Mechanism
    from dpgcl_core.mechanism.method import Method

PROVEN = "proven"
LABELS = (PROVEN, "as-published", "none")
RESEARCH = "research: public data"
POISSON = "each record joins each step independently (Poisson), drawn in secret, afresh in every training"
POISSON_OF_GROUPS = POISSON.replace("each record", "each group of slots")
_MAX_TEXTS = 8
_PACKAGES = ("dpgcl", "dp-accounting", "torch", "numpy", "scipy", "ray", "mlflow")
_RELEASED = {
    "open": "every trial: metrics, models and the tracking pages",
    "sealed": "only the best trial; the number of trials is secret",
    "sealed-threshold": "the first trial to reach the public score, if any; the number of trials is secret",
}
_WRITTEN = {"num_started": "started"}  # keys of a statement that differ from the attributes' names


@dataclass(frozen=True, kw_only=True)
class OpenTrials:
    """Counts of an open sweep's trials; a sealed sweep must not reveal its own.

    Attributes:
      planned: number of trials set in advance.
      without_guarantee: number of planned trials whose label is not `proven`.
      references: number of trials in `without_guarantee` that train without noise, for comparison; they
        claim no privacy.
      as_published: number of trials in `without_guarantee` whose label is `as-published`.
      num_started: number of trials that may have drawn a step.
      steps_planned: number of steps of all proven trials, set in advance, steps for restarts included.
      steps_repeated: number of steps that restarts may have repeated, charged on top.
    """

    planned: int
    without_guarantee: int
    num_started: int
    steps_planned: int
    steps_repeated: int
    references: int = 0
    as_published: int = 0

    @property
    def proven(self) -> int:
        """The number of planned trials with a guarantee."""
        return self.planned - self.without_guarantee

    def without_guarantee_text(self) -> str:
        """Return the numbers and kinds of the trials without a guarantee; "" if there are none."""
        seeded = self.without_guarantee - self.references - self.as_published
        kinds = [
            (self.references, "reference" + "s" * (self.references != 1) + " without noise"),
            (self.as_published, "as published, not proven"),
            (seeded, "seeded, with no guarantee"),
        ]
        return ", ".join(f"{number} {kind}" for number, kind in kinds if number)


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """The guarantee of one sweep, and all facts that it depends on.

    Attributes:
      sweep, dataset: the names of the sweep and the data set.
      data_are_private: whether the data are private. If not, the statement labels them `research: public
        data` and contains the same numbers.
      guarantee_label: `proven` only if every released training is `proven`.
      num_records_public: n; `num_records_source` states its source.
      cost: the cost of one training and of the whole sweep, repeated steps included; None if no training is
        proven.
      budget: the cost as set in advance.
      mechanisms: the distinct mechanisms of the trainings.
      scores: how the scores were evaluated.
      unit_column: the column in which equal values mark rows of one record; None if each row is one record.
      row: the meaning of a row of the data, in words.
      starts: the sweeps on the same records whose models this sweep starts from. Only the ledger's ε
        includes their cost.
      earlier: the sweeps whose results this search starts from; `cost` includes their cost.
      randomness: the source of sampling, permutations and noise: `DrawSource.description`.
      mode: the release mode: open, sealed or sealed-threshold.
      versions: the versions of the software.
      trials: the counts of an open sweep's trials.
      ledger: the ledger's part of the statement, or None; `ledger_note` then gives the reason.
      notes: other facts that a reader must know.

    Raises:
      ConfigError: the label is unknown, or a sealed statement comes with numbers of trials.
    """

    sweep: str
    dataset: str
    data_are_private: bool
    guarantee_label: str
    num_records_public: int
    num_records_source: str
    cost: TuningCost | None
    budget: TuningCost | None
    mechanisms: Sequence[Mechanism]
    scores: str
    randomness: str
    mode: str = OPEN
    unit_column: str | None = None
    row: str = "row"
    starts: Sequence[str] = ()
    earlier: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: software_versions())
    trials: OpenTrials | None = None
    ledger: LedgerStatement | None = None
    ledger_note: str = "no ledger"
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_choice("guarantee label", self.guarantee_label, LABELS)
        require_choice("release mode", self.mode, _RELEASED)
        if self.mode != OPEN and self.trials is not None:
            raise ConfigError(
                f"the statement of a {self.mode} sweep must not reveal counts of trials; got {self.trials}. "
                "Leave trials out"
            )

    @property
    def promises(self) -> bool:
        """Whether the whole sweep has an (ε, δ) guarantee."""
        return self.guarantee_label == PROVEN and self.cost is not None and self.cost.accounted

    @property
    def unit(self) -> str:
        """The meaning of one record, in words."""
        if self.unit_column is None:
            return f"one {self.row}; a person with k of them gets group privacy (k times)"
        rows = "rows, images and labels," if "label" in self.row else "rows"
        return f"all {rows} with the same value of {self.unit_column}"

    @property
    def conditions(self) -> list[str]:
        """The conditions on both neighbouring data sets, besides the relation, that some methods need."""
        from dpgcl_core.mechanism.numbers import in_all  # here, so that a statement loads no mechanisms

        covered = [m.rules.num_records_covered(m) for m in self.mechanisms]
        return [each.text for each in in_all(each for each in covered if each is not None)]

    def headline(self) -> str:
        """Return the guarantee, or the lack of one, in one sentence."""
        cost = self.cost
        if not self.data_are_private:
            return f"Public data: nothing to protect. {self._research_text()}."
        if self.guarantee_label != PROVEN:
            count = self.trials.without_guarantee if self.trials else 0
            some = f"{count} of {self.trials.planned} trainings have" if self.trials else "the training has"
            label = self.guarantee_label
            rest = "; the numbers below cover only the others" if cost is not None else ""
            return f"NO GUARANTEE for this sweep as a whole: {some} none (label `{label}`){rest}."
        if cost is None or not cost.accounted or cost.tuned_epsilon is None:
            reason = cost.reason if cost is not None else "nothing was trained with a guarantee"
            return f"NO GUARANTEE for this sweep as a whole: the cost of tuning is not accounted ({reason})."
        promise = (
            f"(ε = {epsilon_text(cost.tuned_epsilon)}, δ = {delta_text(cost.delta)})-differentially "
            f"private for {_relation_phrase(cost.neighboring_relation)}"
        )
        if self.conditions:
            promise += f" among {' and '.join(self.conditions)}"
        return f"All that this sweep releases together is {promise}{self._earlier_cost_text()}."

    def _research_text(self) -> str:
        """Return the cost that the sweep would have on private data, and its trials without guarantee."""
        cost, trials, parts = self.cost, self.trials, list[str]()
        if cost is not None:
            sign = "=" if len(cost.planned) == 1 else "up to"
            number = "One training" if trials is None or trials.proven == 1 else f"{trials.proven} trainings"
            parts.append(f"{number} at ε {sign} {epsilon_text(cost.training_epsilon)}")
            if cost.tuned_epsilon is None:
                parts[0] += f", together not accounted ({cost.reason})"
            elif trials is None or trials.proven > 1:
                whole = "together" if trials is not None else "with the choice among secret trials"
                parts[0] += f", {whole} {epsilon_text(cost.tuned_epsilon)}"
            parts[0] += f", at δ = {delta_text(cost.delta)}"
        if trials is not None and trials.without_guarantee:
            parts.append(trials.without_guarantee_text())
        return "; ".join(parts) or "Nothing was trained with noise"

    def _earlier_cost_text(self) -> str:
        """Return a note on the cost of models and results that the sweep starts from; "" without any."""
        starts, earlier = " and ".join(self.starts), " and ".join(self.earlier)
        fallback = "no ε" if self.ledger is None else "only the ledger's (ε, δ)"
        return (
            f", on top of the cost of sweep {starts}, whose model it starts from; the ledger's (ε, δ) covers "
            "both" * bool(starts)
        ) + (
            f", together with sweep {earlier}, whose results it starts from. This holds if those results did "
            "not decide its number of trials, q, σ and T, as if all had been planned together; otherwise "
            f"{fallback} covers them together" * bool(earlier)
        )

    def lines(self) -> list[tuple[str, str]]:
        """Return the page's lines as (name, value) pairs, in order."""
        lines = [
            ("Sweep", self.sweep),
            ("Data", f"{self.dataset} ({'private' if self.data_are_private else RESEARCH})"),
            ("Release mode", f"{self.mode}: {_RELEASED[self.mode]}"),
            ("Guarantee label", self._label_text()),
        ]
        lines += self._cost_lines() + self._mechanism_lines()
        lines += [
            ("One record", self.unit),
            ("Number of records", f"{self.num_records_public} ({self.num_records_source})"),
            *[("Guarantee among", condition) for condition in self.conditions],
            ("Randomness", self.randomness),
            ("Scores", self.scores),
            ("Ledger", self._ledger_text()),
            ("Software", ", ".join(f"{name} {value}" for name, value in self.versions.items())),
        ]
        return lines

    def _label_text(self) -> str:
        if self.trials is None or not self.trials.without_guarantee:
            return self.guarantee_label
        which = self.trials.without_guarantee_text()
        return f"{self.guarantee_label}: {self.trials.proven} of {self.trials.planned} are proven; {which}"

    def _cost_lines(self) -> list[tuple[str, str]]:
        cost, budget = self.cost, self.budget
        if cost is None:
            return [("ε", "none: no training has a guarantee")]
        scope = "" if self.guarantee_label == PROVEN else " (of the trainings with a guarantee)"
        tuned = "not accounted" if cost.tuned_epsilon is None else epsilon_text(cost.tuned_epsilon)
        lines = [
            ("Neighbouring data sets", cost.neighboring_relation),
            ("δ", delta_text(cost.delta)),
            (f"ε of one training{scope}", epsilon_text(cost.training_epsilon)),
            (f"ε of the whole sweep, tuning included{scope}", tuned),
            *[("Best attack on everything released", bounds.text()) for bounds in self._attack_bounds()],
            ("Theorem", cost.theorem),
            ("Restarts", self._restarts_text()),
        ]
        if cost.reason is not None:
            lines.append(("Not accounted, because", cost.reason))
        if cost.rdp_epsilon is not None and math.isfinite(cost.rdp_epsilon):
            lines.append(("The same by RDP, as a cross-check", epsilon_text(cost.rdp_epsilon)))
        if cost.law is not None:
            lines.append(("Law of the number of trials", _law_text(cost.law)))
        if budget is not None and budget.tuned_epsilon is not None:
            lines.append(
                ("Budget set in advance", f"ε = {epsilon_text(budget.tuned_epsilon)}{self._trials_text()}")
            )
        return lines

    def _attack_bounds(self) -> list[AttackBounds]:
        """Return the bounds on attacks, in a list; empty if the sweep is not accounted."""
        from dpgcl_core.accounting.attacks import AttackBounds  # imported here, as it loads the accountants

        bounds = None if self.cost is None else AttackBounds.from_cost(self.cost)
        return [] if bounds is None else [bounds]

    def _trials_text(self) -> str:
        trials = self.trials
        if trials is None:
            return ""
        trainings = f"{trials.proven} training{'s' * (trials.proven != 1)}"
        text = f" for {trainings}, {trials.steps_planned} steps in total"
        if self.num_restart_steps is not None and not trials.steps_repeated:
            return f"{text}, including steps for restarts"
        return f"{text}; restarts repeated up to {trials.steps_repeated} additional steps"

    @property
    def num_restart_steps(self) -> int | None:
        """R, the repeated steps charged in advance per training; None if charged when they occur."""
        found = {m.num_restart_steps for m in self.mechanisms if m.is_private}
        if not found or None in found:
            return None
        return max(each for each in found if each is not None)

    def _restarts_text(self) -> str:
        """Return the condition under which ε holds if restarts of trainings depend on observed results."""
        if self.mode != OPEN:
            return "none: a stopped training counts as the worst score"
        if restarts := self.num_restart_steps:
            return (
                f"up to R = {restarts} steps of each training may be drawn again. ε always includes them, so "
                "it holds even if restarts depend on observed results. Restoring an older copy of the "
                "sweep's folder defeats the count"
            )
        if self.num_restart_steps == 0:
            return "no step is drawn again: a stopped training is left out"
        if self.ledger is not None:
            return (
                "ε counts the steps drawn, including repeats. It holds if no restart depended on observed "
                "results. Otherwise only the ledger's cap holds: sign the cap"
            )
        return "ε counts the steps drawn, with repeats. It holds if no restart depended on observed results"

    def _mechanism_lines(self) -> list[tuple[str, str]]:
        kinds = [
            f"{m.rules.title}: q = {m.sampling_prob:.5g}, σ = {m.noise_multiplier:.5g}, T = {m.num_steps}, "
            f"S = {m.group_size}, C = {m.l2_clip_norm:g} ({m.clipping} clipping), "
            f"sensitivity = {m.sensitivity:g}{_cap_text(m)}"
            for m in self.mechanisms
        ]
        lines = [("Mechanism", _first_few(list(dict.fromkeys(kinds))))] if kinds else []
        planned = self.cost.planned if self.cost is not None else ()
        joint = sorted(
            {each["joint_noise_multiplier"] for each in planned if each.get("joint_noise_multiplier")}
        )
        if joint:
            shown = ", ".join(f"{noise:.5g}" for noise in joint)
            lines.append(("Noised SNR", f"the first step, which releases it, is accounted at σ = {shown}"))
        return lines + [
            (name, text)
            for name in ("Sampling", "Grouping", "Sensitivity")
            if (text := self._texts_of_methods(name.lower()))
        ]

    def _texts_of_methods(self, name: str) -> str:
        """Return the methods' texts on sampling, grouping or sensitivity, by method if they differ."""
        texts: dict[str, list[str]] = {}
        facts = ((m.rules, m.neighboring_relation, m.num_shards) for m in self.mechanisms)
        for method, relation, num_shards in dict.fromkeys(facts):
            text = _METHOD_TEXTS[name](method, relation)
            if name == "sampling" and num_shards > 1:
                text += f", in each of {num_shards} ranges of the slots, whose records only one worker gets"
            texts.setdefault(text, []).append(method.title)
        if len(texts) <= 1:
            return "".join(texts)
        return "; ".join(f"{', '.join(titles)}: {text}" for text, titles in texts.items())

    def _ledger_text(self) -> str:
        if self.ledger is None:
            return self.ledger_note
        head, num_raised = self.ledger.head, self.ledger.num_raised
        times = "once" if num_raised == 1 else f"{num_raised} times"
        raise_text = f"; the cap was raised {times}, a decision outside the guarantee" if num_raised else ""
        return (
            f"data set {self.ledger.dataset_id!r}: everything charged to it stays within "
            f"(ε = {rounded_up(self.ledger.epsilon, 6)}, δ = {delta_text(self.ledger.delta)}) by "
            f"{self.ledger.rule}{raise_text}; "
            f"ledger {head.ledger_id}, {head.num_entries} rows, head {head.head_hash}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the statement as plain values; `ledger verify --against` reads `ledger.head`."""
        values = {name: value for name, value in vars(self).items() if name != "mechanisms"}
        for name in ("cost", "budget", "trials", "ledger"):
            if values[name] is not None:
                values[name] = {_WRITTEN.get(key, key): value for key, value in asdict(values[name]).items()}
        if self.ledger is not None:
            values["ledger_note"] = None
        return values | {
            "headline": self.headline(),
            "attacks": next(map(asdict, self._attack_bounds()), None),
            "data": "private" if self.data_are_private else RESEARCH,
            "promises": self.promises,
            "released": _RELEASED[self.mode],
            "unit": self.unit,
            "conditions": self.conditions,
            **{name: self._texts_of_methods(name) for name in _METHOD_TEXTS},
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "mechanisms": [asdict(m) | {"sensitivity": m.sensitivity} for m in self.mechanisms],
        }

    def to_json(self) -> str:
        """Return the statement as JSON."""
        values = self.as_dict()
        del values["data_are_private"]
        return json.dumps(_masked_values(values), indent=1, ensure_ascii=False, default=str)

    def to_markdown(self) -> str:
        """Return the statement as a page of Markdown."""
        rows = [f"| {escaped(name)} | {escaped(masked_text(value))} |" for name, value in self.lines()]
        notes = [f"- {escaped(masked_text(note))}" for note in self.notes]
        parts = [
            f"# Privacy statement: {escaped(self.sweep)}",
            f"**{escaped(self.headline())}**",
            "\n".join(["| | |", "| --- | --- |", *rows]),
            *(["\n".join(notes)] if notes else []),
        ]
        return "\n\n".join(parts) + "\n"


def software_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that the numbers depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def rounded_up(value: float, num_digits: int) -> str:
    """Return ε or δ with `num_digits` significant digits, rounded up: no text states too strong a guarantee.

    >>> rounded_up(0.0015151, 3), rounded_up(1e-05, 3), rounded_up(9.9999, 4), rounded_up(math.inf, 4)
    ('0.00152', '1e-05', '10', 'inf')
    """
    context = Context(prec=num_digits, rounding=ROUND_CEILING)
    return f"{float(context.create_decimal(repr(float(value)))):.{num_digits}g}"


def epsilon_text(epsilon: float) -> str:
    """Return ε with four decimals, rounded up.

    >>> epsilon_text(1.00001), epsilon_text(3.0000000000000004)
    ('1.0001', '3.0001')
    """
    if not math.isfinite(epsilon):
        return "∞"
    return str(Decimal(repr(float(epsilon))).quantize(Decimal("0.0001"), rounding=ROUND_CEILING))


def delta_text(delta: float) -> str:
    """Return δ with four significant digits, rounded up, so that the same δ always has the same text.

    >>> delta_text(1e-05), delta_text(1 / 10_513)
    ('1e-05', '9.513e-05')
    """
    return rounded_up(delta, 4)


def _masked_values(value: Any) -> Any:
    """Return the values with every address in a text masked."""
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, Mapping):
        return {name: _masked_values(each) for name, each in value.items()}
    return [_masked_values(each) for each in value] if isinstance(value, (list, tuple)) else value


def _first_few(texts: list[str]) -> str:
    """Join the first few of many texts; `privacy_statement.json` has all of them."""
    more = len(texts) - _MAX_TEXTS
    return "; ".join(texts[:_MAX_TEXTS]) + (f"; and {more} more (in the JSON)" if more > 0 else "")


def _cap_text(mechanism: Mechanism) -> str:
    return "" if mechanism.batch_cap is None else f", batch cap = {mechanism.batch_cap}"


def _sampling_text(method: Method, relation: str) -> str:
    known = {"Poisson": POISSON, "Poisson, of groups": POISSON_OF_GROUPS}
    return known.get(method.sampling, f"{method.sampling}, drawn in secret")


def _sensitivity_text(method: Method, relation: str) -> str:
    return (
        f"{_relation_phrase(relation)} changes the clipped sum by at most "
        f"{method.sensitivity_formula}; proof in {method.proof}"
    )


_METHOD_TEXTS: Mapping[str, Callable[[Method, str], str]] = {
    "sampling": _sampling_text,
    "grouping": lambda method, relation: method.grouping,
    "sensitivity": _sensitivity_text,
}


def _relation_phrase(relation: str) -> str:
    """Return the relation as a phrase for a sentence.

    >>> _relation_phrase("add or remove one record")
    'adding or removing one record'
    >>> _relation_phrase("replace one record or zero out one record")
    'replacing one record or zeroing out one record'
    """
    verbs = {"add or remove": "adding or removing", "replace": "replacing", "zero out": "zeroing out"}
    for verb, noun in verbs.items():
        relation = relation.replace(f"{verb} one", f"{noun} one")
    return relation


_LAW_TITLES = {"tnb": "truncated negative binomial", "poisson": "Poisson"}
_PARAMETER_FORMATS = {
    **{"eta": "η = {}", "gamma": "γ = {}", "prob": "p = {}", "mean": "mean {}"},
    **{"max_trials": "at most {}", "halting_prob": "with probability {}", "max_mean": "mean at most {}"},
}
_UNCAPPED = "uncapped_"


def _law_text(law: Mapping[str, str | float]) -> str:
    """Return the law of the number of trials in words.

    >>> _law_text({"name": "tnb", "eta": 1.0, "gamma": 0.2, "mean": 5.0})
    'truncated negative binomial, η = 1, γ = 0.2, mean 5'
    >>> _law_text({"name": "truncated poisson", "uncapped_mean": 5.0, "max_trials": 12, "mean": 4.9})
    'Poisson, mean 5; cut off: at most 12, mean 4.9'
    """
    name = str(law["name"]).removeprefix("truncated ")

    def parameters_text(uncapped: bool) -> str:
        prefix = _UNCAPPED if uncapped else ""
        values = {key.removeprefix(prefix): law[key] for key in law if key.startswith(_UNCAPPED) == uncapped}
        return ", ".join(
            _PARAMETER_FORMATS.get(key, f"{key} = {{}}").format(_short(values[key]))
            for key in values
            if key != "name"
        )

    title = _LAW_TITLES.get(name, name)
    if uncapped_text := parameters_text(uncapped=True):
        return f"{title}, {uncapped_text}; cut off: {parameters_text(uncapped=False)}"
    return f"{title}, {parameters_text(uncapped=False)}"


def _short(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
