"""Options as a tree: named without prefixes, replaced by name, each node checked as a whole."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from dpgcl_core.errors import ConfigError
from trainers.config import networks, training
from trainers.config.presets import SETTINGS
from trainers.config.settings import TrainingOptions
from trainers.config.training import OptimizerConfig, ViewConfig
from trainers.config.tree import is_node, leaves, replace_options, values_of


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A node."""

    width: int = 1
    """How wide."""
    depth: int = 2
    """How deep, and
    what follows."""


@dataclass(frozen=True, kw_only=True)
class Twice:
    """Two nodes that share a name."""

    one: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)


def test_description_is_the_docstring_under_the_field() -> None:
    assert leaves(Inner)["depth"].help == "How deep, and what follows."


def test_description_is_inherited_with_the_field() -> None:
    assert (
        leaves(networks.NetworkOptions)["embedding_dim"].help
        == leaves(networks.NetworkConfig)["embedding_dim"].help
    )


def test_two_options_of_one_name_are_a_mistake() -> None:
    with pytest.raises(TypeError, match="Twice has two options named width"):
        leaves(Twice)


def test_every_option_of_a_training_is_described() -> None:
    assert [name for name, leaf in leaves(TrainingOptions).items() if not leaf.help] == []


def test_names_of_nodes_are_those_of_the_command_line() -> None:
    known = leaves(TrainingOptions)
    assert (known["optimizer"].key, known["network"].key) == ("optimizer.name", "network.name")


def test_changed_replaces_leaves_wherever_they_are() -> None:
    found = replace_options(TrainingOptions(), optimizer="sgd", network="resnet18", num_steps=7)
    assert (found.optimizer.name, found.network.name, found.mechanism.num_steps) == ("sgd", "resnet18", 7)
    assert values_of(found) == values_of(TrainingOptions()) | {
        "optimizer": "sgd",
        "network": "resnet18",
        "num_steps": 7,
    }


def test_changed_checks_a_node_once_with_all_of_its_values() -> None:
    views = replace_options(
        ViewConfig(min_crop_area=0.3, max_crop_area=0.4), min_crop_area=0.6, max_crop_area=0.7
    )
    assert (views.min_crop_area, views.max_crop_area) == (0.6, 0.7)
    with pytest.raises(ConfigError, match="crop areas must satisfy"):
        replace_options(views, min_crop_area=0.8)


def test_changed_names_the_nearest_option() -> None:
    with pytest.raises(ConfigError, match="unknown option 'num_stps'; did you mean 'num_steps'"):
        replace_options(TrainingOptions(), num_stps=7)


def test_changed_without_values_is_the_same() -> None:
    assert replace_options(SETTINGS["paper"]) is SETTINGS["paper"]


def test_classes_of_a_training_are_the_nodes_of_its_options() -> None:
    """A default that were declared twice could differ; there is one class, hence one default."""
    nodes = {each.name: each.default_factory for each in dataclasses.fields(TrainingOptions)}
    used = {each.name: each.default_factory for each in dataclasses.fields(training.TrainingConfig)}
    for name in ("views", "optimizer", "evaluation", "performance"):
        assert nodes[name] is used[name]
    assert issubclass(training.TrainingConfig, (training.ObjectiveConfig, training.RandomnessConfig))
    declared = {each.name for each in dataclasses.fields(networks.NetworkOptions)}
    own = {each.name for each in dataclasses.fields(networks.NetworkConfig)} - declared
    assert own == {"predictor"}


def test_node_is_told_from_a_leaf() -> None:
    assert is_node(OptimizerConfig)
    assert not is_node(int | None)
    assert not is_node(str)
