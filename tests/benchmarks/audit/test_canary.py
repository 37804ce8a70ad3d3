"""The audit: the code as written stays below its claim, and each planted defect is seen."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from benchmarks.audit import canary as auditing
from benchmarks.audit import defects
from benchmarks.audit.bounds import clopper_pearson_upper, epsilon_if_gaussian, epsilon_lower_bound
from benchmarks.audit.canary import AuditCase, audit, main, standard_cases
from benchmarks.audit.defects import SHORT_GROUP, Defect, mask_lost, rest_kept
from benchmarks.audit.result import AuditResult
from benchmarks.audit.worst_cases import CANARY
from dpgcl_core.clipping.clipper import GroupClipper
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism import registry
from dpgcl_core.mechanism.mechanism import Mechanism
from dpgcl_core.mechanism.numbers import PublicNumbers
from dpgcl_core.methods.in_groups import DP_GCL, InGroups
from dpgcl_core.noise.gaussian import GaussianNoise
from dpgcl_core.noise.randomness import Draws, SeededNonPrivateRandomness
from dpgcl_core.sampling.stage import DrawnGroups, GroupStage

_RUNS = 1000
_CASES = standard_cases()
_BY_NAME = {case.name: case for case in _CASES if case.defect is None}
_FAST = [case for case in _CASES if case.mechanism.num_steps == case.num_trials == case.runs_factor == 1]
_LARGER = {"many-groups", "two-tensors"}


def _audited(case: AuditCase, seed: int = 1, runs: int = _RUNS) -> AuditResult:
    return audit(case, num_runs=runs, randomness=SeededNonPrivateRandomness(seed))


def _variant(name: str, **changes: object) -> AuditCase:
    return dataclasses.replace(_BY_NAME[name], **changes)  # type: ignore[arg-type]


def _label(case: AuditCase) -> str:
    return f"{case.name}: {case.defect.name if case.defect else 'as written'}"


def _marked(case: AuditCase) -> object:
    marks = [pytest.mark.ci] if case.name in _LARGER else []
    return pytest.param(case, id=_label(case), marks=marks)


@pytest.mark.parametrize("case", map(_marked, _FAST))
def test_audit_sees_planted_defects_and_nothing_else(case: AuditCase) -> None:
    """Those that few runs show; all of them: the next one."""
    assert _audited(case, runs=3 * _RUNS if case.defect is defects.LESS_NOISE else _RUNS).as_expected


@pytest.mark.ci
@pytest.mark.parametrize("case", _CASES, ids=_label)
def test_audit_of_the_command_sees_planted_defects_and_nothing_else(case: AuditCase) -> None:
    result = _audited(case, runs=auditing.DEFAULT_RUNS)
    assert result.as_expected
    assert result.exceeds == (result.delta_lower_bound > result.delta)
    assert result.exceeds == (case.defect is not None and case.defect.breaks_claim)


def test_audit_runs_the_noise_station_of_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _BY_NAME["many-groups"]
    claim = case.claim
    monkeypatch.setattr(AuditCase, "claim", claim)
    monkeypatch.setattr(
        Mechanism, "noise", lambda self: GaussianNoise(std=self.noise_multiplier * self.sensitivity / 2)
    )
    assert _audited(case).exceeds


def test_audit_runs_the_clipping_station_of_the_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = GroupClipper(l2_clip_norm=3.0)
    monkeypatch.setattr(Mechanism, "rule", lambda self, loss: loose)
    assert _audited(_BY_NAME["many-groups"]).exceeds


def test_audit_honours_the_mask_of_incomplete_groups() -> None:
    masked = Defect(name="the rest is computed and masked", plant=rest_kept(complete=False))
    assert not _audited(_variant("groups-of-two", defect=masked)).exceeds


@dataclass(frozen=True)
class _Slots:
    """Two blocks of four slots, both of them kept; one of the slots is empty on D."""

    yields_incomplete: bool = True

    def draw(self, num_records: int, *, sampling: Draws, permutation: Draws) -> DrawnGroups:
        kept = permutation.permutation(np.arange(8)).reshape(2, 4)
        return DrawnGroups(
            rows=np.where(kept < num_records, kept, 0),
            complete=np.all(kept < num_records, axis=1),
            batch_size=kept.size,
        )


@dataclass(frozen=True, kw_only=True)
class _OfSlots(InGroups):
    @property
    def sampling(self) -> str:
        return "blocks of slots, for this test"

    def group_stage(self, numbers: PublicNumbers) -> GroupStage:
        return _Slots()

    def sensitivity(self, numbers: PublicNumbers) -> float:
        return numbers.l2_clip_norm


@pytest.mark.parametrize("defect", [None, Defect(name="incomplete block kept", plant=mask_lost)])
def test_audit_runs_a_methods_own_stage_with_its_mask(
    defect: Defect | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marked(members: tuple[int, ...], *, group_size: int | None, dim: int) -> NDArray[np.float64]:
        return np.ones(dim) if CANARY in members else -np.ones(dim)

    fields = {each.name: getattr(DP_GCL, each.name) for each in dataclasses.fields(DP_GCL) if each.init}
    method = _OfSlots(**(fields | {"name": "test_of_slots"}))
    monkeypatch.setitem(registry._registry._all(), method.name, method)
    mechanism = dataclasses.replace(
        _BY_NAME["groups-of-one"].mechanism,
        method=method.name,
        group_size=4,
        num_records_public=8,
        sampling_prob=1.0,
    )
    case = AuditCase(name="slots", mechanism=mechanism, num_records=7, worst=marked, defect=defect)
    assert _audited(case).as_expected


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
        {"num_records": 0},
        {"num_trials": 0},
        {"dim": 0},
        {"mechanism": dataclasses.replace(_BY_NAME["one-group"].mechanism, noise_multiplier=0.0)},
        {"mechanism": dataclasses.replace(_BY_NAME["one-group"].mechanism, method="dp_sgd", batch_cap=40)},
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
    code = main(["--only", "order", "--runs", str(_RUNS), "--seed", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["defect"], row["exceeds"]) for row in rows] == [(None, False), ("no permutation", True)]
    assert code == 0


def test_command_fails_when_a_defect_goes_unseen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = dataclasses.replace(_BY_NAME["many-groups"].mechanism, noise_multiplier=20.0)
    unseen = _variant("many-groups", mechanism=loud, defect=defects.BATCH_NORMALISED)
    monkeypatch.setattr(auditing, "standard_cases", lambda: (unseen,))
    assert main(["--runs", "200", "--seed", "0"]) == 1
    assert "NO" in capsys.readouterr().out
