"""Stage 10: reference values, calibration on the safe side, and the cross-checks."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest

from dpgcl_core.accounting import composition
from dpgcl_core.accounting.composition import (
    CALIBRATION_TOLERANCE,
    calibrate_noise_multiplier,
    epsilon_pld,
    epsilon_prv,
    epsilon_rdp,
    poisson_gaussian_event,
)
from dpgcl_core.errors import ConfigError


def _event(sigma: float, q: float, steps: int):  # type: ignore[no-untyped-def]
    return poisson_gaussian_event(sampling_prob=q, noise_multiplier=sigma, num_steps=steps)


def _delta(n: int) -> float:
    return 1 / (n * math.log(n))


# (σ, q, T, δ, ε by RDP, ε by PLD); the first two with dp_accounting's own default orders.
S1 = (1.0, 0.01, 1000, 1e-5, 2.10136653, 1.82824365)
S2 = (0.97, 2048 / 55_000, 1200, _delta(55_000), 10.8873360, 10.0397923)
# Table 9 of DP-GCL: data set, N, B, T, σ, ε by RDP (Opacus' orders) and by PLD.
TABLE_9 = [
    ("F-MNIST", 55_000, 2048, 1200, 0.97, 10.88, 10.04),
    ("F-MNIST, all", 60_000, 2048, 1200, 0.97, 9.92, 9.14),
    ("CIFAR-10", 45_000, 2048, 1200, 1.07, 11.20, 10.36),
    ("EuroSAT", 21_000, 2048, 1200, 1.85, 11.10, 10.33),
    ("PEDES", 190_916, 8192, 240, 0.76, 10.91, 9.79),
    ("RSTPReid", 37_010, 8192, 160, 1.70, 10.57, 9.79),
]
QUICK = TABLE_9[3], TABLE_9[5]


@pytest.mark.parametrize("case", [S1, S2])
def test_pld_matches_reference(case: tuple[float, ...]) -> None:
    sigma, q, steps, delta, _, expected = case
    assert epsilon_pld(_event(sigma, q, int(steps)), delta) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("case", [S1, S2])
def test_rdp_matches_reference(case: tuple[float, ...]) -> None:
    sigma, q, steps, delta, expected, _ = case
    assert epsilon_rdp(_event(sigma, q, int(steps)), delta) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row[0], marks=() if row in QUICK else pytest.mark.ci) for row in TABLE_9]
)
def test_pld_matches_the_papers_table_9(row: tuple[str, int, int, int, float, float, float]) -> None:
    _, n, batch, steps, sigma, _, expected = row
    assert epsilon_pld(_event(sigma, batch / n, steps), _delta(n)) == pytest.approx(expected, abs=6e-3)


@pytest.mark.parametrize("row", TABLE_9, ids=[row[0] for row in TABLE_9])
def test_rdp_is_within_a_percent_of_the_papers_table_9(
    row: tuple[str, int, int, int, float, float, float],
) -> None:
    """The table used Opacus' orders; dp_accounting's grid differs by less than 1 %."""
    _, n, batch, steps, sigma, expected, _ = row
    assert epsilon_rdp(_event(sigma, batch / n, steps), _delta(n)) == pytest.approx(expected, rel=0.01)


def test_published_noise_misses_its_target_for_the_published_split() -> None:
    assert epsilon_pld(_event(0.97, 2048 / 55_000, 1200), _delta(55_000)) > 10


def test_accountants_are_ordered() -> None:
    sigma, q, steps, delta = S1[:4]
    pld = epsilon_pld(_event(sigma, q, int(steps)), delta)
    prv = epsilon_prv(sampling_prob=q, noise_multiplier=sigma, num_steps=int(steps), delta=delta)
    rdp = epsilon_rdp(_event(sigma, q, int(steps)), delta)
    assert pld <= prv <= rdp
    assert prv == pytest.approx(pld, rel=0.02)


def test_composing_n_times_equals_self_composition() -> None:
    from dp_accounting import dp_event

    one = dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(1.2))
    apart = dp_event.ComposedDpEvent([one] * 5)
    for epsilon in (partial(epsilon_pld, grid=1e-3), epsilon_rdp):
        assert epsilon(apart, 1e-5) == pytest.approx(epsilon(_event(1.2, 0.02, 5), 1e-5), rel=1e-6)


@pytest.mark.parametrize(
    ("target", "q", "steps", "delta"),
    [
        (10.0, 2048 / 60_000, 1200, _delta(60_000)),
        (1.0, 0.01, 500, 1e-5),
        (0.2, 0.05, 50, 1e-6),
        (3.0, 1.0, 10, 1e-4),
    ],
)
def test_calibration_is_safe_and_tight(target: float, q: float, steps: int, delta: float) -> None:
    found = calibrate_noise_multiplier(
        sampling_prob=q, num_steps=steps, target_epsilon=target, target_delta=delta
    )
    achieved = epsilon_pld(_event(found.noise_multiplier, q, steps), delta)
    assert target * (1 - CALIBRATION_TOLERANCE) <= achieved <= target
    assert found.epsilon == pytest.approx(achieved, rel=1e-3)


def test_calibration_inverts_epsilon() -> None:
    achieved = epsilon_pld(_event(1.0, 0.01, 1000), 1e-5)
    found = calibrate_noise_multiplier(
        sampling_prob=0.01, num_steps=1000, target_epsilon=achieved, target_delta=1e-5
    )
    assert found.noise_multiplier == pytest.approx(1.0, rel=0.005)
    assert found.noise_multiplier >= 1.0


def test_calibration_cache_is_used(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    options = {"sampling_prob": 0.01, "num_steps": 100, "target_epsilon": 0.5, "target_delta": 1e-5}
    first = calibrate_noise_multiplier(**options, cache_folder=tmp_path)
    monkeypatch.setattr(
        composition, "search_noise_multiplier", lambda *_: pytest.fail("searched in spite of the cache")
    )
    assert calibrate_noise_multiplier(**options, cache_folder=tmp_path) == first


@pytest.mark.parametrize("damage", ['{"noise_multiplier": 0.7}', "{"])
def test_calibration_cache_cannot_weaken_the_guarantee(tmp_path, damage: str) -> None:  # type: ignore[no-untyped-def]
    options = {"sampling_prob": 0.01, "num_steps": 100, "target_epsilon": 0.5, "target_delta": 1e-5}
    first = calibrate_noise_multiplier(**options, cache_folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    again = calibrate_noise_multiplier(**options, cache_folder=tmp_path)
    assert again == first
    assert json.loads(file.read_text())["noise_multiplier"] == first.noise_multiplier


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_calibration_target_must_be_positive_and_finite(target: float) -> None:
    with pytest.raises(ConfigError, match="target_epsilon must be positive"):
        calibrate_noise_multiplier(sampling_prob=0.1, num_steps=1, target_epsilon=target, target_delta=1e-5)


def test_calibration_refuses_a_target_that_protects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends at the smallest noise, whatever it costs there."""
    asked: list[float] = []
    monkeypatch.setattr(
        composition,
        "epsilon_of_steps",
        lambda *, noise_multiplier, **_: asked.append(noise_multiplier) or 1 / noise_multiplier,
    )
    with pytest.raises(ConfigError, match="protects nothing"):
        calibrate_noise_multiplier(sampling_prob=0.001, num_steps=1, target_epsilon=1000.0, target_delta=1e-5)
    assert min(asked) == composition.MIN_NOISE_MULTIPLIER


def test_non_private_event_has_infinite_epsilon() -> None:
    assert epsilon_pld(_event(0.0, 0.1, 5), 1e-5) == math.inf
    assert epsilon_rdp(_event(0.0, 0.1, 5), 1e-5) == math.inf
