"""The calculator's command line: figures, JSON, tables, and one line for bad input."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess

import pytest

from dpgcl_core import calculator
from dpgcl_core.accounting import composition
from dpgcl_core.accounting.composition import epsilon_of_steps
from dpgcl_core.errors import ConfigError
from tests.programs import ROOT, run_program

S1 = {"--sampling-prob": "0.01", "--noise-multiplier": "1.0", "--num-steps": "1000", "--delta": "1e-5"}
SEALED = {"--mode": "sealed", "--mean-trials": "10"}


def _arguments(command: str, options: dict[str, str]) -> list[str]:
    return [command, *(part for option in options.items() for part in option)]


def _json(capsys: pytest.CaptureFixture[str], command: str, options: dict[str, str]) -> dict[str, object]:
    assert calculator.main([*_arguments(command, options), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(["-m", "dpgcl_core.calculator", *arguments], cwd=ROOT, environment=os.environ)


@pytest.mark.parametrize(
    ("accountant", "expected", "tolerance"), [("pld", 1.82824365, 5e-4), ("rdp", 2.10136653, 1e-6)]
)
def test_epsilon_matches_reference(
    capsys: pytest.CaptureFixture[str], accountant: str, expected: float, tolerance: float
) -> None:
    result = _json(capsys, "epsilon", {**S1, "--accountant": accountant})
    assert result["epsilon"] == pytest.approx(expected, abs=tolerance)


def test_epsilon_is_by_pld_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, "epsilon", S1)
    assert result["accountant"] == "pld"
    assert result["epsilon"] == pytest.approx(1.82824365, abs=5e-4)


def test_epsilon_by_prv_is_the_accountants(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, float]] = []
    monkeypatch.setattr(composition, "epsilon_prv", lambda **options: asked.append(options) or 1.25)
    result = _json(capsys, "epsilon", {**S1, "--num-steps": "50", "--accountant": "prv"})
    assert (result["accountant"], result["epsilon"]) == ("prv", 1.25)
    assert asked == [{"sampling_prob": 0.01, "noise_multiplier": 1.0, "num_steps": 50, "delta": 1e-5}]


def test_noise_meets_the_target_and_reports_the_epsilon_reached(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--sampling-prob": "0.01", "--num-steps": "1000", "--delta": "1e-5", "--epsilon": "2"}
    result = _json(capsys, "noise", options)
    reached = epsilon_of_steps(
        sampling_prob=0.01, noise_multiplier=float(result["noise_multiplier"]), num_steps=1000, delta=1e-5
    )
    assert result["epsilon"] == pytest.approx(reached, abs=1e-6)
    assert 1.99 <= reached <= 2.0


@pytest.mark.parametrize(
    ("options", "expected", "tolerance"),
    [
        ({"--mode": "open", "--num-trials": "10"}, 6.18774498, 5e-4),
        ({**SEALED, "--law": "tnb", "--eta": "1", "--bound": "profile"}, 2.870965, 5e-4),
        ({**SEALED, "--law": "tnb", "--eta": "0", "--bound": "profile"}, 2.704514, 5e-4),
        ({**SEALED, "--law": "tnb", "--eta": "1", "--bound": "pointwise"}, 2.7285, 3e-3),
        ({**SEALED, "--law": "tnb", "--eta": "1", "--bound": "ps22"}, 4.10327066, 1e-6),
        (SEALED, 2.870965, 5e-4),
    ],
    ids=["open", "profile", "logarithmic", "pointwise", "ps22", "defaults"],
)
def test_tuning_matches_reference(
    capsys: pytest.CaptureFixture[str], options: dict[str, str], expected: float, tolerance: float
) -> None:
    result = _json(capsys, "tuning", {**S1, **options})
    assert result["training_epsilon"] == pytest.approx(1.82824365, abs=5e-4)
    assert result["tuned_epsilon"] == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("bound", ["profile", "pointwise", "ps22"])
def test_tuning_by_poisson_costs_more_than_one_training(
    capsys: pytest.CaptureFixture[str], bound: str
) -> None:
    result = _json(capsys, "tuning", {**S1, **SEALED, "--law": "poisson", "--bound": bound})
    assert result["law"] == {"name": "poisson", "mean": 10.0}
    assert result["training_epsilon"] < result["tuned_epsilon"] < 6.18774498


def test_tuning_with_a_cap_uses_the_capped_law(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, "tuning", {**S1, **SEALED, "--max-trials": "30", "--bound": "pointwise"})
    assert result["law"]["name"] == "truncated tnb"
    assert result["law"]["mean"] < 10 == pytest.approx(result["law"]["uncapped_mean"])


def test_tuning_by_binomial_reports_its_law(capsys: pytest.CaptureFixture[str]) -> None:
    options = {**S1, **SEALED, "--law": "binomial", "--max-trials": "40"}
    assert _json(capsys, "tuning", options)["law"] == {
        "name": "binomial",
        "max_trials": 40,
        "prob": 0.25,
        "mean": 10.0,
    }


def test_tuning_by_threshold_costs_between_training_and_best_of_k(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, "tuning", {**S1, "--mode": "sealed-threshold", "--halting-prob": "0.1"})
    assert result["training_epsilon"] < result["tuned_epsilon"] < 2.870965


def test_table_shows_the_figures_without_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert calculator.main(_arguments("tuning", {**S1, **SEALED})) == 0
    rows = dict(line.split("   ", 1) for line in capsys.readouterr().out.splitlines())
    shown = {name.strip(): value.strip() for name, value in rows.items()}
    assert float(shown["tuned_epsilon"]) == pytest.approx(2.870965, abs=5e-4)
    assert shown["law: gamma"] == "0.1"
    assert shown["reason"] == "-"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--sampling-prob", "0", "sampling_prob must be in"),
        ("--sampling-prob", "1.5", "sampling_prob must be in"),
        ("--sampling-prob", "nan", "sampling_prob must be in"),
        ("--noise-multiplier", "0", "noise_multiplier must be"),
        ("--noise-multiplier", "-1", "noise_multiplier must be"),
        ("--noise-multiplier", "nan", "noise_multiplier must be"),
        ("--noise-multiplier", "inf", "noise_multiplier must be"),
        ("--num-steps", "0", "num_steps must be a whole number of at least 1; got 0"),
        ("--num-steps", "1.5", "--num-steps must be a whole number; got '1.5'"),
        ("--delta", "0", "delta must be in"),
        ("--delta", "1", "delta must be in"),
        ("--delta", "nan", "delta must be in"),
        ("--delta", "small", "--delta must be a number; got 'small'"),
        ("--delta", "1e-300", "epsilon is not finite at delta = 1e-300"),
        ("--accountant", "gdp", "invalid choice 'gdp'"),
        ("--num-steps", "10000000000", "epsilon must stay below 1000"),
    ],
)
def test_bad_training_is_refused(option: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        calculator.main(_arguments("epsilon", {**S1, option: value}))


@pytest.mark.parametrize("value", ["0", "-2", "nan", "inf"])
def test_bad_target_is_refused(value: str) -> None:
    options = {"--sampling-prob": "0.01", "--num-steps": "10", "--delta": "1e-5", "--epsilon": value}
    with pytest.raises(ConfigError, match="target_epsilon must be positive and finite"):
        calculator.main(_arguments("noise", options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**SEALED, "--eta": "-1"}, "eta must be"),
        ({**SEALED, "--eta": "nan"}, "eta must be"),
        ({**SEALED, "--mean-trials": "0.5"}, "mean number of trials must be in"),
        ({**SEALED, "--mean-trials": "nan"}, "mean number of trials must be in"),
        ({**SEALED, "--law": "poisson", "--mean-trials": "0.5"}, "mean number of trials must be in"),
        ({**SEALED, "--law": "poisson", "--eta": "1"}, "--eta applies only to --law tnb; got --law poisson"),
        ({**SEALED, "--law": "binomial"}, "--law binomial needs --max-trials"),
        ({**SEALED, "--law": "binomial", "--max-trials": "10"}, "--max-trials must be above"),
        ({**SEALED, "--max-trials": "0"}, "max_trials must be a whole number"),
        ({**SEALED, "--num-trials": "3"}, "--num-trials applies only to --mode open; got --mode sealed"),
        ({"--mode": "sealed"}, "--mode sealed needs --mean-trials"),
        ({"--mode": "open"}, "--mode open needs --num-trials"),
        ({"--mode": "open", "--num-trials": "0"}, "count must be a whole number"),
        (
            {"--mode": "open", "--num-trials": "3", "--bound": "profile"},
            "--bound applies only to --mode sealed; got --mode open",
        ),
        ({"--mode": "sealed-threshold"}, "--mode sealed-threshold needs --halting-prob"),
        ({"--mode": "sealed-threshold", "--halting-prob": "0"}, "halting_prob must be in"),
        ({"--mode": "ajar"}, "invalid choice 'ajar'"),
    ],
)
def test_bad_tuning_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calculator.main(_arguments("tuning", {**S1, **options}))


def test_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown option '--detla'; did you mean '--delta'"):
        calculator.main([*_arguments("epsilon", S1), "--detla", "1e-6"])


def test_options_are_not_abbreviated() -> None:
    with pytest.raises(ConfigError, match="unknown option '--acc'"):
        calculator.main([*_arguments("epsilon", S1), "--acc", "rdp"])


def test_infinite_bound_is_refused_in_place_of_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dpgcl_core.accounting.composition.epsilon_of_steps", lambda **_: math.inf)
    with pytest.raises(ConfigError, match="epsilon is not finite at delta = 1e-05"):
        calculator.main(_arguments("epsilon", S1))
    assert capsys.readouterr().out == ""


@pytest.mark.ci
def test_command_prints_one_json_object() -> None:
    done = _run(*_arguments("epsilon", S1), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["epsilon"] == pytest.approx(1.82824365, abs=5e-4)
    assert done.stderr == ""


@pytest.mark.ci
def test_bad_input_is_one_line_and_exit_code_two() -> None:
    done = _run(*_arguments("tuning", {**S1, **SEALED, "--mean-trials": "0.5"}), "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: the mean number of trials must be in [1, 1e+06]; got 0.5")
    assert len(done.stderr.splitlines()) == 1


def test_help_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        calculator.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("epsilon", "noise", "tuning"))


def test_cap_on_a_threshold_sweep_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    given = {**S1, "--mode": "sealed-threshold", "--halting-prob": "0.1"}
    whole = _json(capsys, "tuning", given)["tuned_epsilon"]
    assert _json(capsys, "tuning", {**given, "--max-trials": "12"})["tuned_epsilon"] < whole
