"""LoRA adapters (Hu et al. 2022) on the linear layers of any network, and the proof that they train.

An adapter adds (alpha / rank) · B A x to a frozen linear layer. A and B are plain `nn.Linear` without
bias, which see the same rows as the layer they adapt, so the clipped group gradient needs no special
rule. The noise of a private training grows with the number of trainable weights, so here a few adapted
layers of a small rank are better than many.

peft is imported when an adapter is made, not with this file.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from dpgcl_core.errors import ConfigError, unknown_choice
from trainers.torchvision_import import ensure_torchvision_import

_PERTURBATION = 0.02
_MAX_NAMED = 5


def with_lora(
    module: nn.Module, rank: int, alpha: float, targets: Sequence[str], *, title: str = "the network"
) -> nn.Module:
    """Freeze `module` and put trainable adapters on its target layers, in place.

    An adapter adds (alpha / rank) · B A x. A is random from torch's global generator and B is zero, so the
    outputs are unchanged.

    Args:
      module: any network; it must have no dropout.
      rank: rows of A and columns of B.
      alpha: the adapter's scale times `rank`.
      targets: layers to adapt, each a full dotted name or its last parts: "q_proj" means every layer of
        that name, "resblocks.0.attn.q_proj" a single layer.
      title: a description of `module` for messages.

    Returns:
      `module` itself.

    Raises:
      ConfigError: a target names no layer, or a layer that is not a plain `nn.Linear`; or the network has
        dropout or already has adapters.

    >>> tower = with_lora(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), rank=2, alpha=2, targets=["0"])
    >>> sum(p.numel() for p in tower.parameters() if p.requires_grad)
    32
    """
    names = _target_names(module, targets, title)
    _check_adaptable(module)
    ensure_torchvision_import()
    from peft import LoraConfig, inject_adapter_in_model

    pattern = "|".join(re.escape(name) for name in names)  # peft takes a string as a full match
    config = LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),  # declared so, but only divided by the rank
        lora_dropout=0.0,
        bias="none",
        target_modules=pattern,
    )
    inject_adapter_in_model(config, module)
    return module


def merge_lora(module: nn.Module) -> int:
    """Add every adapter to the weights of its layer and remove it, in place; the outputs do not change.

    Returns:
      The number of adapters merged.

    >>> tower = with_lora(nn.Sequential(nn.Linear(8, 8)), rank=2, alpha=2, targets=["0"])
    >>> merge_lora(tower), type(tower[0]).__name__
    (1, 'Linear')
    """
    adapted: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in list(module.modules())
        for name, child in list(parent.named_children())
        if _is_adapted_linear(child)
    ]
    for parent, name, child in adapted:
        child.merge()
        setattr(parent, name, child.get_base_layer())
    return len(adapted)


def _is_adapted_linear(module: nn.Module) -> bool:
    """Whether this is peft's wrapping of a linear layer; checked without importing peft."""
    return hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear)


def _target_names(module: nn.Module, targets: Sequence[str], title: str) -> list[str]:
    """Return the full names of the layers that match the targets."""
    layers = {name: layer for name, layer in module.named_modules() if name}
    matches: list[str] = []
    for target in targets:
        names = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not names:
            linear = {name.rpartition(".")[2] for name, layer in layers.items() if type(layer) is nn.Linear}
            raise ConfigError(unknown_choice(f"LoRA target in {title}", target, sorted(linear)))
        for name in names:
            if type(layers[name]) is not nn.Linear:
                raise ConfigError(
                    f"LoRA target {target!r} must be a plain nn.Linear; it matches {name!r}, a "
                    f"{type(layers[name]).__name__}. For nn.MultiheadAttention, call separate_attention, "
                    "and name q_proj, k_proj, v_proj or out_proj."
                )
        matches += [name for name in names if name not in matches]
    return matches


def _check_adaptable(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A"):
            raise ConfigError(f"layer {name!r} already has an adapter. Call merge_lora first.")
        dropout = layer.p if isinstance(layer, _DropoutNd) else 0.0
        if isinstance(layer, nn.MultiheadAttention):
            dropout = layer.dropout
        if dropout > 0:
            raise ConfigError(
                f"layer {name!r} must have no dropout; got {dropout}. A step's randomness must come only "
                "from the mechanism and the views. Set the dropout to 0."
            )


def prove_adapters_train(module: nn.Module, run: Callable[[nn.Module], Tensor]) -> None:
    """Check that training would move every trainable weight of a network.

    Two passes are made on a copy, without noise, because noise would move even weights that the output does
    not use. At the given weights, some weight of every layer (of an adapter: A or B) must have a gradient.
    This does not check every weight: B starts at zero, so A's gradient is zero until B has moved. So the
    trainable weights are then perturbed, as after a step, and every one of them must have a gradient.

    Args:
      module: the network on the device it is trained on; left unchanged.
      run: function that passes a synthetic batch, of public shape and content, through the given network and
        returns the output, of any shape.

    Raises:
      ConfigError: nothing is trainable, or the gradients of some weights are missing, zero or not finite;
        names these weights.

    >>> images = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    >>> tower = with_lora(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), rank=2, alpha=2, targets=["0"])
    >>> prove_adapters_train(tower, lambda network: network(images))
    """
    probe = copy.deepcopy(module)
    trainable = {name: p for name, p in probe.named_parameters() if p.requires_grad}
    if not trainable:
        raise ConfigError("the network has no trainable weight. Add adapters with with_lora.")
    owners: dict[str, list[bool]] = defaultdict(list)
    for name, moves in _has_gradient(probe, trainable, run).items():
        owners[_owner(name)].append(moves)
    _check_gradients("layer", "at the start", [owner for owner, moves in owners.items() if not any(moves)])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable.values():
            parameter.add_(_PERTURBATION * torch.randn(parameter.shape, generator=generator).to(parameter))
    still = [name for name, moves in _has_gradient(probe, trainable, run).items() if not moves]
    _check_gradients("weight", "after one step", still)


def _owner(parameter_name: str) -> str:
    """Return the layer of a weight; A and B of one adapter belong to the layer they adapt."""
    return re.split(r"\.lora_[AB]\.", parameter_name)[0] if ".lora_" in parameter_name else parameter_name


def _has_gradient(
    module: nn.Module, trainable: dict[str, nn.Parameter], run: Callable[[nn.Module], Tensor]
) -> dict[str, bool]:
    """Return whether each weight has a finite, nonzero gradient of a random linear function of the output."""
    output = run(module)
    if not output.requires_grad:
        return dict.fromkeys(trainable, False)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    gradients = torch.autograd.grad((output * weights).sum(), list(trainable.values()), allow_unused=True)
    return {
        name: gradient is not None and bool(torch.isfinite(gradient).all()) and bool(gradient.any())
        for name, gradient in zip(trainable, gradients, strict=True)
    }


def _check_gradients(kind: str, moment: str, names: list[str]) -> None:
    if names:
        rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise ConfigError(
            f"every trainable {kind} must receive a finite, nonzero gradient; {moment} these do not: "
            f"{', '.join(names[:_MAX_NAMED])}{rest}. Freeze weights that the output does not use, and make "
            "sure that the forward pass calls the adapted layers themselves."
        )
