"""An ablation switches on one option at a time, at the same mechanism, and all together."""

from __future__ import annotations

from typing import Any

import pytest

from dpgcl_core.errors import ConfigError
from dpgcl_core.release.statement import epsilon_text
from sweeps.service.options.sweep import SweepOptions
from sweeps.service.planning.free_options import ALL, free_options
from sweeps.service.planning.trials import Point
from tests.sweeps.support import options, plan_of
from trainers.config.tree import changed

GIVEN = ("--tiny", "--noise-multiplier", "1", "--public-records", "procedural", "--num-public-negatives", "8")


def _changes(*more: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    return free_options(options(*GIVEN, *more), **arguments)


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
        "view-draws": {"num_view_draws"},
        "schedule": {"warmup_steps", "learning_rate_decay"},
        "automatic-clipping": {"clipping"},
        "noise-sgd": {"optimizer"},
        "warm-start": {"warm_start"},
        "public-negatives": {"num_public_negatives"},
        "public-subspace": {"subspace_dim"},
    }
    assert together == set().union(*differences.values())
    assert (found["ema"]["ema_decay"], found["public-negatives"]["num_public_negatives"]) == (0.9, 8)


def test_every_option_costs_what_none_costs() -> None:
    chosen: SweepOptions = options(*GIVEN)
    found = [Point(label=name, changes=changes) for name, changes in free_options(chosen).items()]
    epsilons = {epsilon_text(trial.config.epsilon()) for trial in plan_of("one", chosen, found).trials}
    assert len(epsilons) == 1


def test_options_have_the_learning_rate_of_the_sweep_or_their_own() -> None:
    found = _changes("--learning-rate", "0.01", learning_rates=("noise-sgd=0.3",))
    rates = {name: changes.pop("learning_rate") for name, changes in found.items()}
    assert rates.pop("noise-sgd") == 0.3
    assert set(rates.values()) == {0.01}


def test_options_without_what_they_need_are_left_out() -> None:
    chosen = changed(options(*GIVEN), public_records=None, num_public_negatives=0)
    assert not {"warm-start", "public-negatives", "public-subspace"} & set(free_options(chosen))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": ("warm-start",)}, "warm-start needs public weights: give --warm-start"),
        ({"names": ("emu",)}, "unknown option 'emu'; did you mean 'ema'"),
        ({"learning_rates": ("emu=1",)}, "unknown option 'emu'; did you mean 'ema'"),
        ({"learning_rates": ("ema=x",)}, "OPTION=RATE, such as noise-sgd=0.03; got 'ema=x'"),
        ({"learning_rates": ("ema",)}, "OPTION=RATE, such as noise-sgd=0.03; got 'ema'"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _changes(**arguments)
