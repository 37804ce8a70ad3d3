"""Layer rules: how each kind of layer turns its input and output gradient into per-group gradients.

A layer gets rows (a record's views) in the order of their groups, so (records × views × positions) of one
group are one axis of length M. Its weight gradient per group is a product over that axis, X_Gᵀ Y_G, and
there are two ways to compute its norm:

- *per-group gradient*: compute and keep X_Gᵀ Y_G. It takes as many flops as the ordinary weight gradient. The
  extra cost is writing and reading one number per parameter and group.
- *ghost norm* (Goodfellow 2015; Li et al. 2022, section 4), from Gram matrices: the squared norm is
  Σ (X_G X_Gᵀ) ⊙ (Y_G Y_Gᵀ), from two M × M matrices instead of the gradient. The clipped sum is then one
  ordinary weight gradient of the rescaled Y ("book-keeping", Bu et al. 2023).

The Gram matrices are computed in float64: their sum may cancel, and a norm that is too small by more than the
clipper's margin would make a contribution longer than C. The clipped sum of such a layer is also computed in
float64, because its rounding grows with the terms, not with their sum. A group's norm counts as at least a
small share of its *magnitude bound* Σ_m ‖x_m‖·‖y_m‖ (`one_pass.NORM_FLOOR`), which bounds the terms. See
docs/theory/clipping.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dpgcl_core.clipping.gpu import normalisation_kernels
from dpgcl_core.clipping.products import has_avx512, products_over_rows

PIECE_NUMBERS = 2**27
CACHED_NUMBERS = 2**19
"""Intermediate values that are read again at once, such as patches, are made in pieces of this many numbers:
large pieces on a GPU, so that it does not wait for the next call, and smaller ones for each thread of a CPU,
which stay in its cache. All pieces use the same memory, because new pages cost more than writing."""

EXACT_NUMBERS = 2**22
"""The count of an operand's numbers that are multiplied in float64 at a time."""

POSITIONS_AT_ONCE = 2**13
"""On a GPU, sums over more positions than this are computed in runs of whole rows: a single long sum would
occupy few of its processors, and round more."""

SHORT_RUN = 16
"""Patches with shorter runs of memory (kernel width × channels) are copied tap by tap, along the lines."""

MANY_PATCHES, MANY_NUMBERS = 50, 2**21
"""On a CPU, groups with this many patch numbers, and this many per weight, use the convolution's own weight
gradient: copying the patches would cost more than one call per group."""

MANY_POSITIONS_OF_AVX512, POSITIONS_OF_A_CALL = 256, 3_000_000
"""With AVX-512, so do groups with at least as many output positions as the first number plus the second
divided by the number of weights: the convolution is then twice as fast as products of matrices (measured on
an AMD EPYC)."""

FEW_CHANNELS, MANY_POSITIONS = 8, 1024
"""With fewer channels per channel group and fewer positions than these numbers, torch's normalisation of
channels-last images on a CPU takes about twice as long as sums and products in pieces (measured)."""

SHORT_LINE = 16
"""Channels-last images with fewer channels than this are multiplied line by line, by factors repeated along
the line: torch would otherwise start a loop at every position (8 channels then take three times as long)."""

PerGroup = Iterator[tuple[Tensor, Tensor]]
GhostNorms = tuple[Tensor, Tensor]
"""Squared norms, and magnitude bounds Σ_m ‖x_m‖·‖y_m‖ on the terms whose sum is the gradient."""


class LayerRule:
    """Computes the gradients of one kind of layer; the base class is for layers without a weight matrix.

    In every method `x` is the layer's input and `grad` the gradient of its output. Both have the rows of all
    groups as their leading axis, group by group. Returned gradients are `[groups, *shape]` with the shape of
    the parameter. They may be strided, but must be dense per group.
    """

    has_matrix = False

    def unsupported_reason(self, module: nn.Module) -> str:
        """Return the reason why this particular layer is not supported; empty if it is supported."""
        return ""

    def matrix(self, module: nn.Module) -> Tensor | None:
        """Return the weight that has a ghost norm, if any."""
        return module._parameters.get("weight") if self.has_matrix else None

    def runs(self, module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the layer's output, and statistics for `vectors`; None if it runs its own `forward`."""
        return None

    def vectors(
        self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int, statistics: tuple[Tensor, ...] = ()
    ) -> PerGroup:
        """Yield every vector parameter (bias or scale) with its gradients `[groups, *shape]`."""
        yield from ()

    def per_group(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        """Return the gradients of `matrix(module)`, float32 `[groups, *shape]`."""
        raise NotImplementedError

    def ghost_norm_flops(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> float:
        """Return the flops of one group's ghost norm."""
        raise NotImplementedError

    def ghost_norms(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> GhostNorms:
        """Return squared norms and magnitude bounds of `per_group`'s gradients, float64 `[groups]` each."""
        raise NotImplementedError

    def total(self, module: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of `matrix(module)` summed over all rows of `x`, float64, in its shape."""
        raise NotImplementedError


def _rows(x: Tensor, num_groups: int, width: int) -> Tensor:
    return x.reshape(num_groups, -1, width)


def _norms(of_inputs: Tensor, of_outputs: Tensor) -> GhostNorms:
    """Return ‖Xᵀ Y‖² and Σ_m ‖x_m‖·‖y_m‖, given the Gram matrices `[groups, M, M]` of X and Y.

    If a gradient's terms cancel, the squared norm can round to less than zero, so it is clamped at zero.
    """
    diagonals = (matrix.diagonal(dim1=1, dim2=2) for matrix in (of_inputs, of_outputs))
    lengths = [diagonal.clamp_min(0).sqrt() for diagonal in diagonals]
    return (of_inputs * of_outputs).sum((1, 2)).clamp_min(0), (lengths[0] * lengths[1]).sum(1)


def _gram(x: Tensor) -> Tensor:
    """Return the Gram matrices of `[groups, M, ·]`, float64 `[groups, M, M]`."""
    grams = x.new_empty(len(x), x.shape[1], x.shape[1], dtype=torch.float64)
    for piece, buffer in _pieces_with_buffer(x, torch.float64):
        exact = buffer.copy_(x[piece])
        torch.bmm(exact, exact.transpose(1, 2), out=grams[piece])
    return grams


def _pieces(x: Tensor, size: int = 1) -> Iterator[slice]:
    """Yield slices of the leading axis, one per piece; a number takes as much memory as `size` float32s."""
    at_once = _at_once(x, len(x), size * x[0].numel())
    for start in range(0, len(x), at_once):
        yield slice(start, start + at_once)


def _pieces_with_buffer(x: Tensor, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the slices of `_pieces`, each with a buffer of its shape; all buffers share their memory."""
    pieces = list(_pieces(x, 2 if dtype == torch.float64 else 1))
    buffer = torch.empty_like(x[pieces[0]], dtype=dtype)
    for piece in pieces:
        yield piece, buffer[: len(x[piece])]


class LinearRule(LayerRule):
    """y = x Wᵀ + b over any number of positions."""

    has_matrix = True

    def vectors(
        self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int, statistics: tuple[Tensor, ...] = ()
    ) -> PerGroup:
        assert isinstance(module, nn.Linear)
        if module.bias is not None:
            yield module.bias, _rows(grad.float(), num_groups, grad.shape[-1]).sum(1)

    def per_group(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        x, grad = (_rows(t, num_groups, t.shape[-1]) for t in _as_multiplied(x, grad))
        return products_over_rows(grad, x)

    def ghost_norm_flops(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> float:
        length = x.shape[:-1].numel() / num_groups
        return 2 * length**2 * (x.shape[-1] + grad.shape[-1])

    def ghost_norms(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> GhostNorms:
        x, grad = (_rows(t, num_groups, t.shape[-1]) for t in (x, grad))
        return _norms(_gram(x), _gram(grad))

    def total(self, module: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        return grad.double().flatten(0, -2).T @ x.double().flatten(0, -2)


class Conv2dRule(LayerRule):
    """Convolution of any stride, padding, dilation and number of blocks (`groups` of the layer).

    All images are channels-last: an input's patches are then runs of kernel width × channels, copied
    directly into the matrix whose product with the output gradient is the weight gradient.

    Convolutions of lines and transposed convolutions are computed as a Conv2d (`_as_conv2d`).
    """

    has_matrix = True

    def unsupported_reason(self, module: nn.Module) -> str:
        assert isinstance(module, _ConvNd)
        fits = all(extra < step for extra, step in zip(module.output_padding, module.stride, strict=True))
        return "" if fits else "output_padding is not smaller than the stride"

    def vectors(
        self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int, statistics: tuple[Tensor, ...] = ()
    ) -> PerGroup:
        assert isinstance(module, _ConvNd)
        if module.bias is not None:
            yield module.bias, _channels_last(_as_images(grad.float(), module), num_groups).sum(1)

    def per_group(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        assert isinstance(module, _ConvNd)
        gradients = self._per_group(*_as_conv2d(module, x, grad), num_groups)
        return gradients.view(num_groups, *module.weight.shape)

    def _per_group(self, module: nn.Conv2d, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        """Compute `per_group` of a Conv2d in the way that is fastest for these shapes."""
        blocks, rows = module.groups, len(x) // num_groups
        out_channels, in_channels, height, width = module.weight.shape
        positions = rows * grad.shape[2:].numel()
        numbers = positions * height * width * x.shape[1]
        if x.device.type != "cpu":
            return self._in_runs(module, x, grad, num_groups)
        if _pays_one_by_one(module.weight, numbers, positions):
            return self._one_by_one(module, x, grad, num_groups)
        x, grad = x.float(), _channels_last(grad.float(), num_groups)
        at_once = _at_once(x, num_groups, numbers)
        buffer = x.new_empty(at_once * numbers)
        if blocks == 1 and width * in_channels < SHORT_RUN:
            return self._tap_by_tap(module, x, grad, buffer)
        result = x.new_empty(num_groups * blocks, out_channels // blocks, height * width * in_channels)
        for start in range(0, num_groups, at_once):
            stop = min(start + at_once, num_groups)
            patches = _copy_into(_patches(module, x[start * rows : stop * rows]), buffer)
            patches = _by_block(patches.view(stop - start, -1, height * width, x.shape[1]), blocks)
            outputs = _by_block(grad[start:stop].unsqueeze(2), blocks)
            products_over_rows(outputs, patches, out=result[start * blocks : stop * blocks])
        return result.view(num_groups, out_channels, height, width, in_channels).permute(0, 1, 4, 2, 3)

    def _in_runs(self, module: nn.Conv2d, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        """Compute `per_group` on a GPU, by products over runs of rows that are then summed by group."""
        blocks, rows = module.groups, len(x) // num_groups
        out_channels, in_channels, height, width = module.weight.shape
        x, grad = _as_multiplied(x, grad)
        positions = grad.shape[2:].numel()
        rows_at_once = _run_of_rows(rows, positions)
        num_runs = len(x) // rows_at_once
        numbers = rows_at_once * positions * height * width * x.shape[1]
        outputs = _by_block(_channels_last(grad, num_runs).unsqueeze(2), blocks)
        patches = _patches(module, x)
        at_once = _at_once(x, num_runs, numbers)
        buffer, run_products = x.new_empty(at_once * numbers), []
        for start in range(0, num_runs, at_once):
            stop = min(start + at_once, num_runs)
            some = _copy_into(patches[start * rows_at_once : stop * rows_at_once], buffer)
            some = _by_block(some.view(stop - start, -1, height * width, x.shape[1]), blocks)
            run_products.append(products_over_rows(outputs[start * blocks : stop * blocks], some))
        of_runs = run_products[0] if len(run_products) == 1 else torch.cat(run_products)
        if num_runs > num_groups:
            of_runs = of_runs.view(num_groups, -1, blocks, *of_runs.shape[1:]).sum(1)
        return of_runs.reshape(num_groups, out_channels, height, width, in_channels).permute(0, 1, 4, 2, 3)

    def _tap_by_tap(self, module: nn.Conv2d, x: Tensor, grad: Tensor, buffer: Tensor) -> Tensor:
        """Compute `per_group` from the output gradient `[groups, M, channels]`; `buffer` holds patches."""
        num_groups, length, out_channels = grad.shape
        taps = module.weight[0].permute(1, 2, 0)
        rows, numbers = len(x) // num_groups, length * taps.numel()
        at_once = len(buffer) // numbers
        result = x.new_empty(num_groups, taps.numel(), out_channels)
        for start in range(0, num_groups, at_once):
            stop = min(start + at_once, num_groups)
            patches = _patches(module, x[start * rows : stop * rows]).unflatten(0, (-1, rows))
            patches = _copy_into(patches.permute(0, 4, 5, 6, 1, 2, 3), buffer).view(-1, taps.numel(), length)
            torch.bmm(patches, grad[start:stop], out=result[start:stop])
        return result.view(num_groups, *taps.shape, out_channels).permute(0, 4, 3, 1, 2)

    def _one_by_one(self, module: nn.Conv2d, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        """Compute `per_group` by one call of the convolution's own weight gradient per group."""
        x = x.float().contiguous(memory_format=torch.channels_last)
        grad = grad.float().contiguous(memory_format=torch.channels_last)
        out_channels, in_channels, height, width = module.weight.shape
        result = x.new_empty(num_groups, out_channels, height, width, in_channels).permute(0, 1, 4, 2, 3)
        for group, inputs, outputs in zip(result, x.chunk(num_groups), grad.chunk(num_groups), strict=True):
            group.copy_(_convolution_weight_gradient(module, inputs, outputs))
        return result

    def ghost_norm_flops(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> float:
        module, x, grad = _as_conv2d(module, x, grad)
        rows = len(x) // num_groups
        pixels, positions = rows * x.shape[2:].numel(), rows * grad.shape[2:].numel()
        taps = module.weight.shape[2:].numel()
        sums = (
            4 * taps * positions**2 * module.groups
        )  # additions, memory-bound: four times a product's flops
        return 2 * pixels**2 * x.shape[1] + 2 * positions**2 * grad.shape[1] + sums

    def ghost_norms(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> GhostNorms:
        """Sum slices of the pixels' Gram matrix over the kernel's taps, which gives that of the patches."""
        module, x, grad = _as_conv2d(module, x, grad)
        blocks, rows = module.groups, len(x) // num_groups
        height, width = grad.shape[2:]
        padded = _pad(module, x)
        pixels = _by_block(_channels_last(padded.double(), num_groups).unsqueeze(2), blocks)
        outputs = _by_block(_channels_last(grad.double(), num_groups).unsqueeze(2), blocks)
        sides = (rows, *padded.shape[2:])
        of_pixels = torch.bmm(pixels, pixels.transpose(1, 2)).view(-1, *sides, *sides)
        of_patches: Tensor | None = None
        for tap in range(module.weight.shape[2:].numel()):
            down, right = divmod(tap, module.weight.shape[3])
            v = _tap(down, module.stride[0], module.dilation[0], height)
            h = _tap(right, module.stride[1], module.dilation[1], width)
            part = of_pixels[:, :, v, h, :, v, h]
            of_patches = part.clone() if of_patches is None else of_patches.add_(part)
        assert of_patches is not None
        of_outputs = torch.bmm(outputs, outputs.transpose(1, 2))
        squares, magnitude_bound = _norms(of_patches.reshape(of_outputs.shape), of_outputs)
        return squares.view(num_groups, blocks).sum(1), magnitude_bound.view(num_groups, blocks).sum(1)

    def total(self, module: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        assert isinstance(module, _ConvNd)
        conv2d, x, grad = _as_conv2d(module, x, grad)
        blocks, channels = conv2d.groups, x.shape[1]
        out_channels, in_channels, height, width = conv2d.weight.shape
        shape = (blocks, out_channels // blocks, height * width * in_channels)
        total = torch.zeros(shape, dtype=torch.float64, device=x.device)
        at_once = max(1, EXACT_NUMBERS // (grad.shape[2:].numel() * height * width * channels))
        for some_x, some_grad in zip(x.split(at_once), grad.split(at_once), strict=True):
            patches = _patches(conv2d, some_x.double()).reshape(1, -1, height * width, channels)
            outputs = _channels_last(some_grad.double(), 1).unsqueeze(2)
            total.baddbmm_(_by_block(outputs, blocks).transpose(1, 2), _by_block(patches, blocks))
        of_weight = total.view(out_channels, height, width, in_channels).permute(0, 3, 1, 2)
        return of_weight.reshape(module.weight.shape)


def _as_images(x: Tensor, module: _ConvNd) -> Tensor:
    return x.unsqueeze(2) if module.weight.ndim == 3 else x


def _as_conv2d(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[nn.Conv2d, Tensor, Tensor]:
    """Return a Conv2d with the weight gradient of `module`, and this Conv2d's input and output gradient.

    A line is an image of height one. A transposed convolution is the adjoint of a Conv2d, C. Because
    ⟨Cᵀx, y⟩ = ⟨x, Cy⟩, its weight gradient is C's with input and output gradient exchanged.
    """
    if isinstance(module, nn.Conv2d):
        return module, x, grad
    assert isinstance(module, _ConvNd)
    x, grad = (_as_images(t, module) for t in ((grad, x) if module.transposed else (x, grad)))
    height: Any = (1,) * (4 - module.weight.ndim)
    padding: Any = module.padding
    conv2d = nn.Conv2d(
        x.shape[1],
        grad.shape[1],
        height + module.kernel_size,
        height + module.stride,
        padding if isinstance(padding, str) else (0,) * len(height) + padding,
        height + module.dilation,
        module.groups,
        bias=False,
        padding_mode=module.padding_mode,
        device="meta",  # draws no weights
    )
    conv2d.weight = nn.Parameter(_as_images(module.weight.detach(), module), requires_grad=False)
    return conv2d, x, grad


def _pays_one_by_one(weight: Tensor, numbers: int, positions: int) -> bool:
    """Return whether `_one_by_one` is faster, for a group's count of patch numbers and of positions."""
    if numbers >= max(MANY_NUMBERS, MANY_PATCHES * weight.numel()):
        return True
    few = MANY_POSITIONS_OF_AVX512 + POSITIONS_OF_A_CALL / weight.numel()
    return has_avx512() and weight.shape[1] > 1 and positions >= few


def _convolution_weight_gradient(module: nn.Conv2d, x: Tensor, grad: Tensor) -> Tensor:
    """Return PyTorch's weight gradient of a convolution, summed over the rows of `x`."""
    padding = module.padding
    # Only the shape of the weight is used.
    weight = torch.empty_like(module.weight, dtype=x.dtype, memory_format=torch.channels_last)
    if module.padding_mode != "zeros" or isinstance(padding, str):
        x, padding = _pad(module, x).contiguous(memory_format=torch.channels_last), (0, 0)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        None,
        module.stride,
        padding,
        module.dilation,
        False,
        (0, 0),
        module.groups,
        (False, True, False),
    )
    return gradients[1]


def _tap(offset: int, stride: int, dilation: int, length: int) -> slice:
    start = offset * dilation
    return slice(start, start + stride * (length - 1) + 1, stride)


def _pad(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the input with the layer's own padding."""
    padding = module._reversed_padding_repeated_twice
    if not any(padding):
        return x
    if module.padding_mode == "zeros":
        return F.pad(x, padding)
    return F.pad(x, padding, mode=module.padding_mode)


def _patches(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Return a strided view of all patches, `[rows, height, width, taps down, taps right, channels]`."""
    x = _pad(module, x).permute(0, 2, 3, 1).contiguous()
    rows, height, width, channels = x.shape
    taps, stride, dilation = module.kernel_size, module.stride, module.dilation
    down = (height - dilation[0] * (taps[0] - 1) - 1) // stride[0] + 1
    right = (width - dilation[1] * (taps[1] - 1) - 1) // stride[1] + 1
    pixel, line = channels, width * channels
    strides = (height * line, stride[0] * line, stride[1] * pixel, dilation[0] * line, dilation[1] * pixel, 1)
    return x.as_strided((rows, down, right, taps[0], taps[1], channels), strides)


def _at_once(x: Tensor, num_all: int, numbers: int) -> int:
    """Return how many of `num_all` rows or groups, each of `numbers` numbers, make a piece: at least one."""
    piece = CACHED_NUMBERS * torch.get_num_threads() if x.device.type == "cpu" else PIECE_NUMBERS
    return min(num_all, max(1, piece // max(1, numbers)))


def _copy_into(values: Tensor, buffer: Tensor) -> Tensor:
    """Return a contiguous copy in the first numbers of `buffer`."""
    copy = buffer[: values.numel()].view(values.shape)
    if values.device.type == "cuda" and _fits_wide_numbers(values):
        copy.view(_WIDE).copy_(_in_wide_numbers(values))  # several times as fast as number by number
        return copy
    return copy.copy_(values)


_WIDE, _WIDE_BYTES = torch.complex128, 16


def _fits_wide_numbers(values: Tensor) -> bool:
    counts = (*values.stride()[:-1], values.shape[-1], values.storage_offset())
    return values.stride(-1) == 1 and not any(each * values.element_size() % _WIDE_BYTES for each in counts)


def _in_wide_numbers(values: Tensor) -> Tensor:
    """Return strided numbers viewed as numbers of 16 bytes, if `_fits_wide_numbers`, in the same memory.

    >>> rows = torch.arange(16.0).view(2, 8)[:, 4:]
    >>> _in_wide_numbers(rows).contiguous().view(torch.float32)
    tensor([[ 4.,  5.,  6.,  7.],
            [12., 13., 14., 15.]])
    """
    per_number, size = _WIDE_BYTES // values.element_size(), values.untyped_storage().nbytes()
    whole = values.as_strided((size // _WIDE_BYTES * per_number,), (1,), 0).view(_WIDE)
    shape = (*values.shape[:-1], values.shape[-1] // per_number)
    strides = (*(stride // per_number for stride in values.stride()[:-1]), 1)
    return whole.as_strided(shape, strides, values.storage_offset() // per_number)


def _run_of_rows(rows: int, positions: int) -> int:
    """Return the number of rows summed at once: the largest divisor of `rows` within `POSITIONS_AT_ONCE`.

    >>> _run_of_rows(48, 1024), _run_of_rows(6, 1024), _run_of_rows(7, 2048), _run_of_rows(3, 50_000)
    (8, 6, 1, 1)
    """
    most = min(rows, max(1, POSITIONS_AT_ONCE // positions))
    return next(size for size in range(most, 0, -1) if rows % size == 0)


def _as_multiplied(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's input and output gradient in the precision in which their products are computed.

    On a GPU this is the precision in which the layer ran: the GPU has units for it, which sum in float32. No
    bound depends on that, because the norm is computed from the tensors that are summed.
    """
    if grad.device.type == "cuda" and grad.dtype in (torch.bfloat16, torch.float16):
        return x.to(grad.dtype), grad
    return x.float(), grad.float()


def _channels_last(x: Tensor, num_groups: int) -> Tensor:
    """Reshape `[rows, channels, height, width]` to `[groups, rows per group × height × width, channels]`."""
    return x.permute(0, 2, 3, 1).reshape(num_groups, -1, x.shape[1])


def _by_block(x: Tensor, blocks: int) -> Tensor:
    """Reshape `[groups, M, taps, channels]` to `[groups × blocks, M, taps × channels per block]`."""
    num_groups, length, taps, channels = x.shape
    if blocks == 1:
        return x.reshape(num_groups, length, taps * channels)
    split = x.reshape(num_groups, length, taps, blocks, channels // blocks).permute(0, 3, 1, 2, 4)
    return split.reshape(num_groups * blocks, length, -1)


class GroupNormRule(LayerRule):
    """Scale and shift after the normalisation of each row.

    Let g be the output's gradient, m the row's own mean and r its reciprocal standard deviation. The scale's
    gradient Σ g·(x − m)·r needs no normalised copy of x: it is r·(Σ g·x − m·Σ g). Both sums are computed
    once, and the input's gradient is computed from them, too (`_Normalisation`).
    """

    def runs(self, module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if type(module) is not nn.GroupNorm or not _returns_float32(x):
            return None
        products, sums = x.new_empty(2, *x.shape[:2], dtype=torch.float32)
        output, mean, scale = _Normalisation.apply(  # type: ignore[no-untyped-call]
            x, module.weight, module.bias, module.num_groups, module.eps, products, sums
        )
        return output, (mean, scale, products, sums)

    def vectors(
        self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int, statistics: tuple[Tensor, ...] = ()
    ) -> PerGroup:
        assert isinstance(module, nn.GroupNorm)
        if statistics:
            mean, scale, products, sums = statistics
            _add_up(x, grad, products, sums)
        if not module.affine:
            return
        if statistics:
            mean, scale = (_by_channel(t, module.num_channels) for t in (mean, scale))
            slope, shift = (products - mean * sums) * scale, sums
        else:
            grad, x = grad.float(), x.float()
            axes = tuple(range(2, grad.ndim))
            product = grad * F.group_norm(x, module.num_groups, eps=module.eps)
            slope, shift = (t.sum(axes) if axes else t for t in (product, grad))
        for parameter, per_row in ((module.weight, slope), (module.bias, shift)):
            yield parameter, _rows(per_row, num_groups, module.num_channels).sum(1)


class _Normalisation(torch.autograd.Function):
    """GroupNorm whose backward pass uses the Σ g·x and Σ g of each row and channel computed by `vectors`.

    This works because the hook of the output, which calls `vectors`, runs first. With γ the weight, g the
    output's gradient, n the count of numbers of a row's channel group and Σ over these numbers, the input's
    gradient is r·γ·g − r·(Σγg + x̂·Σγg·x̂)/n, where x̂ = (x − m)·r, m is the mean and r the reciprocal standard
    deviation (Wu and He 2018, by the chain rule).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        num_groups: int,
        eps: float,
        products: Tensor,
        sums: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not x.is_contiguous() and not _is_channels_last(x):
            x = x.contiguous()
        positions, channels = x.shape[2:].numel(), x.shape[1]
        is_slow = _is_channels_last(x) and positions < MANY_POSITIONS and channels < FEW_CHANNELS * num_groups
        if x.device.type != "cpu" or is_slow:  # PyTorch's GPU kernel needs contiguous float32 images
            # No use of the network's parameters and rows needs to be watched in here.
            with torch._C.DisableTorchFunction():
                output, mean, scale = _normalised(x, weight, bias, num_groups, eps)
        else:
            output, mean, scale = torch.native_group_norm(
                x, weight, bias, len(x), channels, positions, num_groups, eps
            )
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.row_sums = products, sums
        ctx.mark_non_differentiable(mean, scale)
        return output, mean, scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        products, sums = ctx.row_sums
        gamma = mean.new_ones(x.shape[1]) if weight is None else weight
        numbers = x[0].numel() // mean.shape[1]
        of_sums = (sums * gamma).unflatten(1, (mean.shape[1], -1)).sum(2)
        of_products = (products * gamma).unflatten(1, (mean.shape[1], -1)).sum(2)
        times_x = (of_sums * mean - of_products) * scale**3 / numbers
        constant = -times_x * mean - of_sums * scale / numbers
        times_x, constant, scale = (_by_channel(t, x.shape[1]) for t in (times_x, constant, scale))
        kernels = normalisation_kernels(x, mean.shape[1])
        if kernels is not None:
            grad = grad.contiguous(memory_format=torch.channels_last)
            return kernels.combined(x, grad, constant, times_x, scale * gamma), *(None,) * 6
        result = torch.empty_like(x, dtype=torch.float32)
        values, grads, results = (_lines(t, x) for t in (x, grad, result))
        of_x, of_one, of_grad = (_along_lines(t, x) for t in (times_x, constant, scale * gamma))
        for piece in _pieces(x):
            torch.addcmul(of_one[piece], values[piece], of_x[piece], out=results[piece])
            results[piece].addcmul_(grads[piece], of_grad[piece])
        return result, *(None,) * 6


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a GroupNorm's output, its means and its reciprocal deviations, `[rows, num_groups]` each.

    The output has the layout of `x`. The variance is computed from centred numbers: a difference of Σ x² and
    the squared mean would lose digits if the mean is large.
    """
    channels, numbers = x.shape[1], x[0].numel() // num_groups
    exact = torch.float32
    gamma = x.new_ones(channels, dtype=exact) if weight is None else weight
    beta = torch.zeros_like(gamma) if bias is None else bias
    kernels = normalisation_kernels(x, num_groups)
    if kernels is not None:
        normalised: tuple[Tensor, Tensor, Tensor] = kernels.normalised(x, gamma, beta, num_groups, eps)
        return normalised
    result = torch.empty_like(x, dtype=exact)
    mean, scale = x.new_empty(2, len(x), num_groups, dtype=exact)
    values, results, beta = _lines(x, x), _lines(result, x), _along_lines(beta[None], x)
    for piece, buffer in _pieces_with_buffer(values, exact):
        of_group = _sums(values[piece], x, dtype=exact).unflatten(1, (num_groups, -1))
        torch.sum(of_group, 2, out=mean[piece]).div_(numbers)
        of_channel = _along_lines(_by_channel(mean[piece], channels), x)
        centred = torch.sub(values[piece], of_channel, out=results[piece])
        squares = torch.mul(centred, centred, out=buffer)
        variance = _sums(squares, x).unflatten(1, (num_groups, -1)).sum(2).div_(numbers)
        torch.rsqrt(variance.add_(eps), out=scale[piece])
        of_channel = _along_lines(_by_channel(scale[piece], channels) * gamma, x)
        torch.addcmul(beta, centred, of_channel, out=results[piece])
    return result, mean, scale


def _add_up(x: Tensor, grad: Tensor, products: Tensor, sums: Tensor) -> None:
    """Write the sums of grad·x and of grad over each row's positions, `[rows, channels]` each."""
    kernels = normalisation_kernels(x, 1)
    if kernels is not None:
        kernels.add_up(x, grad.contiguous(memory_format=torch.channels_last), products, sums)
        return
    values, grads = _lines(x, x), _lines(grad, x)
    for piece, buffer in _pieces_with_buffer(values, torch.float32):
        product = torch.mul(grads[piece], values[piece], out=buffer)
        _sums(product, x, out=products[piece])
        _sums(grads[piece], x, out=sums[piece])


def _lines(values: Tensor, like: Tensor) -> Tensor:
    """Return `[rows, channels, *]` as `[rows, lines, numbers]`, in the order of the memory of `like`.

    A line is a channel, or, for channels-last memory, a position, or, with few channels, an image's line.
    """
    if not _is_channels_last(like):
        return values.reshape(*values.shape[:2], -1)
    values = values.permute(0, 2, 3, 1)
    return values.flatten(2) if like.shape[1] < SHORT_LINE else values.flatten(1, 2)


def _along_lines(of_channels: Tensor, like: Tensor) -> Tensor:
    """Return `[rows, channels]` in a shape that broadcasts against `_lines` of `like`."""
    if not _is_channels_last(like):
        return of_channels[:, :, None]
    if like.shape[1] < SHORT_LINE:
        return of_channels.repeat(1, like.shape[3])[:, None]
    return of_channels[:, None]


def _sums(lines: Tensor, like: Tensor, **options: Any) -> Tensor:
    """Return `_lines` of `like` summed over positions, `[rows, channels]`; `options` are `torch.sum`'s."""
    if not _is_channels_last(like):
        return torch.sum(lines, 2, **options)
    return torch.sum(lines.reshape(len(lines), -1, like.shape[1]), 1, **options)


def _by_channel(of_groups: Tensor, num_channels: int) -> Tensor:
    """Repeat values of channel groups, `[rows, num_groups]`, for each of their channels."""
    rows, num_groups = of_groups.shape
    return of_groups[:, :, None].expand(-1, -1, num_channels // num_groups).reshape(rows, -1)


def _returns_float32(x: Tensor) -> bool:
    """Return whether a normalisation of `x` computes and returns float32, as on a GPU under autocast, too."""
    if torch.is_autocast_enabled(x.device.type):
        return x.device.type == "cuda" and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.dtype == torch.float32


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


class LayerNormRule(LayerRule):
    """Scale and shift after the normalisation of each position, whose statistics the forward pass keeps.

    RMSNorm is a LayerNorm without mean and shift.
    """

    def runs(self, module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if type(module) is not nn.LayerNorm or not _returns_float32(x):
            return None
        output, *statistics = torch.native_layer_norm(
            x.float(), module.normalized_shape, module.weight, module.bias, module.eps
        )
        return output, tuple(each.detach() for each in statistics)

    def vectors(
        self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int, statistics: tuple[Tensor, ...] = ()
    ) -> PerGroup:
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        if not module.elementwise_affine:
            return
        normalise: Callable[..., Tensor] = F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
        numbers = module.weight.numel()
        x, grad = _rows(x, num_groups, numbers), _rows(grad.float(), num_groups, numbers)
        slopes = grad.new_empty(num_groups, numbers)
        pieces = list(_pieces(x))
        if statistics:
            mean, scale = (_rows(statistic, num_groups, 1) for statistic in statistics)
            buffer = torch.empty_like(x[pieces[0]], dtype=torch.float32)
        for piece in pieces:
            if statistics:
                normal = torch.sub(x[piece], mean[piece], out=buffer[: len(x[piece])]).mul_(scale[piece])
            else:
                normal = normalise(x[piece].float(), (numbers,), eps=module.eps)
            torch.sum(normal.mul_(grad[piece]), 1, out=slopes[piece])
        yield module.weight, slopes.view(num_groups, *module.weight.shape)
        if isinstance(module, nn.LayerNorm) and module.bias is not None:
            yield module.bias, grad.sum(1).view(num_groups, *module.bias.shape)


class EmbeddingRule(LayerRule):
    """A table looked up by index: the inner product of two one-hot inputs is 1 if their indices are equal."""

    has_matrix = True

    def unsupported_reason(self, module: nn.Module) -> str:
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm changes the table in a forward pass"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq counts the other records' indices"
        return "sparse gradients" if module.sparse else ""

    def _mask_padding(self, module: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        if module.padding_idx is None:
            return grad
        return torch.where((x != module.padding_idx)[..., None], grad, 0.0)

    def per_group(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> Tensor:
        assert isinstance(module, nn.Embedding)
        size, width = module.weight.shape
        first = torch.arange(num_groups, device=x.device)[:, None] * size
        rows = (x.reshape(num_groups, -1) + first).flatten()
        table = grad.new_zeros(num_groups * size, width, dtype=torch.float32)
        table.index_add_(0, rows, self._mask_padding(module, x, grad).float().reshape(-1, width))
        return table.view(num_groups, size, width)

    def ghost_norm_flops(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> float:
        length = x.numel() / num_groups
        return 2 * length**2 * grad.shape[-1]

    def ghost_norms(self, module: nn.Module, x: Tensor, grad: Tensor, num_groups: int) -> GhostNorms:
        index = x.reshape(num_groups, -1)
        outputs = _rows(self._mask_padding(module, x, grad), num_groups, grad.shape[-1])
        same = index[:, :, None] == index[:, None, :]  # inner products of one-hot inputs
        return _norms(same.double(), _gram(outputs))

    def total(self, module: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        assert isinstance(module, nn.Embedding)
        table = torch.zeros_like(module.weight, dtype=torch.float64)
        masked_grad = self._mask_padding(module, x, grad).double().reshape(-1, grad.shape[-1])
        return table.index_add_(0, x.flatten(), masked_grad)


_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: LinearRule(),
    nn.Conv2d: Conv2dRule(),
    nn.Conv1d: Conv2dRule(),
    nn.ConvTranspose1d: Conv2dRule(),
    nn.ConvTranspose2d: Conv2dRule(),
    nn.GroupNorm: GroupNormRule(),
    nn.LayerNorm: LayerNormRule(),
    nn.RMSNorm: LayerNormRule(),
    nn.Embedding: EmbeddingRule(),
}


def rule_of(module: nn.Module) -> LayerRule | None:
    """Return a module's layer rule; None unless it is of a known class and runs that class's `forward`."""
    for kind, rule in _RULES.items():
        if (
            isinstance(module, kind)
            and type(module).forward is kind.forward
            and "forward" not in vars(module)
        ):
            return rule
    return None
