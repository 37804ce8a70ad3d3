"""Options of earlier versions: read where they did nothing, refused by name and with the fix elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from dpgcl_core.errors import ConfigError
from sweeps.service.planning.space import SearchOptions
from trainers.config.nodes import OptimizerConfig
from trainers.config.removed_options import (
    REMOVED_CHOICES,
    REMOVED_FIELDS,
    check_removed_field,
    removed_option_line,
)
from trainers.config.settings import TrainingOptions
from trainers.config.tree import leaves


@pytest.mark.parametrize("key", REMOVED_FIELDS)
def test_removed_field_is_read_at_its_default_alone(key: str) -> None:
    field = REMOVED_FIELDS[key]
    check_removed_field(key, field.default)
    for value in (7, "seven", [7], True):
        with pytest.raises(ConfigError) as refusal:
            check_removed_field(key, value)
        assert all(words in str(refusal.value) for words in (key, field.line))
        assert (repr(value) in str(refusal.value).partition(" was ")[0]) != field.is_secret


@pytest.mark.parametrize(
    "line",
    [*(each.line for each in REMOVED_FIELDS.values() if not each.is_secret), *REMOVED_CHOICES.values()],
)
def test_line_tells_since_when_and_what_to_use_instead(line: str) -> None:
    assert line.startswith("removed in 0.2.0: use ")
    named = [word.removeprefix("--").rstrip(",;") for word in line.split() if word.startswith("--")]
    options: dict[str, Any] = dict(leaves(SearchOptions))
    assert named or "dpgcl_core." in line
    assert not [name for name in named if name.replace("-", "_") not in options]


def test_no_option_is_removed_and_there_at_once() -> None:
    known = {leaf.key for leaf in leaves(TrainingOptions).values()}
    assert not known & REMOVED_FIELDS.keys()
    assert not [leaf.option for leaf in leaves(TrainingOptions).values() if removed_option_line(leaf.option)]


@pytest.mark.parametrize(("name", "instead"), [("noise_sgd", "sgd"), ("lars", "adamw")])
def test_removed_optimizer_is_refused_with_another_one(name: str, instead: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        OptimizerConfig(name=name)
    assert all(words in str(refusal.value) for words in ("optimizer", name, f"use --optimizer {instead}"))
