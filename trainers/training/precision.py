"""Mixed precision by fixed rules: a low-precision encoder, everything that protects a record in float32.

Autocast covers the encoder's forward pass alone (and thereby its backward pass); embeddings leave it in
float32, so similarities, loss, norms, clip factors and sums are float32. There is no loss scaler that
follows the gradients: one record would move the scale of the next step, and with it every record.

float16 gradients underflow below 6e-8, so with float16 the gradient is multiplied by a **public
constant** where it enters the encoder's backward pass, and the clipped sum is divided by it. Proof that
this is still the clipped sum: let s be the scale, g a group's gradient and g' = s·g what arrives. The
group is clipped to s·C, so it contributes Clip_{sC}(g')/s, a vector of norm at most C **whatever** g'
is, rounded, overflown and masked or not. And with s a power of two, multiplication by s and division by
it are exact in float32, so it equals Clip_C(g'/s) bit for bit as long as nothing over- or underflows.
Automatic clipping's γ is scaled with C: sC/(‖g'‖ + sγ)·g'/s = C/(‖g‖ + γ)·g.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dpgcl_core.clipping.types import Embed, GroupLosses, GroupReport, num_trainable
from dpgcl_core.losses.info_nce import two_view_group_loss
from dpgcl_core.mechanism.method import GradientRule, GroupRule
from dpgcl_core.noise.sources import Draws
from dpgcl_core.sampling.groups import BATCH
from trainers.config.training import ClipNetworkConfig, NetworkConfig, TrainingConfig
from trainers.models.clip.encoder import ImageTextEncoder
from trainers.models.encoder import Encoder
from trainers.tasks.modality import AnyEncoder, blank_views
from trainers.training.averaging import target_of

AnyNetwork = NetworkConfig | ClipNetworkConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def gradient_scale(network: AnyNetwork) -> float:
    """Returns the public constant that multiplies gradients inside the encoder: 1 except for float16."""
    return network.loss_scale if network.precision == "float16" else 1.0


def embed_of(encoder: AnyEncoder, network: AnyNetwork | None = None, target: Encoder | None = None) -> Embed:
    """Returns station 5: views `[groups, group_size, views, ...]` to unit embeddings `[..., dim]`.

    Where the temperature is learned, embeddings come times 1/√τ.

    Args:
      encoder: the network.
      network: its precision; float32 unless given. With float16 the embeddings' gradient arrives at the
        encoder times `gradient_scale(network)`; use `add_clipped_sum` of this module.
      target: a network whose embeddings, as constants, stand beside those of `encoder`: `[..., 2·dim]`.
    """
    network = network or NetworkConfig()
    scale = gradient_scale(network)

    def embed(views: Tensor) -> Tensor:
        with _autocast(network, views.device):
            embeddings = encoder.embed_views(views)
        embeddings = embeddings.float()
        if isinstance(encoder, ImageTextEncoder):
            embeddings = encoder.with_temperature(embeddings)
        if scale != 1:
            embeddings = _ScaleGradient.apply(embeddings, scale)
        return embeddings if target is None else torch.cat([embeddings, _targets(target, views)], dim=-1)

    def _targets(target: Encoder, views: Tensor) -> Tensor:
        with torch.no_grad(), _autocast(network, views.device):
            return target.without_predictor(views.flatten(0, 2)).float().unflatten(0, views.shape[:3])

    return embed


def group_losses_of(encoder: Encoder, temperature: float, network: AnyNetwork | None = None) -> GroupLosses:
    """Returns stations 5 and 6 of DP-GCL: views `[groups, group_size, views, C, H, W]` to `[groups]`."""
    embed = embed_of(encoder, network)
    return lambda views: two_view_group_loss(embed(views), temperature=temperature)


def add_clipped_sum(
    rule: GradientRule,
    total: Tensor,
    encoder: AnyEncoder,
    embed: Embed,
    views: Tensor,
    scale: float,
    draws: Draws | None,
) -> GroupReport:
    """`rule.add_clipped_sum` for embeddings whose gradient arrives times `scale` (see the module)."""
    if scale == 1:
        return rule.add_clipped_sum(total, encoder, embed, views, draws)
    assert isinstance(rule, GroupRule)  # `TrainingConfig` refuses the others
    scaled = dataclasses.replace(rule, clipper=rule.clipper.scaled(scale))
    scaled_total = torch.zeros_like(total)
    report = scaled.add_clipped_sum(scaled_total, encoder, embed, views, draws)
    total.add_(scaled_total.div_(scale))
    return dataclasses.replace(report, norms=report.norms / scale)


def look_at_engine(config: TrainingConfig, encoder: AnyEncoder, image_shape: tuple[int, ...]) -> None:
    """Lets the clipping engine compare its ways through this network once, in float32.

    It does so at a network's first use, to a tolerance that low precision does not reach.
    """
    size, network = config.mechanism.group_size, config.network
    if network.precision == "float32" or size == BATCH or config.rule().whole_batch:
        return
    views = blank_views(
        encoder, image_shape, groups=2, group_size=int(size), num_views=config.views_per_record
    )
    total = torch.zeros(num_trainable(encoder), device=views.device)
    embed = embed_of(encoder, target=target_of(config, encoder))
    config.rule().add_clipped_sum(total, encoder, embed, views, None)


def _autocast(network: AnyNetwork, device: torch.device) -> AbstractContextManager[Any]:
    if network.precision == "float32":
        return nullcontext()
    # Without the cache of cast weights: it would keep one pass's graph for the next.
    return torch.autocast(device.type, dtype=_DTYPES[network.precision], cache_enabled=False)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.scale, None
