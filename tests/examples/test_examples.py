"""The examples run as they stand, those of sweeps on Ray; `test_wheel` runs the library's without Ray."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from dpgcl_core.attempts import Attempts, DrawCounts
from dpgcl_core.mechanism import registry
from dpgcl_core.mechanism.method import LossSettings
from dpgcl_core.mechanism.registry import METHODS, method_named
from tests.processes import free_port
from tests.programs import ROOT, run_program
from tests.sweeps.support import train_here
from trainers.torchvision_import import script_import

EXAMPLES = ROOT / "examples"


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an example registers is forgotten after the test."""
    assert METHODS
    monkeypatch.setattr(registry._registry, "_methods", dict(registry._registry._methods))
    path = list(sys.path)
    yield
    sys.path[:] = path  # a sweep's script puts its own copy of the code first


def _run(example: str, *arguments: str) -> str:
    done = run_program([str(EXAMPLES / example), *arguments], cwd=ROOT, environment=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.ci
def test_own_loop_is_short_and_meets_its_target() -> None:
    text = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 30
    said = _run("own_loop.py")
    (epsilon,) = re.findall(r"^ε = (\d+\.\d+) at δ = 6\.6e-05$", said, re.MULTILINE)
    assert 7.9 < float(epsilon) <= 8.0


@pytest.mark.ci
def test_own_loop_in_two_processes_is_resumed_and_meets_its_target(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    statements = []
    for _ in range(2):
        done = subprocess.run(
            [*launch, f"--master-port={free_port()}", str(EXAMPLES / "own_loop_processes.py"), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        # gloo's threads abort at times while they end (PyTorch 2.13), after all output
        assert done.returncode == 0 or "without an active exception" in done.stderr, done.stderr
        statements += re.findall(r"^ε = (\d\.\d+) .* after 50 of 50 steps and 10 repeated", done.stdout, re.M)
    assert len(statements) == 2
    assert len(set(statements)) == 1
    assert 7.9 < float(statements[0]) <= 8.0
    assert Attempts(tmp_path / "attempts").total() == DrawCounts(num_attempts=1, num_steps=50)


@pytest.mark.ci
def test_own_loop_in_lightning_is_short_and_meets_its_target(tmp_path: Path) -> None:
    example = EXAMPLES / "own_loop_lightning.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 40
    program = tmp_path / "program.py"
    program.write_text(f"{script_import('runpy')}; runpy.run_path({str(example)!r}, run_name='__main__')")
    done = run_program([str(program)], cwd=ROOT, environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    (epsilon,) = re.findall(r"^ε = (\d+\.\d+) at", done.stdout, re.MULTILINE)
    assert 7.9 < float(epsilon) <= 8.0


@pytest.mark.ci
def test_accounting_prints_what_the_accountants_say() -> None:
    said = _run("accounting.py")
    assert "one training: ε = 3.065 at δ = 1.5e-06\nnoise on the sum: 1.94, sensitivity: 1\n" in said
    assert "records sampled: ε = 9.143\nnoise on the sum: 1.94, sensitivity: 2\n" in said
    opened, sealed = (float(re.findall(rf"{kind}: ε = (\d+\.\d+)", said)[0]) for kind in ("open", "sealed"))
    assert opened == pytest.approx(16.51, abs=0.02)
    assert sealed == pytest.approx(6.37, abs=0.02)


@pytest.mark.usefixtures("forgets")
def test_custom_loss_is_registered_and_sees_its_own_group_alone() -> None:
    runpy.run_path(str(EXAMPLES / "custom_method.py"), run_name="custom_method")
    loss = method_named("decoupled").loss(LossSettings(temperature=0.5))
    assert loss is not None
    groups = normalize(torch.rand(3, 4, 2, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = loss(groups)
    similarities = groups[1, :, 0] @ groups[1, :, 1].T / 0.5
    slow = sum(
        -similarities[i, i] + torch.logsumexp(similarities[i][torch.arange(4) != i], dim=0) for i in range(4)
    )
    torch.testing.assert_close(found[1], torch.as_tensor(slow))
    torch.testing.assert_close(loss(groups[1:2])[0], found[1])


@pytest.mark.ray
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.long, id="in-place"),
        pytest.param(("--worker-processes",), marks=pytest.mark.ci, id="in-workers"),
    ],
)
def test_custom_method_is_swept_in_workers_that_never_saw_its_file(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """In the trial's own process, or in a worker group's."""
    common = ("--tiny", "--no-non-private", "--noise-multiplier", "1", "--storage", str(tmp_path))
    _run("custom_method.py", *common, *more, "--name", "one", "--method", "decoupled")
    folder = tmp_path / "sweeps" / "one"
    assert len(list((folder / "trials").glob("*.json"))) == 1
    assert "decoupled" in (folder / "privacy_statement.md").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("here", marks=pytest.mark.ci),
        pytest.param("on Ray", marks=[pytest.mark.long, pytest.mark.ray]),
    ],
)
@pytest.mark.usefixtures("forgets")
def test_sweep_from_python_returns_trials_the_best_setting_and_both_epsilons(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if where == "here":
        train_here(monkeypatch)
        monkeypatch.setattr(sys, "argv", ["python_sweep.py", str(tmp_path)])
        runpy.run_path(str(EXAMPLES / "python_sweep.py"), run_name="__main__")
        said = capsys.readouterr().out
    else:
        said = _run("python_sweep.py", str(tmp_path))
    assert len(re.findall(r"^\d +trial-\d", said, re.MULTILINE)) == 3
    (best,) = re.findall(
        r"^best: \{'group_size': \d, 'learning_rate': .*, cautious_accuracy (0\.\d+)", said, re.M
    )
    one, whole = re.findall(r"ε of one training: (\d+\.\d+), of the whole search: (\d+\.\d+)", said)[0]
    assert 7.9 < float(one) <= 8.0 < float(whole)
    assert float(best) > 0.2
