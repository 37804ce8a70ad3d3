"""`--total-epsilon`: the largest ε of one training at which a sweep and its ledger stay within a total."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpgcl_core.errors import ConfigError, LedgerError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps import group_size, methods
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.inputs import PlanInputs
from sweeps.service.planning.plan import planned_trials
from sweeps.service.planning.sweep_cost import cost_of
from sweeps.service.planning.trials import Trial
from sweeps.service.privacy.ledger_choice import open_ledger
from sweeps.service.privacy.reservations import planned_trainings
from sweeps.service.running import prepare, total_epsilon
from sweeps.service.running.total_epsilon import Limits, TrialsOf, fixes_noise
from sweeps.service.storage.sweep_folder import SweepFolder
from tests.sweeps import support
from trainers.config.tree import replace_options

SMALL = ("--tiny", "--num-records-public", "1445", "--no-non-private", "--group-sizes", "2", "4")
DELTA = 1e-4


@pytest.fixture(scope="module")
def trials_of(tmp_path_factory: pytest.TempPathFactory) -> TrialsOf:
    """The trials of a sweep over digits, calibrated once for all tests."""
    folder = tmp_path_factory.mktemp("calibration")
    data, _ = support.loaded(support.options(*SMALL))

    def found(options: SweepOptions) -> list[Trial]:
        assert isinstance(options, group_size.GroupSizeOptions)
        points = group_size.points(options)
        return planned_trials(
            PlanInputs(
                question="group-size",
                options=options,
                points=points,
                data=data,
                calibration_folder=folder,
            )
        )

    return found


@pytest.fixture
def chosen() -> group_size.GroupSizeOptions:
    return support.options(*SMALL, "--repeats", "2")


def make_ledger(folder: Path, epsilon: float) -> Ledger:
    ledger = Ledger.create(str(folder / "ledger.db"))
    ledger.register("scans", Cap(epsilon=epsilon, delta=DELTA), num_records_public=1445)
    return ledger


def limits_of(
    options: group_size.GroupSizeOptions, trials_of: TrialsOf, total: float, ledger: Ledger | None = None
) -> Limits:
    """The limits of a sweep, by default a total ε alone."""
    return Limits(
        options=options,
        points=group_size.points(options),
        trials_of=trials_of,
        total_epsilon=total,
        account=None if ledger is None else (ledger, "scans"),
    )


def cost_at(options: SweepOptions, epsilon: float, trials_of: TrialsOf, delta: float | None = None) -> float:
    cost = cost_of(options.release, trials_of(replace_options(options, epsilon=epsilon)), delta=delta)
    assert cost is not None
    assert cost.tuned_epsilon is not None
    return cost.tuned_epsilon


@pytest.mark.ci
def test_fitted_epsilon_is_the_largest_within_the_total(
    chosen: group_size.GroupSizeOptions, trials_of: TrialsOf
) -> None:
    fit = limits_of(chosen, trials_of, 3.0).fit(has_fixed_noise=False)
    assert fit.epsilon is not None
    assert (
        3.0 * 0.97
        < cost_at(chosen, fit.epsilon, trials_of)
        <= 3.0
        < cost_at(chosen, fit.epsilon * 1.03, trials_of)
    )


@pytest.mark.ci
def test_fitted_epsilon_is_held_by_the_ledger_at_its_delta(
    chosen: group_size.GroupSizeOptions, trials_of: TrialsOf, tmp_path: Path
) -> None:
    """The filter counts at one order, so it admits less than the cap's ε by PLD."""
    ledger = make_ledger(tmp_path, 3.0)
    epsilon = limits_of(chosen, trials_of, 3.0, ledger).fit(has_fixed_noise=False).epsilon
    assert epsilon is not None
    assert cost_at(chosen, epsilon, trials_of, DELTA) <= 3.0

    def planned(epsilon: float) -> list[Trial]:
        return list(trials_of(replace_options(chosen, epsilon=epsilon)))

    ledger.would_admit("scans", planned_trainings({t.name: t for t in planned(epsilon)}))
    with pytest.raises(LedgerError):
        ledger.would_admit("scans", planned_trainings({t.name: t for t in planned(epsilon * 1.03)}))


def test_given_noise_lowers_the_repeats(chosen: group_size.GroupSizeOptions, trials_of: TrialsOf) -> None:
    options = replace_options(chosen, noise_multiplier=2.0, repeats=5)
    of_three = cost_of(options.release, trials_of(replace_options(options, repeats=3)))
    assert of_three is not None
    assert of_three.tuned_epsilon is not None
    limits = limits_of(options, trials_of, of_three.tuned_epsilon * 1.001)
    fit = limits.fit(has_fixed_noise=fixes_noise(options, limits.points))
    assert (fit.epsilon, fit.repeats) == (None, 3)


@pytest.mark.ci
def test_refusal_says_which_epsilon_repeats_and_values_fit(
    chosen: group_size.GroupSizeOptions, trials_of: TrialsOf, tmp_path: Path
) -> None:
    options = replace_options(chosen, epsilon=2.0, repeats=3)
    needed = cost_of(options.release, trials_of(replace_options(options, repeats=1)))
    assert needed is not None
    assert needed.tuned_epsilon is not None
    told = limits_of(options, trials_of, needed.tuned_epsilon * 1.001).what_would_fit(has_fixed_noise=True)
    assert "--repeats 1" in told
    assert "--epsilon 1." in told


def test_nothing_to_fit_without_a_guarantee(trials_of: TrialsOf) -> None:
    options = support.options("--tiny", "--seeded-non-private")
    with pytest.raises(ConfigError, match="needs trainings with a guarantee, and none is planned"):
        limits_of(options, trials_of, 3.0).fit(has_fixed_noise=False)


def test_comparison_of_methods_leaves_its_epsilon_to_be_found() -> None:
    options = replace_options(methods.MethodsOptions().tiny(), total_epsilon=3.0)
    assert all("epsilon" not in each.changes for each in methods.candidates(options))
    assert {each.changes["epsilon"] for each in methods.candidates(methods.MethodsOptions().tiny())} == {10.0}


def test_resumed_sweep_keeps_its_fit(tmp_path: Path, chosen: group_size.GroupSizeOptions) -> None:
    fit = total_epsilon.Fit(total_epsilon=3.0, epsilon=1.23, repeats=2)
    for name, params in (("other", {}), ("one", fit.params())):
        SweepFolder(tmp_path / "sweeps" / name).create({"params": params})

    def fitted(name: str, total_epsilon: float) -> Any:
        options = replace_options(chosen, total_epsilon=total_epsilon, name=name, resume=True)
        limits: Any = SimpleNamespace(total_epsilon=total_epsilon, fit=lambda **_: "anew")
        inputs: Any = SimpleNamespace(options=options)
        return prepare._fit(inputs, limits, tmp_path, has_fixed_noise=False)

    assert fitted("one", 3.0) == fit
    assert fitted("other", 3.0) == "anew"
    with pytest.raises(ConfigError, match="keeps its --total-epsilon, which is 3; got 4"):
        fitted("one", 4.0)


@pytest.mark.ci
def test_command_line_plans_within_the_total_and_tells_the_ledgers_side(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, 3.0)
    given = ("--dry-run", "--storage", str(tmp_path / "st"), "--ledger", ledger.url, "--dataset-id", "scans")
    small = ("--tiny", "--no-non-private", "--group-sizes", "2", "4", "--total-epsilon", "3")
    code, out, err = support.run_script("group_size", *given, *small)
    assert (code, err) == (0, "")
    assert "--total-epsilon: ε = " in out
    assert "ledger: 'scans' has a cap ε = 3 at δ = 0.0001 for everything ever charged to it" in out
    code, out, err = support.run_script("group_size", *given, *small[:-2], "--epsilon", "3")
    assert code == 2
    assert "What would fit: --epsilon " in err


def test_missing_ledger_and_data_set_print_the_line_to_run(tmp_path: Path) -> None:
    def refusal(url: str, dataset_id: str) -> str:
        given = support.given(dataset="npz:none", ledger=url, dataset_id=dataset_id, unit_column="patient")
        with pytest.raises(LedgerError) as caught:
            open_ledger(given.data, given.ledger)
        return str(caught.value)

    line = "python -m dpgcl_core.ledger cap --create --ledger {} --dataset scans --unit patient --epsilon E"
    assert line.format(tmp_path / "none.db") in refusal(str(tmp_path / "none.db"), "scans")
    ledger = make_ledger(tmp_path, 3.0)
    line = f"python -m dpgcl_core.ledger cap --ledger {ledger.url} --dataset scns --unit patient --epsilon E"
    assert line in refusal(ledger.url, "scns")
