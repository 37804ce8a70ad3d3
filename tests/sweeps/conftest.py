"""Fixtures of the sweep service's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpgcl_core.errors import DpgclError
from dpgcl_core.ledger.cap import Cap
from dpgcl_core.ledger.ledger import Ledger
from sweeps.service.planning.plan import SweepPlan
from tests.sweeps import support
from trainers.tracking.server import connect


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


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SweepPlan]:
    """`support.plan`, with calibrations that all tests share."""
    folder = tmp_path_factory.mktemp("calibration")

    def make(*arguments: str) -> SweepPlan:
        return support.plan(*arguments, calibrations=folder)

    return make


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
