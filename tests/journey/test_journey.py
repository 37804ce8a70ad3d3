"""A newcomer's first hour on data made for it: every command that is printed is pasted and works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journey.hour import JOURNEYS, prepare


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("journey", JOURNEYS)
def test_every_printed_command_of_the_first_hour_works(journey: str, tmp_path: Path) -> None:
    JOURNEYS[journey](*prepare(tmp_path))
