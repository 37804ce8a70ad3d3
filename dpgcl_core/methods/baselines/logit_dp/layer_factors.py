"""One parameter's gradients of many rows along the axes of their embeddings, as the two factors of a layer.

For a layer with input a and output gradient b, row i's gradient along axis k is Σ_m b_ikm ⊗ a_im, with m over
positions (pixels, tokens). It is either formed when the backward pass gives b, or both factors are kept. The
choice makes the Gram matrices ⟨∇_ik, ∇_il⟩ cheaper and depends only on shapes. The Gram matrix of factors is
Σ_mm' (a_m·a_m')(b_km·b_lm'), which never forms a gradient. A formed gradient is stored as the b of a layer
with one position, whose input is 1.

Norms and sums are products of the same float32 tensors, in float64, because such products may cancel: if a
squared length is only 1e-6 of its terms, a float32 product would be wrong by a tenth of it, and the norm
would be too small. The rounding of a formed gradient is the same in norms and sums.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgcl_core.clipping.layers import rule_of

MAX_NUMBERS = 2**17
"""The numbers in one piece of a product: a megabyte in float64, which fits into a core's cache."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One parameter's gradients of all rows along `k` axes: sums over positions of b ⊗ a.

    Attributes:
      parameter: the parameter whose gradients they are.
      a: the layer's input, `[rows, in, positions]`; 1 if `b` holds whole gradients.
      b: output gradients `[rows, k, positions, out]`, the layout of channels-last and linear layers.
    """

    parameter: Tensor
    a: Tensor
    b: Tensor

    def at(self, rows: slice | Tensor) -> Share:
        """Return the share of the selected rows."""
        return Share(parameter=self.parameter, a=self.a[rows], b=self.b[rows])

    def gram(self) -> Tensor:
        """Return each row's Gram matrix along its axes, float64 `[rows, k, k]`."""
        pieces = _pieces(len(self.b), max(self.b[0].numel(), self.a.shape[2] ** 2))
        return torch.cat([self.at(piece)._gram() for piece in pieces])

    def _gram(self) -> Tensor:
        a, b = self.a.double(), self.b.double()
        # All axes are concatenated: one product per row, however few the positions are.
        by_position = b.transpose(1, 2)
        through = torch.bmm(a.transpose(1, 2) @ a, by_position.flatten(2)).view(by_position.shape)
        return torch.bmm(b.flatten(2), through.transpose(1, 2).flatten(2).transpose(1, 2))

    def combined(self, coefficients: Tensor) -> Tensor:
        """Return Σ_i Σ_k c_ik ∇_ik over rows i and axes k, float64 `[numbers]`; c is float64 `[rows, k]`."""
        total = coefficients.new_zeros(self.parameter.numel())
        for piece in _pieces(len(self.b), self.b[0].numel()):
            a, b = self.a[piece].double(), self.b[piece].double()
            along = torch.bmm(coefficients[piece, None], b.flatten(2)).view(len(b), *b.shape[2:])
            total += torch.einsum("rmo,rim->oi", along, a).flatten()
        return total


def _pieces(rows: int, numbers: int) -> Iterator[slice]:
    """Yield the rows in pieces, for products that need `numbers` numbers per row."""
    at_once = max(1, MAX_NUMBERS // max(1, numbers))
    for start in range(0, rows, at_once):
        yield slice(start, start + at_once)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One parameter's factor a in a layer.

    Attributes:
      parameter: the parameter whose gradients are computed.
      a: `[rows, in, positions]`; 1 for a bias, which is added at every position.
      is_scale: whether each channel has its own factor; `a` is then `[rows, channels, positions]`.
    """

    parameter: Tensor
    a: Tensor
    is_scale: bool = False

    def is_formed(self, b: Tensor, num_axes: int) -> bool:
        """Return whether to form gradients or to keep a and b; b is `[rows, positions, out]` per axis."""
        width, (length, out) = self.a.shape[1], b.shape[1:]
        # Multiplications per row and axis up to the Gram matrix; multiplications in float64 count twice.
        formed = out * width * (length + 2 * num_axes)
        kept = 2 * (length**2 * (width / num_axes + out) + num_axes * out * length)
        return self.is_scale or formed <= kept

    def gradient(self, b: Tensor) -> Tensor:
        """Return the gradients `[rows, numbers]` along one axis."""
        if self.is_scale:
            return (b * self.a.transpose(1, 2)).sum(1)
        # The fast axis of the product is that of channels, not of a first layer's few taps: much faster.
        return torch.bmm(self.a, b).transpose(1, 2).flatten(1)


class Collector:
    """Collects one layer's gradients of all rows, one axis after another.

    Args:
      factors: the factors of the layer's parameters.
      num_axes: the number of axes that will be passed to `take`.
    """

    def __init__(self, factors: Sequence[Factor], num_axes: int) -> None:
        self._factors, self._num_axes = factors, num_axes
        self._output_gradients: Tensor | None = None
        self._formed: dict[Tensor, Tensor] = {}
        of_inputs = [torch.linalg.vector_norm(factor.a, dim=(1, 2)) for factor in factors]
        self._squares_of_inputs = torch.stack(of_inputs).double().square().sum(0)
        self._squares = torch.zeros_like(self._squares_of_inputs)

    def take(self, b: Tensor, axis: int) -> None:
        """Form or keep the output's gradient `b` along one axis, `[rows, positions, out]`."""
        self._squares += torch.linalg.vector_norm(b, dim=(1, 2)).double().square()
        for factor in self._factors:
            if factor.is_formed(b, self._num_axes):
                values = factor.gradient(b)
                if axis == 0:
                    shape = len(b), self._num_axes, 1, values.shape[1]
                    self._formed[factor.parameter] = values.new_empty(shape)
                self._formed[factor.parameter][:, axis, 0] = values
            else:
                if self._output_gradients is None:
                    self._output_gradients = b.new_empty(len(b), self._num_axes, *b.shape[1:])
                self._output_gradients[:, axis] = b

    def squared_bound(self) -> Tensor:
        """Return Σ ‖a‖²‖b‖² over the layer's parameters, float64 `[rows]`."""
        return self._squares_of_inputs * self._squares

    def shares(self) -> Iterator[Share]:
        """Yield the parameters' shares after the last axis."""
        for factor in self._factors:
            formed = self._formed.get(factor.parameter)
            if formed is not None:
                yield Share(parameter=factor.parameter, a=formed.new_ones(len(formed), 1, 1), b=formed)
            elif self._output_gradients is not None:
                yield Share(parameter=factor.parameter, a=factor.a, b=self._output_gradients)


def has_factors(module: nn.Module) -> bool:
    """Return whether `factors_of` supports this layer."""
    if rule_of(module) is None or not isinstance(module, nn.Linear | nn.Conv2d | nn.GroupNorm):
        return False
    return not (isinstance(module, nn.Conv2d) and module.groups > 1)


def factors_of(module: nn.Module, x: Tensor, length: int, targets: Container[Tensor]) -> list[Factor]:
    """Return the factors of a layer's parameters in `targets`, given its input and number of positions."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    factors = []
    if weight is not None and weight in targets:
        is_scale = isinstance(module, nn.GroupNorm)
        factors.append(Factor(parameter=weight, a=_input(module, x), is_scale=is_scale))
    if bias is not None and bias in targets:
        factors.append(Factor(parameter=bias, a=torch.ones(1, 1, 1).to(x).expand(len(x), 1, length)))
    return factors


def of_output(module: nn.Module, grad: Tensor) -> Tensor:
    """Reshape the gradient of a layer's output `[rows, ...]` to `[rows, positions, out]`."""
    if isinstance(module, nn.Linear):
        return grad.reshape(len(grad), -1, grad.shape[-1])
    return grad.flatten(2).transpose(1, 2)


def _input(module: nn.Module, x: Tensor) -> Tensor:
    """Return the factor a of a layer's weight."""
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps).flatten(2)
    assert isinstance(module, nn.Conv2d)
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, padding, mode=mode)
    patches = F.unfold(x, module.kernel_size, dilation=module.dilation, stride=module.stride)
    # Keep a position's numbers adjacent in memory, as in a channels-last gradient: products are faster.
    return patches.transpose(1, 2).contiguous().transpose(1, 2)
