"""Station 7, the clipped group gradient: one gradient per group, norm at most C, summed in fp32.

Groups are disjoint and the network mixes no records, so **one** forward and one backward pass of many
groups already hold every group's gradient; they only have to be separated. `_fold` records each layer's
input and output gradient and folds (records of a group × views × positions) into one axis, so that a
batched matrix product gives each layer's gradient per group. Networks with a layer it does not know,
and groups too many to hold, go through `_loop`, one ordinary backward pass per group: exact and general.

Guarantee. Every group contributes a vector of norm at most C to the sum: the factor is
min(1, C(1 − 1e-4)/norm), with norm and factor in fp32 and the sum taken over the same stored tensors;
squares are summed pairwise, so that rounding stays below 1e-6 and the margin covers it. A group whose
gradient is not finite contributes exactly zero and is masked *before* the product that sums groups,
because 0·inf is not 0. No other group changes by a bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError

logger = logging.getLogger(__name__)

GroupLosses = Callable[[Tensor], Tensor]
_MARGIN = 1 - 1e-4
_MAX_FOLDED_NUMBERS = 2**28
_LOOP_FROM_VIEWS = 48  # on a CPU a backward pass of this many images is as fast alone as among others
_SELF_CHECK_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """By-products of one call, all **private-only**.

    Attributes:
      norms: `[groups]` gradient norms before clipping; nan where they were not needed (C = inf).
      losses: `[groups]`.
      non_finite: `[groups]`, which groups were masked to zero.
    """

    norms: Tensor
    losses: Tensor
    non_finite: Tensor


class _NotFoldableError(Exception):
    """A layer did not see exactly the rows of all groups, in their order as far as that shows."""


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable parameters in the order of every flat vector of this package."""
    return [p for p in model.parameters() if p.requires_grad]


def num_trainable(model: nn.Module) -> int:
    """Returns the length of the flat parameter vector."""
    return sum(p.numel() for p in trainable_parameters(model))


@dataclass(frozen=True, kw_only=True)
class GroupClipper:
    """Per-group clipping to `l2_clip_norm`.

    Raises:
      ConfigError: `l2_clip_norm` is not positive.
    """

    l2_clip_norm: float

    def __post_init__(self) -> None:
        if not self.l2_clip_norm > 0:
            raise ConfigError(f"l2_clip_norm must be positive; got {self.l2_clip_norm}")

    def add_clipped_sum(
        self, total: Tensor, model: nn.Module, group_losses: GroupLosses, inputs: Tensor
    ) -> GroupReport:
        """Adds Σ Clip_C(∇L_G) over the groups of `inputs` to `total`, in place.

        Calling it for any partition of a batch into microbatches of whole groups gives the same sum.

        Args:
          total: float32 `[num_trainable(model)]`, in the order of `trainable_parameters`.
          model: the network that `group_losses` calls; it must not mix records.
          group_losses: maps inputs `[groups, ...]` to losses `[groups]`. Every layer of `model` must
            see an input whose leading axis is groups × something, group by group.
          inputs: `[groups, group_size, views, ...]`, at least one group.

        Returns:
          The groups' norms and losses, for private-only diagnosis.
        """
        parameters = trainable_parameters(model)
        if math.isinf(self.l2_clip_norm):
            return _plain(total, parameters, group_losses, inputs)
        if _folds(model, group_losses, inputs):
            try:
                return _fold(total, model, parameters, group_losses, inputs, self.l2_clip_norm)
            except _NotFoldableError:  # these inputs took another way through the network
                pass
        return _loop(total, parameters, group_losses, inputs, self.l2_clip_norm)


def _plain(
    total: Tensor, parameters: list[nn.Parameter], group_losses: GroupLosses, inputs: Tensor
) -> GroupReport:
    """The plain gradient of all groups at once, for runs without clipping."""
    losses = group_losses(inputs)
    flat = _flat(torch.autograd.grad(losses.sum(), parameters, allow_unused=True), parameters)
    finite = torch.isfinite(flat).all()
    total += torch.where(finite, flat, torch.zeros_like(flat))
    return GroupReport(
        norms=torch.full_like(losses.detach(), math.nan),
        losses=losses.detach(),
        non_finite=(~finite).expand(len(losses)),
    )


def _loop(
    total: Tensor,
    parameters: list[nn.Parameter],
    group_losses: GroupLosses,
    inputs: Tensor,
    l2_clip_norm: float,
) -> GroupReport:
    """One backward pass per group: exact for any network."""
    norms, losses = [], []
    for group in torch.split(inputs, 1):
        loss = group_losses(group)
        flat = _flat(torch.autograd.grad(loss.sum(), parameters, allow_unused=True), parameters)
        norm = _norm(flat)
        factor, finite = _clip_factor(norm, l2_clip_norm)
        total += torch.where(finite, flat, torch.zeros_like(flat)) * factor
        norms.append(norm)
        losses.append(loss.detach())
    stacked = torch.stack(norms)
    return GroupReport(norms=stacked, losses=torch.cat(losses), non_finite=~torch.isfinite(stacked))


def _flat(gradients: tuple[Tensor | None, ...], parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten().float()
            for g, p in zip(gradients, parameters, strict=True)
        ]
    )


def _norm(flat: Tensor) -> Tensor:
    """Euclidean norm with a pairwise sum: `vector_norm` adds one by one on a CPU, and from some five
    million numbers on it falls short by more than the margin."""
    return flat.square().sum().sqrt()


def _clip_factor(norm: Tensor, l2_clip_norm: float) -> tuple[Tensor, Tensor]:
    """Returns the factors and which norms are finite; an infinite norm masks its group."""
    finite = torch.isfinite(norm)
    factor = (l2_clip_norm * _MARGIN / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
    return torch.where(finite, factor, torch.zeros_like(factor)), finite


def _fold(
    total: Tensor,
    model: nn.Module,
    parameters: list[nn.Parameter],
    group_losses: GroupLosses,
    inputs: Tensor,
    l2_clip_norm: float,
) -> GroupReport:
    """One forward and one backward pass; every layer's gradient separated by group."""
    losses, gradients = _group_gradients(model, parameters, group_losses, inputs)
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
    norms = squares.sum(0).sqrt()
    factor, finite = _clip_factor(norms, l2_clip_norm)
    all_finite = bool(finite.all())
    offset = 0
    for parameter in parameters:
        length = parameter.numel()
        if parameter in gradients:
            matrix = gradients[parameter].flatten(1)
            if not all_finite:
                matrix = torch.where(finite[:, None], matrix, torch.zeros_like(matrix))
            total[offset : offset + length] += factor @ matrix
        offset += length
    return GroupReport(norms=norms, losses=losses, non_finite=~finite)


def _group_gradients(
    model: nn.Module, parameters: list[nn.Parameter], group_losses: GroupLosses, inputs: Tensor
) -> tuple[Tensor, dict[Tensor, Tensor]]:
    """Returns losses `[groups]` and, per parameter, its gradients `[groups, *shape]`."""
    num_groups = len(inputs)
    with _recorded(model, parameters) as calls:
        losses = group_losses(inputs)
        num_rows = inputs.shape[:3].numel()
        for call in calls:
            if call.version != call.output._version:
                raise _NotFoldableError("a layer's output was changed in place")
            if call.input.shape[0] != num_rows or call.output.shape[0] != num_rows:
                raise _NotFoldableError("a layer's leading axis is not that of the inputs")
        outputs = torch.autograd.grad(losses.sum(), [call.output for call in calls], allow_unused=True)
    gradients: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for call, gradient in zip(calls, outputs, strict=True):
            if gradient is None:
                continue
            rule = _RULES[type(call.module)]
            for parameter, value in rule(call.module, call.input, gradient, num_groups):
                if parameter in gradients:  # a layer used twice, or a shared parameter
                    value = gradients[parameter] + value
                gradients[parameter] = value
    return losses.detach(), {p: g for p, g in gradients.items() if any(p is q for q in parameters)}


@dataclass(frozen=True)
class _Call:
    """One use of a layer in the forward pass."""

    module: nn.Module
    input: Tensor
    output: Tensor
    version: int


@contextmanager
def _recorded(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[list[_Call]]:
    """Records every layer's input and output; parameters take no gradient of their own meanwhile."""
    calls: list[_Call] = []

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:  # the first layer: nothing before it needs a gradient
            output.requires_grad_()
        calls.append(_Call(module, args[0].detach(), output, output._version))
        return output

    owners = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    handles = [owner.register_forward_hook(remember) for owner in owners]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield calls
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()


_GroupGradient = Iterator[tuple[Tensor, Tensor]]


def _linear(module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> _GroupGradient:
    assert isinstance(module, nn.Linear)
    grad = grad.float().reshape(num_groups, -1, module.out_features)
    x = x.float().reshape(num_groups, -1, module.in_features)
    yield module.weight, torch.bmm(grad.transpose(1, 2), x)
    if module.bias is not None:
        yield module.bias, grad.sum(1)


def _conv2d(module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> _GroupGradient:
    assert isinstance(module, nn.Conv2d)
    num_images, out_channels = grad.shape[:2]
    blocks = module.groups
    patches = F.unfold(
        x.float(),
        module.kernel_size,
        dilation=module.dilation,
        padding=module.padding,  # type: ignore[arg-type]
        stride=module.stride,
    )
    positions = patches.shape[-1]
    patches = patches.reshape(num_images * blocks, -1, positions)
    grad = grad.float().reshape(num_images * blocks, out_channels // blocks, positions)
    per_group = num_images // num_groups
    if out_channels // blocks <= positions:  # per image and sum: smaller than a copy of the patches
        images = torch.bmm(grad, patches.transpose(1, 2))
        weight = images.reshape(num_groups, per_group, -1).sum(1)
    else:
        folded = _fold_positions(patches, num_groups, blocks)
        weight = torch.bmm(_fold_positions(grad, num_groups, blocks), folded.transpose(1, 2))
    yield module.weight, weight.reshape(num_groups, *module.weight.shape)
    if module.bias is not None:
        yield module.bias, grad.reshape(num_groups, per_group, out_channels, positions).sum((1, 3))


def _fold_positions(x: Tensor, num_groups: int, blocks: int) -> Tensor:
    """`[images × blocks, rows, positions]` → `[groups × blocks, rows, images per group × positions]`."""
    rows, positions = x.shape[1:]
    split = x.reshape(num_groups, -1, blocks, rows, positions).permute(0, 2, 3, 1, 4)
    return split.reshape(num_groups * blocks, rows, -1)


def _group_norm(module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> _GroupGradient:
    assert isinstance(module, nn.GroupNorm)
    normal = F.group_norm(x.float(), module.num_groups, eps=module.eps)
    shape = (num_groups, len(x) // num_groups, module.num_channels, -1)
    yield module.weight, (grad.float() * normal).reshape(shape).sum((1, 3))
    yield module.bias, grad.float().reshape(shape).sum((1, 3))


def _layer_norm(module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> _GroupGradient:
    assert isinstance(module, nn.LayerNorm)
    normal = F.layer_norm(x.float(), module.normalized_shape, eps=module.eps)
    shape = (num_groups, -1, *module.normalized_shape)
    yield module.weight, (grad.float() * normal).reshape(shape).sum(1)
    if module.bias is not None:
        yield module.bias, grad.float().reshape(shape).sum(1)


_RULES: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor, int], _GroupGradient]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
_checked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _folds(model: nn.Module, group_losses: GroupLosses, inputs: Tensor) -> bool:
    """Whether `_fold` is exact for this model and worth its memory for these inputs."""
    if len(inputs) == 1 or len(inputs) * num_trainable(model) > _MAX_FOLDED_NUMBERS:
        return False
    if inputs.device.type == "cpu" and inputs.shape[1:3].numel() >= _LOOP_FROM_VIEWS:
        return False
    if model not in _checked:
        unknown = _unknown_layers(model) or _wrongly_folded(model, group_losses, inputs)
        if unknown:
            logger.warning("per-group gradients one by one (exact, slower): %s", unknown)
        _checked[model] = not unknown
    return _checked[model]


def _unknown_layers(model: nn.Module) -> str:
    """Returns why the model cannot be folded by its layers' types; empty if it can."""
    for name, module in model.named_modules():
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        if type(module) not in _RULES:
            return f"no rule for layer {name!r} ({type(module).__name__})"
        if isinstance(module, nn.Conv2d) and (
            module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            return f"no rule for the padding of layer {name!r}"
    return ""


def _wrongly_folded(model: nn.Module, group_losses: GroupLosses, inputs: Tensor) -> str:
    """Compares both paths on synthetic inputs: finds what layer types cannot tell.

    A layer whose weights are used around its `forward`, or that reorders records, folds wrongly. The
    weights are perturbed for the comparison, lest a zero initialisation hide a branch, and restored bit
    for bit; two numbers of groups are tried, lest a layer's leading axis fit by chance; the synthetic
    records differ in level and contrast, lest all take the same way through the network.
    """
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise.to(parameter))
        for num_groups in (2, 3):
            shape = (num_groups, *inputs.shape[1:])
            rows = (*shape[:3], *(1 for _ in shape[3:]))
            level, contrast = (torch.rand(rows, generator=generator) for _ in range(2))
            synthetic = (2 * level - 1) + contrast * (2 * torch.rand(shape, generator=generator) - 1)
            wrong = _compare(model, group_losses, synthetic.to(inputs))
            if wrong:
                return wrong
    finally:
        model.load_state_dict(state)
    return ""


def _compare(model: nn.Module, group_losses: GroupLosses, inputs: Tensor) -> str:
    """Returns how `_fold` differs from `_loop` on these inputs; empty if it does not."""
    parameters = trainable_parameters(model)
    expected = torch.zeros(num_trainable(model), device=inputs.device)
    loop = _loop(expected, parameters, group_losses, inputs, l2_clip_norm=1.0)
    actual = torch.zeros_like(expected)
    try:
        fold = _fold(actual, model, parameters, group_losses, inputs, l2_clip_norm=1.0)
    except (RuntimeError, _NotFoldableError) as error:
        return f"folding fails on synthetic inputs ({error})"
    close = torch.allclose(fold.norms, loop.norms, rtol=_SELF_CHECK_TOLERANCE)
    if close and _norm(actual - expected) <= _SELF_CHECK_TOLERANCE * _norm(expected):
        return ""
    return "folded gradients differ from exact ones on synthetic inputs"
