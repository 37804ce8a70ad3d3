"""What a data set's cap still holds: in the unit of its rule, and in trainings that somebody has in mind.

What is left has no ε: how much ε a further step costs depends on all that is charged with it, and on the
rule. So it is told as the rule counts it, and as the number of trainings that the rule itself would admit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from dpgcl_core.accounting.composition import calibrate_noise_multiplier
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import ConfigError
from dpgcl_core.ledger.account import MOST_TRAININGS
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.mechanism.numbers import check_delta, default_delta


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that is asked for.

    Attributes:
      step_class: of every step.
      num_steps: T.
      epsilon, delta: of it alone, by PLD.
    """

    step_class: StepClass
    num_steps: int
    epsilon: float
    delta: float

    @classmethod
    def of(
        cls, num_records_public: int, batch_size: float, num_steps: int, epsilon: float, delta: float | None
    ) -> Self:
        """Return the training of a target ε, calibrated as in a sweep.

        Raises:
          ConfigError: a number is out of range, or no noise meets the target.
        """
        if not 0 < batch_size <= num_records_public:
            raise ConfigError(
                f"--expected-batch-size must be in (0, {num_records_public}], the registered number of "
                f"records; got {batch_size:g}"
            )
        if num_steps < 1:
            raise ConfigError(f"--num-steps must be at least 1; got {num_steps}")
        delta = default_delta(num_records_public) if delta is None else delta
        check_delta(delta, num_records_public)
        prob = batch_size / num_records_public
        found = calibrate_noise_multiplier(
            sampling_prob=prob, num_steps=num_steps, target_epsilon=epsilon, target_delta=delta
        )
        step_class = StepClass(prob, found.noise_multiplier)
        return cls(step_class=step_class, num_steps=num_steps, epsilon=epsilon, delta=delta)


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """What is left of a cap.

    Attributes:
      dataset_id, cap: the data set and its budget.
      closed: whether nothing is admitted any more, for rows were lost.
      rdp, rdp_budget: left and allowed at the filter's order; None with quotas.
      steps: left of every quota.
      sealed_epsilon, sealed_delta: left of what is set aside for sealed sweeps by basic composition.
      training: that was asked for.
      num_trainings: so many more of it the rule admits.
    """

    dataset_id: str
    cap: Cap
    closed: bool
    rdp: float | None
    rdp_budget: float | None
    steps: Mapping[StepClass, int]
    sealed_epsilon: float
    sealed_delta: float
    training: Training | None = None
    num_trainings: int | None = None

    def lines(self) -> Iterator[str]:
        """Yield it for people."""
        rule = "step quotas" if self.cap.quotas else f"RDP filter at order {self.cap.order:g}"
        yield f"{self.dataset_id}: cap ε = {self.cap.epsilon:g} at δ = {self.cap.delta:.4g}, {rule}"
        if self.closed:
            yield "  left: nothing, for rows were lost, and it is closed for good"
            return
        if self.rdp is not None and self.rdp_budget is not None:
            share = self.rdp / self.rdp_budget if self.rdp_budget else 0.0
            yield f"  left: RDP {self.rdp:.6g} of {self.rdp_budget:.6g} ({share:.1%})"
        for step_class, num_steps in self.steps.items():
            yield f"  left: {num_steps} steps of {_class_text(step_class)}"
        if self.cap.sealed_epsilon:
            yield (
                "  left for sealed sweeps by basic composition: "
                f"({self.sealed_epsilon:g}, {self.sealed_delta:g})"
            )
        if self.training is not None:
            yield self._training_text(self.training)

    def _training_text(self, training: Training) -> str:
        number = self.num_trainings or 0
        more = "or more " if number >= MOST_TRAININGS else ""
        return (
            f"  fits: {number} {more}training{'s' * (number != 1)} of ε = {training.epsilon:g} at δ = "
            f"{training.delta:.4g} each ({_class_text(training.step_class)}, T = {training.num_steps})"
        )

    def to_json(self) -> str:
        """Return it as one JSON object."""
        training = self.training
        about = None if training is None else {**vars(training), "step_class": vars(training.step_class)}
        quotas = [{**vars(each), "num_steps": num} for each, num in self.steps.items()]
        values = {
            name: value for name, value in vars(self).items() if name not in ("cap", "steps", "training")
        }
        cap = {"epsilon": self.cap.epsilon, "delta": self.cap.delta, "order": self.cap.order}
        return json.dumps(values | {"cap": cap, "quotas": quotas, "training": about}, ensure_ascii=False)


def remaining_of(ledger: Ledger, dataset_id: str, training: Training | None = None) -> Remaining:
    """Return what a data set's cap still holds.

    Args:
      ledger: the ledger.
      dataset_id: of the data set.
      training: counted as often as the rule admits it, all of them together.

    Raises:
      LedgerError: there is no such data set.
    """
    spent = ledger.spent(dataset_id, with_pld=False)
    number = None
    if training is not None:
        number = ledger.num_admitted(dataset_id, training.step_class, training.num_steps)
    left = None
    if spent.rdp is not None and spent.rdp_budget is not None:
        left = max(0.0, spent.rdp_budget - spent.rdp)
    return Remaining(
        dataset_id=dataset_id,
        cap=spent.cap,
        closed=spent.closed,
        rdp=left,
        rdp_budget=spent.rdp_budget,
        steps={each: max(0, quota - spent.num_steps.get(each, 0)) for each, quota in spent.cap.quotas},
        sealed_epsilon=max(0.0, spent.cap.sealed_epsilon - spent.sealed_epsilon),
        sealed_delta=max(0.0, spent.cap.sealed_delta - spent.sealed_delta),
        training=training,
        num_trainings=number,
    )


def _class_text(step_class: StepClass) -> str:
    return f"q = {step_class.sampling_prob:.6g}, σ = {step_class.noise_multiplier:.6g}"
