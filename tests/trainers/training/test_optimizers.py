"""Stage 9: optimizers by name, against torch's plain ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from dpgcl_core.errors import ConfigError
from dpgcl_core.workers import SingleWorker
from tests.trainers.conftest import make_config, make_data
from tests.trainers.files.test_checkpoint import _crashed, _folder
from trainers.config.optimizer_registry import OPTIMIZERS
from trainers.config.training import (
    OptimizerConfig,
)
from trainers.training.loop import train
from trainers.training.optimizers import (
    build_optimizer,
    learning_rate_at,
    load_optimizer,
    take_step,
)
from trainers.training.step import prepare


def _parameter(
    values: list[list[float]] | list[float], gradient: list[list[float]] | list[float]
) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(values))
    parameter.grad = torch.tensor(gradient)
    return parameter


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_resumes_from_its_state(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.01)
    gradients = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(0))

    def steps(weights: nn.Parameter, optimizer: torch.optim.Optimizer, rows: range) -> None:
        for row in rows:
            weights.grad = gradients[row].clone()
            optimizer.step()

    whole = nn.Parameter(torch.ones(3, 2))
    steps(whole, build_optimizer(config, [whole]), range(6))
    part = nn.Parameter(torch.ones(3, 2))
    optimizer = build_optimizer(config, [part])
    steps(part, optimizer, range(3))
    resumed = nn.Parameter(part.detach().clone())
    fresh = build_optimizer(config, [resumed])
    fresh.load_state_dict(optimizer.state_dict())
    steps(resumed, fresh, range(3, 6))
    assert torch.equal(resumed.detach(), whole.detach())


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_uses_learning_rate_and_weight_decay(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.25, weight_decay=0.125)
    group = build_optimizer(config, [nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)


def test_optimizer_uses_momentum() -> None:
    config = OptimizerConfig(name="sgd", momentum=0.75)
    assert build_optimizer(config, [nn.Parameter(torch.ones(2))]).param_groups[0]["momentum"] == 0.75


def test_adam_first_step_is_the_learning_rate() -> None:
    weights = _parameter([[1.0, 1.0]], [[0.3, -7.0]])
    build_optimizer(OptimizerConfig(name="adam", learning_rate=0.01), [weights]).step()
    moved = (weights.detach() - 1).flatten().tolist()
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(moved, [-0.01, 0.01], strict=True))


def _captured_gradient(**changes: object) -> torch.Tensor:
    """What the optimizer is given in a first step, in the order of the weights."""
    run = prepare(make_config(seeded_non_private=True, **changes), make_data(), SingleWorker())
    captured: list[torch.Tensor] = []
    run.optimizer.step = lambda: captured.append(
        torch.cat([p.grad.flatten() for p in run.encoder.parameters()])
    )
    run.take_step()
    return captured[0]


def test_unknown_optimizer_is_refused_with_suggestion() -> None:
    with pytest.raises(ConfigError, match="unknown optimizer 'adaw'; did you mean 'adamw'"):
        build_optimizer(OptimizerConfig(name="adaw"), [])


PLAIN = {
    "adam": lambda params: Adam(params, lr=1e-2, weight_decay=0.1, foreach=False, fused=False),
    "adamw": lambda params: AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False, fused=False),
    "sgd": lambda params: SGD(params, lr=1e-2, weight_decay=0.1, momentum=0.9, foreach=False, fused=False),
}


@pytest.mark.parametrize("name", PLAIN)
def test_fused_optimizer_is_the_plain_one_to_rounding(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=1e-2, weight_decay=0.1, momentum=0.9)
    weights = [
        [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), nn.Parameter(torch.ones(5))] for _ in range(2)
    ]
    before = weights[0][0].detach().clone()
    optimizers = [build_optimizer(config, weights[0]), PLAIN[name](weights[1])]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for pair in zip(*weights, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator)
            for parameter in pair:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights[0][0], before)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_loaded_state_takes_the_memory_format_of_its_weights(name: str) -> None:
    """Saved by a network in the ordinary layout, loaded by one that is channels last."""
    config = OptimizerConfig(name=name, learning_rate=0.1)
    start, gradients = torch.randn(4, 3, 3, 3), [torch.randn(4, 3, 3, 3) for _ in range(2)]
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [build_optimizer(config, [each]) for each in weights]
    for each, optimizer in zip(weights, optimizers, strict=True):
        each.grad = gradients[0].clone()
        optimizer.step()
    last = nn.Parameter(weights[1].detach().clone(memory_format=torch.channels_last))
    resumed = build_optimizer(config, [last])
    load_optimizer(resumed, optimizers[1].state_dict())
    weights[0].grad = gradients[1]
    last.grad = torch.empty_like(last).copy_(gradients[1])
    optimizers[0].step()
    resumed.step()
    assert torch.allclose(last, weights[0], atol=1e-6)


def _rates(num_steps: int, **changes: object) -> list[float]:
    config = OptimizerConfig(learning_rate=2.0, **changes)  # type: ignore[arg-type]
    return [learning_rate_at(config, step, num_steps) for step in range(num_steps)]


def test_learning_rate_is_constant_unless_asked_otherwise() -> None:
    assert set(_rates(7)) == {2.0}


@pytest.mark.parametrize("decay", ["none", "cosine", "linear"])
def test_learning_rate_rises_to_its_value_in_the_warmup(decay: str) -> None:
    rates = _rates(20, warmup_steps=4, learning_rate_decay=decay)
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0


@pytest.mark.parametrize(
    ("decay", "middle", "end"),
    [("linear", 1.0, 0.02), ("cosine", 1.0, 1 + math.cos(0.99 * math.pi))],
)
def test_learning_rate_falls_to_half_in_the_middle_and_nearly_to_zero(
    decay: str, middle: float, end: float
) -> None:
    rates = _rates(100, learning_rate_decay=decay)
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[50]) == (2.0, pytest.approx(middle))
    assert rates[-1] == pytest.approx(end)
    assert rates[-1] > 0


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_step_is_taken_at_its_own_learning_rate(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.1)
    moved = []
    for rate in (0.1, 0.05):
        weights = nn.Parameter(torch.ones(3))
        gradient = torch.tensor([1.0, 2.0, 3.0])
        take_step(build_optimizer(config, [weights]), [weights], gradient, learning_rate=rate)
        moved.append(weights.detach() - 1)
    assert torch.allclose(moved[0], 2 * moved[1], rtol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_training_follows_the_schedule(name: str) -> None:
    optimizer = OptimizerConfig(name=name, warmup_steps=2, learning_rate_decay="linear")
    run = prepare(make_config(optimizer=optimizer), make_data(), SingleWorker())
    for step in range(6):
        run.take_step()
        assert run.optimizer.param_groups[0]["lr"] == learning_rate_at(optimizer, step, 6)


@pytest.mark.ci
def test_seeded_resume_continues_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OptimizerConfig(warmup_steps=3, learning_rate_decay="cosine")
    config = {"seeded_non_private": True, "optimizer": optimizer}
    whole = train(make_config(**config), make_data())
    _crashed(monkeypatch, tmp_path, 2, **config)
    resumed = train(make_config(**config), make_data(), checkpoints=_folder(tmp_path))
    for one, other in zip(whole.encoder.parameters(), resumed.encoder.parameters(), strict=True):
        assert torch.equal(one, other)
