"""The tables of the page on audits are those of the commands: every row, each as it must be."""

from __future__ import annotations

import json

import pytest

from benchmarks.audit import canary, training_step
from benchmarks.audit.defects import Defect
from tests.docs.commands import ROOT

PAGE = (ROOT / "docs/theory/audits.md").read_text(encoding="utf-8")


def _cells(source: str) -> list[list[str]]:
    """The cells of the table that came from a command or a file, row by row."""
    table = PAGE.split(f"<!-- {source} -->\n")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def _rows(command: str) -> dict[str, tuple[str, str]]:
    """The noise and the verdict of each row of a command's table."""
    return {row[0]: (row[3], row[4]) for row in _cells(command)}


def _name(defect: Defect | None) -> str | None:
    return None if defect is None else defect.name


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        (
            "python -m benchmarks.audit --seed 0 --markdown",
            [
                (each.name, _name(each.defect), each.defect is not None and each.defect.breaks_claim)
                for each in canary.standard_cases()
            ],
        ),
        (
            "python -m benchmarks.audit.training_step --seed 0 --markdown",
            [
                (each.name, each.defect_name, each.defect_name is not None and each.breaks_claim)
                for each in training_step.standard_cases()
            ],
        ),
    ],
    ids=["benchmarks.audit", "benchmarks.audit.training_step"],
)
def test_page_shows_every_row_of_the_audit(command: str, wanted: list[tuple[str, str | None, bool]]) -> None:
    rows = _rows(command)
    assert list(rows) == [f"{name}: {defect or 'as written'}" for name, defect, _ in wanted]
    for (noise, verdict), (_, defect, broken) in zip(rows.values(), wanted, strict=True):
        assert verdict == ("refuted" if broken else "holds")
        assert broken or (noise == "as claimed") == (defect is None)


def test_page_shows_the_numbers_of_the_audits_in_one_training() -> None:
    name = "one_run-2026-11-28.json"
    wanted = []
    for result in json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8")):
        factor, claim = result["noise_factor"], result["claimed_epsilon"]
        bounds = [attack["epsilon_lower_bound"] for attack in result["attacks"].values()]
        training = "as written" if factor == 1 else f"noise × {factor:g}"
        verdict = "refuted" if max(bounds) > claim else "not refuted"
        wanted.append([training, *(f"{number:.3f}" for number in (claim, *bounds)), verdict])
    assert _cells(name) == wanted


def test_defects_of_both_audits_are_counted_as_the_changelog_says() -> None:
    planted = {each.defect.name for each in canary.standard_cases() if each.defect is not None}
    planted |= {each.defect_name for each in training_step.standard_cases() if each.defect_name is not None}
    assert len(planted) == 24
