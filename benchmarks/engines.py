"""Other ways to the clipped sum, each in the place of ours in one and the same private step.

- `loop`: one backward pass per group; exact for any network.
- `vmap`: `torch.func` maps the gradient of one group's loss over the groups.
- `opacus`: Opacus's hooks give one gradient per view, which are summed per group before clipping, as a
  user of Opacus would have to: its unit is a row of the batch.
- `opacus_ghost`: Opacus's ghost clipping. The norm of a sum of views does not follow from the views'
  norms, so groups cannot be expressed: it clips **every view by itself**, a different mechanism, and is
  measured on the same views for its cost alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.steps import CLIP_NORM, OrdinaryStep, OurStep, Step, Task, views_of
from dpgcl_core.clipping import clipper as clipping
from dpgcl_core.clipping.types import num_trainable, trainable_parameters
from dpgcl_core.losses.info_nce import two_view_group_loss
from trainers.config.networks import NetworkConfig
from trainers.models.encoder import Encoder, build_encoder
from trainers.tasks.images import group_losses_of
from trainers.training.optimizers import build_optimizer

AddClippedSum = Callable[[Tensor, Tensor], None]
"""Adds the clipped sum of views `[groups, group_size, views, C, H, W]` to a flat total."""

PER_VIEW = "clips each view, not each group"


class EngineStep:
    """A private step whose clipped sum comes from another engine; all else is as in ours."""

    def __init__(self, name: str, task: Task, views_per_microbatch: int) -> None:
        torch.set_num_threads(task.threads)
        self.task, self.views_per_microbatch = task, views_per_microbatch
        self.records = task.records()
        self.config = task.config(views_per_microbatch)
        assert isinstance(self.config.network, NetworkConfig)
        self.encoder = build_encoder(self.config.network, task.image_shape, self.config.public_seed)
        self.encoder.to(task.device)
        self.parameters = trainable_parameters(self.encoder)
        self.optimizer = build_optimizer(self.config.optimizer, self.parameters)
        self.total = torch.zeros(num_trainable(self.encoder), device=task.device)
        self.add = ENGINES[name](self.encoder, self.config.temperature)
        self._generator = np.random.default_rng(0)
        self._step = 1

    def take(self) -> None:
        mechanism = self.config.mechanism
        self.total.zero_()
        groups = self.task.groups(self._generator)
        at_once = self.task.groups_at_once(self.views_per_microbatch)
        for start in range(0, len(groups), at_once):
            self.add(self.total, self.views(groups[start : start + at_once]))
        noise = mechanism.noise().draw(len(self.total), self._generator)
        self.total.copy_(self.total.double() + noise.to(self.total.device))
        offset = 0
        for parameter in self.parameters:
            count = parameter.numel()
            parameter.grad = (self.total[offset : offset + count] / mechanism.divisor).view_as(parameter)
            offset += count
        self.optimizer.step()
        self._step += 1

    def take_one_microbatch(self) -> int:
        """Take the sum of one microbatch, to foresee a whole step; returns its groups."""
        groups = self.task.groups(self._generator)
        groups = groups[: self.task.groups_at_once(self.views_per_microbatch)]
        self.total.zero_()
        self.add(self.total, self.views(groups))
        return len(groups)

    def views(self, groups: np.ndarray) -> Tensor:
        """Return the views of `groups`."""
        return views_of(self.records, groups, self.config, step=self._step, device=self.task.device)


def build_step(engine: str, task: Task, views_per_microbatch: int, *, channels_last: bool = False) -> Step:
    """Return one side of a measurement: `ours`, `non_private` or a name of `ENGINES`."""
    if engine == "ours":
        return OurStep(task, views_per_microbatch)
    if engine == "non_private":
        return OrdinaryStep(task, views_per_microbatch, channels_last=channels_last)
    return EngineStep(engine, task, views_per_microbatch)


def gradient_bytes(engine: str, task: Task, num_parameters: int, views_per_microbatch: int) -> int:
    """Return the bytes of the separate gradients that one microbatch of an engine holds at once."""
    groups = task.groups_at_once(views_per_microbatch)
    rows = {"opacus": groups * task.group_size * task.num_views, "vmap": 2 * groups}.get(engine, 1)
    return 4 * rows * num_parameters


def _loop(encoder: Encoder, temperature: float) -> AddClippedSum:
    parameters, group_losses = trainable_parameters(encoder), group_losses_of(encoder, temperature)

    def add(total: Tensor, views: Tensor) -> None:
        clipping._loop(total, parameters, group_losses, views, CLIP_NORM)

    return add


def _vmap(encoder: Encoder, temperature: float) -> AddClippedSum:
    parameters = {name: p for name, p in encoder.named_parameters() if p.requires_grad}

    def loss_of_group(values: Mapping[str, Tensor], views: Tensor) -> Tensor:
        embeddings = torch.func.functional_call(encoder, dict(values), (views.flatten(0, 1),))
        return two_view_group_loss(embeddings.unflatten(0, views.shape[:2])[None], temperature=temperature)[0]

    gradients_of = torch.func.vmap(torch.func.grad(loss_of_group), in_dims=(None, 0))

    def add(total: Tensor, views: Tensor) -> None:
        detached = {name: p.detach() for name, p in parameters.items()}
        gradients = gradients_of(detached, views)
        _add_clipped(total, [gradients[name].flatten(1) for name in parameters])

    return add


def _opacus(encoder: Encoder, temperature: float) -> AddClippedSum:
    from opacus.grad_sample import GradSampleModule

    _quiet()
    wrapped = GradSampleModule(encoder, batch_first=True, loss_reduction="sum", strict=False)
    parameters = trainable_parameters(encoder)

    def add(total: Tensor, views: Tensor) -> None:
        embeddings = wrapped(views.flatten(0, 2)).unflatten(0, views.shape[:3])
        two_view_group_loss(embeddings, temperature=temperature).sum().backward()
        per_group = []
        gradients: list[Any] = parameters  # Opacus adds an attribute to each
        for parameter in gradients:
            per_view = parameter.grad_sample.flatten(1)
            per_group.append(per_view.unflatten(0, (len(views), -1)).sum(1))
            parameter.grad_sample = parameter.grad = None
        _add_clipped(total, per_group)

    return add


def _opacus_ghost(encoder: Encoder, temperature: float) -> AddClippedSum:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    _quiet()
    wrapped = GradSampleModuleFastGradientClipping(
        encoder, batch_first=True, loss_reduction="sum", strict=False, max_grad_norm=CLIP_NORM
    )
    parameters = trainable_parameters(encoder)

    def add(total: Tensor, views: Tensor) -> None:
        # The loss couples the views, so both backward passes start from the gradient at the embeddings.
        embeddings = wrapped(views.flatten(0, 2))
        leaf = embeddings.detach().requires_grad_()
        two_view_group_loss(leaf.unflatten(0, views.shape[:3]), temperature=temperature).sum().backward()
        wrapped.enable_hooks()
        embeddings.backward(leaf.grad, retain_graph=True)
        factors = wrapped.get_clipping_coef()
        encoder.zero_grad(set_to_none=True)
        wrapped.disable_hooks()
        embeddings.backward(factors[:, None] * leaf.grad)
        wrapped.enable_hooks()
        total += torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        encoder.zero_grad(set_to_none=True)

    return add


def _quiet() -> None:
    """The images themselves need no gradient; torch would say so at every first layer and step."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")


def _add_clipped(total: Tensor, gradients: list[Tensor]) -> None:
    """Add Σ Clip_C of `gradients`, per parameter `[groups, numel]`, to the flat `total`."""
    norms = torch.stack([gradient.square().sum(1) for gradient in gradients]).sum(0).sqrt()
    factors = (CLIP_NORM / norms.clamp_min(1e-12)).clamp_max(1.0)
    offset = 0
    for gradient in gradients:
        total[offset : offset + gradient.shape[1]] += factors @ gradient
        offset += gradient.shape[1]


ENGINES: dict[str, Callable[[Encoder, float], AddClippedSum]] = {
    "loop": _loop,
    "vmap": _vmap,
    "opacus": _opacus,
    "opacus_ghost": _opacus_ghost,
}
"""From an encoder and a temperature to the engine's clipped sum."""
