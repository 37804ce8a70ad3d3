"""The tables of the page on sampled groups are what the code computes."""

from __future__ import annotations

import math

import pytest

from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import default_delta
from dpgcl_core.sampling.slots import empty_step_prob, share_lost
from tests.docs.commands import ROOT

PAGE = (ROOT / "docs/theory/group-sampling.md").read_text(encoding="utf-8")
NUM_RECORDS = 60_000


def _table(first_cell: str) -> list[list[str]]:
    """The cells of the table whose head starts so, head included."""
    lines = PAGE[PAGE.index(f"| {first_cell} |") :].split("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


_OF_THE_PAPER = ["2048", "1200"]
_ROWS = [
    pytest.param(row, id="-".join(row[:3]), marks=() if row[:2] == _OF_THE_PAPER else pytest.mark.ci)
    for row in _table("B")[1:]
]


@pytest.mark.parametrize("row", _ROWS)
def test_page_says_what_sampling_groups_is_worth(row: list[str]) -> None:
    for sampling, shown in (("records", row[3]), ("groups", row[4])):
        mechanism = Mechanism(
            num_records_public=NUM_RECORDS,
            sampling_prob=int(row[0]) / NUM_RECORDS,
            group_size=16,
            l2_clip_norm=1.0,
            noise_multiplier=float(row[2]) / (2 if sampling == "records" else 1),
            num_steps=int(row[1]),
            target_delta=default_delta(NUM_RECORDS),
            sampling=sampling,
        )
        assert mechanism.noise().std == pytest.approx(float(row[2]))
        decimals = len(shown.partition(".")[2])
        assert mechanism.epsilon() == pytest.approx(float(shown), abs=0.51 * 10**-decimals)


def test_page_says_what_empty_slots_cost() -> None:
    (_, *heads), *rows = _table("empty slots")
    for share, *cells in rows:
        num_empty = round(NUM_RECORDS * float(share.split()[0]) / 100)
        for head, cell in zip(heads, cells, strict=True):
            lost = share_lost(NUM_RECORDS, num_empty, int(head.removeprefix("S = ")))
            assert cell == f"{100 * lost:.1f} %"


def test_page_says_how_often_a_step_is_empty() -> None:
    assert "(37 % where B = S)" in PAGE
    assert math.floor(100 * empty_step_prob(NUM_RECORDS, 1024, 1024 / NUM_RECORDS) + 0.5) == 37
