"""What the pages claim of measured scores is what the answer of that sweep says.

A claim is marked in its own paragraph, after the words, with the number as the answer has it and as the words
quote it: `<!-- claim: TABLE: SETTING: NUMBER over the start: higher -->`, where there are several ε with
`ε = 1: ` before the setting. Others are `NUMBER over the highest: lower`, `SETTINGS: within noise` of what is
within noise of the highest, and `NAME above every setting`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.answers import RESULTS, read_answer
from dashboards.compose.answer import Choice
from dashboards.compose.decision import WITHIN_NOISE, Comparison
from tests.docs.commands import ROOT, pages

CLAIM = re.compile(r"<!-- claim: (.+?) -->", re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+ ± \d+\.\d+")
UTILITY = re.compile(
    r"\b(gains?|gained|ahead|beats?|better|worse|higher|lower|leads?|lost|loses|within noise)\b"
)
ANSWERS = {ROOT / "benchmarks/results/README.md"}
"""The page of results holds the answers themselves."""
PAGES = [page for page in (*pages(), ROOT / "CHANGELOG.md") if page not in ANSWERS]


def paragraphs(text: str) -> list[str]:
    """The paragraphs and list items of a page, without its code."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.split(r"\n\s*\n|\n(?=- )", plain)


def fault_of(claim: str, words: str) -> str | None:
    """What is wrong with a claim, given the paragraph's words; None for nothing."""
    table, *parts = claim.split(": ")
    answer = read_answer(table)
    at = parts.pop(0) if parts[0] in {choice.at for choice in answer.choices} else ""
    choice = next((each for each in answer.choices if each.at == at), None)
    if parts[-1].endswith(" above every setting"):
        name = parts[-1].removesuffix(" above every setting")
        beaten = max(each.mean for each in answer.settings)
        return None if answer.references.get(name, 0.0) > beaten else f"{name} is not above"
    if choice is None:
        return f"no choice at {at!r}: {[each.at for each in answer.choices]}"
    if len(parts) == 2 and parts[-1] == WITHIN_NOISE:
        return None if _are_within_noise(choice, parts[0]) else f"not {choice.within_noise}"
    name, quoted, verdict = parts
    setting = next((each for each in choice.settings if each.name == name), None)
    number, _, against = quoted.partition(" over the ")
    known = {"start": setting.over_start, "highest": setting.over_best} if setting is not None else {}
    found = known.get(against)
    if found is None:
        return f"no such comparison: {name} over the {against}"
    if number != _number(found) or verdict != found.verdict:
        return f"the answer has {_number(found)}, {found.verdict}"
    return None if number.lstrip("+-") in words else f"the words do not quote {number}"


def _are_within_noise(choice: Choice, names: str) -> bool:
    same = names == "all" and len(choice.contenders) == len(choice.settings)
    return same or names == choice.within_noise


def _number(found: Comparison) -> str:
    assert found.standard_error is not None
    return f"{100 * found.mean:+.2f} ± {100 * found.standard_error:.2f}"


def faults(text: str) -> list[str]:
    """The claims of a page that its answers do not make, and what it claims without a mark."""
    found = []
    for paragraph in paragraphs(text):
        words = " ".join(CLAIM.sub("", paragraph).split())
        claims = [" ".join(each.split()) for each in CLAIM.findall(paragraph)]
        found += [f"{claim}: {fault}" for claim in claims if (fault := fault_of(claim, words))]
        marked = " ".join(claims)
        found += [f"{each} without a claim" for each in NUMBER.findall(words) if each not in marked]
        if "results/README.md#" in words and UTILITY.search(words) and not claims:
            found.append(f"without a claim: {words[:80]}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_claims_are_those_of_the_answers(page: Path) -> None:
    assert faults(page.read_text()) == []


def test_front_page_claims_something() -> None:
    assert len(CLAIM.findall((ROOT / "README.md").read_text())) > 5


TABLE = "regime_privacy_budget"
RIGHT = f"<!-- claim: {TABLE}: ε = 1 at groups sampled: +5.93 ± 0.60 over the start: higher -->"

WITHIN = "ε = 1 at records sampled: +1.30 ± 0.60"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"It gains 5.93 ± 0.60. {RIGHT}", None),
        (f"It gains 5.94 ± 0.60. {RIGHT}", "do not quote"),
        ("It gains 5.93 ± 0.60.", "without a claim"),
        (f"1.30 ± 0.60 <!-- claim: {TABLE}: {WITHIN} over the start: within noise -->", None),
        (f"1.30 ± 0.60 <!-- claim: {TABLE}: {WITHIN} over the start: higher -->", "the answer has"),
        ("[It](benchmarks/results/README.md#x) gains much.", "without a claim"),
        (f"It gains 5.93 ± 0.60.\n\n{RIGHT}", "do not quote"),  # in another paragraph
        (f"5.94 ± 0.60 {RIGHT.replace('5.93', '5.94')}", "the answer has"),
        (f"5.93 ± 0.60 {RIGHT.replace('higher', 'within noise')}", "the answer has"),
        (f"5.93 ± 0.60 {RIGHT.replace('groups', 'records')}", "the answer has"),
        (f"5.93 ± 0.60 {RIGHT.replace('start', 'highest')}", "the answer has"),
        (f"<!-- claim: {TABLE}: all: within noise -->", "not "),
        (f"<!-- claim: {TABLE}: public start above every setting -->", "is not above"),
        ("<!-- claim: tan_fashion_mnist: k = 1 to 8: within noise -->", None),
        ("<!-- claim: tan_fashion_mnist: HOG above every setting -->", None),
        ("<!-- claim: methods_groups_fashion_mnist: ε = 1: all: within noise -->", None),
        ("<!-- claim: methods_groups_fashion_mnist: all: within noise -->", "no choice"),
    ],
)
def test_wrong_claims_are_found(text: str, fault: str | None) -> None:
    found = faults(text)
    assert bool(found) == (fault is not None)
    assert fault is None or any(fault in each for each in found)


def test_no_page_speaks_of_resolved_differences() -> None:
    """The words of an earlier rule, whose verdicts were others."""
    for page in (*PAGES, *RESULTS.rglob("*.md")):
        assert not re.search(r"\bresolved\b|\bnot resolve\b", page.read_text()), page
