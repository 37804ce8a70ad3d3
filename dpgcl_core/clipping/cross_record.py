"""Checks that no record influences another's contribution: by type of layer, by probing, by written state.

The sensitivity of a group's gradient holds only if the values computed from one record do not depend on other
records, in its batch or in an earlier batch. These checks are tests, not proofs: a module that mixes records
only for special inputs passes. So they are not enough to trust a network from outside of this package. Its
groups are passed one at a time (`dpgcl_core.clipping.isolation`), unless its author vouches for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpgcl_core.clipping.isolation import (
    attributes_of,
    changed_state,
    first_changed,
    isolated,
    networks_of,
    perturb_weights,
    whole_state,
)
from dpgcl_core.clipping.types import Objective, as_inputs, trainable_parameters
from dpgcl_core.errors import ConfigError

_NUM_PROBE_RECORDS = 4
_SCALES = (1.0, 30.0, 0.01)
_GRADIENT_ROUNDING = 1e-6
"""The allowed change of a gradient by rounding, as a share of its norm: a layer may add a weight's gradients
in the order of all records' indices, as `nn.EmbeddingBag` does."""
_CROSS_RECORD_REASON = (
    "A record's contribution must not depend on other records: otherwise one record changes every group, "
    "and the per-group sensitivity is wrong"
)


PROMISE = "mixes no records, keeps every row of a batch in its place and stores nothing from the records"
"""The promise that the author of a network and its loss makes with `mixes_no_records`."""


def check_layers(model: nn.Module) -> None:
    """Reject a model with a layer that is known to use statistics across records or to write its weights.

    Raises:
      ConfigError: the model has such a layer; the message names it, and a replacement.

    >>> check_layers(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)))
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (
            isinstance(module, _InstanceNorm) and module.track_running_stats
        ):
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__}, which uses statistics across records. "
                f"{_CROSS_RECORD_REASON}. Use nn.GroupNorm instead"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__} with max_norm, which rescales looked-up rows "
                "in a forward pass, without noise. Leave max_norm out and normalise the output instead"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__} with sparse gradients, but noised gradients "
                "are dense. Leave sparse out"
            )


def refuse_mixed_groups(
    model: nn.Module, objective: Objective, inputs: tuple[Tensor, ...], replacements: tuple[Tensor, ...]
) -> None:
    """Raise ConfigError if groups influence each other, or the objective is random or writes to its model.

    A random objective, such as one with dropout, would have its gradient clipped by the norm of another draw.
    The weights, buffers and attributes of the model are left unchanged. Inputs are tried at several scales,
    and once with perturbed weights.
    If the device computes the same bits twice, replacing a group may change no bit of the other groups'
    losses, and their gradient only by a millionth of its norm.
    Pass as many groups as a step passes at once: some networks mix records only in large batches.

    Args:
      model: the network that `objective` calls.
      objective: maps inputs to losses `[groups]`.
      inputs: tensors `[groups, group_size, views, ...]`, at least two groups.
      replacements: tensors of the same shapes, whose groups replace groups of `inputs`.

    Raises:
      ConfigError: a rule is broken; the message names it.
    """
    device = inputs[0].device
    networks = {network: None for network in (model, *networks_of(objective))}
    for scales in (_SCALES, ()):  # then perturbed weights, at the original scale
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            isolated(*networks),
        ):
            if not scales:
                perturb_weights(*networks)
            before = [(m, whole_state(m, weights=True), attributes_of(m)) for m in networks]
            try:
                for scale in scales or (1.0,):
                    _refuse_mixing(model, objective, _scale(inputs, scale), _scale(replacements, scale))
                _refuse_count_dependence(objective, inputs)
            finally:
                names = [
                    changed_state(network, state, weights=True) or first_changed(network, attributes)
                    for network, state, attributes in before
                ]
        if any(names):
            raise ConfigError(
                f"the loss writes to {next(filter(None, names))!r} of the model. Such state would carry "
                "un-noised data into the released model, and from one group to the next. Store nothing "
                "between passes"
            )


def _scale(inputs: tuple[Tensor, ...], scale: float) -> tuple[Tensor, ...]:
    return tuple(tensor * scale if tensor.is_floating_point() else tensor for tensor in inputs)


def _refuse_mixing(
    model: nn.Module, objective: Objective, inputs: tuple[Tensor, ...], replacements: tuple[Tensor, ...]
) -> None:
    """Replace the first group, then all but the last; raise if another group's loss or gradient changes."""
    num_groups = len(inputs[0])
    for num_replaced in dict.fromkeys((1, num_groups - 1)):
        unchanged_groups = list(range(num_replaced, num_groups))
        losses_before, gradient = _losses_and_gradient(model, objective, inputs, unchanged_groups)
        losses_repeated, gradient_again = _losses_and_gradient(model, objective, inputs, unchanged_groups)
        if _has_moved(losses_before, losses_repeated, list(range(num_groups)), 1e-6):
            raise ConfigError(
                "the loss differs between two calls with the same inputs, but a group must be clipped by the "
                "norm of the gradient that is summed. Remove dropout, and draw augmentations before the step"
            )
        replaced = tuple(
            torch.cat([new[:num_replaced], old[num_replaced:]])
            for old, new in zip(inputs, replacements, strict=True)
        )
        losses, moved_gradient = _losses_and_gradient(model, objective, replaced, unchanged_groups)
        is_exact = _equal(losses_before, losses_repeated) and _equal(gradient, gradient_again)
        has_moved = _has_moved(losses_before, losses, unchanged_groups, 0.0 if is_exact else 1e-6)
        if is_exact and torch.isfinite(gradient).all() and torch.isfinite(moved_gradient).all():
            allowed = _GRADIENT_ROUNDING * gradient.norm()
            has_moved = has_moved or bool((moved_gradient - gradient).norm() > allowed)
        if has_moved:
            raise ConfigError(
                f"the loss of one group changed when another group changed. {_CROSS_RECORD_REASON}. Compute "
                "each group's loss from only that group's inputs"
            )


def _losses_and_gradient(
    model: nn.Module, objective: Objective, inputs: tuple[Tensor, ...], groups: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the losses of all groups, and the flat gradient of the sum over only `groups`."""
    parameters, num_groups = trainable_parameters(model), len(inputs[0])
    with torch.enable_grad():
        losses = objective(as_inputs(inputs))
        if not isinstance(losses, Tensor) or losses.shape != (num_groups,):
            got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(f"the loss must return one number per group, [{num_groups}]; got {got}")
        if not parameters or not losses.requires_grad:
            return losses.detach(), losses.new_zeros(0)
        found = torch.autograd.grad(losses[groups].sum(), parameters, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
    return losses.detach(), torch.cat([each.flatten().float() for each in flat])


def _refuse_count_dependence(objective: Objective, inputs: tuple[Tensor, ...]) -> None:
    """Remove the last group; raise if another loss changes by more than rounding in a smaller batch."""
    num_groups = len(inputs[0])
    with torch.no_grad():
        expected = objective(as_inputs(inputs))
        fewer = objective(as_inputs(tuple(each[:-1] for each in inputs)))
    if _has_moved(expected, fewer, list(range(num_groups - 1)), 1e-5):
        raise ConfigError(
            f"the loss of a group depends on the number of groups. {_CROSS_RECORD_REASON}. Return each "
            "group's own loss, not a mean over groups"
        )


def _equal(before: Tensor, after: Tensor) -> bool:
    """Return whether two tensors of one shape are bit-identical, up to the sign of zero; nan equals nan."""
    return bool(((before == after) | (before.isnan() & after.isnan())).all())


def refuse_cross_record(encoder: nn.Module, image_shape: tuple[int, int, int]) -> None:
    """Raise ConfigError if records influence each other in an encoder, or if its outputs are random.

    There are three checks. Norm layers that are known to use statistics across records are rejected by type.
    Random images are passed in training mode, then one of them is replaced or the batch is shortened: no
    module's output may change for the other records, by no bit if the device computes the same bits twice.
    This is repeated with perturbed weights, so that a zero initialisation hides no branch. No pass may write
    to a parameter, a buffer or an attribute, because the written data would be released without noise. These
    are tests, not proofs: a module that mixes records only for special inputs, or only in large batches,
    passes. The encoder itself is not changed.

    Args:
      encoder: maps normalised images `[n, C, H, W]` to embeddings `[n, embedding_dim]`.
      image_shape: (channels, height, width).

    Raises:
      ConfigError: a check fails; the message names the module and the reason.

    >>> refuse_cross_record(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()), (1, 8, 8))
    """
    check_layers(encoder)
    # A copy, because a pass in training mode may change buffers.
    probe = copy.deepcopy(encoder).train()
    device = next((p.device for p in probe.parameters()), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    images, replacements = (_random_images(image_shape, generator).to(device) for _ in range(2))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        _refuse_written_state(probe, images)
        _refuse_moved_rows(probe, images, replacements)
        perturb_weights(probe)
        _refuse_moved_rows(probe, images, replacements)


def _random_images(image_shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Return random images, some bright and some dark."""
    noise = torch.rand(_NUM_PROBE_RECORDS, *image_shape, generator=generator) * 2 - 1
    levels = torch.tensor([0.0, 1.0, -1.0, 0.5]).view(-1, 1, 1, 1)
    return (0.5 * noise + 0.5 * levels * torch.rand(1, generator=generator)) + 0.5 * levels


def _refuse_written_state(probe: nn.Module, images: Tensor) -> None:
    """Raise if a pass changes state, such as running statistics or initial values set from data."""
    before, attributes = whole_state(probe, weights=True), attributes_of(probe)
    probe(images)
    written = changed_state(probe, before, weights=True) or first_changed(probe, attributes)
    if written:
        raise ConfigError(
            f"the network writes to {written!r} in a forward pass. Such state would carry un-noised data "
            "into the released model. Store nothing between passes"
        )


def _refuse_moved_rows(probe: nn.Module, images: Tensor, replacements: Tensor) -> None:
    """Compare passes over the same images, over images with one replaced, and over fewer images."""
    n = len(images)
    first_calls = _trace(probe, images)
    second_calls = _trace(probe, images)
    culprit = _first_moved(first_calls, second_calls, list(range(n)))
    if culprit is not None:
        raise ConfigError(
            f"module {culprit} returns two different outputs for the same images. Only the mechanism and the "
            "views may draw random numbers in a training step. Remove dropout and similar layers"
        )
    is_exact = _first_moved(first_calls, second_calls, list(range(n)), 0.0) is None
    for replaced_row in range(n):
        rows = [row for row in range(n) if row != replaced_row]
        replaced = images.clone()
        replaced[replaced_row] = replacements[replaced_row]
        culprit = _first_moved(first_calls, _trace(probe, replaced), rows, 0.0 if is_exact else 1e-6)
        if culprit is not None:
            raise ConfigError(
                f"module {culprit} mixes records: its output for one record changed when another record "
                f"changed. {_CROSS_RECORD_REASON}. Compute every statistic within one record"
            )
    # Another batch size may choose another convolution algorithm, so more rounding is allowed.
    culprit = _first_moved(first_calls, _trace(probe, images[:-1]), list(range(n - 1)), tolerance=1e-5)
    if culprit is not None:
        raise ConfigError(
            f"module {culprit} depends on the number of records in the batch. {_CROSS_RECORD_REASON}. "
            "Compute each output from only one record"
        )


_Call = tuple[str, Tensor | None, Tensor | None]


def _trace(probe: nn.Module, images: Tensor) -> list[_Call]:
    """Return (module name, first input, output) of every module call; None for values without a row axis."""
    calls: list[_Call] = []

    def recorder(name: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def record(_: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            # Clones, because a later in-place module may overwrite its input.
            copies = [
                value.clone() if isinstance(value, Tensor) and value.shape[:1] == images.shape[:1] else None
                for value in (inputs[0] if inputs else None, output)
            ]
            calls.append((name, copies[0], copies[1]))

        return record

    handles = [
        module.register_forward_hook(recorder(f"{name!r} ({type(module).__name__})" if name else "encoder"))
        for name, module in probe.named_modules()
    ]
    try:
        probe(images)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first_moved(
    calls_before: list[_Call], calls_after: list[_Call], rows: list[int], tolerance: float = 1e-6
) -> str | None:
    """Return the first module whose output changed at `rows` although its input there did not."""
    if len(calls_before) != len(calls_after):  # other modules ran; the encoder's own call still comes last
        calls_before, calls_after = calls_before[-1:], calls_after[-1:]
    for (name, input_before, output_before), (_, input_after, output_after) in zip(
        calls_before, calls_after, strict=True
    ):
        output_moved = _has_moved(output_before, output_after, rows, tolerance)
        if output_moved and not _has_moved(input_before, input_after, rows, tolerance):
            return name
    return None


def _has_moved(before: Tensor | None, after: Tensor | None, rows: list[int], tolerance: float) -> bool:
    if before is None or after is None or before.numel() == 0:
        return False
    if before.shape[1:] != after.shape[1:]:
        return True
    scale = 1 + float(before.abs().nan_to_num().max())
    return not torch.allclose(before[rows], after[rows], rtol=0.0, atol=tolerance * scale, equal_nan=True)
