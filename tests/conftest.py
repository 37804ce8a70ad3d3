"""What all tests share: a quiet environment, one thread each, and no silent skips in CI."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The user's own services must not be touched by tests.
for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "DPGCL_STORAGE"):
    os.environ.pop(name, None)
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """With `DPGCL_NO_SKIPS`, which .ci/run sets, a skipped test is a failed one."""
    report = yield
    if report.skipped and os.environ.get("DPGCL_NO_SKIPS") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which DPGCL_NO_SKIPS forbids: {report.longrepr}"
    return report
