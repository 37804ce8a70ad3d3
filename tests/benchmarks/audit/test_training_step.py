"""The audit through the real training step: it keeps its claim as written, and planted defects are seen."""

from __future__ import annotations

import json

import pytest

from benchmarks.audit import defects
from benchmarks.audit.training_step import StepCase, audit_steps, main, standard_cases
from dpgcl_core.errors import ConfigError

pytestmark = pytest.mark.ci  # trainings and sweeps of seconds each

_CASES = standard_cases()
_ONE = [case for case in _CASES if case.num_workers == 1]
_TWO = [case for case in _CASES if case.num_workers == 2]


def _label(case: StepCase) -> str:
    return f"{case.name}: {case.defect_name or 'as written'}"


@pytest.mark.parametrize("defect", [None, defects.NO_NOISE.name, defects.NOISE_OF_TENSORS.name])
def test_audit_of_the_step_sees_a_planted_defect_and_nothing_else(defect: str | None) -> None:
    """The other defects take longer: the next two tests."""
    case = next(case for case in _ONE if (case.name, case.defect_name) == ("one-worker", defect))
    (result,) = audit_steps([case], num_runs=400, seed=1)
    assert result.as_expected


def _marked(case: StepCase) -> object:
    """Every sound case and, on two workers, one planted defect are seen in CI; a slice has the others."""
    quick = case.defect_name in (
        (None,) if case.num_workers == 1 else (None, "no noise in one worker's share")
    )
    mark = pytest.mark.ci if quick and case.runs_factor == 1 else pytest.mark.long
    return pytest.param(case, marks=mark, id=_label(case))


@pytest.mark.parametrize("case", map(_marked, _ONE))
def test_every_defect_of_the_step_on_one_worker_is_seen(case: StepCase) -> None:
    (result,) = audit_steps([case], seed=0)
    assert result.as_expected


@pytest.mark.parametrize("case", map(_marked, _TWO))
def test_every_defect_of_the_step_on_two_workers_is_seen(case: StepCase) -> None:
    (result,) = audit_steps([case], seed=0)
    assert result.as_expected


def test_step_on_two_workers_has_six_defects() -> None:
    assert len(_TWO) == 7


def test_secret_audit_of_the_step_trains_on_private_records() -> None:
    """Without a seed the step draws from the cryptographic stream, and nothing but its iterates is seen."""
    (result,) = audit_steps(_ONE[:1], num_runs=200)
    assert result.noise_as_claimed


def test_command_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--only", "empty-steps", "--runs", "400", "--seed", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["defect"] for row in rows] == [None, defects.QUIET_EMPTY.name]
    assert code == 0


@pytest.mark.parametrize("arguments", [["--runs", "10"], ["--only", "one-wroker"], ["--seed", "-1"]])
def test_command_refuses_bad_input(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(arguments)


def test_at_least_twelve_defects_are_planted() -> None:
    assert len({case.defect_name for case in standard_cases()} - {None}) >= 12
