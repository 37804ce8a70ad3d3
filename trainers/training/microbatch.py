"""The number of views that pass through the encoder at once: as many as are fast and fit into memory.

All inputs of this choice are public or belong to the machine: image shape, network, group size, number of
views and the memory that is free when a training starts. The choice never uses a realised batch, and the
result of a training does not depend on it (tested).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.sampling.groups import BATCH
from trainers.config.training import TrainingConfig
from trainers.files import machine_memory
from trainers.models.task_networks import AnyEncoder
from trainers.tasks.task import AnyTask, task_of

# Measured on two cores (tiny_cnn and small_cnn at 28 × 28, resnet18 at 32 × 32): small networks gain up to
# about 800 views, and beyond about 30 views of a ResNet-18 (8 MB each) the caches no longer help.
_CPU_MAX_VIEWS = 768
_CPU_MAX_ACTIVATIONS = 256 * 2**20
_GPU_MAX_VIEWS = 8192

_COPIES = 4
"""Bound on the memory of a pass as a multiple of its activations: these, their gradients, and the copies that
separate groups."""

_USABLE_SHARE = 0.5


def max_views(
    config: TrainingConfig, encoder: AnyEncoder, image_shape: tuple[int, ...], *, memory_share: float = 1.0
) -> int:
    """Return the number of views that pass through the encoder at once; one group passes whatever its size.

    Args:
      config: the training's configuration; its `performance.max_views_per_microbatch` decides, if not None.
      encoder: the network, on its device.
      image_shape: `(channels, height, width)`.
      memory_share: the share of the machine's or the GPU's free memory that this worker may use.
    """
    requested = config.performance.max_views_per_microbatch
    if requested is not None:
        return requested
    device = next(encoder.parameters()).device
    task = task_of(config)
    activations = activation_bytes(task, encoder, image_shape)
    size = config.mechanism.group_size
    # One gradient per group, for ways of clipping that hold all gradients; `batch` is one group.
    views_per_group = 0 if size == BATCH else task.num_views(config, config.num_augmentations) * int(size)
    gradients = 4 * num_trainable(encoder) / views_per_group if views_per_group else 0.0
    fits = int(_USABLE_SHARE * memory_share * free_memory(device) / (_COPIES * activations + gradients))
    if device.type == "cpu":
        cached = max(_CPU_MAX_ACTIVATIONS // activations, task.cpu_views_at_once)
        return max(1, min(fits, _CPU_MAX_VIEWS, cached))
    return max(1, min(fits, _GPU_MAX_VIEWS))


def pass_bytes(config: TrainingConfig, encoder: AnyEncoder, image_shape: tuple[int, ...]) -> int:
    """Return the bytes that one pass may take besides the weights, for `max_views` or for one larger group.

    They are `_COPIES` times the bytes of the activations, which covers their gradients and the copies that
    separate groups, and one gradient per group.
    """
    task, size = task_of(config), config.mechanism.group_size
    num_records = round(config.mechanism.expected_batch_size) if size == BATCH else int(size)
    views_per_group = num_records * task.num_views(config, config.num_augmentations)
    views = max(max_views(config, encoder, image_shape), views_per_group)
    gradients = 4 * num_trainable(encoder) * max(1, views // views_per_group)
    return views * _COPIES * activation_bytes(task, encoder, image_shape) + gradients


def activation_bytes(task: AnyTask, encoder: AnyEncoder, image_shape: tuple[int, ...]) -> int:
    """Return the bytes of one view's activations: all outputs of the innermost modules, in float32.

    The mean over the fewest views that the network takes: for a CLIP model, an image and a caption.

    >>> from trainers.config.training import NetworkConfig
    >>> from trainers.models.encoder import build_encoder
    >>> from trainers.tasks import IMAGES
    >>> encoder = build_encoder(NetworkConfig(name="tiny_cnn"), (1, 8, 8), 0)
    >>> large, small = (activation_bytes(IMAGES, encoder, (1, size, size)) for size in (16, 8))
    >>> large > small > 8 * 8 * 4
    True
    """
    num_views = task.fewest_views
    blank = task.blank_inputs(encoder, image_shape, (1, 1, num_views))
    sizes = [4 * each.numel() for each in ([blank] if isinstance(blank, Tensor) else blank)]

    def add_size(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(4 * output.numel())

    innermost = [module for module in encoder.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(add_size) for module in innermost]
    try:
        with torch.no_grad():
            task.run(encoder, blank)
    finally:
        for handle in handles:
            handle.remove()
    return sum(sizes) // num_views


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the GPU, or of this machine and container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine_memory.free_memory()
