"""Per-group gradients and ghost norms: every group's gradient from one forward and one backward pass.

Groups are disjoint and the network mixes no records, so one backward pass of many groups already holds
every group's gradient, and only has to be separated. `per_group_gradients` keeps each layer's input,
receives the gradient of the layer's output as soon as the backward pass reaches it, and computes that
layer's share of each group's norm in the cheaper of two ways (`dpgcl_core.clipping.layers`). Once all norms
are known, the rescaled gradients are summed. No second backward pass is needed.

The parameters themselves require no gradient during the pass: the ordinary weight gradient is replaced, not
computed a second time. docs/theory/clipping.md explains why the norms are exact enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.direct_uses import DirectUses, NotSeparableError
from dpgcl_core.clipping.layers import EXACT_NUMBERS, LayerRule, rule_of
from dpgcl_core.clipping.types import add_to_sum

PER_GROUP = "per-group gradient"
GHOST_NORM = "ghost norm"

NORM_FLOOR = 5e-3
"""A group's norm counts as at least this share of its magnitude bound over the layers with a ghost norm. The
floor has an effect only if gradients cancel to 1/200 of their terms, and then over-clips. The factor is then
at most C/(5e-3·bound), and a float64 product over N rows of all groups rounds by at most N·2⁻⁵³·200 C per
group."""

RUN_GROUPS = 16
"""The number of per-group gradients in one float32 sum; sums of such runs are added in float64. Adding or
removing a group in a run moves the rounding of the others by at most 2·16²·2⁻²⁴ C = 3e-5 C, which the
clipper's margin covers."""

SMALL = 1024
"""Per-group gradients of at most this many numbers, such as biases, are concatenated once all are known:
their norms and sums then take a few calls, not a few per parameter."""

_FLOPS_PER_NUMBER = 80
"""A ghost norm is computed if it needs fewer flops than this per parameter: the cost of writing a number
of the per-group gradient and reading it twice, measured on a CPU; a data-centre GPU has about this ratio."""


_KEEPS_STATISTICS = ContextVar("keeps_statistics", default=True)


@contextmanager
def as_layers_run() -> Iterator[None]:
    """Let normalisations run as they do outside of a recorded pass, with bit-identical rounding.

    Otherwise, if a ReLU's input is so close to 0 that rounding decides its sign, two correct gradients differ
    by more than a comparison allows.
    """
    token = _KEEPS_STATISTICS.set(False)
    try:
        yield
    finally:
        _KEEPS_STATISTICS.reset(token)


def _may_read_values(device: torch.device) -> bool:
    """Return whether Python may read a mask's values: on a GPU it would wait, which no capture allows."""
    return device.type == "cpu"


@dataclass
class _Call:
    """One use of a layer in the forward pass."""

    module: nn.Module
    rule: LayerRule
    x: Tensor
    version: int
    statistics: tuple[Tensor, ...]


@dataclass
class GroupGradients:
    """The gradients of all groups in a pass, kept until their factors are known.

    Attributes:
      losses: `[groups]` losses.
      squares: `[parts, groups]`, float64: the squared norm of each part of each group's gradient.
      magnitude_bound: `[parts, groups]`, float64: Σ_m ‖x_m‖·‖y_m‖ over the layers with a ghost norm, a bound
        on the size of the terms that their sums consist of.
      part_of: each parameter's part; 0 for all parameters if the gradient is clipped as a whole.
      paths: the way in which each layer's norm was computed, by layer name.
      per_group: gradients `[groups, *shape]`, by parameter.
      small: small per-group gradients, concatenated, by part.
      deferred: layers with a ghost norm, by their weight; their sums are computed once factors are known.
    """

    losses: Tensor
    squares: Tensor
    magnitude_bound: Tensor
    part_of: dict[Tensor, int]
    paths: dict[str, str] = field(default_factory=dict)
    per_group: dict[Tensor, Tensor] = field(default_factory=dict)
    small: dict[int, _SideBySide] = field(default_factory=dict)
    deferred: dict[Tensor, _Deferred] = field(default_factory=dict)

    @property
    def numbers_per_group(self) -> int:
        """How many numbers of per-group gradients are stored for one group."""
        matrices = (*self.per_group.values(), *(each.matrix for each in self.small.values()))
        return sum(gradients[0].numel() for gradients in matrices)

    def norms(self) -> Tensor:
        """Return the norms for clipping, float32 `[parts, groups]`: at least a share of the magnitude bound.

        Each part has its own floor, so the rounding of its sum is a small share of its own clipping bound,
        whatever the size of the other parts.
        """
        return torch.maximum(self.squares.sqrt(), NORM_FLOOR * self.magnitude_bound).float()

    def check(self) -> None:
        """Raise NotSeparableError if a tensor kept for the sum changed after its norm was computed."""
        for each in self.deferred.values():
            if (each.x._version, each.grad._version) != each.versions:
                raise NotSeparableError("a gradient was changed in place after its norm was computed")

    def add_weighted(self, total: Tensor, parameters: list[nn.Parameter], factor: Tensor) -> None:
        """Add Σ_G factor_G ∇L_G over groups G to the flat `total`; a factor of 0 masks its group first.

        Args:
          total: float64 `[num_parameters]`.
          parameters: the parameters in the order of `total`.
          factor: float32 `[parts, groups]`.
        """
        masked = factor == 0
        masks = None if _may_read_values(masked.device) and not bool(masked.any()) else masked
        sums: dict[Tensor, Tensor] = {}
        for row, small in self.small.items():
            sums |= small.weighted(factor[row], None if masks is None else masks[row])
        offset = 0
        for parameter in parameters:
            part = total[offset : offset + parameter.numel()].view_as(parameter)
            row = self.part_of[parameter]
            mask = None if masks is None else masks[row]
            if parameter in sums:
                add_to_sum(part, sums[parameter])
            elif parameter in self.per_group:
                add_to_sum(part, _weighted(self.per_group[parameter], factor[row], mask))
            elif parameter in self.deferred:
                for of_run in self.deferred[parameter].weighted(factor[row], mask):
                    add_to_sum(part, of_run)
            offset += parameter.numel()


@dataclass
class _Deferred:
    """A use of a layer with a ghost norm, kept until the factors are known and its sum is computed."""

    rule: LayerRule
    module: nn.Module
    x: Tensor
    grad: Tensor
    versions: tuple[int, int]

    def weighted(self, factor: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        """Yield terms of Σ_G factor_G ∇L_G over the groups G not in `mask`, in float64.

        A float32 product's rounding error grows with the terms of all groups, not with their sum. If the
        terms cancel, one group would change the rounding of the others by thousandths of C.
        """
        per_group = len(self.grad) // len(factor)
        x, grad = self.x, self.grad
        # Masked groups become zero on both sides of the product: 0·inf would not be 0.
        if mask is not None:
            rows = mask.repeat_interleave(per_group)
            grad = torch.where(rows.view(-1, *(1,) * (grad.ndim - 1)), 0.0, grad)
            if x.is_floating_point():
                x = torch.where(rows.view(-1, *(1,) * (x.ndim - 1)), 0.0, x)
        factors = factor.double().repeat_interleave(per_group).view(-1, *(1,) * (grad.ndim - 1))
        at_once = max(1, EXACT_NUMBERS // x[0].numel())
        for some_x, some_grad, some in zip(*(t.split(at_once) for t in (x, grad, factors)), strict=True):
            yield self.rule.total(self.module, some_x, some_grad * some)


class _SideBySide:
    """Small per-group gradients of several parameters, concatenated in one matrix `[groups, numbers]`.

    Args:
      gradients: by parameter, `[groups, *shape]` each, densely strided.
    """

    def __init__(self, gradients: dict[Tensor, Tensor]) -> None:
        dense = [_dense(each) for each in gradients.values()]
        self.matrix = torch.cat([matrix for matrix, _ in dense], 1)
        self._places = [
            (parameter, matrix.shape[1], strides)
            for parameter, (matrix, strides) in zip(gradients, dense, strict=True)
        ]

    def weighted(self, factor: Tensor, mask: Tensor | None) -> dict[Tensor, Tensor]:
        """Return Σ_G factor_G ∇L_G by parameter, over the groups G not in `mask`."""
        together = _weighted(self.matrix, factor, mask)
        parts = together.split([numbers for _, numbers, _ in self._places])
        return {
            parameter: part.as_strided(parameter.shape, strides)
            for part, (parameter, _, strides) in zip(parts, self._places, strict=True)
        }


def _dense(gradients: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return `[groups, numbers]` over the storage of densely strided gradients, and one group's strides."""
    num_groups, numbers = len(gradients), gradients[0].numel()
    strides = gradients.stride()[1:]
    return gradients.as_strided((num_groups, numbers), (numbers, 1)), strides


def _weighted(gradients: Tensor, factor: Tensor, mask: Tensor | None) -> Tensor:
    """Return Σ_G factor_G ∇L_G over the groups not in `mask`; float64 for more than `RUN_GROUPS` groups."""
    matrix, strides = _dense(gradients)
    if mask is not None:
        matrix = torch.where(mask[:, None], 0.0, matrix)
    whole = len(matrix) // RUN_GROUPS * RUN_GROUPS if len(matrix) > RUN_GROUPS else 0
    total = factor[whole:] @ matrix[whole:]
    if whole:
        factors, runs = factor[:whole].view(-1, 1, RUN_GROUPS), matrix[:whole].unflatten(0, (-1, RUN_GROUPS))
        total = torch.bmm(factors, runs).sum((0, 1), dtype=torch.float64) + total
    return total.as_strided(gradients.shape[1:], strides)


_CHUNK = 4096


def squares_of(gradients: Tensor) -> Tensor:
    """Return the squared norms `[groups]`, float64, of densely strided float32 `[groups, *shape]`.

    Squares of 4,096 numbers are summed in float32 (at most 512 additions in sequence: relative error below
    4e-5), these sums in float64. One float32 sum over millions would be too small by more than the margin.
    """
    matrix, _ = _dense(gradients)
    whole = matrix.shape[1] // _CHUNK * _CHUNK
    squares: Tensor = torch.linalg.vector_norm(matrix[:, whole:], dim=1, dtype=torch.float64).square()
    if whole:
        chunks = torch.linalg.vector_norm(matrix[:, :whole].view(len(matrix), -1, _CHUNK), dim=2)
        squares = squares + chunks.double().square().sum(1)
    return squares


def per_group_gradients(
    model: nn.Module,
    parameters: list[nn.Parameter],
    losses_of: Callable[[], Tensor],
    *,
    num_groups: int,
    num_rows: frozenset[int],
    owners: Sequence[int] | None = None,
) -> GroupGradients:
    """Run one forward and one backward pass and separate the groups' gradients.

    Call this function in `full_precision`: products that are rounded to ten bits (TF32) would give norms that
    do not match the summed gradients.

    Args:
      model: the network; no layer mixes records.
      parameters: its trainable parameters.
      losses_of: runs the forward pass and returns losses `[groups]`.
      num_groups: the number of groups in this pass.
      num_rows: the lengths that a layer's leading axis may have.
      owners: the index of each parameter's clipping part; None for one part.

    Raises:
      NotSeparableError: a layer did not see exactly the rows of all groups, or a parameter is used in a
        way that is not supported.
    """
    part_of: dict[Tensor, int] = dict(zip(parameters, owners or (0,) * len(parameters), strict=True))
    recorder = _Recorder(model, part_of, num_groups, num_rows)
    with recorder.recording():
        losses = losses_of()
    if losses.shape != (num_groups,):
        raise NotSeparableError(f"losses must be [groups]; got {list(losses.shape)}")
    try:
        recorder.run_backward(losses)
        return recorder.finish(losses)
    finally:
        recorder.forget()


class _Recorder:
    """Receives layers' inputs and output gradients from hooks, and computes each layer's share of norms."""

    def __init__(
        self,
        model: nn.Module,
        part_of: dict[Tensor, int],
        num_groups: int,
        num_rows: frozenset[int],
    ) -> None:
        self._num_groups, self._num_rows = num_groups, num_rows
        self._parameters = part_of.keys()  # the parameters whose gradients are computed
        self._names = {module: name for name, module in model.named_modules()}
        rules = {module: rule_of(module) for module in model.modules()}
        self._rules = {
            module: rule
            for module, rule in rules.items()
            if rule is not None and any(p in self._parameters for p in module.parameters(recurse=False))
        }
        names = {p: name for name, p in model.named_parameters() if p in self._parameters}
        self._direct = DirectUses(names, num_groups, num_rows)
        self._uses: Counter[Tensor] = Counter()
        self._leaves: list[Tensor] = []
        self._hooks: list[Any] = []
        self._statistics: dict[nn.Module, tuple[Tensor, ...]] = {}
        self._shared: set[Tensor] = set()
        self._small: dict[int, dict[Tensor, Tensor]] = {}
        shape, device = (max(part_of.values()) + 1, num_groups), next(iter(part_of)).device
        squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self._result = GroupGradients(
            losses=squares[0], squares=squares, magnitude_bound=torch.zeros_like(squares), part_of=part_of
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward pass that runs in this context; in it no parameter requires a gradient."""
        handles = [layer.register_forward_hook(self._remember, with_kwargs=True) for layer in self._rules]
        handles += [layer.register_forward_pre_hook(self._direct.enter) for layer in self._rules]
        # Normalisations run through their layer rules, which keep the statistics that their gradients need.
        normalisations = (nn.GroupNorm, nn.LayerNorm) if _KEEPS_STATISTICS.get() else ()
        replaced = [layer for layer in self._rules if type(layer) in normalisations]
        for layer in replaced:
            layer.forward = partial(self._run, layer, layer.forward)
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        try:
            with torch.enable_grad(), self._direct:
                yield
        finally:
            for parameter in self._parameters:
                parameter.requires_grad_(True)
            for handle in handles:
                handle.remove()
            for layer in replaced:
                del layer.forward

    def _run(
        self, module: nn.Module, forward: Callable[..., Tensor], *args: Tensor, **kwargs: Tensor
    ) -> Tensor:
        values = (*args, *kwargs.values())
        ran = self._rules[module].runs(module, values[0]) if len(values) == 1 else None
        output, statistics = ran or (forward(*args, **kwargs), ())
        self._statistics[module] = statistics
        return output

    def _remember(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> Tensor:
        self._direct.leave()
        with torch._C.DisableTorchFunction():  # `DirectUses` must not watch the calls below
            return self._record_call(module, (*args, *kwargs.values()), output)

    def _record_call(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Keep a layer's input, and register `_arrived` for the gradient of its output."""
        rule = self._rules[module]
        if (
            len(args) != 1
            or not args[0].ndim
            or not len(args[0]) == len(output)
            or len(output) not in self._num_rows
        ):
            raise NotSeparableError(
                f"the leading axis of layer {self._names[module]!r} does not match the inputs' leading axis"
            )
        # Parameters require no gradient here, so the outputs of the first layers do not either. They become
        # leaves of the backward pass, so that it reaches their hooks.
        if not output.requires_grad:
            output.requires_grad_()
            self._leaves.append(output)
        x = args[0].detach()
        call = _Call(module, rule, x, x._version, self._statistics.pop(module, ()))
        # A tensor's hook receives the gradient of its value now, even if an in-place operation follows.
        self._hooks.append(output.register_hook(partial(self._arrived, call)))
        self._uses.update(module.parameters(recurse=False))
        return output

    def run_backward(self, losses: Tensor) -> None:
        """Run the backward pass, in which the layers' gradients arrive.

        Which parameters were used more than once is known only after the forward pass. Their gradients
        must be added up before their norm is computed, because squared norms of single uses do not add.
        """
        self._shared = {p for p, count in self._uses.items() if count > 1} | self._direct.used_parameters
        leaves = self._leaves + self._direct.leaves
        if leaves:
            torch.autograd.grad(losses.sum(), leaves, allow_unused=True)

    def forget(self) -> None:
        """Break the reference cycles between leaves and hooks, which would keep a step's tensors alive."""
        for hook in self._hooks:
            hook.remove()
        self._leaves.clear()
        self._small.clear()
        self._direct.forget()

    def _arrived(self, call: _Call, grad: Tensor) -> None:
        """Compute norms, and gradients if needed, from a layer's input and the gradient of its output."""
        rule, module, x, n = call.rule, call.module, call.x, self._num_groups
        if x._version != call.version:
            raise NotSeparableError(f"the input of layer {self._names[module]!r} was changed in place")
        del call.x  # the hook lives longer than this call, but the input is no longer needed
        with torch.no_grad():
            for parameter, gradients in rule.vectors(module, x, grad, n, call.statistics):
                self._keep(parameter, gradients)
            matrix = rule.matrix(module)
            if matrix is None or matrix not in self._parameters:
                return
            # The choice depends only on shapes, so it is the same for all groups and depends on no record.
            by_ghost_norm = rule.ghost_norm_flops(module, x, grad, n) < _FLOPS_PER_NUMBER * matrix.numel()
            if by_ghost_norm and matrix not in self._shared:
                squares, magnitude_bound = rule.ghost_norms(module, x, grad, n)
                part = self._result.part_of[matrix]
                self._result.squares[part] += squares
                self._result.magnitude_bound[part] += magnitude_bound
                versions = (x._version, grad._version)
                self._result.deferred[matrix] = _Deferred(rule, module, x, grad, versions)
            else:
                self._keep(matrix, rule.per_group(module, x, grad, n))
            self._result.paths[self._names[module]] = (
                GHOST_NORM if matrix in self._result.deferred else PER_GROUP
            )

    def _keep(self, parameter: Tensor, gradients: Tensor) -> None:
        """Store a parameter's per-group gradients; a parameter used several times gets their sum."""
        if parameter not in self._parameters:
            return
        if parameter not in self._shared and gradients[0].numel() <= SMALL:
            self._small.setdefault(self._result.part_of[parameter], {})[parameter] = gradients
            return
        if parameter not in self._shared:
            self._result.squares[self._result.part_of[parameter]] += squares_of(gradients)
        elif parameter in self._result.per_group:  # a further use: its norm is computed in `finish`
            gradients = self._result.per_group[parameter] + gradients.contiguous()
        else:
            gradients = gradients.contiguous()
        self._result.per_group[parameter] = gradients

    def finish(self, losses: Tensor) -> GroupGradients:
        """Return the result after the backward pass."""
        result = self._result
        result.losses = losses.detach()
        for parameter, of_use in self._direct.gradients():
            self._keep(parameter, of_use)
        for part, gradients in self._small.items():
            result.small[part] = _SideBySide(gradients)
            result.squares[part] += squares_of(result.small[part].matrix)
        for shared in self._shared & result.per_group.keys():
            result.squares[result.part_of[shared]] += squares_of(result.per_group[shared])
        return result
