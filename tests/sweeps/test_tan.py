"""TAN: B and σ divided by k, the ε that this costs told and charged, and refused where nothing charges it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpgcl_core.errors import ConfigError
from sweeps import tan
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.planning.plan import SweepPlan
from tests.sweeps.support import plan_of, write_npz
from trainers.config.settings import TrainingOptions
from trainers.config.tree import replace_options
from trainers.training.resolve import training_config

NOISE = ("--noise-multiplier", "4")
SMALL = ("--dataset", "digits", "--repeats", "1", "--expected-batch-size", "64", "--num-steps", "20")


def plan(*arguments: str) -> SweepPlan:
    options = parse_options(tan.TanOptions, description="", arguments=[*SMALL, *arguments])
    return plan_of("tan", options, tan.points(options))


def test_batch_and_noise_are_divided_and_the_noise_of_the_mean_gradient_stays() -> None:
    full, *others = (trial.config.mechanism for trial in plan("--tan-factors", "1", "2", "4", *NOISE).trials)
    for factor, small in zip((2, 4), others, strict=True):
        assert small.expected_batch_size == pytest.approx(full.expected_batch_size / factor)
        assert small.noise_multiplier == pytest.approx(full.noise_multiplier / factor)
        assert small.num_steps == full.num_steps
        spread = full.noise().std / full.divisor
        assert small.noise().std / small.divisor == pytest.approx(spread, rel=1e-12)


@pytest.mark.ci
def test_target_is_that_of_the_full_training_and_every_factor_tells_its_own() -> None:
    trials = plan("--tan-factors", "1", "2", "--epsilon", "4").trials
    epsilons = [trial.config.epsilon() for trial in trials]
    assert epsilons[0] == pytest.approx(4, rel=0.005)
    assert epsilons[1] > 2 * epsilons[0]
    assert [trial.params["tan_factor"] for trial in trials] == [1, 2]
    assert trials[0].params["target_epsilon"] == 4
    assert trials[1].params["target_epsilon"] == pytest.approx(epsilons[1], abs=1e-3)


def test_private_data_are_refused_without_a_ledger(tmp_path: Path) -> None:
    private = ("--dataset", write_npz(tmp_path / "scans.npz", 200), "--evaluate-on", "digits")
    sizes = ("--expected-batch-size", "32", "--group-size", "4", "--num-steps", "4", *NOISE)
    assert len(plan(*private, *sizes, "--tan-factors", "1", "--no-ledger").trials) == 1
    with pytest.raises(ConfigError, match=r"separate ε, far above the target.*Set --ledger"):
        plan(*private, *sizes, "--tan-factors", "2", "--no-ledger")


def test_factor_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tan_factors must be at least 1; got 0\.5"):
        plan("--tan-factors", "0.5", *NOISE)
    setting = replace_options(TrainingOptions(), noise_multiplier=1.0, tan_factor=0.5)
    with pytest.raises(ConfigError, match=r"tan_factor must be at least 1; got 0\.5"):
        training_config(setting, num_records=2000, public_seed=0)


@pytest.mark.parametrize("method", ["dp_sgd", "group_clip", "logit_dp", "dpcl_simclr"])
def test_methods_whose_noise_follows_the_batch_are_refused(method: str) -> None:
    setting = replace_options(
        TrainingOptions(), method=method, noise_multiplier=1.0, tan_factor=2.0, num_augmentations=0
    )
    with pytest.raises(ConfigError, match=f"the noise of {method} with group_size = .* depends on"):
        training_config(setting, num_records=2000, public_seed=0)


@pytest.mark.parametrize(
    "whole",
    [
        {"method": "dp_clip", "sampling": "groups"},
        {"method": "dp_clip", "sampling": "records"},
        {"group_size": "batch"},
    ],
)
def test_whole_batch_as_one_group_is_refused(whole: dict[str, str]) -> None:
    """Its sum is one clipped vector whatever B is, so dividing σ would divide the noise of the mean."""
    setting = replace_options(TrainingOptions(), **whole, noise_multiplier=1.0, tan_factor=2.0)
    with pytest.raises(
        ConfigError, match=r"the noise of dp_(clip|gcl) with group_size = .* depends on the batch size"
    ):
        training_config(setting, num_records=2000, public_seed=0)


def test_factor_that_leaves_too_little_noise_is_refused_with_the_largest() -> None:
    setting = replace_options(TrainingOptions(), noise_multiplier=0.5, tan_factor=8.0)
    with pytest.raises(ConfigError, match=r"tan_factor must .*; got 8, .*0\.0625\. Set it to at most 5,"):
        training_config(setting, num_records=2000, public_seed=0)
