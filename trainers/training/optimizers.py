"""Stage 9, optimizer: what consumes the noised gradient; from here on all is post-processing.

An optimizer sees the noised sum of clipped gradients divided by a public constant, and nothing else
that depends on the records, so its choice and its settings do not change ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dpgcl_core.clipping.types import set_gradients
from dpgcl_core.errors import ConfigError, unknown_choice
from trainers.config.training import OptimizerConfig
from trainers.models.torchvision_import import ensure_torchvision_import

Parameters = Iterable[nn.Parameter]

TRUST_COEFFICIENT = 0.001
"""η of LARS, as published (You et al. 2017)."""


def _lars(parameters: Parameters, config: OptimizerConfig) -> Optimizer:
    """LARS (You, Gitman and Ginsburg 2017), by timm: a learning rate for each layer.

    For weights w with gradient g, weight decay β, momentum m, learning rate γ and trust coefficient η:

        λ = η ‖w‖ / (‖g‖ + β ‖w‖);   v ← m v + λ (g + β w);   w ← w − γ v

    λ is 1 where it is undefined (w or g zero). Parameters with fewer than two axes (biases, norm
    scales) take λ = 1 and no weight decay. The paper's v holds γ as well: the same steps while γ stays, and
    where a schedule changes it, this is what `sgd` does.
    """
    ensure_torchvision_import()
    from timm.optim.lars import Lars  # here: imports torchvision, which no other optimizer needs

    listed = list(parameters)
    adapted = {
        "params": [p for p in listed if p.ndim > 1],
        "weight_decay": config.weight_decay,
        "always_adapt": True,
    }
    plain = {"params": [p for p in listed if p.ndim <= 1]}
    rate, momentum = config.learning_rate, config.momentum
    optimizer: Optimizer = Lars(
        [adapted, plain], lr=rate, momentum=momentum, trust_coeff=TRUST_COEFFICIENT, eps=0.0
    )
    return optimizer


def _sgd(parameters: Parameters, config: OptimizerConfig) -> Optimizer:
    rate, momentum, decay = config.learning_rate, config.momentum, config.weight_decay
    return SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay, fused=True)


OPTIMIZERS: dict[str, Callable[[Parameters, OptimizerConfig], Optimizer]] = {
    "adam": lambda params, c: Adam(params, lr=c.learning_rate, weight_decay=c.weight_decay, fused=True),
    "adamw": lambda params, c: AdamW(params, lr=c.learning_rate, weight_decay=c.weight_decay, fused=True),
    "lars": _lars,
    "sgd": _sgd,
}
"""Optimizers by name. Adam and AdamW keep their usual β = (0.9, 0.999). Fused: one pass over the weights."""


def build_optimizer(config: OptimizerConfig, parameters: Parameters) -> Optimizer:
    """Return the optimizer named in `config` over `parameters`.

    Raises:
      ConfigError: unknown name.

    >>> build_optimizer(OptimizerConfig(name="lars"), [nn.Parameter(torch.ones(2, 2))]).defaults["lr"]
    0.002
    """
    check_optimizer(config.name)
    return OPTIMIZERS[config.name](parameters, config)


def check_optimizer(name: str) -> None:
    """Raise ConfigError unless `name` is one of `OPTIMIZERS`."""
    if name not in OPTIMIZERS:
        raise ConfigError(unknown_choice("optimizer", name, OPTIMIZERS))


def learning_rate_at(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a step: of public numbers alone, so a resume needs no state for it.

    It rises linearly over the W = `warmup_steps` first steps, (step + 1)/W of its value, and then falls with
    p = (step − W)/(T − W) as 1 − p ("linear") or (1 + cos πp)/2 ("cosine"); p stays below 1.

    Args:
      config: the learning rate, W and the decay.
      step: from 0 on.
      num_steps: T.

    >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, learning_rate_decay="linear")
    >>> [learning_rate_at(config, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.learning_rate_decay == "linear":
        return config.learning_rate * (1 - progress)
    if config.learning_rate_decay == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate


def take_step(
    optimizer: Optimizer, parameters: Parameters, gradient: Tensor, *, learning_rate: float
) -> None:
    """Take one step along a flat gradient.

    Args:
      optimizer: over `parameters`.
      parameters: in the order of the gradient.
      gradient: `[num_parameters]`; an optimizer may use its memory.
      learning_rate: of this step.
    """
    set_gradients(parameters, gradient)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # the gradients' memory is the caller's


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dictionary and give every tensor the memory format of its weights.

    Fused optimizers walk weights, gradients and state in memory order, so another format would pair the
    wrong numbers without a word.

    Args:
      optimizer: over the weights as they lie in memory now.
      state: what `optimizer.state_dict()` returned, in whatever format.
    """
    optimizer.load_state_dict(state)
    for weights, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == weights.shape:
                values[name] = torch.empty_like(weights).copy_(value)
