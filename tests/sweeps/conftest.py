"""Fixtures of the sweep service's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets

from dpgcl_core.accounting import composition
from dpgcl_core.errors import DpgclError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.planning import plan as plan_module
from sweeps.service.planning import trial_configs
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.running import outbox, reporting
from tests.sweeps import support
from trainers.tracking.mlflow_server import connect


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the storage, server or cluster of whoever runs it."""
    for name in (
        "DPGCL_STORAGE",
        "DPGCL_LEDGER",
        "MLFLOW_TRACKING_URI",
        "RAY_ADDRESS",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def empty_reports(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Sweeps in the test's own process write an empty report, but where the test is about it."""

    def write(uri: str, name: str, folder: Path) -> Path:
        (folder / reporting.REPORT).write_text("")
        return folder / reporting.REPORT

    if "real_reports" not in request.fixturenames:
        monkeypatch.setattr(reporting, "write_report", write)


@pytest.fixture
def real_reports() -> None:
    """Sweeps write their reports."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer is asked as often, without pauses."""
    monkeypatch.setattr(outbox, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture(autouse=True, scope="session")
def remembered() -> Iterator[None]:
    """Many plans have the same steps and records: these are accounted for and read once."""
    known: dict[Any, float] = {}
    by_accountant, by_prv = composition._epsilon, plan_module.epsilon_prv

    def epsilon(accountant: Any, event: Any, delta: float) -> float:
        grid = getattr(accountant, "_value_discretization_interval", None)
        key = (type(accountant), grid, repr(event), delta)
        if key not in known:
            known[key] = by_accountant(accountant, event, delta)
        return known[key]

    def epsilon_prv(**steps: float) -> float:
        key = tuple(sorted(steps.items()))
        if key not in known:
            known[key] = by_prv(**steps)  # type: ignore[arg-type]
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", cache(sklearn.datasets.load_digits))
        patch.setattr(composition, "_epsilon", epsilon)
        patch.setattr(plan_module, "epsilon_prv", epsilon_prv)
        yield


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SweepPlan]:
    """`support.plan`, with calibrations that all tests share."""
    folder = tmp_path_factory.mktemp("calibration")

    def make(*arguments: str) -> SweepPlan:
        return support.plan(*arguments, calibrations=folder)

    return make


@pytest.fixture(scope="session")
def fingerprint(make_plan: Callable[..., SweepPlan]) -> Callable[..., str]:
    """The fingerprint of options, remembered; networks are not tried out, which other tests have done."""

    @cache
    def found(*arguments: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trial_configs, "_check_network", lambda *_: 1)
            return make_plan(*arguments).fingerprint

    return found


@pytest.fixture(scope="session")
def refusal(make_plan: Callable[..., SweepPlan]) -> Callable[..., str]:
    """The message with which options are refused, at the latest in planning."""

    def message(*arguments: str) -> str:
        with pytest.raises(DpgclError) as caught:
            make_plan(*arguments)
        return str(caught.value)

    return message


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, which take seconds to create."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{path}", create=True)
    return path


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger of two data sets, ε = 8 each."""
    created = Ledger.create(str(tmp_path / "ledger.db"))
    for name in ("scans", "others"):
        created.register(name, Cap(epsilon=8.0, delta=1e-5), num_records_public=10_000)
    return created
