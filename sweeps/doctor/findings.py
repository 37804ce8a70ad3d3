"""What a check found, and what to do about it; as text and as JSON, with no number of any record in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dpgcl_core.addresses import masked_text

Status = Literal["ok", "note", "wrong", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
      check: what, in a word.
      status: `wrong` keeps a sweep from running, or from keeping its promises; a `note` does not.
      text: what was found.
      fix: what to do; "" where there is nothing to do.
    """

    check: str
    status: Status
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    """Return that all is as it should be."""
    return Finding(check=check, status="ok", text=text)


def note(check: str, text: str, fix: str = "") -> Finding:
    """Return what should be known."""
    return Finding(check=check, status="note", text=text, fix=fix)


def wrong(check: str, text: str, fix: str) -> Finding:
    """Return what must be put right."""
    return Finding(check=check, status="wrong", text=text, fix=fix)


def skipped(check: str, text: str) -> Finding:
    """Return what was not looked at, and why."""
    return Finding(check=check, status="skipped", text=text)


def is_ready(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(finding.status != "wrong" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding, and one below it for what to do.

    >>> print(as_text([ok("clock", "at most 2 ms apart"), wrong("disk", "1 GB is free", "make room")]))
    ok       clock: at most 2 ms apart
    wrong    disk: 1 GB is free
             fix: make room
    1 thing to fix
    """
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.check}: {finding.text}")
        lines += [f"{'':<8} fix: {finding.fix}"] if finding.fix else []
    number = sum(finding.status == "wrong" for finding in findings)
    ending = f"{number} thing{'s' * (number != 1)} to fix" if number else "ready"
    return masked_text("\n".join([*lines, ending]))


def as_json(findings: Sequence[Finding]) -> str:
    """Return one object: whether all is ready, and the findings.

    >>> as_json([ok("clock", "right")])
    '{"ready": true, "findings": [{"check": "clock", "status": "ok", "text": "right", "fix": ""}]}'
    """
    told = [{name: masked_text(text) for name, text in asdict(finding).items()} for finding in findings]
    return json.dumps({"ready": is_ready(findings), "findings": told}, ensure_ascii=False)
