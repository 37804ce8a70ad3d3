"""The remaining budget of a data set's cap: in the unit of its rule, and as a number of planned trainings.

The remaining budget has no ε: the ε of a further step depends on all charges composed with it, and on the
rule. So it is reported in the rule's unit, and as the number of trainings that the rule would admit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from dpgcl_core.accounting.composition import calibrate_noise_multiplier
from dpgcl_core.accounting.filters import StepClass
from dpgcl_core.errors import ConfigError
from dpgcl_core.ledger.account import MOST_TRAININGS
from dpgcl_core.ledger.ledger import Ledger
from dpgcl_core.ledger.report import Charges
from dpgcl_core.mechanism.numbers import check_delta, default_delta


@dataclass(frozen=True, kw_only=True)
class Training:
    """A hypothetical training; the remaining budget is stated as a number of such trainings.

    Attributes:
      step_class: the class of every step.
      num_steps: T.
      epsilon, delta: ε and δ of only this training, by PLD.
    """

    step_class: StepClass
    num_steps: int
    epsilon: float
    delta: float

    @classmethod
    def of(
        cls, num_records_public: int, batch_size: float, num_steps: int, epsilon: float, delta: float | None
    ) -> Self:
        """Return the training of `num_steps` steps at `epsilon`, with noise calibrated as in a sweep.

        δ is 1/(n ln n) by default, for n = `num_records_public`.

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
        calibration = calibrate_noise_multiplier(
            sampling_prob=prob, num_steps=num_steps, target_epsilon=epsilon, target_delta=delta
        )
        step_class = StepClass(prob, calibration.noise_multiplier)
        return cls(step_class=step_class, num_steps=num_steps, epsilon=epsilon, delta=delta)


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """The remaining budget of a cap.

    Attributes:
      charges: the charges to the data set.
      training: the hypothetical training; None without one.
      num_trainings: how many more such trainings the cap's filter admits; None without `training`.
    """

    charges: Charges
    training: Training | None = None
    num_trainings: int | None = None

    @property
    def rdp(self) -> float | None:
        """The remaining RDP at the filter's order; None with quotas."""
        charges = self.charges
        if charges.rdp is None or charges.rdp_budget is None:
            return None
        return max(0.0, charges.rdp_budget - charges.rdp)

    @property
    def steps(self) -> dict[StepClass, int]:
        """The remaining steps of every quota."""
        num_charged, quotas = self.charges.num_steps, self.charges.cap.quotas
        return {step_class: max(0, quota - num_charged.get(step_class, 0)) for step_class, quota in quotas}

    @property
    def sealed(self) -> dict[str, float]:
        """The remainder of the ε and δ set aside for sealed sweeps by basic composition."""
        charges, names = self.charges, ("sealed_epsilon", "sealed_delta")
        return {name: max(0.0, getattr(charges.cap, name) - getattr(charges, name)) for name in names}

    def lines(self) -> Iterator[str]:
        """Yield the remaining budget as lines of text."""
        yield self.charges.title
        if self.charges.closed:
            yield "  left: nothing; rows were lost, and the data set is closed for good"
            return
        if self.rdp is not None and self.charges.rdp_budget is not None:
            share = self.rdp / self.charges.rdp_budget if self.charges.rdp_budget else 0.0
            yield f"  left: RDP {self.rdp:.6g} of {self.charges.rdp_budget:.6g} ({share:.1%})"
        for step_class, num_steps in self.steps.items():
            yield f"  left: {num_steps} steps of {step_class.text}"
        if self.charges.cap.sealed_epsilon:
            epsilon, delta = self.sealed.values()
            yield f"  left in the share for sealed sweeps (basic composition): ({epsilon:g}, {delta:g})"
        if self.training is not None:
            yield self._training_text(self.training)

    def _training_text(self, training: Training) -> str:
        number = self.num_trainings or 0
        more = "or more " if number >= MOST_TRAININGS else ""
        return (
            f"  fits: {number} {more}training{'s' * (number != 1)} of ε = {training.epsilon:g} at δ = "
            f"{training.delta:.4g} each ({training.step_class.text}, T = {training.num_steps})"
        )

    def to_json(self) -> str:
        """Return the remaining budget as one JSON object."""
        charges, training = self.charges, self.training
        values = {
            "dataset_id": charges.dataset_id,
            "closed": charges.closed,
            "rdp": self.rdp,
            "rdp_budget": charges.rdp_budget,
            **self.sealed,
            "num_trainings": self.num_trainings,
            "cap": {name: getattr(charges.cap, name) for name in ("epsilon", "delta", "order")},
            "quotas": [{**vars(step_class), "num_steps": num} for step_class, num in self.steps.items()],
            "training": training and {**vars(training), "step_class": vars(training.step_class)},
        }
        return json.dumps(values, ensure_ascii=False)


def remaining_of(ledger: Ledger, dataset_id: str, training: Training | None = None) -> Remaining:
    """Return the remaining budget of a data set's cap.

    Args:
      ledger: the ledger.
      dataset_id: the data set's id.
      training: a hypothetical training; the result contains how many more of it the cap admits together.

    Raises:
      LedgerError: there is no such data set.
    """
    charges, number = ledger.read_charges(dataset_id, with_pld=False), None
    if training is not None:
        number = ledger.num_admitted(dataset_id, training.step_class, training.num_steps)
    return Remaining(charges=charges, training=training, num_trainings=number)
