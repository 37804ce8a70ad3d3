"""Direct parameter uses: class tokens, position embeddings, scales, fused attention projections.

These uses are outside a layer with a layer rule, so no module hook sees them, and `DirectUses` watches every
torch function that takes a parameter. When a parameter is combined with a batch, it is replaced by one copy
per row (for a matrix product, the output is watched instead). The gradients of the copies, summed within a
group, are the group's gradient. Operations on the parameter before that, such as a slice, a cast or an
exponential, are differentiated by an ordinary vector-Jacobian product per group. An unsupported use raises,
and the caller falls back to its exact general path, so no use of a parameter is ever missed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class NotSeparableError(Exception):
    """One pass cannot separate the groups' gradients; the message names the layer or parameter."""


def _functions(*names: str) -> set[Function]:
    found: Iterator[Any] = (getattr(owner, name, None) for name in names for owner in (torch, Tensor))
    # `__torch_function__` receives a property such as T as its getter.
    return {f if callable(f) else f.__get__ for f in found if callable(f) or hasattr(f, "__get__")}


_UNARY = _functions(
    *("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"),
    *("transpose", "permute", "t", "T", "mT"),
    *("chunk", "split", "narrow", "select", "__getitem__", "contiguous", "clone", "to", "type", "type_as"),
    *("float", "half", "bfloat16", "double"),
    *("exp", "log", "tanh", "sigmoid", "clamp", "clip", "neg", "square"),
)
_ELEMENTWISE = _functions(
    *("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "mul", "__mul__", "__rmul__"),
    *("div", "true_divide", "__truediv__", "__rtruediv__"),
)
_EXPANDED = _functions("expand", "expand_as", "repeat", "tile", "broadcast_to")
_PRODUCTS = _functions("matmul", "__matmul__", "mm")
_ITEMS = {Tensor.__getitem__, Tensor.__setitem__}
_BY_INDEX = _ITEMS | _functions(
    *("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
    *("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_put"),
    *("index_put_", "masked_select", "masked_scatter", "masked_scatter_", "take", "take_along_dim", "put_"),
)
_BY_NAME = {F.linear, F.layer_norm, F.multi_head_attention_forward}
_ATTENTION = inspect.signature(F.multi_head_attention_forward)


class DirectUses(TorchFunctionMode):
    """Watches all uses of parameters in a forward pass, except a layer's uses of its own parameters.

    For each use outside a layer it computes one gradient per group, see `gradients`.

    Args:
      names: every watched parameter with its name.
      num_groups: the number of groups in the pass.
      num_rows: the lengths that the leading axis of a batch may have, besides the number of groups.

    Attributes:
      leaves: tensors whose gradients the backward pass must compute.
      used_parameters: parameters that were used outside of their layers.
    """

    def __init__(self, names: dict[nn.Parameter, str], num_groups: int, num_rows: frozenset[int]) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []
        self.used_parameters: set[Tensor] = set()
        self._layer_ids: frozenset[int] = frozenset()
        self._names = names
        self._num_groups = num_groups
        self._num_rows = num_rows | {num_groups}
        self._parameters = {id(p): p for p in names}
        self._derived: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._alive: list[Tensor] = []
        self._hooks: list[Any] = []
        self._gradients: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._row_indices: list[tuple[Tensor, int]] = []

    def enter(self, module: nn.Module, *_: object) -> None:
        """Stop watching the module's own parameters, which its layer rule handles; a forward pre-hook."""
        layer_parameters = (module._parameters.get(name) for name in ("weight", "bias"))
        self._layer_ids = frozenset(id(parameter) for parameter in layer_parameters if parameter is not None)

    def leave(self) -> None:
        """Watch all parameters again, after the layer's forward pass."""
        self._layer_ids = frozenset()

    def forget(self) -> None:
        """Break the reference cycles between leaves and hooks, which would keep a step's tensors alive."""
        for hook in self._hooks:
            hook.remove()
        self.leaves.clear()
        self._row_indices.clear()

    def _is_watched(self, tensor: Tensor) -> bool:
        key = id(tensor)
        return (key in self._parameters or key in self._derived) and key not in self._layer_ids

    def _value(self, tensor: Tensor) -> tuple[nn.Parameter, Tensor]:
        """Return a watched tensor's parameter, and the tensor as computed from a detached copy of it."""
        if id(tensor) not in self._derived:
            parameter = self._parameters[id(tensor)]
            self._derived[id(tensor)] = (parameter, parameter.detach().clone().requires_grad_())
        return self._derived[id(tensor)]

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the gradients `[groups, *shape]` after the backward pass, one per use."""
        for parameter, value, gradients in self._gradients:
            source = self._value(parameter)[1]
            if value is not source:  # the parameter was sliced, cast or mapped first
                (gradients,) = torch.autograd.grad(
                    value, source, gradients.to(value.dtype), retain_graph=True, is_grads_batched=True
                )
            yield parameter, gradients.float()

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function; if it takes a watched parameter, so that its gradients can be separated."""
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        parameters = [value for value in tensors if self._is_watched(value)]
        if func in _BY_INDEX and not self._keeps_rows(func, args, kwargs):
            raise NotSeparableError(
                f"records are selected by index ({func.__name__}), so their order may depend on the data"
            )
        if not parameters:
            return self._without_parameters(func, args, kwargs)
        if any(self._is_watched(value) for value in _tensors(kwargs.values())) and func not in _BY_NAME:
            raise NotSeparableError(
                f"a parameter passed by keyword is not supported in {getattr(func, '__name__', func)}"
            )
        if func is F.multi_head_attention_forward:
            call = _ATTENTION.bind(*args, **kwargs)
            call.apply_defaults()
            return self._attention(SimpleNamespace(**call.arguments))
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.layer_norm:
            return self._layer_norm(*args, **kwargs)
        batch_tensors = [value for value in tensors if not self._is_watched(value)]
        if func in _EXPANDED:
            return self._expand(func, args, kwargs)
        if func in _PRODUCTS and len(batch_tensors) == 1 and args[0] is batch_tensors[0]:
            return self._product(args[0], args[1])
        if func in _ELEMENTWISE and batch_tensors:
            return self._elementwise(func, args, kwargs)
        if func in _UNARY | _ELEMENTWISE and len(parameters) == 1:
            return self._derive(func, args, kwargs)
        # An unknown function: harmless only if it returns something other than a tensor, such as a shape.
        result = func(*args, **kwargs)
        if result is None or any(True for _ in _tensors((result,))):
            name = self._names[self._value(parameters[0])[0]]
            raise NotSeparableError(
                f"this use of parameter {name!r} is not supported: {getattr(func, '__name__', func)}"
            )
        return result

    def _without_parameters(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.arange and len(args) == 1 and kwargs.keys() <= {"device"}:
            self._row_indices.append((result, result._version))
        return result

    def _keeps_rows(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an indexing operation leaves every row of a batch in place, whatever the data."""
        if not args or not isinstance(args[0], Tensor) or self._is_watched(args[0]) or kwargs:
            return not kwargs
        batch = args[0]
        if not batch.ndim or len(batch) not in self._num_rows:
            return True
        if func not in _ITEMS:  # (input, dim, index, ...); `take` and the like have no dim
            return len(args) > 2 and isinstance(args[1], int) and args[1] % batch.ndim != 0
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if first is None or first is Ellipsis or isinstance(first, slice):
            return True
        if isinstance(first, Tensor) and first.dtype == torch.int64 and first.shape == (len(batch),):
            if any(first is indices and first._version == version for indices, version in self._row_indices):
                return True  # without reading its numbers, which would wait for a GPU
            return bool(torch.equal(first, torch.arange(len(batch), device=first.device)))
        return False

    def _replaced(self, args: Any) -> Any:
        if isinstance(args, Tensor):
            return self._value(args)[1] if self._is_watched(args) else args
        return type(args)(self._replaced(each) for each in args) if isinstance(args, tuple | list) else args

    def _derive(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a function of one parameter and no batch; its result is then watched, too."""
        parameter = next(self._value(v)[0] for v in _tensors(args) if self._is_watched(v))
        result = func(*self._replaced(args), **kwargs)
        for value in _tensors((result,)):
            self._alive.append(value)
            self._derived[id(value)] = (parameter, value)
        return result

    def _rows(self, tensor: Tensor, num_rows: int, num_axes: int) -> Tensor:
        """Return one copy of a watched tensor per row, aligned to `num_axes` axes as in broadcasting."""
        parameter, value = self._value(tensor)
        aligned = value.detach().reshape((1,) * (num_axes - value.ndim) + value.shape)
        if num_rows not in self._num_rows or num_rows % self._num_groups or aligned.shape[0] != 1:
            raise NotSeparableError(f"parameter {self._names[parameter]!r} is not used with a batch of rows")
        rows = aligned.expand(num_rows, *aligned.shape[1:]).requires_grad_()
        hook = rows.register_hook(partial(self._rows_arrived, parameter, value))
        self._hooks.append(hook)
        self.leaves.append(rows)
        self.used_parameters.add(parameter)
        return rows

    def _rows_arrived(self, parameter: nn.Parameter, value: Tensor, grad: Tensor) -> None:
        summed = grad.detach().float().reshape(self._num_groups, -1, *grad.shape[1:]).sum(1)
        self._gradients.append((parameter, value, summed.reshape(self._num_groups, *value.shape)))

    def _elementwise(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Combine a batch with watched parameters, each replaced by one copy per row."""
        shape = torch.broadcast_shapes(*(v.shape for v in _tensors(args)))
        if not shape:
            raise NotSeparableError("a parameter is combined with a scalar that may depend on the batch")
        replaced = [
            self._rows(a, shape[0], len(shape)) if isinstance(a, Tensor) and self._is_watched(a) else a
            for a in args
        ]
        result: Tensor = func(*replaced, **kwargs)
        return result

    def _expand(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if not self._is_watched(args[0]):
            raise NotSeparableError("a batch is expanded to a parameter's shape")
        shape = func(args[0].detach(), *args[1:], **kwargs).shape
        rows = self._rows(args[0], shape[0], len(shape))
        return rows if rows.shape == shape else rows.expand(shape)

    def _product(self, x: Tensor, tensor: Tensor) -> Tensor:
        """Return x @ W for `x` `[rows, ..., in]` and a watched `W` `[in, out]`."""
        parameter, value = self._value(tensor)
        if value.ndim != 2 or x.ndim < 2 or x.shape[0] not in self._num_rows:
            raise NotSeparableError(
                f"this product with parameter {self._names[parameter]!r} is not supported"
            )
        self.used_parameters.add(parameter)
        output = x @ value.detach()
        if not output.requires_grad:
            output.requires_grad_()
            self.leaves.append(output)
        hook = partial(self._product_arrived, parameter, value, x.detach())
        self._hooks.append(output.register_hook(hook))
        return output

    def _product_arrived(self, parameter: nn.Parameter, value: Tensor, x: Tensor, grad: Tensor) -> None:
        x, grad = (t.detach().float().reshape(self._num_groups, -1, t.shape[-1]) for t in (x, grad))
        self._gradients.append((parameter, value, torch.bmm(x.transpose(1, 2), grad)))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with self:
            output: Tensor = input @ weight.t()
            return output if bias is None else output + bias

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        with self:
            output = F.layer_norm(input, normalized_shape, eps=eps)
            output = output if weight is None else output * weight
            return output if bias is None else output + bias

    def _attention(self, call: SimpleNamespace) -> tuple[Tensor, Tensor | None]:
        """Compute a call of `F.multi_head_attention_forward` by watched operations, `[length, rows, dim]`."""
        unusual = (call.bias_k, call.bias_v, call.static_k, call.static_v)
        if (
            any(t is not None for t in unusual)
            or call.add_zero_attn
            or (call.dropout_p > 0 and call.training)
            or call.query.ndim != 3
        ):
            raise NotSeparableError("this kind of attention is not supported")
        with self:
            weights: Any = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
            if call.in_proj_weight is not None and not call.use_separate_proj_weight:
                weights = call.in_proj_weight.chunk(3)
            biases: Any = (None,) * 3 if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
            inputs = (t.transpose(0, 1) for t in (call.query, call.key, call.value))
            q, k, v = (
                _heads(F.linear(x, w, b), call.num_heads)
                for x, w, b in zip(inputs, weights, biases, strict=True)
            )
        mask = _additive_mask(call.attn_mask, call.key_padding_mask, q)
        attention = None
        if call.need_weights:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
            attention = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            mixed = attention @ v
            attention = attention.mean(1) if call.average_attn_weights else attention
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
        with self:
            output = F.linear(mixed.transpose(1, 2).flatten(2), call.out_proj_weight, call.out_proj_bias)
        return output.transpose(0, 1), attention


def _additive_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return both masks of multi-head attention as one term of the scores `[rows, heads, queries, keys]`."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(q.dtype)
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)

    total = None
    if attn_mask is not None:
        total = additive(attn_mask)
        if total.ndim == 3:
            total = total.view(q.shape[0], q.shape[1], *total.shape[1:])
    if key_padding_mask is not None:
        padding = additive(key_padding_mask)[:, None, None, :]
        total = padding if total is None else total + padding
    return total


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
