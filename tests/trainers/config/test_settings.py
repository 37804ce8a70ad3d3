"""Options become the training that was asked for, or a refusal that says what to give."""

from __future__ import annotations

import math

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.numbers import default_delta
from tests.trainers.conftest import make_config, make_data
from trainers.config.settings import TrainingOptions
from trainers.config.training import EvaluationConfig
from trainers.config.tree import replace_options
from trainers.training.loop import train
from trainers.training.resolve import training_config


def _config(**changes: object):  # type: ignore[no-untyped-def]
    setting = {"expected_batch_size": 30, "group_size": 4, "noise_multiplier": 1.0, "delta": 1e-3} | changes
    return training_config(replace_options(TrainingOptions(), **setting), num_records=60, public_seed=0)


@pytest.mark.parametrize("epsilon", [None, math.inf])
def test_method_without_privacy_has_neither_noise_nor_clipping(epsilon: float | None) -> None:
    config = _config(method="non_private", epsilon=epsilon, noise_multiplier=None)
    assert (config.mechanism.noise_multiplier, config.mechanism.l2_clip_norm) == (0.0, math.inf)
    assert config.guarantee_label == "none"


def test_method_without_privacy_aims_at_infinity() -> None:
    assert replace_options(TrainingOptions(), method="non_private").mechanism.target_epsilon() == math.inf


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epsilon": 3.0}, "epsilon must be left out or inf: non_private adds no noise; got 3"),
        ({"noise_multiplier": 2.0}, "leave noise_multiplier out: non_private adds no noise; got 2"),
    ],
)
def test_method_without_privacy_refuses_what_asks_for_noise(given: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _config(method="non_private", **({"noise_multiplier": None} | given))


def test_untrained_network_takes_no_step() -> None:
    assert _config(method="base", noise_multiplier=None, num_steps=100).mechanism.num_steps == 0


def test_untrained_network_is_scored_as_it_is() -> None:
    evaluation = EvaluationConfig(also_untrained=True, score_every_steps=1)
    config = make_config(
        method="base",
        group_size="batch",
        noise_multiplier=0.0,
        l2_clip_norm=math.inf,
        num_steps=0,
        evaluation=evaluation,
    )
    result = train(config, make_data())
    assert result.metrics["knn_accuracy"] == result.metrics["untrained_knn_accuracy"]
    assert result.metrics["num_steps_done"] == result.metrics["num_steps_charged"] == 0
    assert [step for step, _ in result.series["knn_accuracy_during"]] == [0]


def test_method_without_a_place_for_copies_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"num_augmentations must be 0.*got 1"):
        _config(method="logit_dp")


def test_groups_of_one_are_for_methods_without_negatives() -> None:
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        _config(group_size=1)
    config = _config(method="byol_groups", group_size=1, num_augmentations=0, l2_clip_norm=0.5)
    assert config.mechanism.sensitivity == 0.5


def test_predictor_comes_with_the_method_that_needs_it() -> None:
    assert _config(method="byol_groups", num_augmentations=0).network.predictor
    assert not _config().network.predictor
    with pytest.raises(ConfigError, match="predictor must be True for byol_groups"):
        make_config(method="byol_groups", num_augmentations=0)


def test_every_option_reaches_the_params() -> None:
    given = {
        "ema_decay": 0.9,
        "warmup_steps": 5,
        "learning_rate_decay": "cosine",
        "score_every_steps": 7,
    }
    params = _config(**given).as_params()
    assert {name: params[name] for name in given} == given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ema_decay": 1.0}, r"ema_decay must be in \[0, 1\); got 1"),
        ({"warmup_steps": 100}, "warmup_steps must be less than num_steps.*got 100 and 100"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative; got -1"),
        ({"learning_rate_decay": "cosin"}, "did you mean 'cosine'"),
        ({"score_every_steps": -1}, "score_every_steps must not be negative; got -1"),
    ],
)
def test_options_out_of_range_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _config(**given)


HELD_OUT = {"score_on_held_out": 0.5, "score_noise_multiplier": 5.0}


@pytest.mark.parametrize("declared", [None, 60])
def test_delta_is_at_most_one_over_all_records_where_some_are_held_out(declared: int | None) -> None:
    """30 of 60 are trained on, and those that are scored have the promise, too."""
    config = _config(**HELD_OUT, delta=1 / 60, num_records_public=declared)
    assert config.mechanism.num_records_public == 30
    with pytest.raises(ConfigError, match=r"at most 1/num_records_public = 0.0167 .* got 0.02"):
        _config(**HELD_OUT, delta=1 / 50, num_records_public=declared)


def test_default_delta_is_of_all_records_where_some_are_held_out() -> None:
    assert _config(**HELD_OUT, delta=None).mechanism.target_delta == default_delta(60)
