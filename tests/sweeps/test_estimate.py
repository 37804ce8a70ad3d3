"""The estimate: what a sweep will cost, told before anything is spent."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.group_size import points
from sweeps.service.planning import duration
from sweeps.service.planning.duration import _num_embedded, estimate_seconds
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.running import driver
from tests.sweeps.support import contents, options, run_script, run_sweep

QUICK = ("--tiny", "--noise-multiplier", "1")
Plan = Callable[..., SweepPlan]


def test_estimate_is_positive(make_plan: Plan) -> None:
    assert estimate_seconds(make_plan(*QUICK)) > 0


@pytest.fixture
def a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record of a step takes a second, and an embedding a hundredth, whatever the machine does."""
    monkeypatch.setattr(duration, "seconds_per_record", lambda *_: 1.0)
    monkeypatch.setattr(duration, "_seconds_per_embedding", lambda *_: 0.01)


def test_estimate_grows_with_the_steps(make_plan: Plan, a_second: None) -> None:
    few, many = (make_plan(*QUICK, "--num-steps", count) for count in ("10", "1000"))
    records = few.trials[0].config.mechanism.expected_batch_size
    grown = estimate_seconds(many) - estimate_seconds(few)
    assert grown == pytest.approx(len(few.trials) * records * 990)


def test_estimate_grows_with_the_repeats(make_plan: Plan, a_second: None) -> None:
    once = estimate_seconds(make_plan(*QUICK))
    assert estimate_seconds(make_plan(*QUICK, "--repeats", "10")) == pytest.approx(10 * once)


def test_estimate_counts_the_scores_on_the_way(make_plan: Plan) -> None:
    rarely, often = (make_plan(*QUICK, "--score-every-steps", every) for every in ("0", "5"))
    once = _num_embedded(rarely, rarely.trials[0]) / 2
    assert _num_embedded(often, often.trials[0]) == (2 + 3) * once  # before training, after 5 and after 10


def test_estimate_covers_a_method_with_a_target_network(make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--method", "byol_groups", "--num-augmentations", "0", "--no-non-private")
    assert estimate_seconds(plan) > 0


def test_estimate_reads_no_record(make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--data-is", "private")
    shape_alone = SimpleNamespace(images=SimpleNamespace(shape=plan.data.train.images.shape))
    data: Any = SimpleNamespace(train=shape_alone, index=None, queries=None)
    assert estimate_seconds(dataclasses.replace(plan, data=data)) > 0


@pytest.mark.parametrize("size", ["batch", "16"])
def test_estimate_covers_every_kind_of_group(size: str, make_plan: Plan) -> None:
    assert estimate_seconds(make_plan(*QUICK, "--group-sizes", size)) > 0


def test_dry_run_tells_trials_epsilon_and_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chosen = options(*QUICK, "--group-sizes", "2", "4", "--storage", str(tmp_path / "root"), "--dry-run")
    assert run_sweep("group-size", chosen, points(chosen), lambda *_: []) == 0
    shown = capsys.readouterr().out
    assert f"storage: {tmp_path / 'root'}" in shown
    assert "4 trials = 4 points × 1 repeat\n" in shown
    assert len(re.findall(r"S[24]-Na1-private +σ = 1 +ε of one trial = \d+\.\d{4} +proven", shown)) == 2
    assert len(re.findall(r"S[24]-Na1-eps-inf +σ = 0 +ε of one trial = none +none", shown)) == 2
    assert "Open release: all 2 trials together ε = " in shown
    assert re.search(r"estimate: \d+ min \d\d s of training and embedding", shown)
    assert contents(tmp_path) == []


def test_dry_run_needs_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:1")  # nobody listens there
    monkeypatch.setattr(driver, "ray_session", lambda *_: pytest.fail("Ray was started"))
    code, out, err = run_script("group_size", *QUICK, "--dry-run", "--storage", str(tmp_path))
    assert code == 0, err
    assert "note: this machine cannot run the sweep: RAY_ADDRESS must be the host:port of a cluster" in out
    assert "estimate:" in out
