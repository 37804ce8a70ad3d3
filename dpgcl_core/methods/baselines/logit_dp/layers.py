"""One parameter's share of every row's Jacobian, for the pair norms of Logit-DP.

For a layer with input a and output gradient b, row i's gradient along cotangent k is Σ_m b_ikm ⊗ a_im, with m
over positions (pixels, tokens) and, for a convolution in blocks, one such sum per block. Two things are asked
of it: the Gram matrices ⟨∇_ik, ∇_il⟩ of one row's cotangents, and the inner products of two rows' gradients
along given combinations of cotangents. Both are computed in the cheaper of two ways, as in
`dpgcl_core.clipping.layers`:

- *explicit*: form the gradients, in float32, as each cotangent's backward pass brings b, then multiply them;
- *kernel*: keep b; Σ_mm' (a_m·a_m') (b_km·b_lm') never forms a gradient, all in float64.

A float32 gradient is rounded by some 3e-8 of its terms, which `norms.PAIR_NORM_FLOOR` allows for. The
products that follow are float64 in both ways: their sums may cancel, and where a squared length of 1e-6 of
its terms is left, a float32 product would be wrong by a tenth of it, and the norm would be too small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.clipping.layers import rule_of

MAX_NUMBERS = 2**17
"""Numbers of one piece of a product: in float64 a megabyte, which fits into a core's own cache."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter's place in a layer.

    Attributes:
      parameter: whose gradient it is.
      a: `[rows, blocks, in, positions]`, or indices `[rows, positions]` of an embedding's table, negative
        where there is no gradient.
      is_bias: whether `a` is all ones, for a parameter that is added to every position.
    """

    parameter: Tensor
    a: Tensor
    is_bias: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of the weight that see channels of their own."""
        return 1 if self.is_index else self.a.shape[1]

    @property
    def is_index(self) -> bool:
        """Whether `a` stands for one-hot inputs."""
        return not self.a.is_floating_point()

    def squares(self) -> Tensor:
        """Return ‖a_i‖², float64 `[rows]`."""
        if self.is_index:
            return self.a.new_full((len(self.a),), self.a.shape[1], dtype=torch.float64)
        norms: Tensor = torch.linalg.vector_norm(self.a, dim=(1, 2, 3))
        return norms.double().square()

    def is_explicit(self, b: Tensor, num: int, partners: int) -> bool:
        """Return whether forming the gradients is cheaper, for b `[rows, positions, out]`.

        Args:
          num: number of cotangents.
          partners: how many rows of the other tower each row meets in cross terms.
        """
        if self.is_index:
            return False
        out, length = b.shape[2] // self.blocks, b.shape[1]
        width = self.a.shape[2]
        # Multiplications per row and block: forming the gradients and their Gram matrix, or the kernel and
        # its products. Those in float64 count twice.
        formed = num * out * width * (length + 2 * num)
        kept = 2 * (length**2 * (width + num * out) + num**2 * out * length)
        if partners:  # cross terms, in float64 both ways
            formed += 2 * partners * 2 * num * out * width
            kept += 2 * partners * (2 * num * out * length + length**2 * (width + out))
        return bool(formed <= kept)

    def gradient(self, b: Tensor) -> Tensor:
        """Return the gradients `[rows, numbers]` along one cotangent, for b `[rows, positions, out]`."""
        if self.is_bias:
            return b.sum(1)
        if self.blocks == b.shape[2] and self.a.shape[2] == 1:  # a scale per channel
            return (b * self.a[:, :, 0].transpose(1, 2)).sum(1)
        # Channels stand along the fast axis of the product, not a first layer's few taps: much faster.
        by_block = _by_block(b[:, None], self.blocks)[:, 0].transpose(1, 2)
        product = torch.bmm(self.a.flatten(0, 1), by_block.flatten(0, 1))
        return product.transpose(1, 2).reshape(len(b), -1)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One parameter's gradients of all rows along `k` cotangents.

    Attributes:
      part: the parameter and its layer's input.
      formed: whether `values` are gradients `[rows, k, numbers]`, or else the output gradients
        `[rows, k, positions, out]`, the layout in which channels-last layers and linear ones bring them.
      values: float32.
      basis: float64 `[rows, dim, k]`, the cotangents as combinations of the embedding's axes; None: the axes.
    """

    part: Part
    formed: bool
    values: Tensor
    basis: Tensor | None = None

    def rows(self, chosen: slice | Tensor) -> Share:
        """Return the same of some rows."""
        return Share(
            part=dataclasses.replace(self.part, a=self.part.a[chosen]),
            formed=self.formed,
            values=self.values[chosen],
            basis=None if self.basis is None else self.basis[chosen],
        )

    def gram(self) -> Tensor:
        """Return each row's Gram matrix along its own cotangents, float64 `[rows, k, k]`."""
        at_once = max(1, MAX_NUMBERS // max(1, self.values[0].numel()))
        starts = range(0, len(self.values), at_once)
        return torch.cat([self.rows(slice(start, start + at_once))._gram() for start in starts])

    def _gram(self) -> Tensor:
        left = right = self.values.double()
        if not self.formed:
            right = _through(left, kernel(self.part.a))
        return torch.bmm(left.flatten(2), right.flatten(2).transpose(1, 2))

    def combined(self, coefficients: Tensor) -> Tensor:
        """Return Σ_i Σ_k c_gik ∇_ik of the parameter for several g, `[g, numbers]`.

        Args:
          coefficients: c, `[g, rows, dim]`; the products are of its precision.
        """
        c = coefficients.transpose(0, 1)  # [rows, g, dim]
        c = c if self.basis is None else c @ self.basis.to(c.dtype)
        total = c.new_zeros(c.shape[1], self.part.parameter.numel())
        at_once = max(1, 4 * MAX_NUMBERS // max(1, c.shape[1] * self.values[0].numel()))
        for start in range(0, len(c), at_once):
            some = slice(start, start + at_once)
            total += self.rows(some)._combined(c[some])
        return total

    def _combined(self, c: Tensor) -> Tensor:
        """Compute `combined` for a few rows, for c `[rows, g, k]`."""
        values, num = self.values.to(c.dtype), c.shape[1]
        if self.formed:
            return c.transpose(0, 1).flatten(1) @ values.flatten(0, 1)
        a = self.part.a.to(c.dtype) if self.part.a.is_floating_point() else self.part.a
        b = (c @ values.flatten(2)).reshape(len(c), num, *values.shape[2:])
        if self.part.is_index:
            table = c.new_zeros(self.part.parameter.shape[0], num, b.shape[3])
            used = a >= 0
            table.index_add_(0, a[used], b.transpose(1, 2)[used])
            return table.transpose(0, 1).flatten(1)
        return torch.einsum("rgmbo,rbim->gboi", _by_block(b, self.part.blocks), a).flatten(1)

    def as_formed(self) -> Share:
        """Return the same share with gradients formed in float64, for a product with one that has them.

        In float64, because these are the gradients whose own lengths the kernel has measured in it: rounded
        ones would be others, and where the pair's two terms cancel the norm would be too small.
        """
        if self.formed:
            return self
        a, b = self.part.a, self.values.double()
        if self.part.is_index:
            table = F.one_hot(a.clamp_min(0), self.part.parameter.shape[0]).double() * (a >= 0)[..., None]
            a = table.transpose(1, 2)[:, None]
            values = torch.einsum("rkmo,rbim->rkbio", b, a)
        else:
            values = torch.einsum("rkmbo,rbim->rkboi", _by_block(b, self.part.blocks), a.double())
        return dataclasses.replace(self, formed=True, values=values.flatten(2))


def cross(queries: Share, keys: Share, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return the inner products ⟨Σ_k c_ijk ∇_ik, Σ_k c'_ijk ∇'_jk⟩ of one parameter, float64 `[I, J]`.

    Args:
      queries, keys: the parameter's shares in rows I and rows J.
      of_queries, of_keys: c and c', float64 `[I, J, dim]`.
    """
    if queries.formed != keys.formed:
        queries, keys = queries.as_formed(), keys.as_formed()
    c, other_c = of_queries, of_keys.transpose(0, 1)
    c = c if queries.basis is None else c @ queries.basis
    other_c = other_c if keys.basis is None else other_c @ keys.basis
    values, other_values = queries.values.double().flatten(2), keys.values.double().flatten(2)
    total = of_queries.new_zeros(of_queries.shape[:2])
    at_once = max(1, 16 * MAX_NUMBERS // max(1, len(other_values) * other_values.shape[2]))
    for start in range(0, len(total), at_once):
        some = slice(start, start + at_once)
        # Both sides of the inner product, combined for every pair (i, j): `[some rows, J, numbers]`.
        u, v = c[some] @ values[some], (other_c[:, some] @ other_values).transpose(0, 1)
        if not queries.formed:  # u and v are output gradients: the kernel of the inputs goes in between
            u = _by_block(u.view(*u.shape[:2], *queries.values.shape[2:]), queries.part.blocks)
            between = kernels_between(queries.part.a[some], keys.part.a).transpose(3, 4)
            u = (between @ u.transpose(2, 3)).transpose(2, 3).flatten(2)
        total[some] = (u * v).sum(2)
    return total


def _by_block(b: Tensor, blocks: int) -> Tensor:
    """Reshape `[rows, k, positions, out]` to `[rows, k, positions, blocks, out per block]`."""
    return b.reshape(*b.shape[:3], blocks, b.shape[3] // blocks)


def kernel(a: Tensor) -> Tensor:
    """Return the inner products a_m·a_m' within each row, float64 `[rows, blocks, positions, positions]`."""
    if not a.is_floating_point():
        return _same(a[:, None, :, None], a[:, None, None, :])
    a = a.double()
    return a.transpose(2, 3) @ a


def kernels_between(a: Tensor, other: Tensor) -> Tensor:
    """Return the products a_m·a'_m' of rows I and J, float64 `[I, J, blocks, positions, positions']`."""
    if not a.is_floating_point():
        return _same(a[:, None, None, :, None], other[None, :, None, None, :])
    rows, blocks, width, length = a.shape
    left = a.double().permute(1, 0, 3, 2).reshape(blocks, rows * length, width)
    right = other.double().permute(1, 2, 0, 3).reshape(blocks, width, -1)
    product = torch.bmm(left, right).view(blocks, rows, length, len(other), -1)
    return product.permute(1, 3, 0, 2, 4)


def _same(a: Tensor, other: Tensor) -> Tensor:
    return ((a == other) & (a >= 0)).double()


def _through(b: Tensor, kernels: Tensor) -> Tensor:
    """Return Σ_m' K_mm' b_m'.

    Args:
      b: `[rows, k, positions, out]`.
      kernels: K, `[rows, blocks, positions, positions]`.
    """
    # All cotangents beside each other: one product per row and block, however few the positions are.
    by_position = _by_block(b, kernels.shape[1]).permute(0, 3, 2, 1, 4)
    product = torch.bmm(kernels.flatten(0, 1), by_position.flatten(3).flatten(0, 1))
    return product.view(by_position.shape).permute(0, 3, 2, 1, 4).reshape(b.shape)


def parts_of(module: nn.Module, x: Tensor, wanted: Container[Tensor]) -> list[Part]:
    """Return a layer's `wanted` parameters with their factor a, given the layer's input."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    parts = []
    if weight is not None and weight in wanted:
        parts.append(Part(parameter=weight, a=_INPUTS[_kind(module)](module, x)))
    if bias is not None and bias in wanted:
        ones = torch.ones(len(x), 1, 1, _length(module, x), device=x.device)
        parts.append(Part(parameter=bias, a=ones, is_bias=True))
    return parts


def has_parts(module: nn.Module) -> bool:
    """Return whether `parts_of` supports this layer."""
    rule = rule_of(module)
    return rule is not None and not rule.refuses(module) and _kind(module) is not None


def of_output(module: nn.Module, grad: Tensor) -> Tensor:
    """Reshape the gradient of a layer's output `[rows, ...]` to `[rows, positions, out]`."""
    if isinstance(module, nn.Conv2d | nn.GroupNorm):
        return grad.reshape(len(grad), grad.shape[1], -1).transpose(1, 2)
    width = module.normalized_shape if isinstance(module, nn.LayerNorm) else grad.shape[-1:]
    return grad.reshape(len(grad), -1, torch.Size(width).numel())


def _length(module: nn.Module, x: Tensor) -> int:
    """Return the number of positions at which a bias is added."""
    if isinstance(module, nn.Linear):
        return x.shape[1:-1].numel()
    if isinstance(module, nn.LayerNorm):
        return x[0].numel() // torch.Size(module.normalized_shape).numel()
    if isinstance(module, nn.GroupNorm):
        return x.shape[2:].numel()
    assert isinstance(module, nn.Conv2d)
    return _patches(module, x[:1]).shape[2]


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    return x.reshape(len(x), 1, -1, x.shape[-1]).transpose(2, 3)


def _convolution(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.Conv2d)
    patches = _patches(module, x)
    a = patches.reshape(len(x), module.groups, -1, patches.shape[2])
    # Keep a position's numbers adjacent in memory, as in a channels-last gradient: products are faster.
    return a.transpose(2, 3).contiguous().transpose(2, 3)


def _patches(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Return every position's patch, `[rows, channels × taps, positions]`."""
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        zeros = module.padding_mode == "zeros"
        x = F.pad(x, padding) if zeros else F.pad(x, padding, mode=module.padding_mode)
    dilation, stride = module.dilation, module.stride
    return F.unfold(x, module.kernel_size, dilation=dilation, stride=stride)


def _group_norm(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.GroupNorm)
    normal = F.group_norm(x, module.num_groups, eps=module.eps)
    return normal.reshape(len(x), x.shape[1], 1, -1)


def _layer_norm(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.LayerNorm)
    normal = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    return of_output(module, normal).transpose(1, 2)[:, :, None]


def _embedding(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, nn.Embedding)
    index = x.reshape(len(x), -1)
    return index if module.padding_idx is None else torch.where(index == module.padding_idx, -1, index)


_INPUTS: dict[type[nn.Module] | None, Callable[[nn.Module, Tensor], Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}


def _kind(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in _INPUTS if kind is not None and isinstance(module, kind)), None)
