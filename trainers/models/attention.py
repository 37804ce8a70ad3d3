"""Multi-head attention with one layer per projection, made from `nn.MultiheadAttention` and its weights.

`nn.MultiheadAttention` keeps queries, keys and values in one fused parameter and uses its output layer's
weight without calling that layer's `forward`. So adapters cannot be applied to the query only, and the
per-layer hooks that compute the clipped group gradient observe nothing. `SeparateAttention` computes the same
result from four plain `nn.Linear`; `separate_attention` converts the models of open_clip without changing a
weight, and `fused_state_dict` returns the weights under their old names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dpgcl_core.errors import ConfigError

_OUTPUT_LAYERS = (nn.Linear, NonDynamicallyQuantizableLinear)


class SeparateAttention(nn.Module):
    """Attention (Vaswani et al. 2017) with separate projections; takes the place of `nn.MultiheadAttention`.

    Each record's output depends only on that record's query, key and value, and every projection sees
    records on its leading axis. There is no dropout.

    Args:
      embed_dim: width of queries and outputs.
      num_heads: number of heads; divides `embed_dim`.
      bias: whether the four projections have biases.
      kdim: width of the keys; `embed_dim` if None.
      vdim: width of the values; `embed_dim` if None.
      device: the device on which the weights are made.

    Raises:
      ConfigError: `num_heads` does not divide `embed_dim`.

    >>> tokens = torch.zeros(2, 5, 8)
    >>> SeparateAttention(8, num_heads=2)(tokens, tokens, tokens)[0].shape
    torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"num_heads must divide embed_dim, and both must be positive; got {num_heads} and {embed_dim}"
            )
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device)
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias, device=device)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias=bias, device=device)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device)
        # Drawn as in `nn.MultiheadAttention`, whose fused matrix has a fan-out three times as large.
        for projection in self.inputs:
            nn.init.xavier_uniform_(projection.weight, gain=0.5**0.5)
        for projection in (*self.inputs, self.out_proj) if bias else ():
            nn.init.zeros_(projection.bias)

    @property
    def inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """The projections of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return outputs shaped like `query`, and None in place of attention weights.

        Args:
          query: `[n, queries, embed_dim]`.
          key: `[n, keys, kdim]`.
          value: `[n, keys, vdim]`.
          need_weights: whether to return weights; must be False.
          attn_mask: `[queries, keys]` or `[n × num_heads, queries, keys]`. A bool mask hides keys where it is
            True. A float mask is added to the scores, so that -inf hides a key.

        Raises:
          ConfigError: weights are requested.
        """
        if need_weights:
            raise ConfigError("SeparateAttention returns no weights: call it with need_weights=False")
        mask = None if attn_mask is None else _to_additive(attn_mask, query.dtype)
        if mask is not None and mask.ndim == 3:
            mask = mask.reshape(len(query), self.num_heads, query.shape[1], key.shape[1])
        sides = zip(self.inputs, (query, key, value), strict=True)
        queries, keys, values = (self._heads(projection(side)) for projection, side in sides)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None

    def _heads(self, x: Tensor) -> Tensor:
        """`[n, length, embed_dim]` → `[n, num_heads, length, head_dim]`."""
        heads: Tensor = x.unflatten(2, (self.num_heads, -1))
        return heads.transpose(1, 2)


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def separate_attention(model: nn.Module) -> int:
    """Replace every `nn.MultiheadAttention` inside `model` by a `SeparateAttention`, in place.

    Weights are copied as slices, bit for bit. Training mode and `requires_grad` are kept, and outputs change
    only by rounding. An optimizer made before the conversion does not know the new parameters. Nothing is
    converted if any module is rejected.

    Args:
      model: a model of open_clip, or another module that holds each attention once.

    Returns:
      The number of attention modules replaced.

    Raises:
      ConfigError: an attention module cannot be converted exactly; the message names it.

    >>> separate_attention(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)))
    1
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    for name, fused in layers:
        is_plain = type(fused) is nn.MultiheadAttention and type(fused.out_proj) in _OUTPUT_LAYERS
        has_extras = fused.bias_k is not None or fused.add_zero_attn or fused.dropout > 0
        if not is_plain or has_extras or not fused.batch_first or not name:
            raise ConfigError(
                f"module {name!r} cannot be converted exactly: it must be a plain nn.MultiheadAttention "
                "inside a model, with batch_first, without dropout, add_bias_kv, add_zero_attn or adapters"
            )
    for name, fused in layers:
        model.set_submodule(name, _convert(fused))
    return len(layers)


def _convert(fused: nn.MultiheadAttention) -> SeparateAttention:
    separate = SeparateAttention(
        fused.embed_dim,
        fused.num_heads,
        bias=fused.in_proj_bias is not None,
        kdim=fused.kdim,
        vdim=fused.vdim,
        device="meta",  # the weights are assigned below; none are drawn
    ).train(fused.training)
    if fused.in_proj_weight is not None:
        weights, sources = fused.in_proj_weight.chunk(3), (fused.in_proj_weight,) * 3
    else:
        weights = sources = (fused.q_proj_weight, fused.k_proj_weight, fused.v_proj_weight)
    for layer, weight, source in zip(separate.inputs, weights, sources, strict=True):
        layer.weight = _clone_parameter(weight, source)
    if fused.in_proj_bias is not None:
        for layer, bias in zip(separate.inputs, fused.in_proj_bias.chunk(3), strict=True):
            layer.bias = _clone_parameter(bias, fused.in_proj_bias)
        separate.out_proj.bias = _clone_parameter(fused.out_proj.bias, fused.out_proj.bias)
    separate.out_proj.weight = _clone_parameter(fused.out_proj.weight, fused.out_proj.weight)
    return separate


def _clone_parameter(value: Tensor, source: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(), requires_grad=source.requires_grad)


def fused_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dictionary of `model` as it was before `separate_attention`, on the CPU.

    Every weight has its old name and is the same bit for bit; adapters must be merged before.

    >>> model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    >>> names = set(model.state_dict())
    >>> separate_attention(model), set(fused_state_dict(model)) == names
    (1, True)
    """
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    for prefix, module in model.named_modules():
        if isinstance(module, SeparateAttention):
            weights = [state.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
            if weights[0].shape == weights[1].shape == weights[2].shape:
                state[f"{prefix}.in_proj_weight"] = torch.cat(weights)
            else:
                state |= {f"{prefix}.{part}_proj_weight": w for part, w in zip("qkv", weights, strict=True)}
            if module.out_proj.bias is not None:
                biases = [state.pop(f"{prefix}.{part}_proj.bias") for part in "qkv"]
                state[f"{prefix}.in_proj_bias"] = torch.cat(biases)
    return state
