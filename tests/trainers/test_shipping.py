"""A method that a program registered itself reaches processes that have never heard of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism import registry
from dpgcl_core.mechanism.registry import METHODS, is_installed, method_named, register
from dpgcl_core.methods.in_groups import DP_GCL, InGroups
from tests.programs import run_program
from trainers.ray_worker import packed_method, register_trial_method

_OWN = """
from dataclasses import dataclass

import torch

from dpgcl_core import InGroups, register

SCALE = 3.0


def loss_of(embeddings):
    return SCALE * embeddings.flatten(1).sum(1)


@dataclass(frozen=True, kw_only=True)
class Own(InGroups):
    def loss(self, settings):
        return loss_of


register(Own(name="own", title="Own", source="here", clip_unit="group"))
"""
_PACK = """
import sys
from pathlib import Path
from trainers.ray_worker import packed_method
Path(sys.argv[1]).write_bytes(packed_method("own"))
"""
_UNPACK = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from dpgcl_core import LossSettings, METHODS, method_named
from trainers.ray_worker import register_trial_method
assert "own" not in METHODS
trial = SimpleNamespace(
    method=Path(sys.argv[1]).read_bytes(), config=SimpleNamespace(mechanism=SimpleNamespace(method="own"))
)
register_trial_method(trial)
register_trial_method(trial)
print(method_named("own").loss(LossSettings(temperature=1.0))(torch.ones(2, 2, 2, 1)).tolist())
"""


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    assert METHODS
    monkeypatch.setattr(registry._registry, "_methods", dict(registry._registry._methods))


def _own(**changes: Any) -> InGroups:
    given = {"name": "mine", "title": "Mine", "source": "here", "clip_unit": "group"}
    return InGroups(**given | changes)


@pytest.mark.parametrize(
    "defined_in", [pytest.param("the script", marks=pytest.mark.ci), "a module beside it"]
)
def test_method_reaches_a_process_that_lacks_its_code(tmp_path: Path, defined_in: str) -> None:
    beside, packed, away = tmp_path / "beside", tmp_path / "packed", tmp_path / "unpack.py"
    beside.mkdir()
    if defined_in == "the script":
        (beside / "script.py").write_text(_OWN + _PACK)
    else:
        (beside / "own_methods.py").write_text(_OWN)
        (beside / "script.py").write_text("import own_methods\n" + _PACK)
    away.write_text(_UNPACK)
    for script in (beside / "script.py", away):
        done = run_program([str(script), str(packed)], cwd=tmp_path, environment=os.environ)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "[12.0, 12.0]\n"


def test_installed_methods_stay_at_home() -> None:
    assert packed_method("dp_gcl") is None
    assert is_installed("dp_gcl")


def test_registered_method_is_packed_and_known_only_once() -> None:
    register(_own())
    packed = packed_method("mine")
    assert packed is not None
    assert not is_installed("mine")
    trial: Any = SimpleNamespace(
        method=packed, config=SimpleNamespace(mechanism=SimpleNamespace(method="mine"))
    )
    register_trial_method(trial)
    assert method_named("mine") == _own()


def test_method_that_cannot_travel_is_refused_by_name() -> None:
    register(_own(title=(part for part in "unpicklable")))
    with pytest.raises(ConfigError, match="'mine' must be sent to the workers, but cannot be pickled"):
        packed_method("mine")


def test_name_is_taken_once() -> None:
    register(_own())
    assert register(_own()) == _own()  # a module may be imported twice
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        register(_own(title="Another"))
    with pytest.raises(ConfigError, match="'dp_gcl' is registered already"):
        register(_own(name="dp_gcl"))
    assert method_named("dp_gcl") is DP_GCL


def test_unknown_name_lists_the_registered_ones() -> None:
    register(_own())
    with pytest.raises(ConfigError, match=r"did you mean 'mine'\?.*dp_gcl.*mine"):
        method_named("mien")


def test_installed_package_offers_a_method_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = registry._Registry()
    entries = [SimpleNamespace(load=_own)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "dpgcl.methods" else [])
    assert list(fresh) == ["mine"]
    assert fresh.installed == {"mine"}
