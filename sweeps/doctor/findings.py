"""The findings of the checks and their fixes, as text and JSON, without anything that depends on records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dpgcl_core.addresses import masked_text


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      check: the name of the check, one word.
      status: `wrong` for a problem that keeps sweeps from running correctly; `note` for a smaller one.
      text: the finding.
      fix: the action to take; "" if there is none.
    """

    check: str
    status: Literal["ok", "note", "wrong", "skipped"]
    text: str
    fix: str = ""


def is_ready(findings: Sequence[Finding]) -> bool:
    """Return whether no finding is `wrong`."""
    return all(finding.status != "wrong" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, and below it a line for its fix.

    >>> print(as_text([Finding("clock", "ok", "2 ms apart"), Finding("data", "wrong", "gone", "mount it")]))
    ok       clock: 2 ms apart
    wrong    data: gone
             fix: mount it
    1 problem to fix
    """
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.check}: {finding.text}")
        lines += [f"{'':<8} fix: {finding.fix}"] if finding.fix else []
    number = sum(finding.status == "wrong" for finding in findings)
    ending = f"{number} problem{'s' * (number != 1)} to fix" if number else "ready"
    return masked_text("\n".join([*lines, ending]))


def as_json(findings: Sequence[Finding]) -> str:
    """Return one JSON object: whether everything is ready, and the findings.

    >>> as_json([Finding("clock", "ok", "right")])
    '{"ready": true, "findings": [{"check": "clock", "status": "ok", "text": "right", "fix": ""}]}'
    """
    shown = [{name: masked_text(text) for name, text in asdict(finding).items()} for finding in findings]
    return json.dumps({"ready": is_ready(findings), "findings": shown}, ensure_ascii=False)
