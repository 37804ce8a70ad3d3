"""What is as private as the records is shown in a terminal and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTY = """
from dpgcl_core.errors import exit_on_bad_input
from trainers.data.faults import RecordsError

def main():
    raise RecordsError("2 of 9 rows are corrupt", {"missing image": [3, 7]})

exit_on_bad_input(main)
"""
CUT = """
import dataclasses
import sys
from sweeps.service.captions import tell_cut_captions
from tests.sweeps.test_pairs_plan import QUICK, planned

plan = planned(*QUICK)
captions = (("red " * 90,), *plan.data.train.captions[1:])
train = dataclasses.replace(plan.data.train, captions=captions)
tell_cut_captions(dataclasses.replace(plan, data=dataclasses.replace(plan.data, train=train)))
"""


SKIPPED = """
import sys
from pathlib import Path
from tempfile import mkdtemp
from sweeps.service.data import load_training_data
from sweeps.service.options import SweepOptions
from tests.sweeps.test_pairs_data import random_images, write_csv

own = write_csv(Path(mkdtemp(dir=sys.argv[1])), random_images(20), num_corrupt=7)
load_training_data(SweepOptions(dataset=own, no_ledger=True, skip_corrupt=True))
"""


def said(code: str, *arguments: str, in_a_terminal: bool) -> str:
    """What a program writes to its standard error."""
    outer, inner = pty.openpty() if in_a_terminal else os.pipe()
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.Popen(command, cwd=ROOT, stderr=inner, stdout=subprocess.DEVNULL)
    os.close(inner)
    found = b""
    while True:
        try:
            part = os.read(outer, 4096)
        except OSError:  # a terminal whose other end is closed
            break
        if not part:
            break
        found += part
    done.wait(60)
    os.close(outer)
    return found.decode()


@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_positions_of_corrupt_records_are_shown_in_a_terminal_alone(in_a_terminal: bool) -> None:
    text = said(FAULTY, in_a_terminal=in_a_terminal)
    assert "error: 2 of 9 rows are corrupt" in text
    assert ("missing image: 2, at (the first is 0) 3, 7" in text) is in_a_terminal
    assert ("run it in one" in text) is not in_a_terminal


@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_number_of_cut_captions_is_told_in_a_terminal_alone(in_a_terminal: bool) -> None:
    text = said(CUT, in_a_terminal=in_a_terminal)
    assert ("1 of 200 captions are longer than the 56 tokens" in text) is in_a_terminal


@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_number_of_private_rows_left_out_is_told_in_a_terminal_alone(
    in_a_terminal: bool, tmp_path: Path
) -> None:
    text = said(SKIPPED, str(tmp_path), in_a_terminal=in_a_terminal)
    assert ("corrupt rows of the training data, left out (--skip-corrupt): 7" in text) is in_a_terminal
    assert ("7" in text) is in_a_terminal
