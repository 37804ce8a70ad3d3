"""The audit in one training: its bound holds exactly, missing noise is detected, and sweeps' options fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.audit import one_run
from benchmarks.audit.bounds import guess_canaries, largest_epsilon, one_run_epsilon
from benchmarks.audit.one_run import Canaries, OneRunOptions, OneRunResult, audit_once
from benchmarks.audit.worst_cases import Crafted
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.clipping.types import no_sum
from dpgcl_core.errors import ConfigError
from dpgcl_core.sampling.slots import SampledGroups
from sweeps.group_size import GroupSizeOptions
from sweeps.service.options.options_file import options_text
from trainers.config.tree import replace_options

TAIL = 0.05
DIGITS = replace_options(
    OneRunOptions(),
    **{"num_steps": 10, "group_size": 2, "network": "tiny_cnn", "embedding_dim": 16, "num_augmentations": 0},
    **{"num_canaries": 300, "noise_multiplier": 4.0, "seeded_non_private": True},
)
"""Each canary that is in joins about three of the steps."""


def _rates(num_guesses: int, epsilon: float, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """For each number of right guesses: its probability at randomised response, and whether ε is exceeded."""
    counts = np.arange(num_guesses + 1)
    bounds = [one_run_epsilon(int(k), num_guesses, tail=TAIL, **settings) for k in counts]
    prob = 1 / (1 + np.exp(-epsilon))
    return stats.binom.pmf(counts, num_guesses, prob), np.array(bounds) > epsilon


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("num_guesses", [1, 10, 500, 20_000])
def test_bound_of_randomised_response_exceeds_epsilon_as_rarely_as_promised(
    num_guesses: int, epsilon: float
) -> None:
    probabilities, exceeds = _rates(num_guesses, epsilon, num_canaries=num_guesses, delta=0.0)
    assert probabilities[exceeds].sum() <= TAIL
    if num_guesses == 20_000:  # and not far more rarely
        assert probabilities[exceeds].sum() > 0.9 * TAIL


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_bound_of_many_guesses_is_close_to_epsilon(epsilon: float) -> None:
    num_guesses = 1_000_000
    num_right = round(num_guesses / (1 + np.exp(-epsilon)))
    bound = one_run_epsilon(num_right, num_guesses, num_canaries=num_guesses, delta=0.0, tail=TAIL)
    assert epsilon - 0.02 < bound < epsilon


def _exceeding_rate_with_leaks(delta: float, counted_delta: float) -> float:
    """How often the bound exceeds ε = 0.5 if each of 72 coins is certain to be known with probability δ.

    These events exclude each other, so the mechanism is (0.5, δ)-private and leaks some coin with probability
    72 δ.
    """
    num, epsilon = 72, 0.5
    without_leak, exceeds = _rates(num, epsilon, num_canaries=num, delta=counted_delta)
    with_leak = stats.binom.pmf(np.arange(num + 1) - 1, num - 1, 1 / (1 + np.exp(-epsilon)))
    law = (1 - num * delta) * without_leak + num * delta * with_leak
    return float(law[exceeds].sum())


def test_bound_counts_the_coins_that_leak_with_probability_delta() -> None:
    delta = 0.03 / 72
    assert _exceeding_rate_with_leaks(delta, counted_delta=delta) <= TAIL
    assert _exceeding_rate_with_leaks(delta, counted_delta=0.0) > TAIL


def test_guesses_of_randomised_response_keep_the_confidence() -> None:
    """A score's sign is right with the probability of ε; the best of all numbers of guesses counts."""
    generator, epsilon, num_canaries = np.random.default_rng(0), 1.0, 200
    exceeding, largest = 0, 0.0
    for _ in range(2000):
        coins = generator.random(num_canaries) < 0.5
        is_right = generator.random(num_canaries) < 1 / (1 + np.exp(-epsilon))
        scores = (coins == is_right) + 0.5 * generator.random(num_canaries)
        bound = guess_canaries(scores, coins, 0.0, 1 - TAIL).epsilon_lower_bound
        exceeding, largest = exceeding + (bound > epsilon), max(largest, bound)
    assert exceeding <= stats.binom.isf(1e-3, 2000, TAIL)
    assert largest > epsilon / 2


def test_right_guesses_give_the_largest_bound() -> None:
    coins = np.arange(400) % 2 == 0
    assert guess_canaries(coins.astype(float), coins, 1e-6, 0.95).epsilon_lower_bound == largest_epsilon(
        400, 1e-6, 0.95
    )
    assert guess_canaries(-coins.astype(float), coins, 1e-6, 0.95).epsilon_lower_bound == 0


# Canaries


def test_group_with_a_canary_contributes_its_direction_and_nothing_else() -> None:
    """Rows 4 and 5 are canaries, and two slots of six are empty in the second draw."""
    canaries = Canaries(first_row=4, coordinates=np.array([7, 2]))
    stage = one_run._CanaryStage(
        right=SampledGroups(capacity=6, group_size=1, sampling_prob=1.0), canaries=canaries
    )
    rule = one_run._CanaryClipper(l2_clip_norm=2.0, canaries=canaries)
    model, others = Crafted(8), torch.zeros(6, 1, 1, 8)
    others[..., 0] = 1.0
    for num_records, expected in ((6, [4.0, 0, 2, 0, 0, 0, 0, 2]), (4, [4.0, 0, 0, 0, 0, 0, 0, 0])):
        drawn = stage.draw(num_records, sampling=np.random.default_rng(), permutation=np.random.default_rng())
        total = no_sum(model)
        for _ in range(2):  # a canary is summed once, in the step's first pass
            part = others * torch.from_numpy(drawn.complete)[:, None, None, None] / 2
            rule.add_clipped_sum(total, model, model, part, torch.from_numpy(drawn.complete))
        assert total.numpy() == pytest.approx(expected, rel=2e-4)


def test_group_of_a_canary_and_an_empty_slot_contributes_nothing() -> None:
    canaries = Canaries(first_row=0, coordinates=np.array([3]))
    right = SampledGroups(capacity=2, group_size=2, sampling_prob=1.0)
    stage = one_run._CanaryStage(right=right, canaries=canaries)
    drawn = stage.draw(1, sampling=np.random.default_rng(), permutation=np.random.default_rng())
    assert drawn.complete.tolist() == [False]
    assert canaries.groups == []


def test_training_with_canaries_is_that_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything public about the mechanism is as without canaries, apart from the planted factor."""
    configs: list[Any] = []
    real = one_run.train

    def note(config: Any, data: Any, **others: Any) -> Any:
        configs.append((config, data))
        return real(config, data, **others)

    monkeypatch.setattr(one_run, "train", note)
    held_out = {"score_on_held_out": 0.1, "score_noise_multiplier": 50.0, "num_canaries": 200}
    audit_once(replace_options(DIGITS, num_steps=2, **held_out), np.random.default_rng(0))
    (config, data), mechanism = configs[0], configs[0][0].mechanism
    num_records = mechanism.num_records_public
    assert num_records - 200 < len(data.train) < num_records == 1301  # of 1,445, less a tenth
    plain = one_run.Mechanism(
        **{each.name: getattr(mechanism, each.name) for each in dataclasses.fields(mechanism)}
    )
    assert mechanism.noise() == plain.noise()
    assert (mechanism.divisor, mechanism.epsilon()) == (plain.divisor, plain.epsilon())
    assert isinstance(config.rule(), GroupClipper)


@pytest.mark.parametrize("sampling", ["groups", "records"])
def test_missing_noise_is_detected(sampling: str) -> None:
    options = replace_options(DIGITS, noise_factor=0.0, sampling=sampling)
    result = audit_once(options, np.random.default_rng(1))
    assert result.attacks["every step"].epsilon_lower_bound > 2 > result.claimed_epsilon
    assert result.is_refuted
    assert result.as_expected


def test_training_as_written_keeps_its_claim() -> None:
    result = audit_once(replace_options(DIGITS, seed=1), np.random.default_rng(1))
    assert not result.is_refuted
    assert result.as_expected
    assert "REFUTED" not in one_run.table(result)


# The command line


def test_file_of_a_sweep_gives_the_options_of_the_audited_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The axes of the file are left out; the point's own option is on the command line."""
    sweep = replace_options(
        GroupSizeOptions(), dataset="digits", epsilon=3.0, num_steps=7, group_sizes=(2, 4)
    )
    file = tmp_path / "config.yaml"
    file.write_text(options_text(sweep))
    audited: list[OneRunOptions] = []

    def note(options: OneRunOptions) -> OneRunResult:
        audited.append(options)
        return OneRunResult(
            claimed_epsilon=3.0,
            delta=1e-5,
            largest_epsilon=4.0,
            attacks={"every step": guess_canaries(np.arange(8.0), np.arange(8) > 3, 0.0, 0.95)},
            num_canaries=8,
            noise_factor=1.0,
            confidence=0.95,
        )

    monkeypatch.setattr(one_run, "audit_once", note)
    words = ["--config", str(file), "--group-size", "4", "--num-canaries", "50"]
    assert one_run.main(words) == 0
    (options,) = audited
    mechanism = options.mechanism
    assert (mechanism.epsilon, mechanism.num_steps, mechanism.group_size) == (3.0, 7, 4)
    assert (options.data.dataset, options.num_canaries) == ("digits", 50)
    assert "8 canaries show at most ε ≥ 4.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_canaries": 0}, "num_canaries"),
        ({"confidence": 1.0}, "confidence"),
        ({"noise_factor": 1.5}, "noise_factor"),
        ({"seeded_non_private": False, "dataset": "npz:mine.npz"}, "public"),
        ({"num_canaries": 900}, "empty"),
        ({"delta": 2e-4}, "delta"),
        ({"epsilon": float("inf"), "noise_multiplier": None}, "finite"),
        ({"group_size": "batch"}, "fixed size"),
        ({"method": "dp_sgd"}, "clip groups"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_audit_refuses_what_it_cannot_attack(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        audit_once(replace_options(DIGITS, **values))
