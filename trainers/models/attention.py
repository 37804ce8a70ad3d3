"""Multi-head attention with one layer per projection, to and from `nn.MultiheadAttention`.

`nn.MultiheadAttention` keeps queries, keys and values in one fused parameter and calls its output layer's
weight around its `forward`. So adapters cannot reach the query alone, and per-layer hooks, from which the
clipped group gradient is made, see nothing. `SeparateAttention` computes the same from four plain
`nn.Linear`; `separate_attention` and `fuse_attention` convert whole models without changing a weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpgcl_core.errors import ConfigError

_OUTPUT_LAYERS = (nn.Linear, NonDynamicallyQuantizableLinear)


class SeparateAttention(nn.Module):
    """Attention (Vaswani et al. 2017) with separate projections; takes the place of `nn.MultiheadAttention`.

    Each record's output depends on that record's query, key and value alone, and every projection sees
    records on its leading axis, whatever `batch_first` says. There is no dropout.

    Args:
      embed_dim: width of queries and outputs.
      num_heads: number of heads; divides `embed_dim`.
      bias: whether the four projections have biases.
      kdim: width of the keys; `embed_dim` if None.
      vdim: width of the values; `embed_dim` if None.
      batch_first: whether inputs and outputs are `[n, length, dim]` or `[length, n, dim]`.
      device: where the weights are made.
      dtype: what they are made of.

    Raises:
      ConfigError: `num_heads` does not divide `embed_dim`.

    >>> tokens = torch.zeros(2, 5, 8)
    >>> SeparateAttention(8, num_heads=2, batch_first=True)(tokens, tokens, tokens)[0].shape
    torch.Size([2, 5, 8])
    """

    # Read by nn.TransformerEncoderLayer, which takes its fused path only where there is a fused bias.
    in_proj_weight: None = None
    in_proj_bias: None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"num_heads must divide embed_dim, both positive; got {num_heads} and {embed_dim}"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        self.dropout = 0.0
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(self.kdim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(self.vdim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """The law of `nn.MultiheadAttention`, whose fused matrix has a fan-out three times as large."""
        fused = self.kdim == self.vdim == self.embed_dim
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=0.5**0.5 if fused else 1.0)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs shaped like `query`, and the attention weights or None.

        Args:
          query: `[n, queries, embed_dim]`, or `[queries, n, embed_dim]` without `batch_first`, or
            `[queries, embed_dim]` for a single record; keys and values likewise.
          key: `[n, keys, kdim]`.
          value: `[n, keys, vdim]`.
          key_padding_mask: `[n, keys]`; True, or -inf to be added, hides a key.
          need_weights: whether to return weights; without them the fused kernel is used.
          attn_mask: `[queries, keys]` or `[n × num_heads, queries, keys]`; as above.
          average_attn_weights: weights `[n, queries, keys]` over the mean of the heads, or
            `[n, num_heads, queries, keys]`.
          is_causal: says that `attn_mask` is causal, which must be given all the same.

        Raises:
          ConfigError: `is_causal` without a mask, or a mask that is neither boolean nor floating.
        """
        if is_causal and attn_mask is None:
            raise ConfigError("is_causal is a remark about attn_mask, which must be given, too; got None")
        single = query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = self._mask(query, key, key_padding_mask, attn_mask)
        heads = (
            self._heads(self.q_proj(query)),
            self._heads(self.k_proj(key)),
            self._heads(self.v_proj(value)),
        )
        weights = None
        if need_weights:
            mixed, weights = _weighted(*heads, mask)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if single:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        """`[n, length, embed_dim]` → `[n, num_heads, length, head_dim]`."""
        heads: Tensor = x.unflatten(2, (self.num_heads, self.head_dim))
        return heads.transpose(1, 2)

    def _mask(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """What is added to the scores `[n, num_heads, queries, keys]`."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, query.dtype)
            if mask.ndim == 3:
                mask = mask.reshape(len(query), self.num_heads, query.shape[1], key.shape[1])
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, query.dtype)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype != torch.bool:
        raise ConfigError(f"an attention mask must be boolean or floating; got {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _weighted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention written out: outputs and weights, per head."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return weights @ value, weights


def separate_attention(model: nn.Module) -> int:
    """Replace every `nn.MultiheadAttention` inside `model` by a `SeparateAttention`, in place.

    Weights are copied as slices, bit for bit; training mode and `requires_grad` are kept; outputs move
    by rounding alone. An optimizer made before does not know the new parameters. Nothing is converted if
    anything is refused.

    Args:
      model: any module that contains attention.

    Returns:
      The number of attention modules replaced.

    Raises:
      ConfigError: an attention module cannot be converted exactly; the message names it.

    >>> separate_attention(nn.TransformerEncoderLayer(8, nhead=2, dropout=0.0))
    1
    """
    return _replace(model, nn.MultiheadAttention, _refuse_fused, _separated)


def fuse_attention(model: nn.Module) -> int:
    """Replace every `SeparateAttention` inside `model` by an `nn.MultiheadAttention`, in place.

    The way back from `separate_attention`: after both, every weight is what it was, bit for bit, under
    its old name.

    Args:
      model: any module that contains attention.

    Returns:
      The number of attention modules replaced.

    Raises:
      ConfigError: an attention module cannot be converted exactly, for example because a projection
        carries an adapter; the message names it.

    >>> model = nn.Sequential(SeparateAttention(8, num_heads=2))
    >>> fuse_attention(model), type(model[0]).__name__
    (1, 'MultiheadAttention')
    """
    return _replace(model, SeparateAttention, _refuse_separate, _fused)


def _replace(
    model: nn.Module,
    kind: type[nn.Module],
    refuse: Callable[[str, nn.Module], None],
    convert: Callable[[nn.Module], nn.Module],
) -> int:
    """Convert each module of this kind once, so that one module used twice stays one."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    num_owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for name, module in found:
        if module is model:
            raise ConfigError(
                f"a {kind.__name__} cannot be replaced inside itself; pass the module that contains it"
            )
        if type(module) is not kind:
            raise ConfigError(
                f"module {name!r} is a {type(module).__name__}, a kind of {kind.__name__} that may compute "
                f"something else; only plain {kind.__name__} is converted"
            )
        if any(num_owners[id(p)] > 1 for p in module.parameters()):
            raise ConfigError(
                f"module {name!r} shares a parameter with another module, which a conversion would part; "
                "give each its own"
            )
        if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)):
            raise ConfigError(f"module {name!r} has hooks, which a conversion would lose; remove them first")
        refuse(name, module)
    converted = {id(module): convert(module) for _, module in found}
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if id(child) in converted:
                parent._modules[child_name] = converted[id(child)]
    return len(converted)


def _refuse_fused(name: str, attention: nn.Module) -> None:
    assert isinstance(attention, nn.MultiheadAttention)
    problem = ""
    if attention.bias_k is not None or attention.bias_v is not None:
        problem = "has key and value biases (add_bias_kv)"
    elif attention.add_zero_attn:
        problem = "attends to zeros (add_zero_attn)"
    elif attention.dropout > 0:
        problem = f"has dropout {attention.dropout}, random within a step; set it to 0 first"
    elif type(attention.out_proj) not in _OUTPUT_LAYERS:
        problem = f"has an output layer of type {type(attention.out_proj).__name__}; remove adapters first"
    if problem:
        raise ConfigError(f"module {name!r} cannot be converted exactly: it {problem}")


def _refuse_separate(name: str, attention: nn.Module) -> None:
    assert isinstance(attention, SeparateAttention)
    problem = ""
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    for part, layer in attention.named_children():
        if type(layer) is not nn.Linear:
            problem = f"{part} is a {type(layer).__name__}, not a plain nn.Linear; merge adapters first"
            break
    else:
        one_weight = attention.kdim == attention.vdim == attention.embed_dim
        if len({layer.bias is None for layer in (*inputs, attention.out_proj)}) > 1:
            problem = "some projections have a bias and some have none; give each one"
        elif (one_weight and _flags_differ([layer.weight for layer in inputs])) or _flags_differ(
            [layer.bias for layer in inputs if layer.bias is not None]
        ):
            problem = (
                "q_proj, k_proj and v_proj become one parameter, but only some are trainable; "
                "set requires_grad of all three alike"
            )
    if problem:
        raise ConfigError(f"module {name!r} cannot be converted exactly: {problem}")


def _flags_differ(parameters: list[Tensor]) -> bool:
    return len({p.requires_grad for p in parameters}) > 1


def _separated(fused: nn.Module) -> SeparateAttention:
    assert isinstance(fused, nn.MultiheadAttention)
    separate = SeparateAttention(
        fused.embed_dim,
        fused.num_heads,
        bias=fused.in_proj_bias is not None,
        kdim=fused.kdim,
        vdim=fused.vdim,
        batch_first=fused.batch_first,
        device="meta",  # the weights are put in below; none are drawn
    ).train(fused.training)
    inputs = (separate.q_proj, separate.k_proj, separate.v_proj)
    if fused.in_proj_weight is not None:
        weights, sources = fused.in_proj_weight.chunk(3), (fused.in_proj_weight,) * 3
    else:
        weights = sources = (fused.q_proj_weight, fused.k_proj_weight, fused.v_proj_weight)
    for layer, weight, source in zip(inputs, weights, sources, strict=True):
        layer.weight = _parameter(weight, source.requires_grad)
    if fused.in_proj_bias is not None:
        for layer, bias in zip(inputs, fused.in_proj_bias.chunk(3), strict=True):
            layer.bias = _parameter(bias, fused.in_proj_bias.requires_grad)
    _move_output_layer(fused.out_proj, separate.out_proj)
    return separate


def _fused(separate: nn.Module) -> nn.MultiheadAttention:
    assert isinstance(separate, SeparateAttention)
    fused = nn.MultiheadAttention(
        separate.embed_dim,
        separate.num_heads,
        bias=separate.q_proj.bias is not None,
        kdim=separate.kdim,
        vdim=separate.vdim,
        batch_first=separate.batch_first,
        device="meta",
    ).train(separate.training)
    inputs = (separate.q_proj, separate.k_proj, separate.v_proj)
    if fused.in_proj_weight is not None:
        joined = torch.cat([layer.weight.detach() for layer in inputs])
        fused.in_proj_weight = _parameter(joined, separate.q_proj.weight.requires_grad)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        for name, layer in zip(names, inputs, strict=True):
            setattr(fused, name, _parameter(layer.weight, layer.weight.requires_grad))
    if fused.in_proj_bias is not None:
        joined = torch.cat([layer.bias.detach() for layer in inputs])
        fused.in_proj_bias = _parameter(joined, separate.q_proj.bias.requires_grad)
    _move_output_layer(separate.out_proj, fused.out_proj)
    return fused


def _move_output_layer(source: nn.Linear, target: nn.Linear) -> None:
    target.weight = _parameter(source.weight, source.weight.requires_grad)
    if source.bias is not None:
        target.bias = _parameter(source.bias, source.bias.requires_grad)


def _parameter(value: Tensor, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(), requires_grad=requires_grad)
