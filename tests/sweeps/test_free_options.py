"""An ablation switches on one option at a time, at the same mechanism, and all together."""

from __future__ import annotations

from typing import Any

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.release.statement import epsilon_text
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.free_options import ALL, free_options
from sweeps.service.planning.trials import Point
from tests.sweeps.support import options, plan_of

QUICK = ("--tiny", "--epsilon", "8")


def _changes(*more: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    return free_options(options(*QUICK, *more), **arguments)


def test_each_option_changes_what_it_is_named_after_and_all_changes_everything() -> None:
    found = _changes("--warm-start", "synthetic:30", "--ema-decay", "0.9")
    plain = found.pop("plain")
    differences = {
        name: {key for key, value in changes.items() if value != plain[key]}
        for name, changes in found.items()
    }
    together = differences.pop(ALL)
    assert differences == {
        "ema": {"ema_decay"},
        "schedule": {"warmup_steps", "learning_rate_decay"},
        "automatic-clipping": {"clipping"},
        "warm-start": {"warm_start"},
    }
    assert together == set().union(*differences.values())
    assert found["ema"]["ema_decay"] == 0.9


@pytest.mark.ci
def test_every_option_costs_what_none_costs() -> None:
    chosen: SweepOptions = options(*QUICK)
    found = [Point(label=name, changes=changes) for name, changes in free_options(chosen).items()]
    epsilons = {epsilon_text(trial.config.epsilon()) for trial in plan_of("one", chosen, found).trials}
    assert len(epsilons) == 1


def test_options_have_the_learning_rate_of_the_sweep_or_their_own() -> None:
    found = _changes("--learning-rate", "0.01", learning_rates=("ema=0.3",))
    rates = {name: changes.pop("learning_rate") for name, changes in found.items()}
    assert rates.pop("ema") == 0.3
    assert set(rates.values()) == {0.01}


def test_options_without_what_they_need_are_left_out() -> None:
    left = set(free_options(options("--tiny", "--epsilon", "inf")))
    assert left == {"plain", "ema", "schedule", "automatic-clipping", ALL}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": ("warm-start",)}, "warm-start needs public weights. Set --warm-start"),
        ({"learning_rates": ("warm-start=1",)}, "warm-start needs public weights. Set --warm-start"),
        ({"names": ("plain",), "learning_rates": ("ema=1",)}, "unknown option 'ema'. Valid: plain"),
        ({"learning_rates": ("ema=1", "ema=2")}, "one learning rate; got two for ema"),
        ({"names": ("emu",)}, "unknown option 'emu'; did you mean 'ema'"),
        ({"learning_rates": ("emu=1",)}, "unknown option 'emu'; did you mean 'ema'"),
        ({"learning_rates": ("ema=x",)}, "OPTION=RATE, such as ema=0.03; got 'ema=x'"),
        ({"learning_rates": ("ema",)}, "OPTION=RATE, such as ema=0.03; got 'ema'"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _changes(**arguments)
