"""What is as private as the records is shown in a terminal and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgcl_core.errors import exit_on_bad_input
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.running.captions import tell_cut_captions
from tests.sweeps.support import loaded
from tests.sweeps.test_pairs_data import random_images, write_csv
from tests.sweeps.test_pairs_plan import QUICK, planned
from trainers.config.tree import changed
from trainers.data.faults import RecordsError

each_place = pytest.mark.parametrize("in_a_terminal", [True, False])


def said(act: Callable[[], object], *, in_a_terminal: bool) -> str:
    """What `act` writes to a standard error that is a terminal, or is none."""
    outer, inner = pty.openpty() if in_a_terminal else os.pipe()
    found: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # so ends a terminal whose other end is closed
            while part := os.read(outer, 4096):
                found.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(inner, "w") as stream, contextlib.redirect_stderr(stream):
        act()
    reader.join()
    os.close(outer)
    return b"".join(found).decode()


def meet_corrupt_records() -> None:
    def main() -> int:
        raise RecordsError("2 of 9 rows are corrupt", {"missing image": [3, 7]})

    with pytest.raises(SystemExit):
        exit_on_bad_input(main)


def cut_captions() -> None:
    plan = planned(*QUICK)
    captions = (("red " * 90,), *plan.data.train.captions[1:])  # type: ignore[union-attr]
    train = dataclasses.replace(plan.data.train, captions=captions)  # type: ignore[arg-type]
    tell_cut_captions(dataclasses.replace(plan, data=dataclasses.replace(plan.data, train=train)))


@pytest.mark.ci
@pytest.mark.parametrize("method", ["dp_mae", "dp_cap"])
def test_networks_without_a_clip_tokenizer_cut_no_captions(method: str) -> None:
    plan = planned(
        *QUICK, "--method", method, "--network", {"dp_mae": "mae-toy", "dp_cap": "cap-toy"}[method]
    )
    assert said(lambda: tell_cut_captions(plan), in_a_terminal=True) == ""


@each_place
def test_positions_of_corrupt_records_are_shown_in_a_terminal_alone(in_a_terminal: bool) -> None:
    text = said(meet_corrupt_records, in_a_terminal=in_a_terminal)
    assert "error: 2 of 9 rows are corrupt" in text
    assert ("missing image: 2, at (the first is 0) 3, 7" in text) is in_a_terminal
    assert ("run it in one" in text) is not in_a_terminal


@each_place
def test_number_of_cut_captions_is_told_in_a_terminal_alone(in_a_terminal: bool) -> None:
    text = said(cut_captions, in_a_terminal=in_a_terminal)
    assert ("1 of 200 captions are longer than the 56 tokens" in text) is in_a_terminal


@each_place
def test_number_of_private_rows_left_out_is_told_in_a_terminal_alone(
    in_a_terminal: bool, tmp_path: Path
) -> None:
    own = write_csv(tmp_path, random_images(20), num_corrupt=7)
    options = changed(SweepOptions(), dataset=own, no_ledger=True, skip_corrupt=True)
    text = said(lambda: loaded(options), in_a_terminal=in_a_terminal)
    assert ("corrupt rows of the training data, left out (--skip-corrupt): 7" in text) is in_a_terminal
    assert ("7" in text) is in_a_terminal
