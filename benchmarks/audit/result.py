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
      defect: what is wrong on purpose, or None.
      must_exceed: whether the defect breaks the claim; one that does not must be seen in the noise.
      claimed_epsilon: ε charged, at `delta`.
      delta: δ of the claim.
      epsilon_lower_bound: holds with probability `confidence` over the runs, at `delta`.
      delta_lower_bound: likewise, at ε = `claimed_epsilon`.
      epsilon_if_gaussian: the bound if the trade-off curve were a Gaussian mechanism's: higher, and for
        information only, because subsampling has another curve.
      false_positive_rate, false_negative_rate: observed in the testing half.
      noise_ratio: standard deviation of the noise over the claimed one.
      noise_correlation: largest between two coordinates of a run, at whatever steps.
      noise_as_claimed: whether both are what independent draws of the claimed noise give.
      num_runs: on each of D and D', all of them.
      confidence: joint, of both error rates.
    """

    name: str
    defect: str | None
    must_exceed: bool
    claimed_epsilon: float
    delta: float
    epsilon_lower_bound: float
    delta_lower_bound: float
    epsilon_if_gaussian: float
    false_positive_rate: float
    false_negative_rate: float
    noise_ratio: float
    noise_correlation: float
    noise_as_claimed: bool
    num_runs: int
    confidence: float

    @property
    def exceeds(self) -> bool:
        """Whether the claim is refuted, with the stated confidence."""
        return self.epsilon_lower_bound > self.claimed_epsilon

    @property
    def as_expected(self) -> bool:
        """Whether a defect was detected by what it breaks, or the code as written kept its claims."""
        if self.defect is None:
            return not self.exceeds and self.noise_as_claimed
        return self.exceeds if self.must_exceed else not (self.exceeds or self.noise_as_claimed)

    @property
    def noise(self) -> str:
        """What was seen of the noise, in words."""
        if self.noise_as_claimed:
            return "as claimed"
        return f"{self.noise_ratio:.2f} of it" + (", repeated" if self.noise_correlation > 0.5 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and both verdicts as plain values."""
        return dataclasses.asdict(self) | {"exceeds": self.exceeds, "as_expected": self.as_expected}


_HEAD = ("case", "code", "delta", "claimed ε", "shown ε ≥", "shown δ ≥", "noise", "claim", "as it must")


def _cells(row: AuditResult) -> tuple[str, ...]:
    return (
        row.name,
        row.defect or "as written",
        f"{row.delta:g}",
        f"{row.claimed_epsilon:.3f}",
        f"{row.epsilon_lower_bound:.3f}",
        f"{row.delta_lower_bound:.4f}",
        row.noise,
        "REFUTED" if row.exceeds else "holds",
        "yes" if row.as_expected else "NO",
    )


def table(results: Sequence[AuditResult]) -> str:
    """Return the rows as text, one for each result."""
    rows = [_HEAD, *map(_cells, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    confidence = f"confidence {results[0].confidence:g} for each row" if results else ""
    note = f"shown ε: at delta; shown δ: at the claimed ε; {confidence}"
    return "\n".join([*(line.rstrip() for line in lines), note])


def markdown(results: Sequence[AuditResult]) -> str:
    """Return the rows as a table for a page."""
    head = ("what runs", "claimed ε", "shown ε ≥", "noise", "claim")
    rows = [head, ("---",) * len(head)]
    for each in results:
        name, code, _, claimed, shown, _, noise, verdict, _ = _cells(each)
        rows.append((f"{name}: {code}", claimed, shown, noise, verdict.lower()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
