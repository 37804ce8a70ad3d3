"""The Python blocks of the pages run as they stand."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core.losses.info_nce import two_view_group_loss
from sweeps.service.planning.space import Axis
from sweeps.service.running.study import SearchStudy
from tests.docs.commands import ROOT, blocks
from tests.trainers.exporting import write_small_model


def _run(code: str, **names: object) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "page", "exec"), dict(names))
    return said.getvalue()


def test_readme_training_runs_in_a_loop_of_ones_own() -> None:
    """What the README calls yours is given here; the step trains, and prints its ε."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def group_losses(views: Tensor) -> Tensor:
        embeddings = model(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return two_view_group_loss(normalize(embeddings, dim=-1), temperature=0.5)

    (code,) = blocks(ROOT / "README.md", "python")
    assert len(code.splitlines()) <= 16
    code, shorter = re.subn(r"num_steps=\d+", "num_steps=5", code)
    assert shorter == 1
    said = _run(
        code,
        data_loader=DataLoader(TensorDataset(torch.rand(2000, 2, 8, 8)), batch_size=64),
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        group_losses=group_losses,
    )
    (epsilon,) = re.fullmatch(r"ε = (\d+\.\d\d) at δ = 6\.6e-05\n", said).groups()  # type: ignore[union-attr]
    assert 7.9 < float(epsilon) <= 8.0
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_page_on_ones_own_loop_shows_the_example() -> None:
    """It is run by tests/examples."""
    code, *_ = blocks(ROOT / "docs/own-loop.md", "python")
    assert code == (ROOT / "examples/own_loop.py").read_text(encoding="utf-8")


def test_readme_states_what_the_accountant_computes_for_both_samplings() -> None:
    """The same noise under both samplings, as the page on ε computes it."""
    page = ROOT / "docs/epsilon.md"
    (code,) = blocks(page, "python")
    said = _run(code)
    assert said in page.read_text(encoding="utf-8")
    small, large, paper, published = (float(each) for each in re.findall(r"ε = (\d+\.\d{3})", said))
    assert (round(small, 1), round(large, 1)) == (1.0, 6.7)
    assert small <= 1
    assert (math.ceil(100 * paper) / 100, round(published, 2)) == (3.07, 9.14)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "ε is 1.0 instead of the published scheme's 6.7" in readme
    assert "3.07 instead of 9.14 in the paper's Fashion-MNIST setting" in readme
    assert "(B = 2,048, T = 1,200, noise of standard deviation 1.94 C)" in readme


@pytest.mark.ci
def test_blocks_on_accounting_and_training_run() -> None:
    _, accounting, training = blocks(ROOT / "docs/own-loop.md", "python")
    opened, sealed = re.findall(r"(?:shown|number): (\d+\.\d\d)", _run(accounting))
    assert 0 < float(sealed) < float(opened)
    assert re.fullmatch(r"ε = (7\.9\d|8\.00), k-NN accuracy 0\.\d\d\n", _run(training))


def test_three_lines_embed_images_with_an_exported_model(tmp_path: Path) -> None:
    """The folder of the model and that of the photographs are given; the page's lines do the rest."""
    write_small_model(tmp_path / "m")
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = np.full((9, 9, 3), 50 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{number}.png")
    (code,) = blocks(ROOT / "docs/models.md", "python")
    assert len([line for line in code.splitlines() if line and not line.startswith("from")]) == 3
    found: dict[str, Any] = {"FOLDER": tmp_path / "m", "PHOTOS": tmp_path / "photos"}
    exec(compile(code, "page", "exec"), found)
    assert found["names"].tolist() == ["0.png", "1.png", "2.png"]
    assert found["embeddings"].shape == (3, found["encoder"].feature_dim)


@pytest.mark.parametrize("objectives", [["knn_accuracy"], ["knn_accuracy", "epsilon"]])
def test_optuna_draws_the_kept_study_of_a_search(
    objectives: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dpgcl-results/sweeps/NAME"
    folder.mkdir(parents=True)
    searched = [
        Axis(option="learning_rate", low=0.01, high=1.0),
        Axis(option="group_size", choices=(4, 8)),
    ]
    study = SearchStudy(folder, objectives, searched)
    for number in range(1, 9):
        values = {"learning_rate": 0.1 * number, "group_size": 4 * (1 + number % 2)}
        metrics = {"knn_accuracy": 0.5 + 0.01 * number, "epsilon": 1.0 * number}
        study.add(f"trial-{number}", values, {"metrics": metrics}, "proven")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    (code,) = blocks(ROOT / "docs/sweeps.md", "python")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls its figures experimental
        _run(code)
    drawn = {path.name for path in tmp_path.glob("*.png") if path.stat().st_size > 5000}
    assert drawn == {"history.png", "importance.png", "parallel.png"}
