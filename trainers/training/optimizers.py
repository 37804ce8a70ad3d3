"""Stage 9, optimizer: it consumes the noised gradient; this and all later stages are post-processing.

An optimizer sees the noised sum of clipped gradients divided by a public constant, and nothing else
that depends on the records, so its choice and its settings do not change ε.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpgcl_core.clipping.types import set_gradients
from trainers.config.nodes import OptimizerConfig
from trainers.config.optimizer_registry import optimizer_named

Parameters = Iterable[nn.Parameter]


def build_optimizer(config: OptimizerConfig, parameters: Parameters) -> Optimizer:
    """Return the optimizer named in `config` over `parameters`.

    Raises:
      ConfigError: the name is unknown.

    >>> build_optimizer(OptimizerConfig(name="sgd"), [nn.Parameter(torch.ones(2, 2))]).defaults["lr"]
    0.002
    """
    return optimizer_named(config.name).build(parameters, config)


def learning_rate_at(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of a step, a function of public numbers, so that a resume needs no state.

    In the first W = `warmup_steps` steps it rises linearly, as (step + 1)/W of `learning_rate`. Then it falls
    as 1 − p ("linear") or (1 + cos πp)/2 ("cosine") of it, for p = (step − W)/(T − W), which stays below 1.

    Args:
      config: the configuration with the learning rate, W and the decay.
      step: the step, counted from 0.
      num_steps: T, the number of steps of the training.

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
      optimizer: the optimizer of `parameters`.
      parameters: the trained weights, in the order of the gradient.
      gradient: `[num_parameters]`; an optimizer may use its memory.
      learning_rate: the learning rate of this step.
    """
    set_gradients(parameters, gradient)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # the gradients' memory is the caller's


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state dictionary and give every tensor the memory format of its weights.

    Fused optimizers walk weights, gradients and state in memory order, so another format would silently pair
    the wrong numbers.

    Args:
      optimizer: the optimizer of the weights, in their current memory format.
      state: the result of `optimizer.state_dict()`, in any format.
    """
    optimizer.load_state_dict(state)
    for weights, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == weights.shape:
                values[name] = torch.empty_like(weights).copy_(value)
