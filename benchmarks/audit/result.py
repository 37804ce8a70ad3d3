"""The result of an audit, and the table of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import aligned


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of one case's runs.

    Attributes:
      name: name of the case.
      defect: name of the planted defect, or None.
      must_exceed: whether the defect breaks the claim; other defects must be detected in the noise.
      claimed_epsilon: the ε charged, at `delta`.
      delta: δ of the claim.
      epsilon_lower_bound: lower bound on ε at `delta`; it holds with probability `confidence` over the runs.
      delta_lower_bound: likewise, lower bound on δ at ε = `claimed_epsilon`.
      epsilon_if_gaussian: the bound for the trade-off curve of a Gaussian mechanism: higher, and for
        information only, because subsampling has another curve.
      false_positive_rate, false_negative_rate: rates observed in the testing half.
      noise_ratio: standard deviation of the noise, divided by the claimed one.
      noise_correlation: largest correlation of two coordinates of a run, at any steps.
      noise_as_claimed: whether both are consistent with independent draws of the claimed noise.
      num_runs: total number of runs on each of D and D'.
      confidence: joint confidence of both error rates.
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
        """Whether a defect was detected in the way it must be, or the code as written kept its claims."""
        if self.defect is None:
            return not self.exceeds and self.noise_as_claimed
        return self.exceeds if self.must_exceed else not (self.exceeds or self.noise_as_claimed)

    @property
    def noise(self) -> str:
        """The result of the test of the noise, in words."""
        if self.noise_as_claimed:
            return "as claimed"
        return f"{self.noise_ratio:.2f} × claimed" + (", repeated" if self.noise_correlation > 0.5 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and both verdicts as plain values."""
        return dataclasses.asdict(self) | {"exceeds": self.exceeds, "as_expected": self.as_expected}


_HEAD = ("case", "code", "delta", "claimed ε", "audited ε ≥", "audited δ ≥", "noise", "claim", "as expected")


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
    confidence = f", with confidence {results[0].confidence:g} per row" if results else ""
    note = f"Lower bounds: audited ε at delta, audited δ at the claimed ε{confidence}."
    return "\n".join([*aligned([_HEAD, *map(_cells, results)]), note])


def markdown(results: Sequence[AuditResult]) -> str:
    """Return the rows as a table for a page."""
    head = ("case", "claimed ε", "audited ε ≥", "noise", "claim")
    rows = [head, ("---",) * len(head)]
    for each in results:
        name, code, _, claimed, shown, _, noise, verdict, _ = _cells(each)
        rows.append((f"{name}: {code}", claimed, shown, noise, verdict.lower()))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
