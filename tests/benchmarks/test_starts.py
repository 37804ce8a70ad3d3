"""The committed starts: public weights that a training can begin with, and the ones that the page states."""

from __future__ import annotations

import re

from benchmarks.answers import RESULTS
from tests.docs.commands import ROOT
from trainers.export.export_folder import load_clip
from trainers.training.warm_start import read_warm_start

STARTS = RESULTS / "starts"


def test_committed_start_is_public_and_the_one_of_the_page() -> None:
    page = (RESULTS / "README.md").read_text()
    start = read_warm_start(STARTS / "common-300")
    assert re.findall(r"sha256 `(\w+)`", page) == [start.sha256]
    assert start.private is None
    assert load_clip(STARTS / "common-300")[1].dataset == "shapes:20000:101:common"


def test_commands_of_the_regime_begin_with_the_committed_start() -> None:
    regime = (RESULTS / "README.md").read_text().partition("## A regime")[2].partition("\n## ")[0]
    places = re.findall(r"--warm-start (\S+)", regime)
    assert len(places) >= 3
    assert {ROOT / place for place in places} == {STARTS / "common-300"}
