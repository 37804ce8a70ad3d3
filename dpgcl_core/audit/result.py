"""The result of an audit, and the table of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The bounds that one case's runs give.

    Attributes:
      name: name of the case.
      defect: defect of the case, or None.
      claimed_epsilon: ε charged, at `delta`.
      delta: δ of the claim.
      epsilon_lower_bound: holds with probability `confidence` over the runs, at `delta`.
      delta_lower_bound: likewise, at ε = `claimed_epsilon`.
      epsilon_if_gaussian: the bound if the trade-off curve were a Gaussian mechanism's: higher, and for
        information only, because subsampling has another curve.
      false_positive_rate, false_negative_rate: observed in the testing half.
      num_runs: on each of D and D', both halves.
      confidence: joint, of both error rates.
    """

    name: str
    defect: str | None
    claimed_epsilon: float
    delta: float
    epsilon_lower_bound: float
    delta_lower_bound: float
    epsilon_if_gaussian: float
    false_positive_rate: float
    false_negative_rate: float
    num_runs: int
    confidence: float

    @property
    def exceeds(self) -> bool:
        """Whether the claim is refuted, with the stated confidence."""
        return self.epsilon_lower_bound > self.claimed_epsilon

    @property
    def as_expected(self) -> bool:
        """Whether a defect was detected, or the code as written kept its claim."""
        return self.exceeds == (self.defect is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and both verdicts as plain values."""
        return dataclasses.asdict(self) | {"exceeds": self.exceeds, "as_expected": self.as_expected}


def table(results: Sequence[AuditResult]) -> str:
    """Return the rows as text, one for each result."""
    head = (
        "case",
        "code",
        "delta",
        "claimed ε",
        "shown ε ≥",
        "shown δ ≥",
        "if Gaussian",
        "claim",
        "as it must",
    )
    rows = [head] + [
        (
            each.name,
            each.defect or "as written",
            f"{each.delta:g}",
            f"{each.claimed_epsilon:.3f}",
            f"{each.epsilon_lower_bound:.3f}",
            f"{each.delta_lower_bound:.4f}",
            f"{each.epsilon_if_gaussian:.3f}",
            "REFUTED" if each.exceeds else "holds",
            "yes" if each.as_expected else "NO",
        )
        for each in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    confidence = f"confidence {results[0].confidence:g} for each row" if results else ""
    note = f"shown ε: at delta; shown δ: at the claimed ε; {confidence}; if Gaussian: for information"
    return "\n".join([*(line.rstrip() for line in lines), note])
