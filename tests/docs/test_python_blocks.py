"""The Python blocks of the pages run as they stand."""

from __future__ import annotations

import contextlib
import io
import re

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dpgcl_core.losses.info_nce import two_view_group_loss
from tests.docs.commands import ROOT, blocks


def _run(code: str, **names: object) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "page", "exec"), dict(names))
    return said.getvalue()


def test_readme_step_runs_in_a_loop_of_ones_own() -> None:
    """What the README calls yours is given here; the step trains, and prints its ε."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def group_losses(views: Tensor) -> Tensor:
        embeddings = model(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        return two_view_group_loss(normalize(embeddings, dim=-1), temperature=0.5)

    def augment(groups: Tensor) -> Tensor:
        return torch.stack([groups, groups.flip(-1)], dim=2)

    (code,) = blocks(ROOT / "README.md", "python")
    code, shorter = re.subn(r'"num_steps": \d+', '"num_steps": 5', code)
    assert shorter == 1
    said = _run(
        code,
        torch=torch,
        images=torch.rand(2000, 1, 8, 8),
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        group_losses=group_losses,
        augment=augment,
    )
    assert re.fullmatch(r"ε = \d+\.\d\d at δ = 1e-06\n", said)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_whole_example_of_the_page_runs() -> None:
    """It needs nothing but what it imports, and meets its target."""
    (code,) = blocks(ROOT / "docs/own-loop.md", "python")
    said = _run(code)
    epsilon = float(re.findall(r"ε = (\d+\.\d+)", said)[0])
    assert 7.5 < epsilon <= 8.0
