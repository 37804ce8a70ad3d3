"""What a test patches is as it was when its file ends."""

from __future__ import annotations

import pytest

from dpgcl_core.private_step import PrivateStep
from tests.conftest import definitions, patched
from trainers.training import loop, step
from trainers.training.observation import Observer


@pytest.mark.parametrize(
    ("place", "name"),
    [(PrivateStep, "draw"), (loop, "time"), (step, "Observer"), (Observer, "wants")],
)
def test_what_is_patched_is_found_until_it_is_undone(place: type, name: str) -> None:
    before = definitions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, None)
        assert patched(before) == [f"{place.__name__}.{name}"]
    assert patched(before) == []
