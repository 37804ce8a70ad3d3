"""The audit: the code as written stays below its claim, and each planted defect is seen above it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from scipy import stats

from dpgcl_core.audit import canary as auditing
from dpgcl_core.audit.bounds import clopper_pearson_upper, epsilon_if_gaussian, epsilon_lower_bound
from dpgcl_core.audit.canary import (
    HALF_NOISE,
    SHARED_SAMPLER,
    SHORT_GROUP,
    AuditCase,
    AuditResult,
    audit,
    main,
    standard_cases,
)
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.sources import SeededNonPrivateRandomness

_RUNS = 3000
_BY_NAME = {case.name: case for case in standard_cases() if case.defect is None}


def _audited(case: AuditCase, seed: int = 1) -> AuditResult:
    return audit(case, num_runs=_RUNS, randomness=SeededNonPrivateRandomness(seed))


def _variant(name: str, **changes: object) -> AuditCase:
    return dataclasses.replace(_BY_NAME[name], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(_BY_NAME))
def test_audit_of_the_code_as_written_stays_below_the_claim(name: str) -> None:
    result = _audited(_BY_NAME[name])
    assert result.epsilon_lower_bound < result.claimed_epsilon
    assert result.delta_lower_bound < result.delta


@pytest.mark.parametrize(
    ("name", "defect"),
    [("one-group", HALF_NOISE), ("groups-of-two", SHORT_GROUP), ("ten-trials", SHARED_SAMPLER)],
)
def test_audit_exceeds_the_claim_when_a_defect_is_planted(name: str, defect: str) -> None:
    result = _audited(_variant(name, defect=defect))
    assert result.epsilon_lower_bound > result.claimed_epsilon
    assert result.delta_lower_bound > result.delta


def test_audit_runs_the_noise_station_of_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Mechanism, "noise", lambda self: GaussianNoise(std=self.noise_multiplier * self.sensitivity / 2)
    )
    assert _audited(_BY_NAME["one-group"]).exceeds


def test_audit_runs_the_clipping_station_of_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mechanism, "clipper", lambda self: GroupClipper(l2_clip_norm=3 * self.l2_clip_norm))
    assert _audited(_BY_NAME["one-group"]).exceeds


def test_audit_bound_of_short_group_stays_below_its_true_epsilon() -> None:
    """Exact for n = 2 → 3, S = 2, σ = 1: shifts of 3C and C with chances 2/3 and 1/3 give ε = 1.507."""
    assert _audited(_variant("groups-of-two", defect=SHORT_GROUP)).epsilon_lower_bound < 1.507


def test_audit_repeats_only_when_seeded() -> None:
    case = _variant("groups-of-two", runs_factor=1)
    seeded = [audit(case, num_runs=300, randomness=SeededNonPrivateRandomness(3)) for _ in range(2)]
    secret = [audit(case, num_runs=300) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert secret[0] != secret[1]


@pytest.mark.parametrize(("count", "total"), [(0, 50), (3, 50), (49, 50)])
def test_clopper_pearson_bound_leaves_exactly_the_tail(count: int, total: int) -> None:
    upper = float(clopper_pearson_upper(count, total, 0.025))
    assert stats.binom.cdf(count, total, upper) == pytest.approx(0.025)


def test_epsilon_bound_of_randomised_response_is_its_epsilon() -> None:
    wrong = 0.2  # answers truly with probability 0.8: ε = ln 4 at δ = 0
    assert float(epsilon_lower_bound(wrong, wrong, 0.0)) == pytest.approx(1.3862944)


def test_epsilon_bound_falls_with_delta_and_is_symmetric() -> None:
    assert epsilon_lower_bound(0.01, 0.6, 0.05) < epsilon_lower_bound(0.01, 0.6, 0.0)
    assert epsilon_lower_bound(0.01, 0.6, 0.05) == epsilon_lower_bound(0.6, 0.01, 0.05)


def test_epsilon_if_gaussian_inverts_the_gaussian_profile() -> None:
    """A Gaussian mechanism with μ = 1 has δ = 0.12693674 at ε = 1."""
    fpr = 0.1
    fnr = float(stats.norm.cdf(stats.norm.isf(fpr) - 1))
    assert epsilon_if_gaussian(fpr, fnr, 0.1269367) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"defect": "half-nose"},
        {"num_records": 0},
        {"num_trials": 0},
        {"mechanism": dataclasses.replace(_BY_NAME["one-group"].mechanism, noise_multiplier=0.0)},
        {"defect": SHORT_GROUP},
    ],
)
def test_audit_case_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        _variant("one-group", **change)


@pytest.mark.parametrize(
    "arguments",
    [["--runs", "10"], ["--confidence", "1"], ["--only", "one-grup"], ["--bogus"], ["--seed", "-1"]],
)
def test_command_refuses_bad_input(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)


def test_command_prints_every_row_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--only", "groups-of-two", "--runs", str(_RUNS), "--seed", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["defect"], row["exceeds"]) for row in rows] == [(None, False), (SHORT_GROUP, True)]
    assert code == 0


def test_command_fails_when_a_defect_goes_unseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = dataclasses.replace(_BY_NAME["one-group"].mechanism, noise_multiplier=20.0)
    unseen = _variant("one-group", mechanism=loud, defect=HALF_NOISE)
    monkeypatch.setattr(auditing, "standard_cases", lambda: (unseen,))
    assert main(["--runs", "200", "--seed", "0"]) == 1
    assert "NO" in capsys.readouterr().out
