"""The trainable weights of a CLIP model: adapters on chosen layers of both towers, or all weights.

The noise of a private training grows with the number of trainable weights, so fine-tuning adapts few weights:
LoRA on queries and values of both towers has 983,040 weights, compared with ViT-B-32's 151 million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpgcl_core.errors import ConfigError, require_choice
from trainers.models.attention import separate_attention
from trainers.models.lora import with_lora

IMAGE, TEXT = "image", "text"
TOWERS = (IMAGE, TEXT)
TARGETS: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "out": ("out_proj",),
    "mlp": ("c_fc", "c_proj"),
}
"""Short names for the layers of a block, each with the names that open_clip and `SeparateAttention` use."""


@dataclass(frozen=True, kw_only=True)
class ClipLora:
    """LoRA adapters (Hu et al. 2022) on a CLIP model; each adds (alpha / rank) · B A x to a layer.

    Attributes:
      rank: rows of A and columns of B.
      alpha: the adapter's scale times `rank`.
      targets: layers to adapt in every block: q, k, v, out, mlp; or a layer's own name, or its last parts.
      towers: the towers that get adapters.

    Raises:
      ConfigError: there is no target or no tower, a tower is unknown, or alpha is not positive.
    """

    rank: int = 16
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "v")
    towers: tuple[str, ...] = TOWERS

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigError(f"LoRA targets must be a non-empty list of names; got {self.targets!r}")
        if not self.alpha > 0:
            raise ConfigError(f"LoRA alpha must be positive; got {self.alpha!r}")
        for tower in self.towers:
            require_choice("tower", tower, TOWERS)
        if not self.towers:
            raise ConfigError("LoRA must adapt at least one tower; got none. Choose image, text or both.")


def lora_of(settings: Any) -> ClipLora | None:
    """Return the adapters of settings with a `ClipNetworkConfig`'s fields; None if all weights train."""
    if not settings.lora_rank:
        return None
    return ClipLora(
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        targets=settings.lora_targets,
        towers=settings.lora_towers,
    )


def make_trainable(clip: nn.Module, lora: ClipLora | None, *, seed: int, train_logit_scale: bool) -> None:
    """Set which weights of an open_clip model train, in place, and convert its attention layers.

    Outputs change only by rounding. With adapters every other weight is frozen. Without adapters, all weights
    train except the bias of a sigmoid loss, on which no loss here depends.

    Args:
      clip: the model that `trainers.models.clip.published_models.build_clip` makes, on the device on which it
        will be trained.
      lora: the adapters; None trains all weights.
      seed: public seed of the adapters' first weights.
      train_logit_scale: whether 1/τ trains, too. It is then one of the parameters of every group's gradient,
        inside the norm that is clipped and under the same noise.

    Raises:
      ConfigError: a target matches no layer of a tower, or a layer that cannot be adapted.
    """
    separate_attention(clip)
    if lora is None:
        clip.requires_grad_(True)
    else:
        clip.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            for tower in lora.towers:
                _adapt(clip, lora, tower)
    for name, parameter in clip.named_parameters(recurse=False):
        if name == "logit_scale":
            parameter.requires_grad_(train_logit_scale)
        if name == "logit_bias":
            parameter.requires_grad_(False)


def _adapt(clip: nn.Module, lora: ClipLora, tower: str) -> None:
    """Put adapters on one tower in isolation, because text layers' names also end image layers' names."""
    alone = nn.Module()
    for name, child in clip.named_children():
        if (name == "visual") == (tower == IMAGE):
            alone.add_module(name, child)
    targets = [name for target in lora.targets for name in TARGETS.get(target, (target,))]
    with_lora(alone, rank=lora.rank, alpha=lora.alpha, targets=targets, title=f"the {tower} tower")
    for name, child in alone.named_children():  # a projection at the top level was replaced in `alone`
        setattr(clip, name, child)
