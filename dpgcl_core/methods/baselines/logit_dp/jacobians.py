"""Jacobians of many rows' embeddings at once, layer by layer, for the pair norms of Logit-DP.

One forward pass of all rows, then one backward pass per cotangent: the network mixes no records, so giving
every row its own cotangent brings every row's gradients, at the price of an ordinary backward pass without
weight gradients. Hooks record each layer's calls; its output gradients go to the module `layers` as they
arrive.

*Fewer passes.* If everything up to some layer (the *neck*) reaches the embedding only through that layer's
input x, row i's cotangents at x are the rows of a d × width matrix H_i, of rank r_i < d after any ReLU that
is off for some units. Only r_i cotangents then go on through the front of the network, which is most of the
work: the leading eigenvectors of H_i H_iᵀ. See docs/theory/logit-dp.md.

*A row's Jacobian is its own.* Behind the neck all d axes go in one pass: d is public. In front of it every
cotangent is a pass of its own, so that no shape follows how many of them other rows need. A row takes part in
its own r_i passes; what later passes bring, which only others need, is masked before anything is computed of
it. So at one place of a pass of one shape, no bit of a row's tensors follows the other rows. An unsupported
use of a parameter raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpgcl_core.clipping.clipper import flat_gradient
from dpgcl_core.clipping.direct_uses import DirectUses, NotSeparableError
from dpgcl_core.clipping.types import Embed
from dpgcl_core.methods.baselines.logit_dp.layers import Part, Share, has_parts, of_output, parts_of

_LEFT_OUT = 2e-14  # share of a row's squared cotangents that may be dropped: their float32 rounding


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Embeddings and Jacobians of some rows, parameter by parameter.

    Attributes:
      z: `[rows, dim]`.
      shares: one for every parameter in use; those that have a basis have the same one.
      magnitude_bound: float64 `[rows]`: √(Σ ‖a‖²‖b‖²) over the layers. By Cauchy and Schwarz the terms
        Σ_m ‖a_m‖‖b_m‖ of the gradients are no larger, along any unit combination of axes.
    """

    z: Tensor
    shares: Sequence[Share]
    magnitude_bound: Tensor

    def at(self, chosen: slice | Tensor) -> Rows:
        """Return these rows."""
        shares = [share.rows(chosen) for share in self.shares]
        return Rows(z=self.z[chosen], shares=shares, magnitude_bound=self.magnitude_bound[chosen])

    @property
    def num_numbers(self) -> int:
        """Numbers that the shares hold."""
        return sum(share.values.numel() + share.part.a.numel() for share in self.shares)


def row_by_row(parameters: Sequence[nn.Parameter], embed: Embed, inputs: Tensor) -> Rows:
    """Return the Jacobians of all rows by one backward pass per row and axis: exact for any network."""
    embeddings, jacobians = [], []
    for index in range(inputs.shape[1]):
        with torch.enable_grad():
            z = embed(inputs[:, index : index + 1])[0, 0]
        jacobians += [_jacobian(view, parameters) for view in z]
        embeddings.append(z.detach())
    jacobian = torch.stack(jacobians)
    ones = torch.ones(len(jacobian), 1, 1, 1, device=jacobian.device)
    values = torch.split(jacobian, [p.numel() for p in parameters], dim=2)
    shares = [
        Share(part=Part(parameter=p, a=ones), formed=True, values=v)
        for p, v in zip(parameters, values, strict=True)
    ]
    magnitude_bound = torch.linalg.vector_norm(jacobian.double(), dim=(1, 2))
    return Rows(z=torch.cat(embeddings), shares=shares, magnitude_bound=magnitude_bound)


def _jacobian(z: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the Jacobian `[dim, num_parameters]` of one embedding."""
    if not z.requires_grad:
        return torch.zeros(len(z), sum(p.numel() for p in parameters), device=z.device)
    return torch.stack(
        [
            flat_gradient(
                list(torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True)), parameters
            )
            for x in z
        ]
    )


@dataclass
class _Call:
    """One use of a layer in the forward pass."""

    module: nn.Module
    x: Tensor
    output: Tensor
    versions: tuple[int, int]


@dataclass
class _Recording:
    """The layers' calls of one forward pass, in order."""

    calls: list[_Call] = field(default_factory=list)
    uses: Counter[Tensor] = field(default_factory=Counter)


@contextmanager
def _recording(
    model: nn.Module, parameters: Sequence[nn.Parameter], num_rows: int, views: int
) -> Iterator[_Recording]:
    """Record every layer's calls; parameters require no gradient meanwhile, and other uses raise."""
    recording, wanted = _Recording(), set(parameters)
    names = {p: name for name, p in model.named_parameters() if p in wanted}
    direct = DirectUses(names, num_rows // views, frozenset([num_rows]))

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        direct.leave()
        if len(args) != 1 or not args[0].ndim or not len(args[0]) == len(output) == num_rows:
            raise NotSeparableError("the leading axis of a layer is not that of the inputs")
        if output.dtype != torch.float32:
            raise NotSeparableError("a layer does not run in float32")
        if not output.requires_grad:
            output.requires_grad_()
        recording.calls.append(_Call(module, args[0], output, (args[0]._version, output._version)))
        recording.uses.update(p for p in module.parameters(recurse=False) if p in wanted)

    layers = [m for m in model.modules() if any(p in wanted for p in m.parameters(recurse=False))]
    handles = [m.register_forward_hook(remember) for m in layers if has_parts(m)]
    handles += [m.register_forward_pre_hook(direct.enter) for m in layers if has_parts(m)]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad(), direct:
            yield recording
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()
    if direct.used or any(count > 1 for count in recording.uses.values()):
        direct.forget()
        raise NotSeparableError("a parameter is used outside its layer, or more than once")


def _watched(
    model: nn.Module, parameters: Sequence[nn.Parameter], embed: Embed, inputs: Tensor
) -> tuple[Tensor, list[_Call]]:
    """Return the embeddings `[rows, dim]` with their graph, and the layers' calls.

    Raises:
      NotSeparableError: a parameter is used in a way that is not supported.
    """
    views = inputs.shape[2]
    with _recording(model, parameters, inputs.shape[1] * views, views) as recording:
        z = embed(inputs).flatten(0, 2)
    for call in recording.calls:
        if (call.x._version, call.output._version) != call.versions:
            raise NotSeparableError("a layer's input or output was changed in place")
    return z, recording.calls


def _axes(z: Tensor) -> Tensor:
    """Return every row's cotangents along the axes of the embedding, `[dim, rows, dim]`."""
    return torch.eye(z.shape[1], device=z.device)[:, None].expand(-1, len(z), -1)


def ranks(
    model: nn.Module, parameters: Sequence[nn.Parameter], embed: Embed, inputs: Tensor
) -> Tensor | None:
    """Return how many cotangents of each row pass the neck, `[rows]`; None where the network has none.

    Rows are only sorted by it: `_narrowed` decides, and differs where a matrix is nearly of lower rank.

    Raises:
      NotSeparableError: a parameter is used in a way that is not supported.
    """
    z, calls = _watched(model, parameters, embed, inputs)
    neck = _neck(z, calls)
    return _rank(_pull(z, [], _axes(z), calls[neck].x)) if neck else None


def by_layer(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    embed: Embed,
    inputs: Tensor,
    partners: int,
    cotangents: Tensor | None = None,
) -> Rows:
    """Return the Jacobians of all rows by one backward pass per cotangent.

    Args:
      model, parameters, embed: the network.
      inputs: `[1, records, views, ...]`.
      partners: how many rows of the other tower each row meets in cross terms.
      cotangents: `[k, rows, dim]`, along which the shares hold gradients; None for the embedding's axes.

    Raises:
      NotSeparableError: a parameter is used in a way that is not supported.
    """
    z, calls = _watched(model, parameters, embed, inputs)
    magnitude_bound = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    if not calls:
        return Rows(z=z.detach(), shares=[], magnitude_bound=magnitude_bound)
    cotangents = _axes(z) if cotangents is None else cotangents
    wanted, num = set(parameters), len(cotangents)
    neck = _neck(z, calls)
    early, late = (
        [_Layer(call, wanted, num, partners) for call in some] for some in (calls[:neck], calls[neck:])
    )
    # From the embedding back to the neck, along all cotangents; the layers behind it take their gradients.
    at_neck = _pull(z, late, cotangents, calls[neck].x if early else None)
    basis = None
    if early:
        # From the neck to the input, along a basis of what arrived there; `basis` translates back to axes.
        basis, narrowed, own = _narrowed(at_neck)
        _pull(calls[neck].x, early, narrowed, None, own)
    for layer in (*early, *late):  # squares add up over layers; the root is taken at the end
        magnitude_bound += layer.magnitude_bound_squared()
    shares = [share for layer in early for share in layer.shares(basis)]
    shares += [share for layer in late for share in layer.shares(None)]
    return Rows(z=z.detach(), shares=shares, magnitude_bound=magnitude_bound.sqrt())


class _Layer:
    """Collects one layer's output gradients, one cotangent after another."""

    def __init__(self, call: _Call, wanted: set[nn.Parameter], dim: int, partners: int) -> None:
        self._module, self.output = call.module, call.output
        self._dim, self._partners = dim, partners  # not the rank: all passes must choose alike
        with torch.no_grad():
            self._parts = parts_of(call.module, call.x.detach(), wanted)
        self._formed: dict[Tensor, Tensor] = {}
        self._kept: Tensor | None = None
        self._squares = torch.zeros(len(call.x), device=call.output.device)

    def take(self, gradient: Tensor, index: int, num: int, others: Tensor | None) -> None:
        """Take the gradient along cotangent `index` of `num`, but for `others`, rows that do not own it."""
        b = of_output(self._module, gradient)
        squares = torch.linalg.vector_norm(b, dim=(1, 2)).square()
        if others is not None and bool((others & (squares != 0)).any()):
            # A cotangent of zero was not enough: 0·inf is not 0.
            b, squares = torch.where(others[:, None, None], 0.0, b), torch.where(others, 0.0, squares)
        self._squares += squares
        for part in self._parts:
            if part.is_explicit(b, self._dim, self._partners):
                formed = part.gradient(b)
                if index == 0:
                    self._formed[part.parameter] = formed.new_empty(len(b), num, formed.shape[1])
                self._formed[part.parameter][:, index] = formed
            else:
                if self._kept is None:
                    self._kept = b.new_empty(len(b), num, *b.shape[1:])
                self._kept[:, index] = b

    def magnitude_bound_squared(self) -> Tensor:
        """Return Σ ‖a‖²‖b‖² over the layer's parameters, float64 `[rows]`."""
        total = torch.zeros_like(self._squares, dtype=torch.float64)
        for part in self._parts:
            total += part.squares() * self._squares.double()
        return total

    def shares(self, basis: Tensor | None) -> Iterator[Share]:
        """Yield the parameters' shares after the last cotangent."""
        for part in self._parts:
            formed = self._formed.get(part.parameter)
            values = self._kept if formed is None else formed
            if values is not None:
                yield Share(part=part, formed=formed is not None, values=values, basis=basis)


def _pull(
    of: Tensor, layers: Sequence[_Layer], cotangents: Tensor, also: Tensor | None, own: Tensor | None = None
) -> Tensor:
    """Pass the gradients of `of` along cotangents `[k, rows, width]` to the layers.

    Args:
      of, layers, cotangents, also: as above.
      own: bool `[k, rows]`, which of the cotangents are a row's own; None: all.

    Returns:
      The gradients at `also`, `[rows, k, width]`; `of` itself, unused, where `also` is None.
    """
    wanted = [layer.output for layer in layers] + ([] if also is None else [also])
    others: Sequence[Tensor | None] = [None] * len(cotangents)
    if own is not None:
        others = [None if bool(mine.all()) else ~mine for mine in own]
    at_also = []
    for index, found in enumerate(_gradients(of, wanted, cotangents, together=also is not None)):
        with torch.no_grad():
            for layer, gradient in zip(layers, found, strict=False):
                if gradient is not None:
                    layer.take(gradient, index, len(cotangents), others[index])
        at_also.append(found[-1])  # None where a cotangent does not depend on it
    return (
        of if also is None else torch.stack([torch.zeros_like(also) if g is None else g for g in at_also], 1)
    )


def _gradients(
    of: Tensor, wanted: Sequence[Tensor], cotangents: Tensor, *, together: bool
) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients at `wanted` for one cotangent after another, found `together` or pass by pass."""
    if together:
        found = torch.autograd.grad(
            of, wanted, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        yield from zip(*(len(cotangents) * [None] if g is None else g for g in found), strict=True)
    else:
        for cotangent in cotangents:
            yield torch.autograd.grad(of, wanted, cotangent, retain_graph=True, allow_unused=True)


def _neck(z: Tensor, calls: Sequence[_Call]) -> int:
    """Return the first layer whose input `[rows, width]` cuts the network in two; 0 if there is none."""
    for index, call in enumerate(calls):
        if index and call.x.ndim == 2 and call.x.grad_fn is not None:
            return index if _is_cut(z, call.x, [c.output for c in calls[:index]]) else 0
    return 0


def _is_cut(z: Tensor, x: Tensor, before: Sequence[Tensor]) -> bool:
    """Return whether the backward pass from `z` reaches the tensors `before` only through `x`."""
    alive = [tensor.grad_fn for tensor in before] + [x.grad_fn]  # an id is unique only while its node lives
    hidden = {id(tensor) for tensor in before} | {id(node) for node in alive[:-1]} - {id(None)}
    seen, nodes = {id(None), id(x.grad_fn)}, [z.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        if id(node) in hidden or id(getattr(node, "variable", node)) in hidden:
            return False
        seen.add(id(node))
        alive.append(node)
        nodes += [following for following, _ in node.next_functions]
    return True


def _products(gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, float64 `[rows, k, width]`, zero where not finite, h hᵀ, and which rows are finite."""
    finite = torch.isfinite(torch.linalg.vector_norm(gradients, dim=(1, 2)))
    if not bool(finite.all()):
        gradients = torch.where(finite[:, None, None], gradients, 0.0)
    h = gradients.double()
    return h, h @ h.transpose(1, 2), finite


def _rank(gradients: Tensor) -> Tensor:
    """Return the ranks of matrices `[rows, k, width]`: how many of a row's vectors are new directions.

    A pivot of Cholesky's factor is a vector's distance to those before it: ten times as fast as
    eigenvalues, and good enough to sort by.
    """
    _, products, _ = _products(gradients)
    square = products.diagonal(dim1=1, dim2=2).sum(1)
    # A little is added to be positive definite; combinations of earlier vectors keep some multiple of it.
    tiny = torch.finfo(products.dtype).tiny  # for matrices of zeros
    products.diagonal(dim1=1, dim2=2).add_(1e-13 * square[:, None] + tiny)
    factor, _ = torch.linalg.cholesky_ex(products)
    pivots: Tensor = factor.diagonal(dim1=1, dim2=2).square()
    return (pivots > 1e-9 * square[:, None] + 2 * tiny).sum(1)


def _narrowed(gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Narrow every row's cotangents to its own rank; later ones are zero, and not its own.

    The basis of a row that is not finite is nan, which masks the row later, by its own gradients alone.

    Returns:
      A basis `[rows, dim, k]`, the cotangents in it `[k, rows, width]`, which are a row's own `[k, rows]`.
    """
    h, products, finite = _products(gradients)
    values, vectors = torch.linalg.eigh(products)
    left_out = values.clamp_min(0).cumsum(1)  # ascending: squared length of the first ones
    num = (left_out > _LEFT_OUT * left_out[:, -1:]).sum(1)
    rank = max(1, int(num.max()))
    own = torch.arange(rank, device=num.device) < num[:, None]
    basis = torch.where(own[:, None], vectors.flip(2)[:, :, :rank], 0.0)
    cotangents = (basis.transpose(1, 2) @ h).float()
    basis = torch.where(finite[:, None, None], basis, torch.nan)
    return basis, cotangents.transpose(0, 1).contiguous(), own.T
