"""The registry of methods: a name is taken once, and a method that draws in its own way says how."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.audit.canary import audit, standard_cases
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism import registry
from dpgcl_core.mechanism.registry import METHODS, method_named
from dpgcl_core.methods.in_groups import DP_GCL, InGroups


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> registry._Registry:
    """A registry that no other test sees, in the place of the real one."""
    empty = registry._Registry()
    for method in METHODS.values():
        empty.add(method)
    monkeypatch.setattr(registry, "_registry", empty)
    monkeypatch.setattr(registry, "METHODS", empty)
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    return empty


def test_name_is_taken_once(own: registry._Registry) -> None:
    registry.register(DP_GCL)  # the same again: a module may be imported twice
    with pytest.raises(ConfigError, match="'dp_gcl' is registered already"):
        registry.register(dataclasses.replace(DP_GCL, title="another"))
    assert method_named("dp_gcl") is DP_GCL


class _OwnStage(InGroups):
    def group_stage(self, numbers: Any) -> Any:
        raise NotImplementedError


class _OwnStageAndName(_OwnStage):
    @property
    def sampling(self) -> str:
        return "the first records, always"


def _method(kind: type[InGroups]) -> InGroups:
    fields = {each.name: getattr(DP_GCL, each.name) for each in dataclasses.fields(DP_GCL) if each.init}
    return kind(**(fields | {"name": "own_stage"}))


def test_method_with_a_stage_of_its_own_must_say_how_it_samples(own: registry._Registry) -> None:
    with pytest.raises(ConfigError, match="must also override the property `sampling`"):
        registry.register(_method(_OwnStage))
    registry.register(_method(_OwnStageAndName))
    assert "own_stage" in registry.METHODS


def test_audit_draws_by_the_stage_of_the_method(own: registry._Registry) -> None:
    registry.register(_method(_OwnStageAndName))
    case = standard_cases()[0]
    mechanism = dataclasses.replace(case.mechanism, method="own_stage")
    with pytest.raises(NotImplementedError):
        audit(dataclasses.replace(case, mechanism=mechanism), num_runs=200)


def test_faulty_installed_method_is_told_at_every_look(
    own: registry._Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = SimpleNamespace(load=lambda: "no method")
    monkeypatch.setattr(registry, "entry_points", lambda group: (faulty,))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"must be a dpgcl_core\.Method"):
            method_named("dp_gcl")
