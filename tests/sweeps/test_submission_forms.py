"""Every form of `ray job submit` that a page or a script shows is one that a test submits a job in."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.docs.commands import ROOT, pages
from tests.sweeps import test_submission

RUN_BY = {
    "--working-dir . -- python SCRIPT": "tiny_job",
    "--working-dir . -- python -m MODULE": "small_jobs",
    "--working-dir . -- SCRIPT": "small_jobs",
    "--working-dir . SCRIPT": "stopped_job",
    "SCRIPT": "stopped_job",
}
"""Forms, and the fixture that submits a job in each."""
_SHOWN = re.compile(r"^\s*(ray job submit .*)$", re.MULTILINE)


def form_of(line: str) -> str:
    """What Ray's client is given, and how the program is named; a form has no options of the program.

    >>> form_of("ray job submit --working-dir . -- python sweeps/search.py --num-trials 3  # three")
    '--working-dir . -- python SCRIPT'
    """
    words = shlex.split(line, comments=True)[3:]
    at = next(at for at, word in enumerate(words) if re.fullmatch(r"sweeps[./]\w+(\.py)?", word))
    return " ".join([*words[:at], "SCRIPT" if words[at].endswith(".py") else "MODULE"])


def shown() -> list[str]:
    files = [*pages(), *sorted((ROOT / "sweeps").rglob("*.py"))]
    return [line for file in files for line in _SHOWN.findall(file.read_text())]


def test_every_form_that_is_shown_is_run() -> None:
    assert {form_of(line) for line in shown()} == RUN_BY.keys()


@pytest.mark.parametrize("fixture", sorted(set(RUN_BY.values())))
def test_what_runs_a_form_is_there(fixture: str) -> None:
    assert hasattr(test_submission, fixture)


def test_options_follow_the_separator_wherever_there_are_any() -> None:
    """Ray's client takes what comes before it for its own."""
    for line in shown():
        words = shlex.split(line, comments=True)
        if words[-1].startswith("sweeps"):
            continue
        assert "--" in words, line
